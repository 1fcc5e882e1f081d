"""`acclimate enter`, `acclimate submit`, `acclimate submission`: what an entrant does."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acclimate.cli.options import AsJson, KeysFolder, RoundId, connect, named
from acclimate.cli.output import bar, emit, say, table
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from acclimate.client import Client
    from acclimate.client.entrant import Sending, Submission
    from acclimate.keys import Keys

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="See what became of submissions; withdraw one.")

Baseline = Annotated[
    str, typer.Option("--baseline", help="For the organizer: act for this baseline of the definition.", metavar="NAME")
]


def enter(
    round_id: RoundId,
    keys: KeysFolder,
    conflict: Annotated[
        list[str] | None,
        typer.Option("--conflict", help="A conflict of interest to declare; may be given more than once."),
    ] = None,
    baseline: Baseline = "",
    as_json: AsJson = False,
) -> None:
    """Enter a round, once, before the first submission.

    Declare the conflicts of interest that people should know: they are published.

    Example: acclimate enter digits-2027-1 --keys ./ada --conflict "works with the organizer"
    """
    from acclimate import client as actors

    client, opened = connect(keys)
    with client:
        if baseline:
            answer = actors.enter_baseline(client, opened, round_id, name=baseline)
        else:
            answer = actors.enter_round(client, opened, round_id, conflicts=conflict or [])
    record = answer["record"]
    emit(answer, as_json=as_json, text=f"{record['entrant']} entered {record['round']}: log entry {answer['index']}")


def submit(
    round_id: Annotated[
        str, typer.Option("--round", help="The round's id, or any beginning of it that is unique.", callback=named)
    ],
    keys: KeysFolder,
    model: Annotated[
        Path | None,
        typer.Argument(
            help="Folder with config.json, model.safetensors (or its shards), tokenizer.json; or an adapter's two files, adapter_config.json and "
            "adapter_model.safetensors. With --standing-from it may be left out."
        ),
    ] = None,
    standing_from: Annotated[
        str | None,
        typer.Option(
            "--standing-from",
            help="Submit again, unchanged, what counts for you in this earlier round; its files are not sent once more.",
            metavar="ROUND",
            callback=named,
        ),
    ] = None,
    title: Annotated[
        str | None, typer.Option("--title", help="What people read beside the entry; else the folder's name.")
    ] = None,
    weights_after: Annotated[
        str | None,
        typer.Option(
            "--weights-after",
            help="What becomes of the weights after the round: publish, auditor or delete; else delete.",
        ),
    ] = None,
    family: Annotated[str | None, typer.Option("--family", help="The model's family, if it has one.")] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", help="The model that it was trained from, if any; an adapter's is found in its files."),
    ] = None,
    released: Annotated[
        str | None, typer.Option("--released", help="When the model was released, if it was.", metavar="YYYY-MM-DD")
    ] = None,
    baseline: Baseline = "",
    again: Annotated[bool, typer.Option("--again", help="Submit anew what was refused or withdrawn before.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the server's check of the model.")] = True,
    as_json: AsJson = False,
) -> None:
    """Submit a model to a round.

    Commits first, then uploads. Then the server checks the model, and accepts or refuses it. Interrupted at any moment, the same command goes on where it stopped, with the same
    submission. Receipts are checked and kept in DIR/receipts.

    Of your accepted submissions that you did not withdraw, the one committed last counts, however long its check took.

    With --standing-from a model of an earlier round stands again: it uses quota and is withdrawn like any submission, and the log shows that it is
    the same model. Words that you don't give are those of then.

    Example: acclimate submit ./model --round digits-2027-1 --title "Tiny Llama" --weights-after publish --keys ./ada
    """
    from acclimate.client.entrant import ENDED, Sending

    if model is None and standing_from is None:
        raise typer.BadParameter("name the model's folder, or the round that it stands from: --standing-from ROUND")
    words = {"title": title, "weights_after": weights_after, "family": family, "base": base, "released": released}
    client, opened = connect(keys)
    try:
        with client, bar("uploading") as progress:
            how = Sending(model, again=again, wait=wait, progress=progress, say=say)
            mine = _sent(client, opened, round_id, how, standing_from=standing_from, words=words, baseline=baseline)
    except KeyboardInterrupt:
        say("interrupted; nothing is lost: the same command goes on with this submission")
        raise typer.Exit(130) from None
    emit(_document(mine, keys), as_json=as_json, text=_lines(mine, keys))
    if mine.state in ENDED:
        raise typer.Exit(1)


def _sent(
    client: "Client",
    keys: "Keys",
    round_id: str,
    how: "Sending",
    *,
    standing_from: str | None,
    words: dict[str, str | None],
    baseline: str,
) -> "Submission":
    """The submission of a model, or of what stands from an earlier round; `words` that are None were not given."""
    from acclimate import client as actors
    from acclimate.client import standing

    if standing_from is not None:
        given = {name: value for name, value in words.items() if value is not None}
        return standing.submit_standing(
            client, keys, round_id, standing_from, sending=how, changes=given, baseline=baseline
        )
    assert how.model is not None
    return actors.submit(
        client,
        keys,
        round_id,
        how.model,
        title=words["title"] or how.model.resolve().name,
        weights_after=words["weights_after"] or "delete",
        family=words["family"] or "",
        base=words["base"],
        released=words["released"],
        baseline=baseline,
        again=how.again,
        wait=how.wait,
        progress=how.progress,
        say=how.say,
    )


@app.command("status")
def status(
    keys: KeysFolder,
    round_id: Annotated[
        str | None, typer.Option("--round", help="Only those of rounds whose id begins so.", callback=named)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the submissions of a key folder, as the server has them now.

    One that the server does not know any more is `lost`, and the exit code 1 then, as where its log went back behind what the folder has seen.

    Example: acclimate submission status --keys ./ada
    """
    from acclimate import client as actors
    from acclimate.client import seen_log
    from acclimate.client.entrant import LOST

    client, opened = connect(keys, reads=True)
    with client:
        found = actors.submission_status(client, opened, round_id or "")
        back = seen_log.went_back(client, keys)
    rows = [
        (mine.short, mine.state, _entry(mine.committed), _entry(mine.accepted), mine.manifest["title"], mine.reason)
        for mine in found
    ]
    header = ("submission", "state", "committed", "accepted", "title", "reason")
    text = table(header, rows) if rows else ["no submissions yet; acclimate submit MODEL --round ROUND makes one"]
    emit([_document(mine, keys) for mine in found], as_json=as_json, text=text)
    if back is not None:
        raise back
    if lost := [mine.short for mine in found if mine.state == LOST]:
        raise Refusal(
            "submission_unknown",
            f"the server does not know {len(lost)} of these submissions: {', '.join(lost)}",
            hint="was its database put back? Keep the key folder, and ask the operator; what a receipt proves: acclimate receipt verify",
        )


@app.command("withdraw")
def withdraw(
    which: Annotated[
        str, typer.Argument(help="The submission, as `acclimate submission status` names it.", metavar="SUBMISSION")
    ],
    keys: KeysFolder,
    as_json: AsJson = False,
) -> None:
    """Withdraw a submission, before the round closes. An earlier one of the same entrant counts then.

    Example: acclimate submission withdraw digits-2027-1-8f3a52c01b7e4d06a1c95e3b7720d4f8-1c9d03aa --keys ./ada
    """
    from acclimate import client as actors

    client, opened = connect(keys)
    with client:
        mine = actors.withdraw(client, opened, which)
    emit(_document(mine, keys), as_json=as_json, text=f"withdrew {mine.short}")


def _entry(index: int | None) -> str:
    return "-" if index is None else f"entry {index}"


def _document(mine: "Submission", keys: Path) -> dict[str, Any]:
    document = dataclasses.asdict(mine)
    # The nonce opens the commitment: it is the entrant's to show, not for a log file of some script.
    del document["nonce"]
    # As the table names it; `submission` is the server's own id. Both are taken by `submission withdraw`.
    document["name"] = mine.short
    document["receipt"] = str(keys / "receipts" / mine.receipt) if mine.receipt else None
    return document


def _lines(mine: "Submission", keys: Path) -> list[str]:
    lines = [f"{mine.state}: {mine.short}" + (f", log entry {mine.accepted}" if mine.accepted is not None else "")]
    if mine.reason:
        lines.append(f"reason: {mine.reason}")
    if mine.receipt:
        lines.append(f"receipt: {keys / 'receipts' / mine.receipt}")
    return lines
