"""A real S3 server for tests: SeaweedFS on free ports, in a folder of its own, with two logins; started once, killed at the end.

The logins: `owner` may do everything, `reader` may only list and read; whoever comes with another key is refused. A test that asks for
`s3_place` has the owner's login in its environment, and a prefix of its own in the bucket `blobs`.
"""

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from chosen_ports import free_ports

WEED = Path(sys.executable).with_name("weed")
BUCKET = "blobs"
SECRETS = {"owner": "owners-secret", "reader": "readers-secret"}
_START_SECONDS = 240.0


@dataclass
class Server:
    """A SeaweedFS of one process: master, volume, filer and S3 gateway."""

    folder: Path
    ports: list[int] = field(default_factory=lambda: free_ports(9))
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def start(self) -> None:
        identities = [
            {"name": name, "credentials": [{"accessKey": name, "secretKey": secret}], "actions": actions}
            for (name, secret), actions in zip(SECRETS.items(), (["Admin"], ["Read", "List"]), strict=True)
        ]
        config = self.folder / "identities.json"
        config.write_text(json.dumps({"identities": identities}), "utf-8")
        s3, s3_rpc, master, master_rpc, volume, volume_rpc, filer, filer_rpc, lance = self.ports
        command = [str(WEED), "server", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self.folder}"]
        command += [f"-s3.port={s3}", f"-s3.port.grpc={s3_rpc}", f"-s3.config={config}", "-s3.port.iceberg=0"]
        command += [f"-s3.port.lance={lance}", "-s3.autoCreateBucket=false", f"-s3.localSocket={self.folder}/s3.sock"]
        command += [f"-master.port={master}", f"-master.port.grpc={master_rpc}", "-master.telemetry=false"]
        command += [
            "-master.volumeSizeLimitMB=64",
            "-master.electionTimeout=1s",
            f"-volume.port={volume}",
            f"-volume.port.grpc={volume_rpc}",
        ]
        command += ["-volume.max=40", "-volume.index=leveldb", "-volume.minFreeSpacePercent=1"]
        command += [
            f"-filer.port={filer}",
            f"-filer.port.grpc={filer_rpc}",
            f"-filer.localSocket={self.folder}/filer.sock",
        ]
        # It needs about 120 MiB; with a limit near that its collector takes a sixth of a core, idle or not.
        environment = {**os.environ, "GOMEMLIMIT": "600MiB", "GOMAXPROCS": "2"}
        with (self.folder / "weed.log").open("ab") as log:
            # With whoever starts it, it ends: a killed test run must not leave a server.
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command] if shutil.which("setpriv") else command,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip
        self._await()

    def _await(self) -> None:
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until:
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "weed.log").read_text("utf-8", "replace")[-2000:]
            with contextlib.suppress(Exception):
                if BUCKET not in [bucket["Name"] for bucket in self.client().list_buckets()["Buckets"]]:
                    self.client().create_bucket(Bucket=BUCKET)
                # The gateway answers before there is a volume to write to.
                self.client().put_object(Bucket=BUCKET, Key="started", Body=b"yes")
                return
            time.sleep(0.2)
        raise AssertionError((self.folder / "weed.log").read_text("utf-8", "replace")[-2000:])

    def stop(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def client(self, login: str = "owner") -> Any:
        """boto3, for what a test does behind the store's back."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=login,
            aws_secret_access_key=SECRETS[login],
            config=Config(connect_timeout=2, read_timeout=10, retries={"total_max_attempts": 1}),
        )

    def keys(self, prefix: str) -> list[str]:
        found = self.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return sorted(item["Key"].removeprefix(prefix) for item in found)

    def uploads(self, prefix: str) -> list[str]:
        """Keys of the uploads in parts that were begun and neither completed nor given up."""
        found = self.client().list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads") or []
        return [upload["Key"].removeprefix(prefix) for upload in found]


class Gate:
    """A way to the server that can fail.

    `refuse` answers so many requests with a 503, `cut` closes so many answers after some bytes, `hang` keeps requests unanswered while set.
    """

    def __init__(self, server: Server) -> None:
        self._to = server.ports[0]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.refuse = self.cut = 0
        self.after = 1 << 20
        self.hang = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.hang = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, socket.create_connection(("127.0.0.1", self._to)) as far:
            there = threading.Thread(target=self._there, args=(near, far), daemon=True)
            there.start()
            self._back(near, far)
            there.join()

    def _there(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(1 << 16):
                while self.hang:
                    time.sleep(0.05)
                if self.refuse:
                    self.refuse -= 1
                    near.sendall(b"HTTP/1.1 503 Slow\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    break
                far.sendall(data)
        _hang_up(near, far)

    def _back(self, near: socket.socket, far: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 16):
                passed += len(data)
                if self.cut and passed > self.after:
                    self.cut -= 1
                    break
                near.sendall(data)
        _hang_up(near, far)


def _hang_up(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@functools.cache
def server() -> Server:
    """The one server of this test run."""
    found = Server(Path(tempfile.mkdtemp(prefix="acclimate-s3-")))
    atexit.register(shutil.rmtree, found.folder, ignore_errors=True)
    atexit.register(found.stop)
    found.start()
    return found


def log_in(monkeypatch: pytest.MonkeyPatch, login: str, secret: str = "") -> None:
    """Have this process, and what it starts, use a login, and nothing of this machine's own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    if login:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", login)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret or SECRETS[login])


@dataclass(frozen=True)
class Place:
    """Where a test's blobs are: what the settings `blobs` and `blobs_endpoint` take, and the prefix of their keys."""

    server: Server
    prefix: str

    @property
    def blobs(self) -> str:
        return f"s3://{BUCKET}/{self.prefix.rstrip('/')}"

    @property
    def settings(self) -> dict[str, str]:
        return {"blobs": self.blobs, "blobs_endpoint": self.server.endpoint}

    def keys(self) -> list[str]:
        return self.server.keys(self.prefix)


@pytest.fixture
def s3_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """An empty place of the owner's."""
    log_in(monkeypatch, "owner")
    place = Place(server(), f"{uuid.uuid4().hex}/")
    yield place
    for key in place.keys():
        place.server.client().delete_object(Bucket=BUCKET, Key=place.prefix + key)
