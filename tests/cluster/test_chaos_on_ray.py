"""A round on two Ray machines whose workers, children, dispatchers and machines are killed by a drawn plan: the same bytes as undisturbed."""

import itertools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import chaos
import pytest
from blows import planned, play_out
from chaos import Play

GPU = {"num_cpus": 2, "num_gpus": 1, "labels": {"pool": "gpu"}}
COMPUTE = 'gpus = 1\nlabels = { pool = "gpu" }\n'


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("with_token")
def test_a_round_on_ray_that_loses_workers_dispatchers_and_machines_comes_out_the_same(
    tmp_path: Path, ray_clusters: Callable
) -> None:
    seed, entrants = int(os.environ.get("CHAOS_SEED", "6020")), 7
    expected = chaos.undisturbed(tmp_path / "undisturbed", entrants=entrants)
    cluster, draw, numbers = ray_clusters(), random.Random(seed), itertools.count()
    there = [next(numbers), next(numbers)]
    for _ in there:
        cluster.add(**GPU)
    kinds = {"child": 2, "worker": 2, "leader": 2, "standby": 1, "machine": 1, "drain": 1}
    plan = planned(seed, events=40, kinds=kinds)
    environment = {
        "ACCLIMATE_RUNNER": "ray",
        "ACCLIMATE_RAY_ADDRESS": cluster.address,
        "ACCLIMATE_NODE_WORK": str(tmp_path / "disturbed" / "node"),
    }

    def worker() -> bool:
        found = cluster.workers()
        if found:
            os.kill(draw.choice(sorted(found)), signal.SIGKILL)
        return bool(found)

    def another() -> int:
        """A machine that is there, in whose place another comes."""
        gone = there.pop(draw.randrange(len(there)))
        cluster.add(**GPU)
        there.append(next(numbers))
        return gone

    def machine() -> None:
        cluster.remove(another())

    def drain() -> bool:
        return bool(cluster.drain(another()))

    with Play.begun(tmp_path / "disturbed", entrants=entrants, compute=COMPUTE, environment=environment) as play:
        disturbed = play_out(play, plan, seed=seed, worker=worker, machine=machine, drain=drain)
        words = f"plan of seed {seed}: {plan}; done: {disturbed.done}"
        assert play.wrong() == [], words
        assert play.outcome() == expected, words
        assert set(disturbed.done) == set(kinds), words
