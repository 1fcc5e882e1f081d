"""Hardware that records name: an evaluator says it, and by another class than the definition's it is asked for no equal bytes."""

from collections.abc import Iterable

from acclimate_competitions.definition import Competition


def declared(competition: Competition) -> str:
    """The class of hardware that the definition declares."""
    return competition.compute.hardware


def undeclared(competition: Competition, named: Iterable[str]) -> list[str]:
    """Those classes, sorted, that are neither the declared one nor a part of it: `cpu/x86_64` is one of `cpu`."""
    known = declared(competition)
    return sorted({name for name in named if name != known and not name.startswith(f"{known}/")})
