"""Bad requests and bad days of the API: malformed bodies, unknown addresses, a busy database, corrupt blobs, a port that is taken."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading

import httpx
import live
import pytest
from by_hand import ada, evaluate_all, prepared_round, publish_checked, refused, release_share, served, staged
from sqlalchemy import insert
from waiting import WITHIN, until

from acclimate.store import seals
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

__all__ = ["ada", "served", "staged"]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "body"),
        (b"{not json", "body"),
        (b"[]", "body"),
        (b'{"type": "EntrantRegistered"}', "fields"),
        (b'{"type": "ClosingExtended", "round": "r", "fields": {}, "by": "k", "sig": "s"}', "type"),
        (b"\xff\xfe", "body"),
    ],
)
def test_bad_bodies_are_told_what_is_wrong(staged, ada, body, word):
    answer = ada.http.post(f"{staged.path}/entrants", content=body, headers={"Content-Type": "application/json"})
    problem = refused(answer, "request_invalid", 422)
    assert any(word in line for line in problem["problems"]), problem


def test_all_problems_of_a_body_are_told_and_nothing_extra_is_taken(staged, ada):
    request = ada.sign("EntrantRegistered", staged.round, entrant="ada", ed25519=ada.public, conflicts=[])
    request["fields"] |= {"entrant": 7, "conflicts": "none", "admin": True}
    request["at"] = "2027-03-01T00:00:00.000000Z"
    problem = refused(ada.post(f"{staged.path}/entrants", request), "request_invalid", 422)
    for word in ("fields.entrant", "fields.conflicts", "fields.admin", "at"):
        assert any(line.startswith(word) for line in problem["problems"]), (word, problem["problems"])


def test_a_body_beyond_the_limit_is_refused_unread(staged, ada):
    answer = ada.http.post(f"{staged.path}/entrants", content=b" " * (17 << 20))
    refused(answer, "request_invalid", 413)
    answer = ada.http.post(f"{staged.path}/entrants", content=(b" " * (1 << 20) for _ in range(17)))
    refused(answer, "request_invalid", 413)
    # Far more to make of it than it is long.
    for content in (b"[" + b"{}," * 600_000 + b"{}]", (b'{"a":1},' * 1000 for _ in range(600))):
        answer = ada.http.post(f"{staged.path}/entrants", content=content)
        assert "values and keys" in refused(answer, "request_invalid", 413)["detail"]


def test_an_organizers_upload_has_its_limits_too(tmp_path):
    with live.serve(tmp_path, upload_limit=100) as served:
        organizer = served.organizer()
        data = b"x" * 101
        refused(organizer.put(f"/v1/blobs/{digests.of_bytes(data)}", data), "upload_mismatch")
        refused(organizer.put("/v1/blobs/nonsense", b"x"), "blob_unknown")
        assert organizer.put(f"/v1/blobs/{digests.of_bytes(b'x')}", b"x").json()["size"] == 1
        assert organizer.put(f"/v1/blobs/{digests.of_bytes(b'')}", b"").json()["size"] == 0


def test_unknown_addresses_methods_and_entries(served):
    anyone = served.anyone()
    refused(anyone.get("/v1/nothing"), "not_found", 404)
    refused(anyone.delete("/v1/rounds"), "not_found", 405)
    refused(anyone.get("/v1/log/proof/0"), "entry_unknown", 404)
    refused(anyone.get("/v1/log/proof/-1"), "request_invalid", 422)
    for number in ("1_0", "+1", "%201", "1%20", "01", "1.0", "%D9%A1", "-0"):
        for address in (
            f"/v1/log/proof/{number}",
            f"/v1/log/entries?start=0&end={number.replace('+', '%2B')}",
            f"/v1/rounds/nowhere/records?start={number.replace('+', '%2B')}",
            f"/v1/rounds/nowhere/ranking?version={number.replace('+', '%2B')}",
        ):
            refused(anyone.get(address), "request_invalid", 422)
    refused(anyone.get("/v1/log/proof/99999999999999999999"), "request_invalid")
    refused(anyone.get("/v1/log/entries", params={"start": 0, "end": 1}), "entry_unknown")
    refused(anyone.get("/v1/log/entries", params={"start": 1, "end": 1}), "request_invalid")
    refused(anyone.get("/v1/log/consistency", params={"first": 0, "second": 5}), "entry_unknown")
    for part in ("", "/records", "/stages", "/definition", "/ranking", "/bundle", "/report", "/files/x"):
        refused(anyone.get(f"/v1/rounds/nowhere{part}"), "round_unknown", 404)
    assert anyone.get("/readyz").json()["status"] == "ready"


def test_a_request_id_of_the_caller_is_kept_where_it_is_harmless(served):
    anyone = served.anyone()
    assert anyone.get("/healthz", headers={"X-Request-Id": "abc-12345"}).headers["X-Request-Id"] == "abc-12345"
    assert anyone.get("/healthz", headers={"X-Request-Id": "<script>"}).headers["X-Request-Id"] != "<script>"


def test_records_come_in_pages(staged, ada):
    anyone = staged.live.anyone()
    everything = anyone.get(f"{staged.path}/records").json()
    assert len(everything) > 4

    def page(**parameters):
        return anyone.get(f"{staged.path}/records", params=parameters)

    assert page(limit=1).json() == everything[:1]
    assert page(start=everything[2]["index"], limit=2).json() == everything[2:4]
    assert page(start=everything[2]["index"]).json() == everything[2:]
    assert page(start=10**6).json() == []
    for bad in ({"start": -1}, {"limit": 0}, {"limit": "all"}):
        refused(page(**bad), "request_invalid", 422)


def test_a_report_in_the_making_keeps_nobody_else_waiting(staged, ada):
    served = staged.live
    for index, document in list(prepared_round(staged, ada).items())[:2]:
        release_share(staged, index, document)
    served.tick()
    evaluate_all(staged)
    assert served.tick() == ["EvaluationFinished"]
    publish_checked(staged, served.organizer().get(f"{staged.path}/ranking").json())
    # A pipe where the draft is written: the maker waits in it until somebody reads.
    pipe = served.settings.reports / staged.round / ".draft-report.html.partial"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    answers, address = [], f"{staged.path}/report"

    def ask(timeout):
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.Client(base_url=served.url, trust_env=False, timeout=timeout) as http,
        ):
            answers.append(http.get(address))

    makers = [threading.Thread(target=ask, args=(60,)) for _ in range(60)]
    for thread in makers:
        thread.start()
    try:
        until(lambda: len(answers) == 59)
        assert served.anyone().get(staged.path, timeout=WITHIN).status_code == 200
        for answer in answers:
            refused(answer, "busy", 503)
            assert int(answer.headers["Retry-After"]) >= 1
        refused(served.anyone().get(f"{staged.path}/bundle", timeout=WITHIN), "busy", 503)
    finally:
        assert "ada" in pipe.read_text("utf-8")
        for thread in makers:
            thread.join()
    for left in pipe.parent.iterdir():
        left.unlink()
    assert "ada" in served.anyone().get(address).text


def test_rounds_are_folded_before_the_first_request(tmp_path):
    with live.serve(tmp_path) as first:
        made = live.create(first, tmp_path)
    with live.serve(tmp_path) as second:
        assert second.store.recall(made.round).phase == "draft"
    # A round whose definition is lost is no reason not to serve the others.
    first.store.blobs.path(made.fields["definition"]).unlink()
    with live.serve(tmp_path) as third:
        assert third.store.recall(made.round) is None
        assert third.anyone().get("/healthz").status_code == 200
        refused(third.anyone().get(made.path), "blob_unknown")


def test_a_busy_database_is_503_with_retry_after(served, monkeypatch):
    from acclimate import database

    someone = served.stranger("late")
    with served.store.transaction(), monkeypatch.context() as patch:
        patch.setattr(database, "WAIT_SECONDS", 0.05)
        answer = someone.post("/v1/accounts", someone.registration())
    refused(answer, "busy", 503)
    assert int(answer.headers["Retry-After"]) >= 1
    assert someone.post("/v1/accounts", someone.registration()).status_code == 201


def test_what_nobody_foresaw_tells_the_caller_nothing_but_the_request_id(served, caplog):
    staged_row = {"round": "r", "seal": "sha256:" + "1" * 64, "kind": "real", "header": {}, "envelopes": []}
    with served.store.transaction() as tx:
        rest = "" if served.store.engine.dialect.name == "sqlite" else " CASCADE"
        tx.connection.exec_driver_sql(f"DROP TABLE stages{rest}")
        with contextlib.suppress(Exception):
            tx.execute(insert(seals), {**staged_row, "number": 0, "received": ""})
    anyone = served.anyone()
    organizer = served.organizer()
    assert organizer.get("/v1/rounds").status_code == 200
    with served.store.transaction() as tx:
        tx.connection.exec_driver_sql("ALTER TABLE rounds RENAME TO gone")
    answer = anyone.get("/v1/rounds")
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (500, "internal_error")
    assert "gone" not in answer.text and "Traceback" not in answer.text and "sql" not in answer.text.lower()
    assert problem["request_id"] in problem["detail"]
    assert any(problem["request_id"] in record.getMessage() for record in caplog.records)
    assert served.anyone().get("/healthz").status_code == 200


def test_a_corrupt_blob_is_never_served_as_the_definition(served, tmp_path):
    staged = live.create(served, tmp_path)
    served.store._competitions.clear()
    path = served.store.blobs.path(staged.fields["definition"])
    path.chmod(0o644)
    path.write_bytes(b"other")
    served.store.folds._kept.clear()
    refused(served.anyone().get(f"{staged.path}/definition"), "blob_corrupt", 500)


def test_the_process_says_where_it_listens_and_ends_when_asked(tmp_path):
    code = (
        "import sys, pathlib; from acclimate import config; from acclimate.api import server;"
        "server.serve(config.load(pathlib.Path(sys.argv[1]), environ={}, given={'port': 0}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "data")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split(" on ")[1].split(" ")[0]
        until(lambda: _answers(url))
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=WITHIN)
    assert rest == ""
    assert [json.loads(line)["event"] for line in errors.splitlines()] == ["started", "stopped"]
    assert process.returncode == 0
    assert (tmp_path / "data" / "VERSION").read_text() == "1\n"


def _answers(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
    return False


def test_a_taken_port_is_a_refusal(served):
    from acclimate.api import server

    port = int(served.url.rpartition(":")[2])
    with pytest.raises(Refusal) as caught:
        server.listen("127.0.0.1", port)
    assert caught.value.code == "config_invalid"
    with pytest.raises(Refusal):
        server.listen("nowhere.invalid", 0)
