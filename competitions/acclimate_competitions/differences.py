"""How a round of a competition differs from another one: key by key of the definition, file by file of what is public.

What makes another question (tasks, metrics), another preparation, or another way to rank is named for what it is: such rounds can be
compared, but not without saying so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from acclimate_competitions.definition import Competition
from acclimate_competitions.fields import flat

_DATES = frozenset({"round.name", "round.opens", "round.closes", "round.closes_latest", "round.release_by"})
_LONGEST = 60


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it was.

    Attributes:
        part: recipe | tasks | ranking | rules | files | program: what it may change.
        key: the definition's key, the public file, or `code`.
        before, after: the values; None where there is none.
    """

    part: str
    key: str
    before: Any
    after: Any

    def document(self) -> dict[str, Any]:
        """The difference as JSON-ready data."""
        return {"part": self.part, "key": self.key, "before": self.before, "after": self.after}


def of_definitions(before: Competition, after: Competition) -> list[Difference]:
    """What two definitions say differently, names and dates of the rounds left out; the tasks by name."""
    old, new = _values(before), _values(after)
    return [
        Difference(_part(key), key, old.get(key), new.get(key))
        for key in [*old, *(key for key in new if key not in old)]
        if key not in _DATES and old.get(key) != new.get(key)
    ]


def of_rounds(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """What two RoundDefined say differently beside the definition: public files, and the program that prepares and scores."""
    old, new = before["files"], after["files"]
    found = [
        Difference("files", name, old.get(name), new.get(name))
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    if before["code"] != after["code"]:
        found.append(Difference("program", "code", before["code"], after["code"]))
    return found


def told(value: Any) -> str:
    """A value for people, cut where it is long."""
    text = "-" if value is None else str(value).replace("\n", " ")
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _values(competition: Competition) -> dict[str, Any]:
    values = {key: value for key, value in competition.effective().items() if not key.startswith("tasks[")}
    return values | flat({f"tasks.{task.name}": task.document() for task in competition.tasks})


def _part(key: str) -> str:
    first = key.partition(".")[0]
    return {"preparation": "recipe", "tasks": "tasks", "ranking": "ranking"}.get(first, "rules")
