"""`acclimate stage`: a round's work, stage by stage: what it waits for, what became of it, and what becomes of what is blocked."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acclimate.cli import moments
from acclimate.cli.options import AsJson, KeysFolder, ReaderKeys, RoundId, Server, connect, reader
from acclimate.cli.output import emit

if TYPE_CHECKING:
    from acclimate.client import Client

app = typer.Typer(no_args_is_help=True, help="A round's work, stage by stage.")
ENDED = ("committed", "cancelled")
SHORT = 12
_NOTHING_SAID = "no failed try at it said anything that is still kept: acclimate stage why tells what became of each"

All = Annotated[bool, typer.Option("--all", help="Also what is done.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="A stage's key, or any unique beginning of it.")]
GivenUp = Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys of blocked stages, or unique beginnings.")]
Keys = Annotated[list[str] | None, typer.Argument(metavar="KEY", help="Keys of blocked stages; none for all.")]


@app.command("list")
def list_(
    round_id: RoundId, server: Server = None, keys: ReaderKeys = None, all_: All = False, as_json: AsJson = False
) -> None:
    """Show the stages of a round that are not done: state, place in the queue, tries, when it should end, and why it waits.

    Example: acclimate stage list digits-2027-1 --server https://rounds.example.org
    """
    with reader(keys, server) as client:
        found = client.stages(round_id)
    shown = found if all_ else [stage for stage in found if stage["state"] not in ENDED]
    done = len(found) - len(shown)
    text = ["the round has no work yet"]
    if shown:
        text = [*table(shown), *([f"{done} more are done; --all shows them"] if done else [])]
    elif done:
        text = [f"nothing is left to do; done: {done}, which --all shows"]
    emit(shown, as_json=as_json, text=text)


@app.command()
def why(round_id: RoundId, key: Key, server: Server = None, keys: ReaderKeys = None, as_json: AsJson = False) -> None:
    """Tell what a stage waits for, and what became of each try at it.

    Example: acclimate stage why digits-2027-1 3f2a --server https://rounds.example.org
    """
    with reader(keys, server) as client:
        found = client.stage(round_id, key)
    emit(found, as_json=as_json, text=list(_story(found)))


@app.command()
def output(round_id: RoundId, key: Key, keys: KeysFolder, as_json: AsJson = False) -> None:
    """Print what the process of each failed try at a stage said at its end; for the round's organizer, from the close on.

    It may hold words of a model or of the holdout: mind whom you show it. At most the last 16 KiB of each of the newest 20 tries, for as long as
    the server keeps them.

    Example: acclimate stage output digits-2027-1 3f2a --keys organizer/
    """
    client, _ = connect(keys)
    with client:
        found = client.outputs(round_id, key)
    emit(found, as_json=as_json, text=[line for one in found for line in _said(one)] or [_NOTHING_SAID])


@app.command()
def retry(round_id: RoundId, keys: KeysFolder, key: Keys = None, as_json: AsJson = False) -> None:
    """Have the dispatcher try blocked stages again, once what blocked them is put right; for the round's organizer.

    Example: acclimate stage retry digits-2027-1 --keys organizer/
    """
    client, _ = connect(keys)
    with client:
        found = client.retry(round_id, _keys(client, round_id, key or ()))["stages"]
    emit(
        {"stages": found},
        as_json=as_json,
        text=[f"asked for: {short(one)}" for one in found] + ["the leading dispatcher tries them again within seconds"],
    )


@app.command("give-up")
def give_up(
    round_id: RoundId,
    key: GivenUp,
    keys: KeysFolder,
    reason: Annotated[str, typer.Option("--reason", help="Why; everybody will read it.")],
    as_json: AsJson = False,
) -> None:
    """Record blocked stages as failed, where nothing helps any more, so that the round goes on; for the round's organizer.

    Its entry counts as one that could not be prepared or evaluated; a submission whose check it is is refused, and costs no quota.
    What is blocked together ends together. That you gave it up, and why, is public, in the log for good; a drawn re-run of it is not made.
    Custodians, auditors and all who verify the round need this version of acclimate or a later one to read a preparation or an evaluation that was
    given up. What lacks a file that the server lost, or room, can't be given up.

    Example: acclimate stage give-up digits-2027-1 3f2a --reason "its tokenizer crashes, on two machines" --keys organizer/
    """
    client, _ = connect(keys)
    with client:
        found = client.give_up(round_id, _keys(client, round_id, key), reason=reason)["stages"]
    text = [f"asked for: {short(one)}" for one in found]
    emit(
        {"stages": found},
        as_json=as_json,
        text=[
            *text,
            "the leading dispatcher records them as failed within seconds, if they are still blocked by then",
            "a version of acclimate older than this one can't read the log's record of a preparation or an evaluation that was given up: tell your"
            " custodians and your auditor to upgrade, since without it they can neither release nor audit",
        ],
    )


def _keys(client: "Client", round_id: str, beginnings: Sequence[str]) -> list[str]:
    """The keys of stages that each of these beginnings is the only one's of, by one request for all."""
    if not beginnings:
        return []
    from acclimate_competitions.errors import Refusal

    listed, found = [str(stage["key"]) for stage in client.stages(round_id)], dict[str, None]()
    for given in beginnings:
        beginning = given if given.startswith("sha256:") else f"sha256:{given}"
        mine = [key for key in listed if key.startswith(beginning)]
        if len(mine) != 1:
            sentence = f"{len(mine) or 'no'} stages of the round begin with {beginning!r}"
            raise Refusal("not_found", sentence, hint="acclimate stage list shows their keys")
        found[mine[0]] = None
    return list(found)


def short(key: str) -> str:
    """A key as people give it: its first digits."""
    return key.removeprefix("sha256:")[:SHORT]


def name_of(stage: dict[str, Any]) -> str:
    """What a stage is, in words: "prepare digit, seed 11"."""
    parts = [stage["kind"], stage.get("task"), stage.get("protocol")]
    words = " ".join(str(part) for part in parts if part)
    return words if stage.get("seed") is None else f"{words}, seed {stage['seed']}"


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of a table of stages; who runs and who waits first."""
    order = ("running", "starting", "verifying", "blocked", "failed", "pending")
    rank = {state: number for number, state in enumerate(order)}
    ordered = sorted(found, key=lambda s: (rank.get(s["state"], len(order)), s.get("place") or 0))
    rows = [("key", "entrant", "stage", "state", "try", "ends", "")]
    rows += [
        (short(s.get("key") or ""), s.get("entrant") or "(hidden)", name_of(s), _state(s), _try(s), _ends(s), _note(s))
        for s in ordered
    ]
    if len(rows) > 1:
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        for row in rows:
            yield "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[6]]).rstrip()


def _state(stage: dict[str, Any]) -> str:
    if stage["state"] == "pending" and stage.get("place"):
        return f"waits, {stage['place']}. in the queue"
    if stage["state"] == "running":
        return f"running, {100 * (stage.get('progress') or 0):.0f} %"
    return str(stage["state"])


def _try(stage: dict[str, Any]) -> str:
    tries = stage.get("tries")
    return f"{stage.get('attempts') or 0} of {tries}" if tries else str(stage.get("attempts") or "")


def _ends(stage: dict[str, Any]) -> str:
    from acclimate_competitions.records import parse_time

    at = stage.get("expected")
    return f"{parse_time(at):%H:%M:%S}" if at else ""


def _note(stage: dict[str, Any]) -> str:
    parts = [f"on {stage['machine']}" if stage.get("machine") else "", stage.get("reason") or ""]
    return "; ".join(part for part in parts if part)


def _story(found: dict[str, Any]) -> Iterator[str]:
    from acclimate import retries
    from acclimate_competitions.records import parse_time

    stage = found["stage"]
    yield f"{name_of(stage)} of {stage['entrant'] or '(hidden until the close)'}"
    yield f"{'key':<10}{stage['key']}"
    yield f"{'state':<10}{_state(stage)}"
    if tries := _try(stage):
        yield f"{'tries':<10}{tries}"
    now = moments.clock()
    for label, name in (("not before", "not_before"), ("expected", "expected"), ("heartbeat", "heartbeat")):
        if stage.get(name):
            yield f"{label:<10}{moments.show(parse_time(stage[name]), now=now)}"
    if note := _note(stage):
        yield f"{'why':<10}{note}"
    if stage["state"] == "blocked":
        told = "it waits for the organizer: put right what blocks it, then `acclimate stage retry`"
        yield told if stage.get("code") in retries.NEVER_GIVEN_UP else f"{told}; what nothing helps: `give-up`"
        yield "what its process said, for the organizer: `acclimate stage output`"
    for event in found["history"]:
        words = "; ".join(str(event[name]) for name in ("machine", "code", "reason") if event.get(name))
        yield f"  {event['at'][:19]}Z  try {event['fence']}  {event['event']}{': ' + words if words else ''}"
    if not found["history"]:
        yield "  nothing has been tried yet"


def _said(output: dict[str, Any]) -> Iterator[str]:
    """The output of a failed try, indented, after a line that says of which."""
    code = f", which ended with {output['code']}" if output.get("code") else ""
    yield f"what try {output['fence']} said{code}:"
    if output.get("text") is None:
        yield f"  (lost: {output['problem']})"
        return
    if output["left_out"]:
        yield f"  ({output['left_out']} bytes before this are left out)"
    for line in output["text"].splitlines():
        yield f"  | {line}"
