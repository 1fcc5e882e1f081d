import hashlib
import math
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate import schedule
from acclimate.schedule import PATIENCE, Capacity, HandedOut, Work
from acclimate.simulation import simulate
from acclimate_runners import placement
from acclimate_runners.placement import Outstanding, Room
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
    seconds = [work.cost for work in ordered]
    span = simulate([Demand()] * len(works), [Machine("m", float(slots))], slots=slots, seconds=seconds).makespan
    assert max(total / slots, longest) * (1 - 1e-9) <= span <= (total / slots + longest * (1 - 1 / slots)) * (1 + 1e-9)


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_a_simulated_makespan_is_near_what_no_schedule_can_go_below(error) -> None:
    """Also where each estimate is off by up to a half; `make bench` measures it for a thousand stages on 256 slots."""
    draw = random.Random(5)
    took = [600 * min(draw.lognormvariate(0.0, 0.5), 7.0) for _ in range(300)]
    works = [Work(str(i), seconds * (1 + draw.uniform(-error, error))) for i, seconds in enumerate(took)]
    seconds = [took[int(work.entrant)] for work in schedule.order(works, checkpoint="")]
    pool = [Machine(str(i), cpus=8.0, gpus=8.0) for i in range(4)]
    span = simulate([Demand(gpus=1.0)] * 300, pool, slots=32, seconds=seconds).makespan
    assert span <= 1.10 * max(sum(seconds) / 32, *seconds)


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
    capacity = Capacity([Machine("a", 4.0)], slots=100, outstanding=[Outstanding(small)])
    assert not capacity.take(large)
    assert [capacity.take(small) for _ in range(4)] == [True, True, True, False]
    # Of ten that fit two may wait for their place, so that no machine idles.
    capacity = Capacity([Machine("a", 10.0)], slots=100, outstanding=[Outstanding(small)] * 10)
    assert [capacity.take(small) for _ in range(3)] == [True, True, False]


@dataclass
class Waiting:
    attempt: str
    demand: Demand


def test_one_that_was_overtaken_often_enough_has_a_machine_set_aside_for_it() -> None:
    """Small ones come without end, one for each that ends: the large one is handed out all the same, and they go on elsewhere."""
    machines, small, large = [Machine("a", 2.0), Machine("b", 2.0)], Demand(cpus=1.0), Demand(cpus=2.0)
    outstanding, overtaken, passes = [Outstanding(small)] * 4, dict[str, int](), 0
    while Outstanding(large) not in outstanding:
        outstanding.pop(0)
        ready = [Waiting("large", large), *(Waiting(f"{passes}-{i}", small) for i in range(3))]
        given = schedule.admit(ready, machines, slots=100, outstanding=outstanding, overtaken=overtaken)
        outstanding += [Outstanding(one.demand) for one in given]
        passes += 1
        assert passes < schedule.PATIENCE + 10
    assert passes > schedule.PATIENCE and outstanding.count(Outstanding(small)) == 2 and not overtaken.get("large")


def test_what_waits_on_the_cluster_is_not_passed_without_end() -> None:
    passed, machines = dict[str, set[str]](), frozenset("ab")
    waits, small = HandedOut("large", machines), [HandedOut(f"small-{n}", machines, "a") for n in range(PATIENCE)]
    assert not schedule.held_for([waits], passed)
    for one in small:
        assert not schedule.held_for([HandedOut("before", machines, "b"), waits], passed)
        held = schedule.held_for([waits, one], passed)
    assert held == machines
    # Once it has begun, all goes on.
    assert not schedule.held_for([replace(waits, machine="b"), small[0]], passed) and not passed


def test_what_waits_for_other_machines_than_those_that_others_begin_on_holds_up_nothing() -> None:
    """It keeps off one, or needs a label; its own stay for those who can get none of them to begin elsewhere."""
    passed, waits = dict[str, set[str]](), HandedOut("waits", frozenset("b"))
    elsewhere = [HandedOut(f"elsewhere-{n}", frozenset("ab"), "a") for n in range(3 * PATIENCE)]
    assert not schedule.held_for([waits, *elsewhere], passed)
    passing = [HandedOut(f"passing-{n}", frozenset("ab"), "b") for n in range(PATIENCE)]
    assert schedule.held_for([waits, *elsewhere, *passing], passed) == {"b"}


NAMES = ("a", "b", "c")
AVOIDING = st.builds(
    Demand, cpus=st.sampled_from([1.0, 2.0]), avoid=st.frozensets(st.sampled_from([*NAMES, "gone"]), max_size=2)
)


@settings(max_examples=500)
@given(
    st.lists(st.builds(Machine, st.sampled_from(NAMES), cpus=st.sampled_from([1.0, 2.0])), unique_by=lambda m: m.name),
    st.lists(st.tuples(AVOIDING, st.sampled_from(["", *NAMES, "gone"])), max_size=8),
    st.lists(AVOIDING, max_size=8),
)  # fmt: skip
def test_an_idle_machine_that_fits_and_ready_work_means_that_work_starts(machines, running, ready) -> None:
    """Whatever runs where, and whatever each keeps off: nothing that is booked where it doesn't go keeps another from starting."""
    outstanding, free = list[Outstanding](), {machine.name: machine.cpus for machine in machines}
    for demand, name in running:
        # What really runs has room where it is; what runs on a machine that has gone meanwhile is still said to run there, and some only wait.
        if free.get(name, math.inf) >= demand.cpus:
            outstanding.append(Outstanding(demand, name))
            free |= {name: free[name] - demand.cpus} if name in free else {}
    waiting = [Waiting(str(n), demand) for n, demand in enumerate(ready)]
    given = list(schedule.admit(waiting, machines, slots=100, outstanding=outstanding, overtaken={}))
    able = {one.attempt: placement.able(one.demand, machines) for one in waiting}
    assert all(bool(able[one.attempt]) == bool(placement.fitting(one.demand, machines)) for one in waiting)
    coming = [placement.able(one.demand, machines) for one in outstanding if not one.machine]
    for idle in {machine.name for machine in machines} - {one.machine for one in outstanding}.union(*coming):
        # Never is there work for it, and nothing begins that may get it.
        assert any(idle in able[one.attempt] for one in given) or not any(idle in names for names in able.values())


def test_a_machine_that_is_avoided_is_booked_only_where_no_other_can_ever_take_it() -> None:
    a, b = Machine("a", 1.0), Machine("b", 1.0)
    off_a = Demand(avoid=frozenset("a"))
    # b has what avoids a; a is still there for all others, and not for its like.
    capacity = Capacity([a, b], slots=10, outstanding=[Outstanding(off_a)])
    assert not capacity.take(off_a) and capacity.take(Demand())
    assert Room([a, b]).set_aside(off_a) == "b" and Room([a]).set_aside(off_a) == "a"
    # Where b is gone, or too small, a may take it.
    assert Room([a]).take(off_a) == "a"
    assert Room([Machine("a", 2.0), b]).take(replace(off_a, cpus=2.0)) == "a"


def test_what_runs_is_booked_where_it_is() -> None:
    a, b = Machine("a", 1.0), Machine("b", 1.0)
    off_b = Demand(avoid=frozenset("b"))
    assert Capacity([a, b], slots=10, outstanding=[Outstanding(Demand(), "b")]).take(off_b)
    assert not Capacity([a, b], slots=10, outstanding=[Outstanding(Demand(), "a")]).take(off_b)
    # What ends on a machine that takes nothing more keeps none of the others.
    assert Capacity([a], slots=10, outstanding=[Outstanding(Demand(), "drained")] * 3).take(Demand())
    assert not Capacity([a], slots=3, outstanding=[Outstanding(Demand(), "drained")] * 3).take(Demand())


@given(MACHINES.filter(bool), st.lists(st.tuples(DEMANDS, st.floats(0.5, 100)), max_size=30), st.integers(1, 12))
def test_a_simulation_is_never_over_what_the_machines_have_and_ends(machines, wanted, slots) -> None:
    machines = [replace(machine, name=str(i)) for i, machine in enumerate(machines)]
    wanted = [(demand, seconds) for demand, seconds in wanted if placement.fitting(demand, machines)]
    demands, seconds = [demand for demand, _ in wanted], [took for _, took in wanted]
    made = simulate(demands, machines, slots=slots, seconds=seconds)
    assert [end - start for start, end in zip(made.starts, made.ends, strict=True)] == pytest.approx(seconds)
    for moment in made.starts:
        at = [i for i in range(len(wanted)) if made.starts[i] <= moment < made.ends[i]]
        assert len(at) <= slots
        for machine in machines:
            mine = [demands[i] for i in at if made.machines[i] == machine.name]
            assert sum(demand.cpus for demand in mine) <= machine.cpus
            assert sum(demand.gpus for demand in mine) <= machine.gpus


@given(DEMANDS, MACHINES)
def test_the_reason_of_what_can_never_be_taken_is_known_by_its_beginning(demand, machines) -> None:
    reason = placement.refusal_of(demand, machines)
    able = any(placement.fits(demand, machine) for machine in machines)
    assert reason.startswith(schedule.UNMET) if machines and not able else reason == ""
