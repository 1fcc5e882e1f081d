"""What a dispatcher loses of its cluster, machine, head or all, costs a try and never a result; what comes back too late changes nothing."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import dispatching
import live as staging
import pytest
from dispatching import children, step_until
from live import Live
from sqlalchemy import select
from waiting import until

from acclimate import event_history, hosting
from acclimate.dispatch import Dispatcher
from acclimate.event_history import Event
from acclimate.store import attempts, events
from acclimate_runners.cluster import RayRunner
from acclimate_runners.gateway import Gateway
from acclimate_runners.watch import Patience

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.usefixtures("with_token")]


class World:
    """A dispatcher over whichever cluster is the present one, and an open round."""

    def __init__(self, live: Live, folder: Path, clusters: list, *, patience: Patience) -> None:
        self.live, self.clusters, self.folder = live, clusters, folder
        self.staged = staging.open_round(live, folder)
        self.made: list[RayRunner] = []
        self.patience = patience
        self.dispatcher = Dispatcher(live.store, live.store.blobs, live.settings, self._runner)

    def _runner(self) -> RayRunner:
        address, folder = self.clusters[0].address, self.folder / f"node-{len(self.clusters)}"
        self.made.append(RayRunner(folder, address, namespace=self.folder.name, patience=self.patience))
        return self.made[-1]

    def tries(self) -> list:
        with self.live.store.snapshot() as tx:
            return list(tx.execute(select(attempts).order_by(attempts.c.fence)).all())

    def settled(self, submission: str) -> None:
        """Until the check has come to its end: once, and by the newest try."""
        step_until(self.dispatcher, lambda: dispatching.state_of(self.live, submission)[0] == "accepted")
        with self.live.store.snapshot() as tx:
            rows = tx.execute(select(events).order_by(events.c.id)).all()
        assert event_history.problems(Event(r.attempt, r.fence, r.epoch, r.event) for r in rows) == []
        assert [row.fence for row in rows if row.event == "committed"] == [self.tries()[-1].fence]


@pytest.fixture
def world(ray_clusters: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    monkeypatch.setattr(hosting, "_LOOK_EVERY", 0.2)
    clusters: list = []
    with staging.serve(tmp_path) as live:

        def make(count: int, **patience: float) -> World:
            for _ in range(count):
                clusters.append(ray_clusters())
                clusters[-1].add(num_cpus=1)
            return World(live, tmp_path, clusters, patience=Patience(**patience))

        yield make
    for cluster in clusters:
        cluster.close()


def test_a_machine_that_is_lost_costs_a_try(world: Callable) -> None:
    lost = world(1)
    with lost.dispatcher, dispatching.holding(str(lost.folder / "node-")) as held:
        _, submission = dispatching.send(lost.staged, "ada", seed=1)
        step_until(lost.dispatcher, lambda: len(held) == 1)
        lost.clusters[0].remove(0)
        lost.clusters[0].add(num_cpus=1)
        step_until(lost.dispatcher, lambda: len(held) == 2)
        first, second = lost.tries()
        assert (first.fence, first.state, first.code) == (1, "failed", "runner_failed") and first.machine
        assert (second.fence, second.state in ("starting", "running")) == (2, True)
        for child in children(str(lost.folder / "node-")):
            os.kill(child, signal.SIGCONT)
        lost.settled(submission)


def test_a_head_that_is_lost_ends_its_attempts_and_another_cluster_goes_on(world: Callable) -> None:
    lost = world(2, unasked=20.0, checkpoint=2.0)
    with lost.dispatcher, dispatching.holding(str(lost.folder / "node-2")) as held:
        _, submission = dispatching.send(lost.staged, "ada", seed=1)
        step_until(lost.dispatcher, lambda: len(held) == 1)
        gone = lost.clusters.pop(0)
        gone.behead()
        # It is held, so its end is not its own doing.
        until(lambda: not children(str(lost.folder / "node-2")))
        lost.settled(submission)
        first, second = lost.tries()
        assert (first.fence, first.state) == (1, "given_back") and first.code in (
            "runner_lost",
            "preempted",
            "not_found",
        )
        assert (second.fence, second.state) == (2, "committed")
        assert [row.attempts for row in dispatching.rows(lost.live, "check")] == [1]
    gone.close()


def test_what_an_earlier_try_comes_to_changes_nothing(world: Callable) -> None:
    lost = world(2)
    with lost.dispatcher, dispatching.holding(str(lost.folder / "node-2")) as held:
        _, submission = dispatching.send(lost.staged, "ada", seed=1)
        step_until(lost.dispatcher, lambda: len(held) == 1)
        # The way to its cluster is cut, and another takes its place; it goes on, and knows nothing of that.
        gone, gateway = lost.clusters.pop(0), lost.made[0]._ray
        assert isinstance(gateway, Gateway)
        os.kill(gateway._process.pid, signal.SIGKILL)
        lost.settled(submission)
        record = dispatching.rows(lost.live, "check")
        (zombie,) = children(str(lost.folder / "node-2"))
        os.kill(zombie, signal.SIGCONT)
        until(lambda: not children(str(lost.folder / "node-2")))
        for _ in range(20):
            lost.dispatcher.step()
        assert dispatching.rows(lost.live, "check") == record
        lost.settled(submission)
        assert [(row.fence, row.state) for row in lost.tries()] == [(1, "given_back"), (2, "committed")]
    gone.close()
