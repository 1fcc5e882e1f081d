"""`acclimate status`: where a round stands, for people."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acclimate.cli import moments
from acclimate.cli.options import AsJson, ReaderKeys, RoundId, Server, reader
from acclimate.cli.output import counted, dumps, emit, plain

if TYPE_CHECKING:
    from acclimate.client import Client

PHASES = ("draft", "sealed", "open", "closed", "prepared", "released", "opened", "evaluated", "published")
_BEFORE_OPEN = PHASES[:2]
EVERY = 1.0
WIDTH = 24
SHOWN = 8
KINDS = {"check": "checks", "select": "selections", "prepare": "preparations", "evaluate": "evaluations"}
DONE = ("committed", "failed", "cancelled")
COUNTED = {"running": ("starting", "running", "verifying"), "failed": ("failed",), "blocked": ("blocked",)}
SAID = {"running": "under way"}
"""What a state is called for people: an attempt has several stages, and not all of them are computed at one time."""

Watch = Annotated[bool, typer.Option("--watch", help="Go on showing it until the round has ended.")]
Until = Annotated[
    str,
    typer.Option(
        "--until",
        help="Go on showing it until the round has come to this phase; exit 1 if it is voided first, or can't come to it any more.",
    ),
]


def status(
    round_id: RoundId,
    server: Server = None,
    keys: ReaderKeys = None,
    watch: Watch = False,
    until: Until = "",
    as_json: AsJson = False,
) -> None:
    """Show where a round stands and what happens next.

    Phases, dates, what is missing, the work under way. Times are counted by the server's clock. With --json and --watch, one JSON object a line for each change.

    Example: acclimate status digits-2027-1 --server https://rounds.example.org --watch
    """
    if until and until not in PHASES:
        raise typer.BadParameter(f"{until!r} is no phase: {', '.join(PHASES)}", param_hint="--until")
    with reader(keys, server) as client:
        if not (watch or until):
            state, stages = _look(client, round_id)
            emit(state | {"work": list(_work(stages))}, as_json=as_json, text=list(lines(state, stages)))
            return
        if sys.stdout.isatty() and not as_json:
            phase = _live(client, round_id, until)
        else:
            phase = _follow(client, round_id, until, as_json=as_json)
    if until and (phase not in PHASES or PHASES.index(phase) < PHASES.index(until)):
        raise typer.Exit(1)


def lines(state: dict[str, Any], stages: list[dict[str, Any]]) -> Iterator[str]:
    """The person's view of a round's state and stages."""
    from acclimate_competitions.records import parse_time

    now = parse_time(state["now"])
    yield f"{state['title']}"
    yield f"round {state['round']}"
    if state["data_is_public"]:
        yield "The data are public: this round shows the protocol, not blindness."
    yield ""
    yield phase_line(state["phase"])
    yield ""
    for name in ("opens", "closes", "release_by"):
        if state.get(name):
            yield f"{name.replace('_', ' '):<14}{moments.show(parse_time(state[name]), now=now)}"
    yield f"{'now':<14}{now:%Y-%m-%d %H:%M:%S} UTC, by the server's clock"
    yield ""
    yield f"{'next':<14}{state['next']}"
    for missing in state.get("waiting_for") or []:
        yield f"{'missing':<14}{missing}"
    if state.get("problem"):
        yield f"{'problem':<14}{state['problem']['sentence']}"
    yield f"{'entries':<14}{_entries(state)}"
    if state.get("cosigned"):
        yield f"{'witnesses':<14}{_cosigned(state['cosigned'])}"
    yield from auditor(state)
    yield from custodians(state)
    for kind in _work(stages):
        yield f"{kind['kind']:<14}{bar(kind['done'], kind['total'], finished=kind['finished'])}{_trouble(kind)}"
    yield from under_way(stages)


def under_way(stages: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The stages that somebody is at, or that wait for an operator: the first few, with try, end and reason."""
    from acclimate.cli import stage

    shown = [one for one in stages if one["state"] in (*COUNTED["running"], "blocked") and one.get("key")]
    if shown:
        yield ""
        yield from list(stage.table(shown))[: SHOWN + 1]
    if len(shown) > SHOWN:
        yield f"and {len(shown) - SHOWN} more: acclimate stage list"


def _cosigned(found: dict[str, Any]) -> str:
    quorum = f"{found['quorum']} of {found['witnesses']}"
    names = f"{', '.join(found['late'])} not yet" if found.get("late") else ""
    if not found["missing"]:
        return f"{quorum} have cosigned all records of the round{'; ' + names if names else ''}"
    late = f": {names}" if names else ""
    return f"{quorum} must have cosigned the round's last {counted(found['missing'], 'record')}{late}; shares wait for that"


def phase_line(phase: str) -> str:
    """All phases in order; the present one in brackets."""
    if phase == "voided":
        return "→".join((*PHASES[:1], "…", "[voided]"))
    return "→".join(f"[{name}]" if name == phase else name for name in PHASES)


def auditor(state: dict[str, Any]) -> Iterator[str]:
    """Who makes drawn preparations again, and how many agree."""
    named = state.get("auditor")
    if named and named["due"]:
        drawn = f"{named['agree']} of {named['due']} re-runs agree" if named["drawn"] else f"{named['due']} to be drawn"
        drawn += f", {named['given_up']} given up by the organizer" if named.get("given_up") else ""
        yield f"{'auditor':<14}{named['name']}, {drawn}"


def custodians(state: dict[str, Any]) -> Iterator[str]:
    """Who acknowledged and who released."""
    people = state.get("custodians") or []
    for what in ("acknowledged", "released"):
        names = [person["name"] for person in people if person[what]]
        if names:
            yield f"{what:<14}{', '.join(names)} ({len(names)} of {len(people)}, {state['threshold']} open the seal)"


def bar(done: float, total: int, *, finished: int) -> str:
    """A bar of WIDTH characters, filled by all that is done, and how many have ended: one that runs is not among these, however far it is."""
    filled = round(WIDTH * done / total) if total else 0
    return f"{'█' * filled}{'·' * (WIDTH - filled)} {finished} of {total} ended"


def _entries(state: dict[str, Any]) -> str:
    text = f"{counted(state['entrants'], 'entrant')}, {counted(state['submissions'], 'submission')}"
    if state.get("entries") is not None:
        # The entrants are counted without the baselines, whose entries are frozen as all are.
        those = " (with the baselines' entries)" if state.get("baselines") else ""
        text = f"{state['entries']} frozen{those}; {text}"
        if state.get("forfeited"):
            text += f", {state['forfeited']} forfeited"
    return text


def _work(stages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each kind of stage: how many there are, are done (parts of running ones counted), have ended, run, failed, are blocked."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for stage in stages:
        by_kind.setdefault(stage["kind"], []).append(stage)
    for kind, label in KINDS.items():
        found = by_kind.get(kind, [])
        if found:
            states = [stage["state"] for stage in found]
            parts = sum(1.0 if stage["state"] in DONE else float(stage["progress"] or 0) for stage in found)
            numbers = {name: sum(map(states.count, which)) for name, which in COUNTED.items()}
            finished = sum(state in DONE for state in states)
            yield {"kind": label, "total": len(found), "done": round(parts, 3), "finished": finished, **numbers}


def _trouble(kind: dict[str, Any]) -> str:
    """What of a kind is under way, failed or is blocked; of the stages that one attempt has, each counts."""
    return "".join(f", {kind[name]} {SAID.get(name, name)}" for name in COUNTED if kind[name])


def _short(kind: dict[str, Any]) -> str:
    """A kind of work in one line: how many have ended, as the bar counts them, and in tenths how much is done, parts of running ones too."""
    tenths = int(10 * kind["done"] / kind["total"]) * 10
    return f"{kind['kind']} {kind['finished']} of {kind['total']} ended ({tenths} % done){_trouble(kind)}"


def _look(client: "Client", round_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    state = client.round(round_id)
    return state, client.stages(state["round"])


def _ended(state: dict[str, Any], until: str) -> bool:
    """Whether there is nothing more to wait for: the phase, or a later one, is there or can't come any more, or the round was voided."""
    phase = state["phase"]
    if phase not in PHASES or PHASES.index(phase) >= PHASES.index(until or PHASES[-1]):
        return True
    # Whoever only watches may want to see it voided.
    return bool(until) and until not in _BEFORE_OPEN and never_opens(state)


def never_opens(state: dict[str, Any]) -> bool:
    """Whether a round's close passed, by the server's clock, before it was open: it can only be voided."""
    from acclimate_competitions.records import parse_time

    return state["phase"] in _BEFORE_OPEN and parse_time(state["closes"]) <= parse_time(state["now"])


def _live(client: "Client", round_id: str, until: str) -> str:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            state, stages = _look(client, round_id)
            live.update(Text("\n".join(plain(line) for line in lines(state, stages))), refresh=True)
            if _ended(state, until):
                return str(state["phase"])
            time.sleep(EVERY)


def _follow(client: "Client", round_id: str, until: str, *, as_json: bool) -> str:
    before = ""
    while True:
        state, stages = _look(client, round_id)
        work = list(_work(stages))
        short = "; ".join((f"{state['phase']}: {state['next']}", *map(_short, work)))
        if short != before:
            typer.echo(dumps(state | {"work": work}) if as_json else plain(f"{state['now']} {short}"))
            sys.stdout.flush()
            before = short
        if _ended(state, until):
            return str(state["phase"])
        time.sleep(EVERY)
