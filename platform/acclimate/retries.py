"""What becomes of an attempt that failed: tried again, its entrant's outcome, or left to an operator. Pure.

A fault of the platform never costs an entrant anything: it is tried again, without end where it says nothing of the attempt. What will
hardly end differently has few tries. The counts come from the tries that are written down, so a new leader counts on.

Where memory did not suffice the next try reads half as many sequences at once, down to one. Only a model that then needs more than the
competition allows has come to an outcome: one that a machine with too little memory stopped is an operator's business.

| class | codes | tries | then |
| --- | --- | --- | --- |
| passing | busy, blobs_unreachable | without end, uncharged | |
| full disks | no_space | 20, uncharged | blocked |
| preempted | preempted, cancelled, runner_lost, dispatcher_lost, let_go, not_found | without end, uncharged | |
| hang | hung | 2 | blocked |
| too long | limit_exceeded | 3 | the entrant's outcome |
| too large | out_of_memory | 3, once the micro-batch is 1 or nothing is learned | the entrant's outcome |
| memory of a machine | machine_memory | 10, once it is, elsewhere after 2 | blocked |
| ours | job_failed | 3 | blocked |
| lost input | blob_corrupt; blob_unknown | 1; 2 | blocked |
| infrastructure | all others | 10, elsewhere after 2 | blocked |

What is uncharged waits, too, from its second end in a row on, and longer each time: a store that can't be reached over a weekend must
not fill the database with tries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

PASSING = frozenset({"no_space", "busy", "blobs_unreachable"})
PREEMPTED = frozenset({"preempted", "cancelled", "runner_lost", "dispatcher_lost", "let_go", "not_found"})
UNCHARGED = PASSING | PREEMPTED
UNTOLD = frozenset({"cancelled", "dispatcher_lost", "let_go"})
"""Ends that say nothing of what the next try meets: nobody waited for it, whoever followed it ended, or let go of it before it began."""
LOST = frozenset({"blob_corrupt", "blob_unknown"})
"""An input that is no longer there: no machine will find it, until somebody puts it back."""
NEVER_GIVEN_UP = LOST | {"no_space", "code_pinned"}
"""What nothing that an entrant sends can cause: an organizer may not have it end as the entrant's outcome.

A child may hang, crash, be killed or take a machine's memory by its model as by the machine: which it was, a person must tell.
"""
TRIES = {"hung": 2, "limit_exceeded": 3, "out_of_memory": 3, "job_failed": 3, "blob_corrupt": 1, "blob_unknown": 2}
TRIES_OF_MACHINES = 10
TRIES_OF_DISKS = 20
"""After so many tries that found no room an operator is told: with pauses of up to five minutes, most of an hour."""
ELSEWHERE_AFTER = 2
SHORT = frozenset({"out_of_memory", "machine_memory"})
"""Ends after which the micro-batch is halved."""
_OUTCOMES = frozenset({"limit_exceeded", "out_of_memory"})
BACKOFF = 0.5
"""Seconds before the second try of what has few; four times as long before each further one."""
LONG_BACKOFF = (5.0, 300.0)
"""Seconds of the first bound and of the largest, within which the pause after a machine's failure is drawn."""


@dataclass(frozen=True)
class Ended:
    """A try of an attempt that failed.

    Attributes:
        code: why.
        machine: where; empty where nobody knows.
        seconds: from its claim to its end.
        past: whether an operator let the attempt go since: it tells of the micro-batch alone, and counts no more.
    """

    code: str
    machine: str = ""
    seconds: float = 0.0
    past: bool = False


@dataclass(frozen=True)
class Decision:
    """What becomes of an attempt.

    Attributes:
        action: again, outcome (the entrant's, with a public reason), or block (until an operator acts).
        wait: seconds before it is tried again.
        tries: how many of its class are made at most; 0 for no end.
        avoid: machines to stay away from where another can take it.
    """

    action: Literal["again", "outcome", "block"]
    wait: float = 0.0
    tries: int = 0
    avoid: frozenset[str] = frozenset()


def budget(code: str) -> int:
    """How many tries are made that end with this code; 0 for no end."""
    return 0 if code in UNCHARGED else TRIES.get(code, TRIES_OF_MACHINES)


def decide(ended: Sequence[Ended], *, draw: Callable[[float, float], float], halvings: int = 0) -> Decision:
    """What becomes of an attempt.

    Args:
        ended: its tries that failed, in their order; the last is the one to decide on.
        draw: a number drawn evenly between two.
        halvings: how often its micro-batch can be halved.
    """
    code, tries = ended[-1].code, budget(ended[-1].code)
    if not tries:
        return Decision("again")
    ended, halvings = _counted(ended, halvings)
    counted = [one.code for one in ended]
    if code in SHORT:
        # Those that led to a smaller micro-batch are past.
        counted = [each for each in counted if each in SHORT][halvings:]
    count = max(1, counted.count(code))
    if code == "out_of_memory" and not counted:
        # Another try than the one that failed: nothing to wait for.
        return Decision("again")
    if count >= tries:
        return Decision("outcome" if code in _OUTCOMES else "block", tries=tries)
    if code in TRIES:
        return Decision("again", wait=BACKOFF * 4 ** (count - 1), tries=tries)
    return Decision("again", wait=pause(count, draw=draw), tries=tries, avoid=avoided(ended))


def _counted(ended: Sequence[Ended], halvings: int) -> tuple[list[Ended], int]:
    """The tries since an operator last let the attempt go, and how often its micro-batch could be halved yet at the first of them."""
    gone = shortages([one for one in ended if one.past])
    return [one for one in ended if not one.past], max(0, halvings - gone)


def shortages(ended: Sequence[Ended]) -> int:
    """How many tries ran out of memory: so often is the micro-batch of the next one halved."""
    return sum(one.code in SHORT for one in ended)


def pause(count: int, *, draw: Callable[[float, float], float]) -> float:
    """Seconds to wait after the count-th failure of a machine: up to a bound that doubles, drawn, so that not all come at once."""
    first, last = LONG_BACKOFF
    return draw(0.0, min(last, first * 2.0 ** min(count - 1, 16)))


def rest(ended: Sequence[Ended], *, draw: Callable[[float, float], float]) -> float:
    """Seconds to wait after an end that doesn't count.

    None after the first one in a row; then as after failures of a machine, so a try that meets the same outage again and again is made every
    two and a half minutes in the mean. One that lasted longer than the longest wait came somewhere, so the row begins with it.

    Args:
        ended: the tries of an attempt that have ended, in their order, the newest at least; those that are UNTOLD are passed over.
        draw: a number drawn evenly between two.
    """
    count = 0
    for one in reversed([one for one in ended if one.code not in UNTOLD]):
        if one.code not in UNCHARGED:
            break
        count += 1
        if one.seconds > LONG_BACKOFF[1]:
            break
    return pause(count - 1, draw=draw) if count > 1 else 0.0


def standing(ended: Sequence[Ended], *, begun: bool, over: bool, halvings: int = 0) -> tuple[int, int]:
    """The k and n of "try k of n", by the class of the newest failure, as `decide` counts; k is at most n, and n is 0 where no end is set.

    Args:
        ended: the tries that failed, in their order, with those that found no room.
        begun: whether one more is under way, or came to something.
        over: whether none follows by itself.
        halvings: as `decide`'s; tries that led to a smaller micro-batch are among those of what then runs out of memory.
    """
    ended, halvings = _counted(ended, halvings)
    codes = [one.code for one in ended]
    code = codes[-1] if codes else ""
    limit = TRIES_OF_DISKS if code == "no_space" else budget(code)
    past = 0
    if code in SHORT:
        codes = [each for each in codes if each in SHORT]
        past, codes, limit = min(halvings, len(codes)), codes[halvings:], limit + halvings
    count = past + codes.count(code) + begun
    return count, count if over else max(count, limit) if limit else 0


def avoided(ended: Sequence[Ended]) -> frozenset[str]:
    """The machines on which an attempt failed as often as says that another should try."""
    ended = [one for one in ended if one.machine and not one.past]
    failed = [one.machine for one in ended if one.code not in UNCHARGED and one.code not in _OUTCOMES]
    return frozenset(machine for machine in failed if failed.count(machine) >= ELSEWHERE_AFTER)
