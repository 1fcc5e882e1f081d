"""The history of attempts, and what must be true of it, checked in one pass.

Each change of an attempt adds a row in the change's own transaction (stages.py), so the rows, in their order, are all that happened.
What is checked says that nothing was done twice, and that nobody wrote who had lost the right to.
"""

from collections.abc import Iterable
from dataclasses import dataclass

EVENTS = ("claimed", "adopted", "running", "given_back", "again", "blocked", "released", "cancelled", "committed")
"""claimed: a try was begun, under a new fence; adopted: one that went on elsewhere was taken up under its own; running: its child runs;
given_back: it ended, or was lost, through no fault that counts; again: it failed and will be tried again; blocked: until an operator acts;
released: an operator did; cancelled: nobody waits for it any more; committed: what it came to is on the record."""
_UNDER_WAY = frozenset({"claimed", "adopted", "running"})
_BEFORE: dict[str, frozenset[str]] = {
    "claimed": frozenset({"", "given_back", "again", "released", "cancelled"}),
    "adopted": frozenset({"given_back", "released"}),
    "running": frozenset({"claimed", "adopted"}),
    "given_back": _UNDER_WAY,
    "again": _UNDER_WAY,
    "blocked": _UNDER_WAY | {"", "given_back", "again", "released"},
    # A release of before there were events blocked it where there is nothing before.
    "released": frozenset({"blocked", ""}),
    "cancelled": _UNDER_WAY | {"", "given_back", "again", "blocked", "released"},
    "committed": _UNDER_WAY,
}
"""Event -> what the event before it of the same attempt may be; "" where there was none."""


@dataclass(frozen=True)
class Event:
    """One row: what happened to a try of an attempt, and in which epoch of the dispatcher's lease."""

    attempt: str
    fence: int
    epoch: int
    event: str


def problems(events: Iterable[Event]) -> list[str]:
    """What is not as it must be, a sentence each; empty where all is well.

    1. The epochs of all that was written never fall: nobody wrote who had lost the lease.
    2. A claim's fence is one more than any before it of its attempt; everything else is of the newest fence.
    3. Each event may follow the one before it; after a commit there is none, so nothing is committed twice.

    Args:
        events: in the order of their ids; time O(n).
    """
    found: list[str] = []
    last: dict[str, Event] = {}
    epoch = 0
    for number, event in enumerate(events):
        where = f"event {number}, {event.event} of attempt {event.attempt[:23]} under fence {event.fence}"
        # 1
        if event.epoch < epoch:
            found.append(f"{where}: written in epoch {event.epoch}, after one of epoch {epoch}")
        epoch = max(epoch, event.epoch)
        before = last.get(event.attempt)
        fence = 0 if before is None else before.fence
        # 2
        if event.event == "claimed" and event.fence <= fence:
            found.append(f"{where}: the fence {fence} was used before")
        if event.event != "claimed" and event.fence != fence and before is not None:
            found.append(f"{where}: the newest fence is {fence}")
        # 3
        if event.event not in _BEFORE:
            found.append(f"{where}: there is no such event")
        elif ("" if before is None else before.event) not in _BEFORE[event.event]:
            found.append(f"{where}: it follows {'nothing' if before is None else before.event}")
        last[event.attempt] = event
    return found
