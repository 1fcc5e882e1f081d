"""A round whose blobs lie on a real S3 server, from the first upload to the verified bundle; the server goes away in the middle."""

import base64
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import live as staging
import pytest
from buckets import Place
from live import Actor, Live, Staged
from waiting import until

from acclimate import verify
from acclimate.dispatch import Dispatcher
from acclimate.service import publish
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_runners.local import LocalRunner


@pytest.fixture
def server(tmp_path: Path, s3_place: Place) -> Iterator[Live]:
    with staging.serve(tmp_path, **s3_place.settings) as running:
        yield running


@contextlib.contextmanager
def dispatching(server: Live) -> Iterator[None]:
    stop = threading.Event()
    runner = Dispatcher(
        server.store, server.store.blobs, server.settings, lambda: LocalRunner(server.settings.work, slots=2)
    )
    thread = threading.Thread(target=runner.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def send(staged: Staged, name: str, *, seed: int) -> Actor:
    entrant = staging.enter(staged, staged.live.actor(name))
    made, files = staging.commit(staged, entrant, seed=seed)
    staging.send_files(entrant, made, files)
    assert entrant.post(f"/v1/submissions/{made['submission']}/complete").json()["state"] == "checking"
    until(lambda: entrant.get(f"/v1/submissions/{made['submission']}").json()["state"] == "accepted")
    return entrant


def release(staged: Staged) -> None:
    documents = staged.share_documents(staged.seal, staged.envelopes)
    for index, custodian in list(enumerate(staged.live.custodians(), start=1))[:2]:
        fields = {"seal": staged.seal["seal"], "index": index, "document": digests.of_bytes(documents[index])}
        record = custodian.sign("ShareReleased", staged.round, **fields)
        body = {"record": record, "document": base64.b64encode(documents[index]).decode()}
        assert custodian.post(f"{staged.path}/shares", body).status_code == 200


def test_a_whole_round(server: Live, s3_place: Place, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    with dispatching(server):
        for name, seed in {"ada": 1, "bea": 2}.items():
            send(staged, name, seed=seed)
        server.clock.set(staged.fields["closes"], seconds=1)
        until(lambda: server.phase(staged.round) == "closed")
        # The blobs are away while models are prepared: what could not be fetched or stored is tried again.
        s3_place.server.stop()
        try:
            time.sleep(1)
            with pytest.raises(Refusal, match="no answer"):
                server.store.blobs.probe()
        finally:
            s3_place.server.start()
        until(lambda: server.phase(staged.round) == "prepared")
        release(staged)
        until(lambda: server.phase(staged.round) == "evaluated")
    answer = server.organizer().get(f"{staged.path}/bundle")
    assert answer.status_code == 200, answer.text
    (tmp_path / "bundle.zip").write_bytes(answer.content)
    report = verify.verify(tmp_path / "bundle.zip", log_key=server.anyone().get("/v1/server").json()["log"])
    assert [check for check in report.checks if check.status == "FAILED"] == []
    ranking = publish.ranking(server.store, staged.round).document()
    assert {entry["entrant"] for entry in ranking["ranking"]} == {"ada", "bea"}
    # A public file is served out of the bucket, and nothing is left on this machine.
    name, digest = sorted(staged.fields["files"].items())[0]
    assert digests.of_bytes(server.anyone().get(f"{staged.path}/files/{name}").content) == digest
    assert not (server.settings.data / "blobs").exists()
    assert [path for path in (server.settings.work / "blobs").rglob("*") if path.is_file()] == []


def test_an_upload_that_breaks_off_leaves_nothing(server: Live, s3_place: Place, tmp_path: Path) -> None:
    data = bytes(range(256)) * (80 << 10)
    organizer, digest = server.organizer(), digests.of_bytes(data)
    host, port = server.url.removeprefix("http://").split(":")
    before = s3_place.keys()
    with socket.create_connection((host, int(port))) as raw:
        head = f"PUT /v1/blobs/{digest} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {organizer.token}\r\n"
        raw.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data[: 12 << 20])
        until(lambda: s3_place.server.uploads(s3_place.prefix))
    until(lambda: not s3_place.server.uploads(s3_place.prefix))
    assert s3_place.keys() == before
    wrong = organizer.put(f"/v1/blobs/{digest}", data[:-1] + b"!")
    assert (wrong.status_code, wrong.json()["code"]) == (422, "upload_mismatch")
    assert s3_place.keys() == before and s3_place.server.uploads(s3_place.prefix) == []
    assert organizer.put(f"/v1/blobs/{digest}", data).status_code == 200
    assert server.store.blobs.read(digest) == data


def test_an_upload_to_a_store_that_is_away_is_told_so(server: Live, s3_place: Place) -> None:
    organizer, digest = server.organizer(), digests.of_bytes(b"abc")
    s3_place.server.stop()
    try:
        answer = organizer.put(f"/v1/blobs/{digest}", b"abc")
        assert (answer.status_code, answer.json()["code"]) == (503, "blobs_unreachable")
        assert answer.json()["hint"]
    finally:
        s3_place.server.start()
    assert organizer.put(f"/v1/blobs/{digest}", b"abc").status_code == 200
