"""What witnesses vouch for: that there is one history, and when its records were there.

A witness signs a checkpoint with the time at which it saw it, and only if the log did nothing but grow since the last one it
signed. With a quorum of the witnesses that RoundDefined names, whoever runs the log can't show two histories, nor move a record in time.

The time of a checkpoint (quorum.py): it was there by the q-th smallest time of its cosignatures, q being the quorum, and was
still the newest that the witnesses were shown at the q-th largest. So an entry's commitment

- was in time, if the first such checkpoint that holds it was there by GRACE after the close;
- was not, if a checkpoint without it still was the newest after that;
- else it is not known: between the last checkpoint without it and the first one with it the witnesses saw none.
"""

import bisect
import itertools
from collections.abc import Iterator
from datetime import datetime, timedelta

from acclimate.log import SignedCheckpoint
from acclimate.quorum import Quorum
from acclimate.verify import history
from acclimate.verify.audit import Audit
from acclimate.verify.report import Failed, NotChecked
from acclimate_competitions.records import format_time, parse_time

GRACE = timedelta(minutes=5)
"""How long after the close the witnesses may see what was logged before it."""


def split_view(audit: Audit) -> str:
    """A quorum of the declared witnesses cosigned all of the round's records: everybody who asks them is shown this one history.

    1. Witnesses whose keys the auditor brought are among those that RoundDefined names.
    2. No checkpoint of the bundle has a line of a declared witness that does not verify, or is of another history.
    3. The newest checkpoint that a quorum cosigned holds the round's last record.
    """
    quorum = _quorum(audit)
    # 1
    if strange := sorted(set(audit.witnesses) - set(quorum.keys())):
        named = ", ".join(quorum.keys()) or "none"
        raise Failed(
            f"log entry {audit.first}, witnesses",
            f"the key given, {strange[0]}, is not among the round's witnesses: {named}",
        )
    # 2
    seen = list(_seen(audit, quorum))
    if quorum.needed == 0:
        raise NotChecked(
            "the round declared no witnesses (quorum 0); that everybody is shown this one history is the word of the log's"
            " operator"
        )
    # 3
    round_id = audit.records[audit.first].round
    last = max(index for index, record in enumerate(audit.records) if record.round == round_id)
    enough = [signed for signed in seen if quorum.reached(signed)]
    newest = max(enough, key=lambda signed: signed.checkpoint.size, default=None)
    if newest is None or newest.checkpoint.size <= last:
        most = max(seen, key=lambda signed: (signed.checkpoint.size, len(signed.cosigned)))
        holds = f"the newest that they cosigned ends at entry {newest.checkpoint.size - 1}, " if newest else ""
        raise NotChecked(
            f"{holds}the round's last record is entry {last}; the last checkpoint has the cosignatures of"
            f" {len(most.cosigned)} of {len(quorum.witnesses)} witnesses, the round asks for {quorum.needed} (not of {', '.join(quorum.missing(most))});"
            " that everybody is shown this one history is the word of the log's operator"
        )
    names = ", ".join(sorted(vkey.partition("+")[0] for vkey in newest.cosigned))
    by = quorum.by(newest)
    assert by is not None
    return f"{newest.checkpoint.size} entries, by {names}, {format_time(by)}"


def time(audit: Audit) -> str:
    """Every entry's commitment, and every extension of the close, was seen by a quorum within GRACE of the close that it had to meet."""
    quorum = _quorum(audit)
    if quorum.needed == 0:
        raise NotChecked(
            "the round declared no witnesses (quorum 0); that records came when they say is the word of the log's operator"
        )
    sizes, by, at = _moments(audit, quorum)
    due = sorted(_due(audit))
    unknown = ""
    for index, deadline, what in due:
        place = f"log entry {index}, {what}"
        without = bisect.bisect_right(sizes, index)  # so many checkpoints end before it
        first = by[without] if without < len(by) else None
        since = at[without - 1] if without else None
        if first is not None and first <= deadline:
            continue
        if since is not None and since[0] > deadline:
            raise Failed(
                place,
                f"at {format_time(since[0])} the witnesses saw a log of {since[1]} entries, without it; it had to be there by"
                f" {format_time(deadline)}",
            )
        unknown = unknown or _gap(place, deadline, since=since[0] if since else None, until=first)
    if unknown:
        raise NotChecked(unknown)
    return f"{len(due)} records, each cosigned by {quorum.needed} witnesses"


def _gap(place: str, deadline: datetime, *, since: datetime | None, until: datetime | None) -> str:
    before = f"last seen without it {format_time(since)}" if since else "never seen without it"
    after = f"first seen with it {format_time(until)}" if until else "never seen with it"
    return (
        f"{place}: no quorum of witnesses saw the log between: {before}, {after}; that it was there by"
        f" {format_time(deadline)} is the word of the log's operator"
    )


def _moments(audit: Audit, quorum: Quorum) -> tuple[list[int], list[datetime], list[tuple[datetime, int]]]:
    """What the checkpoints with a quorum say of time, by their size.

    Returns:
        Their sizes; for each, by when it or a longer one was there; for each, at which moment it or a shorter one still was the newest,
        and its size.
    """
    seen = sorted(
        (signed.checkpoint.size, quorum.by(signed), quorum.at(signed))
        for signed in _seen(audit, quorum)
        if quorum.reached(signed)
    )
    by = [moment for _, moment, _ in seen if moment is not None]
    at = [(moment, size) for size, _, moment in seen if moment is not None]
    return (
        [size for size, _, _ in seen],
        list(itertools.accumulate(reversed(by), min))[::-1],
        list(itertools.accumulate(at, max)),
    )


def _due(audit: Audit) -> Iterator[tuple[int, datetime, str]]:
    """(log index, by when witnesses must have seen it, what it is) of each entry's commitment and each extension of the close."""
    state = audit.round
    closes = parse_time(state.defined["closes"])
    for index, record in enumerate(audit.records):
        if record.round == state.id and record.type == "ClosingExtended":
            yield index, closes + GRACE, f"ClosingExtended to {record['closes']}"
            closes = parse_time(record["closes"])
    for entry in state.entries:
        yield state.submissions[entry.commitment].order, state.closes + GRACE, f"the commitment of {entry.entrant}"


def _quorum(audit: Audit) -> Quorum:
    return Quorum.of(audit.records[audit.first].fields)


def _seen(audit: Audit, quorum: Quorum) -> Iterator[SignedCheckpoint]:
    """Each checkpoint in the bundle, receipts' included, with the cosignatures of the round's witnesses."""
    names = ["checkpoint", *audit.bundle.under("checkpoints"), *audit.bundle.under("receipts")]
    for name in names:
        signed = history.signed(audit, name, quorum.witnesses)
        # Where nobody cosigned, what it is the root of is for `entries`, `earlier checkpoints` and `receipts` to tell.
        if signed.cosigned:
            history.begins(audit, signed.checkpoint, name)
        yield signed
