"""`[[anchors]]`: baselines that enter every round of a competition unchanged, so that rounds can be held against each other.

An anchor is a baseline whose model the definition names by its digest; the null predictor, which has no model, is one by its name. So a round
whose anchor has another model can't come about: its preparation is refused by the round's own rules.
"""

from dataclasses import dataclass

from acclimate_competitions import digests
from acclimate_competitions.fields import Table

MAJORITY = "majority"
"""The null predictor's name: it answers with the most frequent target of the preparation split. No entrant may take it."""


@dataclass(frozen=True)
class Anchor:
    """One anchor.

    Attributes:
        name: of a baseline of the definition.
        model: digest of its model, over the canonical JSON of {file name: digest}; None for the null predictor.
    """

    name: str
    model: str | None


def read(root: Table, baselines: tuple[str, ...]) -> tuple[Anchor, ...]:
    """The anchors of a definition; problems are noted in its document.

    Args:
        root: the definition's root.
        baselines: those of its ranking.
    """
    found: list[Anchor] = []
    for table in root.tables("anchors", least=0):
        anchor = Anchor(name=table.text("name"), model=table.text("model", None))
        if table.good("name"):
            if anchor.name not in baselines:
                table.problem("name", f'= "{anchor.name}": an anchor is one of ranking.baselines')
            elif anchor.name in [other.name for other in found]:
                table.problem("name", f'= "{anchor.name}" is the name of another anchor')
            elif anchor.name == MAJORITY and anchor.model is not None:
                table.problem("model", f"{MAJORITY!r} is the null predictor, which has no model")
            elif anchor.name != MAJORITY and anchor.model is None:
                table.problem("name", f'= "{anchor.name}": needs `model`, the digest that `acclimate check` prints')
        if table.good("model") and anchor.model is not None and not digests.is_digest(anchor.model):
            table.problem("model", f'= "{anchor.model[:80]}": must be sha256: and 64 lower-case hex digits')
        table.finish()
        found.append(anchor)
    return tuple(found)
