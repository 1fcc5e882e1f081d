"""A dispatcher over a Ray cluster whose machines come late, and that loses the process that talks to Ray."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import dispatching
import live as staging
import pytest

from acclimate import hosting
from acclimate.dispatch import Dispatcher
from acclimate_runners.cluster import RayRunner
from acclimate_runners.gateway import Gateway


@pytest.mark.slow
@pytest.mark.usefixtures("with_token")
def test_work_waits_for_the_first_machine_and_outlives_the_process_that_talks_to_ray(
    ray_clusters: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "_LOOK_EVERY", 0.2)
    cluster, made = ray_clusters(), list[RayRunner]()

    def factory() -> RayRunner:
        made.append(RayRunner(tmp_path / "node", cluster.address, namespace=tmp_path.name))
        return made[-1]

    with staging.serve(tmp_path) as live:
        staged = staging.open_round(live, tmp_path)
        _, submission = dispatching.send(staged, "ada", seed=1)
        with (
            Dispatcher(live.store, live.store.blobs, live.settings, factory) as running,
            dispatching.holding(str(tmp_path / "node")) as held,
        ):
            # 1. A head alone: everybody hears what is missing, and nothing is started or made anew.
            dispatching.step_until(running, lambda: live.anyone().get(staged.path).json()["problem"])
            for _ in range(10):
                time.sleep(0.2)
                running.step()
            told = live.anyone().get("/v1/pool").json()
            assert (told["slots"], told["machines"], len(made)) == (0, [], 1) and "no machine has" in told["problem"]
            assert [(row.state, row.attempts) for row in dispatching.rows(live, "check")] == [("pending", 0)]
            # 2. A machine joins, and work goes on.
            cluster.add(num_cpus=2)
            dispatching.step_until(running, lambda: len(held) == 1)
            (child,) = held
            # 3. The process that talks to Ray dies; the child doesn't, and is found again.
            gateway = made[0]._ray
            assert isinstance(gateway, Gateway)
            os.kill(gateway._process.pid, signal.SIGKILL)
            dispatching.step_until(running, lambda: len(made) == 2 and dispatching.under_way(live, "check"))
            os.kill(child, signal.SIGCONT)
            dispatching.step_until(running, lambda: dispatching.state_of(live, submission)[0] == "accepted")
            assert held == {child} and [row.attempts for row in dispatching.rows(live, "check")] == [1]
