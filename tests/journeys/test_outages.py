"""What a round goes through: MLflow away, blobs that hang or are spoilt, a database that is gone or a leader that stops in the midst of a write."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import buckets
import chaos
import dispatching
import httpx
import live as staging
import pytest
from chaos import Play
from chosen_ports import free_port
from engines import Server
from live import Live
from sqlalchemy import select
from waiting import WITHIN, until

from acclimate import finishing, publisher, retries
from acclimate.service import publish
from acclimate.store import attempts, events, results, stages
from acclimate_competitions import digests

# ---- blobs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Live]:
    with staging.serve(tmp_path) as running:
        yield running


@pytest.mark.parametrize("how", ["corrupt", "gone"])
def test_an_input_spoilt_after_the_close_blocks_its_own_work_until_it_is_put_back(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(retries, "BACKOFF", 0.01)
    staged = staging.open_round(server, tmp_path)
    for name, seed in {"ada": 1, "bea": 2}.items():
        staging.submit_model(staged, staging.enter(staged, server.actor(name)), seed=seed)
    server.clock.set(staged.fields["closes"], seconds=61)
    digest = digests.of_file(staging.model(staged, seed=1)["model.safetensors"])
    path = server.store.blobs.path(digest)  # type: ignore[attr-defined]
    whole = path.read_bytes()
    path.unlink()
    if how == "corrupt":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with dispatching.dispatcher(server) as running:
        # 1. Its own stages are blocked, after a try or two and not ten, with a reason that says which blob and what to do.
        dispatching.step_until(running, lambda: dispatching.states(server, "prepare") == {"committed", "blocked"})
        blocked = [row for row in dispatching.rows(server, "prepare") if row.state == "blocked"]
        assert len(blocked) == 6 and {row.code for row in blocked} == {
            "blob_corrupt" if how == "corrupt" else "blob_unknown"
        }
        for word in (digest, "put that blob back", "acclimate stage retry"):
            assert word in blocked[0].reason
        with server.store.snapshot() as tx:
            tries = tx.execute(select(attempts).where(attempts.c.submission == blocked[0].submission)).all()
        assert len(tries) == (1 if how == "corrupt" else 2)
        # What stands in its way is for its organizer to read, and whatever step comes next changes nothing.
        problem = server.organizer().get(staged.path).json()["problem"]
        assert problem["code"] == "work_blocked"
        running.step()
        assert server.phase(staged.round) == "closed"
        # 2. The blob is put back, and the organizer has it tried again.
        assert server.store.blobs.put_bytes(whole) == digest
        asked = server.organizer().post(f"{staged.path}/retries", {"stages": [blocked[0].key]})
        assert asked.status_code == 200, asked.text
        dispatching.step_until(running, lambda: server.phase(staged.round) == "prepared")


@pytest.mark.slow
def test_blobs_that_hang_under_a_runner_and_under_a_commit_cost_no_lease_and_no_try(
    tmp_path: Path, s3_place: buckets.Place
) -> None:
    with Play.begun(tmp_path, entrants=2, **s3_place.settings) as play:
        # Stopped at the moment at which an evaluation is to be read and scored.
        weed = s3_place.server.process
        assert weed is not None
        one = play.start("one", at="done:4:stop")
        one.await_("leading")
        two = play.start("two")
        try:
            # 1. While children run: what they need or have made waits.
            play.until(lambda: play.events("running"))
            os.kill(weed.pid, signal.SIGSTOP)
            time.sleep(2 * chaos.LEASE)
            os.kill(weed.pid, signal.SIGCONT)
            play.until(lambda: stopped(one.process.pid))
            # 2. While the leader commits.
            os.kill(weed.pid, signal.SIGSTOP)
            one.signal(signal.SIGCONT)
            time.sleep(2 * chaos.LEASE)
        finally:
            os.kill(weed.pid, signal.SIGCONT)
        play.until(lambda: play.phase == "evaluated")
        assert play.wrong() == []
        counted = [row for row in play.rows() if row.event in ("again", "blocked")]
        assert counted == [] and two.process.poll() is None


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


# ---- the database --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_leader_stopped_in_the_midst_of_a_write_is_replaced_and_writes_nothing_when_it_wakes_up(
    tmp_path: Path, postgresql_url: str
) -> None:
    expected = chaos.undisturbed(tmp_path / "undisturbed", entrants=3)
    with Play.begun(tmp_path / "disturbed", entrants=0, database=postgresql_url) as play:
        first = play.start("first", at="committing:4:stop")
        first.await_("leading")
        play.close(3, lambda: stopped(first.process.pid))
        second = play.start("second")
        play.until(lambda: stopped(first.process.pid))
        # The database ends a writer that is silent in its transaction (postgres.py): the other leads.
        play.until(lambda: second.events("leading"))
        first.signal(signal.SIGCONT)
        play.until(lambda: first.events("stepped down") and first.events("standby"))
        play.until(lambda: play.phase == "evaluated")
        assert play.wrong() == []
        assert play.outcome() == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_database_that_is_gone_for_longer_than_a_lease_ends_with_one_leader_and_the_same_round(
    tmp_path: Path, postgresql: Server, postgresql_url: str
) -> None:
    expected = chaos.undisturbed(tmp_path / "undisturbed", entrants=3)
    with Play.begun(tmp_path / "disturbed", entrants=0, database=postgresql_url) as play:
        first = play.start("first")
        first.await_("leading")
        second = play.start("second")
        second.await_("standby")
        play.submit(3)
        with dispatching.holding(str(play.folder)) as held:

            def at_work(phase: str) -> bool:
                """Whether a child of this phase is held; those that came before it go on."""
                came = set(held)
                if play.phase == phase:
                    return bool(came & set(dispatching.children(str(play.folder))))
                dispatching.let_go(came)
                return False

            for phase in ("open", "closed", "opened"):
                play.until(lambda phase=phase: at_work(phase))  # type: ignore[misc]
                postgresql.stop("immediate")
                # What they come to has to wait.
                dispatching.let_go(held)
                time.sleep(2 * chaos.LEASE)
                postgresql.start()
            play.until(lambda: at_work("evaluated") or play.phase == "evaluated")
        assert play.wrong() == []
        assert play.outcome() == expected
        assert first.process.poll() is None and second.process.poll() is None


# ---- MLflow --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mlflow(data: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """`acclimate mlflow` on a port that is known before; its database is beside the data folder."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ACCLIMATE_", "MLFLOW_"))}
    clean |= {"ACCLIMATE_TRACKING": f"sqlite:///{data}.db", "ACCLIMATE_ARTIFACTS": f"{data}-artifacts"}
    command = [sys.executable, "-m", "acclimate", "mlflow", "--data", str(data), "--port", str(port)]
    with data.with_suffix(".err").open("w") as errors:
        process = subprocess.Popen(
            [*command, "--stop-with-stdin"], stdin=subprocess.PIPE, stdout=errors, stderr=errors, env=clean
        )
    assert process.stdin is not None
    with process.stdin:
        until = time.monotonic() + 300
        while True:
            assert process.poll() is None and time.monotonic() < until, data.with_suffix(".err").read_text()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200:
                    break
            time.sleep(0.1)
        yield process
    process.wait(WITHIN)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_publication_does_not_wait_for_mlflow_which_has_each_run_once_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("pandas")
    from acclimate import tracking

    monkeypatch.setattr(finishing, "_AGAIN_AFTER", 1.0)
    port = free_port()
    expected = chaos.undisturbed(tmp_path / "undisturbed", entrants=3)["ranking"]
    with Play.begun(tmp_path / "disturbed", entrants=3, tracking=f"http://127.0.0.1:{port}") as play:
        live, told = play.live, list[str]()

        def finish(round_: str) -> None:
            try:
                publisher.finish(live.store, live.settings, round_)
            except Exception as error:
                told.append(str(error))
                raise

        def stepped() -> None:
            play.step()
            running.step()

        with dispatching.dispatcher(live, finish=finish) as running:
            # 1. Nobody answers for MLflow: the round goes on to its end, and its ranking is the same.
            until(lambda: stepped() or play.phase == "evaluated")
            play.publish()
            assert play.phase == "published" and publish.ranking(live.store, play.staged.round).digest == expected
            until(lambda: stepped() or len(told) >= 2)
            assert all(str(port) in words for words in told)
            # 2. It comes, is killed in the midst of it, and comes back.
            url = f"http://127.0.0.1:{port}"
            with mlflow(tmp_path / "mlflow", port) as process:
                until(lambda: stepped() or not tracking.rounds(url).empty)
                process.kill()
                process.wait()
            until(lambda: stepped() or is_free(port))
            with mlflow(tmp_path / "mlflow", port):
                until(lambda: stepped() or "published" in play.marks(), within=300)
                runs = play.tracked(tmp_path / "mlflow.db")
        assert play.wrong() == [] and play.outcome()["ranking"] == expected
        assert runs and set(runs.values()) == {1}


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


# ---- two rounds ----------------------------------------------------------------------------------------------------


def test_two_rounds_of_one_model_have_two_sets_of_results(server: Live, tmp_path: Path) -> None:
    rounds = []
    for name in ("first", "second"):
        server.clock.now = staging.START
        staged = staging.open_round(server, tmp_path, name=name)
        staging.submit_model(staged, staging.enter(staged, server.actor("ada")), seed=1)
        rounds.append(staged)
    server.clock.set(rounds[0].fields["closes"], seconds=61)
    with dispatching.dispatcher(server) as running:
        dispatching.step_until(running, lambda: all(server.phase(s.round) == "prepared" for s in rounds))
        for staged in rounds:
            dispatching.give_shares(staged)
        dispatching.step_until(running, lambda: all(server.phase(s.round) == "evaluated" for s in rounds))
    with server.store.snapshot() as tx:
        found = [tx.execute(select(stages.c.key).where(stages.c.round == s.round)).scalars().all() for s in rounds]
        held = [set(tx.execute(select(events.c.attempt).where(events.c.round == s.round)).scalars()) for s in rounds]
        done = set(tx.execute(select(results.c.stage)).scalars())
        states = [tx.round(staged.round) for staged in rounds]
        adopted = tx.execute(select(events.c.id).where(events.c.event == "adopted")).all()
    # Each has stages and attempts of its own, all of which were made, and neither took the other's.
    assert len(found[0]) == len(found[1]) == 14 and not set(found[0]) & set(found[1]) and not held[0] & held[1]
    assert done == {*found[0], *found[1]} and adopted == []
    # The same bytes came of the same model, twice.
    prepared = [sorted(record["prepared"] for record in state.prepared.values()) for state in states]
    assert prepared[0] == prepared[1] and len(prepared[0]) == 6
