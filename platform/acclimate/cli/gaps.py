"""`acclimate gap`: before a round opens, the smallest difference that its size can tell."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from acclimate.cli.analysis import (
    Items,
    Level,
    OneBundle,
    OneCompetition,
    OneMetric,
    OneProtocol,
    RoundNames,
    TrackingUri,
    item_source,
)
from acclimate.cli.options import AsJson
from acclimate.cli.output import emit


def gap(
    entrants: Annotated[int | None, typer.Option("--entrants", help="How many; else the pilot's.", metavar="N")] = None,
    examples: Annotated[
        int | None, typer.Option("--examples", help="How many, or clusters of them; else the pilot's.", metavar="N")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="How many; else the pilot's.", metavar="K")] = None,
    difference: Annotated[
        float | None, typer.Option("--difference", help="Also say how many examples tell it.", metavar="D")
    ] = None,
    power: Annotated[float, typer.Option("--power", help="With which probability a gap is to be told.")] = 0.8,
    level: Level = 0.95,
    items: Items = None,
    tracking_uri: TrackingUri = None,
    competition: OneCompetition = None,
    rounds: RoundNames = None,
    bundle: OneBundle = None,
    missing: Annotated[
        str | None,
        typer.Option("--missing", help="The pilot's missing scores: fail, exclude, worst.", metavar="POLICY"),
    ] = None,
    tasks: Annotated[str | None, typer.Option("--tasks", help="Only these sets of the pilot.", metavar="A,B,…")] = None,
    protocol: OneProtocol = None,
    metric: OneMetric = None,
    as_json: AsJson = False,
) -> None:
    """Tell the smallest difference between two entrants that a round of some size can tell.

    From scores by example of a pilot or an earlier round, or without them by the worst case of scores 0 and 1.

    Example: acclimate gap --entrants 20 --examples 800 --difference 0.05
    """
    from acclimate import gap_analysis

    options: Any = {
        "entrants": entrants, "examples": examples, "seeds": seeds, "difference": difference, "power": power,
        "level": level, "missing": missing, "protocol": protocol, "metric": metric,
        "tasks": [word.strip() for word in tasks.split(",") if word.strip()] if tasks else None,
    }  # fmt: skip
    source = item_source(items, bundle, tracking_uri=tracking_uri, competition=competition, rounds=rounds)
    found = gap_analysis.gap(source, **{name: value for name, value in options.items() if value is not None})
    emit(found, as_json=as_json, text=_lines(found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    size = f"{found['entrants']} entrants, {found['examples']} examples, {found['seeds']} seed{'s' if found['seeds'] > 1 else ''}"
    yield (
        f"{size}: two entrants who differ by {found['gap']:.4f} are told apart with probability {found['power']:.6g}, "
        f"among all pairs at {found['level']:.6g} ({found['critical']:.2f} standard errors)."
    )
    if found["floor"] is not None:
        yield f"Seeds alone set a floor of {found['floor']:.4f}: more examples don't lower it, more seeds do."
    if found["difference"] is not None:
        needed = found["examples_needed"]
        many = (
            f"takes {needed:,} examples" if needed is not None else "is below what seeds allow, however many examples"
        )
        yield f"A difference of {found['difference']:.6g} {many}."
    for note in found["notes"]:
        yield f"note: {note}"
