"""`acclimate audit`: what the auditor whom a round names does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from acclimate.cli.options import AsJson, KeysFolder, RoundId, connect, need
from acclimate.cli.output import bar, counted, emit, named_bar, say

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="What the auditor whom a round names does: make keys, draw, make preparations again, report.",
)


UNDECIDED = 3
"""Exit code where this machine can't decide some drawn preparation, and none disagrees."""
_MARKS = {True: "agrees", False: "DOES NOT AGREE", None: "UNDECIDED"}


@app.command()
def keygen(
    keys: KeysFolder,
    name: Annotated[
        str | None, typer.Option("--name", help="The auditor's name in the definition; with --again the folder has it.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Make a new secret for another round, with the same signing key.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make an auditor's keys and the secret of a draw, and auditor.json for the organizer.

    auditor.json holds the secret's digest only. A secret serves one round; keep the folder until that round is published.

    Example: acclimate audit keygen --name lab --keys ./lab
    """
    from acclimate.client import auditor
    from acclimate.client.folder import ACCOUNT_FILE

    if name is None and (name := auditor.name_of(keys)) is None:
        raise typer.BadParameter(f"give --name NAME: {keys} is no auditor's folder yet, so it has none")
    made = auditor.keygen(auditor.open_keys(keys), name=name, again=again)
    say(f"send {keys / auditor.AUDITOR_FILE} to the organizer; the other files in {keys} are secret")
    if not (keys / ACCOUNT_FILE).exists():
        say(
            "next: get an auditor's invitation from the server's operator, then: acclimate register --role auditor"
            f" --name {name} --invitation CODE --server URL --keys {keys}"
        )
    emit(made, as_json=as_json, text=[f"{label} {value}" for label, value in made.items()])


@app.command()
def draw(round_id: RoundId, keys: KeysFolder, as_json: AsJson = False) -> None:
    """Tell the secret, so that the preparations to make again are drawn.

    Once every preparation is in the log, not before. Before the secret leaves this machine the whole log is read and hashed, and held against what was seen before.

    Example: acclimate audit draw digits-2027-1 --keys ./lab
    """
    from acclimate.client import auditor

    client, opened = connect(keys)
    with client, bar("reading the log", unit="entries") as progress:
        auditor.draw(client, opened, round_id, progress=progress)
        state = auditor.status(client, opened, round_id, progress=progress)
    say(f"next: acclimate audit run {state['round']} --keys {keys}")
    emit(state, as_json=as_json, text=_lines(state))


@app.command()
def run(round_id: RoundId, keys: KeysFolder, as_json: AsJson = False) -> None:
    """Make the drawn preparations again on this machine, and log what came of each.

    Draws first, if that was not done. Each drawn entry's files are downloaded, prepared again in a confined process by the code that the evaluator ran, and compared: equal bytes on the same hardware class, else the validation nll within the declared tolerance. Interrupted, the same command goes on. What this machine can't decide is named at the end with the reason, and made anew by the same command. Exits 0 if all agree, 3 if nothing disagrees and something is undecided, else 1.

    Example: acclimate audit run digits-2027-1 --keys ./lab
    """
    need("runner", "torch", "transformers")
    from acclimate.client import auditor, reruns

    client, opened = connect(keys)
    size, undecided = 0, list[dict[str, Any]]()
    with client, named_bar("preparing again") as progress:
        for done in reruns.run(client, opened, round_id, say=say, progress=progress):
            size = max(size, (done["index"] or 0) + 1)
            where = f" (log entry {done['index']})" if done["index"] is not None else ""
            say(
                f"{_MARKS[done['agrees']]}: {done['entrant']}, {done['task']}, seed {done['seed']}: {done['reason']}{where}"
            )
            if done["agrees"] is None:
                undecided.append({name: done[name] for name in ("entrant", "task", "seed", "reason", "hint")})
        # What was logged just now is in the summary, too.
        state = auditor.status(client, opened, round_id, size=size)
    emit({**state, "undecided": undecided}, as_json=as_json, text=[*_lines(state), *_undecided(undecided)])
    if state["missing"]:
        disagrees = any(job["agrees"] is False for job in state["jobs"])
        raise typer.Exit(UNDECIDED if undecided and not disagrees else 1)


@app.command()
def status(round_id: RoundId, keys: KeysFolder, as_json: AsJson = False) -> None:
    """Show what was drawn, what came of it, and what is missing before the release.

    Example: acclimate audit status digits-2027-1 --keys ./lab
    """
    from acclimate.client import auditor

    client, opened = connect(keys)
    with client, bar("reading the log", unit="entries") as progress:
        state = auditor.status(client, opened, round_id, progress=progress)
    emit(state, as_json=as_json, text=_lines(state))


@app.command()
def report(
    round_id: RoundId,
    keys: KeysFolder,
    bundle: Annotated[
        Path, typer.Option("--bundle", help="The whole bundle, downloaded by `acclimate round bundle`.", metavar="FILE")
    ],
    as_json: AsJson = False,
) -> None:
    """Verify a published round's whole bundle, and sign that nothing FAILED.

    Of a holdout that stays private this stands for what the public can't check.

    Example: acclimate audit report digits-2027-1 --bundle digits-2027-1.zip --keys ./lab
    """
    from acclimate.client import auditor

    if not bundle.exists():
        from acclimate_competitions.errors import Refusal

        raise Refusal(
            "file_unreadable",
            f"{bundle}: there is no such file or folder",
            hint=f"acclimate round bundle {round_id} --out {bundle} --keys {keys}, with --whole where the holdout stays private",
        )
    client, opened = connect(keys)
    with client, named_bar("verifying") as progress:
        done = auditor.report(client, opened, round_id, bundle, progress=progress)
    counts = done["checks"]
    text = f"reported on {done['round']}: {counts['ok']} checks ok, {counts['not_checked']} NOT CHECKED, log entry {done['index']}"
    emit(done, as_json=as_json, text=text)


def _undecided(found: list[dict[str, Any]]) -> Iterator[str]:
    for job in found:
        yield f"UNDECIDED       {job['entrant']}, {job['task']}, seed {job['seed']}: {job['reason']}"
        yield f"hint: {job['hint']}"


def _lines(state: dict[str, Any]) -> Iterator[str]:
    yield f"round {state['round']}, {state['phase']}"
    if state["due"] == 0:
        yield "the definition asks for no re-runs"
    elif not state["drawn"]:
        yield f"{counted(state['due'], 'preparation')} to be drawn"
    for job in state["jobs"]:
        mark = {True: "agrees", False: "DOES NOT AGREE", None: "to do"}[job["agrees"]]
        mark = "not made again" if job["agrees"] and job["given_up"] else mark
        reason = f": {job['reason']}" if job["reason"] else ""
        yield f"{mark:<14}  {job['entrant']}, {job['task']}, seed {job['seed']}{reason}"
    lost = sum(job["given_up"] for job in state["jobs"])
    if state["due"] and state["missing"]:
        yield f"missing: {state['missing']}"
    elif lost:
        left = len(state["jobs"]) - lost
        others = f"; each of the other {left} was made again and agrees" if left else ""
        yield f"{counted(lost, 'drawn preparation')} given up by the organizer, not made again{others}"
    elif state["due"]:
        yield "every drawn preparation was made again and agrees"
    if state["reports"]:
        yield counted(state["reports"], "report")
