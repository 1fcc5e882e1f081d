"""`acclimate plan`: whether the pool can run a competition, where, how much at once, how long it should take and how long at most."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acclimate.cli.options import AsJson, ReaderKeys, Server, named, need, reader
from acclimate.cli.output import counted, emit, table
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from acclimate.plan import Plan
    from acclimate.simulation import Schedule
    from acclimate_competitions.definition import Competition
    from acclimate_runners.runner import Machine

What = Annotated[
    str,
    typer.Argument(
        help="A round's id, or a competition's folder or its shipped name.", metavar="ROUND|DIR", callback=named
    ),
]
Here = Annotated[bool, typer.Option("--here", help="Plan for this machine, without a server.")]
Address = Annotated[
    str | None,
    typer.Option("--ray-address", help="Plan for this Ray cluster, without a server.", metavar="HOST:PORT"),
]
_SHOWN, _WIDTH = 10, 40
Entries = Annotated[
    int | None,
    typer.Option("--entries", min=1, max=1_000_000, help="Plan for so many entries; else the round's, else 1."),
]


def plan(
    what: What,
    server: Server = None,
    keys: ReaderKeys = None,
    here: Here = False,
    ray_address: Address = None,
    entries: Entries = None,
    as_json: AsJson = False,
) -> None:
    """Tell whether the pool can run a round or a competition, how much of it at once, and how long it should take.

    Of a round's entries the time is known from their checks, and simulated with the dispatcher's own order; a folder has no entries, and
    only the time that it allows is known.

    What one attempt takes is [compute] of the definition. Where no machine of the pool can ever take one, the command
    refuses: such a round would wait without end.

    Example: acclimate plan digits-2027-1 --server https://rounds.example.org --entries 40
    """
    from acclimate import plan as plans

    asked = _asked(what, server=server, keys=keys, local=here or ray_address is not None)
    competition = asked.competition
    pool = _here(ray_address) if here or ray_address else _pool(server, keys)
    machines: list[Machine] = pool.pop("found")
    count = entries or asked.entries or 1
    made = plans.plan(competition, machines, slots=pool["slots"] or 1, entries=count, forecast=asked.forecast)
    notes = [*made.problems, *([pool["problem"]] if pool["problem"] else [])]
    if not pool["leads"]:
        notes.append("no dispatcher leads now, so nothing is started")
    value = {"competition": competition.slug, "definition": competition.digest, "pool": pool, **made.document()}
    emit(value | {"problems": notes}, as_json=as_json, text=list(_lines(competition, made, pool, notes=notes)))
    if made.seconds is None:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Asked:
    """The competition, how many entries its round has or may get as it stands (0 where there is no round), and what is known of them."""

    competition: "Competition"
    entries: int = 0
    forecast: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))


def _asked(what: str, *, server: str | None, keys: Path | None, local: bool) -> _Asked:
    from acclimate_competitions import definition

    path = Path(what)
    if path.exists():
        return _Asked(definition.load(path))
    if local or (server is None and keys is None):
        return _Asked(definition.load(definition.shipped(what)))
    from acclimate.client.definitions import definition_of

    with reader(keys, server) as client:
        try:
            state = client.round(what)
        except Refusal as refusal:
            if refusal.code != "round_unknown":
                raise
            return _Asked(definition.load(definition.shipped(what)))
        found = state.get("entries") or state.get("entrants") or 0
        competition = definition_of(client, state["round"])[1]
        told = client.forecast(state["round"])
    try:
        known = [float(one) for one in told["preparations"]], [float(one) for one in told["evaluations"]]
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(
            "server_unreachable", f"the server's forecast is not of the form that is known here: {error!r}"
        ) from error
    return _Asked(competition, int(found), known)


def _pool(server: str | None, keys: Path | None) -> dict[str, Any]:
    from acclimate.plan import machine_of

    with reader(keys, server) as client:
        pool = client.pool()
    try:
        found = [machine_of(machine) for machine in pool["machines"]]
        return {name: pool[name] for name in ("leads", "runner", "slots", "problem", "at", "age")} | {"found": found}
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal(
            "server_unreachable", f"the server's pool is not of the form that is known here: {error!r}"
        ) from error


def _here(address: str | None) -> dict[str, Any]:
    need("runner", "ray")
    import tempfile

    from acclimate_runners.cluster import RayRunner

    with tempfile.TemporaryDirectory() as folder:
        runner = RayRunner(Path(folder), address or "local")
        try:
            found, slots = list(runner.machines()), runner.slots
        finally:
            runner.close(keep=True)
    return {"leads": True, "runner": "ray", "slots": slots, "problem": "", "at": None, "age": 0.0, "found": found}


def _lines(competition: "Competition", made: "Plan", pool: dict[str, Any], *, notes: Sequence[str]) -> Iterator[str]:
    from acclimate_runners.placement import size, spoken

    yield f"{competition.title} ({competition.slug})"
    yield ""
    yield f"{'one attempt':<14}{spoken(made.demand)}"
    age = f", as of {pool['age']:.0f} s ago" if pool["age"] else ""
    yield f"{'pool':<14}{counted(len(made.machines), 'machine')}, {len(made.fitting)} of them fit{age}"
    yield ""
    if made.machines:
        rows = [
            (
                machine.name,
                f"{machine.cpus:g}",
                f"{machine.gpus:g}",
                size(machine.memory) if machine.memory else "-",
                "yes" if machine.name in made.fitting else "no",
                ", ".join(f"{name}={value}" for name, value in sorted(machine.labels.items())) or "-",
            )
            for machine in made.machines
        ]
        yield from table(
            ("machine", "cpus", "gpus", "memory", "fits", "labels"), rows, right=("cpus", "gpus", "memory")
        )
        yield ""
    yield f"{'at once':<14}{counted(made.at_once, 'attempt')}"
    stages = f"{counted(made.preparations, 'preparation')} and {counted(made.evaluations, 'evaluation')}"
    yield f"{'work':<14}{stages} in {counted(made.attempts, 'attempt')}, for {counted(made.entries, 'entry')}"
    if made.seconds is not None:
        gpus = f", {made.gpu_hours:.3g} GPU hours" if made.gpu_hours else ""
        if made.expected is not None:
            spent = f"{made.expected.gpu_hours:.3g} GPU hours, " if made.demand.gpus else ""
            spent += f"{made.expected.cpu_hours:.3g} CPU hours"
            yield f"{'expected':<14}{_span(made.expected.seconds)}, {spent}"
        yield f"{'at most':<14}{_span(made.seconds)}{gpus}, if none is made twice"
        if made.expected is not None:
            yield from _bars("preparations", made.expected.preparations)
            yield from _bars("evaluations", made.expected.evaluations)
    for note in notes:
        yield f"{'note':<14}{note}"


def _bars(what: str, made: "Schedule") -> Iterator[str]:
    """The first attempts of a schedule and when each runs, as bars over the whole time."""
    yield ""
    yield f"{what}, the longest first, {_span(made.makespan)}"
    width = max(map(len, made.machines), default=0)
    for start, end, machine in list(zip(made.starts, made.ends, made.machines, strict=True))[:_SHOWN]:
        first = int(start / made.makespan * _WIDTH) if made.makespan else 0
        length = max(1, round((end - start) / made.makespan * _WIDTH)) if made.makespan else 1
        bar = ("." * first + "#" * length).ljust(_WIDTH, ".")[:_WIDTH]
        yield f"  {machine:<{width}}  {bar}  {_span(start)} to {_span(end)}"
    if len(made.starts) > _SHOWN:
        yield f"  and {len(made.starts) - _SHOWN} more, with --json"


def _span(seconds: float) -> str:
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (whole % 60, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"
