"""What records say that work ran on: an evaluator says it, and by another class of hardware, or by other libraries, it is asked for no equal bytes."""

from collections.abc import Iterable, Mapping

from acclimate_competitions.definition import Competition


def declared(competition: Competition) -> str:
    """The class of hardware that the definition declares."""
    return competition.compute.hardware


def undeclared(competition: Competition, named: Iterable[str]) -> list[str]:
    """Those classes, sorted, that are neither the declared one nor a part of it: `cpu/x86_64` is one of `cpu`."""
    known = declared(competition)
    return sorted({name for name in named if name != known and not name.startswith(f"{known}/")})


def apart(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Library -> its two versions, where two runs had other ones; "none" where only one of them names it."""
    pairs = {name: (one.get(name, "none"), other.get(name, "none")) for name in sorted({*one, *other})}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
