"""What a competition asks of the pool, and whether, where and how much of it at once the pool can run.

The same functions decide in the dispatcher: what is refused here would wait there for ever.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from acclimate.simulation import Schedule, simulate
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_runners import placement
from acclimate_runners.runner import Demand, Machine

_HINT = "change [compute] of the definition, or add a machine that has it to the pool"


@dataclass(frozen=True)
class Plan:
    """What a round of a competition would take.

    Attributes:
        demand: what one attempt takes of a machine.
        machines: the pool.
        fitting: names of the machines that can take one.
        at_once: attempts at the same time, on an idle pool.
        entries: how many entries the plan is for.
        preparations, evaluations: stages of all entries together; a stage is one task with one seed and protocol.
        attempts: one an entry for its preparations, one for its evaluations.
        seconds: upper bound of the time that all attempts take where none is made twice; None where nothing can run.
        gpu_hours: the same bound in GPU hours.
        expected: what is likely, as far as the entries' checks have told; None where nothing is known of any entry, or nothing can run.
        problems: what is wrong or worth knowing, in words.
    """

    demand: Demand
    machines: tuple[Machine, ...]
    fitting: tuple[str, ...]
    at_once: int
    entries: int
    preparations: int
    evaluations: int
    attempts: int
    seconds: float | None
    gpu_hours: float
    expected: "Expected | None"
    problems: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """The plan as JSON-ready data."""
        return {
            "demand": _document(self.demand),
            "machines": [{"name": m.name, **_document(m), "fits": m.name in self.fitting} for m in self.machines],
            "at_once": self.at_once,
            "entries": self.entries,
            "preparations": self.preparations,
            "evaluations": self.evaluations,
            "attempts": self.attempts,
            "seconds": self.seconds,
            "gpu_hours": self.gpu_hours,
            "expected": None if self.expected is None else self.expected.document(),
            "problems": list(self.problems),
        }


@dataclass(frozen=True)
class Expected:
    """What a round's work should take, by the dispatcher's own order and admission: all are prepared before the first is evaluated.

    Attributes:
        preparations, evaluations: when the attempts of each begin and end, the longest first, from the moment at which they may begin.
        gpu_hours, cpu_hours: of all attempts together.
    """

    preparations: Schedule
    evaluations: Schedule
    gpu_hours: float
    cpu_hours: float

    @property
    def seconds(self) -> float:
        """Of both together; what custodians and auditors take in between is not in it."""
        return self.preparations.makespan + self.evaluations.makespan

    def document(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {
            "seconds": self.seconds,
            "preparations": _schedule(self.preparations),
            "evaluations": _schedule(self.evaluations),
            "gpu_hours": self.gpu_hours,
            "cpu_hours": self.cpu_hours,
        }


def demand_of(competition: Competition) -> Demand:
    """What one attempt of a competition takes of a machine."""
    compute = competition.compute
    return Demand(cpus=compute.cpus, gpus=compute.gpus, memory=compute.memory, labels=dict(compute.labels))


def plan(
    competition: Competition,
    machines: Sequence[Machine],
    *,
    slots: int,
    entries: int,
    forecast: tuple[Sequence[float], Sequence[float]] = ((), ()),
) -> Plan:
    """What a round of this competition with so many entries would take of a pool.

    Args:
        competition: the definition.
        machines: the pool; empty where it can't be told now.
        slots: how many attempts the dispatcher starts at once.
        entries: how many entries are prepared and evaluated, baselines among them.
        forecast: seconds of the entries' preparations and of their evaluations, as far as they are known; of other entries the median
            is taken.

    Raises:
        Refusal: infeasible, where no machine of the pool can ever take an attempt.
    """
    demand = demand_of(competition)
    if why := placement.refusal_of(demand, machines):
        raise Refusal("infeasible", why, hint=_HINT)
    room = placement.at_once(demand, machines)
    at_once, attempts = min(room, max(1, slots)) if machines else 0, 2 * entries
    wall = competition.isolation.wall.total_seconds()
    # All are prepared before the first is evaluated.
    longest = 2 * _simulated(demand, machines, slots, [wall] * entries).makespan if at_once else None
    gpu_hours = attempts * wall * demand.gpus / 3600
    tasks, seeds = len(competition.tasks), len(competition.preparation.seeds)
    return Plan(
        demand=demand,
        machines=tuple(machines),
        fitting=tuple(machine.name for machine in placement.fitting(demand, machines)),
        at_once=at_once,
        entries=entries,
        preparations=entries * tasks * seeds,
        # The model as submitted, and what was made of it with each seed.
        evaluations=entries * tasks * (seeds + 1),
        attempts=attempts,
        seconds=longest,
        gpu_hours=gpu_hours,
        expected=_expected(demand, machines, slots, forecast, entries=entries) if at_once else None,
        problems=tuple(_problems(competition, demand, known=bool(machines), gpu_hours=gpu_hours)),
    )


def _expected(
    demand: Demand,
    machines: Sequence[Machine],
    slots: int,
    forecast: tuple[Sequence[float], Sequence[float]],
    *,
    entries: int,
) -> Expected | None:
    if not all(forecast):
        return None
    filled = [
        sorted([*known, *[statistics.median(known)] * (entries - len(known))], reverse=True) for known in forecast
    ]
    prepared, evaluated = (_simulated(demand, machines, slots, seconds[:entries]) for seconds in filled)
    hours = sum(sum(seconds[:entries]) for seconds in filled) / 3600
    return Expected(prepared, evaluated, gpu_hours=hours * demand.gpus, cpu_hours=hours * demand.cpus)


def _simulated(demand: Demand, machines: Sequence[Machine], slots: int, seconds: Sequence[float]) -> Schedule:
    return simulate([demand] * len(seconds), machines, slots=max(1, slots), seconds=seconds)


def _schedule(made: Schedule) -> list[dict[str, Any]]:
    rows = zip(made.starts, made.ends, made.machines, strict=True)
    return [{"start": start, "end": end, "machine": machine} for start, end, machine in rows]


def machine_of(document: Mapping[str, Any]) -> Machine:
    """A machine as `GET /v1/pool` shows it."""
    labels = {str(name): str(value) for name, value in dict(document["labels"]).items()}
    cpus, gpus, memory = float(document["cpus"]), float(document["gpus"]), int(document["memory"])
    return Machine(str(document["name"]), cpus, gpus, memory, labels)


def _document(thing: Demand | Machine) -> dict[str, Any]:
    return {"cpus": thing.cpus, "gpus": thing.gpus, "memory": thing.memory, "labels": dict(thing.labels)}


def _problems(competition: Competition, demand: Demand, *, known: bool, gpu_hours: float) -> list[str]:
    found, compute, limit = [], competition.compute, competition.isolation.memory
    if not known:
        found.append("no machine is known: nothing can start until a dispatcher leads and sees its machines")
    if competition.preparation.threads > demand.cpus:
        threads = competition.preparation.threads
        found.append(f"[preparation] threads = {threads}, but [compute] sets aside {demand.cpus:g} of a machine's CPUs")
    if 0 < demand.memory < limit:
        found.append(
            "[compute] memory is below [isolation] memory: an attempt may use more than is set aside for it, "
            f"{placement.size(limit)} instead of {placement.size(demand.memory)}"
        )
    if 0 < compute.max_gpu_hours < gpu_hours:
        found.append(f"up to {gpu_hours:g} GPU hours; [compute] max_gpu_hours is {compute.max_gpu_hours:g}")
    return found
