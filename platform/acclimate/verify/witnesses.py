"""What witnesses vouch for: that there is one history, and when its records were there.

A witness signs a checkpoint with the time at which it saw it, and only if the log did nothing but grow since the last one it
signed. With a quorum of the witnesses that RoundDefined names, whoever runs the log can't show two histories, nor move a record in time.
The operator chose those witnesses, and may have made them up: that they are somebody's, the auditor's own keys show (`whose`).

The time of a checkpoint (quorum.py): it was there by the q-th smallest time of its cosignatures, q being the quorum, and was
still the newest that the witnesses were shown at the q-th largest. So an entry's commitment

- was in time, if the first such checkpoint that holds it was there by GRACE after the close;
- was not, if a checkpoint without it still was the newest after that;
- else it is not known: between the last checkpoint without it and the first one with it the witnesses saw none.

In the same way the last ModelPrepared is due the objection window before PreparationFinished. A server could log it late and date it back: nobody
would have had the window to object in. And no record of the round can be of a later time than that by which a checkpoint with it was there.
"""

import bisect
import itertools
from collections.abc import Iterator
from datetime import datetime, timedelta

from acclimate.log import SignedCheckpoint
from acclimate.quorum import Quorum
from acclimate.verify import history
from acclimate.verify.audit import Audit
from acclimate.verify.report import Beside, Failed, NotChecked
from acclimate_competitions.records import format_time, parse_time

GRACE = timedelta(minutes=5)
"""How long after the close the witnesses may see what was logged before it."""


def split_view(audit: Audit) -> str:
    """A quorum of the declared witnesses cosigned all of the round's records: everybody who asks them is shown this one history.

    1. No checkpoint of the bundle has a line of a declared witness that does not verify, or is of another history.
    2. The newest checkpoint that a quorum cosigned holds the round's last record.
    """
    quorum = _quorum(audit)
    # 1
    seen = list(_seen(audit, quorum))
    if quorum.needed == 0:
        raise NotChecked(
            "the round declared no witnesses (quorum 0); that everybody is shown this one history is the word of the log's"
            " operator"
        )
    # 2
    last = _last(audit)
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


def whose(audit: Audit) -> str:
    """The auditor knows of the round's witnesses, or of enough of them, and those have cosigned its last record.

    1. Of the keys that the auditor brought one at least is a declared witness's.
    2. Each brought witness has cosigned the round's last record, or a whole quorum of those that are declared has.
    """
    quorum, keys = _quorum(audit), audit.witnesses
    declared = [vkey for vkey in quorum.keys if vkey in keys]
    named = ", ".join(quorum.keys) or "none"
    if not keys:
        if quorum.needed == 0:
            raise Beside
        raise NotChecked(
            "no --witness was given, and who the round's witnesses are, the server's operator said: they may all be the"
            f" operator's own, so that nobody else has seen this history. Get a key from one of them: {named}"
        )
    # 1
    cosigned = history.whole(audit)
    have = ", ".join(sorted(cosigned & set(keys))) or "none"
    if not declared:
        raise NotChecked(
            f"none of the keys given is a witness's of this round, which names {named}; of the given, these have cosigned its"
            f" last record: {have}"
        )
    # 2
    missing = [vkey for vkey in keys if vkey not in cosigned]
    if missing and (quorum.needed == 0 or len(cosigned & set(declared)) < quorum.needed):
        raise NotChecked(
            f"the bundle has no cosignature of {', '.join(missing)} over the round's last record, log entry {_last(audit)}: that"
            f" this is the history which it saw is not shown. Of those that you gave, these have cosigned it: {have}"
        )
    return have + (f"; not of {', '.join(missing)}" if missing else "")


def time(audit: Audit) -> str:
    """Every entry's commitment, and every extension of the close, was seen by a quorum within GRACE of the close that it had to meet.

    So was the last ModelPrepared, within GRACE of the objection window's begin, as PreparationFinished has it. And no record of the round says that it came more than GRACE after a quorum saw it.
    """
    quorum = _quorum(audit)
    if quorum.needed == 0:
        raise NotChecked(
            "the round declared no witnesses (quorum 0); that records came when they say is the word of the log's operator"
        )
    sizes, by, at = _moments(audit, quorum)
    _not_ahead(audit, sizes, by)
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


def _not_ahead(audit: Audit, sizes: list[int], by: list[datetime]) -> None:
    """Fail where a record of the round says that it came after a quorum had seen it.

    A server that dates a record ahead skips what has to wait: the objection window, `release_by`.
    """
    for index, record in enumerate(audit.records):
        holding = bisect.bisect_right(sizes, index)
        if record.round == audit.round.id and holding < len(by) and record.at > by[holding] + GRACE:
            raise Failed(
                f"log entry {index}, {record.type}",
                f"it says that it came {format_time(record.at)}; witnesses had cosigned a log with it by"
                f" {format_time(by[holding])}",
            )


def _last(audit: Audit) -> int:
    assert audit.last is not None, "check `round` says which record is the last"
    return audit.last


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
    """(log index, by when witnesses must have seen it, what it is) of all that a quorum must have seen in time."""
    state = audit.round
    closes = parse_time(state.defined["closes"])
    for index, record in enumerate(audit.records):
        if record.round == state.id and record.type == "ClosingExtended":
            yield index, closes + GRACE, f"ClosingExtended to {record['closes']}"
            closes = parse_time(record["closes"])
    for entry in state.entries:
        yield state.submissions[entry.commitment].order, state.closes + GRACE, f"the commitment of {entry.entrant}"
    window = state.competition.round.objection_window
    if state.finished is not None and state.prepared and window:
        kinds = (i for i, r in enumerate(audit.records) if (r.round, r.type) == (state.id, "ModelPrepared"))
        yield max(kinds), state.finished.at - window + GRACE, "the last ModelPrepared before the objection window"


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
