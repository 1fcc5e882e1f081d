"""What the log says of rounds that the bundle is not of: only what somebody signed who might.

Their entries stand in the log because the tree needs them. The rules are not played over them, since their definitions are not in the bundle; so
a server could append what it likes in their name. A record says something here only by its own signature, of a party whom RoundDefined names.
"""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime

from acclimate_competitions import records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase
from acclimate_competitions.records import Record, parse_time
from acclimate_competitions.rounds import LAPSE, TABLE

_ENDS = {"RankingPublished": "published", "RoundVoided": "voided"}
_BEFORE_CLOSE = frozenset({Phase.DRAFT, Phase.SEALED, Phase.OPEN})
_OPENED = frozenset({"RoundOpened", *(kind for kind, (phases, _, _) in TABLE.items() if phases == {Phase.OPEN})})
_CLOSED = frozenset({"RoundClosed", *(kind for kind, (phases, _, _) in TABLE.items() if not phases & _BEFORE_CLOSE)})


def defined(log: Sequence[Record]) -> dict[str, tuple[int, Record]]:
    """Each round's first RoundDefined that the organizer signed whom it names, with its log index, in the log's order."""
    found: dict[str, tuple[int, Record]] = {}
    for index, record in enumerate(log):
        if record.type == "RoundDefined" and record.round not in found and is_by(record, {_organizer(record)}):
            found[record.round] = index, record
    return found


def ends(log: Sequence[Record]) -> dict[str, tuple[int, str]]:
    """How rounds ended, published or voided, with the log index of the first record that says so.

    A ranking is signed by the round's organizer or an evaluator of it; a voiding as `_voids` says. What the rules demand of them besides is told by
    the round's own bundle or mirror.
    """
    known, found, before = defined(log), dict[str, tuple[int, str]](), defaultdict[str, list[Record]](list)
    for index, record in enumerate(log):
        if record.round not in known or record.round in found or index <= known[record.round][0]:
            continue
        of = known[record.round][1]
        if record.type in _ENDS and _is_end(record, of, before[record.round]):
            found[record.round] = index, _ENDS[record.type]
        before[record.round].append(record)
    return found


def is_by(record: Record, keys: set[str]) -> bool:
    """Whether a record bears the signature of one of these keys."""
    try:
        records.verify(record)
    except Refusal:
        return False
    return record.by in keys


def _organizer(of: Record) -> str:
    return str(of["organizer"]["ed25519"])


def _is_end(record: Record, of: Record, before: Sequence[Record]) -> bool:
    if record.type == "RankingPublished":
        return is_by(record, {_organizer(of), *of["evaluators"]})
    return _voids(record, of, before)


def _voids(record: Record, of: Record, before: Sequence[Record]) -> bool:
    """Whether as many have signed a voiding as it takes where the log says that the round is.

    1. The organizer or a custodian signed it, a custodian with the phase.
    2. k custodians agree; or
    3. the organizer alone, before the close, or where custody failed: the round is prepared, and `release_by` has passed; or
    4. a custodian alone, LAPSE after `release_by`; but neither once k shares are released.

    Args:
        record: a RoundVoided.
        of: the round's RoundDefined.
        before: the round's records between the two.
    """
    custodians = {each["ed25519"] for each in of["custodians"]}
    # 1
    if not is_by(record, {_organizer(of), *custodians}):
        return False
    by_custodian = record.by != _organizer(of)
    if by_custodian and "phase" not in record.fields:
        return False
    # 2
    if len(_agreed(record) & custodians) >= of["k"]:
        return True
    kinds = {each.type for each in before}
    released = {each.by for each in before if each.type == "ShareReleased" and is_by(each, custodians)}
    unread = len(released) < of["k"] and "HoldoutOpened" not in kinds
    due = parse_time(of["release_by"])
    # 3
    if not by_custodian:
        closed = bool(kinds & _CLOSED) or (bool(kinds & _OPENED) and record.at >= _closes(of, before))
        return not closed or (unread and "PreparationFinished" in kinds and record.at >= due)
    # 4
    return unread and record.at >= due + LAPSE


def _agreed(record: Record) -> set[str]:
    """Whose signatures a RoundVoided bears: the signer's, which was verified, and those who approved it over the same bytes."""
    assert record.by is not None
    covered = records.statement(record.type, record.round, record.fields, by=record.by)
    agreed = {record.by}
    for approval in record.fields.get("approvals", []):
        try:
            records.check_signature(approval["by"], approval["sig"], covered, what="an approval of RoundVoided")
        except Refusal:
            continue
        agreed.add(approval["by"])
    return agreed


def _closes(of: Record, before: Sequence[Record]) -> datetime:
    """The close in force, by the organizer's own extensions in time."""
    closes, latest = parse_time(of["closes"]), parse_time(of["closes_latest"])
    for each in before:
        if each.type == "ClosingExtended" and each.at < closes and is_by(each, {_organizer(of)}):
            closes = max(closes, min(parse_time(each["closes"]), latest))
    return closes
