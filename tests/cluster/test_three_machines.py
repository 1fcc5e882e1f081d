"""A whole round on three Ray machines with GPUs that are only said to be there: the same ranking as on one machine."""

import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from sites import again, busy, up

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow, pytest.mark.usefixtures("with_token")]


def test_three_machines_with_gpus_give_the_ranking_of_one_machine(tmp_path: Path, ray_clusters: Callable) -> None:
    (tmp_path / "one").mkdir()
    with up(tmp_path / "one", "--runner", "local") as made, made.players() as players:
        undisturbed = players.play()
    cluster = ray_clusters()
    for _ in range(3):
        cluster.add(num_cpus=2, num_gpus=1, labels={"pool": "gpu"})
    compute = 'gpus = 1\nlabels = { pool = "gpu" }\n'
    (tmp_path / "three").mkdir()
    with (
        up(tmp_path / "three", "--runner", "ray", ACCLIMATE_RAY_ADDRESS=cluster.address) as made,
        made.players(compute=compute) as players,
    ):
        players.send(window=timedelta(seconds=30))
        busy(players, "prepare")
        again(made, signal.SIGKILL)
        assert players.finish() == undisturbed
