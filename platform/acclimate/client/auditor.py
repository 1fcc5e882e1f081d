"""What a second operator does: commit to a draw, draw, make the drawn preparations again, say what came of it.

The draw's secret is made before the round is, and kept in `draws.json` of the key folder; RoundDefined holds its digest. So whoever
prepared the models did not know which would be made again. A secret serves one round: once told, it tells every draw it is for.
"""

import base64
import secrets
from pathlib import Path
from typing import Any

from acclimate import keys as key_files
from acclimate.client import folder as files
from acclimate.keys import Keys
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

AUDITOR_FILE = "auditor.json"
DRAWS_FILE = "draws.json"


def keygen(keys: Keys, *, name: str, again: bool = False) -> dict[str, str]:
    """The auditor's public part {name, ed25519, draw}, with a new secret; both are kept in the key folder.

    Killed at any moment and called again, it finishes: the secret is kept before its digest is.

    Args:
        keys: the auditor's keys.
        name: as the definition names the auditor.
        again: whether a public part that is there already is replaced, for another round.

    Raises:
        Refusal: key_refused, where one is there; conflict, where the folder is somebody else's.
    """
    path = keys.folder / AUDITOR_FILE
    if (keys.folder / files.DOCUMENT_FILE).exists():
        raise _somebody_elses(keys, "a custodian's", name)
    if (keys.folder / files.ACCOUNT_FILE).exists():
        account = files.load_account(keys.folder)
        if (account.id, account.role) != (name, "auditor"):
            raise _somebody_elses(keys, f"of the account {account.id!r} ({account.role})", name)
    if path.exists():
        document = files.read_json(path)
        if not again:
            raise Refusal(
                "key_refused",
                f"{path} exists already, with the draw {document.get('draw')}",
                hint="send it to the organizer; for another round make a new secret with --again: each serves one round",
            )
        if document.get("name") != name:
            raise _somebody_elses(keys, f"of the auditor {document.get('name')!r}", name)
    secret = secrets.token_bytes(32)
    draw = digests.of_bytes(secret)
    files.write_json(keys.folder / DRAWS_FILE, {**_draws(keys), draw: base64.b64encode(secret).decode()})
    made = {"name": name, "ed25519": keys.public, "draw": draw}
    files.write_json(path, made)
    return made


def open_keys(folder: Path) -> Keys:
    """The keys of a folder, made where there are none."""
    if (folder / key_files.ED25519_FILE).exists():
        return key_files.load(folder)
    return key_files.create(folder, age=False)


def secret_of(keys: Keys, draw: str) -> str:
    """The secret (base64) that a round's draw commits to.

    Raises:
        Refusal: file_unreadable, where the folder does not keep it.
    """
    found = _draws(keys).get(draw)
    if not isinstance(found, str):
        raise Refusal(
            "file_unreadable",
            f"{keys.folder / DRAWS_FILE} does not hold the secret of draw {draw}",
            hint="restore the key folder from its backup; without the secret nobody can draw, and the organizer voids the round",
        )
    return found


def _draws(keys: Keys) -> dict[str, Any]:
    path = keys.folder / DRAWS_FILE
    found = files.read_json(path) if path.exists() else {}
    if not isinstance(found, dict):
        raise Refusal("file_unreadable", f"{path} does not hold draws", hint="restore it from a backup")
    return found


def _somebody_elses(keys: Keys, whose: str, name: str) -> Refusal:
    return Refusal(
        "conflict",
        f"{keys.folder} is {whose}, asked for was the auditor {name!r}",
        hint="one folder holds the keys of one account; name another folder",
    )
