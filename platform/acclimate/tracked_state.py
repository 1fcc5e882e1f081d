"""Whether MLflow's copy of a round is whole: a tag of its experiment counts the writings, and says while one is under way. Needs no MLflow.

MLflow has no transaction over runs. So whoever writes a round says so first, and whoever reads it looks before and after: the same count, and
nothing under way, means that all that was read is of one version.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from acclimate_competitions.errors import Refusal

WRITTEN = "acclimate.written"
"""The tag: a number, and while that writing is not done UNDER_WAY after it; rounds written before there was such a tag have none."""
UNDER_WAY = " under way"
_TRIES, _PAUSE = 3, 1.0
_Read = TypeVar("_Read")


class Round(Protocol):
    """A round in MLflow, as it was found."""

    tags: Mapping[str, str]

    def unchanged(self) -> bool:
        """Whether it was not written since it was found."""
        ...


_Round = TypeVar("_Round", bound=Round)


def under_way(tags: Mapping[str, str]) -> bool:
    """Whether a writing is under way, or was broken off."""
    return tags.get(WRITTEN, "").endswith(UNDER_WAY)


def begun(tags: Mapping[str, str]) -> str:
    """The tag's value while the next writing is under way."""
    return f"{_number(tags) + 1}{UNDER_WAY}"


def done(tags: Mapping[str, str]) -> str:
    """The tag's value once the writing that the tags tell of is done."""
    return str(_number(tags))


def whole(find: Callable[[], Sequence[_Round]], read: Callable[[Sequence[_Round]], _Read]) -> _Read:
    """What `read` makes of rounds that nobody writes meanwhile; tried again where somebody does.

    Raises:
        Refusal: busy, where a writing does not end; what find and read raise.
    """
    for turn in range(_TRIES):
        if turn:
            time.sleep(_PAUSE)
        rounds = find()
        if any(under_way(one.tags) for one in rounds):
            continue
        try:
            result = read(rounds)
        except Refusal:
            if all(one.unchanged() for one in rounds):
                raise
            continue
        if all(one.unchanged() for one in rounds):
            return result
    raise refused([one.tags for one in rounds])


def refused(rounds: Sequence[Mapping[str, str]]) -> Refusal:
    """The refusal of what may be of two versions."""
    names = ", ".join(sorted(tags.get("acclimate.round_name", "?") for tags in rounds))
    return Refusal(
        "busy",
        f"MLflow's copy of a round is being written anew just now, and what is read might be of two versions: {names}",
        hint="read again shortly; where that does not end, a writing was broken off: acclimate mlflow sync completes it",
    )


def _number(tags: Mapping[str, str]) -> int:
    text = tags.get(WRITTEN, "").removesuffix(UNDER_WAY)
    return int(text) if text.isdecimal() else 0
