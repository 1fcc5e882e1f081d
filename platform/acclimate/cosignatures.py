"""Which checkpoints witnesses cosigned, as the database has it, and a checkpoint's note with their lines.

Where one checkpoint must be chosen for good, as in a bundle, it is the first that *came to* its quorum, with just the lines that made it:
whatever witnesses sign later, the choice stays, and so do its bytes.
"""

import bisect
import itertools
from collections.abc import Sequence

from sqlalchemy import Select, func, insert, select

from acclimate import notes
from acclimate.quorum import Quorum
from acclimate.store import Tx, cosignatures, log_checkpoints, timestamp
from acclimate_competitions.errors import Refusal

_PIECE = 200


def keep(tx: Tx, size: int, witness: notes.Verifier, signature: notes.Signature) -> bool:
    """Keep a cosignature that was verified; whether it is new."""
    key = witness.text()
    mine = (cosignatures.c.size == size) & (cosignatures.c.witness == key)
    if tx.execute(select(cosignatures.c.size).where(mine)).first() is not None:
        return False
    time = int.from_bytes(signature.data[:8], "big")
    row = {"size": size, "witness": key, "line": signature.line(), "time": time, "at": timestamp(tx)}
    tx.execute(insert(cosignatures), row)
    return True


def sizes(tx: Tx, witnesses: Sequence[str]) -> dict[str, int]:
    """Witness -> size of the newest checkpoint that it cosigned; 0 where there is none."""
    # One by one, each by the index; together they would be counted through.
    query = select(func.coalesce(func.max(cosignatures.c.size), 0))
    return {key: int(tx.execute(query.where(cosignatures.c.witness == key)).scalar_one()) for key in witnesses}


def newest(tx: Tx, quorum: Quorum) -> int:
    """Size of the newest checkpoint that the quorum cosigned; 0 where there is none.

    With a quorum of 0 the newest of all.
    """
    if quorum.needed == 0:
        return int(tx.execute(select(func.coalesce(func.max(log_checkpoints.c.size), 0))).scalar_one())
    # None is newer than the newest of the last witness that is needed; from there it is never far.
    most = sorted(sizes(tx, quorum.keys).values(), reverse=True)[quorum.needed - 1 : quorum.needed]
    if not most or not most[0]:
        return 0
    query = select(cosignatures.c.size, cosignatures.c.witness).where(cosignatures.c.size <= most[0])
    return _next(tx, quorum, query.order_by(cosignatures.c.size.desc(), cosignatures.c.witness)) or 0


def _next(tx: Tx, quorum: Quorum, query: Select[tuple[int, str]]) -> int | None:
    """The first size with a quorum among (size, witness) in the order of a query; read piece by piece, as it is seldom far."""
    start, piece = 0, _PIECE
    size, count = 0, 0
    while rows := tx.execute(query.offset(start).limit(piece)).all():
        for row in rows:
            size, count = int(row.size), (count if row.size == size else 0) + (row.witness in quorum.keys)
            if count >= quorum.needed:
                return size
        start, piece = start + piece, piece * 4
    return None


def note(tx: Tx, size: int, witnesses: Sequence[str]) -> str:
    """The checkpoint of a size with the lines of all these witnesses that have cosigned it, in the order in which they are named.

    Raises:
        Refusal: entry_unknown, where no checkpoint has this size.
    """
    plain = tx.execute(select(log_checkpoints.c.note).where(log_checkpoints.c.size == size)).scalar()
    if plain is None:
        raise Refusal("entry_unknown", f"no checkpoint holds just {size} entries")
    if not witnesses:
        return str(plain)
    query = select(cosignatures.c.witness, cosignatures.c.line).where(cosignatures.c.size == size)
    lines = {row.witness: row.line for row in tx.execute(query)}
    return str(plain) + "".join(lines[witness] for witness in witnesses if witness in lines)


def checkpoint(tx: Tx, quorum: Quorum) -> str:
    """The newest checkpoint that the quorum cosigned, with all lines of its witnesses.

    Raises:
        Refusal: quorum_missing, where there is none.
    """
    size = newest(tx, quorum)
    if size == 0 and quorum.needed:
        have = {key.partition("+")[0]: size for key, size in sizes(tx, quorum.keys).items()}
        told = ", ".join(f"{name}: {f'{size} entries' if size else 'nothing'}" for name, size in have.items())
        raise Refusal(
            "quorum_missing",
            f"no checkpoint has the cosignatures of {quorum.needed} of {len(have)} witnesses yet ({told})",
            hint="ask again in a minute; where it stays so, the server's operator must look after the witnesses",
        )
    return note(tx, size, quorum.keys)


class Reached:
    """The checkpoints that came to a quorum, in the order in which they did: from one log entry to the first that holds another.

    Args:
        tx: a transaction.
        quorum: a round's, of 1 or more.
        first: the log entry from which on they matter.
        last: the last one that matters.
    """

    def __init__(self, tx: Tx, quorum: Quorum, *, first: int, last: int) -> None:
        query = select(cosignatures).where(cosignatures.c.size > first, cosignatures.c.witness.in_(quorum.keys))
        # The log may have gone on for years. Whatever came to its quorum after one that holds the last entry is never chosen.
        later = select(cosignatures.c.size, cosignatures.c.witness).where(cosignatures.c.size > last)
        if (size := _next(tx, quorum, later.order_by(cosignatures.c.size, cosignatures.c.witness))) is not None:
            mine = query.where(cosignatures.c.size == size).with_only_columns(cosignatures.c.at)
            query = query.where(cosignatures.c.at <= sorted(tx.execute(mine).scalars())[quorum.needed - 1])
        self._lines: dict[int, list[str]] = {}
        order: list[int] = []
        for row in tx.execute(query.order_by(cosignatures.c.at, cosignatures.c.size, cosignatures.c.witness)):
            lines = self._lines.setdefault(row.size, [])
            if len(lines) < quorum.needed:
                lines.append(row.line)
                if len(lines) == quorum.needed:
                    order.append(row.size)
        # A size that came to its quorum after a greater one is never the first to hold an entry: only growth matters.
        self._order = [
            size for size, most in zip(order, [0, *itertools.accumulate(order, max)], strict=False) if size > most
        ]

    def covering(self, index: int) -> int | None:
        """The size of the first of them that holds a log entry; None where none does."""
        at = bisect.bisect_right(self._order, index)
        return self._order[at] if at < len(self._order) else None

    def lines(self, size: int) -> str:
        """The lines that brought a checkpoint to its quorum; none where it did not come to it."""
        return "".join(self._lines[size]) if size in self._order else ""
