"""Options that many commands share, and what they open."""

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acclimate.extras import need as need
from acclimate_competitions import reading
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from acclimate.client import Client
    from acclimate.client.servers import Witnesses
    from acclimate.keys import Keys
    from acclimate.log_keys import LogKeys

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


def named(round_id: str | None) -> str | None:
    """A round's id as an argument or option, which may not be empty: in a new terminal $ROUND is.

    Raises:
        Refusal: round_unknown.
    """
    if round_id is not None:
        from acclimate.client.addresses import require_round

        require_round(round_id)
        if ("/" in round_id or round_id.lower().endswith(".zip")) and lies_here(round_id):
            raise of_bundle(round_id)
    return round_id


def lies_here(word: str) -> bool:
    """Whether there is a bundle, by its form, at a path that a word may be."""
    path = Path(word)
    try:
        return (path / "MANIFEST").is_file() or (path.suffix.lower() == ".zip" and path.is_file())
    except (OSError, ValueError):  # no name that a file can have
        return False


def of_bundle(word: str) -> Refusal:
    """The refusal of a bundle's path where a server's round is asked for."""
    path = shlex.quote(word)
    return Refusal(
        "round_unknown",
        f"{word!r} is a bundle that lies here, and no round's id",
        hint=f"its ranking: acclimate rank --bundle {path}; all of it: acclimate report {path} -o report.html, acclimate verify {path}",
    )


RoundId = Annotated[
    str,
    typer.Argument(
        help="The round's id, or any beginning of it that is unique.",
        metavar="ROUND",
        callback=named,
    ),
]
LogKey = Annotated[
    str | None,
    typer.Option(
        "--log-key",
        help="The log's key, got elsewhere: name+hash+base64, a file that holds it, or a key folder that keeps it.",
        metavar="KEY",
    ),
]
DataFolder = Annotated[
    Path | None,
    typer.Option("--data", help="The server's data folder; else ACCLIMATE_DATA, else ./acclimate-data.", metavar="DIR"),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A TOML file of settings, see docs/settings.md; else ACCLIMATE_CONFIG, else none.",
        metavar="FILE",
    ),
]
Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        help="sqlite:///FILE or postgresql://USER@HOST/NAME; else ACCLIMATE_DATABASE, where a password belongs, "
        "else a SQLite file in the data folder.",
        metavar="URL",
    ),
]
Blobs = Annotated[
    str | None,
    typer.Option(
        "--blobs",
        help="Where uploads and results lie: a folder or s3://BUCKET/PREFIX; else ACCLIMATE_BLOBS, else the data folder.",
        metavar="PLACE",
    ),
]


def connect(folder: Path, *, reads: bool = False) -> "tuple[Client, Keys]":
    """A client for the account of a key folder, and its keys; the server's log must go on from what the folder has seen of it.

    Args:
        folder: the key folder.
        reads: whether nothing is signed: then the command says itself that the log went back.

    Raises:
        Refusal: log_inconsistent, where the log went back; …
    """
    from acclimate import keys
    from acclimate.client.folder import load_account

    opened = keys.load(folder)
    return load_account(folder).connect(folder) if reads else acting(folder), opened


def acting(folder: Path) -> "Client":
    """A client for the account of a key folder that is about to sign; the server's log must go on from what the folder has seen of it.

    Raises:
        Refusal: log_inconsistent, where the log went back; …
    """
    from acclimate.client import seen_log
    from acclimate.client.folder import load_account

    client = load_account(folder).connect(folder)
    try:
        seen_log.require_grown(client, folder)
    except BaseException:
        client.close()
        raise
    return client


def reader(folder: Path | None, server: str | None) -> "Client":
    """A client for what may be read: of the key folder's account, or of nobody where only the server is named."""
    from acclimate.cli.output import say
    from acclimate.client import Client, seen_log
    from acclimate.client.folder import load_account

    account = load_account(folder) if folder is not None else None
    # A token goes to the server that gave it, never to another.
    if account is not None and folder is not None and server in (None, account.server):
        client = account.connect(folder)
        try:
            if (back := seen_log.went_back(client, folder)) is not None:
                # What is left may be read.
                say(f"warning: {back.sentence} ({back.code}); {back.hint}")
        except BaseException:
            client.close()
            raise
        return client
    if server is not None:
        return Client(server)
    raise Refusal(
        "config_invalid",
        "which server?",
        hint="--server URL, or --keys DIR of an account; or ACCLIMATE_SERVER, ACCLIMATE_KEYS in the environment",
    )


_VKEY = re.compile(r"[^+\s]+\+[0-9a-f]{8}\+[A-Za-z0-9+/]+=*")


_A_KEY = "name the file that holds the key, one line; a key itself looks like name+hash+base64, such as x.org/log+…"


def read_key(text: str) -> str:
    """A verifier key, or what the file of this name holds.

    Raises:
        Refusal: file_unreadable.
    """
    if _VKEY.fullmatch(text):
        return text
    path = Path(text)
    try:
        there = path.exists()
    except OSError as error:
        raise Refusal("file_unreadable", f"{text}: {error.strerror}", hint=_A_KEY) from error
    if there:
        return reading.text(path, reading.LONGEST_KEY, hint=_A_KEY).strip()
    if "+" not in text or text.startswith((".", "/", "~")):
        raise Refusal(
            "file_unreadable",
            f"{text}: no such file",
            hint=_A_KEY,
        )
    return text


def read_log_keys(text: str, *, of: str | None = None) -> "LogKeys":
    """A log's key: itself, or what a file holds; or those of a log that an actor's key folder keeps, the given up ones with where that was.

    Args:
        text: the key, or the name of a file or key folder.
        of: the key that a bundle, a mirror or a server names: of several logs that a folder knows, its one is meant.

    Raises:
        Refusal: file_unreadable; where a folder keeps keys of several logs, and it is not said which is meant.
    """
    from acclimate.client.folder import known_logs
    from acclimate.log_keys import LogKeys

    if _VKEY.fullmatch(text) or not (folder := Path(text)).is_dir():
        return LogKeys(read_key(text))
    if not (known := known_logs(folder)):
        raise _unfit(f"{text} keeps no log key")
    if of is not None:
        same = [one for one in known if of in one.texts]
        return (same or [one for one in known if one.origin == of.partition("+")[0]] or known)[0]
    if len({one.origin for one in known}) > 1:
        raise _unfit(f"{text} keeps the keys of several logs: {', '.join(one.newest for one in known)}")
    return known[0]


def read_log_key(text: str) -> str:
    """A log's key of now, as `read_log_keys`."""
    return read_log_keys(text).newest


def _unfit(sentence: str) -> Refusal:
    return Refusal(
        "file_unreadable",
        sentence,
        hint="a key folder keeps it in log.vkey, made by `acclimate register`; a custodian's in pins.json, too",
    )


def witnesses_asked(given: list[str], quorum: int | None) -> "Witnesses | None":
    """The witnesses that an organizer asks for; None where neither option is given."""
    from acclimate.client.servers import Witnesses
    from acclimate.quorum import parse_witness

    if not given and quorum is None:
        return None
    if quorum is None or quorum > len(given):
        raise typer.BadParameter(
            f"--witness for each witness belongs to --quorum N, at most their number: {len(given)} and {quorum}"
        )
    return Witnesses(tuple(parse_witness(read_key(text)).text() for text in given), quorum)
