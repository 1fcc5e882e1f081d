"""What becomes of an attempt that failed, and what its history must look like."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate import retries
from acclimate.event_history import Event, problems
from acclimate.retries import Ended, decide


def most(low: float, high: float) -> float:
    return high


@pytest.mark.parametrize("code", sorted(retries.UNCHARGED))
def test_what_says_nothing_of_the_attempt_is_tried_again_without_end(code: str) -> None:
    assert decide([Ended(code)] * 1000, draw=most) == retries.Decision("again")


@pytest.mark.parametrize(
    ("code", "tries", "end"),
    [
        ("hung", 2, "block"),
        ("limit_exceeded", 3, "outcome"),
        ("out_of_memory", 3, "outcome"),
        ("job_failed", 3, "block"),
        ("runner_failed", 10, "block"),
        ("machine_memory", 10, "block"),
        ("blob_corrupt", 1, "block"),
        ("blob_unknown", 2, "block"),
        ("upload_mismatch", 10, "block"),
    ],
)
def test_each_class_has_its_budget(code: str, tries: int, end: str) -> None:
    actions = [decide([Ended(code)] * count, draw=most).action for count in range(1, tries + 1)]
    assert actions == ["again"] * (tries - 1) + [end]


def test_the_micro_batch_is_halved_to_one_before_a_model_is_too_large() -> None:
    short = Ended("out_of_memory")
    halved = [decide([short] * count, draw=most, halvings=5) for count in range(1, 6)]
    assert halved == [retries.Decision("again")] * 5
    last = [decide([short] * count, draw=most, halvings=5).action for count in (6, 7, 8)]
    assert last == ["again", "again", "outcome"]
    # Other failures in between are no step of it.
    mixed = [short, Ended("runner_failed"), short, Ended("job_failed"), short]
    assert retries.shortages(mixed) == 3 and decide(mixed, draw=most, halvings=2).action == "again"


def test_a_machine_with_too_little_memory_halves_it_too_but_costs_no_entrant() -> None:
    short = Ended("machine_memory", "a")
    assert retries.shortages([short, Ended("out_of_memory")]) == 2
    decisions = [decide([short] * count, draw=most, halvings=2) for count in range(1, 13)]
    assert [each.action for each in decisions] == ["again"] * 11 + ["block"]
    assert decisions[0].wait > 0 and decisions[0].avoid == frozenset() and decisions[1].avoid == {"a"}
    # What it failed at brings a model no nearer to its end.
    before = [short] * 6 + [Ended("out_of_memory")] * 2
    assert decide(before, draw=most, halvings=2).action == "again"


@pytest.mark.parametrize(("code", "tries", "end"), [("machine_memory", 10, "block"), ("out_of_memory", 3, "outcome")])
@pytest.mark.parametrize("halvings", [0, 5, 12])
def test_what_an_operator_let_go_has_all_its_tries_again(code: str, tries: int, end: str, halvings: int) -> None:
    past = [Ended("machine_memory", "a", past=True)] * 10
    left = max(0, halvings - 10)
    for count in range(1, tries + left + 1):
        failed = [*past, *[Ended(code, "b")] * count]
        found = decide(failed, draw=most, halvings=halvings)
        assert found.action == ("again" if count < tries + left else end), count
        # The micro-batch stays as small as it had become, and a machine that was mended is one like others.
        assert retries.shortages(failed) == 10 + count and "a" not in found.avoid | retries.avoided(failed)
        standing = retries.standing(failed, begun=False, over=found.action != "again", halvings=halvings)
        assert standing == (count, tries + left)
    assert retries.standing(past, begun=True, over=False, halvings=halvings) == (1, retries.TRIES_OF_MACHINES)


def test_one_class_brings_another_no_nearer_to_its_end() -> None:
    before = [Ended("runner_failed")] * 9 + [Ended("job_failed")] * 2
    assert decide([*before, Ended("limit_exceeded")], draw=most).action == "again"
    assert decide([*before, Ended("job_failed")], draw=most).action == "block"


@given(st.integers(1, 9), st.integers())
def test_a_machines_failure_waits_within_a_bound_that_doubles(count: int, seed: int) -> None:
    wait = decide([Ended("runner_failed")] * count, draw=random.Random(seed).uniform).wait
    assert 0 <= wait <= min(300, 5 * 2 ** (count - 1))


def test_after_two_failures_on_a_machine_another_is_asked_for() -> None:
    here, there = Ended("runner_failed", "a"), Ended("runner_failed", "b")
    assert decide([here], draw=most).avoid == frozenset()
    assert decide([here, there], draw=most).avoid == frozenset()
    assert decide([here, there, here], draw=most).avoid == {"a"}
    # A model that needs too much is no machine's fault.
    assert decide([Ended("limit_exceeded", "a")] * 2 + [here], draw=most).avoid == frozenset()


def test_what_is_uncharged_waits_from_the_second_end_in_a_row_on_and_longer_each_time() -> None:
    out = Ended("blobs_unreachable")
    waits = [retries.rest([out] * count, draw=most) for count in range(1, 10)]
    assert waits == [0, 5, 10, 20, 40, 80, 160, 300, 300]
    # What came to something else in between, or worked for longer than any wait, begins the row anew.
    assert retries.rest([out] * 5 + [Ended("runner_failed"), out], draw=most) == 0
    assert retries.rest([out] * 5 + [Ended("preempted", seconds=3600)], draw=most) == 0
    assert retries.rest([out] * 5 + [Ended("preempted", seconds=3600), out], draw=most) == 5
    # Leaders that come and go or let go of it, and what was cancelled, neither count nor make anything forgotten.
    assert retries.rest([out, Ended("dispatcher_lost"), Ended("cancelled"), Ended("let_go"), out], draw=most) == 5
    assert retries.rest([Ended("dispatcher_lost")] * 9 + [Ended("not_found")], draw=most) == 0


@given(st.integers())
def test_three_days_without_a_store_make_a_bounded_number_of_tries(seed: int) -> None:
    now, ended, draw = 0.0, list[Ended](), random.Random(seed).uniform
    while now < 3 * 24 * 3600:
        ended.append(Ended("blobs_unreachable", seconds=1.0))
        now += 1.0 + retries.rest(ended[-20:], draw=draw)
    assert len(ended) < 2500


@given(st.lists(st.sampled_from([*retries.TRIES, "runner_failed", "upload_mismatch"]), max_size=60), st.integers(0, 4))
def test_a_try_is_never_beyond_the_last_one(codes: list[str], halvings: int) -> None:
    """As `decide` counts, whichever failures are mixed."""
    failed = list[Ended]()
    for code in codes:
        count, limit = retries.standing(failed, begun=True, over=False, halvings=halvings)
        last = retries.budget(failed[-1].code) if failed else retries.TRIES_OF_MACHINES
        if failed and failed[-1].code in retries.SHORT:
            last += halvings
        assert 1 <= count <= limit == last
        failed.append(Ended(code))
        if decide(failed, draw=most, halvings=halvings).action != "again":
            over, whole = retries.standing(failed, begun=False, over=True, halvings=halvings)
            assert over == whole == retries.budget(code) + (halvings if code in retries.SHORT else 0)
            # An operator lets it go: it is counted anew.
            failed.clear()


A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
GOOD = [
    Event(A, 1, 1, "claimed"),
    Event(A, 1, 1, "running"),
    Event(B, 1, 1, "claimed"),
    Event(A, 1, 1, "again"),
    Event(A, 2, 1, "claimed"),
    Event(A, 2, 2, "given_back"),
    Event(A, 2, 2, "adopted"),
    Event(B, 1, 2, "given_back"),
    Event(A, 2, 2, "committed"),
    Event(B, 2, 3, "claimed"),
    Event(B, 2, 3, "blocked"),
    Event(B, 2, 3, "released"),
    Event(B, 3, 3, "claimed"),
    Event(B, 3, 3, "committed"),
]


def test_a_history_in_order_has_no_problems() -> None:
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([*GOOD, Event(A, 2, 3, "committed")], "it follows committed"),
        ([*GOOD, Event(A, 3, 3, "claimed")], "it follows committed"),
        ([*GOOD[:5], Event(A, 1, 1, "committed")], "the newest fence is 2"),
        ([*GOOD[:4], Event(A, 1, 1, "claimed")], "the fence 1 was used before"),
        ([*GOOD[:6], Event(A, 2, 1, "adopted")], "written in epoch 1, after one of epoch 2"),
        ([Event(A, 0, 1, "committed")], "it follows nothing"),
        ([Event(A, 1, 1, "claimed"), Event(A, 2, 1, "claimed")], "it follows claimed"),
        ([Event(A, 1, 1, "mended")], "there is no such event"),
    ],
)
def test_each_kind_of_disorder_is_named(bad: list[Event], says: str) -> None:
    (found,) = problems(bad)
    assert says in found


def test_a_release_and_what_was_lost_before_are_no_disorder() -> None:
    lost = [Event(A, 1, 1, "claimed"), Event(A, 1, 2, "given_back"), Event(A, 1, 2, "blocked")]
    assert problems([*lost, Event(A, 1, 3, "released"), Event(A, 1, 3, "adopted"), Event(A, 1, 3, "committed")]) == []
    # What a version without events had blocked.
    assert problems([Event(B, 0, 4, "released"), Event(B, 1, 4, "claimed")]) == []
