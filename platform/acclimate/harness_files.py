"""Task files of lm-evaluation-harness, read as data: YAML with `include`, in which `!function` is a name and nothing is ever run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acclimate.extras import need
from acclimate_competitions import reading
from acclimate_competitions.errors import Refusal

_LONGEST = 1 << 20
_DEEPEST = 10
_MOST_VALUES = 100_000
_HINT = "name a task's YAML file of lm-evaluation-harness"


@dataclass(frozen=True)
class Function:
    """A Python function that a file names with `!function`; it can't be carried."""

    name: str


def load(path: Path) -> dict[str, Any]:
    """The settings of a task file, those that it includes first and its own over them.

    Raises:
        Refusal: extra_missing, file_unreadable: no YAML, too large, no mapping, an include that is missing, absolute, or goes in a circle.
    """
    need("runner", "yaml")
    return _loaded(path, ())


def _loaded(path: Path, through: tuple[Path, ...]) -> dict[str, Any]:
    place = path.resolve()
    if place in through or len(through) > _DEEPEST:
        raise Refusal("file_unreadable", f"{path}: its includes go in a circle, or too deep", hint=_HINT)
    own = _parsed(reading.read(path, _LONGEST, hint=_HINT), path)
    names = own.pop("include", None)
    whole: dict[str, Any] = {}
    for name in names if isinstance(names, list) else [] if names is None else [names]:
        if not isinstance(name, str) or Path(name).is_absolute():
            sentence = f"{path}: include: {str(name)[:80]!r}; only files relative to it are read"
            raise Refusal("file_unreadable", sentence, hint="copy what it includes beside it")
        whole |= _loaded(path.parent / name, (*through, place))
    return whole | own


def _parsed(raw: bytes, path: Path) -> dict[str, Any]:
    import yaml

    # The one in C is the same but for its speed.
    safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loads: Any = type("Loads", (safe,), {"__doc__": "Makes nothing but data, and a name of `!function`."})
    loads.add_constructor("!function", lambda loader, node: Function(str(loader.construct_scalar(node))))
    try:
        found = yaml.load(raw, loads)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        sentence = f"{path}: no YAML that can be read: {' '.join(str(error).split())[:200]}"
        raise Refusal("file_unreadable", sentence, hint=_HINT) from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise Refusal("file_unreadable", f"{path}: it is no mapping of settings", hint=_HINT)
    # Aliases may stand for far more than the file has bytes.
    _count(found, path, [0])
    return found


def _count(value: Any, path: Path, seen: list[int]) -> None:
    seen[0] += 1
    if seen[0] > _MOST_VALUES:
        raise Refusal("file_unreadable", f"{path}: it has more than {_MOST_VALUES} values", hint=_HINT)
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    try:
        for _, each in inner:
            _count(each, path, seen)
    except RecursionError as error:
        raise Refusal("file_unreadable", f"{path}: its values stand too deep in each other", hint=_HINT) from error


def said(value: Any) -> str:
    """A value in short, for a report."""
    text = f"!function {value.name}" if isinstance(value, Function) else repr(value)
    return text if len(text) <= 120 else f"{text[:119]}…"
