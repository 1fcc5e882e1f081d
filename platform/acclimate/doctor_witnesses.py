"""The doctor's look at the log's witnesses: do they answer, are they who they should be, do they know the log's key, and how far are they?"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import httpx

from acclimate import keys, log, sqlite_urls, witness_client
from acclimate.config import Settings, doubts
from acclimate.doctor_machine import WITHIN, Finding, is_there
from acclimate.witness_client import Endpoint
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import parse_time

_LATE = timedelta(minutes=1)
"""How old a checkpoint is that a witness should have cosigned by now."""


@dataclass(frozen=True)
class Own:
    """What is known here of the log: its key, and (entries, when it was signed) of each checkpoint; none where there is no log yet."""

    key: str | None
    checkpoints: list[tuple[int, datetime]]

    @property
    def size(self) -> int:
        """Entries of the newest checkpoint."""
        return self.checkpoints[-1][0] if self.checkpoints else 0

    def waits_since(self, size: int) -> datetime | None:
        """Since when a checkpoint of more entries than these is there; None where there is none."""
        return next((at for more, at in self.checkpoints if more > size), None)


def witnesses(settings: Settings) -> Iterator[Finding]:
    """Whether the log's witnesses answer, know it, and have cosigned all of it; and whether rounds ask for them at all."""
    for doubt in doubts(settings):
        yield Finding(doubt.name, "warning", doubt.sentence, doubt.hint)
    own = _own(settings)
    with httpx.Client(timeout=WITHIN / 4) as client:
        for endpoint in witness_client.parse_endpoints(settings.witnesses):
            try:
                yield _finding(settings, endpoint, own, client)
            except Refusal as refusal:
                yield Finding(
                    f"witness {endpoint.verifier.name}", "warning", refusal.sentence, refusal.hint or "ask its operator"
                )


def _finding(settings: Settings, endpoint: Endpoint, own: Own, client: httpx.Client) -> Finding:
    """What is to be said of one witness.

    1. Another witness answers at its address. Witnesses of other software need not say who they are.
    2. It does not know the log's key.
    3. It has cosigned more of the log than the database has: entries were lost.
    4. It has cosigned the log, or less of it than there has been for a while.
    """
    name, quorum = (
        f"witness {endpoint.verifier.name}",
        f"a checkpoint needs {settings.quorum} of {len(settings.witnesses)}",
    )
    # 1
    about = witness_client.about(endpoint, client=client)
    if about is not None and about.witness != endpoint.verifier.text():
        found = f"at {endpoint.url} is the witness {about.witness}, the setting names {endpoint.verifier.text()}"
        return Finding(name, "warning", found, "correct `witnesses`: were addresses or keys exchanged?")
    # 2
    if about is not None and own.key is not None and own.key not in about.logs:
        knows = ", ".join(key for key in about.logs if key.startswith(f"{settings.origin}+")) or "no key"
        found = f"{endpoint.url} knows {knows} of {settings.origin}, and cosigns nothing for {own.key}"
        return Finding(name, "warning", found, f"send its operator the log's key, {own.key}; {quorum}")
    size = witness_client.cosigned(endpoint, settings.origin, client=client)
    if size is None and about is None:
        found = f"{endpoint.url} has cosigned nothing of {settings.origin}"
        hint = "its operator needs the key of this log, which `acclimate up` prints; with an empty log all is well"
        return Finding(name, "warning" if own.size else "ok", found, f"{hint}; {quorum}" if own.size else "")
    # 3
    if (
        own.size
        and (size or 0) > own.size
        and (here := max(own.size, *(n for n, _ in _checkpoints(settings)), 0)) < (size or 0)
    ):
        found = f"{endpoint.url} has cosigned {size} entries of {settings.origin}, the database has {here}"
        hint = (
            "the database was put back, or is not the newest: see docs/operators.md, Backup, before anything is logged"
        )
        return Finding(name, "warning", found, hint)
    # 4
    done, since = size or 0, own.waits_since(size or 0)
    of = f" of {own.size}" if own.size else ""
    if since is not None and datetime.now(UTC) - since > _LATE:
        hint = f"is the API running, and what do its log lines say of this witness? {quorum}"
        return Finding(name, "warning", f"{endpoint.url} has cosigned {done}{of} entries of {settings.origin}", hint)
    told = (
        f"has cosigned {done}{of} entries of {settings.origin}"
        if done or own.size
        else f"knows {settings.origin}, whose log is empty"
    )
    return Finding(name, "ok", f"{endpoint.url} {told}; {quorum}")


def _own(settings: Settings) -> Own:
    path, key = settings.keys / "log.pem", None
    try:
        key = log.Signer(settings.origin, keys.load_signing_key(path)).vkey if path.exists() else None
    except (Refusal, OSError):
        pass  # the line on the key says it
    return Own(key, _checkpoints(settings))


def _checkpoints(settings: Settings) -> list[tuple[int, datetime]]:
    if not (is_there("sqlalchemy") and is_there("alembic")):
        return []
    if sqlite_urls.is_one(settings.database) and not sqlite_urls.file(settings.database).exists():
        return []
    from sqlalchemy import select
    from sqlalchemy.exc import SQLAlchemyError

    from acclimate import database
    from acclimate.schema import log_checkpoints

    engine = database.connect(settings.database)
    try:
        with database.refusing(), database.reading(engine) as connection:
            rows = connection.execute(
                select(log_checkpoints.c.size, log_checkpoints.c.at).order_by(log_checkpoints.c.size)
            )
            return [(row.size, parse_time(row.at)) for row in rows]
    except (Refusal, SQLAlchemyError):
        return []  # the line on the database says it
    finally:
        engine.dispose()
