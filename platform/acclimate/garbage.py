"""Which blobs nobody needs any more, and their removal while everything runs.

Needed is what anything names: a digest in any column of any table (log records, definitions, manifests, uploads, seals, openings, results,
the outbox, attempts), in a note beside the blobs (outcomes and checkpoints of attempts), or in a document that is itself needed, such as
a definition that names files. Too much is kept rather than too little: a token's digest that is also a blob's would keep it.

Why nothing that is needed goes, whoever writes meanwhile:

1. What is stored is listed first, what is needed is read afterwards; only what the list has can be removed.
2. Only what nobody stored or kept for `older_than` seconds is removed, and that is looked at again in the instant of the removal. Whoever
   is about to name a blob stores it, or keeps it (Blobs.keep): both make it young.
3. A database that was put back to an older state names too little. It is refused while a newer signed checkpoint is known.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Float, Integer, LargeBinary, Text, cast, select

from acclimate.checkpoints import Copies
from acclimate.config import Settings
from acclimate.log import Verifier
from acclimate.store import Store, Tx, attempts, metadata
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import parse_time
from acclimate_runners.blobs import Blobs, Stored

SHORTEST = 3600.0
"""Seconds below which nothing is removed: an upload or an attempt under way stores its files before anything names them."""
ATTEMPTS = "attempts/"
_DIGEST = re.compile(rb"sha256:[0-9a-f]{64}")
_PAGE, _PIECE, _AT_ONCE = 500, 1 << 16, 8
_GIVEN_UP = frozenset({"failed", "cancelled"})
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Collected:
    """What a collection found and did.

    Attributes:
        stored, size: how many blobs there are, and their bytes.
        needed: how many of them something names.
        young: how many nothing names, that are kept as they are young.
        removed, freed: how many were removed (or would be), and their bytes.
        notes: how many notes of attempts that are over were dropped (or would be).
    """

    stored: int
    size: int
    needed: int
    young: int
    removed: int
    freed: int
    notes: int


def collect(
    store: Store, settings: Settings, verifier: Verifier, *, older_than: float, dry: bool, progress: Progress
) -> Collected:
    """Remove the blobs that nothing names and that are old.

    Args:
        store: the installation's.
        settings: say where its data folder is.
        verifier: of the log's key.
        older_than: seconds.
        dry: whether nothing is removed, only counted.
        progress: is told (done, of how many, what).

    Raises:
        Refusal: log_inconsistent, where the database is an older one; config_invalid, blobs_unreachable, busy, database_unreachable.
    """
    stored = _listed(store.blobs, progress)
    over = over_notes(store, older_than=older_than)
    if not dry:
        for done, name in enumerate(over):
            progress(done, len(over), "notes")
            store.blobs.drop_note(name)
    copies = Copies.asking(settings, store.blobs, verifier)
    with store.snapshot() as tx:
        copies.check_signed(tx)
        named = set(named_in(tx))
    named |= set(named_in_notes(store.blobs, without=frozenset(over)))
    needed = closure(store.blobs, named, stored, progress)
    spare = [each for digest, each in stored.items() if digest not in needed]
    old = [each for each in spare if each.age > older_than]
    removed, freed = 0, 0
    for done, each in enumerate(old):
        progress(done, len(old), "removing")
        if dry or store.blobs.remove(each.digest, older_than=older_than):
            removed, freed = removed + 1, freed + each.size
    size = sum(each.size for each in stored.values())
    return Collected(
        stored=len(stored),
        size=size,
        needed=len(stored) - len(spare),
        young=len(spare) - removed,
        removed=removed,
        freed=freed,
        notes=len(over),
    )


def named_in(tx: Tx) -> Iterator[str]:
    """Every digest that anything in the database names."""
    for table in metadata.sorted_tables:
        columns = [
            column if isinstance(column.type, LargeBinary) else cast(column, Text).label(column.name)
            for column in table.columns
            if not isinstance(column.type, Integer | Float)
        ]
        rows = tx.connection.execution_options(stream_results=True, yield_per=_PAGE).execute(select(*columns))
        for row in rows:
            for value in row:
                if value is not None:
                    yield from _digests(value.encode() if isinstance(value, str) else bytes(value))


def named_in_notes(blobs: Blobs, *, without: frozenset[str] = frozenset()) -> Iterator[str]:
    """Every digest that a note of an attempt names."""
    for name in blobs.notes(ATTEMPTS):
        if name not in without:
            yield from _digests(blobs.note(name) or b"")


def over_notes(store: Store, *, older_than: float) -> list[str]:
    """The notes of attempts that ended for good longer ago than so many seconds; of what the database does not know, none."""
    names = store.blobs.notes(ATTEMPTS)
    with store.snapshot() as tx:
        now, states = tx.now(), dict[str, list[Any]]()
        for row in tx.execute(select(attempts.c.attempt, attempts.c.state, attempts.c.ended)):
            states.setdefault(row.attempt.removeprefix("sha256:"), []).append(row)

    def old(row: Any) -> bool:
        return row.ended is not None and (now - parse_time(row.ended)).total_seconds() > older_than

    def over(name: str) -> bool:
        rows = states.get(name.split("/")[1], [])
        committed = any(row.state == "committed" and old(row) for row in rows)
        return committed or (any(row.state in _GIVEN_UP for row in rows) and all(map(old, rows)))

    return [name for name in names if over(name)]


def closure(blobs: Blobs, named: Iterable[str], stored: dict[str, Stored], progress: Progress) -> set[str]:
    """Of what is stored, all that is named, and all that the named documents name."""
    needed: set[str] = set()
    new = {digest for digest in named if digest in stored}
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        while new:
            needed |= new
            found: set[str] = set()
            for done, inner in enumerate(threads.map(lambda digest: _document(blobs, digest), sorted(new))):
                progress(done, len(new), "documents")
                found |= inner
            new = {digest for digest in found if digest in stored} - needed
    return needed


def _listed(blobs: Blobs, progress: Progress) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    for each in blobs.listing():
        stored[each.digest] = each
        if len(stored) % 1000 == 0:
            progress(len(stored), 0, "listing")
    return stored


def _document(blobs: Blobs, digest: str) -> set[str]:
    """The digests that a blob of text names; what holds a zero byte at its beginning is none."""
    found: set[str] = set()
    try:
        with blobs.open(digest) as stream:
            rest, first = b"", True
            while data := stream.read(_PIECE):
                if first and b"\0" in data:
                    return set()
                found |= _digests(rest + data)
                rest, first = data[-len("sha256:") - 64 :], False
    except Refusal as refusal:
        # Lost or set aside since it was listed: it names nothing any more.
        if refusal.code not in ("blob_unknown", "blob_corrupt"):
            raise
    return found


def _digests(data: bytes) -> set[str]:
    return {found for each in _DIGEST.findall(data) if digests.is_digest(found := each.decode())}
