"""What of a server's answers is used, and of which type it is: an answer that lacks it is none of an Acclimate server.

A form is a type; several that may be; a list of one form; or names with the form of each, where `Maybe` ones may be missing or null. Whatever
else an answer says is left alone: a newer server may say more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from acclimate_competitions import digests, records
from acclimate_competitions.records import Record


@dataclass(frozen=True)
class Maybe:
    """A form that may be missing, or null."""

    form: Any


NUMBER = (int, float)
PROOF = {"proof": [str]}
RECEIPTS = {"receipts": [str]}
LOGGED = {"index": int, "record": object}
INDEXED = {"index": int}
DEFINED = {"round": str, "index": int}
ACCOUNT = {"id": str, "role": str, "token": str}
SERVER = {"log": str}
"""What every version of a server says of itself."""
TERMS = {
    **SERVER,
    "now": str,
    "code": str,
    "evaluators": [str],
    "witnesses": [str],
    "quorum": int,
}
VERSION = {
    "version": int,
    "ranking": str,
    "reason": str,
    "at": str,
    "correction": Maybe(str),
    "corrected": Maybe(object),
    "changes": [{"entrant": str}],
}
SUMMARY = {
    "round": str,
    "competition": Maybe(str),
    "title": str,
    "phase": str,
    "closes": str,
    "now": str,
    "data_is_public": bool,
    "entrants": int,
    "submissions": int,
}
ROUND = {
    **SUMMARY,
    "next": str,
    "opens": Maybe(str),
    "release_by": Maybe(str),
    "waiting_for": Maybe([str]),
    "problem": Maybe({"sentence": str}),
    "cosigned": Maybe({"quorum": int, "witnesses": int, "missing": int, "late": Maybe([str])}),
    "auditor": Maybe({"name": str, "due": int, "drawn": object, "agree": int}),
    "custodians": Maybe([{"name": str, "acknowledged": object, "released": object}]),
    "threshold": int,
    "entries": Maybe(int),
    "forfeited": Maybe(int),
    "tracked": Maybe(object),
}
STAGE = {"kind": str, "state": str, "progress": Maybe(NUMBER)}
STORY = {"stage": {**STAGE, "key": str}, "history": [{"at": str, "event": str, "fence": int}]}
OUTPUT = {"fence": int, "text": Maybe(str), "left_out": int, "problem": str}
RETRIED = {"round": str, "stages": [str]}
FORECAST = {"round": str, "entries": int, "preparations": [NUMBER], "evaluations": [NUMBER]}
_ENVELOPES = [{"index": int}]
_SHARE = {"index": int, "to": str, "commitment": str, "envelope": str}
ENVELOPES = {
    "real": {"envelopes": _ENVELOPES},
    "rehearsal": Maybe({"envelopes": _ENVELOPES, "fields": {"seal": str, "shares": [_SHARE]}}),
}
JOB = {"submission": int, "entrant": str, "task": str, "seed": int, "files": Mapping, "versions": Mapping}
_ROW = {"entrant": str, "score": Maybe(NUMBER), "se": Maybe(NUMBER), "direct_score": Maybe(NUMBER), "seeds": int}
RANKING = {
    "ranking": [{**_ROW, "rank": int, "rank_low": int, "rank_high": int, "direct_rank": int}],
    "baselines": [_ROW],
    "policy": {"baselines": [str]},
}
SUBMITTED = {"submission": str, "state": str, "index": int, "missing": [str]}
COMPLETED = {"state": str, "reason": Maybe(str)}
SUBMISSION = {"state": str, "reason": Maybe(str), "accepted_index": Maybe(int), "missing": Maybe([str])}


def fits(value: Any, form: Any) -> bool:
    """Whether a value has a form; true and false are no numbers."""
    match form:
        case Maybe():
            return value is None or fits(value, form.form)
        case list():
            return isinstance(value, list) and all(fits(item, form[0]) for item in value)
        case tuple():
            return any(fits(value, one) for one in form)
        case dict():
            return isinstance(value, dict) and all(
                fits(value[name], inner) if name in value else isinstance(inner, Maybe) for name, inner in form.items()
            )
    return isinstance(value, form) and (not isinstance(value, bool) or form in (bool, object))


def record(value: Any) -> Record:
    """A record of the log, by its text or as JSON: whatever the server wrapped it in, the entry's bytes are its canonical form.

    Raises:
        Refusal: record_invalid.
    """
    return records.parse(value.encode() if isinstance(value, str) else digests.canonical(value))
