"""`acclimate round`: what an organizer does, and what everybody may read of a round."""

from pathlib import Path
from typing import Annotated, Any

import typer

from acclimate.cli import moments
from acclimate.cli.next_rounds import anchors, next_round, tell_begun
from acclimate.cli.options import (
    AsJson,
    KeysFolder,
    ReaderKeys,
    RoundId,
    Server,
    connect,
    lies_here,
    of_bundle,
    reader,
    witnesses_asked,
)
from acclimate.cli.output import bar, emit, say, table
from acclimate.cli.status import status
from acclimate.cli.versions import revise, told, versions
from acclimate_competitions.errors import Refusal

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Create, seal, extend, publish, void and read rounds.",
)

Out = Annotated[Path, typer.Option("--out", help="The file to write.", metavar="FILE")]
_WHEN = "RFC 3339 with an offset, or from now: +30s, +2h, +30d; or now."


@app.command()
def create(
    folder: Annotated[
        Path, typer.Argument(help="A built competition: competition.toml, splits/, tokenizer.json.", metavar="FOLDER")
    ],
    keys: KeysFolder,
    custodian: Annotated[
        list[Path] | None,
        typer.Option("--custodian", help="A custodian's public part, custodian.json; one for each.", metavar="FILE"),
    ] = None,
    opens: Annotated[
        str | None,
        typer.Option(
            "--opens",
            help=f"When submissions may begin; else the definition's, else now. {_WHEN}",
            metavar="WHEN",
        ),
    ] = None,
    closes: Annotated[str | None, typer.Option("--closes", help="When submissions end.", metavar="WHEN")] = None,
    closes_latest: Annotated[
        str | None,
        typer.Option("--closes-latest", help="How far the close may be moved; else not at all.", metavar="WHEN"),
    ] = None,
    release_by: Annotated[
        str | None, typer.Option("--release-by", help="When custody has failed; else 14 days later.", metavar="WHEN")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The round's name; else the definition's.")] = None,
    auditor: Annotated[
        Path | None,
        typer.Option(
            "--auditor",
            help="The public file of the auditor whom the definition names, auditor.json, or its folder.",
            metavar="FILE",
        ),
    ] = None,
    witness: Annotated[
        list[str] | None,
        typer.Option(
            "--witness",
            help="The key of a witness that the server must have, or a file of it; one for each. Else those of your last round; for your first one none.",
            metavar="KEY",
        ),
    ] = None,
    quorum: Annotated[
        int | None, typer.Option("--quorum", min=0, help="How many of them must see the log before a release; 0: none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Define a round of a built competition; prints the round's id.

    Dates that are not given come from the definition. Nothing can be changed once the round is open, except that
    the close may be moved later. Log, evaluators and witnesses are printed before anything is signed.

    Example: acclimate round create ./digits --custodian a.json --custodian b.json --custodian c.json --opens +1h --closes +30d --keys ./me
    """
    from acclimate import client as actors
    from acclimate.files import read_json
    from acclimate_competitions import definition
    from acclimate_competitions.records import parse_time

    people = [read_json(path / "custodian.json" if path.is_dir() else path) for path in custodian or []]
    second = read_json(auditor / "auditor.json" if auditor.is_dir() else auditor) if auditor is not None else None
    wanted = witnesses_asked(witness or [], quorum)
    client, opened = connect(keys)
    with client, bar("uploading definition and public files") as progress:
        now = parse_time(client.terms()["now"])
        given = {"opens": opens, "closes": closes, "closes_latest": closes_latest, "release_by": release_by}
        dates = {label: moments.parse(text, now=now) for label, text in given.items() if text is not None}
        created = actors.create_round(
            client, opened, folder, custodians=people, auditor=second, witnesses=wanted, name=name, predecessor="",
            progress=progress, say=say, **dates,
        )  # fmt: skip
        state = client.round(created)
    tell_begun(state, definition.load(folder), folder, keys=keys)
    emit(state, as_json=as_json, text=created)


@app.command()
def seal(
    round_id: RoundId,
    folder: Annotated[
        Path, typer.Argument(help="The built competition that the round was created from.", metavar="FOLDER")
    ],
    keys: KeysFolder,
    holdout_changed: Annotated[
        bool,
        typer.Option(
            "--holdout-changed", help="The holdout was built anew since the round was created, and this one is meant."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Seal the holdout on this machine, for the custodians.

    The folder must be the one that the round was created from: a seal is for good. A rehearsal on dummy data is handed in with it. What leaves this machine is ciphertext, and one encrypted share a custodian. Interrupted, the same command goes on
    with the same seal.

    Example: acclimate round seal digits-2027-1 ./digits --keys ./me
    """
    from acclimate import client as actors

    client, opened = connect(keys)
    with client, bar("uploading the sealed holdout") as progress:
        answer = actors.seal_round(
            client, opened, round_id, folder, holdout_changed=holdout_changed, progress=progress, say=say
        )
    emit(answer, as_json=as_json, text=f"sealed {answer['round']}: {answer['seal']}, log entry {answer['index']}")


@app.command()
def extend(
    round_id: RoundId,
    closes: Annotated[str, typer.Option("--closes", help=f"The new close. {_WHEN}", metavar="WHEN")],
    keys: KeysFolder,
    as_json: AsJson = False,
) -> None:
    """Move the close of an open round later.

    By a signed record, before the close passes, and never beyond closes_latest.

    Example: acclimate round extend digits-2027-1 --closes 2027-04-08T12:00:00Z --keys ./me
    """
    from acclimate import client as actors
    from acclimate_competitions.records import parse_time

    client, opened = connect(keys)
    with client:
        now = parse_time(client.terms()["now"])
        moment = moments.parse(closes, now=now)
        answer = actors.extend(client, opened, round_id, closes=moment)
    text = f"{answer['record']['round']} closes {moments.show(moment, now=now)}: log entry {answer['index']}"
    emit(answer, as_json=as_json, text=text)


@app.command()
def publish(
    round_id: RoundId,
    keys: KeysFolder,
    reason: Annotated[str, typer.Option("--reason", help="A word on it, for the record.")] = "",
    as_json: AsJson = False,
) -> None:
    """Recompute, sign and publish an evaluated round's ranking.

    The ranking that is signed is the one recomputed on this machine, from the predictions and the opened holdout.

    Example: acclimate round publish digits-2027-1 --keys ./me
    """
    from acclimate import client as actors

    client, opened = connect(keys)
    with client:
        done = actors.publish(client, opened, round_id, reason=reason, say=say)
    emit(
        {name: done[name] for name in ("round", "index", "digest")},
        as_json=as_json,
        text=[
            *ranking_lines(done["ranking"]),
            f"published {done['round']}: {done['digest']}, log entry {done['index']}",
        ],
    )


@app.command()
def void(
    round_id: RoundId,
    reason: Annotated[str, typer.Option("--reason", help="Why; everybody will read it.")],
    keys: KeysFolder,
    approval: Annotated[
        list[Path] | None,
        typer.Option(
            "--approval", help="A custodian's approval of this reason; needed after the close.", metavar="FILE"
        ),
    ] = None,
    predecessor: Annotated[str, typer.Option("--predecessor", help="The round that this one followed, if any.")] = "",
    as_json: AsJson = False,
) -> None:
    """Void a round.

    All its records stay public. After the close the threshold of custodians must approve.

    Example: acclimate round void digits-2027-1 --reason "the holdout leaked" --approval a.json --approval b.json --keys ./me
    """
    from acclimate import client as actors
    from acclimate.files import read_json

    approvals = [read_json(path) for path in approval or []]
    client, opened = connect(keys)
    with client:
        answer = actors.void(client, opened, round_id, reason=reason, predecessor=predecessor, approvals=approvals)
    emit(answer, as_json=as_json, text=f"voided {answer['record']['round']}: log entry {answer['index']}")


@app.command("list")
def list_(server: Server = None, keys: ReaderKeys = None, as_json: AsJson = False) -> None:
    """List the server's rounds, the newest first.

    Example: acclimate round list --server https://rounds.example.org
    """
    from acclimate_competitions.records import parse_time

    with reader(keys, server) as client:
        found = client.rounds()
    rows = [
        (
            item["round"],
            item["phase"],
            item["entrants"],
            moments.show(parse_time(item["closes"]), now=parse_time(item["now"])),
        )
        for item in found
    ]
    text = table(("round", "phase", "entrants", "closes"), rows, right=("entrants",)) if rows else ["no rounds yet"]
    emit(found, as_json=as_json, text=text)


@app.command()
def records(round_id: RoundId, server: Server = None, keys: ReaderKeys = None, as_json: AsJson = False) -> None:
    """Print a round's log records, one a line.

    Index, time, type, and who signed; with --json a list of {index, record}.

    Example: acclimate round records digits-2027-1 --server https://rounds.example.org --json
    """
    with reader(keys, server) as client:
        found = client.records(round_id)
    rows = [(index, record.document()["at"], record.type, record.by or "-") for index, record in found]
    value = [{"index": index, "record": record.document()} for index, record in found]
    emit(value, as_json=as_json, text=table(("index", "at", "type", "signed by"), rows, right=("index",)))


@app.command()
def files(
    round_id: RoundId,
    out: Annotated[Path, typer.Option("--out", help="The folder to write.", metavar="DIR")],
    server: Server = None,
    keys: ReaderKeys = None,
    as_json: AsJson = False,
) -> None:
    """Download a round's public files: its definition, the tokenizer, the splits to prepare on.

    Each is checked against what the organizer signed. The holdout is not among them. Interrupted, the same command goes on.

    Example: acclimate round files digits-2027-1 --out digits-public --server https://rounds.example.org
    """
    from acclimate import client as actors
    from acclimate.files import require_place
    from acclimate_competitions import definition

    require_place(out, folder=True)
    with reader(keys, server) as client:
        found = actors.download_public_files(client, round_id, out)
    bases = definition.load(out).submission.bases
    text = [str(out / name) for name in sorted(found)]
    text += [f"base for adapters: {name}, {digest}" for name, digest in bases.items()]
    emit({"folder": str(out), "files": found, "bases": dict(bases)}, as_json=as_json, text=text)


@app.command()
def bundle(
    round_id: RoundId,
    out: Out,
    server: Server = None,
    keys: ReaderKeys = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole", help="Where the holdout stays private: all of it, for the round's organizer and auditor only."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Download a round's bundle, all that an auditor needs.

    Example: acclimate round bundle digits-2027-1 --out digits-2027-1.zip --server https://rounds.example.org
    """
    from acclimate import files

    files.require_replaceable(out, b"pk")
    files.require_place(out, folder=False)
    with reader(keys, server) as client, bar("downloading the bundle") as progress:
        client.bundle(round_id, out, whole=whole, progress=progress)
    say(f"check it: acclimate verify {out} --log-key KEY, the log's key, got from somebody who took part")
    emit({"file": str(out), "size": out.stat().st_size}, as_json=as_json, text=f"{out}, {out.stat().st_size} bytes")


@app.command()
def request(
    round_id: RoundId, out: Out, server: Server = None, keys: ReaderKeys = None, as_json: AsJson = False
) -> None:
    """Write a request for a release, to be mailed to custodians.

    All that a custodian's machine checks, in one file: the definition, the log up to a checkpoint with its cosignatures; with the organizer's keys
    the envelopes, too. Nothing in it is secret, and nobody needs to trust who made it.

    Example: acclimate round request digits-2027-1 --out digits-2027-1.request --keys ./me
    """
    from acclimate.client import requests
    from acclimate.files import require_place

    require_place(out, folder=False)
    with reader(keys, server) as client, bar("reading the log", unit="entries") as progress:
        made = requests.make(client, round_id, out, progress=progress)
    if not made["envelopes"]:
        say("without envelopes: a custodian uses the one that its key folder has kept since the acknowledgement")
    say("mail it to the custodians; they run: acclimate custodian release --request FILE --keys DIR")
    emit({"file": str(out), **made}, as_json=as_json, text=f"{out}, {made['entries']} log entries of {made['round']}")


@app.command()
def report(
    round_id: RoundId, out: Out, server: Server = None, keys: ReaderKeys = None, as_json: AsJson = False
) -> None:
    """Download a round's stability report, an HTML page.

    Example: acclimate round report digits-2027-1 --out report.html --server https://rounds.example.org
    """
    from acclimate import files

    files.require_replaceable(out, b"<!doctype html")
    files.require_place(out, folder=False)
    with reader(keys, server) as client:
        client.report(round_id, out)
    emit({"file": str(out), "size": out.stat().st_size}, as_json=as_json, text=f"{out}, {out.stat().st_size} bytes")


app.command("next")(next_round)
app.command("revise")(revise)
app.command("versions")(versions)
app.command("anchors")(anchors)
app.command("status", epilog="The same: acclimate round status digits-2027-1 --server https://rounds.example.org")(
    status
)


def ranking(
    round_id: RoundId,
    server: Server = None,
    keys: ReaderKeys = None,
    version: Annotated[
        int | None, typer.Option("--version", min=1, help="Which version, where it was revised; else the newest.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a round's ranking, with its baselines below.

    Of a bundle that lies here: acclimate rank --bundle PATH.

    Example: acclimate ranking digits-2027-1 --server https://rounds.example.org
    """
    try:
        with reader(keys, server) as client:
            document = client.ranking(round_id, version=version)
            if version is None:
                told(client, round_id)
    except Refusal as refusal:
        if refusal.code in ("round_unknown", "config_invalid") and lies_here(round_id):
            raise of_bundle(round_id) from refusal
        raise
    emit(document, as_json=as_json, text=ranking_lines(document))


def ranking_lines(document: dict[str, Any]) -> list[str]:
    """A ranking's document as a table."""
    header = ("rank", "interval", "entrant", "prepared", "se", "direct", "direct rank", "seeds")
    rows: list[tuple[object, ...]] = [
        (
            row["rank"],
            f"{row['rank_low']}–{row['rank_high']}",
            row["entrant"],
            _number(row["score"]),
            _number(row["se"]),
            _number(row["direct_score"]),
            row["direct_rank"],
            row["seeds"],
        )
        for row in document["ranking"]
    ]
    rows += [
        (
            "-",
            "-",
            f"{row['entrant']} ({_beside(row['entrant'], document)})",
            _number(row["score"]),
            _number(row["se"]),
            _number(row["direct_score"]),
            "-",
            row["seeds"],
        )
        for row in document["baselines"]
    ]
    return table(header, rows, right=tuple(name for name in header if name != "entrant"))


def _beside(name: str, document: dict[str, Any]) -> str:
    """Why somebody stands below the ranking, without a rank."""
    return "baseline" if name in document["policy"]["baselines"] else "unranked: conflict declared"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
