"""A holdout that stays private: what its public bundle withholds, and what stands in for it.

The public bundle of such a round has neither shares.json nor holdout/, predictions/ and scores/. In their place rows.jsonl opens
drawn rows under the row root, and the named auditor, who verified the whole bundle, has signed RoundAudited. The whole bundle, which
organizer and auditor get, is checked like any other.
"""

from acclimate.verify.audit import Audit
from acclimate.verify.report import Beside, NotChecked

_WITHHELD = ("shares.json", "holdout", "predictions", "scores")


def withheld(audit: Audit) -> bool:
    """Whether this is the public bundle of a round whose holdout stays private."""
    there = [name for name in audit.bundle.names if name.partition("/")[0] in _WITHHELD]
    return audit.competition.round.holdout_after == "private" and not there


def rows(audit: Audit) -> str:
    """The rows that a draw chose are opened: each leads, with its salt and path, to the row root of the seal."""
    if audit.competition.round.holdout_after == "public":
        raise Beside
    raise NotChecked("this version does not verify the opened rows of a private holdout")


def reported(audit: Audit) -> str:
    """The auditor whom the round names has verified the whole bundle and signed what they found."""
    if audit.competition.round.holdout_after == "public":
        raise Beside
    raise NotChecked("this version does not verify an auditor's report")
