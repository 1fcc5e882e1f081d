"""Who this server is: the installation's keys, and the digest of its code."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from acclimate import __version__, installation, keys, log, log_key
from acclimate.config import Settings
from acclimate.installation import EVALUATOR_KEY, LOG_KEY, Installation
from acclimate.store import Store
from acclimate_competitions import records
from acclimate_runners.code import code_digest


@dataclass(frozen=True)
class Identity:
    """The installation, this process's code, and those keys that this process has: the others it need not be able to read.

    Attributes:
        installation: the database's row: the public parts.
        folder: where the keys are.
        code: digest of the code.
        witnesses: verifier keys of those who cosign the log's checkpoints.
        quorum: how many of them a checkpoint needs.
    """

    installation: Installation
    folder: Path
    code: str
    witnesses: tuple[str, ...] = ()
    quorum: int = 0

    @property
    def origin(self) -> str:
        """The log's name."""
        return self.installation.origin

    @property
    def vkey(self) -> str:
        """The log's verifier key as a note names it."""
        return self.installation.log

    @property
    def evaluator(self) -> str:
        """The evaluator's public key, base64."""
        return self.installation.evaluator

    @functools.cached_property
    def signer(self) -> log.Signer:
        """Signs checkpoints.

        Raises:
            Refusal: other_installation, where the key is not here or another one; key_refused, file_unreadable.
        """
        signer = log.Signer(self.origin, _key(self.folder / LOG_KEY))
        # A hand-over that was killed before its files were in place.
        if signer.vkey != self.vkey and log_key.settle(self.folder, self.origin, expected=self.vkey):
            signer = log.Signer(self.origin, _key(self.folder / LOG_KEY))
        installation.compare(self.folder / LOG_KEY, signer.vkey, expected=self.vkey)
        return signer

    @functools.cached_property
    def evaluator_key(self) -> Ed25519PrivateKey:
        """Signs what was prepared and evaluated.

        Raises:
            Refusal: other_installation, where the key is not here or another one; key_refused, file_unreadable.
        """
        key = _key(self.folder / EVALUATOR_KEY)
        public = records.public_text(key.public_key())
        installation.compare(self.folder / EVALUATOR_KEY, public, expected=self.evaluator)
        return key

    def document(self) -> dict[str, Any]:
        """What `GET /v1/server` says, without the time."""
        return {
            "version": __version__,
            "origin": self.origin,
            "log": self.vkey,
            "evaluators": [self.evaluator],
            "code": self.code,
            "witnesses": list(self.witnesses),
            "quorum": self.quorum,
        }


def begin(settings: Settings, store: Store) -> Identity:
    """The identity for the API, with the log's key; on an empty database the installation is made.

    Raises:
        Refusal: other_installation, key_refused, file_unreadable, blobs_unreachable, no_space, busy.
    """
    found = _of(installation.begin(store, settings), settings)
    _ = found.signer
    return found


def load(settings: Settings, store: Store, *, evaluator: bool = False) -> Identity:
    """The identity of the installation that database, blobs and settings agree on.

    Args:
        settings: says where all of it is.
        store: the store.
        evaluator: whether to read the evaluator's key at once; any key is read when it is first used.

    Raises:
        Refusal: other_installation, blobs_unreachable, busy; key_refused, file_unreadable.
    """
    found = _of(installation.check(store, settings), settings)
    if evaluator:
        _ = found.evaluator_key
    return found


def _of(found: Installation, settings: Settings) -> Identity:
    witnesses = tuple(one.split()[1] for one in settings.witnesses)  # `ADDRESS KEY` each
    return Identity(found, settings.keys, code_digest(), witnesses, settings.quorum)


def _key(path: Path) -> Ed25519PrivateKey:
    if not path.exists():
        raise installation.missing(path)
    return keys.load_signing_key(path)
