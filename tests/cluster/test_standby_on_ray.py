"""Two dispatchers over one Ray cluster: what runs there outlives the one that started it."""

import contextlib
import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import live as staging
import pytest
from dispatching import Process, children, holding, rows, send, state_of, wait
from waiting import WITHIN


@pytest.mark.slow
@pytest.mark.usefixtures("with_token")
def test_attempts_go_on_while_their_dispatcher_is_stopped_or_killed_and_are_adopted(
    ray_clusters: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ray_clusters()
    cluster.add(num_cpus=2)
    # The processes go by the real clock.
    monkeypatch.setattr(staging, "START", datetime.now(UTC) - timedelta(hours=2))
    with staging.serve(tmp_path) as live, contextlib.ExitStack() as stack:
        staged = staging.open_round(live, tmp_path)
        environment = {
            "ACCLIMATE_RUNNER": "ray",
            "ACCLIMATE_RAY_ADDRESS": cluster.address,
            "ACCLIMATE_NODE_WORK": str(tmp_path / "node"),
        }

        def start(name: str) -> Process:
            # With the lease that it has by itself: a busy machine must not depose one that lives.
            made = Process(live, tmp_path / name, **environment)
            stack.callback(made.end)
            return made

        one = start("one")
        one.await_("leading")
        two = start("two")
        two.await_("standby")
        with holding(str(tmp_path / "node")) as held:
            _, submission = send(staged, "ada", seed=1)
            wait(lambda: len(held) == 1)
        (child,) = held
        # 1. The leader is stopped in order; the attempt goes on, and the standby takes it up as it is.
        one.signal(signal.SIGTERM)
        assert one.process.wait(WITHIN) == 0
        two.await_("adopted")
        assert children(str(tmp_path / "node")) == [child]
        # 2. That one is killed; the one after it takes it up, too.
        two.signal(signal.SIGKILL)
        two.process.wait()
        three = start("two")
        three.await_("adopted")
        assert children(str(tmp_path / "node")) == [child]
        os.kill(child, signal.SIGCONT)
        wait(lambda: state_of(live, submission)[0] == "accepted")
        assert [row.attempts for row in rows(live, "check")] == [1]
        # It says so once it is so.
        three.await_("committed")
        three.signal(signal.SIGTERM)
        assert three.process.wait(WITHIN) == 0
        assert three.events("attempt failed") == [] and len(three.events("committed")) == 1
