"""A witness's folder: its key, its name, its memory, and who works on it.

    ed25519.pem     the key, mode 0600
    witness.vkey    the verifier key, which others need: name, hash, public key
    witness.db      what it has cosigned (witness_state)
    witness.refusals  how often it refused, by log and kind (witness_tally)
    witness.lock    held while a witness runs

The memory is made before the key is written, and the verifier key comes last. So a key never lies there without the memory that was made with
it, unless somebody took that away; and a folder without its verifier key is unfinished, and is finished by the same command.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from acclimate import files, keys, locks, notes
from acclimate.notes import Verifier
from acclimate.service import names
from acclimate.witness_state import State
from acclimate_competitions import vkeys
from acclimate_competitions.errors import Refusal

VKEY_FILE, STATE_FILE, TALLY_FILE, LOCK_FILE = "witness.vkey", "witness.db", "witness.refusals", "witness.lock"


@dataclass(frozen=True)
class Identity:
    """Who a witness is.

    Attributes:
        folder: where it is kept.
        verifier: name and public key.
        keys: what it signs with.
    """

    folder: Path
    verifier: Verifier
    keys: keys.Keys

    def memory(self) -> State:
        """The open memory.

        Raises:
            Refusal: as State.open.
        """
        return State.open(self.folder / STATE_FILE, self.verifier.text())


def create(folder: Path, name: str, *, now: int) -> Identity:
    """Make a witness. Killed at any moment and called again, it finishes; called for a finished one of this name, it is that one.

    Args:
        folder: where.
        name: under which it signs, such as `witness.example.org`.
        now: seconds since 1970; the witness will never say an earlier time.

    Raises:
        Refusal: name_invalid; key_refused, where the folder has a witness of another name or other keys; file_unreadable, no_space.
    """
    if not notes.is_name(name) or "://" in name or name.startswith("/") or name.endswith("/"):
        raise Refusal(
            "name_invalid",
            f"{name!r} is an address, or is empty or has a blank, a plus or a control character",
            hint="such as witness.example.org: a name that is yours, without https:// before and / after it",
        )
    names.check(name, what="the witness's name", longest=vkeys.LONGEST_NAME)
    if (folder / VKEY_FILE).exists():
        found = load(folder)
        if found.verifier.name != name:
            raise Refusal(
                "key_refused",
                f"{folder} is the witness {found.verifier.name}, not {name}",
                hint="a witness of another name needs a key of its own: name another folder",
            )
        found.memory().close()
        return found
    if not (folder / keys.ED25519_FILE).exists():
        keys.create(folder, age=False, first=lambda key: _remember(folder / STATE_FILE, _verifier(name, key), now))
    own = keys.load(folder)
    identity = Identity(folder, _verifier(name, own.ed25519), own)
    identity.memory().close()
    files.write(folder / VKEY_FILE, f"{identity.verifier.text()}\n".encode(), mode=0o644)
    return identity


def load(folder: Path) -> Identity:
    """Read a witness's key and name.

    Raises:
        Refusal: file_unreadable; key_refused, where key and name are not of each other, or open to others.
    """
    try:
        text = (folder / VKEY_FILE).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(
            "file_unreadable",
            f"{folder / VKEY_FILE} can't be read: {error}",
            hint=f"acclimate witness keygen --name NAME --keys {folder} makes a witness, or finishes one",
        ) from error
    own = keys.load(folder)
    verifier = notes.parse_vkey(text)
    if verifier != _verifier(verifier.name, own.ed25519):
        raise Refusal("key_refused", f"{folder / VKEY_FILE} holds {text}, which is not of the key beside it")
    return Identity(folder, verifier, own)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other witnesses off the folder; the kernel ends it with the process.

    Raises:
        Refusal: busy, where one runs on it.
    """
    path = folder / LOCK_FILE
    try:
        held = locks.take(path)
    except OSError as error:
        raise files.failed(path, error) from error
    if held is None:
        raise Refusal(
            "busy",
            f"a witness runs on {folder} already: {locks.holder(path) or 'a process'} holds {path.name}",
            hint="stop that one first; a second witness has a folder and a key of its own",
        )
    with held:
        yield


def is_running(folder: Path) -> bool:
    """Whether a witness runs on the folder."""
    return bool(locks.holder(folder / LOCK_FILE))


def _verifier(name: str, key: Ed25519PrivateKey) -> Verifier:
    return Verifier(name, notes.COSIGNATURE, key.public_key().public_bytes_raw())


def _remember(path: Path, verifier: Verifier, now: int) -> None:
    if path.exists():
        # Without its key: the call that made it was killed before, and nothing was ever signed. Or the key was taken away.
        with contextlib.suppress(FileNotFoundError):
            _check_unused(path)
            path.unlink()
    State.create(path, verifier.text(), made=now)


def _check_unused(path: Path) -> None:
    state = State.open(path, None)
    try:
        if state.all_seen():
            raise Refusal(
                "key_refused",
                f"{path} is the memory of {state.vkey()}, whose key is not here",
                hint="put its ed25519.pem back, or name another folder",
            )
    finally:
        state.close()
