"""An actor's key folder: an Ed25519 key that signs, and for custodians an age identity that opens share envelopes.

The folder has mode 0700 and holds `ed25519.pem` (PKCS #8) and, where asked for, `age.txt` (as `age-keygen` writes it, so that
the `age` command takes it too), each with mode 0600. A file that others may read is refused, not repaired: whoever could read it
may have. An existing key is never overwritten.
"""

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyrage
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from acclimate import files
from acclimate_competitions import reading, records
from acclimate_competitions.errors import Refusal

ED25519_FILE = "ed25519.pem"
AGE_FILE = "age.txt"
_LARGEST_FILE = 65_536


@dataclass(frozen=True)
class Keys:
    """The keys of one actor.

    Attributes:
        folder: where they are kept.
        ed25519: the key that signs.
        age_identity: the secret text `AGE-SECRET-KEY-1…`, or None; what custody.unwrap takes.
    """

    folder: Path
    ed25519: Ed25519PrivateKey = field(repr=False)
    age_identity: str | None = field(default=None, repr=False)

    @property
    def public(self) -> str:
        """The Ed25519 public key: base64 of its 32 bytes."""
        return records.public_text(self.ed25519.public_key())

    @property
    def age_recipient(self) -> str:
        """The age recipient `age1…`.

        Raises:
            Refusal: file_unreadable, where the folder holds no age identity.
        """
        if self.age_identity is None:
            raise Refusal(
                "file_unreadable",
                f"{self.folder / AGE_FILE} does not exist: these keys can't open envelopes",
                hint="a custodian's keys are made with one: acclimate custodian keygen; is it lost? --identity FILE takes the backup's",
            )
        return recipient_of(self.age_identity)


def create(folder: Path, *, age: bool, first: Callable[[Ed25519PrivateKey], None] = lambda key: None) -> Keys:
    """Make a key folder. Killed at any moment and called again, it finishes.

    Args:
        folder: where.
        age: whether with an age identity.
        first: called with the signing key before it is written, for what must be there as soon as the key is.

    Raises:
        Refusal: key_refused, where a key is there already or the folder is one that others may write to; no_space;
            file_unreadable.
    """
    if (folder / ED25519_FILE).exists():
        raise Refusal(
            "key_refused",
            f"{folder / ED25519_FILE} exists already; a key is never overwritten",
            hint="use it, or name another folder",
        )
    try:
        if not folder.exists() or not any(folder.iterdir()):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
    except OSError as error:
        raise files.failed(folder, error) from error
    _check_folder(folder)
    # The signing key comes last: without it the folder is unfinished, and an age identity left by a killed call is kept.
    if age and not (folder / AGE_FILE).exists():
        _create_identity(folder)
    key = Ed25519PrivateKey.generate()
    first(key)
    _save(folder / ED25519_FILE, key)
    return load(folder)


def add_age(folder: Path) -> Keys:
    """Make an age identity beside a signing key that is there; one that is there, too, stays.

    Raises:
        Refusal: key_refused, no_space, file_unreadable.
    """
    load_signing_key(folder / ED25519_FILE)
    _check_folder(folder)
    if not (folder / AGE_FILE).exists():
        _create_identity(folder)
    return load(folder)


def load(folder: Path) -> Keys:
    """Read a key folder.

    Raises:
        Refusal: file_unreadable; key_refused, where a file is malformed or open to others.
    """
    if not (folder / ED25519_FILE).exists():
        raise Refusal(
            "file_unreadable",
            f"{folder} holds no keys: there is no {ED25519_FILE} in it"
            if folder.is_dir()
            else f"there is no folder {folder}",
            hint="--keys DIR names the folder that `acclimate register`, or keygen of `custodian`, `audit` or `witness`, made",
        )
    key = load_signing_key(folder / ED25519_FILE)
    _check_folder(folder)
    path = folder / AGE_FILE
    if not path.exists():
        return Keys(folder, key)
    return Keys(folder, key, load_age_identity(path))


def create_signing_key(path: Path) -> Ed25519PrivateKey:
    """Make a new Ed25519 key in a new file of mode 0600.

    Raises:
        Refusal: key_refused, where the file exists; no_space; file_unreadable.
    """
    key = Ed25519PrivateKey.generate()
    _save(path, key)
    return key


def load_signing_key(path: Path) -> Ed25519PrivateKey:
    """Read an Ed25519 key from an unencrypted PKCS #8 file that only its owner may read.

    Raises:
        Refusal: file_unreadable, key_refused.
    """
    data = _read(path)
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise Refusal("key_refused", f"{path} is not an unencrypted PEM private key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise Refusal("key_refused", f"{path} holds a key of another kind than Ed25519")
    return key


def load_age_identity(path: Path) -> str:
    """Read the one identity of an age key file that only its owner may read.

    Raises:
        Refusal: file_unreadable, key_refused.
    """
    try:
        lines = [line.strip() for line in reading.decoded(_read(path)).splitlines()]
    except ValueError as error:
        raise Refusal("key_refused", f"{path} is not an age key file") from error
    identities = [line for line in lines if line and not line.startswith("#")]
    if len(identities) != 1:
        raise Refusal("key_refused", f"{path} holds {len(identities)} age identities, expected 1")
    recipient_of(identities[0])
    return identities[0]


def recipient_of(identity: str) -> str:
    """The age recipient of an X25519 identity's secret text.

    Raises:
        Refusal: key_refused; the sentence does not repeat the text, which may be a secret.
    """
    try:
        return str(pyrage.x25519.Identity.from_str(identity).to_public())
    except pyrage.IdentityError as error:
        raise Refusal("key_refused", "an age identity is not an X25519 one (AGE-SECRET-KEY-1…)") from error


def check_recipient(text: str) -> str:
    """The same text, where it is an X25519 age recipient.

    Raises:
        Refusal: key_refused.
    """
    try:
        if str(pyrage.x25519.Recipient.from_str(text)) == text:
            return text
    except (pyrage.RecipientError, TypeError):
        pass
    raise Refusal("key_refused", f"{text!r} is not an age recipient", hint="it looks like age1…, 62 characters")


def _save(path: Path, key: Ed25519PrivateKey) -> None:
    _write(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _create_identity(folder: Path) -> None:
    identity = pyrage.x25519.Identity.generate()
    _write(folder / AGE_FILE, f"# public key: {identity.to_public()}\n{identity}\n".encode())


def _write(path: Path, data: bytes) -> None:
    """Write a new key file.

    Raises:
        Refusal: key_refused, where one is there; no_space, file_unreadable.
    """
    try:
        files.write_new(path, data)
    except FileExistsError as error:
        raise Refusal("key_refused", f"{path} exists already; a key is never overwritten") from error


def _read(path: Path) -> bytes:
    try:
        with reading.regular(path).open("rb") as stream:
            # The open file is judged, not the name: nothing can be put in its place between check and reading.
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            if os.name == "posix" and mode & 0o077:
                raise Refusal(
                    "key_refused",
                    f"{path} has mode {mode:04o}: others than its owner may use the key",
                    hint=f"chmod 600 {path}  (and make a new key if somebody may have read it)",
                )
            data = stream.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise files.failed(path, error) from error
    if len(data) > _LARGEST_FILE:
        raise Refusal(
            "key_refused",
            f"{path} is too long to be a key file",
            hint="name the file that `acclimate … keygen` or age-keygen made",
        )
    return data


def _check_folder(folder: Path) -> None:
    mode = stat.S_IMODE(folder.stat().st_mode)
    if os.name == "posix" and mode & 0o022:
        raise Refusal(
            "key_refused",
            f"{folder} has mode {mode:04o}: others than its owner may put files there",
            hint=f"chmod 700 {folder}",
        )
