"""Reading a submitted model before any library touches it: strict, bounded, all problems at once, with the standard library alone.

A submission is exactly config.json, model.safetensors (or its index and shards, shards.py) and tokenizer.json. What is checked here: sizes;
JSON that is bounded, shallow and without doubled keys; allow-listed config fields; safetensors headers whose tensors fill their file without gap or
overlap and are exactly those that the config asks for. What is not checked here: that the weights are finite, and that the libraries agree; the
child process does that when it loads the model (network.py).
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_runners import architectures, replacements, shards
from acclimate_runners.tensors import counter_of

NAMES = ("config.json", "model.safetensors", "tokenizer.json")
BESIDES = tuple(name for name in NAMES if name != shards.WHOLE)
"""The files other than the weights."""
IMAGE_BESIDES = ("config.json",)
"""Those of a model of images."""
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
TOKENIZER_MODELS = ("BPE", "WordLevel", "WordPiece", "Unigram")

CONFIG_BYTES = 1 << 22
"""Of a config.json: one with ImageNet's thousand labels, both ways, has 70 KiB, one with its 21,841 has two MiB."""
_HEADER_BYTES = 1 << 22
_INDEX_BYTES = 1 << 22
_TOKENIZER_BYTES = 5 << 23
"""Of a tokenizer.json: Gemma 2's, whose merges the library saves on four lines each, has 33 MiB."""
READ_AT_MOST = _TOKENIZER_BYTES
"""Bytes from the beginning of each file that `inspect` looks at, given no tokenizer to compare with; the rest may be anything."""
_DEPTH = 24
_VALUES = 2_400_000
"""Values and keys that a tokenizer.json may hold, objects and lists among them: each takes up to a hundred bytes once it is read, however short
it is in the file. One with half a million merges, written as pairs, has 2.1 million."""
_HEADER_VALUES = 600_000
"""As many in what has at most 4 MiB: a tensor has thirteen, in a hundred bytes."""
_ENTRY_BYTES = 2048
"""Bytes of UTF-8 that one token may be written with; the longest of public tokenizers, rows of blanks, have a few hundred."""
_GROWTH = 100
"""How many times longer the steps of a normalizer, pre-tokenizer or decoder may make a text: NFKC makes it eleven times, ▁ for a blank three times."""
_SHOWN = 12
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape of half a character beyond the first 65,536; without its other half it is none, and no library in Rust reads it."""


class Rules(Protocol):
    """What a model may be: definition.SubmissionRules and jobs.Limits both say it."""

    @property
    def architectures(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def max_parameters(self) -> int: ...  # noqa: D102
    @property
    def max_bytes(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class ModelFacts:
    """What a strict reading tells of a model.

    Attributes:
        architecture: a key of architectures.ARCHITECTURES.
        parameters: numbers in all tensors; a tied output embedding counts once.
        bytes: of its files.
        config: the parsed config.json.
    """

    architecture: str
    parameters: int
    bytes: int
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def inspect(files: Path | Mapping[str, Path], rules: Rules, *, tokenizer: str | None = None) -> ModelFacts:
    """Read a submission strictly.

    Args:
        files: a folder, or name -> path.
        rules: the competition's limits.
        tokenizer: the digest that tokenizer.json must have, where the competition fixes it.

    Raises:
        Refusal: model_invalid, with all problems found.
    """
    given = {path.name: path for path in sorted(files.iterdir())} if isinstance(files, Path) else dict(files)
    besides = besides_of(given.get("config.json"))
    problems = unknown(given)
    sizes: dict[str, int] = {}
    there = [name for name, path in given.items() if path.is_file()]
    problems += [f"{name}: missing" for name in besides if name not in there] + shards.lacking(there)
    problems += [f"{name}: a model of images has none" for name in BESIDES if name in given and name not in besides]
    for name in sorted(there):
        if name in BESIDES or name == shards.INDEX or name in shards.weights_of([name]):
            sizes[name] = given[name].stat().st_size
            problems += [f"{name}: 0 bytes"] if sizes[name] == 0 else []
    sizes = {name: size for name, size in sizes.items() if size}
    total = sum(sizes.values())
    if total > rules.max_bytes:
        problems.append(f"the files have {total} bytes, at most {rules.max_bytes} are allowed")
        raise refusal(problems)
    config = read_config(given["config.json"], rules, problems) if "config.json" in sizes else None
    tensors = _weights({name: given[name] for name in sizes}, problems)
    parameters = 0
    if config is not None:
        expected = architectures.shapes(config)
        parameters = sum(math.prod(shape) for shape in expected.values())
        if parameters > rules.max_parameters:
            problems.append(f"config.json: {parameters} parameters, at most {rules.max_parameters} are allowed")
        if tensors is not None:
            where = shards.INDEX if shards.INDEX in given else shards.WHOLE
            problems += [f"{where}: {found}" for found in compare(tensors, expected, config)]
    if "tokenizer.json" in sizes and "tokenizer.json" in besides:
        _tokenizer(given["tokenizer.json"], config, tokenizer, problems)
    if problems or config is None:
        raise refusal(problems)
    return ModelFacts(str(config["model_type"]), parameters, total, config)


def unknown(names: Iterable[str]) -> list[str]:
    """A problem for each name that no file of a submission has."""
    known = (*BESIDES, shards.INDEX, shards.WHOLE)
    return [
        f"{name[:80]}: not one of the files of a submission"
        for name in names
        if name not in known and not shards.is_shard(name)
    ]


def of_folder(folder: Path) -> dict[str, Path]:
    """The files of a model's folder that make a submission, name -> path; others in it are left alone.

    Raises:
        Refusal: file_unreadable, where it is no folder.
    """
    if not folder.is_dir():
        hint = f"it must hold {', '.join(NAMES)}"
        raise Refusal("file_unreadable", f"{folder} is not a folder", hint=hint)
    return shards.of_folder(folder, besides=besides_of(folder / "config.json"))


def besides_of(config: Path | None) -> tuple[str, ...]:
    """The files other than the weights that a submission with this config.json has: a model of images has no tokenizer."""
    told = read_object("config.json", config, CONFIG_BYTES, []) if config is not None and config.is_file() else None
    classes = (told or {}).get("architectures")
    return IMAGE_BESIDES if classes_end(classes, "ForImageClassification") else BESIDES


def classes_end(classes: Any, ending: str) -> bool:
    """Whether a class that `architectures` of a config.json names ends so."""
    return isinstance(classes, list) and any(str(name).endswith(ending) for name in classes)


def refusal(problems: list[str]) -> Refusal:
    """What a model with these problems is refused with: model_invalid."""
    count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
    return Refusal(
        "model_invalid",
        f"the model has {count}: {problems[0]}" + (" …" if len(problems) > 1 else ""),
        hint="a model is a folder with exactly config.json, model.safetensors (or its index and shards) and tokenizer.json, as "
        "save_pretrained(…, safe_serialization=True) writes them; a model of images has no tokenizer.json",
        problems=problems[:_SHOWN] + ([f"… and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []),
    )


def read_json(data: bytes, *, values: int = _HEADER_VALUES) -> Any:
    """Parse JSON that has no doubled keys, no NaN or infinity, no half characters in its texts and keys, is at most 24 levels deep and holds no more than so many values and keys.

    They are counted before anything is made of them, by the characters that must stand beside them. Such characters in texts count, too.

    Raises:
        ValueError: with what is wrong.
    """
    if (held := 1 + sum(map(data.count, (b"[", b"{", b",", b":")))) > values:
        raise ValueError(f"it may hold {held} values and keys, at most {values} are read")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8") from error
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    level = [value]
    for _ in range(_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            _require_whole(value, data)
            return value
    raise ValueError(f"nested deeper than {_DEPTH} levels")


def _require_whole(value: Any, data: bytes) -> None:
    """Refuse texts and keys that UTF-8 can't say: a half of a surrogate pair, which only an escape can bring."""
    if not _HALF.search(data):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise ValueError(f"a text or key holds \\u{code:04x}, half of a surrogate pair: no character") from error


def _children(item: Any) -> list[Any]:
    found = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return [child for child in found if isinstance(child, dict | list)]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"JSON has no {name}")


def read_object(
    name: str, path: Path, limit: int, problems: list[str], *, values: int = _HEADER_VALUES
) -> dict[str, Any] | None:
    """The object of a JSON file of at most so many bytes and values; None, with its problem noted, where it is none."""
    if path.stat().st_size > limit:
        problems.append(f"{name}: {path.stat().st_size} bytes, at most {limit} are read")
        return None
    try:
        value = read_json(path.read_bytes(), values=values)
    except ValueError as error:
        problems.append(f"{name}: not acceptable JSON: {error}")
        return None
    if not isinstance(value, dict):
        problems.append(f"{name}: not a JSON object")
        return None
    return value


def read_config(path: Path, rules: Rules, problems: list[str]) -> dict[str, Any] | None:
    """A checked config.json; None, with its problems noted, where it is not acceptable."""
    config = read_object("config.json", path, CONFIG_BYTES, problems)
    if config is None:
        return None
    found = architectures.problems(config, tuple(rules.architectures))
    problems += ["config.json: " + line for line in found]
    return None if found else config


def _tokenizer(path: Path, config: Mapping[str, Any] | None, fixed: str | None, problems: list[str]) -> None:
    if fixed is not None and digests.of_file(path) != fixed:
        problems.append(
            "tokenizer.json: differs from the competition's tokenizer.json, which is the same for all entries"
        )
        return
    value = read_object("tokenizer.json", path, _TOKENIZER_BYTES, problems, values=_VALUES)
    if value is None:
        return
    model = value.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") not in TOKENIZER_MODELS:
        problems.append("tokenizer.json: model.type is not one of " + ", ".join(TOKENIZER_MODELS))
        return
    vocabulary = model.get("vocab")
    added = value.get("added_tokens") or []
    if isinstance(vocabulary, dict):
        numbers = list(vocabulary.values())
    elif isinstance(vocabulary, list):
        numbers = list(range(len(vocabulary)))
    else:
        problems.append("tokenizer.json: it has no model.vocab")
        return
    # Those beyond the vocabulary are left out when it is loaded: packing.load_tokenizer.
    more = (
        [token.get("id") if isinstance(token, dict) else None for token in added] if isinstance(added, list) else [None]
    )
    if not numbers + more or not all(type(number) is int and 0 <= number < 2**40 for number in numbers + more):
        problems.append("tokenizer.json: a token's number is missing, negative, not whole or beyond all bounds")
    elif config is not None and (last := max(numbers, default=0)) >= config["vocab_size"]:
        problems.append(f"tokenizer.json: token {last} is outside the model's vocabulary of {config['vocab_size']}")
    problems += [f"tokenizer.json: {found}" for found in _too_long(value, vocabulary, added)]


def _too_long(tokenizer: Mapping[str, Any], vocabulary: Any, added: Any) -> list[str]:
    """What makes a text of a few tokens so long that nobody could store or read it."""
    # A Unigram vocabulary is a list of [text, score].
    written = (
        list(vocabulary) if isinstance(vocabulary, dict) else [e[0] for e in vocabulary if isinstance(e, list) and e]
    )
    more = added if isinstance(added, list) else []
    written += [token.get("content") for token in more if isinstance(token, dict)]
    found, longest = [], max(map(replacements.written, written), default=0)
    if longest > _ENTRY_BYTES:
        found.append(f"a token is {longest} bytes long, at most {_ENTRY_BYTES} are allowed")
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growth = replacements.growth(tokenizer.get(part))
        if growth > _GROWTH:
            found.append(f"its {part}'s steps make a text up to {growth:.3g} times longer, allowed are {_GROWTH}")
    return found


def _weights(given: Mapping[str, Path], problems: list[str]) -> dict[str, Tensor] | None:
    """The tensors of all weight files; None where a file of them can't be read, or they differ from their index."""
    before, names = len(problems), shards.weights_of(given)
    headers = {name: read_tensors(name, given[name], problems) for name in names}
    index = read_object(shards.INDEX, given[shards.INDEX], _INDEX_BYTES, problems) if shards.INDEX in given else None
    if not names or len(problems) > before:
        return None
    if index is not None:
        sizes = {file: {name: t.end - t.begin for name, t in (found or {}).items()} for file, found in headers.items()}
        problems += shards.compare(index, sizes)
    return {name: tensor for found in headers.values() for name, tensor in (found or {}).items()}


def read_tensors(name: str, path: Path, problems: list[str]) -> dict[str, Tensor] | None:
    """The tensors of a safetensors file by name; None, with the problem noted, where it can't be read."""
    try:
        return read_header(path)
    except ValueError as error:
        with path.open("rb") as stream:
            start = stream.read(9)
        # A header's length may begin with these bytes, too; a header follows it then.
        if start[8:] != b"{" and (start[:1] == b"\x80" or start[:2] == b"PK"):
            problems.append(f"{name}: this is a pickle or a ZIP archive; only safetensors is read, never pickle")
        else:
            problems.append(f"{name}: {error}")
        return None


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, whose data must fill the file exactly.

    Raises:
        ValueError: with the first thing that is wrong.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= min(_HEADER_BYTES, size - 8):
            raise ValueError(f"not safetensors: a header of {length} bytes in a file of {size}")
        raw = stream.read(length)
    if raw[:1] != b"{":
        raise ValueError("not safetensors: the header does not begin with {")
    header = read_json(raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ is not an object of texts")
    tensors = {name: _tensor(name, entry) for name, entry in header.items()}
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            raise ValueError(
                f"{repr(name)[:120]} begins at {tensor.begin}, the data before it ends at {position}: a gap or overlap"
            )
        position = tensor.end
    if position != size - 8 - length:
        raise ValueError(f"the tensors end at {position}, the data at {size - 8 - length}")
    return tensors


def _tensor(name: str, entry: Any) -> Tensor:
    shown = repr(name)[:120]
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{shown} has not exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    counts = dtype == "I64" and shape == [] and counter_of(name) != ""
    if not isinstance(dtype, str) or (dtype not in ITEM_BYTES and not counts):
        raise ValueError(f"{shown} has dtype {repr(dtype)[:40]}, allowed are " + ", ".join(ITEM_BYTES))
    if not isinstance(shape, list) or len(shape) > 4 or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
        raise ValueError(f"{shown} has no proper shape")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(n) is int and 0 <= n < 2**60 for n in offsets)
    ):
        raise ValueError(f"{shown} has no proper data_offsets")
    begin, end = offsets
    if end - begin != math.prod(shape) * (8 if counts else ITEM_BYTES[dtype]):
        raise ValueError(f"{shown} of shape {shape} and {dtype} has {end - begin} bytes")
    return Tensor(dtype, tuple(shape), begin, end)


def compare(tensors: Mapping[str, Tensor], expected: architectures.Shapes, config: Mapping[str, Any]) -> list[str]:
    """Differences between a header's tensors and those that the config asks for; a tied head may be written out."""
    kind = architectures.ARCHITECTURES[config["model_type"]]
    allowed = dict(expected)
    if kind.head in tensors and kind.head not in allowed and architectures.labels(config) is None:
        allowed[kind.head] = expected[kind.embedding]
    found = [f"tensor {name!r} is missing" for name in expected if name not in tensors]
    for name, tensor in tensors.items():
        if tensor.dtype == "I64" and counter_of(name) in allowed:
            continue
        if name not in allowed:
            found.append(f"tensor {repr(name)[:120]} is not part of the model that config.json describes")
        elif tensor.shape != allowed[name]:
            found.append(f"tensor {name!r} has shape {list(tensor.shape)}, config.json asks for {list(allowed[name])}")
    return found
