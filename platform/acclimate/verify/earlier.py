"""Rounds before this one: which one it follows, and whose holdouts were open already when its own was sealed.

A holdout that was opened before may be known to anybody, to the organizer at least. That a new one has no row of it the organizer's client looks
at before it seals, and a bundle does not show: it has one round's rows. So it is said, for each round of the same competition in this log.
"""

from acclimate.verify import others
from acclimate.verify.audit import Audit
from acclimate.verify.report import Beside, Failed, NotChecked

_SHOWN = 5


def follows(audit: Audit) -> str:
    """The round that this one follows is an earlier one of its competition in this log.

    Which holdouts were open by then is named, and which of those rounds has no end in this log: an organizer may have seen its ranking, and asked again.
    """
    defined = audit.records[audit.first]
    known = others.defined(audit.records[: audit.first])
    before = {name for name, (_, record) in known.items() if record["competition"] == defined["competition"]}
    named = defined.fields.get("predecessor")
    if named is not None and named not in before:
        raise Failed(
            f"log entry {audit.first}, predecessor",
            f"it follows {named}, which is no earlier round of the competition {defined['competition']} in this log",
        )
    opened = _opened(audit, str(defined["competition"]))
    if named is None and not opened:
        raise Beside
    said = f"it follows {named}" if named is not None else "it names no round that it follows"
    if opened:
        ended = others.ends(audit.records)
        left = " with no ranking published, nor void, in this log"
        shown = [
            f"{name} (log entry {at}{'' if name in ended else left})" for name, at in list(opened.items())[:_SHOWN]
        ]
        shown += [f"{len(opened) - _SHOWN} more"] if len(opened) > _SHOWN else []
        raise NotChecked(
            f"{said}; before its holdout was sealed, those of {', '.join(shown)} were opened: that it has no row of them is its organizer's word."
            " Who has the bundles of both compares example and input in their holdout/"
        )
    return f"{said}; no holdout of the competition was opened in this log before its own was sealed"


def _opened(audit: Audit, competition: str) -> dict[str, int]:
    """Other rounds of a competition whose holdout was opened before this round's was sealed, by log index of the opening."""
    own = audit.records[audit.first].round
    known = others.defined(audit.records)
    rounds = {name for name, (_, record) in known.items() if record["competition"] == competition} - {own}
    sealed = (at for at, r in enumerate(audit.records) if r.type == "HoldoutSealed" and r.round == own)
    until = next(sealed, len(audit.records))
    openings = ((at, r) for at, r in enumerate(audit.records[:until]) if r.type == "HoldoutOpened")
    return {record.round: at for at, record in openings if record.round in rounds}
