"""`acclimate register`: keys and an account."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from acclimate.cli.options import AsJson
from acclimate.cli.output import emit, say


def register(
    server: Annotated[
        str, typer.Option("--server", envvar="ACCLIMATE_SERVER", help="The server's address.", metavar="URL")
    ],
    name: Annotated[str, typer.Option("--name", help="The account's name: small letters, digits, hyphens; for good.")],
    keys: Annotated[
        Path,
        typer.Option("--keys", envvar="ACCLIMATE_KEYS", help="Key folder; made if it is not there.", metavar="DIR"),
    ],
    role: Annotated[str, typer.Option("--role", help="entrant, organizer, custodian, auditor or analyst.")] = "entrant",
    invitation: Annotated[
        str | None,
        typer.Option(
            "--invitation",
            envvar="ACCLIMATE_INVITATION",
            help="Needed for every role but entrant, and at some servers for that. With - it is asked for, or read from standard input.",
            metavar="CODE",
        ),
    ] = None,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew",
            help="Get a new token for the account; the old one ends. The log's key is followed, where it was handed over, and the server, where it has another address now.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make keys and an account at a server.

    The token is shown once, and kept in DIR/account.json. The key signs what the account does; the token opens the server's routes. The log's key is kept in DIR/log.vkey: receipts and bundles are checked with `--log-key DIR`.

    Example: acclimate register --server https://rounds.example.org --name ada --keys ./ada
    """
    from acclimate import files
    from acclimate import keys as key_files
    from acclimate.client import Client, folder, register_account
    from acclimate.service import names
    from acclimate_competitions.errors import Refusal

    names.check_id(name, what="account name")
    files.require_place(keys, folder=True)
    known = (keys / folder.ACCOUNT_FILE).exists() and not renew
    new = not (keys / key_files.ED25519_FILE).exists()
    with Client(server) as client:
        folder.check_owner(keys, client.url, name=name, role=role, moved=renew)
        # Nothing is written before a server has answered.
        kept = folder.kept_log_keys(keys)
        vkey, ended = folder.log_key(client, keys, follow=renew), folder.given_up(client, keys)
        opened = key_files.create(keys, age=role == "custodian") if new else key_files.load(keys)
        try:
            account = register_account(client, opened, name=name, role=role, invitation=_given(invitation), renew=renew)
        except Refusal:
            if new:
                say(f"no account was made; the new key in {keys} is kept, and the next try uses it")
            raise
    folder.keep_log_key(keys, vkey, ended=ended)
    _tell(kept, vkey, keys / folder.LOG_KEY_FILE)
    if new:
        say(f"made a new key in {keys}; keep it safe: nothing else can prove that you are {name}")
    if role == "custodian" and not (keys / folder.DOCUMENT_FILE).exists():
        say(
            f"next: acclimate custodian keygen --name {name} --keys {keys} --make-backup FILE makes custodian.json for the organizer"
        )
    value = {
        **{"id": account.id, "role": account.role, "server": account.server},
        **{"keys": str(keys), "ed25519": opened.public, "log": vkey},
    }
    if known:
        # Registered is who has a token that the server knows: after a restore it may know none.
        with account.connect(keys) as own:
            own.server()
        emit(value | {"token": None}, as_json=as_json, text=f"{account.id} is registered already, as {account.role}")
        return
    text = [
        f"{account.id}, {account.role} at {account.server}",
        *(f"token {account.token}", f"(shown this once; kept in {keys / folder.ACCOUNT_FILE})"),
        *(f"log {vkey}", f"(the log's key; kept in {keys / folder.LOG_KEY_FILE})"),
    ]
    emit(value | {"token": account.token}, as_json=as_json, text=text)


def _tell(kept: list[str], vkey: str, path: Path) -> None:
    if kept and kept[0] != vkey:
        say(f"the log was handed over from {kept[0]} to {vkey}; {path} keeps the new key")


def _given(invitation: str | None) -> str | None:
    """The invitation's code; with `-` it is asked for, so that it stands in no list of processes and no shell's history."""
    if invitation == "-":
        asked = sys.stdin.isatty()
        invitation = str(typer.prompt("invitation", hide_input=True, err=True)) if asked else sys.stdin.readline()
    return invitation.strip() if invitation is not None else None
