"""What the children of failed tries said, for the round's organizer; see decision 0041.

A child's output is not for everybody: libraries print what they were given, so it may hold words of a model or of the holdout. Until the close
nobody reads it over the network, as the organizer must not know the models then; afterwards the organizer alone, who made the holdout, by a
request that the organizer's key signs. From the server's operator it can't be kept: the blobs are theirs to read. No bundle holds it.

It lies with the blobs, named by a note of its try, and goes with that note (garbage.py).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from acclimate.garbage import ATTEMPTS
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import Blobs

SHOWN = 16 << 10
"""Bytes of the end of an output that are shown."""
MOST = 20
"""Tries whose outputs are shown: the newest."""
LONGEST = 2 << 20
"""Bytes that no output has: it is bounded where it is written (isolation.LOG_BYTES), and a note may name anything."""
_NOTE = re.compile(r"(?P<fence>[0-9]{1,9})/(?P<kind>said|manifest)\.json")
_LOST = ("blob_unknown", "blob_corrupt")


def of_tries(blobs: Blobs, tries: Sequence[Any]) -> list[dict[str, Any]]:
    """What the children of these tries said, where they came to nothing or to a refusal.

    Args:
        blobs: where outputs and notes lie.
        tries: rows of `attempts`, the oldest first; of one that goes on nothing is told.

    Returns:
        Of the newest MOST, the oldest first: {fence, ended, code, text, left_out, problem}: the end of the output, at most SHOWN bytes;
        how many bytes before it are left out; and where text is None, why.

    Raises:
        Refusal: blobs_unreachable, busy.
    """
    ended = {(row.attempt, row.fence): row for row in tries if row.ended is not None}
    noted: dict[tuple[str, int], str] = {}
    for attempt in dict.fromkeys(row.attempt for row in tries):
        noted |= {(attempt, fence): log for fence, log in _noted(blobs, attempt).items()}
    told = [(row, noted[name]) for name, row in ended.items() if name in noted]
    return [{"fence": row.fence, "ended": row.ended, "code": row.code, **_end(blobs, log)} for row, log in told[-MOST:]]


def _noted(blobs: Blobs, attempt: str) -> dict[int, str]:
    """Fence -> digest of the output, by the notes of an attempt; what is torn or names no digest is passed over."""
    folder = f"{ATTEMPTS}{attempt.removeprefix('sha256:')}/"
    found: dict[int, str] = {}
    # A try may have had several children, as whoever takes it up begins anew: what the last came to is the manifest's to say.
    for name in sorted(blobs.notes(folder), key=lambda name: name.endswith("/manifest.json")):
        parsed = _NOTE.fullmatch(name.removeprefix(folder))
        if parsed is None:
            continue
        fence = int(parsed["fence"])
        try:
            document: Mapping[str, Any] = json.loads(blobs.note(name) or b"")
            log, done = document["log"], parsed["kind"] == "manifest" and document["outcome"]["status"] != "refused"
        except (ValueError, TypeError, KeyError):
            continue
        if done:
            found.pop(fence, None)
        elif isinstance(log, str) and digests.is_digest(log):
            found[fence] = log
    return found


def _end(blobs: Blobs, log: str) -> dict[str, Any]:
    """The end of an output: {text, left_out, problem}."""
    try:
        size = blobs.size(log)
        if size > LONGEST:
            sentence = f"its note names {log} of {size} bytes, which is no output"
            return {"text": None, "left_out": 0, "problem": sentence}
        data = blobs.read(log)
    except Refusal as refusal:
        if refusal.code not in _LOST:
            raise
        return {"text": None, "left_out": 0, "problem": refusal.sentence}
    end = data[-SHOWN:]
    if len(data) > SHOWN:
        # From the begin of a line, where there is one: half a character or half a line tells nobody anything.
        end = end[end.find(b"\n") + 1 :]
    return {"text": end.decode("utf-8", "replace"), "left_out": len(data) - len(end), "problem": ""}
