"""What a competition asks of the pool, and whether, where and how much of it at once the pool can run.

The same functions decide in the dispatcher: what is refused here would wait there for ever.
"""

from acclimate_competitions.definition import Competition
from acclimate_runners.runner import Demand


def demand_of(competition: Competition) -> Demand:
    """What one attempt of a competition takes of a machine."""
    compute = competition.compute
    return Demand(cpus=compute.cpus, gpus=compute.gpus, memory=compute.memory, labels=dict(compute.labels))
