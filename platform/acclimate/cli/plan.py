"""`acclimate plan`: whether the pool can run a competition, where, how much at once, and how long at most."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acclimate.cli.options import AsJson, ReaderKeys, Server, named, need, reader
from acclimate.cli.output import counted, emit, table
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from acclimate.plan import Plan
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
Entries = Annotated[
    int | None, typer.Option("--entries", min=1, help="Plan for so many entries; else the round's, else 1.")
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
    """Tell whether the pool can run a round or a competition, and how much of it at once.

    What one attempt takes is [compute] of the definition. Where no machine of the pool can ever take one, the command
    refuses: such a round would wait without end.

    Example: acclimate plan digits-2027-1 --server https://rounds.example.org --entries 40
    """
    from acclimate import plan as plans

    competition, known = _asked(what, server=server, keys=keys, local=here or ray_address is not None)
    pool = _here(ray_address) if here or ray_address else _pool(server, keys)
    machines: list[Machine] = pool.pop("found")
    made = plans.plan(competition, machines, slots=pool["slots"] or 1, entries=entries or known or 1)
    notes = [*made.problems, *([pool["problem"]] if pool["problem"] else [])]
    if not pool["leads"]:
        notes.append("no dispatcher leads now, so nothing is started")
    value = {"competition": competition.slug, "definition": competition.digest, "pool": pool, **made.document()}
    emit(value | {"problems": notes}, as_json=as_json, text=list(_lines(competition, made, pool, notes=notes)))
    if made.seconds is None:
        raise typer.Exit(1)


def _asked(what: str, *, server: str | None, keys: Path | None, local: bool) -> "tuple[Competition, int]":
    """The competition, and how many entries its round has or may get as it stands; 0 where there is no round."""
    from acclimate_competitions import definition

    path = Path(what)
    if path.exists():
        return definition.load(path), 0
    if local or (server is None and keys is None):
        return definition.load(definition.shipped(what)), 0
    from acclimate.client.definitions import definition_of

    with reader(keys, server) as client:
        try:
            state = client.round(what)
        except Refusal as refusal:
            if refusal.code != "round_unknown":
                raise
            return definition.load(definition.shipped(what)), 0
        found = state.get("entries") or state.get("entrants") or 0
        return definition_of(client, state["round"])[1], int(found)


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
        yield f"{'at most':<14}{_span(made.seconds)}{gpus}, if none is made twice"
    for note in notes:
        yield f"{'note':<14}{note}"


def _span(seconds: float) -> str:
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (whole % 60, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"
