"""A pool of three machines with fake GPUs and labels: placement, loss, adoption, and how a cluster is joined."""

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from waiting import WAITING, ended, placed, until, without_input

import acclimate_competitions
import acclimate_runners
from acclimate import plan as plans
from acclimate_competitions import definition
from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.cluster import RayRunner
from acclimate_runners.jobs import PrepareJob
from acclimate_runners.placement import Room
from acclimate_runners.runner import Demand

GPU = Demand(cpus=0.5, gpus=1)


@pytest.fixture(scope="module")
def cluster(ray_clusters):
    made = ray_clusters()
    for pool in ("a", "a", "b"):
        made.add(num_cpus=2, num_gpus=2, memory=4 << 30, labels={"pool": pool})
    return made


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> tuple[FolderBlobs, PrepareJob]:
    folder = tmp_path_factory.mktemp("work")
    blobs = FolderBlobs(folder / "blobs")
    return blobs, tiny.prepare_job(folder, blobs)


@pytest.fixture(scope="module")
def stuck(work, tmp_path_factory: pytest.TempPathFactory) -> tuple[FolderBlobs, PrepareJob]:
    """A job that a machine takes and then waits with for ever, at no cost: one of its inputs never comes."""
    blobs, job = work
    return without_input(tmp_path_factory.mktemp("stuck"), blobs, job), job


@pytest.fixture
def runner(cluster, with_token, tmp_path: Path) -> Iterator[RayRunner]:
    made = RayRunner(tmp_path / "work", cluster.address, namespace=tmp_path.name)
    yield made
    made.close()


def test_the_pool_is_told_with_its_labels_and_gpus(runner: RayRunner) -> None:
    machines = runner.machines()
    assert sorted(machine.labels["pool"] for machine in machines) == ["a", "a", "b"]
    assert all((machine.cpus, machine.gpus, machine.memory) == (2, 2, 4 << 30) for machine in machines)
    assert len({machine.name for machine in machines}) == 3 and runner.slots == 6
    assert not any("ray.io/node" in name for machine in machines for name in machine.labels)


@pytest.mark.slow
def test_six_gpus_take_six_at_once_and_a_seventh_waits(runner: RayRunner, stuck) -> None:
    blobs, job = stuck
    handles = [runner.start(f"six-{number}/1", job, blobs, demand=GPU) for number in range(6)]
    until(lambda: placed(*handles) == 6)
    # What the dispatcher reckons is what Ray does.
    room = Room(runner.machines(), [GPU] * 5)
    assert room.take(GPU) is not None and room.take(GPU) is None
    seventh = runner.start("seventh/1", job, blobs, demand=GPU)
    time.sleep(1)
    assert seventh.poll().what == WAITING
    handles[0].cancel()
    assert handles[0].poll().code == "cancelled"
    until(lambda: placed(seventh) == 1)
    for handle in (*handles, seventh):
        handle.cancel()


@pytest.mark.slow
def test_labels_and_whole_gpus_are_obeyed(runner: RayRunner, stuck) -> None:
    blobs, job = stuck
    both = [
        Demand(cpus=0.5, gpus=2, labels={"pool": "b"}),
        Demand(cpus=0.5, gpus=2, labels={"pool": "a"}),
        Demand(cpus=0.5, gpus=2, labels={"pool": "a"}),
    ]
    handles = [runner.start(f"labels-{n}/1", job, blobs, demand=demand) for n, demand in enumerate(both)]
    until(lambda: placed(*handles) == 3)
    # Now each machine has its GPUs in use: nothing more for either label, but for those that need none.
    more = [runner.start(f"more-{n}/1", job, blobs, demand=demand) for n, demand in enumerate(both[:2])]
    easy = runner.start("easy/1", job, blobs, demand=Demand(cpus=0.5, memory=3 << 30, labels={"pool": "b"}))
    until(lambda: placed(easy) == 1)
    memory = runner.start("memory/1", job, blobs, demand=Demand(cpus=0.5, memory=3 << 30, labels={"pool": "b"}))
    time.sleep(1)
    assert placed(*more, memory) == 0
    for handle in (*handles, *more, easy, memory):
        handle.cancel()


@pytest.mark.slow
def test_a_child_sees_the_gpus_it_was_given_and_no_other(runner: RayRunner, work, tmp_path: Path) -> None:
    blobs, job = work
    with_gpu = runner.start("with/1", job, blobs, demand=GPU)
    assert seen_devices(tmp_path / "work", "with/") in ("0", "1")
    without = runner.start("without/1", job, blobs)
    assert seen_devices(tmp_path / "work", "without/") == ""
    with_gpu.cancel()
    without.cancel()


def seen_devices(work: Path, name: str) -> str:
    """CUDA_VISIBLE_DEVICES of an attempt's child."""
    found: list[str] = []

    def look() -> bool:
        for folder in Path("/proc").glob("[0-9]*"):
            # A fork of the fork-server has its settings elsewhere, but it is none that is given GPUs.
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes().decode("utf-8", "replace")
                if "acclimate_runners" in command and f"{work}/attempts/{name}" in command:
                    variables = (folder / "environ").read_bytes().split(b"\0")
                    found.extend(v.partition(b"=")[2].decode() for v in variables if v.startswith(b"CUDA_VIS"))
        return bool(found)

    until(look)
    return found[0]


def test_what_no_machine_can_take_is_found_without_asking_ray(runner: RayRunner) -> None:
    text = tiny.DEFINITION.replace("[compute]", '[compute]\ngpus = 2\nlabels = { pool = "c" }')
    with pytest.raises(Refusal, match="no machine has 1 CPU and 2 GPUs with pool=c; the pool has") as caught:
        plans.plan(definition.parse(text.encode()), runner.machines(), slots=runner.slots, entries=1)
    assert caught.value.code == "infeasible" and "pool=a" in caught.value.sentence
    fits = definition.parse(text.replace('"c"', '"b"').encode())
    assert plans.plan(fits, runner.machines(), slots=runner.slots, entries=4).at_once == 1


@pytest.mark.slow
def test_what_goes_on_after_a_close_is_adopted_by_its_name_and_ended_by_its_next_try(
    cluster, with_token, stuck, tmp_path: Path
) -> None:
    blobs, job = stuck
    first = RayRunner(tmp_path / "work", cluster.address, namespace=tmp_path.name)
    handles = [first.start(f"kept-{number}/1", job, blobs) for number in range(2)]
    until(lambda: placed(*handles) == 2)
    first.close(keep=True)
    assert handles[0].poll().code == "cancelled"
    with pytest.raises(ConnectionError, match="closed"):
        first.machines()
    tries = tmp_path / "work" / "attempts"
    second = RayRunner(tmp_path / "work", cluster.address, namespace=tmp_path.name)
    adopted = second.start("kept-0/1", job, blobs)
    again = second.start("kept-1/2", job, blobs)
    until(lambda: placed(adopted, again) == 2)
    assert [path.name for path in (tries / "kept-0").iterdir()] == ["1"]
    # The other's first try was ended for its second: only two of six places are taken.
    others = [second.start(f"other-{number}/1", job, blobs) for number in range(4)]
    until(lambda: placed(*others) == 4)
    # Another namespace knows nothing of these names.
    elsewhere = RayRunner(tmp_path / "else", cluster.address, namespace="elsewhere")
    unknown = elsewhere.start("kept-0/1", job, blobs)
    time.sleep(1)
    assert unknown.poll().what == WAITING
    for handle in (unknown, adopted, again, *others):
        handle.cancel()
    for each in (elsewhere, second):
        each.close()


@pytest.mark.slow
def test_a_machine_of_other_code_or_without_a_folder_says_so(cluster, with_token, work, tmp_path: Path) -> None:
    blobs, job = work
    for package in (acclimate_competitions, acclimate_runners):
        shutil.copytree(package.__path__[0], tmp_path / "code" / package.__name__)
    with (tmp_path / "code" / "acclimate_runners" / "models.py").open("a") as source:
        source.write("# changed\n")
    cluster.add(num_cpus=1, labels={"code": "other"}, env_vars={"PYTHONPATH": str(tmp_path / "code")})
    runner = RayRunner(tmp_path / "work", cluster.address, namespace=tmp_path.name)
    (tmp_path / "file").write_text("in the way")
    nowhere = RayRunner(tmp_path / "file" / "work", cluster.address, namespace=tmp_path.name)
    try:
        other = ended(runner.start("code/1", job, blobs, demand=Demand(labels={"code": "other"})))
        assert (other.state, other.code) == ("failed", "runner_failed")
        assert f"the machine {socket.gethostname()} has other code" in other.reason
        # After the second time it is left alone, by what is told of the pool and by Ray.
        assert len(runner.machines()) == 4
        again = runner.start("code/2", job, blobs, demand=Demand(labels={"code": "other"}))
        assert "has other code" in ended(again).reason
        until(lambda: len(runner.machines()) == 3)
        assert not any("code" in machine.labels for machine in runner.machines())
        never = runner.start("code/3", job, blobs, demand=Demand(labels={"code": "other"}))
        elsewhere = runner.start("code-else/1", job, blobs)
        assert ended(elsewhere).state == "done" and never.poll().what == WAITING
        never.cancel()
        folder = ended(nowhere.start("folder/1", job, blobs, demand=Demand(labels={"pool": "a"})))
        assert folder.code == "runner_failed" and "can't make the folder" in folder.reason
        assert "node_work" in folder.reason
    finally:
        runner.close()
        nowhere.close()
        cluster.remove(3)


@pytest.mark.slow
def test_an_attempt_whose_machine_goes_away_starts_elsewhere(runner: RayRunner, cluster, work, stuck) -> None:
    blobs, job = work
    lost = runner.start("lost/1", job, stuck[0], demand=Demand(gpus=1, labels={"pool": "b"}))
    until(lambda: placed(lost) == 1)
    cluster.remove(2)
    status = ended(lost)
    assert status.code == "runner_failed" and "actor is gone" in status.reason
    until(lambda: len(runner.machines()) == 2)
    assert runner.slots == 4
    assert ended(runner.start("lost/2", job, blobs, demand=Demand(gpus=1))).state == "done"


# ---- joining -------------------------------------------------------------------------------------------------------


def refused(address: str, folder: Path) -> Refusal:
    with pytest.raises(Refusal) as caught:
        RayRunner(folder, address)
    return caught.value


def test_a_cluster_is_joined_with_its_token_only(cluster, with_token, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    missing = refused(cluster.address, tmp_path)
    assert missing.code == "runner_failed" and "there is no token" in missing.sentence
    assert "RAY_AUTH_TOKEN_PATH" in missing.hint
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 64)
    wrong = refused(cluster.address, tmp_path)
    assert "does not take the token" in wrong.sentence and "f" * 64 not in f"{wrong.sentence}{wrong.hint}"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    assert "can't be read" in refused(cluster.address, tmp_path).sentence
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "asks for a token" in refused(cluster.address, tmp_path).sentence
    monkeypatch.delenv("RAY_AUTH_MODE")
    (tmp_path / "token").write_text(os.environ.get("TOKEN", "0123456789abcdef" * 4))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    RayRunner(tmp_path, cluster.address).close()


def test_a_cluster_of_another_version_is_refused_with_both(cluster, with_token, tmp_path: Path) -> None:
    before = cluster.metadata(ray_version="2.59.1")
    try:
        other = refused(cluster.address, tmp_path)
        cluster.metadata(ray_version=before["ray_version"], python_version="3.10.2")
        python = refused(cluster.address, tmp_path)
    finally:
        cluster.metadata(**before)
    assert other.code == "runner_failed" and "Ray 2.59.1" in other.sentence
    assert f"here are Ray {before['ray_version']} and Python {before['python_version']}" in other.sentence
    assert "Python 3.10.2" in python.sentence


def test_where_there_is_no_cluster(with_token, tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        nobody = refused(address, tmp_path)
    assert nobody.code == "runner_failed" and f"there is no Ray cluster at {address}" in nobody.sentence
    assert "ray_address" in nobody.hint
    assert refused("ray://head:10001", tmp_path).code == "config_invalid"


@pytest.mark.slow
def test_something_else_at_the_address_is_not_waited_for_without_end(with_token, tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        refusal = refused(f"127.0.0.1:{silent.getsockname()[1]}", tmp_path)
    assert refusal.code == "runner_failed" and "no answer from a Ray cluster" in refusal.sentence


@pytest.mark.slow
def test_a_cluster_that_is_open_to_everyone_is_joined_only_where_that_is_meant(
    ray_clusters, with_token, monkeypatch, tmp_path: Path
) -> None:
    cluster = ray_clusters(open_=True)
    refusal = refused(cluster.address, tmp_path)
    assert refusal.code == "runner_failed" and "asks for no token" in refusal.sentence
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    runner = RayRunner(tmp_path, cluster.address)
    # A head without CPUs takes nothing.
    assert runner.machines() == () and runner.slots == 0
    runner.close()


@pytest.mark.slow
def test_a_head_that_dies_ends_the_attempts_and_neither_blocks_nor_ends_this_process(
    runner: RayRunner, cluster, stuck
) -> None:
    blobs, job = stuck
    handle = runner.start("beheaded/1", job, blobs)
    until(lambda: placed(handle) == 1)
    cluster.behead()
    status = ended(handle)
    assert status.code == "runner_lost" and "head is gone" in status.reason
    for call in (runner.machines, lambda: runner.start("after/1", job, blobs)):
        with pytest.raises(ConnectionError, match="head is gone"):
            call()
    runner.close()
