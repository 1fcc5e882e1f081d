import hashlib

from hypothesis import given
from hypothesis import strategies as st

from acclimate import schedule
from acclimate.schedule import Capacity, Work
from acclimate_runners import placement
from acclimate_runners.placement import Room
from acclimate_runners.runner import Demand, Machine

WORKS = st.lists(
    st.builds(Work, st.text(max_size=8), st.floats(0, 1e12), st.integers(0, 2)),
    unique_by=lambda w: w.entrant,
    max_size=8,
)


@given(WORKS, st.text(max_size=20), st.randoms())
def test_the_order_is_longest_first_and_does_not_depend_on_how_it_was_asked(works, checkpoint, random) -> None:
    ordered = schedule.order(works, checkpoint=checkpoint)
    random.shuffle(works)
    assert schedule.order(works, checkpoint=checkpoint) == ordered
    ranks = [(w.priority, -w.cost) for w in ordered]
    assert ranks == sorted(ranks) and sorted(map(repr, works)) == sorted(map(repr, ordered))


def test_equals_come_in_the_order_that_the_checkpoint_draws() -> None:
    works = [Work(name, 5.0) for name in ("ada", "bob", "eve", "zoe")]
    drawn = {w.entrant: hashlib.sha256(b"origin\n7\nroot\n" + w.entrant.encode()).digest() for w in works}
    assert [w.entrant for w in schedule.order(works, checkpoint="origin\n7\nroot\n")] == sorted(drawn, key=drawn.get)
    orders = {tuple(w.entrant for w in schedule.order(works, checkpoint=str(n))) for n in range(200)}
    assert len(orders) == 24


@given(WORKS, st.integers(1, 5))
def test_the_makespan_is_within_grahams_bound(works, slots) -> None:
    ordered = schedule.order([Work(w.entrant, w.cost) for w in works], checkpoint="")
    total, longest = sum(w.cost for w in works), max((w.cost for w in works), default=0.0)
    span = schedule.makespan(ordered, slots=slots)
    assert max(total / slots, longest) * (1 - 1e-9) <= span <= (total / slots + longest * (1 - 1 / slots)) * (1 + 1e-9)


DEMANDS = st.builds(
    Demand,
    cpus=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    gpus=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    labels=st.sampled_from([{}, {"accelerator": "H100"}]),
)
MACHINES = st.lists(
    st.builds(
        Machine,
        st.just("m"),
        cpus=st.sampled_from([0.0, 2.0, 8.0]),
        gpus=st.sampled_from([0.0, 1.0, 4.0]),
        labels=st.sampled_from([{}, {"accelerator": "H100"}]),
    ),
    max_size=4,
)


@given(MACHINES, st.lists(DEMANDS, max_size=20), st.integers(0, 12))
def test_never_more_is_outstanding_than_slots_nor_than_a_fifth_beyond_what_fits(machines, demands, slots) -> None:
    capacity = Capacity(machines, slots=slots)
    taken = [demand for demand in demands if capacity.take(demand)]
    room = Room(machines)
    fitting = sum(room.take(demand) is not None for demand in taken)
    assert len(taken) <= slots and (not machines or len(taken) <= 1.2 * fitting)
    assert capacity.full == (len(taken) == slots)
    if not machines:
        # Of a pool that can't be told only the slots are known.
        assert taken == demands[:slots]


def test_what_is_too_big_now_holds_up_nothing_smaller() -> None:
    large, small = Demand(cpus=4.0), Demand(cpus=1.0)
    capacity = Capacity([Machine("a", 4.0)], slots=100, outstanding=[small])
    assert not capacity.take(large)
    assert [capacity.take(small) for _ in range(4)] == [True, True, True, False]
    # Of ten that fit two may wait for their place, so that no machine idles.
    capacity = Capacity([Machine("a", 10.0)], slots=100, outstanding=[small] * 10)
    assert [capacity.take(small) for _ in range(3)] == [True, True, False]


@given(DEMANDS, MACHINES)
def test_the_reason_of_what_can_never_be_taken_is_known_by_its_beginning(demand, machines) -> None:
    reason = placement.refusal_of(demand, machines)
    able = any(placement.fits(demand, machine) for machine in machines)
    assert reason.startswith(schedule.UNMET) if machines and not able else reason == ""
