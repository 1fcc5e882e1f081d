"""What processes log, and what never stands there."""

import contextlib
import json
import logging
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import live
from apis import SECRET, acclimate, api, served

from acclimate import config, console
from acclimate.service import accounts

__all__ = ["served"]


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


def test_what_the_event_loop_repeats_fills_no_log(tmp_path: Path) -> None:
    file = console.RotatingFile(tmp_path / "log")
    handler = console.Handler(file)
    for moment in (0.0, 1.0, 59.0, 61.0):
        record = logging.LogRecord(
            "asyncio", logging.ERROR, "", 0, "socket.accept() out of system resource", None, None
        )
        record.created = 1e9 + moment
        handler.emit(record)
    file.close()
    assert (tmp_path / "log").read_text("utf-8").count("out of system resource") == 2
