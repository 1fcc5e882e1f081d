"""What ties rounds of a competition together for whoever compares them: the same models again, anchors, and one recipe; and what does not.

Holdouts of different rounds are disjoint, so scores of different rounds are never of the same examples. What a standing entry or an anchor moves
by between two rounds is the holdout's doing, and the draw's of examples; what another entrant moves by may be its model's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from acclimate.score_tables import listed


@dataclass(frozen=True)
class Linked:
    """One round, as far as it can be tied to others.

    Attributes:
        name: of the round.
        recipe: digest of its recipe; None where nothing says.
        models: entrant -> digest of the model; those of whom nothing says are left out.
        anchors: anchor of the definition -> (score, standard error) after preparation; None where it has none.
    """

    name: str
    recipe: str | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    anchors: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)


def standing(rounds: Sequence[Linked]) -> tuple[list[str], list[str]]:
    """Entrants whose model is the same in all rounds, and those who are in all of them with several models.

    Of whom nothing says which model it was, stands among neither.
    """
    if not rounds:
        return [], []
    common = sorted(set.intersection(*(set(one.models) for one in rounds)))
    same = [name for name in common if len({one.models[name] for one in rounds}) == 1]
    return same, [name for name in common if name not in same]


def drift(rounds: Sequence[Linked]) -> list[dict[str, Any]]:
    """How far each anchor moved from a round to the next one that it is in.

    Returns:
        [{anchor, rounds: [before, after], before, after, change, se}]; se of the change, the two holdouts being drawn independently; None where
        one of the two is unknown.
    """
    found = []
    for before, after in pairwise(rounds):
        for name in sorted(set(before.anchors) & set(after.anchors)):
            (old, old_se), (new, new_se) = before.anchors[name], after.anchors[name]
            if old is None or new is None:
                continue
            known = old_se is not None and new_se is not None
            found.append(
                {
                    "anchor": name,
                    "rounds": [before.name, after.name],
                    "before": old,
                    "after": new,
                    "change": new - old,
                    "se": math.hypot(old_se or 0.0, new_se or 0.0) if known else None,
                }
            )
    return found


def recipes(rounds: Sequence[Linked]) -> list[str]:
    """That rounds were prepared by different recipes, if they were; else nothing."""
    found: dict[str, list[str]] = {}
    for one in rounds:
        found.setdefault(str(one.recipe), []).append(one.name)
    if len(found) < 2:
        return []
    parts = "; ".join(listed(names, quoted=False) for names in found.values())
    return [f"not all rounds have the same recipe, which makes each another question: {parts}"]


def notes(rounds: Sequence[Linked]) -> list[str]:
    """What must be known before rounds are compared: who entered with the same model, and how far anchors moved."""
    if len(rounds) < 2:
        return []
    said = []
    same, other = standing(rounds)
    if same or other:
        said.append(
            f"entrants that all of these rounds have: {len(same) + len(other)}, {len(same)} of them with the same model"
            + (f"; with several models: {listed(other, most=20)}" if other else "")
        )
    if moved := drift(rounds):
        said.append("; ".join(map(_moved, moved)) + ": anchors are the same models, so the holdout moved them")
    elif any(one.anchors for one in rounds):
        said.append("no anchor has a score in two of these rounds, one after the other")
    return said


def _moved(row: Mapping[str, Any]) -> str:
    before, after = row["rounds"]
    error = f" ± {row['se']:.3f}" if row["se"] is not None else ""
    return (
        f"anchor {row['anchor']} from {before} to {after}: {row['before']:.3f} to {row['after']:.3f},"
        f" {row['change']:+.3f}{error}"
    ).replace("-0.000", "0.000")
