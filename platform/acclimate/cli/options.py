"""Options that many commands share, and what they open."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from acclimate.client import Client
    from acclimate.keys import Keys

KeysFolder = Annotated[
    Path,
    typer.Option("--keys", envvar="ACCLIMATE_KEYS", help="The actor's key folder, with its account.", metavar="DIR"),
]
ReaderKeys = Annotated[
    Path | None,
    typer.Option("--keys", envvar="ACCLIMATE_KEYS", help="Key folder whose account names the server.", metavar="DIR"),
]
Server = Annotated[
    str | None,
    typer.Option(
        "--server", envvar="ACCLIMATE_SERVER", help="The server's address, where no key folder names it.", metavar="URL"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout; notes stay on stderr.")]
RoundId = Annotated[str, typer.Argument(help="The round's id, or any beginning of it that is unique.", metavar="ROUND")]
DataFolder = Annotated[
    Path | None,
    typer.Option("--data", help="The server's data folder; else ACCLIMATE_DATA, else ./acclimate-data.", metavar="DIR"),
]


def connect(folder: Path) -> "tuple[Client, Keys]":
    """A client for the account of a key folder, and its keys."""
    from acclimate import keys
    from acclimate.client.folder import load_account

    opened = keys.load(folder)
    return load_account(folder).connect(), opened


def reader(folder: Path | None, server: str | None) -> "Client":
    """A client for what may be read: of the key folder's account, or of nobody where only the server is named."""
    from acclimate.client import Client
    from acclimate.client.folder import load_account

    account = load_account(folder) if folder is not None else None
    # A token goes to the server that gave it, never to another.
    if account is not None and server in (None, account.server):
        return account.connect()
    if server is not None:
        return Client(server)
    raise Refusal(
        "config_invalid",
        "which server?",
        hint="--server URL, or --keys DIR of an account; or ACCLIMATE_SERVER, ACCLIMATE_KEYS in the environment",
    )


def read_key(text: str) -> str:
    """A verifier key, or what the file of this name holds.

    Raises:
        Refusal: file_unreadable.
    """
    path = Path(text)
    try:
        return path.read_text("utf-8").strip() if "+" not in text and path.is_file() else text
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal("file_unreadable", f"{text}: {error}") from error


def need(extra: str, *modules: str) -> None:
    """Refuse a command whose extra is not installed.

    Raises:
        Refusal: extra_missing.
    """
    from importlib.util import find_spec

    def there(name: str) -> bool:
        try:
            return find_spec(name) is not None
        except ImportError:
            return False

    missing = [name for name in modules if not there(name)]
    if missing:
        raise Refusal(
            "extra_missing",
            f"this command needs {', '.join(missing)}, which a core install does not have",
            hint=f'pip install "acclimate[{extra}]"',
        )
