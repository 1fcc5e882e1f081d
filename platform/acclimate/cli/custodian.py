"""`acclimate custodian`: keys, acknowledgement, evidence, release."""

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acclimate.cli.moments import clock
from acclimate.cli.options import AsJson, KeysFolder, RoundId, acting, connect, named
from acclimate.cli.output import bar, emit, say
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from acclimate.cli.output import Progress
    from acclimate.client import Client
    from acclimate.client.custodian import Released
    from acclimate.client.evidence import Check
    from acclimate.client.history import Source
    from acclimate.client.requests import Answer
    from acclimate.keys import Keys

_ELSEWHERE = "add --out ANSWER, and send that file from a computer that has account and network: acclimate custodian send ANSWER --keys DIR"
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Hold a share of a seal's key.")

Identity = Annotated[
    Path | None,
    typer.Option("--identity", help="Open the envelope with this age identity, such as the backup's.", metavar="FILE"),
]
OfRound = Annotated[
    str | None,
    typer.Argument(
        help="The round's id, or any beginning of it that is unique; --request names it, too.",
        metavar="ROUND",
        callback=named,
    ),
]
Request = Annotated[
    Path | None,
    typer.Option(
        "--request", help="Read everything from this file, which was mailed: no server is asked.", metavar="FILE"
    ),
]


@app.command(short_help="Make a custodian's keys.")
def keygen(
    name: Annotated[str, typer.Option("--name", help="The custodian's name in the definition.")],
    keys: KeysFolder,
    backup: Annotated[
        str | None, typer.Option("--backup", help="A second age recipient that can open the share.", metavar="age1…")
    ] = None,
    make_backup: Annotated[
        Path | None,
        typer.Option("--make-backup", help="Make that second identity, in a file to keep elsewhere.", metavar="FILE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a custodian's keys, and custodian.json for the organizer.

    Without a backup nobody can replace a lost key folder, and the share in it is lost. Interrupted, or registered before, the same command
    finishes what is there.

    Example: acclimate custodian keygen --name custodian-a --keys ./custodian-a --make-backup /media/stick/backup.txt
    """
    from acclimate import files
    from acclimate import keys as key_files
    from acclimate.client.folder import ACCOUNT_FILE, DOCUMENT_FILE

    if backup is not None and make_backup is not None:
        raise typer.BadParameter("give --backup or --make-backup, not both")
    document = _made(name, keys, backup=backup, make_backup=make_backup)
    if document is not None:
        say(f"your key is made already, and nothing was changed; send {keys / DOCUMENT_FILE} to the organizer")
        emit(document, as_json=as_json, text=[f"{label} {value or 'none'}" for label, value in document.items()])
        return
    finishing = _finish(name, keys)
    _require_new(keys)
    if make_backup is not None:
        _check_backup(make_backup, again=finishing)
    elif backup is not None:
        key_files.check_recipient(backup)
    else:
        say("note: no backup recipient; if this folder is lost, so is the share")
    made = key_files.add_age(keys) if finishing else key_files.create(keys, age=True)
    # Made after the keys: whoever is interrupted in between repeats the same line, and it goes on.
    if make_backup is not None:
        backup = _make_backup(make_backup)
    document = {"name": name, "age": made.age_recipient, "ed25519": made.public, "backup": backup}
    files.write_json(keys / DOCUMENT_FILE, document)
    say(f"send {keys / DOCUMENT_FILE} to the organizer; the other files in {keys} are secret")
    if not (keys / ACCOUNT_FILE).exists():
        say(
            "next: get a custodian's invitation from the server's operator, then: acclimate register --role custodian"
            f" --name {name} --invitation CODE --server URL --keys {keys}"
        )
    emit(document, as_json=as_json, text=[f"{label} {value or 'none'}" for label, value in document.items()])


@app.command()
def ack(round_id: RoundId, keys: KeysFolder, identity: Identity = None, as_json: AsJson = False) -> None:
    """Acknowledge a share, once it could be decrypted.

    Shown first: the round's whole id, its dates, how many shares open the holdout, and who holds them. The rehearsal's share is decrypted and handed in too. Log key, organizer key, seal and a signed checkpoint are pinned in DIR/pins.json; `release` holds the server to them.

    Example: acclimate custodian ack digits-2027-1 --keys ./custodian-a
    """
    from acclimate.client import acknowledge
    from acclimate.client.pins import pinned

    opened = _opened(keys, identity)
    with acting(keys) as client, _reading() as progress:
        answer = acknowledge(client, opened, round_id, say=say, progress=progress)
        pin = pinned(opened, answer["record"]["round"])
    value = dataclasses.asdict(pin) | {"entry": answer["index"]}
    text = [
        f"acknowledged share {pin.index} of {pin.round}: log entry {answer['index']}",
        f"pinned in {keys / 'pins.json'}: log {pin.log}",
        f"  organizer {pin.organizer}",
        f"  seal {pin.seal}",
    ]
    emit(value, as_json=as_json, text=text)


@app.command()
def release(
    keys: KeysFolder,
    round_id: OfRound = None,
    request: Request = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Write the release to a file instead of sending it; `send` sends it.", metavar="ANSWER"
        ),
    ] = None,
    identity: Identity = None,
    as_json: AsJson = False,
) -> None:
    """Release a share, after checks on this machine.

    Only once the round has closed and every entry was prepared.

    The whole log is read and hashed, compared with what was pinned, and the round's records are folded here: the
    server's word is not enough. Anything that does not hold is refused, before the share is decrypted. With --request all of it
    is read from a file that was mailed, with --out too no network is needed.

    Example: acclimate custodian release digits-2027-1 --keys ./custodian-a
    """
    from acclimate import client as actors

    opened = _opened(keys, identity)
    kept = _kept(out)
    if request is not None and out is None:
        _require_account(keys)
    with _evidence(keys, round_id, request) as (source, name):
        try:
            made, checks = actors.answer(source, opened, name, now=clock(), show=lambda check: say(_line(check)))
        except Refusal:
            say("nothing was sent")
            raise
        value = {"round": made.round, "share": made.share, "checks": _documents(checks)}
        if out is not None:
            if kept is None:
                made.write(out)
            elif kept != made:
                raise _holds_another(out, kept)
            say(
                f"next, where there is a network: acclimate custodian send {out} --keys {keys}; keep it secret until then"
            )
            text = f"the release of share {made.share} of {made.round} is in {out}; it is not sent yet"
            emit({**value, "file": str(out)}, as_json=as_json, text=text)
            return
        with acting(keys) as client:
            done = _sent(client, made)
    text = f"released share {done.share} of {done.round}: log entry {done.index}"
    emit({**value, "entry": done.index}, as_json=as_json, text=text)


@app.command()
def send(
    answer: Annotated[Path, typer.Argument(help="What `release --out` wrote.", metavar="ANSWER")],
    keys: KeysFolder,
    as_json: AsJson = False,
) -> None:
    """Send a release that was made without a network.

    DIR need not hold the keys: a folder with the custodian's account.json is enough. Sent twice it is the same release.

    Example: acclimate custodian send answer.json --keys ./custodian-a
    """
    from acclimate import client as actors
    from acclimate.client import requests

    made = requests.read_answer(answer)
    with acting(keys) as client:
        done = actors.send(client, made)
    value = {"round": done.round, "share": done.share, "entry": done.index}
    emit(value, as_json=as_json, text=f"released share {done.share} of {done.round}: log entry {done.index}")


@app.command()
def inspect(keys: KeysFolder, round_id: OfRound = None, request: Request = None, as_json: AsJson = False) -> None:
    """Show what `release` would check, as it stands now.

    Nothing is decrypted or sent. NOT YET: the round goes on, and there is nothing to do. NOT NEEDED: you have released your share, others have opened the round, or it was voided. Exits 1 unless a release is due.

    Example: acclimate custodian inspect digits-2027-1 --keys ./custodian-a
    """
    from acclimate import client as actors

    opened = _opened(keys, None)
    with _evidence(keys, round_id, request) as (source, name):
        found = actors.inspect(source, opened, name, now=clock())
    emit({"checks": _documents(found)}, as_json=as_json, text=[_line(check) for check in found])
    if any(check.status in ("FAILED", "NOT YET", "NOT NEEDED") for check in found):
        raise typer.Exit(1)
    say("nothing stands against it: acclimate custodian release does it")


@app.command("approve-void")
def approve_void(
    round_id: RoundId,
    reason: Annotated[str, typer.Option("--reason", help="Exactly the reason that whoever signs will give.")],
    keys: KeysFolder,
    predecessor: Annotated[str, typer.Option("--predecessor", help="As whoever signs will give it.")] = "",
    signer: Annotated[
        str,
        typer.Option("--signer", help="The custodian who will sign with `custodian void`; else the organizer signs."),
    ] = "",
) -> None:
    """Agree to the voiding of a round, in the phase that it is in.

    For exactly this reason; prints the approval as JSON, for whoever signs the voiding. Once the round goes on to its next phase, it is worth nothing.

    Example: acclimate custodian approve-void digits-2027-1 --reason "the holdout leaked" --keys ./custodian-a > approval.json
    """
    from acclimate import client as actors

    client, opened = connect(keys)
    with client:
        approval = actors.approve_void(
            client, opened, round_id, reason=reason, predecessor=predecessor, signer=signer, say=say
        )
    say(f"agreed to the voiding of {approval['round']}")
    emit(approval, as_json=True, text="")


@app.command()
def void(
    round_id: RoundId,
    reason: Annotated[str, typer.Option("--reason", help="Why; everybody will read it.")],
    keys: KeysFolder,
    approval: Annotated[
        list[Path] | None,
        typer.Option("--approval", help="Another custodian's approval, made with --signer YOU.", metavar="FILE"),
    ] = None,
    predecessor: Annotated[str, typer.Option("--predecessor", help="The round that this one followed, if any.")] = "",
    as_json: AsJson = False,
) -> None:
    """Void a round together with other custodians, without the organizer.

    You sign, and with you as many custodians must agree as open the seal. All records stay public.

    Example: acclimate custodian void digits-2027-1 --reason "the organizer is gone" --approval b.json --keys ./custodian-a
    """
    from acclimate import client as actors
    from acclimate.files import read_json

    approvals = [read_json(path) for path in approval or []]
    client, opened = connect(keys)
    with client:
        answer = actors.void_together(
            client, opened, round_id, reason=reason, predecessor=predecessor, approvals=approvals
        )
    emit(answer, as_json=as_json, text=f"voided {answer['record']['round']}: log entry {answer['index']}")


def _opened(keys: Path, identity: Path | None) -> "Keys":
    from acclimate.keys import load, load_age_identity

    opened = load(keys)
    return opened if identity is None else dataclasses.replace(opened, age_identity=load_age_identity(identity))


@contextmanager
def _evidence(keys: Path, round_id: str | None, request: Path | None) -> "Iterator[tuple[Source, str]]":
    """Where the evidence comes from, and which round it is about."""
    from acclimate.client import requests
    from acclimate.client.folder import load_account
    from acclimate.client.history import Online

    if request is not None:
        mailed = requests.read(request)
        if round_id is not None and not mailed.round.startswith(round_id):
            raise Refusal(
                "round_unknown", f"{request} is about {mailed.round}, asked for was {round_id}", hint="name one of both"
            )
        yield mailed, mailed.round
    elif round_id is not None:
        with load_account(keys).connect() as client, _reading() as progress:
            yield Online(client, progress), round_id
    else:
        raise typer.BadParameter("give the round's id, or --request FILE")


def _reading() -> "AbstractContextManager[Progress]":
    return bar("reading the log", unit="entries")


def _sent(client: "Client", made: "Answer") -> "Released":
    from acclimate import client as actors

    try:
        return actors.send(client, made)
    except Refusal as refusal:
        if refusal.code != "server_unreachable":
            raise
        raise Refusal(
            refusal.code, f"{refusal.sentence}; nothing was sent", hint=f"no network here? {_ELSEWHERE}"
        ) from refusal


def _require_account(keys: Path) -> None:
    """Refuse, before anything is read, to send a release from where nothing says to which server.

    Raises:
        Refusal: file_unreadable.
    """
    from acclimate.client.folder import ACCOUNT_FILE

    if not (keys / ACCOUNT_FILE).exists():
        raise Refusal(
            "file_unreadable",
            f"{keys / ACCOUNT_FILE} does not exist: there is no account to send from",
            hint=_ELSEWHERE,
        )


def _kept(out: Path | None) -> "Answer | None":
    """The answer that a file holds already: the same command may be typed twice.

    Raises:
        Refusal: conflict, where it holds something else.
    """
    from acclimate.client import requests

    if out is None or not out.exists():
        return None
    try:
        return requests.read_answer(out)
    except Refusal as refusal:
        raise Refusal(
            "conflict", f"{out} exists already; nothing is overwritten", hint="name another file"
        ) from refusal


def _holds_another(out: Path, kept: "Answer") -> Refusal:
    return Refusal(
        "conflict",
        f"{out} holds the release of share {kept.share} of {kept.round} already, and another one than this; nothing is overwritten",
        hint=f"send it: acclimate custodian send {out} --keys DIR; or name another file",
    )


def _made(name: str, keys: Path, *, backup: str | None, make_backup: Path | None) -> dict[str, str | None] | None:
    """The custodian.json of a folder whose keys are made already, for who types the same line twice; None where there is none.

    Raises:
        Refusal: conflict, where it is another custodian's, of other keys, or with another backup than is asked for; file_unreadable, key_refused.
    """
    from acclimate import files
    from acclimate import keys as key_files
    from acclimate.client.folder import DOCUMENT_FILE

    path = keys / DOCUMENT_FILE
    if not path.exists() or not (keys / key_files.AGE_FILE).exists():
        return None
    found, opened = files.read_json(path), key_files.load(keys)
    own = {"name": name, "age": opened.age_recipient, "ed25519": opened.public}
    have = {key: found.get(key) for key in own} if isinstance(found, dict) else {}
    if have != own:
        named = str(have.get("name"))[:80]
        if named == name:
            sentence = f"{path} is the document of other keys than those in {keys}"
            hint = "put the keys back that it was made with, or name another folder: a key is never overwritten"
        else:
            sentence = f"{keys} holds the keys of the custodian {named!r}, asked for was {name!r}"
            hint = f"a key is never overwritten: use it under its name, --name {named}, or name another folder"
        raise Refusal("conflict", sentence, hint=hint)
    kept: str | None = found.get("backup")
    if make_backup is not None and kept is None:
        raise Refusal(
            "conflict",
            f"{path} was made without a backup: {make_backup} would be none of it",
            hint=f"before you send {path}: remove that file and repeat the line, and the backup is made",
        )
    if make_backup is not None and make_backup.exists():
        backup = key_files.recipient_of(key_files.load_age_identity(make_backup))
    elif make_backup is not None and kept is not None:
        say(f"note: {make_backup} is not there; the backup was made already, is its stick plugged in?")
        backup = kept
    if backup is not None:
        key_files.check_recipient(backup)
    if (make_backup is not None or backup is not None) and backup != kept:
        raise Refusal(
            "conflict",
            f"{path} has the backup {kept or 'none'}, asked for was {backup}",
            hint=f"to change it, before you send {path}: remove that file and repeat the line",
        )
    return {**own, "backup": kept}


def _finish(name: str, keys: Path) -> bool:
    """Whether this is a key folder that has a signing key and lacks the rest of a custodian's: registered first, or a killed keygen.

    Raises:
        Refusal: key_refused, conflict, file_unreadable.
    """
    from acclimate import keys as key_files
    from acclimate.client import folder

    if not (keys / key_files.ED25519_FILE).exists():
        return False
    registered = (keys / folder.ACCOUNT_FILE).exists()
    if (keys / folder.DOCUMENT_FILE).exists() or not (registered or (keys / key_files.AGE_FILE).exists()):
        raise Refusal(
            "key_refused",
            f"{keys / key_files.ED25519_FILE} exists already; a key is never overwritten",
            hint="use it, or name another folder",
        )
    if registered:
        account = folder.load_account(keys)
        if (account.id, account.role) != (name, "custodian"):
            raise Refusal(
                "conflict",
                f"{keys} is the account {account.id!r} ({account.role}), asked for was {name!r} as custodian",
                hint="one folder holds the keys of one account; name another folder",
            )
    return True


def _require_new(keys: Path) -> None:
    """Refuse a key folder in which no keys can be made, before anything is written.

    Raises:
        Refusal: key_refused, file_unreadable.
    """
    import os

    there = next(path for path in (keys, *keys.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise Refusal("file_unreadable", f"{there} is no folder that can be written to", hint="name another folder")
    if there == keys and any(keys.iterdir()) and os.name == "posix" and keys.stat().st_mode & 0o022:
        raise Refusal("key_refused", f"others than its owner may put files into {keys}", hint=f"chmod 700 {keys}")


def _check_backup(path: Path, *, again: bool) -> None:
    """Refuse a place where no backup can be made, before any key is; `again`: one that was made by a killed call is taken up."""
    if path.exists() and not again:
        raise Refusal("key_refused", f"{path} exists already; a key is never overwritten", hint="name another file")
    if not path.absolute().parent.is_dir():
        # Made here, it would lie on the very disk that it is to be a backup of.
        raise Refusal(
            "file_unreadable", f"there is no folder {path.parent}", hint="is the stick plugged in? nothing was made"
        )


def _make_backup(path: Path) -> str:
    import pyrage

    from acclimate import files
    from acclimate import keys as key_files

    if path.exists():
        recipient = key_files.recipient_of(key_files.load_age_identity(path))
    else:
        identity = pyrage.x25519.Identity.generate()
        recipient = str(identity.to_public())
        files.write(path, f"# public key: {recipient}\n{identity}\n".encode())
    say(f"the backup identity is {path}: keep it away from this machine")
    return recipient


def _line(check: "Check") -> str:
    return f"{check.status:<11}  {check.name}: {check.detail}"


def _documents(checks: "Iterable[Check]") -> list[dict[str, Any]]:
    return [dataclasses.asdict(check) for check in checks]
