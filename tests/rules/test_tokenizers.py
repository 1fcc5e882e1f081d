"""Tokens that a tokenizer.json adds beyond the model's vocabulary, as Gemma 3's of text alone has one for images, are left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from acclimate_competitions.errors import Refusal
from acclimate_runners import models, packing

BEYOND = "<image_soft_token>"


def adding(folder: Path, *tokens: tuple[int, str]) -> Path:
    path = folder / "tokenizer.json"
    value = json.loads(path.read_text("utf-8"))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    value["added_tokens"] += [{"id": number, "content": content, **plain} for number, content in tokens]
    path.write_text(json.dumps(value), "utf-8")
    return path


def test_what_spells_such_a_token_is_read_as_any_text(tiny: Any, tmp_path: Path) -> None:
    folder, count = tiny.model(tmp_path / "model"), len(tiny.words)
    path = adding(folder, (1, "<bos>"), (count, BEYOND))
    assert models.inspect(folder, tiny.limits).architecture == "llama"
    texts = [f"a {BEYOND} b", f"{BEYOND}", "a <bos> b"]
    plain = packing.load_tokenizer(path)
    assert packing.tokens(plain, texts)[1] == [count]
    bounded = packing.load_tokenizer(path, vocabulary=count)
    a, b, unknown = (tiny.words.index(word) for word in ("a", "b", "<unk>"))
    assert packing.tokens(bounded, texts) == [[a, unknown, b], [unknown], [a, 1, b]]
    assert bounded.token_to_id(BEYOND) is None and bounded.token_to_id("<bos>") == 1


def test_the_job_of_a_round_reads_it_so(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import preparation

    adding(tiny.model(tmp_path / "model"), (len(tiny.words), BEYOND))
    job = tiny.job(tmp_path / "job", tmp_path / "model", "check", tokenizer=None)
    _, tokenizer = preparation.open_model(job, tmp_path / "job")
    assert tokenizer.token_to_id(BEYOND) is None


def test_a_vocabulary_beyond_the_model_s_is_refused_as_ever(tiny: Any, tmp_path: Path) -> None:
    folder, count = tiny.model(tmp_path / "model"), len(tiny.words)
    path = folder / "tokenizer.json"
    value = json.loads(path.read_text("utf-8"))
    value["model"]["vocab"]["further"] = count
    path.write_text(json.dumps(value), "utf-8")
    with pytest.raises(Refusal) as caught:
        models.inspect(folder, tiny.limits)
    assert f"token {count} is outside the model's vocabulary of {count}" in caught.value.problems[0]
