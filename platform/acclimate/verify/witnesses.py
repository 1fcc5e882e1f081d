"""What witnesses vouch for: that there is one history, and when its records were there.

A witness signs a checkpoint with the time at which it saw it, and only if the log did nothing but grow since the last one it
signed. With a quorum of the witnesses that RoundDefined names, whoever runs the log can't show two histories, nor move a record in time.
"""

from acclimate.verify.audit import Audit
from acclimate.verify.report import NotChecked


def split_view(audit: Audit) -> str:
    """A quorum of the declared witnesses cosigned the last checkpoint: everybody who asks them is shown this one history."""
    if audit.records[audit.first]["quorum"] == 0:
        raise NotChecked(
            "the round declared no witnesses (quorum 0); that everybody is shown this one history is the word of the log's"
            " operator"
        )
    raise NotChecked("this version does not verify the cosignatures of witnesses")


def time(audit: Audit) -> str:
    """Every entry's commitment is in a checkpoint that a quorum cosigned within GRACE after the close."""
    if audit.records[audit.first]["quorum"] == 0:
        raise NotChecked(
            "the round declared no witnesses (quorum 0); that records came when they say is the word of the log's operator"
        )
    raise NotChecked("this version does not verify the cosignatures of witnesses")
