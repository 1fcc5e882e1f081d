import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate import plan as plans
from acclimate_competitions import definition
from acclimate_competitions.errors import Refusal
from acclimate_runners import placement
from acclimate_runners.placement import Room
from acclimate_runners.runner import Demand, Machine

GIB = 1 << 30
SMALL = Machine("small", cpus=2, memory=4 * GIB)
GPUS = Machine("gpus", cpus=8, gpus=2, memory=64 * GIB, labels={"accelerator": "A100"})
BIG = Machine("big", cpus=32, gpus=8, memory=512 * GIB, labels={"accelerator": "H100", "zone": "b"})
POOL = (SMALL, GPUS, BIG)


@pytest.mark.parametrize(
    ("demand", "names"),
    [
        (Demand(), {"small", "gpus", "big"}),
        (Demand(cpus=2.01), {"gpus", "big"}),
        (Demand(gpus=0.5), {"gpus", "big"}),
        (Demand(gpus=3), {"big"}),
        (Demand(memory=5 * GIB), {"gpus", "big"}),
        (Demand(labels={"accelerator": "A100"}), {"gpus"}),
        (Demand(labels={"accelerator": "H100", "zone": "a"}), set()),
        (Demand(gpus=9), set()),
    ],
)
def test_a_machine_fits_what_it_could_take_if_it_were_idle(demand: Demand, names: set[str]) -> None:
    assert {machine.name for machine in placement.fitting(demand, POOL)} == names
    assert bool(placement.refusal_of(demand, POOL)) == (not names)


def test_a_machine_that_does_not_say_its_memory_is_not_asked_for_it() -> None:
    assert placement.fits(Demand(memory=GIB), Machine("localhost", 2))


def test_how_many_at_once() -> None:
    assert placement.at_once(Demand(), POOL) == 42
    assert placement.at_once(Demand(gpus=1), POOL) == 10
    # Whole GPUs and CPUs bound each other.
    assert placement.at_once(Demand(cpus=8, gpus=1), POOL) == 1 + 4
    assert placement.at_once(Demand(cpus=0.1), (SMALL,)) == 20
    # Shares of a GPU lie on one GPU each.
    assert placement.at_once(Demand(cpus=0.1, gpus=0.6), (GPUS,)) == 2
    assert placement.at_once(Demand(cpus=0.1, gpus=0.33), (GPUS,)) == 6
    assert placement.at_once(Demand(memory=3 * GIB), (SMALL,)) == 1
    assert placement.at_once(Demand(), ()) == 0


def test_room_counts_what_runs_and_keeps_whole_gpus_whole() -> None:
    room = Room((GPUS,), [Demand(gpus=0.5), Demand(gpus=0.5)])
    # Both shares lie on one GPU, so that a whole one is left.
    assert room.take(Demand(gpus=1)) == "gpus" and room.take(Demand(gpus=0.01)) is None
    assert room.take(Demand()) == "gpus"
    # What needs no GPU goes where none is.
    assert Room(POOL).take(Demand()) == "small"
    # Work that only one machine can take finds its place beside work that any can.
    assert Room(POOL, [Demand(cpus=30), Demand(cpus=1), Demand(cpus=8, labels={"accelerator": "A100"})]).take(
        Demand(cpus=2)
    )


def test_what_is_said_of_what_can_never_run() -> None:
    said = placement.refusal_of(Demand(gpus=2, labels={"accelerator": "H100"}), (SMALL, GPUS))
    assert said == (
        "no machine has 1 CPU and 2 GPUs with accelerator=H100; "
        "the pool has small (2 CPUs, 4 GiB), gpus (8 CPUs, 2 GPUs, 64 GiB, accelerator=A100)"
    )
    assert placement.refusal_of(Demand(gpus=2), ()) == ""
    assert "and 4 more" in placement.refusal_of(Demand(gpus=2), [SMALL] * 9)


numbers = st.integers(1, 400).map(lambda n: n / 100)
shares = st.one_of(st.integers(0, 99).map(lambda n: n / 100), st.integers(1, 4).map(float))
demands = st.builds(Demand, cpus=numbers, gpus=shares, memory=st.integers(0, 8 * GIB))
machines = st.builds(
    Machine, name=st.just("m"), cpus=st.integers(0, 8).map(float), gpus=st.integers(0, 4).map(float),
    memory=st.integers(1, 16 * GIB),
)  # fmt: skip


@given(demands, st.lists(machines, max_size=4))
def test_something_runs_at_once_exactly_where_something_fits(demand: Demand, pool: list[Machine]) -> None:
    count = placement.at_once(demand, pool)
    assert (count > 0) == bool(placement.fitting(demand, pool))
    # No more than the pool has, taken together.
    assert count * demand.cpus <= sum(machine.cpus for machine in pool) + 1e-6
    assert count * demand.gpus <= sum(machine.gpus for machine in pool) + 1e-6


def competition(compute: str) -> definition.Competition:
    text = (definition.shipped("digits") / "competition.toml").read_text("utf-8")
    return definition.parse(text.replace("[compute]\n", f"[compute]\n{compute}\n").encode())


def test_a_plan_counts_what_a_round_takes() -> None:
    asked = competition("gpus = 1\ncpus = 4")
    made = plans.plan(asked, POOL, slots=100, entries=11)
    assert made.demand == plans.demand_of(asked) == Demand(cpus=4, gpus=1)
    assert made.fitting == ("gpus", "big") and made.at_once == 2 + 8
    assert (made.preparations, made.evaluations, made.attempts) == (11 * 4 * 3, 11 * 4 * 4, 22)
    # Eleven on ten places: twice the limit of an attempt to prepare all, and as long to evaluate.
    assert made.seconds == 4 * asked.isolation.wall.total_seconds() and made.gpu_hours == 11
    assert plans.plan(asked, POOL, slots=1, entries=3).at_once == 1
    assert [machine["fits"] for machine in made.document()["machines"]] == [False, True, True]
    assert [plans.machine_of(machine) for machine in made.document()["machines"]] == list(POOL)


def test_a_plan_that_can_never_run_is_refused_and_one_that_can_not_now_is_told() -> None:
    with pytest.raises(Refusal, match="no machine has 1 CPU and 16 GPUs; the pool has small") as caught:
        plans.plan(competition("gpus = 16"), POOL, slots=8, entries=1)
    assert caught.value.code == "infeasible" and "[compute]" in caught.value.hint
    made = plans.plan(competition("gpus = 16"), (), slots=8, entries=1)
    assert made.seconds is None and made.at_once == 0 and "no machine is known" in made.problems[0]


def test_a_plan_tells_what_does_not_go_together() -> None:
    asked = competition('gpus = 1\ncpus = 0.5\nmemory = "1GiB"').raw.replace(
        b"max_gpu_hours = 0", b"max_gpu_hours = 0.5"
    )
    told = plans.plan(definition.parse(asked), POOL, slots=8, entries=4).problems
    assert [part.partition(":")[0] for part in told] == [
        "[preparation] threads = 1, but [compute] sets aside 0.5 of a machine's CPUs",
        "[compute] memory is below [isolation] memory",
        "up to 4 GPU hours; [compute] max_gpu_hours is 0.5",
    ]
