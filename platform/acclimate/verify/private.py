"""A holdout that stays private: what its public bundle withholds, and what stands in for it.

The public bundle of such a round has neither shares.json nor holdout/, predictions/ and scores/. In their place rows.jsonl opens
drawn rows under the row root, and the named auditor, who verified the whole bundle, has signed RoundAudited. The whole bundle, which
organizer and auditor get, is checked like any other.

1. rows: the draw follows from the log, nobody chose it; each row leads, with its salt and path, to the root of HoldoutSealed.
2. auditor's report: the newest RoundAudited counts nothing that FAILED, and is of the newest ranking. That its signer is the auditor whom
   RoundDefined names, check `rules` has shown.
"""

import base64
import binascii
from typing import Any

from acclimate import drawn_rows, log
from acclimate.verify.audit import Audit
from acclimate.verify.files import parse
from acclimate.verify.report import Beside, Failed, NotChecked
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

ROWS = "rows.jsonl"
_WITHHELD = ("shares.json", "holdout", "predictions", "scores")
_FIELDS = {"index", "row", "salt", "path"}


def withheld(audit: Audit) -> bool:
    """Whether this is the public bundle of a round whose holdout stays private."""
    there = [name for name in audit.bundle.names if name.partition("/")[0] in _WITHHELD]
    return audit.competition.round.holdout_after == "private" and not there


def rows(audit: Audit) -> str:
    """The rows that a draw chose are opened: each leads, with its salt and path, to the row root of the seal."""
    if not audit.round.private:
        if ROWS in audit.bundle:
            raise Failed(ROWS, "the holdout of this round is public, so no rows of it are drawn")
        raise Beside
    seal = audit.round.seal
    assert seal is not None, "a round past `sealed` has a seal"
    wanted = drawn_rows.drawn(audit.tree.root(_opening(audit) + 1), seal["rows"])
    lines = audit.bundle.lines(ROWS)
    for number, (line, index) in enumerate(zip(lines, wanted, strict=False), start=1):
        where = f"{ROWS}, line {number}"
        row = _row(parse(line, where), where)
        if row["index"] != index:
            raise Failed(where, f"it opens row {row['index']}, the draw says {index}")
        leaf = digests.leaf_hash(row["salt"] + digests.canonical(row["row"]))
        root = bytes.fromhex(seal["row_root"].removeprefix("sha256:"))
        try:
            log.verify_inclusion(leaf, row["path"], index=index, size=seal["rows"], root=root)
        except Refusal as refusal:
            sentence = f"row {index} with this salt and path does not lead to the seal's row root {seal['row_root']}"
            raise Failed(where, sentence) from refusal
    if len(lines) != len(wanted):
        raise Failed(
            f"{ROWS}, line {min(len(lines), len(wanted)) + 1}", f"{len(lines)} lines, the draw has {len(wanted)} rows"
        )
    return f"{len(wanted)} of {seal['rows']} rows"


def _opening(audit: Audit) -> int:
    """The log index of the round's HoldoutOpened."""
    found = (i for i, r in enumerate(audit.records) if r.type == "HoldoutOpened" and r.round == audit.round.id)
    return next(found)


def _row(document: Any, where: str) -> dict[str, Any]:
    """A line's content, salt and path as bytes."""
    if not isinstance(document, dict) or set(document) != _FIELDS or type(document["index"]) is not int:
        raise Failed(where, "it must have exactly index, a whole number, row, salt and path")
    if not isinstance(document["row"], dict) or not isinstance(document["path"], list):
        raise Failed(where, "row must be an object and path a list")
    salt, *path = (_hash(text, where) for text in (document["salt"], *document["path"]))
    return {**document, "salt": salt, "path": path}


def _hash(text: object, where: str) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != 32 or base64.b64encode(raw).decode() != text:
        raise Failed(where, f"salt and path must be the base64 of 32 bytes each, one is {text!r}")
    return raw


def reported(audit: Audit) -> str:
    """The auditor whom the round names has verified the whole bundle and signed what they found."""
    state = audit.round
    if not state.private and not state.reports:
        raise Beside
    assert state.auditor is not None, "a private holdout, and a report, need an auditor"
    name = state.auditor["name"]
    if not state.reports:
        raise NotChecked(
            f"{name}, the round's auditor, has not reported on the whole bundle: that the scores follow from the holdout is the"
            " organizer's and the server's word"
        )
    report = state.reports[-1]
    counts = report["checks"]
    said = f"{name}: {counts['ok']} checks ok, {counts['failed']} FAILED, {counts['not_checked']} NOT CHECKED"
    old = report["ranking"] != state.rankings[-1][0]
    # A ranking that is revised after it makes nothing good: only the auditor's next report does.
    if counts["failed"]:
        since = f"; the ranking was revised since, and {name} has not reported on that" if old else ""
        raise Failed(f"RoundAudited of {name}", f"{said}, of the bundle whose MANIFEST has {report['bundle']}{since}")
    if old:
        raise NotChecked(
            f"the newest report of {name} is of ranking {report['ranking']}, revised since: the newest is {state.rankings[-1][0]}"
        )
    if not counts["ok"]:
        raise NotChecked(f"{said}: who reports no check says nothing")
    before = sum(bool(earlier["checks"]["failed"]) for earlier in state.reports[:-1])
    return f"{said}; MANIFEST {report['bundle']}" + (f"; {before} earlier reports with FAILED" if before else "")
