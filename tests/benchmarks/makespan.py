"""Makespan of the dispatcher's own order and admission in simulation, over what no schedule can go below: max(total / slots, longest).

Durations are drawn log-normally, as those of models of many sizes are, with the longest well below a slot's share of the total, since else the
longest alone is the makespan. With an error each estimate by which the order goes is off by up to that much, either way.
"""

import random
import sys

from acclimate import schedule
from acclimate.schedule import Work
from acclimate.simulation import simulate
from acclimate_runners.runner import Demand, Machine

CASES = ((300, 4), (1000, 32))
"""Stages, and machines of eight slots each."""
ERRORS = (0.0, 0.5)
SEEDS = 3


def measure() -> list[tuple[str, float]]:
    """The worst ratio over some draws of each case."""
    rows = []
    for stages, machines in CASES:
        for error in ERRORS:
            worst = max(ratio(stages, machines, error=error, seed=seed) for seed in range(SEEDS))
            known = f"estimates off by up to {error:.0%}" if error else "durations known"
            rows.append((f"{stages} stages, {8 * machines} slots, {known}", worst))
    return rows


def ratio(stages: int, machines: int, *, error: float, seed: int) -> float:
    """Makespan over its lower bound."""
    draw, slots = random.Random(seed), 8 * machines
    took = [min(draw.lognormvariate(0.0, 0.5), 0.8 * stages / slots) * 600 for _ in range(stages)]
    works = [Work(str(i), seconds * (1 + draw.uniform(-error, error))) for i, seconds in enumerate(took)]
    seconds = [took[int(work.entrant)] for work in schedule.order(works, checkpoint="bench")]
    pool = [Machine(f"node-{i}", cpus=8.0, gpus=8.0) for i in range(machines)]
    made = simulate([Demand(cpus=1.0, gpus=1.0)] * stages, pool, slots=slots, seconds=seconds)
    return made.makespan / max(sum(seconds) / slots, *seconds)


if __name__ == "__main__":
    for name, value in measure():
        sys.stdout.write(f"{name}: {value:.3f}\n")
