"""Outages of database and blobs are waited out by a dispatcher, and its health and metrics tell of them."""

import json
import os
import signal
import time
from pathlib import Path

import buckets
import dispatching
import httpx
import live as staging
import pytest
from chosen_ports import free_port
from dispatching import beside, wait
from engines import Server
from live import Live
from threaded import Threaded, server

from acclimate import settling
from acclimate.dispatch import Dispatcher
from acclimate.store import Store
from acclimate_competitions.errors import Refusal
from acclimate_runners.local import LocalRunner

__all__ = ["server"]


def test_an_outage_of_the_database_is_waited_out_and_attempts_go_on(
    tmp_path: Path,
    postgresql: Server,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = postgresql.fresh()
    with staging.serve(tmp_path, database=url) as live:
        staged = staging.open_round(live, tmp_path)
        _, submission = dispatching.send(staged, "ada", seed=1)
        only = Threaded.beside(live, tmp_path / "only")
        with only.running(), dispatching.holding(str(only.settings.work)) as held:
            wait(lambda: len(held) == 1)
            postgresql.stop()
            try:
                wait(lambda: only.dispatcher.vitals.trouble[0] == "database_unreachable")
                assert only.dispatcher.vitals.unready()[0].startswith("database_unreachable")
                (child,) = held
                os.kill(child, signal.SIGCONT)
                time.sleep(1.0)
            finally:
                postgresql.start()
            wait(lambda: dispatching.state_of(live, submission)[0] == "accepted")
            wait(lambda: only.dispatcher.vitals.unready() == [])
            assert only.dispatcher.leading
            assert [row.attempts for row in dispatching.rows(live, "check")] == [1]
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    refused = [line["code"] for line in said if line["event"] == "refused"]
    assert refused.count("database_unreachable") == 1 and [line["event"] for line in said].count("recovered") == 1
    assert [line["event"] for line in said].count("attempt started") == 1


@pytest.mark.slow
def test_an_outage_of_the_blobs_costs_no_try_and_stops_no_clock(
    tmp_path: Path,
    s3_place: buckets.Place,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(settling, "PAUSE", 0.5)
    with staging.serve(tmp_path, **s3_place.settings) as live:
        staged = staging.open_round(live, tmp_path)
        _, submission = dispatching.send(staged, "ada", seed=1)
        live.clock.now = staging.START
        later = staging.rehearse(staging.seal(staging.create(live, tmp_path, name="later")))
        only = Threaded.beside(live, tmp_path / "only")
        try:
            with only.running():
                with dispatching.holding(str(only.settings.work)) as held:
                    wait(lambda: len(held) == 1)
                # 1. The blobs are gone while a model is checked: what came of it can't be stored, which is no fault of the model.
                s3_place.server.stop()
                (child,) = held
                os.kill(child, signal.SIGCONT)
                wait(lambda: only.dispatcher.vitals.failed["blobs_unreachable"] >= 1)
                assert dispatching.state_of(live, submission)[0] == "checking"
                # 2. Rounds open in time, blobs or no blobs.
                live.clock.set(later.fields["opens"])
                wait(lambda: live.phase(later.round) == "open")
                wait(lambda: only.dispatcher.vitals.failed["blobs_unreachable"] >= 2)
                assert dispatching.state_of(live, submission)[0] == "checking"
                # 3. Once the blobs are back, the check goes on where it was.
                s3_place.server.start()
                wait(lambda: dispatching.state_of(live, submission)[0] == "accepted")
                assert [row.attempts for row in dispatching.rows(live, "check")] == [1]
        finally:
            if s3_place.server.process is None:
                s3_place.server.start()
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert not any(line["event"] in ("blocked", "error") for line in said)


def test_health_and_metrics_are_served_where_a_port_is_set(server: Live, tmp_path: Path) -> None:
    port = free_port()
    staged = staging.open_round(server, tmp_path)
    _, submission = dispatching.send(staged, "ada", seed=1)
    settings = beside(server, tmp_path / "own", dispatch_port=port)
    store = Store.open(settings, clock=server.clock)
    runner = lambda: LocalRunner(settings.work, slots=2)  # noqa: E731
    with dispatching.dispatcher(server) as first, Dispatcher(store, store.blobs, settings, runner) as running:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            # 1. A standby is ready, too.
            running.step()
            assert http.get("/healthz").json() == {"alive": True}
            assert http.get("/readyz").json() == {"ready": True, "role": "standby", "reasons": []}
            assert "acclimate_dispatcher_leader 0.0" in http.get("/metrics").text
            # 2. It leads.
            first.__exit__()
            dispatching.step_until(running, lambda: dispatching.state_of(server, submission)[0] == "accepted")
            running.step()
            assert http.get("/readyz").json()["role"] == "leading"
            text = http.get("/metrics").text
            for line in (
                "acclimate_dispatcher_leader 1.0",
                "acclimate_dispatcher_running_attempts 0.0",
                "acclimate_dispatcher_slots 2.0",
                'acclimate_stages{state="committed"} 1.0',
                'acclimate_stages{state="blocked"} 0.0',
                'acclimate_attempts_started_total{kind="check"} 1.0',
            ):
                assert line in text.splitlines()
            assert staged.round not in text and "ada" not in text
            # 3. Trouble.
            running.vitals.trouble = ("database_unreachable", "nothing listens there")
            answer = http.get("/readyz")
            assert answer.status_code == 503 and answer.json()["reasons"] == [
                "database_unreachable: The database does not answer, or refuses the login; nothing was changed"
            ]
            running.vitals.stepped -= 3600
            assert http.get("/healthz").status_code == 503
            assert http.get("/elsewhere").status_code == 404
        # 4. The port is taken.
        third = beside(server, tmp_path / "third", dispatch_port=port)
        with pytest.raises(Refusal) as refused:
            Dispatcher(store, store.blobs, third, runner).__enter__()
        assert refused.value.code == "config_invalid" and str(port) in refused.value.sentence
    store.close()
