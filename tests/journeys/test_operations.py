"""What an operator sees: settings and where they came from, the doctor, health, metrics, logs, and how the API ends."""

import contextlib
import json
import logging
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engines
import httpx
import live
import pytest
from buckets import Gate, Place
from live import Live

from acclimate import config, console, doctor, doctor_machine, doctor_places, facts, metrics, ports
from acclimate.api import lane
from acclimate.redaction import hidden
from acclimate.service import accounts
from acclimate_competitions.errors import Refusal

SECRET = "geheim"
_WITHIN = 60.0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Live]:
    with live.serve(tmp_path, metrics="on") as server:
        yield server


def acclimate(*words: str, code: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
    program = ["-c", code] if code else ["-m", "acclimate"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCLIMATE_")}
    return subprocess.run(
        [sys.executable, *program, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**kept, **environment},
    )


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + _WITHIN
    while not (found := condition()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
    return found


class Api:
    """`acclimate api` as a process of its own."""

    def __init__(self, data: Path, *words: str, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCLIMATE_")}
        self.errors = data.with_name(f"{data.name}.err")
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "acclimate", "api", "--data", str(data), "--port", "0", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**kept, **environment},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " on http://" in line, self.errors.read_text("utf-8")
        self.url = line.split(" on ")[1].split(" ")[0]
        self.port = int(self.url.rpartition(":")[2])
        until(self.answers)

    def answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.get("/healthz").status_code == 200
        return False

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, trust_env=False, timeout=30, **options)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.errors.read_text("utf-8").splitlines()]

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        status = self.process.wait(_WITHIN)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@contextlib.contextmanager
def api(data: Path, *words: str, **environment: str) -> Iterator[Api]:
    started = Api(data, *words, **environment)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.process.wait()
        assert started.process.stdout is not None
        started.process.stdout.close()


# ---- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://acclimate:geheim@db.example.org",
        "postgres//acclimate:geheim@db.example.org/acclimate",
        "postgresql:/acclimate:geheim@db/acclimate",
        "mysql://acclimate:ge:heim@geheim@db/acclimate",
        "host=db user=acclimate password=geheim",
        "acclimate:geheim@db/acclimate",
    ],
)
@pytest.mark.parametrize("name", ["database", "tracking", "blobs_endpoint", "ray_address", "host"])
def test_no_refusal_of_a_setting_prints_a_password(tmp_path: Path, url: str, name: str) -> None:
    file = tmp_path / "acclimate.toml"
    file.write_text(f"{name} = '{url}'\n", "utf-8")
    for given in ({"file": file}, {"environ": {f"ACCLIMATE_{name.upper()}": url}}, {"given": {name: url}}):
        try:
            config.load(tmp_path, **{"environ": {}, **given})
        except Refusal as refusal:
            assert SECRET not in json.dumps(refusal.document()), refusal.problems
            assert "heim" not in json.dumps(refusal.document()), refusal.problems


def test_the_settings_in_force_are_shown_with_their_origin_and_without_passwords(tmp_path: Path) -> None:
    file = tmp_path / "etc" / "acclimate.toml"
    file.parent.mkdir()
    file.write_text(
        '# the office\nrunner = "local"\nblobs = "blobs"\ntracking = "sqlite:///tracking.db"\ndata = "../data"\n',
        "utf-8",
    )
    words = ("config", "--config", str(file), "--database", f"postgresql://a:{SECRET}@db/a", "--json")
    done = acclimate(*words, ACCLIMATE_PORT="9000")
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["file"] == str(file)
    rows = found["settings"]
    assert set(rows) == {"data", *config.SETTINGS}
    assert rows["database"] == {"value": "postgresql+psycopg://a:…@db/a", "from": "argument"}
    assert rows["port"] == {"value": 9000, "from": "environment ACCLIMATE_PORT"}
    assert rows["runner"] == {"value": "local", "from": f"file {file}, line 2"}
    assert rows["host"] == {"value": "127.0.0.1", "from": "default"}
    # Relative paths of a file are meant from where the file is.
    assert rows["blobs"]["value"] == str(file.parent / "blobs")
    assert rows["tracking"]["value"] == f"sqlite:///{file.parent / 'tracking.db'}"
    assert Path(rows["data"]["value"]).resolve() == (tmp_path / "data").resolve()
    text = acclimate(*words[:-1], ACCLIMATE_PORT="9000").stdout
    assert "environment ACCLIMATE_PORT" in text and f"file: {file}" in text and SECRET not in text


def test_all_that_is_wrong_is_told_at_once_with_what_was_meant(tmp_path: Path) -> None:
    file = tmp_path / "acclimate.toml"
    file.write_text("prot = 9000\n[server]\nport = 1\n", "utf-8")
    done = acclimate("config", "--config", str(file), "--json", ACCLIMATE_RUNNNER="ray", ACCLIMATE_HOST="http://here")
    assert done.returncode == 1
    refusal = json.loads(done.stdout)["error"]
    assert refusal["code"] == "config_invalid"
    problems = "\n".join(refusal["problems"])
    assert "ACCLIMATE_RUNNNER" in problems and "did you mean ACCLIMATE_RUNNER?" in problems
    assert "line 1" in problems and "did you mean port?" in problems
    assert "server: there are no tables" in problems
    assert "ACCLIMATE_HOST" in problems and len(refusal["problems"]) == 4
    assert done.stderr.startswith("error: ") and "hint: " in done.stderr


@pytest.mark.parametrize("content", [None, "port = \n", "\xff"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "acclimate.toml"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    with pytest.raises(Refusal) as caught:
        config.load(tmp_path, file=file, environ={})
    assert caught.value.code == "config_invalid" and str(file) in caught.value.problems[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("artifacts", "s3://with space"),
        ("tracking", "mlruns"),
        ("ray_address", "head"),
        ("metrics", "yes"),
        ("drain", "-1"),
        ("log_level", "chatty"),
        ("database", "sqlite:///"),
    ],
)
def test_impossible_values_are_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(Refusal) as caught:
        config.load(tmp_path, environ={f"ACCLIMATE_{name.upper()}": value})
    assert name in caught.value.problems[0]


def test_no_space_for_a_data_folder_is_told_as_that(tmp_path: Path) -> None:
    (tmp_path / f".VERSION.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(Refusal) as caught:
        config.claim(config.load(tmp_path, environ={}))
    assert caught.value.code == "no_space"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:p@ss/w@h:5432/d?sslmode=require", "postgresql://u:…@h:5432/d?sslmode=require"),
        ("postgresql://h/d?user=u&password=geheim&x=1", "postgresql://h/d?user=u&password=…&x=1"),
        ("host=h password='ge heim' dbname=d", "host=h password=… dbname=d"),
        ("Authorization: Bearer acc_0123456789", "Authorization: Bearer …"),
        ("token acc_0123456789abc used", "token acc_… used"),
        ("inv_0123456789abc", "inv_…"),
        ("AGE-SECRET-KEY-1QQQQ", "…"),
        ("-----BEGIN PRIVATE KEY-----\nMC4C\n-----END PRIVATE KEY-----\n", "…\n"),
        ("http://127.0.0.1:8470/v1/rounds at 10:30:00", "http://127.0.0.1:8470/v1/rounds at 10:30:00"),
        ("sqlite:////srv/acclimate.db, ada@example.org", "sqlite:////srv/acclimate.db, ada@example.org"),
    ],
)
def test_secrets_are_taken_out_of_text_and_all_else_stays(text: str, shown: str) -> None:
    assert hidden(text) == shown


# ---- one API a data folder, one a port ----------------------------------------------------------------------------


def test_a_second_api_on_the_same_data_folder_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with api(data) as first:
        done = acclimate("api", "--data", str(data), "--port", "0")
        assert done.returncode == 1 and done.stdout == ""
        assert f"process {first.process.pid} runs the api" in done.stderr and "hint: stop" in done.stderr
        # A taken port is refused before anything is made, and says who is there.
        done = acclimate("api", "--data", str(tmp_path / "other"), "--port", str(first.port))
        assert done.returncode == 1 and "an Acclimate API" in done.stderr
        assert not (tmp_path / "other").exists()
        assert first.end() == 0
    # The lock went with the process, though its file is there.
    assert (data / "api.lock").exists()
    with api(data) as again:
        assert again.get("/readyz").status_code == 200


def test_a_port_of_a_stranger_is_told_apart(tmp_path: Path) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        assert ports.is_taken("127.0.0.1", port)
        assert ports.who_answers("127.0.0.1", port, timeout=0.2) == ""
        found = list(doctor_places.ports_(config.load(tmp_path, environ={}, given={"port": port, "mlflow_port": 0})))
        assert [(one.state, "another program" in one.found) for one in found] == [("missing", True)]
    assert not ports.is_taken("127.0.0.1", port)


# ---- health and metrics --------------------------------------------------------------------------------------------


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
    # Where they lie is for the log, not for whoever asks.
    assert str(folder) not in answer.text and any(str(folder) in record.getMessage() for record in caplog.records)
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


@pytest.mark.parametrize(
    ("statement", "check", "word"),
    [
        ("UPDATE alembic_version SET version_num = '9999'", "schema", "9999"),
        ("UPDATE installation SET id = 'other'", "installation", "another installation"),
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
        assert server.anyone().get("/healthz", timeout=5).status_code == 200
        assert server.anyone().get("/healthz", headers={"Authorization": "Bearer acc_x"}, timeout=5).status_code == 200
        assert server.organizer().get("/v1/rounds", timeout=10).status_code == 200
        answer = until(lambda: (got := server.anyone().get("/readyz", timeout=5)).status_code == 503 and got)
        checks = answer.json()["checks"]
        assert checks["blobs"] == "no answer yet" and checks["database"] == "ok"
        gate.hang = False
        for one in callers:
            one.join()
        until(lambda: server.anyone().get("/readyz").status_code == 200)


def test_who_asks_first_is_told_the_check_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    with live.serve(tmp_path) as server:
        monkeypatch.setattr("acclimate.facts.read", lambda *_, **__: release.wait(_WITHIN))
        monkeypatch.setattr("acclimate.health._STALE", 0.0)
        answer = until(lambda: (got := server.anyone().get("/readyz", timeout=5)).status_code == 503 and got)
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


def test_the_api_survives_a_restart_of_its_database(
    tmp_path: Path, postgresql: engines.Server, postgresql_url: str
) -> None:
    with live.serve(tmp_path, database=postgresql_url, metrics="on") as server:
        anyone = server.anyone()
        assert anyone.get("/v1/rounds").status_code == 200
        postgresql.stop()
        try:
            answer = anyone.get("/v1/rounds")
            assert (answer.status_code, answer.json()["code"]) == (503, "database_unreachable")
            assert int(answer.headers["Retry-After"]) >= 1
            assert postgresql.password not in answer.text
            ready = until(lambda: (got := anyone.get("/readyz")).status_code == 503 and got)
            assert ready.json()["checks"]["database"] == "database_unreachable"
            assert anyone.get("/healthz").status_code == 200
            assert "acclimate_ready 0.0" in anyone.get("/metrics").text
        finally:
            postgresql.start()
        until(lambda: anyone.get("/readyz").status_code == 200)
        assert anyone.get("/v1/rounds").json() == []


# ---- logs ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def logged(path: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """All that this process logs, as a server would write it."""
    file = console.RotatingFile(path)
    handler, root = console.Handler(file), logging.getLogger()
    # The callers' side, which is this test's.
    handler.addFilter(lambda record: not record.name.startswith(("httpx", "httpcore")))
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield lambda: [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        file.close()


def test_each_request_is_one_line_and_no_secret_is_in_any(tmp_path: Path) -> None:
    with live.serve(tmp_path) as served, logged(tmp_path / "log") as lines:
        invitation = accounts.invite(served.store, "organizer")
        newcomer = served.stranger("newcomer", "organizer")
        token = newcomer.post("/v1/accounts", newcomer.registration() | {"invitation": invitation}).json()["token"]
        again = newcomer.post("/v1/accounts", newcomer.registration() | {"name": "x", "invitation": invitation + "no"})
        assert again.status_code >= 400
        staged = live.open_round(served, tmp_path)
        ada = live.enter(staged, served.actor("ada"))
        live.submit_model(staged, ada, seed=1)
        anyone = served.anyone()
        anyone.get("/v1/rounds", params={"token": token, "password": SECRET})
        anyone.get(f"/v1/rounds?key={invitation}", headers={"Authorization": f"Basic {SECRET}"})
        anyone.get("/v1/rounds", headers={"Authorization": f"Bearer {token}x"})
        served.connect(token).get(f"/v1/rounds/{staged.round}/envelopes")
        found = lines()
        secrets = [token, invitation, SECRET, str(ada.identity), *(actor.token for actor in served.actors.values())]
        for seal, envelopes in [(staged.seal, staged.envelopes)]:
            secrets += [
                document.decode("latin-1")[:60] for document in staged.share_documents(seal, envelopes).values()
            ]
            secrets += [envelope["main"][:60] for envelope in envelopes]
    text = (tmp_path / "log").read_text("utf-8")
    assert [secret for secret in secrets if secret in text] == []
    assert "Authorization" not in text and "Bearer" not in text and "?" not in text.replace("(?", "")
    requests = [line for line in found if line["event"] == "request"]
    submitted = next(line for line in requests if line["route"] == "/v1/rounds/{round_id}/submissions")
    assert (submitted["status"], submitted["account"], submitted["round"]) == (201, "ada", staged.round)
    assert submitted["method"] == "POST" and submitted["ms"] >= 0 and submitted["received"] > 100
    assert re.fullmatch(r"[0-9a-f-]{36}", submitted["request_id"])
    for line in found:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["at"])
        assert line["level"] in config.LEVELS and line["event"]


def test_the_lines_of_a_process_go_to_a_file_of_its_owner_where_asked(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "api.log"
    with api(tmp_path / "data", ACCLIMATE_LOG_FILE=str(log)) as server:
        server.get("/v1/rounds")
        assert server.end() == 0
        assert server.errors.read_text("utf-8") == ""
    events = [json.loads(line)["event"] for line in log.read_text("utf-8").splitlines()]
    # Probes are not worth a line.
    assert events == ["started", "request", "stopped"]
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    (tmp_path / "file").touch()
    done = acclimate("api", "--data", str(tmp_path / "data"), "--port", "0", ACCLIMATE_LOG_FILE=f"{tmp_path}/file/x")
    assert done.returncode == 1 and done.stderr.startswith("error: the log file")


def test_a_log_file_begins_anew_when_it_is_full_and_keeps_few(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    file = console.RotatingFile(path, size=1000, keep=2)
    for number in range(100):
        file.write(f"{number:050d}")
    file.close()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["x.log", "x.log.1", "x.log.2"]
    assert all(one.stat().st_size <= 1000 for one in tmp_path.iterdir())
    kept = "".join((tmp_path / name).read_text() for name in ("x.log.2", "x.log.1", "x.log")).split()
    assert [int(line) for line in kept] == list(range(100 - len(kept), 100))


def test_what_libraries_warn_of_and_what_ends_a_thread_is_one_line_too(tmp_path: Path) -> None:
    code = (
        "import logging, pathlib, sys, threading, warnings\n"
        "from acclimate import config, console\n"
        "console.configure(config.load(pathlib.Path(sys.argv[1]), environ={}), part='part')\n"
        "warnings.warn('careful', stacklevel=1)\n"
        "logging.getLogger('alembic.runtime').info('chatty')\n"
        "logging.getLogger('some.library').warning('two\\nlines')\n"
        "threading.Thread(target=lambda: 1 / 0, name='worker').start()\n"
        "console.say('ours', id='x', skipped=None)\n"
        f"raise KeyError('postgresql://u:{SECRET}@h/d')\n"
    )
    done = acclimate(str(tmp_path), code=code)
    assert done.returncode == 1 and SECRET not in done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {line["event"] for line in lines} == {
        "careful", "two\nlines", "part: thread worker ended by ZeroDivisionError", "ours", "part ended by KeyError",
    }  # fmt: skip
    ours = next(line for line in lines if line["event"] == "ours")
    assert ours == {"at": ours["at"], "level": "info", "event": "ours", "id": "x"}
    assert "ZeroDivisionError" in next(line for line in lines if "worker" in line["event"])["traceback"]


# ---- the end -------------------------------------------------------------------------------------------------------


def half_a_request(server: Api) -> socket.socket:
    """A request of which the body's second half is still to come."""
    caller = socket.create_connection(("127.0.0.1", server.port), timeout=_WITHIN)
    caller.sendall(
        b"POST /v1/accounts HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
    )
    return caller


def test_an_api_that_is_asked_to_end_finishes_what_is_under_way(tmp_path: Path) -> None:
    with api(tmp_path / "data", ACCLIMATE_METRICS="on") as server, half_a_request(server) as caller:
        until(lambda: "acclimate_http_requests_in_progress 2.0" in server.get("/metrics").text)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not server.answers())
        assert server.process.poll() is None
        caller.sendall(b'"a": 123}')
        assert caller.recv(100).startswith(b"HTTP/1.1 422 ")
        assert server.process.wait(_WITHIN) == 0
        assert [line["event"] for line in server.lines()][-2:] == ["request", "stopped"]


def test_a_stopping_api_says_so_while_it_still_answers_and_a_second_signal_hurries_it(tmp_path: Path) -> None:
    with api(tmp_path / "data", ACCLIMATE_DRAIN="300") as server, half_a_request(server):
        assert server.get("/readyz").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        answer = until(lambda: (got := server.get("/readyz")).status_code == 503 and got)
        assert answer.json()["checks"]["stopping"] == "the server is stopping"
        assert server.get("/v1/rounds").status_code == 200
        # It would drain for minutes, and then wait for the half request.
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(_WITHIN)


# ---- clocks --------------------------------------------------------------------------------------------------------

_AN_HOUR_AHEAD = """
CREATE OR REPLACE FUNCTION acclimate_now() RETURNS text LANGUAGE sql VOLATILE AS $$
  SELECT to_char((clock_timestamp() + interval '1 hour') AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') $$
"""


def test_a_clock_that_differs_from_the_databases_is_told_at_the_start_and_by_the_doctor(
    tmp_path: Path, postgresql: engines.Server, postgresql_url: str
) -> None:
    data, name = tmp_path / "data", postgresql_url.rpartition("/")[2]
    with api(data, ACCLIMATE_DATABASE=postgresql_url) as server:
        assert server.end() == 0
    assert not any("clock" in line["event"] for line in server.lines())
    postgresql.sql(_AN_HOUR_AHEAD, database=name)
    with api(data, ACCLIMATE_DATABASE=postgresql_url) as server:
        assert server.get("/readyz").status_code == 200
        assert server.get("/readyz").json()["clock_offset"] > 3000
        server.end()
    assert any(re.search(r"the database's clock is (3600|3599)", line["event"]) for line in server.lines())
    settings = config.load(data, environ={"ACCLIMATE_DATABASE": postgresql_url})
    found = {one.name: one for one in doctor_places.database_(settings)}
    assert found["database clock"].state == "warning" and re.search(r"\+(3600|3599)", found["database clock"].found)
    assert found["installation"].state == "ok"


# ---- the doctor ----------------------------------------------------------------------------------------------------


def test_the_doctor_looks_at_everything_and_changes_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    done = acclimate("doctor", "--data", str(data), "--json", ACCLIMATE_PORT="0", ACCLIMATE_MLFLOW_PORT="0")
    found = json.loads(done.stdout)
    states = {one["name"]: one["state"] for one in found["findings"]}
    assert {"python", "extra server", "extra runner", "torch", "ray", "cpu", "open files", "space data", "isolation",
            "data folder", "database", "blobs", "key log.pem", "mlflow"} <= set(states)  # fmt: skip
    assert done.returncode == 0 and found["ok"] and "missing" not in states.values()
    assert all(one["hint"] for one in found["findings"] if one["state"] == "warning" and "busy" not in one["found"])
    assert not data.exists()


def test_the_doctor_of_a_core_install_says_what_to_install(tmp_path: Path) -> None:
    heavy = ("torch", "transformers", "ray", "mlflow", "sqlalchemy", "alembic", "psycopg", "fastapi", "uvicorn", "s3fs")
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {heavy!r}: raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from acclimate.cli.main import run\n"
        "run()\n"
    )
    done = acclimate("doctor", "--data", str(tmp_path / "data"), code=code)
    assert done.returncode == 1
    assert 'pip install "acclimate[server]"' in done.stdout and 'pip install "acclimate[runner]"' in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "needed for running a server here: extra server, extra runner" in done.stderr


@pytest.mark.parametrize("wrong", ["password", "port"])
def test_the_doctor_tells_a_database_that_cannot_be_used_without_its_password(
    tmp_path: Path, postgresql: engines.Server, postgresql_url: str, wrong: str
) -> None:
    url = postgresql_url.replace(postgresql.password, SECRET)
    if wrong == "port":
        url = url.replace(f":{postgresql.port}/", ":1/")
    settings = config.load(tmp_path, environ={}, given={"database": url, "runner": "local"})
    found = [one for one in doctor.examine(settings) if one.name == "database"]
    assert [one.state for one in found] == ["missing"] and found[0].hint
    assert SECRET not in json.dumps(found[0].document())


def test_the_doctor_reads_a_running_server(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = served.settings
    found = {one.name: one for check in (doctor_places.database_, doctor_places.blobs_, doctor_places.keys)
             for one in check(settings)}  # fmt: skip
    assert {one.state for one in found.values()} == {"ok"}, found
    (settings.keys / "log.pem").chmod(0o644)
    assert [one.state for one in doctor_places.keys(settings)] == ["missing", "ok"]
    with config.lock(settings, "api"):
        assert f"api (process {os.getpid()})" in next(iter(doctor_places.folder(settings))).found
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example.org:3128")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert [one.state for one in doctor_machine.proxies(settings)] == ["warning"]
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    assert [one.state for one in doctor_machine.proxies(settings)] == ["ok"]


def test_a_check_that_hangs_costs_the_doctor_its_own_line_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hangs(_: config.Settings) -> list[doctor.Finding]:
        release.wait()
        return []

    def fails(_: config.Settings) -> list[doctor.Finding]:
        raise RuntimeError(f"http://u:{SECRET}@h")

    checks = {"python": doctor_machine.python, "database": hangs, "clock": fails}
    monkeypatch.setattr(doctor, "CHECKS", checks)
    found = {one.name: one for one in doctor.examine(config.load(tmp_path, environ={}), within=0.5)}
    release.set()
    assert {name: one.state for name, one in found.items()} == {
        "python": "ok",
        "database": "missing",
        "clock": "warning",
    }
    assert SECRET not in found["clock"].found


def test_a_cluster_that_does_not_answer_is_missing(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    found = list(doctor_machine.ray(config.load(tmp_path, environ={}, given={"ray_address": address})))
    assert found[0].state == "missing" and address in found[0].found
    assert found[1].name == "ray token" and "RAY_AUTH" in found[1].hint


def test_a_file_with_a_login_that_others_may_read_is_told(tmp_path: Path) -> None:
    file = tmp_path / "acclimate.toml"
    file.write_text(f'database = "postgresql://u:{SECRET}@h/d"\n', "utf-8")
    file.chmod(0o644)
    found = list(doctor_places.folder(config.load(tmp_path / "data", file=file, environ={})))
    assert [(one.name, one.state) for one in found] == [("data folder", "ok"), ("config file", "warning")]
    file.chmod(0o600)
    assert len(list(doctor_places.folder(config.load(tmp_path / "data", file=file, environ={})))) == 1
