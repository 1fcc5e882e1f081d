"""Machines that come and go: how they are named, avoided, drained, set aside, and rid of what belongs to nobody."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny
from waiting import ended, placed, until, without_input

from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.cluster import RayRunner
from acclimate_runners.jobs import PrepareJob
from acclimate_runners.runner import Demand, Machine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("with_token")]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> tuple[FolderBlobs, PrepareJob]:
    folder = tmp_path_factory.mktemp("work")
    blobs = FolderBlobs(folder / "blobs")
    return blobs, tiny.prepare_job(folder, blobs)


@pytest.fixture(scope="module")
def cluster(ray_clusters: Callable):
    made = ray_clusters()
    for pool in ("a", "b"):
        made.add(num_cpus=3, labels={"pool": pool})
    return made


@pytest.fixture
def runner(cluster, with_token: None, tmp_path: Path) -> Iterator[RayRunner]:
    made = RayRunner(tmp_path / "work", cluster.address, namespace=tmp_path.name)
    yield made
    made.close()


def test_machines_are_named_avoided_rid_of_orphans_and_drained(
    cluster, runner: RayRunner, work: tuple[FolderBlobs, PrepareJob], tmp_path: Path
) -> None:
    blobs, job = work
    stuck = without_input(tmp_path / "stuck", blobs, job)
    by_pool: dict[str, Machine] = {machine.labels["pool"]: machine for machine in runner.machines()}
    a, b = by_pool["a"].name, by_pool["b"].name
    # 1. Where an attempt is, is said as the pool says it; where it should not be, it is not, while another machine can take it.
    one = runner.start("one/1", job, stuck, demand=Demand(avoid=frozenset({a})))
    two = runner.start("two/1", job, stuck, demand=Demand(avoid=frozenset({b})))
    only = runner.start("only/1", job, stuck, demand=Demand(avoid=frozenset({a, "gone"}), labels={"pool": "a"}))
    until(lambda: placed(one, two, only) == 3)
    assert [handle.poll().machine for handle in (one, two, only)] == [b, a, a]
    # 2. What nobody knows is ended, what somebody knows is not.
    runner.keep_only(frozenset({"one/1", "two/1"}))
    gone = ended(only)
    assert gone.code == "runner_failed" and "actor is gone" in gone.reason and gone.machine == a
    until(lambda: runner.keep_only(frozenset({"one/1", "two/1"})) == ["only/1"])
    assert placed(one, two) == 2
    # 3. A machine that will go: what runs there leaves and costs nobody a try, and nothing is started there.
    assert cluster.drain(1)
    left = ended(one)
    assert left.code == "preempted" and "is to be drained" in left.reason and left.machine == b
    assert two.poll().state == "running"
    until(lambda: [machine.name for machine in runner.machines()] == [a])
    assert runner.aside() in ({b: "it is to be drained"}, {})
    again = runner.start("one/2", job, stuck)
    until(lambda: placed(again) == 1)
    assert again.poll().machine == a
    for handle in (two, again):
        handle.cancel()


def test_a_machine_with_a_full_disk_is_set_aside_and_the_others_go_on(
    cluster, runner: RayRunner, work: tuple[FolderBlobs, PrepareJob], tmp_path: Path
) -> None:
    try:
        subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine lets nobody mount a small disk")
    blobs, job = work
    (tmp_path / "work").mkdir(exist_ok=True)
    before = len(runner.machines())
    cluster.add_small(tmp_path / "work", "1m", num_cpus=1, labels={"pool": "small"})
    until(lambda: len(runner.machines()) == before + 1)
    (small,) = [machine.name for machine in runner.machines() if machine.labels["pool"] == "small"]
    full = ended(runner.start("full/1", job, blobs, demand=Demand(labels={"pool": "small"})))
    assert (full.code, full.machine) == ("no_space", small) and full.unfit and "free some space" in full.reason
    # Once is enough: a disk does not empty itself.
    until(lambda: len(runner.machines()) == before)
    assert "free some space" in runner.aside()[small]
    assert ended(runner.start("full/2", job, blobs)).state == "done"
