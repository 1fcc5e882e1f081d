"""Encoders as sequence classifiers: read strictly, their log-probabilities those of transformers' own forward, prepared to the same bytes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acclimate_competitions import tables
from acclimate_competitions.errors import Refusal
from acclimate_competitions.recipe import Lora, Selection
from acclimate_runners import adapter_files, encoders, jobs, models, packing, reading, tensors

ENCODERS = sorted(encoders.ENCODERS)
LABELS = ("more", "less", "no", "yes")


def encoder(tiny: Any, out: Path, architecture: str = "bert", *, labels: Any = ("more", "less"), **more: Any) -> Path:
    return tiny.model(out, architecture, id2label={str(n): label for n, label in enumerate(labels)}, **more)


def classify_job(tiny: Any, folder: Path, model: Path, kind: str, **more: Any) -> Any:
    """The tiny job whose tasks are of kind classify."""
    job = tiny.job(folder, model, kind, **more)
    return replace(job, tasks=tuple(replace(d, task=replace(d.task, kind="classify")) for d in job.tasks))


def edit(folder: Path, *drop: str, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text("utf-8")), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in drop}), "utf-8")


def refused(tiny: Any, folder: Path) -> str:
    with pytest.raises(Refusal) as caught:
        models.inspect(folder, tiny.limits)
    assert caught.value.code == "model_invalid"
    return "\n".join(caught.value.problems)


# What of an architecture's fields changes its tensors or numbers.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ENCODERS},
    "electra of one width": (
        "electra",
        {"embedding_size": 16, "summary_activation": "gelu", "summary_last_dropout": 0.1},
    ),
    "albert of groups": (
        "albert",
        {"num_hidden_groups": 2, "inner_group_num": 2, "num_hidden_layers": 5, "classifier_dropout_prob": 0.1},
    ),
    "albert of one width": ("albert", {"embedding_size": 16, "hidden_act": "gelu_new", "gap_size": 0}),
    "modernbert of the first token": (
        "modernbert",
        {
            "classifier_pooling": "cls",
            "layer_types": ["sliding_attention", "full_attention"],
            **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True),
            "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}},
        },
    ),
    "modernbert as it was published": (
        "modernbert",
        {
            "global_attn_every_n_layers": 2,
            "global_rope_theta": 5000.0,
            "local_rope_theta": 100.0,
            "position_embedding_type": "absolute",
            "layer_norm_eps": 1e-5,
            "cls_token_id": 1,
        },
    ),
    "deberta of version 2": (
        "deberta-v2",
        {
            "conv_kernel_size": 3,
            "conv_act": "gelu",
            "share_att_key": False,
            "position_biased_input": True,
            "type_vocab_size": 2,
            "attention_head_size": 8,
        },
    ),
    "deberta with distances of one kind": (
        "deberta-v2",
        {"pos_att_type": ["p2c"], "share_att_key": False, "position_buckets": -1, "norm_rel_ebd": "none"},
    ),
    "deberta with small embeddings": ("deberta-v2", {"embedding_size": 6, "pooler_hidden_act": "tanh"}),
    "deberta without distances": (
        "deberta-v2",
        {"relative_attention": False, "pos_att_type": None, "norm_rel_ebd": "none", "position_biased_input": True},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("max_length", [17, 200])
def test_tensors_and_log_probabilities_are_those_of_the_library(
    tiny: Any, tmp_path: Path, variant: str, max_length: int
) -> None:
    """Transformers' whole way, one row at a time, so that nothing is padded; 200 tokens take another attention."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from acclimate_runners import classifying, network

    architecture, changes = VARIANTS[variant]
    changes = {**changes, "max_position_embeddings": max_length - 1 + encoders.ENCODERS[architecture].first}
    folder = encoder(tiny, tmp_path / "model", architecture, labels=LABELS, **changes)
    theirs, told = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = network.load({path.name: path for path in folder.iterdir()}, tiny.limits, max_length=max_length)
    assert loaded.labels == LABELS and {name: tuple(t.shape) for name, t in loaded.weights.items()} == {
        name: tuple(t.shape) for name, t in theirs.named_parameters()
    }
    assert loaded.facts.parameters == sum(t.numel() for t in theirs.parameters())
    assert loaded.positions == max_length - 1
    task = replace(tiny.tasks[0], kind="classify", choices=("yes", "less", "more", "no"))
    # The submitted labels in the task's own order; none of the tokens is RoBERTa's padding.
    loaded.set_weights(classifying.begun(loaded, loaded.copy_weights(), task, seed=0))
    prompts = [[2, 3, 4, 5], [2, 6], [2, 3, 3, 7, 8, 9], [2 + n % 8 for n in range(max_length - 1)]]
    packed = packing.pack(prompts, [[0]] * len(prompts), max_length=max_length)
    found = network.last_logprobs(loaded, packed, np.tile(np.arange(4), (len(prompts), 1)))
    order = [LABELS.index(choice) for choice in task.choices]
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = theirs.eval()(torch.tensor([prompt])).logits[0].log_softmax(-1)
        torch.testing.assert_close(found[row].float(), expected[order], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found[0], found[1])


@pytest.mark.parametrize("architecture", ENCODERS)
def test_what_the_library_saves_is_accepted(tiny: Any, tmp_path: Path, architecture: str) -> None:
    from transformers import AutoModelForSequenceClassification

    folder, saved = encoder(tiny, tmp_path / "model", architecture), tmp_path / "saved"
    AutoModelForSequenceClassification.from_pretrained(folder).save_pretrained(saved)
    (saved / "tokenizer.json").write_bytes(tiny.tokenizer.read_bytes())
    assert models.inspect(saved, tiny.limits).parameters == models.inspect(folder, tiny.limits).parameters
    assert adapter_files.kind_of(reading.of_folder(saved)) == "hf-sequence-classifier"


@pytest.mark.parametrize(
    ("architecture", "changes", "part"),
    [
        ("bert", {"architectures": ["BertForMaskedLM"]}, "expected ['BertForSequenceClassification']"),
        ("bert", {"architectures": None}, "architectures is missing, expected ['BertForSequenceClassification']"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', expected one of absolute"),
        ("bert", {"is_decoder": True}, "is_decoder is True, expected one of False"),
        ("bert", {"num_attention_heads": 3}, "hidden_size 16 is not a multiple of num_attention_heads 3"),
        ("bert", {"id2label": {"0": "a", "1": "b", "2": "c"}}, "tensor 'classifier.bias' has shape [2], config.json asks for [3]"),
        ("roberta", {"pad_token_id": 0}, "pad_token_id is 0, expected one of 1"),
        ("xlm-roberta", {"pad_token_id": 0}, "pad_token_id is 0, expected one of 1"),
        ("xlm-roberta", {"architectures": ["RobertaForSequenceClassification"]}, "expected ['XLMRobertaForSequenceClassification']"),
        ("electra", {"embedding_size": 8}, "tensor 'electra.embeddings_project.weight' has shape [16, 6], config.json asks for [16, 8]"),
        ("electra", {"embedding_size": None}, "embedding_size is missing"),
        ("electra", {"embedding_size": 16}, "tensor 'electra.embeddings_project.bias' is not part of the model that config.json describes"),
        ("electra", {"architectures": ["ElectraForPreTraining"]}, "expected ['ElectraForSequenceClassification']"),
        ("albert", {"num_hidden_groups": 4}, "num_hidden_groups is 4, num_hidden_layers 3"),
        ("albert", {"inner_group_num": 2}, "tensor 'albert.encoder.albert_layer_groups.0.albert_layers.1.attention.query.weight' is missing"),
        ("albert", {"num_hidden_layers": 1024, "inner_group_num": 2}, "num_hidden_layers 1024 times inner_group_num 2 is more than 1024"),
        ("albert", {"num_hidden_groups": 0}, "num_hidden_groups is 0, expected a whole number from 1 to 1024"),
        ("albert", {"gap_size": 1}, "gap_size is 1, expected one of 0"),
        ("deberta-v2", {"position_buckets": 2**40}, "position_buckets is 1099511627776, expected a whole number from -1 to 4096"),
        ("deberta-v2", {"position_buckets": -2}, "position_buckets is -2, expected a whole number from -1 to 4096"),
        ("deberta-v2", {"position_buckets": 30}, "position_buckets is 30, which distances up to 16 can't be put into"),
        ("deberta-v2", {"position_buckets": 1}, "position_buckets is 1, which distances up to 16 can't be put into"),
        ("deberta-v2", {"position_buckets": -1}, "tensor 'deberta.encoder.rel_embeddings.weight' has shape [8, 16], config.json asks for [32, 16]"),
        ("deberta-v2", {"pos_att_type": "c2p|c2p"}, "pos_att_type is 'c2p|c2p', expected null, or some of c2p and p2c"),
        ("deberta-v2", {"pos_att_type": ["p2p"]}, "pos_att_type is ['p2p'], expected null, or some of c2p and p2c"),
        ("deberta-v2", {"pos_att_type": [["c2p"]]}, "pos_att_type is [['c2p']], expected null, or some of c2p and p2c"),
        ("deberta-v2", {"pos_att_type": None}, "relative_attention is true without a pos_att_type, or false with one"),
        ("deberta-v2", {"relative_attention": False}, "norm_rel_ebd is layer_norm, relative_attention false: there is nothing to norm"),
        ("deberta-v2", {"conv_kernel_size": 4}, "conv_kernel_size 4 is even, which changes a text's length"),
        ("deberta-v2", {"conv_kernel_size": 3, "conv_groups": 3}, "hidden_size 16 is not a multiple of conv_groups 3"),
        ("deberta-v2", {"conv_kernel_size": 3}, "tensor 'deberta.encoder.conv.conv.weight' is missing"),
        ("deberta-v2", {"attention_head_size": 64}, "attention_head_size is 64, the other fields make it 8"),
        ("deberta-v2", {"pooler_hidden_size": 8}, "pooler_hidden_size is 8, the other fields make it 16"),
        ("deberta-v2", {"embedding_size": 8}, "tensor 'deberta.embeddings.embed_proj.weight' is missing"),
        ("deberta-v2", {"z_steps": 2}, "z_steps is 2, expected one of 0"),
        ("modernbert", {"local_attention": -4}, "local_attention is -4, expected a whole number from 2 to 4194304"),
        ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling is 'max', expected one of cls, mean"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers is 2"),
        ("modernbert", {"norm_bias": True}, "tensor 'model.embeddings.norm.bias' is missing"),
        ("modernbert", {"num_attention_heads": 16}, "the width of a head is odd, which rotary positions can't have"),
        ("modernbert", {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, "has a partial_rotary_factor, which modernbert can't have"),
        ("modernbert", {"rope_parameters": {"full_attention": None}}, "rope_parameters is {'full_attention': None}, expected without null"),
        ("modernbert", {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers is 0, expected a whole number from 1 to 1024"),
        ("distilbert", {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds is True, expected one of False"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(
    tiny: Any, tmp_path: Path, architecture: str, changes: dict[str, Any], part: str
) -> None:
    folder = encoder(tiny, tmp_path / "model", architecture)
    edit(folder, *(name for name, value in changes.items() if value is None), **changes)
    assert part in refused(tiny, folder)


def test_a_text_keeps_its_frame_and_loses_tokens_at_its_left(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    shutil.copyfile(tiny.tokenizer, path)
    framed(path, first=tiny.words[2], last=tiny.words[3])
    tokenizer = packing.load_tokenizer(path)
    words = tiny.words[4:10]
    whole, short = packing.framed(tokenizer, [" ".join(words), words[0]], most=6)
    assert whole == [2, 6, 7, 8, 9, 3] and short == [2, 4, 3]
    with pytest.raises(Refusal, match="have no room beside what the tokenizer puts around a text"):
        packing.framed(tokenizer, ["a"], most=2)


def framed(path: Path, *, first: str, last: str) -> None:
    """Have a tokenizer put two tokens around each text, as BERT's does."""
    told = json.loads(path.read_text("utf-8"))
    numbers = told["model"]["vocab"]
    told["post_processor"] = {"type": "BertProcessing", "cls": [first, numbers[first]], "sep": [last, numbers[last]]}
    path.write_text(json.dumps(told), "utf-8")


@pytest.mark.parametrize("architecture", ENCODERS)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_it_is_checked_prepared_and_evaluated_to_the_same_bytes(
    tiny: Any, tmp_path: Path, architecture: str, method: str
) -> None:
    """Twice, and with packing, which an encoder's rows are not: all of it gives the same bytes."""
    from acclimate_runners import checking, evaluation, preparation

    model = encoder(tiny, tmp_path / "model", architecture)
    how = {"method": "lora", "lora": Lora(2, 4.0, ("attention", "mlp"))} if method == "lora" else {}
    recipe = tiny.recipe(epochs=2, lr_grid=(1e-2,), selection=Selection("nll", 0, ("last",)), **how)
    stages, made = tuple((task.name, 11) for task in tiny.tasks), []
    for name, packed in (("first", False), ("again", False), ("packed", True)):
        given = replace(recipe, packing=packed)
        job = classify_job(tiny, tmp_path / name, model, "prepare", stages=stages, recipe=given)
        assert jobs.from_json(jobs.to_json(job)) == job
        made.append(preparation.prepare(job, tmp_path / name, lambda *words: None))
    assert made[0].files == made[1].files == made[2].files and len(made[0].files) == 2
    kind = encoders.ENCODERS[architecture]
    for task, entry in zip(tiny.tasks, made[0].results["prepared"], strict=True):
        assert not entry["base"] and abs(entry["losses"][0] - np.log(len(task.choices))) < 0.3
        header = reading.read_header(tmp_path / "first/out" / entry["file"])
        assert header[kind.score].shape[0] == header[str(kind.score_bias)].shape[0] == len(task.choices)
    check = classify_job(tiny, tmp_path / "check", model, "check", recipe=recipe)
    assert len(checking.check(check, tmp_path / "check", lambda *words: None).results["losses"]) == 3
    prepared = {
        f"{e['task']}/11": tiny.put(tmp_path / "asked", tmp_path / "first/out" / e["file"])
        for e in made[0].results["prepared"]
    }
    asked = [(t.name, s, p) for t in tiny.tasks for s, p in ((None, "direct"), (11, "prepared"))]
    more = {"entrant": "fox", "stages": tuple(asked), "prepared": prepared, "recipe": recipe}
    job = classify_job(tiny, tmp_path / "asked", model, "evaluate", **more)
    outcome = evaluation.evaluate(job, tmp_path / "asked", lambda *words: None)
    for entry in outcome.results["predictions"]:
        table = tables.read(tmp_path / "asked/out" / entry["file"], tables.PREDICTIONS)
        sums = np.exp(np.array(table.column("loglikelihoods").to_pylist())).sum(axis=1)
        np.testing.assert_allclose(sums, 1, atol=1e-6)


@pytest.mark.parametrize("architecture", ENCODERS)
def test_parts_of_a_batch_give_the_same_loss_and_recomputing_the_same_bytes(
    tiny: Any, tmp_path: Path, architecture: str
) -> None:
    from acclimate_runners import classifying, computing, preparation

    computing.be_deterministic(1)
    job = classify_job(tiny, tmp_path, encoder(tiny, tmp_path / "model", architecture), "check")
    model, tokenizer = preparation.open_model(job, tmp_path)
    data = preparation.pack_splits(job, tmp_path, job.tasks[1], model, tokenizer)
    start = dict(classifying.begun(model, model.copy_weights(), job.tasks[1].task, seed=0))

    def fitted(micro: int | None) -> Any:
        model.set_weights(start)
        done = preparation.fit(model, data, tiny.recipe(), lr=0.003, seed=12, stop_after=3, micro_batch=micro)
        return done.losses, model.copy_weights()

    made = {micro: fitted(micro) for micro in (None, 1, 2, 4)}
    for losses, _ in made.values():
        np.testing.assert_allclose(losses, made[None][0], atol=1e-5)
    model.recompute()
    for micro in (None, 2):
        losses, weights = fitted(micro)
        assert losses == made[micro][0] and all(weights[name].equal(each) for name, each in made[micro][1].items())


@pytest.mark.parametrize("architecture", ENCODERS)
def test_in_bfloat16_losses_are_near_those_of_float32(tiny: Any, tmp_path: Path, architecture: str) -> None:
    """As docs/organizers.md says how near; however many rows are read at once, and the same bytes again."""
    import torch

    from acclimate_runners import classifying, computing, preparation

    computing.be_deterministic(1)
    job = classify_job(tiny, tmp_path, encoder(tiny, tmp_path / "model", architecture), "check")
    model, tokenizer = preparation.open_model(job, tmp_path)
    data = preparation.pack_splits(job, tmp_path, job.tasks[1], model, tokenizer)
    start = dict(classifying.begun(model, model.copy_weights(), job.tasks[1].task, seed=0))

    def losses(dtype: str, micro: int | None = None) -> Any:
        model.set_weights(start)
        recipe = tiny.recipe(dtype=dtype)
        return preparation.fit(model, data, recipe, lr=0.003, seed=12, stop_after=8, micro_batch=micro).losses

    plain, half = losses("float32"), losses("bfloat16")
    assert half != plain and half == pytest.approx(plain, rel=0.02)
    assert losses("bfloat16") == half and losses("bfloat16", 2) == pytest.approx(half, rel=0.02)
    assert {weight.dtype for weight in model.weights.values()} == {torch.float32}


@pytest.mark.parametrize("architecture", ENCODERS)
@pytest.mark.parametrize("checkpoint", [4, 9])
def test_cut_off_it_goes_on_to_the_same_bytes(tiny: Any, tmp_path: Path, architecture: str, checkpoint: int) -> None:
    """While a checkpoint is written: in the fit of the rate, and in that of the seed."""
    model = encoder(tiny, tmp_path / "model", architecture)
    recipe = tiny.recipe(epochs=1, lr_grid=(1e-2,), selection=Selection("nll", 0, ("last",)))
    given = {"recipe": recipe, "stages": (("words", 11),)}
    tiny.require_same_bytes_cut_off(
        tmp_path, lambda folder, **more: classify_job(tiny, folder, model, "prepare", **given, **more), checkpoint
    )


def test_a_unigram_tokenizer_is_read(tiny: Any, tmp_path: Path) -> None:
    """As DeBERTa's of version 3: pieces with scores, a mark for a blank, a token behind the pieces, a text between two others."""
    from acclimate_runners import preparation

    pieces = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"▁{word}" for word in (*"abcdef", "more", "less"))]
    normal = [{"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "NFKC"}]
    frame = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    frame.append({"SpecialToken": {"id": "[SEP]", "type_id": 0}})
    special = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "[MASK]": len(pieces)}
    mark = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    told = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": word, **flags} for word, number in special.items()],
        "normalizer": {"type": "Sequence", "normalizers": normal},
        "pre_tokenizer": mark,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": frame,
            "pair": frame + [{"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                word: {"id": word, "ids": [special[word]], "tokens": [word]} for word in ("[CLS]", "[SEP]")
            },
        },
        "decoder": mark,
        "model": {
            "type": "Unigram",
            "unk_id": 3,
            "vocab": [[piece, -0.1 * number] for number, piece in enumerate(pieces)],
            "byte_fallback": False,
        },
    }
    model = encoder(tiny, tmp_path / "model", "deberta-v2")
    (model / "tokenizer.json").write_text(json.dumps(told), "utf-8")
    job = replace(classify_job(tiny, tmp_path / "job", model, "check"), tokenizer=None)
    opened, tokenizer = preparation.open_model(job, tmp_path / "job")
    assert packing.framed(tokenizer, [" a ｂ f "], most=8) == [[1, 4, 5, 9, 2]]
    rows, _ = preparation.pack_splits(job, tmp_path / "job", job.tasks[0], opened, tokenizer)
    assert (rows.inputs[:, 0] == 1).all()
    few = len(pieces) - 1
    edit(model, vocab_size=few)
    assert f"tokenizer.json: token {few} is outside the model's vocabulary of {few}" in refused(tiny, model)


def test_the_order_of_rows_changes_nobodys_numbers(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import evaluation

    model = encoder(tiny, tmp_path / "model", labels=("yes", "no", "more"))
    stages = tuple((task.name, None, "direct") for task in tiny.tasks)
    found = []
    for name, turned in (("as they are", False), ("turned", True)):
        job = classify_job(tiny, tmp_path / name, model, "evaluate", entrant="fox", stages=stages, prepared={})
        data = []
        for each in job.tasks:
            rows = tables.read(tiny.data / "splits" / each.task.name / "holdout.parquet").drop_columns(["target"])
            tables.write(rows.take(list(range(rows.num_rows))[:: -1 if turned else 1]), tmp_path / "rows.parquet")
            data.append(replace(each, holdout_inputs=tiny.put(tmp_path / name, tmp_path / "rows.parquet")))
        outcome = evaluation.evaluate(replace(job, tasks=tuple(data)), tmp_path / name, lambda *words: None)
        files = [tmp_path / name / "out" / entry["file"] for entry in outcome.results["predictions"]]
        found.append([{r["example"]: r["loglikelihoods"] for r in tables.read(file).to_pylist()} for file in files])
    assert found[0] == found[1] and list(found[0][0]) == list(found[1][0])[::-1]


def test_what_adapters_of_a_recipe_stand_on(tiny: Any) -> None:
    found = {}
    for name in ENCODERS:
        kind = encoders.ENCODERS[name]
        shapes = kind.shapes({**CONFIG, "model_type": name})
        found[name] = [
            {layer.rpartition(".0.")[2].removesuffix(".weight") for layer in tensors.linear(shapes, (part,))}
            for part in ("attention", "mlp")
        ]
    theirs = [
        {"attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"},
        {"intermediate.dense", "output.dense"},
    ]
    assert found["bert"] == found["roberta"] == found["xlm-roberta"] == found["electra"] == theirs
    assert found["albert"] == [{f"attention.{n}" for n in ("query", "key", "value", "dense")}, {"ffn", "ffn_output"}]
    own = {
        "attention.self.query_proj",
        "attention.self.key_proj",
        "attention.self.value_proj",
        "attention.output.dense",
    }
    assert found["deberta-v2"] == [own, theirs[1]]
    assert found["modernbert"] == [{"attn.Wqkv", "attn.Wo"}, {"mlp.Wi", "mlp.Wo"}]
    assert found["distilbert"] == [{f"attention.{n}_lin" for n in ("q", "k", "v", "out")}, {"ffn.lin1", "ffn.lin2"}]


CONFIG = {
    "vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1, "max_position_embeddings": 8,
    "type_vocab_size": 2, "embedding_size": 4, "dim": 4, "hidden_dim": 6, "n_layers": 1,
}  # fmt: skip
