"""Who this server is: its log key, its evaluator key, the digest of its code. Keys are made on the first start."""

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from acclimate import __version__, keys, log
from acclimate.config import Settings
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal

_CODE = ("acclimate_competitions", "acclimate_runners")


@dataclass(frozen=True)
class Identity:
    """The server's keys and code; `vkey` is the log's verifier key as a note names it."""

    origin: str
    log_key: Ed25519PrivateKey
    evaluator_key: Ed25519PrivateKey
    code: str

    @property
    def signer(self) -> log.Signer:
        """Signs checkpoints."""
        return log.Signer(self.origin, self.log_key)

    @property
    def vkey(self) -> str:
        """The log's verifier key."""
        return self.signer.vkey

    @property
    def evaluator(self) -> str:
        """The evaluator's public key, base64."""
        return records.public_text(self.evaluator_key.public_key())

    def document(self) -> dict[str, Any]:
        """What `GET /v1/server` says, without the time."""
        return {
            "version": __version__,
            "origin": self.origin,
            "log": self.vkey,
            "evaluators": [self.evaluator],
            "code": self.code,
        }


def load(settings: Settings) -> Identity:
    """The identity of a data folder, made on first use.

    Raises:
        Refusal: key_refused, file_unreadable, no_space.
    """
    settings.keys.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Identity(
        origin=settings.origin,
        log_key=_key(settings.keys / "log.pem"),
        evaluator_key=_key(settings.keys / "evaluator.pem"),
        code=code_digest(),
    )


def _key(path: Path) -> Ed25519PrivateKey:
    if not path.exists():
        try:
            return keys.create_signing_key(path)
        except Refusal:
            # Another process of this installation was first; its key counts.
            if not path.exists():
                raise
    return keys.load_signing_key(path)


@functools.cache
def code_digest() -> str:
    """Digest of the code that can change a number: the sources of competitions and runners, by name."""
    sources: dict[str, Path] = {}
    for package in _CODE:
        found = importlib.util.find_spec(package)
        assert found is not None and found.submodule_search_locations
        root = Path(found.submodule_search_locations[0])
        sources |= {f"{package}/{path.relative_to(root).as_posix()}": path for path in sorted(root.rglob("*.py"))}
    # A wheel carries the shipped competitions inside the package, a checkout beside it: their data are in the definition's digest.
    return digests.of_tree((name, path) for name, path in sources.items() if "/shipped/" not in name)
