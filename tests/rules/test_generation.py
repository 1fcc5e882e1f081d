"""Kinds generate and perplexity: equal to lm-evaluation-harness and to one row at a time, whatever the batch, and taught as they are asked."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pyarrow as pa
import pytest

from acclimate_competitions import metrics, tables
from acclimate_competitions.errors import Refusal
from acclimate_competitions.tasks import Task
from acclimate_runners import jobs, packing

WRITE = Task("write", "generate", "{{ input }}", (), "exact_match", 0.0, stop=("e", "ab\n"), max_tokens=6)
READ = Task("read", "perplexity", "{{ input }}", (), "bits_per_byte", 8.0)


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    found = json.loads(harness.WRITTEN.read_text("utf-8"))
    assert found["source"]["lm_eval"] == "0.4.13"
    return found["models"]


@pytest.fixture(scope="module", params=harness.WRITERS)
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_model(tmp_path_factory.mktemp("harness") / request.param, request.param, eos_token_id=0)


def loaded(folder: Path, max_length: int, **limits: Any) -> Any:
    from acclimate_runners import computing, network

    rules = jobs.Limits((json.loads((folder / "config.json").read_text())["model_type"],), 10**6, 10**7, 2**31, 60)
    computing.be_deterministic(1)
    return network.load({path.name: path for path in folder.iterdir()}, rules, max_length=max_length)


def asked(folder: Path, task: Task, rows: list[dict[str, str]], *, max_length: int = harness.LENGTH) -> Any:
    from acclimate_runners import evaluation

    model, tokenizer = loaded(folder, max_length), packing.load_tokenizer(folder / "tokenizer.json")
    kind = {"generate": evaluation.Begun, "perplexity": evaluation.Texts}[task.kind]
    return kind(tokenizer, task, rows, model=model, max_length=max_length).answers(model)


def test_what_is_written_is_what_the_harness_writes(model: Path, theirs: dict[str, Any]) -> None:
    for name, task in harness.WRITING.items():
        found = asked(model, task, harness.begun()).texts
        assert found == theirs[model.name]["texts"][name], name
    assert len({text for texts in theirs[model.name]["texts"].values() for text in texts}) > 12


def test_whole_texts_have_the_log_likelihoods_of_the_harness(model: Path, theirs: dict[str, Any]) -> None:
    # What a model reads lacks the last token.
    found = asked(model, harness.READING, harness.texts(), max_length=harness.LENGTH + 1).loglikelihoods.to_pylist()
    expected = theirs[model.name]["rolling"]
    # The harness adds float32 numbers, of which those around 1,000 lie 6e-5 apart.
    np.testing.assert_allclose([value for (value,) in found], expected, atol=1e-4, rtol=1e-7)
    holdout = pa.Table.from_pylist(harness.texts())
    scored = metrics.score_perplexity(
        harness.READING, texts=holdout["input"].to_pylist(), loglikelihoods=[[value] for value in expected]
    )
    sizes = [len(row["input"].encode()) for row in harness.texts()]
    assert [score for score, _ in scored] == [-v / math.log(2) / n for v, n in zip(expected, sizes, strict=True)]


def letters(count: int) -> list[dict[str, str]]:
    stream = np.random.PCG64(5)
    draws = [[int(draw % np.uint64(6)) for draw in stream.random_raw(9)] for _ in range(count)]
    return [{"example": str(n), "input": " ".join("abcdef"[i] for i in d[: 1 + d[8]])} for n, d in enumerate(draws)]


def one_at_a_time(model: Any, tokenizer: Any, task: Task, prompts: list[list[int]]) -> list[str]:
    """The whole sequence read anew for each token, by itself."""
    import torch

    found = []
    for prompt in prompts:
        written: list[int] = []
        while len(written) < task.max_tokens:
            with torch.no_grad():
                logits = model.model(input_ids=torch.tensor([prompt + written])).logits[0, -1]
            written.append(int(logits.argmax()))
            text = tokenizer.decode(written)
            ends = [text.find(stop) for stop in task.stop if stop in text]
            if ends:
                break
        text = tokenizer.decode(written)
        found.append(text[: min((text.find(stop) for stop in task.stop if stop in text), default=len(text))])
    return found


# Every architecture that attends in a way of its own, with windows shorter than what is read.
_WINDOWS = {
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5},
    "phi3": {"sliding_window": 5},
}


@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        "gpt2",
        "gpt_neox",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "olmo2",
        "phi",
        "phi3",
        "falcon",
        "mamba",
        "falcon_mamba",
    ],
)
def test_any_architecture_writes_as_it_does_one_at_a_time(tiny: Any, tmp_path: Path, architecture: str) -> None:
    from acclimate_runners import generation

    folder = tiny.model(tmp_path / "model", architecture, **_WINDOWS.get(architecture, {}))
    tokenizer, rows = packing.load_tokenizer(folder / "tokenizer.json"), letters(14)
    model = loaded(folder, 16)
    prompts = packing.begun(tokenizer, WRITE, rows)
    found = generation.generate(model, tokenizer, WRITE, prompts)
    assert found == one_at_a_time(model, tokenizer, WRITE, prompts)
    assert len(set(found)) > 1, "nothing is shown where all texts are alike"


def test_neither_the_rows_order_nor_the_batches_change_a_text(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rows = tiny.model(tmp_path / "model"), letters(40)
    found = dict(zip([row["example"] for row in rows], asked(folder, WRITE, rows, max_length=16).texts, strict=True))
    turned = rows[::-1]
    assert asked(folder, WRITE, turned, max_length=16).texts == [found[row["example"]] for row in turned]
    read = dict(
        zip(
            [row["example"] for row in rows],
            asked(folder, READ, rows, max_length=6).loglikelihoods.to_pylist(),
            strict=True,
        )
    )
    assert asked(folder, READ, turned, max_length=6).loglikelihoods.to_pylist() == [
        read[row["example"]] for row in turned
    ]
    for budget in (15, 40, 200):
        monkeypatch.setattr(packing.batches, "__kwdefaults__", {"budget": budget})
        assert asked(folder, WRITE, rows, max_length=16).texts == list(found.values()), budget


def test_a_stop_string_may_span_tokens_and_the_first_one_counts() -> None:
    from acclimate_runners.generation import cut

    assert cut("one\n\ntwo", ("\n\n", "w")) == "one"
    assert cut("one two", ("\n", "tw", "e t")) == "on"
    assert cut("one", ("\n",)) == "one" and cut("", ("\n",)) == ""


def test_windows_are_those_of_the_harness() -> None:
    text = list(range(12))
    assert packing.windows(text, max_length=5) == [
        ([0], [1, 2, 3, 4]),
        ([4], [5, 6, 7, 8]),
        ([7, 8], [9, 10, 11]),
    ]
    assert packing.windows(text, max_length=12) == [([0], text[1:])] == packing.windows(text, max_length=99)
    # Each token once, and nothing longer than a sequence may be.
    for length in range(2, 14):
        parts = packing.windows(text, max_length=length)
        assert [token for _, read in parts for token in read] == text[1:]
        assert all(len(before) + len(read) <= length and before for before, read in parts)


def test_what_is_taught_is_the_target_and_the_first_stop_string(tmp_path: Path) -> None:
    harness.write_tokenizer(tmp_path / "tokenizer.json", beginning="not added")
    tokenizer = packing.load_tokenizer(tmp_path / "tokenizer.json")
    task = dataclasses.replace(WRITE, prompt="{{ input }}:", stop=("\n", "x"))
    rows = [{"input": "the", "target": "good one"}, {"input": "", "target": "schön"}]
    prompts, answers = packing.taught(tokenizer, task, rows)
    assert [tokenizer.decode(ids) for ids in answers] == ["good one\n", "schön\n"]
    assert prompts == packing.begun(tokenizer, task, rows) and prompts[0][0] == 0
    together = dataclasses.replace(task, tokenize="together")
    prompts, answers = packing.taught(tokenizer, together, rows)
    assert [tokenizer.decode(ids) for ids in answers] == ["good one\n", "schön\n"]
    assert prompts == packing.begun(tokenizer, together, rows)
    texts, read = packing.taught(tokenizer, READ, [{"input": "the cat"}], max_length=4)
    assert [tokenizer.decode(ids) for ids in read] == ["the c", "at"]
    assert texts[0] == [0] and len(texts[1]) == 2


def test_a_tokenizer_that_can_not_end_a_text_is_refused(tiny: Any) -> None:
    tokenizer = packing.load_tokenizer(tiny.tokenizer)
    task = dataclasses.replace(WRITE, stop=("\n",))
    with pytest.raises(Refusal, match=r"gives no token for '\\n', where a text of task write ends") as caught:
        packing.taught(tokenizer, task, [{"input": "a", "target": "b"}])
    assert caught.value.code == "model_invalid"


def test_without_a_beginning_whole_texts_and_empty_prompts_are_refused(tmp_path: Path) -> None:
    harness.write_tokenizer(tmp_path / "t.json", beginning="not added")
    text = (tmp_path / "t.json").read_text("utf-8").replace('"<s>"', '"<none>"')
    (tmp_path / "t.json").write_text(text, "utf-8")
    tokenizer = packing.load_tokenizer(tmp_path / "t.json")
    with pytest.raises(Refusal, match="no beginning-of-text token"):
        packing.taught(tokenizer, READ, [{"input": "a"}])
    for task in (WRITE, dataclasses.replace(WRITE, tokenize="together")):
        with pytest.raises(Refusal, match="a prompt of task write has no token"):
            packing.begun(tokenizer, task, [{"input": "a"}, {"input": ""}])


def test_a_model_whose_numbers_are_none_writes_nothing(tiny: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny.model(tmp_path / "model", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][9] = 3e38
    save_file(weights, folder / "model.safetensors")
    rows = letters(12)
    found = asked(folder, WRITE, rows, max_length=16).texts
    assert None in found
    scored = metrics.score_generate(WRITE, targets=["a"] * 12, texts=found)
    assert {reason for score, reason in scored if score is None} == {metrics.NO_TEXT}
    assert all(
        value is None or math.isfinite(value[0])
        for value in asked(folder, READ, rows, max_length=16).loglikelihoods.to_pylist()
    )


def test_a_round_s_job_writes_texts_and_reads_whole_ones(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import evaluation, preparation

    folder, model, rows = tmp_path / "job", tiny.model(tmp_path / "model"), letters(24)
    data = []
    for task in (WRITE, READ):
        paths = []
        for split, part in (("p", rows[:12]), ("v", rows[12:18]), ("h", rows[18:])):
            path = tmp_path / f"{task.name}-{split}.parquet"
            with_target = [
                row | {"target": row["input"][:1]} if task is WRITE and split != "h" else row for row in part
            ]
            tables.write(pa.Table.from_pylist(with_target), path)
            paths.append(tiny.put(folder, path))
        data.append(jobs.TaskData(dataclasses.replace(task, stop=("e",) if task is WRITE else ()), *paths))
    stages = tuple((task.name, 11) for task in (WRITE, READ))
    recipe = tiny.recipe(max_length=12)
    job = tiny.job(folder, model, "prepare", tasks=tuple(data), stages=stages, recipe=recipe)
    assert jobs.from_json(jobs.to_json(job)) == job
    done = preparation.prepare(job, folder, lambda *words: None)
    prepared = {f"{e['task']}/{e['seed']}": e["prepared"] for e in done.results["prepared"]}
    assert all(entry["losses"][-1] < entry["losses"][0] for entry in done.results["prepared"])
    for file in done.files:
        tiny.put(folder, folder / "out" / file)
    asked_ = tuple((task.name, 11, "prepared") for task in (WRITE, READ))
    more: dict[str, Any] = {
        "tasks": tuple(data),
        "stages": asked_,
        "recipe": recipe,
        "prepared": prepared,
        "entrant": "fox",
    }
    job = tiny.job(folder, model, "evaluate", **more)
    outcome = evaluation.evaluate(job, folder, lambda *words: None)
    texts, read = (tables.read(folder / "out" / e["file"], tables.PREDICTIONS) for e in outcome.results["predictions"])
    assert texts["text"].null_count == 0 and texts["loglikelihoods"].null_count == 6
    assert read["text"].null_count == 6 and [len(v) for v in read["loglikelihoods"].to_pylist()] == [1] * 6


def test_texts_end_where_they_have_their_bytes_and_a_table_of_them_can_be_read(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acclimate_competitions import bounds
    from acclimate_runners import generation

    assert generation.most_bytes(WRITE, 1) == generation.LEAST_BYTES
    long = dataclasses.replace(WRITE, max_tokens=160)
    assert generation.most_bytes(long, 1000) == 160 * generation.BYTES_A_TOKEN
    for rows in (1, 1000, 10**6, 10**7):
        assert rows * generation.most_bytes(long, rows) <= generation.TABLE_BYTES <= bounds.LEAST // 2
    assert [generation.shortened("a\u00e9b", most) for most in range(5)] == ["", "a", "a", "a\u00e9", "a\u00e9b"]
    folder = tiny.model(tmp_path / "model")
    tokenizer, rows = packing.load_tokenizer(folder / "tokenizer.json"), letters(6)
    task = dataclasses.replace(WRITE, stop=("~",))
    model, prompts = loaded(folder, 16), packing.begun(tokenizer, task, rows)
    whole = generation.generate(model, tokenizer, task, prompts)
    monkeypatch.setattr(generation, "LEAST_BYTES", 3)
    monkeypatch.setattr(generation, "BYTES_A_TOKEN", 0)
    short = generation.generate(model, tokenizer, task, prompts)
    assert short == [text and text[:3] for text in whole] != whole
