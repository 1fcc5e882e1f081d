"""An installation: one database, one store of blobs, one set of server keys; and what happens where they don't belong together.

The database's row says who the installation is: its id, the log's verifier key, the evaluator's public key. The store of blobs holds the
id as its marker, the key folder in a file. The API's first start on an empty database makes all of them; every later start, of any
process, only compares. New keys are never made for a database that has a row: a log signed by two keys is two logs, and a
second log signed by an old key contradicts the first; a log's key is handed over by a record in that log alone (hand_overs.py). So keys that are there before an empty database begins nothing with, either, unless
it is told to: they may well be another installation's, whose database is just not the one that was named.
"""

import contextlib
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import insert, select, text

from acclimate import keys, log, log_key, migrations
from acclimate.config import Settings
from acclimate.files import is_full
from acclimate.store import Store, Tx, log_checkpoints, log_entries, rounds, timestamp
from acclimate.store import installation as rows
from acclimate_competitions import records
from acclimate_competitions.errors import Refusal

LOG_KEY, EVALUATOR_KEY, KEYS_MARKER = log_key.LOG_KEY, "evaluator.pem", "INSTALLATION"
BEGUN = "BEGUN"
"""Lies in a key folder from before its first key until it is marked: keys beside it were made by a start that was killed."""


@dataclass(frozen=True)
class Installation:
    """The database's row.

    Attributes:
        id: a UUID.
        log: the log's verifier key, which names its origin.
        evaluator: the evaluator's public key, base64.
        created: when it was made, by the database's clock.
    """

    id: str
    log: str
    evaluator: str
    created: str

    @property
    def origin(self) -> str:
        """The log's name, fixed for good."""
        return self.log.partition("+")[0]


def begin(store: Store, settings: Settings) -> Installation:
    """The installation, made where the database is empty; killed at any moment and called again, it finishes.

    1. Where there is a row, everything is compared, and nothing made but a marker that a killed start owes.
    2. An empty database takes no blobs and no keys that belong to another installation, or that may: keys made by nobody knows whom.
    3. Keys are made where there are none, then the row, then the markers: so a marker is never of an installation that is not, and
       never on keys that are not its own.

    Raises:
        Refusal: other_installation, key_refused, file_unreadable, blobs_unreachable, no_space, busy.
    """
    marked = store.blobs.marker()
    with store.snapshot() as tx:
        found = _row(tx)
    if found is None:
        with store.transaction() as tx:
            # Another process may have been first.
            found = _row(tx) or _made(tx, settings, marked=marked)
            empty = tx.size() == 0
    else:
        with store.snapshot() as tx:
            empty = tx.size() == 0
    if empty:
        _mark(store, settings, found)
    return check(store, settings)


def adopt(store: Store, settings: Settings, *, begin: bool = False) -> list[str]:
    """Fill the row of a database that an earlier version made, from the keys it was used with, and mark its blobs.

    A store of blobs is marked only if it holds the definition of every round: then it is this database's.

    Args:
        store: the store.
        settings: say where blobs and keys are.
        begin: whether an empty database may begin a new installation with keys that are there already.

    Returns:
        What was done, a line each.

    Raises:
        Refusal: other_installation, where the keys are not those that signed its log, or the blobs are not there; key_refused, …
    """
    marked, done = store.blobs.marker(), []
    with store.snapshot() as tx:
        found = _row(tx)
        definitions = tx.execute(select(rounds.c.definition).distinct()).scalars().all()
    if found is None or marked is None:
        # Not in the transaction: other writers need not wait for a bucket.
        _holding(store, settings, definitions)
    if found is None:
        with store.transaction() as tx:
            found = _row(tx)
            if found is None:
                newest = tx.execute(
                    select(log_checkpoints.c.note).order_by(log_checkpoints.c.size.desc()).limit(1)
                ).scalar()
                old = newest is not None or tx.size() > 0
                if old:
                    _signed_by(settings, newest, evaluators=_pinned(tx))
                found = _made(tx, settings, marked=marked, old=old, begin=begin)
                done.append(f"the installation's row, with the keys in {settings.keys}")
    if marked is None:
        done.append(f"the blobs at {settings.blobs}: marked as this installation's")
    _mark(store, settings, found)
    return done


def stands(tx: Tx, found: str, *, signs: str | None = None) -> None:
    """Refuse to write into a database that was upgraded, or exchanged, under the process that writes; for Store.fenced.

    Args:
        tx: the transaction.
        found: id of the installation with which the process began.
        signs: the verifier key by which the process signs the log, if it does.

    Raises:
        Refusal: data_version, other_installation.
    """
    query = "SELECT version_num, id, log FROM alembic_version LEFT JOIN installation ON true"
    both = tx.execute(text(query)).all()
    versions = sorted({str(row.version_num) for row in both})
    if versions != [migrations.HEAD]:
        said = " and ".join(versions) or "none"
        raise Refusal(
            "data_version",
            f"the database has schema {said} now, this process writes {migrations.HEAD}",
            hint="it was upgraded while this process ran: start this one again, with the version that reads it",
        )
    if len(both) > 1:
        raise _several(len(both))
    (row,) = both
    if row.id != found:
        raise Refusal(
            "other_installation",
            f"the database is of installation {row.id} now, this process began with {found}",
            hint="the database was exchanged while this process ran: put it back, or start this one again",
        )
    if signs not in (None, row.log):
        raise Refusal(
            "other_installation",
            f"the log's key is {row.log} now, this process signs with {signs}",
            hint="the log was handed over to another key while this process ran: start it again with that one",
        )


def _holding(store: Store, settings: Settings, digests: Sequence[str]) -> None:
    lost = sum(1 for digest in digests if not store.blobs.has(digest))
    if lost:
        raise Refusal(
            "other_installation",
            f"the blobs at {settings.blobs} lack {lost} of {len(digests)} definitions of the database's rounds",
            hint="set `blobs` to where this database's blobs are",
        )


def _pinned(tx: Tx) -> list[str]:
    """The evaluators that the newest round's definition names; none where there is no round."""
    query = select(log_entries.c.data).where(log_entries.c.type == "RoundDefined")
    newest = tx.execute(query.order_by(log_entries.c.index.desc()).limit(1)).scalar()
    return list(records.parse(bytes(newest)).fields["evaluators"]) if newest is not None else []


def _signed_by(settings: Settings, note: str | None, *, evaluators: Sequence[str]) -> None:
    for path in (settings.keys / LOG_KEY, settings.keys / EVALUATOR_KEY):
        if not path.exists():
            raise missing(path)
    signer = log.Signer(settings.origin, keys.load_signing_key(settings.keys / LOG_KEY))
    try:
        if note is not None:
            log.open_checkpoint(note, signer.verifier)
    except Refusal as refusal:
        raise Refusal(
            "other_installation",
            f"the database's log was not signed by {settings.keys / LOG_KEY} under {settings.origin!r}: {refusal}",
            hint="name the data folder (or key folder) and the origin that the database was used with",
        ) from refusal
    evaluator = records.public_text(keys.load_signing_key(settings.keys / EVALUATOR_KEY).public_key())
    if evaluators and evaluator not in evaluators:
        raise Refusal(
            "other_installation",
            f"{settings.keys / EVALUATOR_KEY} is the key {evaluator}, the newest round in the log names {', '.join(evaluators)}",
            hint="put the key there with which this database was used; its rounds take no other's results",
        )


def check(store: Store, settings: Settings) -> Installation:
    """The installation, where the database, the store of blobs and the settings agree on it; makes nothing.

    Raises:
        Refusal: other_installation, blobs_unreachable, busy.
    """
    with store.snapshot() as tx:
        found, size = _row(tx), tx.size()
    if found is None:
        raise Refusal(
            "other_installation",
            f"the database is of no installation yet (its log has {size} entries)",
            hint="`acclimate api` makes one in an empty database; an earlier version's: `acclimate db upgrade`",
        )
    if found.origin != settings.origin:
        raise Refusal(
            "other_installation",
            f"the log of this database is named {found.origin!r}, the setting `origin` says {settings.origin!r}",
            hint=f"set origin to {found.origin} again: a log keeps its name for good; another name needs a new installation",
        )
    marked = store.blobs.marker()
    if marked is None and size > 0:
        raise Refusal(
            "other_installation",
            f"the database is of installation {found.id}, the blobs at {settings.blobs} are of none",
            hint="set `blobs` to where they are; if these are they, without their marker, `acclimate db upgrade` marks them",
        )
    if marked is not None and marked != found.id:
        raise _mismatch(settings, marked, database=found.id)
    return found


def _row(tx: Tx) -> Installation | None:
    found = tx.execute(select(rows)).all()
    if len(found) > 1:
        raise _several(len(found))
    return Installation(found[0].id, found[0].log, found[0].evaluator, found[0].created) if found else None


def _several(count: int) -> Refusal:
    return Refusal(
        "other_installation",
        f"the database says of {count} installations that it is theirs",
        hint="it was changed by hand, or holds two databases: restore it from a backup",
    )


def _made(tx: Tx, settings: Settings, *, marked: str | None, old: bool = False, begin: bool = False) -> Installation:
    if not old and (size := tx.size()) > 0:
        raise Refusal(
            "other_installation",
            f"the database's log has {size} entries, but the database is of no installation",
            hint="an earlier version's data: `acclimate db upgrade`; else restore the database from a backup",
        )
    # 2
    if marked is not None:
        raise _mismatch(settings, marked, database="none: it is empty")
    belongs = _keys_marker(settings)
    if belongs is not None:
        raise Refusal(
            "other_installation",
            f"the database is empty, the keys in {settings.keys} are of installation {belongs}",
            hint="set `database` to that installation's; for a new one name another data folder (or `server_keys`)",
        )
    there = [path for name in (LOG_KEY, EVALUATOR_KEY) if (path := settings.keys / name).exists()]
    if there and not (old or begin or (settings.keys / BEGUN).exists()):
        raise Refusal(
            "other_installation",
            f"the database is empty, but there is {' and '.join(map(str, there))}: these keys may belong to another installation, "
            "and two logs signed by one key contradict each other",
            hint="set `database` to that installation's, or restore it from a backup; if the keys were made beforehand for a new one: "
            "`acclimate db upgrade --begin`, once",
        )
    # 3
    if not there:
        _write(settings.keys / BEGUN, timestamp(tx))
    signing, evaluator = _key(settings.keys / LOG_KEY), _key(settings.keys / EVALUATOR_KEY)
    found = Installation(
        str(uuid.uuid4()),
        log.Signer(settings.origin, signing).vkey,
        records.public_text(evaluator.public_key()),
        timestamp(tx),
    )
    tx.execute(insert(rows), {**vars(found)})
    return found


def _mark(store: Store, settings: Settings, found: Installation) -> None:
    # Compared before anything is labelled: a label on another installation's keys would claim them for good.
    compared = _compared(settings, found)
    if store.blobs.marker() is None:
        store.blobs.mark(found.id)
    if compared:
        # Where keys are mounted read-only, whoever made them looks after them.
        with contextlib.suppress(Refusal, OSError):
            _write(settings.keys / KEYS_MARKER, found.id)
            (settings.keys / BEGUN).unlink(missing_ok=True)


def _compared(settings: Settings, found: Installation) -> bool:
    """Whether there are keys that this process may read; they are the installation's then.

    Raises:
        Refusal: other_installation, key_refused, file_unreadable.
    """
    signing, evaluator = settings.keys / LOG_KEY, settings.keys / EVALUATOR_KEY
    here = [path for path in (signing, evaluator) if os.access(path, os.R_OK)]
    if signing in here:
        log_key.settle(settings.keys, found.origin, expected=found.log)
        compare(signing, log.Signer(found.origin, keys.load_signing_key(signing)).vkey, expected=found.log)
    if evaluator in here:
        public = records.public_text(keys.load_signing_key(evaluator).public_key())
        compare(evaluator, public, expected=found.evaluator)
    return bool(here)


def compare(path: Path, found: str, *, expected: str) -> None:
    """Refuse a key that is not the one of this database's installation; both are public parts.

    Raises:
        Refusal: other_installation.
    """
    if found != expected:
        raise Refusal(
            "other_installation",
            f"{path} is the key {found}, this database's installation has {expected}",
            hint="set `server_keys` (or the data folder) and `database` to the same installation's; where the log was handed over to a new key, copy "
            "the new log.pem to every folder of keys",
        )


def _write(path: Path, content: str) -> None:
    """Write a file for its owner alone, whole, unless it is there.

    Raises:
        Refusal: no_space, file_unreadable.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
    except OSError as error:
        if is_full(error):
            raise Refusal("no_space", f"no space to write {path}", hint="free some space and start again") from error
        raise Refusal(
            "file_unreadable", f"{path}: {error.strerror or error}", hint="make the folder writable"
        ) from error


def _keys_marker(settings: Settings) -> str | None:
    try:
        return (settings.keys / KEYS_MARKER).read_text("utf-8").strip() or None
    except OSError:
        return None


def _mismatch(settings: Settings, marked: str, *, database: str) -> Refusal:
    return Refusal(
        "other_installation",
        f"the blobs at {settings.blobs} are of installation {marked}, the database is of {database}",
        hint="set `database` and `blobs` to the same installation's; a new one needs an empty place for both",
    )


def missing(path: Path) -> Refusal:
    """The refusal of a key that is not where it must be."""
    return Refusal(
        "other_installation",
        f"there is no {path}, which this installation's database was made with",
        hint="put it there from a backup, or set `server_keys` to its folder; a new one is never made in its place",
    )


def _key(path: Path) -> Ed25519PrivateKey:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            return keys.create_signing_key(path)
        except Refusal:
            # Another process of this installation was first; its key counts.
            if not path.exists():
                raise
    return keys.load_signing_key(path)
