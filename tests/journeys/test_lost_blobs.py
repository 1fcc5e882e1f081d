"""What this server has lost is nobody else's fault; and what downloads take of it."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import live
import pytest
from sqlalchemy import select
from waiting import WITHIN, until

from acclimate import sweeping
from acclimate.api import downloads
from acclimate.client import entrant
from acclimate.client.connection import Client
from acclimate.store import submissions
from acclimate_competitions import digests


@pytest.fixture
def server(tmp_path: Path) -> Iterator[live.Live]:
    with live.serve(tmp_path) as found:
        yield found


def spoil(server: live.Live, digest: str, *, how: str) -> None:
    path = server.store.blobs.path(digest)  # type: ignore[attr-defined]
    data = bytearray(path.read_bytes())
    path.unlink()
    if how == "corrupt":
        # Still the right size, and no longer JSON or safetensors.
        data[: len(data) // 2] = bytes(len(data) // 2)
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["gone", "corrupt"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_lost_file_is_asked_for_again_and_refuses_nobody(
    server: live.Live, tmp_path: Path, how: str, name: str
) -> None:
    staged = live.open_round(server, tmp_path)
    ada = live.enter(staged, server.actor("ada"))
    made, files = live.commit(staged, ada, seed=1)
    live.send_files(ada, made, files)
    digest = digests.of_file(files[name])
    spoil(server, digest, how=how)
    address = f"/v1/submissions/{made['submission']}"
    answer = ada.post(f"{address}/complete")
    assert answer.status_code == 422 and answer.json()["code"] == "upload_mismatch", answer.text
    assert "lost on this server" in answer.json()["detail"] and answer.json()["problems"] == [digest]
    status = ada.get(address).json()
    assert status["state"] == "uploading" and status["missing"] == [digest]
    live.send_files(ada, made, {name: files[name]})
    assert ada.post(f"{address}/complete").json()["state"] == "checking"
    with server.store.snapshot() as tx:
        assert tx.execute(select(submissions.c.reason)).scalars().all() == [""]


def test_the_client_sends_what_was_lost_again(server: live.Live, tmp_path: Path) -> None:
    staged = live.open_round(server, tmp_path)
    ada = live.enter(staged, server.actor("ada"))
    made, files = live.commit(staged, ada, seed=1)
    live.send_files(ada, made, files)
    spoil(server, digests.of_file(files["model.safetensors"]), how="corrupt")
    document = live.manifest(staged, "ada", files)
    mine = entrant.Submission(staged.round, "ada", server.url, document, "", "", submission=made["submission"])
    folder = files["config.json"].parent
    with Client(server.url, token=ada.token) as client:
        outcome = entrant._sent(client, mine, entrant.Sending(folder), missing=[])
    assert outcome["state"] == "checking"


def test_a_seal_that_was_spoilt_here_is_not_its_organizers_fault(server: live.Live, tmp_path: Path) -> None:
    staged = live.create(server, tmp_path)
    seal, envelopes = live.make_seal(staged)
    spoil(server, seal["ciphertext"], how="corrupt")
    record = server.organizer().sign("HoldoutSealed", staged.round, **seal)
    answer = server.organizer().post(f"{staged.path}/seal", {"record": record, "envelopes": envelopes})
    assert (answer.status_code, answer.json()["code"]) == (500, "blob_corrupt"), answer.text


def test_a_full_disk_does_not_tell_how_much_is_free(server: live.Live) -> None:
    size = server.settings.upload_limit - 1
    free = server.store.blobs.free()
    assert free is not None
    if size < free:
        pytest.skip("this machine's disk takes the largest upload")
    host, port = server.url.removeprefix("http://").split(":")
    head = (
        f"PUT /v1/blobs/sha256:{'0' * 64} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.organizer().token}\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {size}\r\nConnection: close\r\n\r\n".encode())
        answer = connection.makefile("rb").read()
    assert b" 507 " in answer and b" free" not in answer


def test_so_many_downloads_at_once_and_an_idle_one_is_ended(
    server: live.Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = live.create(server, tmp_path)
    name = sorted(staged.fields["files"])[0]
    big = server.store.blobs.put_bytes(bytes(32 << 20))
    monkeypatch.setattr("acclimate.service.reading.public_file", lambda *_, **__: big)
    host, port = server.url.removeprefix("http://").split(":")
    address = f"{staged.path}/files/{name}"

    def idle() -> socket.socket:
        """A download of which next to nothing is taken."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(f"GET {address} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert connection.recv(12) == b"HTTP/1.1 200"
        return connection

    def whole() -> bool:
        with contextlib.suppress(httpx.RemoteProtocolError):
            answer = server.anyone().get(address)
            return answer.status_code == 200 and len(answer.content) == 32 << 20
        return False

    # 1. As many as there are places; whoever leaves gives its place back.
    monkeypatch.setattr(downloads, "STALLED", 2 * WITHIN)
    open_ = [idle() for _ in range(downloads.OPEN)]
    answer = server.anyone().get(address)
    assert answer.status_code == 503 and answer.json()["code"] == "busy" and int(answer.headers["Retry-After"]) > 0
    for connection in open_:
        connection.close()
    until(whole)
    # 2. Whoever stays and takes nothing is ended.
    monkeypatch.setattr(downloads, "STALLED", 1.0)
    open_ = [idle() for _ in range(downloads.OPEN)]
    until(whole)
    for connection in open_:
        connection.close()


def test_the_leader_sweeps_at_once_and_then_hourly(server: live.Live, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, sweeper = server.store.blobs, sweeping.Sweeper(server.store.blobs)

    def left() -> Path:
        path = blobs.scratch / "left"
        path.write_bytes(b"")
        os.utime(path, (0, 0))
        return path

    def gone(path: Path, *, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while path.exists() and time.monotonic() < until:
            sweeper.step()
            time.sleep(0.01)
        return not path.exists()

    assert gone(left(), seconds=10)
    assert not gone(left(), seconds=0.2)
    now = time.monotonic
    monkeypatch.setattr("acclimate.sweeping.time.monotonic", lambda: now() + sweeping.EVERY_SECONDS)
    sweeper.step()
    monkeypatch.undo()
    assert gone(blobs.scratch / "left", seconds=10)
