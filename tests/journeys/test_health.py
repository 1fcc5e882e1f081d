"""Health, readiness and metrics of an API."""

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import httpx
import live
import pytest
from apis import WITHIN, served, until
from buckets import Gate, Place
from live import Live
from sqlalchemy import event, inspect

from acclimate import facts, metrics, writability
from acclimate.api import lane
from acclimate.clocks import Clocks
from acclimate.dispatch_health import Vitals
from acclimate_competitions import digests

__all__ = ["served"]


def test_readiness_says_what_was_looked_at(served: Live) -> None:
    answer = served.anyone().get("/readyz")
    found = answer.json()
    assert (answer.status_code, found["status"]) == (200, "ready")
    # The test's clock is months ahead: told, and no reason not to serve.
    assert "ahead of this machine's" in found["checks"].pop("clock")
    assert set(found["checks"].values()) == {"ok"}
    assert found["log"]["unsigned"] == 0 and found["clock_offset"] > 0


def test_blobs_that_cannot_be_written_make_the_server_unready_until_they_can(
    served: Live, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acclimate.health._BLOBS_KEPT", 0.0)
    folder = Path(served.settings.blobs)
    aside = folder.rename(folder.with_name("aside"))
    folder.touch()
    answer = until(lambda: (got := served.anyone().get("/readyz")).status_code == 503 and got)
    assert answer.json()["checks"]["blobs"] == "blobs_unreachable"
    assert int(answer.headers["Retry-After"]) >= 1
    assert served.anyone().get("/healthz").status_code == 200
    upload = served.organizer().put(f"/v1/blobs/{digests.of_bytes(b'x')}", b"x")
    assert upload.status_code == 503 and upload.json()["code"] == "blobs_unreachable"
    # Where they lie is for the log, not for whoever asks.
    assert str(folder) not in answer.text + upload.text
    assert sum(str(folder) in record.getMessage() for record in caplog.records) >= 2
    folder.unlink()
    aside.rename(folder)
    until(lambda: served.anyone().get("/readyz").status_code == 200)


def test_a_log_that_is_not_signed_makes_the_server_unready(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    _, request = live.defined(served, Path(served.settings.data).parent)
    monkeypatch.setattr("acclimate.sequencer.Sequencer.advance", lambda self: 0)
    assert served.organizer().post("/v1/rounds", request).status_code == 201
    served.clock.forward(minutes=5)
    answer = until(lambda: (got := served.anyone().get("/readyz")).status_code == 503 and got)
    assert "without a checkpoint" in answer.json()["checks"]["log"]
    text = served.anyone().get("/metrics").text
    assert "acclimate_log_unsigned_entries 1.0" in text and 'acclimate_check_ok{check="log"} 0.0' in text


def test_a_server_that_can_log_nothing_for_its_clock_is_not_ready(served: Live) -> None:
    assert served.anyone().get("/readyz").status_code == 200
    # The test's clock is months ahead of this machine's.
    served.store.clocks = Clocks()
    answer = until(lambda: (got := served.anyone().get("/readyz")).status_code == 503 and got)
    assert answer.json()["checks"]["clock"] == "busy"
    served.store.clocks = None
    until(lambda: served.anyone().get("/readyz").status_code == 200)


@pytest.mark.parametrize(
    ("statement", "check", "word"),
    [
        ("UPDATE alembic_version SET version_num = '9999'", "schema", "9999"),
        ("INSERT INTO alembic_version VALUES ('9999')", "schema", "and 9999"),
        ("DELETE FROM alembic_version", "schema", "none"),
        ("UPDATE installation SET id = 'other'", "installation", "another installation"),
        ("INSERT INTO installation SELECT '0', log, evaluator, created FROM installation", "installation", "another"),
    ],
)
def test_a_database_that_is_exchanged_under_the_server_makes_it_unready(
    served: Live, statement: str, check: str, word: str
) -> None:
    assert served.anyone().get("/readyz").status_code == 200
    with served.store.transaction() as tx:
        tx.connection.exec_driver_sql(statement)
    answer = until(lambda: (got := served.anyone().get("/readyz")).status_code == 503 and got)
    assert word in answer.json()["checks"][check]


def test_metrics_are_sums_by_route_and_name_nobody(served: Live, tmp_path: Path) -> None:
    staged = live.open_round(served, tmp_path)
    ada = live.enter(staged, served.actor("ada"))
    live.commit(staged, ada, seed=1)
    served.anyone().get("/v1/nothing-here")
    until(lambda: 'acclimate_rounds{phase="open"} 1.0' in served.anyone().get("/metrics").text)
    text = served.anyone().get("/metrics").text
    assert served.anyone().get("/metrics").headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert (
        'acclimate_http_requests_total{method="POST",route="/v1/rounds/{round_id}/submissions",status="201"} 1.0'
        in text
    )
    assert 'route="(none)",status="404"' in text
    assert 'acclimate_accounts{role="custodian"} 3.0' in text
    for name in ("acclimate_build_info", "acclimate_log_entries", "acclimate_ready", "acclimate_dispatch_leader 0.0",
                 "acclimate_database_clock_offset_seconds", "acclimate_http_request_seconds_bucket"):  # fmt: skip
        assert name in text, name
    for word in (staged.round, "tiny", "ada", "organizer-", ada.token, *staged.fields["files"].values()):
        assert word not in text, word
    # What could tell a model's size comes in steps of a GiB.
    sizes = re.findall(r"^acclimate_(?:upload_bytes_total|blobs_free_bytes) (\S+)", text, re.MULTILINE)
    assert len(sizes) == 2 and all(float(size) % metrics.STEP == 0 for size in sizes)


@pytest.mark.parametrize(("wanted", "status"), [("on", 200), ("off", 404), ("", 404)])
def test_who_gets_the_metrics_is_a_setting(tmp_path: Path, wanted: str, status: int) -> None:
    with live.serve(tmp_path, **({"metrics": wanted} if wanted else {})) as server:
        assert server.anyone().get("/metrics").status_code == status


def test_a_database_that_takes_no_writes_makes_the_server_unready(
    tmp_path: Path, postgresql: engines.Server, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acclimate.health._BLOBS_KEPT", 0.0)
    name = postgresql_url.rpartition("/")[2]

    def checked(server: Live, wanted: str) -> str:
        status = 200 if wanted == "ok" else 503
        answer = until(lambda: (got := server.anyone().get("/readyz")).status_code == status and got)
        assert answer.json()["checks"]["writes"] == wanted, answer.text
        return str(answer.text)

    with live.serve(tmp_path, database=postgresql_url) as server:
        checked(server, "ok")
        postgresql.sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        # Sessions that there are keep what they began with.
        end = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}' AND pid <> pg_backend_pid()"
        postgresql.sql(end)
        assert "read-only" not in checked(server, "database_unreachable")
        postgresql.sql(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        postgresql.sql(end)
        checked(server, "ok")
        # What PostgreSQL says where its disk is full, and at the same place.
        for statement in (
            "CREATE FUNCTION full_disk() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN"
            " RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$",
            "CREATE EVENT TRIGGER full_disk ON ddl_command_start WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION full_disk()",
        ):
            postgresql.sql(statement, database=name)
        checked(server, "no_space")
        postgresql.sql("DROP EVENT TRIGGER full_disk", database=name)
        checked(server, "ok")


@pytest.mark.parametrize("pragma", ["query_only = ON", "max_page_count = 1"])
def test_a_database_file_that_takes_no_writes_makes_the_server_unready(
    served: Live, monkeypatch: pytest.MonkeyPatch, pragma: str
) -> None:
    monkeypatch.setattr("acclimate.health._BLOBS_KEPT", 0.0)
    until(lambda: served.anyone().get("/readyz").status_code == 200)

    def close(connection: Any, *_: object) -> None:
        connection.execute(f"PRAGMA {pragma}").close()

    event.listen(served.store.engine, "checkout", close)
    answer = until(lambda: (got := served.anyone().get("/readyz")).status_code == 503 and got)
    assert answer.json()["checks"]["writes"] == "no_space"
    event.remove(served.store.engine, "checkout", close)


def test_writing_is_looked_at_beside_a_writer_and_leaves_nothing(served: Live) -> None:
    with served.store.transaction():
        writability.look(served.store.engine)
    writability.look(served.store.engine)
    with served.store.snapshot() as tx:
        assert not inspect(tx.connection).has_table("acclimate_room")
        assert tx.connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 20000


def test_a_dispatcher_that_leads_without_its_lease_is_not_ready() -> None:
    assert Vitals(leading=True, lease_left=lambda: 5.0).unready() == [] == Vitals().unready()
    assert Vitals(leading=True).unready()[0].startswith("lease_lost")


def test_a_key_that_was_lost_under_the_server_is_told(served: Live) -> None:
    key = served.settings.keys / "log.pem"
    aside = key.rename(key.with_name("aside"))
    answer = until(lambda: "key" in (got := served.anyone().get("/readyz")).json()["checks"]["keys"] and got)
    assert answer.status_code == 200 and str(key.parent) not in answer.text
    aside.rename(key)
    until(lambda: served.anyone().get("/readyz").json()["checks"]["keys"] == "ok")


@pytest.fixture
def gate(s3_place: Place) -> Iterator[Gate]:
    gate = Gate(s3_place.server)
    yield gate
    gate.close()


def test_a_store_of_blobs_that_hangs_stops_nothing_but_what_needs_it(
    tmp_path: Path, s3_place: Place, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acclimate.health._BLOBS_KEPT", 0.5)
    monkeypatch.setattr("acclimate.health._STALE", 0.5)
    with live.serve(tmp_path, blobs=s3_place.blobs, blobs_endpoint=gate.endpoint) as server:
        staged = live.create(server, tmp_path)
        name = sorted(staged.fields["files"])[0]
        until(lambda: server.anyone().get("/readyz").status_code == 200)
        gate.hang = True
        statuses: list[int] = []

        def get() -> None:
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get(f"{server.url}{staged.path}/files/{name}", timeout=60, trust_env=False)
                statuses.append(answer.status_code)
                assert answer.status_code == 200 or int(answer.headers["Retry-After"]) >= 1

        callers = [threading.Thread(target=get) for _ in range(45)]
        for one in callers:
            one.start()
        # Those for whom there is no place are told so at once; the others wait for the store.
        until(lambda: len(statuses) == len(callers) - lane.PLACES)
        assert set(statuses) == {503}
        assert server.anyone().get("/healthz", timeout=WITHIN).status_code == 200
        assert (
            server.anyone().get("/healthz", headers={"Authorization": "Bearer acc_x"}, timeout=WITHIN).status_code
            == 200
        )
        assert server.organizer().get("/v1/rounds", timeout=WITHIN).status_code == 200

        def only_blobs() -> bool:
            answer = server.anyone().get("/readyz", timeout=WITHIN)
            checks = answer.json()["checks"]
            return answer.status_code == 503 and (checks["blobs"], checks["database"]) == ("no answer yet", "ok")

        # A slow machine may be late with the others, too, and is asked again.
        until(only_blobs)
        gate.hang = False
        for one in callers:
            one.join()
        until(lambda: server.anyone().get("/readyz").status_code == 200)


@pytest.mark.slow
def test_a_store_of_blobs_that_is_gone_is_named_to_the_operator_alone(
    tmp_path: Path, s3_place: Place, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    with live.serve(tmp_path, blobs=s3_place.blobs, blobs_endpoint=gate.endpoint) as server:
        organizer = server.organizer()
        gate.refuse = 1 << 30
        answer = organizer.put(f"/v1/blobs/{digests.of_bytes(b'x')}", b"x")
    assert (answer.status_code, answer.json()["code"]) == (503, "blobs_unreachable"), answer.text
    place = gate.endpoint.removeprefix("http://")
    assert not any(word in answer.text for word in (place, s3_place.blobs, "s3", "bucket"))
    assert any(place in record.getMessage() and s3_place.blobs in record.getMessage() for record in caplog.records)


def test_who_asks_first_is_told_the_check_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    with live.serve(tmp_path) as server:
        monkeypatch.setattr("acclimate.facts.read", lambda *_, **__: release.wait(WITHIN))
        monkeypatch.setattr("acclimate.health._STALE", 0.0)
        answer = until(lambda: (got := server.anyone().get("/readyz", timeout=WITHIN)).status_code == 503 and got)
        assert answer.json()["checks"]["log"] == "no answer yet"
        assert server.anyone().get("/healthz").status_code == 200
        release.set()


def test_only_rounds_with_new_records_are_looked_at_again(served: Live, tmp_path: Path) -> None:
    phases, seen = facts.Phases(), []
    staged = live.create(served, tmp_path)

    def counted() -> dict[str, int]:
        with served.store.snapshot() as tx:
            fold, tx.round = tx.round, lambda name: seen.append(name) or fold(name)  # type: ignore[method-assign,func-returns-value]
            return phases.counted(tx)

    assert (counted(), counted(), seen) == ({"draft": 1}, {"draft": 1}, [staged.round])
    live.seal(staged)
    assert (counted(), seen) == ({"sealed": 1}, [staged.round] * 2)


def test_the_api_survives_a_restart_of_its_database_and_tells_strangers_nothing_of_where_it_is(
    tmp_path: Path, postgresql: engines.Server, postgresql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with live.serve(tmp_path, database=postgresql_url, metrics="on") as server:
        anyone = server.anyone()
        assert anyone.get("/v1/rounds").status_code == 200
        about = anyone.get("/v1/server").json()
        postgresql.stop()
        try:
            answer = anyone.get("/v1/rounds")
            assert (answer.status_code, answer.json()["code"]) == (503, "database_unreachable")
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["request_id"] in answer.json()["hint"]
            ready = until(lambda: (got := anyone.get("/readyz")).status_code == 503 and got)
            signed = anyone.post("/v1/accounts", json=server.stranger().registration(about))
            assert (signed.status_code, signed.json()["code"]) == (503, "database_unreachable")
            for text in (
                answer.text,
                signed.text,
                ready.text,
                anyone.get("/v1/server").text,
                anyone.get("/v1/pool").text,
            ):
                for word in (
                    "127.0.0.1",
                    str(postgresql.port),
                    "postgres",
                    "psycopg",
                    "sqlalche",
                    "connection",
                    "setting",
                ):
                    assert word not in text.lower(), (word, text)
                assert postgresql.password not in text
            # The operator reads where, and what to do.
            (line,) = (record for record in caplog.records if answer.json()["request_id"] in record.getMessage())
            assert str(postgresql.port) in line.getMessage() and "PostgreSQL" in line.__dict__["facts"]["hint"]
            assert ready.json()["checks"]["database"] == "database_unreachable"
            assert anyone.get("/healthz").status_code == 200
            assert "acclimate_ready 0.0" in anyone.get("/metrics").text
        finally:
            postgresql.start()
        until(lambda: anyone.get("/readyz").status_code == 200)
        assert anyone.get("/v1/rounds").json() == []
