"""What the log says of rounds that the bundle is not of: only what somebody signed who might.

Their entries stand in the log because the tree needs them. The rules are not played over them, since their definitions are not in the bundle; so
a server could append what it likes in their name. A record says something here only by its own signature, of a party whom RoundDefined names.
"""

from collections.abc import Sequence

from acclimate_competitions import records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record

_ENDS = {"RankingPublished": "published", "RoundVoided": "voided"}


def defined(log: Sequence[Record]) -> dict[str, tuple[int, Record]]:
    """Each round's first RoundDefined that the organizer signed whom it names, with its log index, in the log's order."""
    found: dict[str, tuple[int, Record]] = {}
    for index, record in enumerate(log):
        if record.type == "RoundDefined" and record.round not in found and is_by(record, {_organizer(record)}):
            found[record.round] = index, record
    return found


def ends(log: Sequence[Record]) -> dict[str, tuple[int, str]]:
    """How rounds ended, published or voided, with the log index of the first record that says so.

    A ranking is signed by the round's organizer or an evaluator of it, a voiding by its organizer or a custodian. Whether enough custodians agreed
    to a voiding, and in time, the rules tell in the round's own bundle or mirror.
    """
    known, found = defined(log), dict[str, tuple[int, str]]()
    for index, record in enumerate(log):
        if record.type in _ENDS and record.round in known and record.round not in found:
            at, of = known[record.round]
            if at < index and is_by(record, _may_end(of, record.type)):
                found[record.round] = index, _ENDS[record.type]
    return found


def is_by(record: Record, keys: set[str]) -> bool:
    """Whether a record bears the signature of one of these keys."""
    try:
        records.verify(record)
    except Refusal:
        return False
    return record.by in keys


def _may_end(of: Record, kind: str) -> set[str]:
    others = of["evaluators"] if kind == "RankingPublished" else [each["ed25519"] for each in of["custodians"]]
    return {_organizer(of), *others}


def _organizer(of: Record) -> str:
    return str(of["organizer"]["ed25519"])
