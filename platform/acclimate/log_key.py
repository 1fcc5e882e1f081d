"""The log's key as files: log.pem, its successor while a hand-over is under way (log.next.pem), and keys that were given up (retired/).

The database says which key is in force. So a hand-over that was killed after its transaction is finished by whoever next needs the key: the
successor it left is then the one that the database names.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from acclimate import keys, log
from acclimate.files import is_full, sync_folder
from acclimate_competitions.errors import Refusal

LOG_KEY, NEXT, RETIRED = "log.pem", "log.next.pem", "retired"


def successor(folder: Path) -> Ed25519PrivateKey:
    """The key that will follow log.pem: made, or left by a hand-over that came to nothing.

    Raises:
        Refusal: key_refused, file_unreadable, no_space.
    """
    path = folder / NEXT
    if not path.exists():
        keys.create_signing_key(path)
    key = keys.load_signing_key(path)
    with _writing(path):
        # Made by root beside a service user's key it would be one that the service can't read.
        owner = (folder / LOG_KEY).stat()
        if path.stat().st_uid != owner.st_uid:
            os.chown(path, owner.st_uid, owner.st_gid)
    return key


def settle(folder: Path, origin: str, *, expected: str) -> bool:
    """Put the successor in the place of log.pem, where it is the key that is expected; the old one stays in retired/.

    Killed at any moment and called again, it finishes; called by several at once, it is done once. log.pem is there throughout.

    Args:
        folder: of the keys.
        origin: the log's name.
        expected: the verifier key that the database names.

    Returns:
        Whether log.pem is the expected key now, and was not before.

    Raises:
        Refusal: key_refused, file_unreadable, no_space.
    """
    path, following = folder / LOG_KEY, folder / NEXT
    if not following.exists() or log.Signer(origin, keys.load_signing_key(path)).vkey == expected:
        return False
    try:
        if log.Signer(origin, keys.load_signing_key(following)).vkey != expected:
            return False
    except Refusal:
        if following.exists():
            raise
    with _writing(path):
        retired = folder / RETIRED
        retired.mkdir(mode=0o700, exist_ok=True)
        old = log.Signer(origin, keys.load_signing_key(path))
        if old.vkey != expected:
            with contextlib.suppress(FileExistsError):
                (retired / f"log-{old.verifier.key_id.hex()}.pem").hardlink_to(path)
            # Another process may have been first.
            with contextlib.suppress(FileNotFoundError):
                following.replace(path)
        sync_folder(retired)
        sync_folder(folder)
    return True


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise Refusal("no_space", f"no space beside {path}", hint="free some space and repeat it") from error
        raise Refusal(
            "file_unreadable",
            f"{path} can't be replaced: {error.strerror or error}",
            hint="the log was handed over: `acclimate log rotate` as who may write this folder finishes it",
        ) from error
