"""Whoever reads MLflow's copy of a round reads one version: the tag that counts writings, and what is made of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from acclimate import tracked_state
from acclimate_competitions.errors import Refusal


@dataclass(frozen=True)
class Found:
    tags: dict[str, str]
    now: str

    def unchanged(self) -> bool:
        return self.tags.get(tracked_state.WRITTEN) == self.now


def found(states: Sequence[tuple[str, str]]) -> Iterator[list[Found]]:
    """Each look at a round: (the tag as it is found, as it is after reading)."""
    for tag, after in states:
        yield [Found({tracked_state.WRITTEN: tag, "acclimate.round_name": "2027-1"}, after)]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracked_state, "_PAUSE", 0.0)


@pytest.mark.parametrize(
    ("states", "read"),
    [
        ([("4", "4")], ["4"]),
        ([("4", "5 under way"), ("5 under way", "5"), ("5", "5")], ["4", "5"]),
        ([("4", "5"), ("5", "5")], ["4", "5"]),
    ],
)
def test_what_changed_meanwhile_is_read_again(states: list[tuple[str, str]], read: list[str]) -> None:
    looks, seen = found(states), []

    def note(rounds: Sequence[Found]) -> str:
        seen.append(rounds[0].tags[tracked_state.WRITTEN])
        return seen[-1]

    assert tracked_state.whole(lambda: next(looks), note) == read[-1]
    assert seen == read


def test_a_writing_that_does_not_end_is_refused() -> None:
    looks = found([("5 under way", "5 under way")] * 9)
    with pytest.raises(Refusal, match="2027-1") as caught:
        tracked_state.whole(lambda: next(looks), lambda rounds: pytest.fail("it was read"))
    assert caught.value.code == "busy"


def test_a_refusal_while_it_changes_is_tried_again_and_else_stands() -> None:
    def torn(rounds: Sequence[Found]) -> str:
        if rounds[0].tags[tracked_state.WRITTEN] == "4":
            raise Refusal("file_unreadable", "a run was deleted")
        return "whole"

    looks = found([("4", "5"), ("5", "5")])
    assert tracked_state.whole(lambda: next(looks), torn) == "whole"
    looks = found([("4", "4")])
    with pytest.raises(Refusal, match="a run was deleted"):
        tracked_state.whole(lambda: next(looks), torn)


def test_writings_are_counted() -> None:
    assert tracked_state.begun({}) == "1 under way"
    broken_off = {tracked_state.WRITTEN: "3 under way"}
    assert (tracked_state.begun(broken_off), tracked_state.done(broken_off)) == ("4 under way", "3")
    assert tracked_state.under_way(broken_off) and not tracked_state.under_way({tracked_state.WRITTEN: "3"})
    assert not tracked_state.under_way({})
