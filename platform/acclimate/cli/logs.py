"""`acclimate log`: hand the log over to a new key, follow it from elsewhere, check what was followed."""

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acclimate.cli.options import (
    AsJson,
    Blobs,
    ConfigFile,
    Database,
    DataFolder,
    LogKey,
    Server,
    need,
    read_log_keys,
)
from acclimate.cli.output import bar, counted, emit, say
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from acclimate.hand_overs import Chain, HandOver
    from acclimate.log_keys import LogKeys
    from acclimate.mirror import Followed

_PASSING = ("server_unreachable", "busy", "database_unreachable")
app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="The transparency log: mirror it, check a mirror, hand it over to a new key.",
)
MirrorFolder = Annotated[
    Path, typer.Option("--out", help="The mirror's folder; made if it is not there.", metavar="DIR")
]


@app.command()
def mirror(
    out: MirrorFolder,
    server: Server = None,
    log_key: LogKey = None,
    every: Annotated[
        int | None,
        typer.Option(
            "--every", min=1, max=10**9, help="Go on, and look again after so many seconds.", metavar="SECONDS"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Follow a log: fetch what is new, check that it only grew, and keep all of it.

    DIR then holds entries.jsonl, the last checkpoint, and the log's key. A server that shows another history than it showed before is refused, and both
    checkpoints are kept in DIR/forks. Killed at any moment and called again, it goes on. The key is needed the first time only; get it from somebody whom you trust.

    Example: acclimate log mirror --server https://rounds.example.org --log-key ./ada --out ./mirror
    """
    from acclimate import mirror as mirrors
    from acclimate.client import Client

    if server is None:
        raise Refusal("config_invalid", "which server?", hint="--server URL, or ACCLIMATE_SERVER in the environment")
    keys = read_log_keys(log_key, of=mirrors.begun_with(out)) if log_key is not None else None
    with mirrors.opened(out, _one_of(keys, mirrors.begun_with(out))) as kept, Client(server) as client:
        while True:
            try:
                with bar("following the log", unit="entries") as progress:
                    found = mirrors.follow(client, kept, keys=keys, progress=progress)
                emit(_value(found), as_json=as_json, text=_words(found, out))
            except Refusal as refusal:
                # Who watches a log for months outlives its server's restarts; anything else ends it.
                if every is None or refusal.code not in _PASSING:
                    raise
                say(f"{refusal.sentence}; trying again in {every} s")
            if every is None:
                return
            time.sleep(every)


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="A mirror's folder.", metavar="DIR")],
    log_key: LogKey = None,
    as_json: AsJson = False,
) -> None:
    """Check a mirror again, offline: entries, checkpoint, hand-overs of the key.

    With --log-key the mirror must be of the log with this key, or of one whose key was handed over from it.

    Example: acclimate log check ./mirror --log-key log.vkey
    """
    from acclimate import mirror as mirrors

    keys = read_log_keys(log_key, of=mirrors.begun_with(folder)) if log_key is not None else None
    found = mirrors.check(folder, _one_of(keys, mirrors.begun_with(folder)), keys=keys)
    emit(_value(found), as_json=as_json, text=_words(found, folder))


def _one_of(keys: "LogKeys | None", begun_with: str | None) -> str | None:
    """The key that a mirror was begun with, where it is one of these; else the newest."""
    if keys is None:
        return None
    return begun_with if begun_with in keys.texts else keys.newest


@app.command()
def keys(server: Server = None, log_key: LogKey = None, as_json: AsJson = False) -> None:
    """Show the keys that a log had, from one you know to the one it has now.

    Each hand-over is a record that the key before it signed. Without --log-key it is the server that says where they begin.

    Example: acclimate log keys --server https://rounds.example.org --log-key ./ada
    """
    from acclimate import log
    from acclimate.client import Client
    from acclimate.client.key_chain import chain_to

    if server is None:
        raise Refusal("config_invalid", "which server?", hint="--server URL, or ACCLIMATE_SERVER in the environment")
    with Client(server) as client:
        kept = read_log_keys(log_key, of=str(client.server().get("log"))) if log_key is not None else None
        found = chain_to(client, kept.texts[0] if kept is not None else None)
        if kept is not None:
            kept.require_now(found, log.parse_checkpoint(log.parse_note(client.checkpoint()).text).size)
    lines = [found.first.text(), *(_told(hand_over) for hand_over in found.hand_overs)]
    if log_key is None:
        lines.append("(no --log-key was given: where they begin is the server's word)")
    emit({"keys": _keys(found)}, as_json=as_json, text=lines)


@app.command()
def rotate(
    reason: Annotated[str, typer.Option("--reason", help="Why; public, and in the log for good.", metavar="TEXT")],
    abandon: Annotated[
        list[str] | None,
        typer.Option(
            "--abandon",
            help="Give up a round that is under way, because the key was stolen; the record names it. May be repeated;"
            " `unopened` means all that have not opened yet.",
            metavar="ROUND",
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Another one, although the log was handed over less than a day ago.")
    ] = False,
    data: DataFolder = None,
    config: ConfigFile = None,
    database: Database = None,
    blobs: Blobs = None,
    as_json: AsJson = False,
) -> None:
    """Hand the log over to a new key, which is made now; for the operator, with the API stopped.

    The record is signed by the old key and approved by the new one, and the checkpoint that holds it is signed by both. It is refused while a
    round is neither published nor voided: it would be lost, since custodians' clients release nothing after a hand-over. Killed at any moment and called again, it finishes; once it has ended, it is refused for a day without --again. The old key stays in the folder
    `retired` beside the new one, for a database that must be restored from before; destroy it when no such backup is left.

    Example: acclimate log rotate --data /srv/acclimate --reason "a new machine"
    """
    need("server", "sqlalchemy", "alembic")
    from acclimate.cli.database import alone, existing
    from acclimate.service import hand_over as handing
    from acclimate.store import Store

    settings = existing(data, file=config, database=database, blobs=blobs)
    with alone(settings):
        store = Store.open(settings)
        try:
            done = handing.hand_over(store, settings, reason=reason, abandon=abandon or (), again=again)
        finally:
            store.close()
    hand_over = done.hand_over
    if done.resumed:
        say("a hand-over that was begun earlier is finished; no other one was made")
    value = {
        "index": hand_over.index,
        "old": hand_over.old.text(),
        "new": hand_over.new.text(),
        "reason": hand_over.reason,
        "resumed": done.resumed,
    }
    text = [
        f"log entry {hand_over.index}: the log is handed over",
        f"from {hand_over.old.text()}",
        f"to   {hand_over.new.text()}",
        f"the new key is {settings.keys / 'log.pem'}: back it up, and copy it to every other API's folder of keys",
        "tell those who keep the log's key; `acclimate register --renew` and `acclimate log keys` follow it",
    ]
    emit(value, as_json=as_json, text=text)


def _value(found: "Followed") -> dict[str, Any]:
    return {
        "origin": found.chain.first.name,
        "size": found.checkpoint.size,
        "root": found.checkpoint.root.hex(),
        "new": found.new,
        "keys": _keys(found.chain),
    }


def _keys(chain: "Chain") -> list[dict[str, Any]]:
    hand_overs = [
        {**dataclasses.asdict(hand_over), "old": hand_over.old.text(), "new": hand_over.new.text()}
        for hand_over in chain.hand_overs
    ]
    return [
        {"key": chain.first.text(), "from": 0},
        *({"key": t["new"], "from": t["index"] + 2, **t} for t in hand_overs),
    ]


def _words(found: "Followed", folder: Path) -> list[str]:
    size = counted(found.checkpoint.size, "entry")
    lines = [f"{found.chain.first.name}: {size}, {found.new} of them new, in {folder}"]
    return lines + [_told(hand_over) for hand_over in found.chain.hand_overs]


def _told(hand_over: "HandOver") -> str:
    return f"{hand_over.new.text()}, by log entry {hand_over.index} ({hand_over.reason})"
