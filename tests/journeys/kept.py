"""A whole installation with a published round in it, quickly made: what backups and collections of garbage are tried on."""

from dataclasses import dataclass
from pathlib import Path

import rounds_made
import stored
from cryptography.hazmat.primitives import serialization
from sqlalchemy import insert

from acclimate import config, store
from acclimate.store import Store
from acclimate_competitions.records import format_time

ID = "0b5f3c0e-6f0a-4a55-9d0c-5b1a0f6f7f11"


@dataclass
class Kept:
    """An installation that is not running."""

    settings: config.Settings
    store: Store
    made: rounds_made.Made


def installation(folder: Path, *, entries: int | None = None, **given: str) -> Kept:
    """The installation with its keys, its database (and blobs) where `given` says, and the files it was made of below `folder`."""
    settings = config.load(folder / "data", environ={}, given={"origin": rounds_made.ORIGIN, **given})
    opened = Store.open(settings)
    made = rounds_made.make(folder / "made")
    stored.fill(opened, made, entries=entries)
    row = {"id": ID, "log": made.signer.vkey, "evaluator": rounds_made.public("evaluator")}
    with opened.transaction() as tx:
        tx.execute(insert(store.installation), {**row, "created": format_time(made.now)})
    opened.blobs.mark(ID)
    settings.keys.mkdir(mode=0o700)
    for name, key in (("log.pem", "log"), ("evaluator.pem", "evaluator")):
        path = settings.keys / name
        path.touch(0o600)
        path.write_bytes(
            rounds_made.key(key).private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
    (settings.keys / "INSTALLATION").write_text(ID)
    return Kept(settings, opened, made)
