"""What a witness has seen, in one SQLite file: of each log the newest checkpoint that it cosigned, and those that it refused.

This memory is what a cosignature is worth. So a change is on the disk before anybody is told (rollback journal, synchronous = EXTRA, which
also syncs the folder), it is made by compare-and-set, and the file itself refuses what would lead back: a smaller size, another root of the
same size, an earlier time, a deletion. The file belongs to one key. It is made with the key and never again: a witness that forgot
what it saw could be led to cosign a second history.
"""

import contextlib
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acclimate.files import failed, sync_folder
from acclimate_competitions.errors import Refusal

VERSION = 1
MOST_REFUSED = 100
"""How many refused checkpoints of a log are kept; whoever may ask can bring old ones, so there is an end to it, and the newest has a place."""
_APPLICATION = 0x41435749  # "ACWI" in the file's header
_WAIT_SECONDS = 5
_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})
_SCHEMA = """
CREATE TABLE witness (one INTEGER PRIMARY KEY CHECK (one = 1), vkey TEXT NOT NULL, made INTEGER NOT NULL) STRICT;
CREATE TABLE seen (
    origin TEXT PRIMARY KEY, size INTEGER NOT NULL CHECK (size >= 0), root BLOB NOT NULL CHECK (length(root) = 32),
    time INTEGER NOT NULL, note TEXT NOT NULL) STRICT;
CREATE TABLE refused (
    origin TEXT NOT NULL, size INTEGER NOT NULL, root BLOB NOT NULL, fork INTEGER NOT NULL, time INTEGER NOT NULL,
    note TEXT NOT NULL, seen TEXT NOT NULL, PRIMARY KEY (origin, size, root)) STRICT;
CREATE TRIGGER no_way_back BEFORE UPDATE ON seen
WHEN new.origin <> old.origin OR new.size < old.size OR (new.size = old.size AND new.root <> old.root) OR new.time < old.time
BEGIN SELECT RAISE(ABORT, 'a witness does not go back'); END;
CREATE TRIGGER forks_of_the_first AFTER INSERT ON seen
BEGIN UPDATE refused SET fork = 1, seen = new.note WHERE origin = new.origin AND size = new.size AND root <> new.root; END;
CREATE TRIGGER forks_of_the_next AFTER UPDATE ON seen
BEGIN UPDATE refused SET fork = 1, seen = new.note WHERE origin = new.origin AND size = new.size AND root <> new.root; END;
CREATE TRIGGER no_forgetting BEFORE DELETE ON seen BEGIN SELECT RAISE(ABORT, 'a witness does not forget'); END;
"""


@dataclass(frozen=True)
class Seen:
    """The newest checkpoint of a log that was cosigned.

    Attributes:
        origin: the log.
        size: its entries.
        root: the root over them, 32 bytes.
        time: of the cosignature, seconds since 1970.
        note: the checkpoint with the signature of its log and the cosignature.
    """

    origin: str
    size: int
    root: bytes
    time: int
    note: str


@dataclass(frozen=True)
class Refused:
    """A checkpoint that a log signed and that no proof joined to what was seen before.

    Attributes:
        origin: the log.
        size: its entries.
        root: the root over them.
        fork: it has the size of `seen` and another root: the two together prove a fork. Else the proof alone may have been false.
        time: when it came.
        note: the checkpoint as it came.
        seen: the checkpoint that was cosigned before it; of a fork the one of its size.
    """

    origin: str
    size: int
    root: bytes
    fork: bool
    time: int
    note: str
    seen: str


class State:
    """The open file; one object may be used by several threads, and several processes may have the file open."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path, self._sql, self._lock = path, connection, threading.Lock()

    @classmethod
    def create(cls, path: Path, vkey: str, *, made: int) -> None:
        """Make the file of a new witness, whole or not at all; one that is there already stays.

        Raises:
            Refusal: no_space, file_unreadable.
        """
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            try:
                connection = _connected(draft)
                try:
                    connection.executescript(f"BEGIN; {_SCHEMA}")
                    connection.execute("INSERT INTO witness VALUES (1, ?, ?)", (vkey, made))
                    connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                    connection.execute(f"PRAGMA user_version = {VERSION}")
                    connection.execute("COMMIT")
                finally:
                    connection.close()
                with contextlib.suppress(FileExistsError):
                    path.hardlink_to(draft)
            finally:
                draft.unlink()
            sync_folder(path.parent)
        except sqlite3.Error as error:
            raise _refusal(path, error) from error
        except OSError as error:
            raise failed(path, error) from error

    @classmethod
    def open(cls, path: Path, vkey: str | None) -> "State":
        """Open the file of a witness, whichever it is where vkey is None.

        Raises:
            Refusal: file_unreadable, where it is not there; data_version, where it is no such file or of another version; key_refused, where
                it is another witness's; no_space.
        """
        if not path.is_file():
            raise Refusal(
                "file_unreadable",
                f"{path} is not there: the witness does not know what it has cosigned",
                hint="put the file back if it was moved, and only the newest; else make a new key and name: who forgot could cosign a fork",
            )
        state = cls(path, _connected(path))
        try:
            with state._using() as sql:
                application = sql.execute("PRAGMA application_id").fetchone()[0]
                version = sql.execute("PRAGMA user_version").fetchone()[0]
                if (application, version) != (_APPLICATION, VERSION):
                    raise Refusal(
                        "data_version",
                        f"{path} has mark {application:#x} and version {version}, expected {_APPLICATION:#x} and {VERSION}",
                        hint="name the key folder of a witness, and use the version of Acclimate that made it",
                    )
            if vkey not in (None, whose := state.vkey()):
                raise Refusal(
                    "key_refused",
                    f"{path} is the memory of {whose}, the key here is {vkey}",
                    hint="key and memory stay together: put the memory back that was made with this key, or make a new witness",
                )
        except BaseException:
            state.close()
            raise
        return state

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._sql.close()

    def vkey(self) -> str:
        """The verifier key of the witness."""
        with self._using() as sql:
            return str(sql.execute("SELECT vkey FROM witness").fetchone()[0])

    def made(self) -> int:
        """When the witness was made, seconds since 1970."""
        with self._using() as sql:
            return int(sql.execute("SELECT made FROM witness").fetchone()[0])

    def seen(self, origin: str) -> Seen | None:
        """The newest checkpoint of a log that was cosigned, or None."""
        with self._using() as sql:
            row = sql.execute("SELECT origin, size, root, time, note FROM seen WHERE origin = ?", (origin,)).fetchone()
        return Seen(*row) if row else None

    def all_seen(self) -> list[Seen]:
        """Of each log the newest checkpoint that was cosigned."""
        with self._using() as sql:
            rows = sql.execute("SELECT origin, size, root, time, note FROM seen ORDER BY origin").fetchall()
        return [Seen(*row) for row in rows]

    def advance(self, to: Seen, *, over: Seen | None) -> bool:
        """Put a checkpoint in the place of the one that was seen before; on the disk once this returns.

        Args:
            to: the new one.
            over: what `seen` said; where the log has another by now, nothing happens.

        Returns:
            Whether it was put there.

        Raises:
            Refusal: no_space, busy, data_version.
        """
        values = (to.size, to.root, to.time, to.note, to.origin)
        with self._using() as sql:
            if over is None:
                done = sql.execute(
                    "INSERT INTO seen (size, root, time, note, origin) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                    values,
                )
            else:
                done = sql.execute(
                    "UPDATE seen SET size = ?, root = ?, time = ?, note = ?"
                    " WHERE origin = ? AND size = ? AND root = ? AND time = ? AND note = ?",
                    (*values, over.size, over.root, over.time, over.note),
                )
            if done.rowcount == 1:
                # It is the log's own after all: the proof was false. Killed before this, the next step does it.
                sql.execute(
                    "DELETE FROM refused WHERE origin = ? AND fork = 0 AND (size, root) IN"
                    " (SELECT size, root FROM seen WHERE origin = refused.origin)",
                    (to.origin,),
                )
            return done.rowcount == 1

    def keep_refused(self, refused: Refused) -> bool:
        """Keep a refused checkpoint; False where it is kept already, or of forks enough others are.

        Strangers can bring as many honest checkpoints with a false proof as the log has signed. So one that proves nothing gives way to a newer
        one: first those of a size that was passed, then the oldest. Two of one size and two roots prove a fork, whichever the witness saw.
        """
        of, origin = (refused.origin, refused.size, refused.root), refused.origin
        with self._transaction() as sql:
            if sql.execute("SELECT 1 FROM refused WHERE origin = ? AND size = ? AND root = ?", of).fetchone():
                query = "UPDATE refused SET fork = 1, seen = ? WHERE origin = ? AND size = ? AND root = ? AND fork < ?"
                return sql.execute(query, (refused.seen, *of, refused.fork)).rowcount == 1
            fork, seen = refused.fork, refused.seen
            twin = sql.execute("SELECT note FROM refused WHERE origin = ? AND size = ? AND root <> ?", of).fetchone()
            if twin and not fork:
                query = "UPDATE refused SET fork = 1, seen = ? WHERE origin = ? AND size = ? AND root <> ? AND fork = 0"
                sql.execute(query, (refused.note, *of))
                fork, seen = True, str(twin[0])
            query = "SELECT count(*) FROM refused WHERE origin = ? AND fork = ?"
            if sql.execute(query, (origin, fork)).fetchone()[0] >= MOST_REFUSED:
                if fork:
                    return False
                sql.execute(
                    "DELETE FROM refused WHERE rowid = (SELECT rowid FROM refused WHERE origin = ? AND fork = 0 ORDER BY"
                    " size > coalesce((SELECT size FROM seen WHERE origin = refused.origin), -1), rowid LIMIT 1)",
                    (origin,),
                )
            row = (*of, fork, refused.time, refused.note, seen)
            sql.execute("INSERT INTO refused VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            return True

    def refused(self, origin: str) -> list[Refused]:
        """The refused checkpoints of a log, those that prove a fork first."""
        with self._using() as sql:
            rows = sql.execute(
                "SELECT origin, size, root, fork, time, note, seen FROM refused WHERE origin = ? ORDER BY fork DESC, time, size",
                (origin,),
            ).fetchall()
        return [Refused(row[0], row[1], row[2], bool(row[3]), *row[4:]) for row in rows]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._using() as sql:
            sql.execute("BEGIN IMMEDIATE")
            try:
                yield sql
            except BaseException:
                sql.execute("ROLLBACK")
                raise
            sql.execute("COMMIT")

    @contextlib.contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._sql
            except sqlite3.Error as error:
                raise _refusal(self._path, error) from error


def _connected(path: Path) -> sqlite3.Connection:
    try:
        # mode=rw: a file that is gone is not made anew. Without an isolation level each statement is a transaction of its own.
        uri = f"{path.absolute().as_uri()}?mode=rw"
        sql = sqlite3.connect(uri, uri=True, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("journal_mode = DELETE", "synchronous = EXTRA", "trusted_schema = OFF"):
                sql.execute(f"PRAGMA {pragma}").close()
        except BaseException:
            sql.close()
            raise
    except sqlite3.Error as error:
        raise _refusal(path, error) from error
    return sql


def _refusal(path: Path, error: sqlite3.Error) -> Exception:
    """What an error of SQLite means to who asked; a fault of ours stays what it is."""
    code: Any = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Refusal("busy", f"{path} is in use by another process", hint="try again")
    if code in _FULL:
        return Refusal("no_space", f"{path} can't be written: {error}", hint="make room, or make the folder writable")
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return Refusal(
            "data_version",
            f"{path} is damaged, or no memory of a witness: {error}",
            hint="a witness that does not know what it cosigned must not go on: make a new key and name",
        )
    return error
