"""Submissions that are odd but fair, and that are not: each is prepared, or refused with a reason of its own."""

import base64
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import acclimate
from acclimate.cli.main import app
from acclimate_competitions.errors import Refusal

Spoil = Callable[[Path], None]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A competition whose entrants bring their own tokenizers."""
    folder = tmp_path_factory.mktemp("own") / "competition"
    tiny.competition(folder)
    (folder / "tokenizer.json").unlink()
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny.model(tmp_path / "model", seed=1)
    return tmp_path / "model"


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    path = folder / "config.json"
    found = {**json.loads(path.read_text("utf-8")), **changes}
    path.write_text(json.dumps(found), "utf-8")
    return found


def weights(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "tokenizer.json"
    value = json.loads(path.read_text("utf-8"))
    change(value)
    path.write_text(json.dumps(value), "utf-8")


def resized(folder: Path, size: int) -> None:
    """Give the embedding so many rows, those that are new being zero."""
    config(folder, vocab_size=size)

    def change(found: dict[str, Any]) -> dict[str, Any]:
        before = found["model.embed_tokens.weight"]
        after = np.zeros((size, before.shape[1]), dtype=np.float32)
        after[: min(size, len(before))] = before[:size]
        return {**found, "model.embed_tokens.weight": after}

    weights(folder, change)


def untied(folder: Path) -> None:
    config(folder, tie_word_embeddings=False)
    weights(folder, lambda found: {**found, "lm_head.weight": found["model.embed_tokens.weight"] * 2})


def untied_in_words_alone(folder: Path) -> None:
    config(folder, tie_word_embeddings=False)


def tied_in_words_alone(folder: Path) -> None:
    weights(folder, lambda found: {**found, "lm_head.weight": found["model.embed_tokens.weight"] * 2})


def no_padding_token(folder: Path) -> None:
    config(folder, pad_token_id=None, bos_token_id=None, eos_token_id=None)

    def change(value: dict[str, Any]) -> None:
        # The words keep their numbers; what padded is a word like any other.
        value["added_tokens"] = [token for token in value["added_tokens"] if token["content"] != "<pad>"]
        value["model"]["vocab"] = {"unpadded" if w == "<pad>" else w: n for w, n in value["model"]["vocab"].items()}

    tokenizer(folder, change)


def no_special_token(folder: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        value["added_tokens"] = []
        value["model"]["vocab"] = {w.replace("<bos>", "begin"): n for w, n in value["model"]["vocab"].items()}

    tokenizer(folder, change)


def odd_vocabulary(folder: Path) -> None:
    resized(folder, len(tiny.WORDS) + 7)


def small_vocabulary(folder: Path) -> None:
    resized(folder, len(tiny.WORDS) - 1)


def other_words(folder: Path) -> None:
    """A tokenizer of another model: the same number of tokens, in another order; it works, badly."""

    def change(value: dict[str, Any]) -> None:
        size = len(value["model"]["vocab"])
        value["model"]["vocab"] = {w: n if n < 3 else size + 2 - n for w, n in value["model"]["vocab"].items()}

    tokenizer(folder, change)


def foreign_tokenizer(folder: Path) -> None:
    """One whose numbers the model's embedding lacks."""

    def change(value: dict[str, Any]) -> None:
        value["model"]["vocab"] |= {f"more-{number}": number for number in range(len(tiny.WORDS), 5000)}

    tokenizer(folder, change)


def gap_in_the_vocabulary(folder: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        value["model"]["vocab"]["blue"] = len(tiny.WORDS) + 40

    tokenizer(folder, change)


def swallowing(folder: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        value["normalizer"] = {"type": "Replace", "pattern": {"String": "red"}, "content": ""}

    tokenizer(folder, change)


def no_unknown_word(folder: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        value["added_tokens"] = []
        value["model"] |= {"vocab": {w: n for w, n in value["model"]["vocab"].items() if w != "<unk>"}}

    tokenizer(folder, change)


def long_token(folder: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        value["model"]["vocab"] = {"x" * 4096 if w == "blue" else w: n for w, n in value["model"]["vocab"].items()}

    tokenizer(folder, change)


def long_added_token(folder: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        value["added_tokens"][0]["content"] = "\u00e9" * 1025

    tokenizer(folder, change)


def panicking(folder: Path) -> None:
    """A file over which the library doesn't fail but ends."""

    def change(value: dict[str, Any]) -> None:
        words = value["model"]["vocab"]
        value["model"] = {
            "type": "BPE",
            "vocab": words,
            "merges": [[*words][:2]],
            "continuing_subword_prefix": "#" * 99,
        }

    tokenizer(folder, change)


def half_a_character(folder: Path) -> None:
    """Our JSON reader makes a text of it, the library in Rust does not."""
    header(folder, lambda value: {**value, "__metadata__": {"a": "\ud800"}})


def negative_zero(folder: Path) -> None:
    """A whole number to our reader, a fraction to the library's."""
    header(folder, lambda value: value, lambda text: text.replace('"data_offsets": [0,', '"data_offsets": [-0,'))


def header(
    folder: Path,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    spell: Callable[[str], str] = lambda text: text,
) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    raw = spell(json.dumps(change({"__metadata__": {}} | json.loads(data[8:end])))).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[end:])


def growing(folder: Path) -> None:
    """Each replacement doubles a text; together they make a petabyte of a letter."""

    def change(value: dict[str, Any]) -> None:
        twice = {"type": "Replace", "pattern": {"String": "r"}, "content": "rr"}
        value["decoder"] = {"type": "Sequence", "decoders": [twice] * 50}

    tokenizer(folder, change)


def growing_by_pattern(folder: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        value["normalizer"] = {"type": "Replace", "pattern": {"Regex": ""}, "content": "m" * 100}

    tokenizer(folder, change)


def bytes_as_characters_again(folder: Path) -> None:
    """Each step writes all that is not ASCII with twice the bytes, before the text is split."""

    def change(value: dict[str, Any]) -> None:
        step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [step] * 7}

    tokenizer(folder, change)


def growing_without_its_type(folder: Path) -> None:
    """The library reads it all the same."""

    def change(value: dict[str, Any]) -> None:
        twice = {"pattern": {"String": "r"}, "content": "rr"}
        value["normalizer"] = {"type": "Sequence", "normalizers": [twice] * 50}

    tokenizer(folder, change)


def growing_by_map(folder: Path) -> None:
    """Of a compiled map of characters, a megabyte for each letter r."""

    def change(value: dict[str, Any]) -> None:
        units, at = [0] * 0x400, 0x100 ^ ord("r")
        units[0], units[at] = 0x100 << 10, ord("r") | 1 << 8 | 0x200 << 10
        trie = struct.pack(f"<{len(units)}I", *units)
        whole = struct.pack("<I", len(trie)) + trie + b"x" * 1_000_000 + b"\0"
        value["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(whole).decode()}

    tokenizer(folder, change)


def torn_map(folder: Path) -> None:
    """Its trie leads out of itself at the first letter: the library ends over a text, not over the file."""

    def change(value: dict[str, Any]) -> None:
        whole = struct.pack("<I", 8) + b"\0" * 8 + b"x\0"
        value["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(whole).decode()}

    tokenizer(folder, change)


def prepending(folder: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        value["normalizer"] = {"type": "Prepend", "prepend": "m" * 1_000_000}

    tokenizer(folder, change)


def unfolding_again(folder: Path) -> None:
    """One letter is replaced by a character of eighteen, of which a form of Unicode writes all, that letter five times."""

    def change(value: dict[str, Any]) -> None:
        fold = {"type": "Replace", "pattern": {"String": "\u0644"}, "content": "\ufdfa"}
        value["normalizer"] = {"type": "Sequence", "normalizers": [fold, {"type": "NFKD"}] * 8}

    tokenizer(folder, change)


def not_a_number(folder: Path) -> None:
    def change(found: dict[str, Any]) -> dict[str, Any]:
        found["model.norm.weight"][0] = np.nan
        return found

    weights(folder, change)


def without_end(folder: Path) -> None:
    def change(found: dict[str, Any]) -> dict[str, Any]:
        found["model.norm.weight"][0] = np.inf
        return found

    weights(folder, change)


def huge(folder: Path) -> None:
    """Finite, but what it computes is not."""
    weights(folder, lambda found: {name: tensor * 1e30 for name, tensor in found.items()})


def short(folder: Path) -> None:
    config(folder, max_position_embeddings=6)


def just_long_enough(folder: Path) -> None:
    config(folder, max_position_embeddings=7)


def half(folder: Path) -> None:
    weights(folder, lambda found: {name: tensor.astype(np.float16) for name, tensor in found.items()})


def double(folder: Path) -> None:
    weights(folder, lambda found: {name: tensor.astype(np.float64) for name, tensor in found.items()})


WORK = [
    untied,
    no_padding_token,
    no_special_token,
    odd_vocabulary,
    other_words,
    just_long_enough,
    half,
    no_unknown_word,
]
REFUSED = [
    (untied_in_words_alone, "tensor 'lm_head.weight' is missing"),
    (tied_in_words_alone, "is tied to 'model.embed_tokens.weight' by config.json, but differs from it"),
    (small_vocabulary, f"token {len(tiny.WORDS) - 1} is outside the model's vocabulary of {len(tiny.WORDS) - 1}"),
    (foreign_tokenizer, "token 4999 is outside the model's vocabulary of"),
    (gap_in_the_vocabulary, f"token {len(tiny.WORDS) + 40} is outside the model's vocabulary of"),
    (swallowing, "gives no token for the answer 'red' of task tint"),
    (long_token, "a token is 4096 bytes long, at most 2048 are allowed"),
    (long_added_token, "a token is 2050 bytes long, at most 2048 are allowed"),
    (panicking, "tokenizer.json: the library ends over it: range "),
    (half_a_character, r"model.safetensors: a text or key holds \ud800, half of a surrogate pair"),
    (negative_zero, "the weights: the library safetensors can't read them: "),
    (growing, "its decoder's steps make a text up to 1.13e+15 times longer, allowed are 100"),
    (growing_by_pattern, "its normalizer's steps make a text up to 101 times longer, allowed are 100"),
    (bytes_as_characters_again, "its pre_tokenizer's steps make a text up to 128 times longer, allowed are 100"),
    (growing_without_its_type, "its normalizer's steps make a text up to 1.13e+15 times longer, allowed are 100"),
    (growing_by_map, "its normalizer's steps make a text up to 1.1e+07 times longer, allowed are 100"),
    (torn_map, "tokenizer.json: the library ends over it: index out of bounds"),
    (prepending, "its normalizer's steps make a text up to 1e+06 times longer, allowed are 100"),
    (unfolding_again, "its normalizer's steps make a text up to 6.04e+10 times longer, allowed are 100"),
    (not_a_number, "'model.norm.weight' holds NaN or infinity"),
    (without_end, "'model.norm.weight' holds NaN or infinity"),
    (short, "the model reads at most 6 tokens, the recipe has sequences of 7"),
    (double, "has dtype 'F64', allowed are F32, F16, BF16"),
]


@pytest.mark.parametrize("change", WORK, ids=lambda change: change.__name__)
def test_what_is_odd_but_fair_is_checked_and_prepared(own: Path, model: Path, tmp_path: Path, change: Spoil) -> None:
    change(model)
    assert acclimate.check(model, own)["fits"]
    made = acclimate.prepare(model, own, out=tmp_path / "out", task="tint", lr=0.01, seed=5, max_steps=2)
    prepared = made["tasks"]["tint"]["seeds"]["5"]
    assert prepared["steps"] == 2 and prepared["note"] == ""
    found = acclimate.evaluate(tmp_path / "out" / prepared["folder"], own, task="tint")
    assert found["tasks"]["tint"]["unscored"] == 0


def test_what_was_prepared_is_read_as_the_float32_that_it_is(own: Path, model: Path, tmp_path: Path) -> None:
    """A config's dtype is what transformers makes of weights, whatever the file has; it was that of what was submitted."""
    import torch
    from transformers import AutoModelForCausalLM

    half(model)
    config(model, dtype="float16", torch_dtype="float16")
    made = acclimate.prepare(model, own, out=tmp_path / "out", task="tint", lr=0.01, seed=5, max_steps=2)
    folder = tmp_path / "out" / made["tasks"]["tint"]["seeds"]["5"]["folder"]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.float32
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert np.array_equal(loaded.get_parameter(name).detach().numpy(), tensor), name


@pytest.mark.parametrize(("change", "part"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_not_is_refused_by_check_and_by_prepare(
    own: Path, model: Path, tmp_path: Path, change: Spoil, part: str
) -> None:
    change(model)
    checks: tuple[tuple[Callable[..., Any], dict[str, Any]], ...] = (
        (acclimate.check, {}),
        (acclimate.prepare, {"out": tmp_path / "out", "task": "tint", "lr": 0.01, "seed": 5, "max_steps": 2}),
    )
    for call, how in checks:
        with pytest.raises(Refusal) as caught:
            call(model, own, **how)
        assert caught.value.code == "model_invalid"
        assert part in "\n".join((caught.value.sentence, *caught.value.problems))
    assert not (tmp_path / "out").exists()


def test_finite_weights_that_overflow_fail_the_check_and_fall_back_by_rule(
    own: Path, model: Path, tmp_path: Path
) -> None:
    huge(model)
    with pytest.raises(Refusal, match="preparation steps on public data fail: the loss at step . is nan") as caught:
        acclimate.check(model, own)
    assert caught.value.code == "model_invalid"
    made = acclimate.prepare(model, own, out=tmp_path / "out", task="tint", lr=0.01, seed=5)
    assert "the preparation diverged" in made["tasks"]["tint"]["seeds"]["5"]["note"]


def test_the_command_says_the_reason_and_exits_1(own: Path, model: Path) -> None:
    shutil.rmtree(model)
    tiny.model(model, seed=1, poisoned=True)
    done = CliRunner().invoke(app, ["check", str(model), "--competition", str(own)])
    assert isinstance(done.exception, Refusal) and done.exception.code == "model_invalid"
