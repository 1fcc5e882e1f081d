"""`acclimate witness`: vouch for a log that somebody else runs."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from acclimate.cli.options import AsJson, need, read_log_key
from acclimate.cli.output import emit, say, table

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Vouch for a log that somebody else runs.")

Folder = Annotated[
    Path,
    typer.Option("--keys", envvar="ACCLIMATE_KEYS", help="The witness's folder: key, name, memory.", metavar="DIR"),
]


@app.command()
def keygen(
    name: Annotated[
        str, typer.Option("--name", help="The name under which it signs, such as witness.example.org; for good.")
    ],
    keys: Folder,
    as_json: AsJson = False,
) -> None:
    """Make a witness: its key, its name, and the memory of what it has cosigned.

    Key and memory stay together: never restore a copy of either, and never run a copy beside it. Where the memory is lost, make a new one.

    Example: acclimate witness keygen --name witness.example.org --keys /var/lib/acclimate-witness
    """
    from acclimate import witness_folder

    made = witness_folder.create(keys, name, now=int(time.time()))
    say(
        f"give {keys / witness_folder.VKEY_FILE} to whoever runs the log, and to auditors; nothing else in {keys} leaves this machine"
    )
    say("next, with the log's key: acclimate witness run --keys DIR --log-key KEY --port 8480")
    emit({"name": name, "vkey": made.verifier.text()}, as_json=as_json, text=made.verifier.text())


@app.command()
def run(
    keys: Folder,
    log_key: Annotated[
        list[str] | None,
        typer.Option(
            "--log-key",
            help="Key of a log to vouch for, or a file that holds it; once for each log. Where a log has had several keys: in their order.",
            metavar="KEY",
        ),
    ] = None,
    log: Annotated[
        list[str] | None, typer.Option("--log", hidden=True, help="As --log-key; of the first version.")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="The port; 0 takes a free one.")] = 8480,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    prefix: Annotated[
        str,
        typer.Option(
            "--prefix", help="Path before every address, where a reverse proxy passes it on.", metavar="/PATH"
        ),
    ] = "",
) -> None:
    """Run the witness: it cosigns what a log brings, as long as the log only grows.

    It is asked over HTTP (C2SP tlog-witness) by whoever has a checkpoint; TLS is a reverse proxy's part. Ends with SIGINT or SIGTERM.

    Example: acclimate witness run --keys /var/lib/acclimate-witness --log-key rounds.example.org/log+0a1b2c3d+Aabc --port 8480
    """
    need("witness", "uvicorn")
    from acclimate import notes, witness_folder, witness_http
    from acclimate.witness import Witness
    from acclimate.witness_tally import Tally

    if prefix and (not prefix.startswith("/") or prefix.endswith("/") or not prefix.isprintable() or " " in prefix):
        raise typer.BadParameter("--prefix begins with a slash and ends without one")
    given = [*(log or []), *(log_key or [])]
    if not given:
        raise typer.BadParameter("which log? --log-key KEY, got from whoever runs the log; once for each of its keys")
    logs = [notes.parse_vkey(read_log_key(text)) for text in given]
    identity = witness_folder.load(keys)
    with witness_folder.alone(keys), witness_http.listen(host, port) as listener:
        memory, tally = identity.memory(), Tally(keys / witness_folder.TALLY_FILE)
        try:
            witness = Witness(identity.verifier.name, identity.keys.ed25519, logs=logs, state=memory, tally=tally)
            witness_http.serve(witness_http.App(witness, prefix), listener)
        finally:
            memory.close()
            tally.close()


@app.command()
def status(keys: Folder, as_json: AsJson = False) -> None:
    """Show what the witness has cosigned, how often it refused, by log and kind, and what it refused as a fork.

    Exits with 1 where a log has shown two histories: then keep the folder, tell who runs the log, and tell its auditors.

    Example: acclimate witness status --keys /var/lib/acclimate-witness
    """
    from acclimate import witness_folder, witness_tally

    identity = witness_folder.load(keys)
    counts = witness_tally.read(keys / witness_folder.TALLY_FILE)
    memory = identity.memory()
    try:
        seen = memory.all_seen()
        refused = [one for newest in seen for one in memory.refused(newest.origin)]
    finally:
        memory.close()
    running = witness_folder.is_running(keys)
    forks = [one for one in refused if one.fork]
    value: dict[str, Any] = {
        "witness": identity.verifier.text(),
        "running": running,
        "logs": [{"origin": one.origin, "size": one.size, "root": one.root.hex(), "time": _time(one.time), "checkpoint": one.note} for one in seen],
        "refused": [
            {"origin": one.origin, "size": one.size, "root": one.root.hex(), "time": _time(one.time), "fork": one.fork,
             "checkpoint": one.note, "cosigned": one.seen}
            for one in refused
        ],
        "refusals": [
            {"origin": one.origin or None, "status": one.status, "kind": witness_tally.KINDS[one.status], "count": one.count,
             "last": _time(one.last), "reason": one.reason}
            for one in counts
        ],
    }  # fmt: skip
    rows = [
        [one.origin, one.size, _time(one.time), sum(c.count for c in counts if c.origin == one.origin)] for one in seen
    ]
    text = [f"witness {identity.verifier.text()}", "running" if running else "not running", ""]
    text += (
        table(("log", "entries", "cosigned at", "refused"), rows, right=("entries", "refused"))
        if rows
        else ["nothing cosigned yet"]
    )
    if counts:
        kinds = [
            [one.origin or "-", one.status, witness_tally.KINDS[one.status], one.count, _time(one.last)]
            for one in counts
        ]
        text += ["", *table(("refused", "status", "why", "times", "last at"), kinds, right=("status", "times"))]
    for one in forks:
        text += [
            "",
            f"FORK of {one.origin}: at {one.size} entries the log has signed two roots, so it has shown two histories:",
            *(line for note in (one.seen, one.note) for line in ("", *note.splitlines())),
        ]
    emit(value, as_json=as_json, text=text)
    if forks:
        raise typer.Exit(1)


def _time(seconds: int) -> str:
    from acclimate.quorum import moment
    from acclimate_competitions.records import format_time

    return format_time(moment(seconds))
