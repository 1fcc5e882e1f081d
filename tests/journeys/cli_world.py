"""A real API with a real store for actors at their command lines, in this process: only the database's clock is set by the test.

The dispatcher's part that needs no model (scheduled transitions, the acceptance of a checked submission) is called through the same
service functions that the dispatcher calls. A `Cheat` stands between client and server, as whoever stole the server would.
"""

import contextlib
import hashlib
import io
import json
import re
import shutil
import socket
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import Run, done
from in_threads import serving
from safetensors.numpy import save_file

from acclimate import client as actors
from acclimate import config, keys
from acclimate.service import clockwork
from acclimate.service import submit as submitting
from acclimate.store import Store
from acclimate_competitions import definition, records
from acclimate_runners import architectures

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
CUSTODIANS = ("custodian-a", "custodian-b", "custodian-c")
# The database's clock begins a day ago, so that a round can close in the past of everybody's own clock.
YESTERDAY = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 32, "tie_word_embeddings": True, "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip
FILLER = 600_000
"""Bytes of a tokenizer that takes a while to upload."""


@dataclass
class Proxy:
    """Passes bytes on between client and server; once told to, stops in the middle of what a client sends."""

    to: int
    stall_after: int | None = None
    stalled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink, counts in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._pass, args=(source, sink, counts), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        passed = 0
        try:
            while piece := source.recv(16_384):
                passed += len(piece)
                if counts and self.stall_after is not None and passed > self.stall_after:
                    self.stalled.set()
                    source.recv(1)
                    break
                sink.sendall(piece)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                # Closing alone does not wake the thread that reads from the same socket.
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def close(self) -> None:
        self._listener.close()


class World:
    """A server, its clock, and the people's folders."""

    def __init__(self, root: Path) -> None:
        self.root, self.data = root, root / "data"
        self.now = YESTERDAY
        self._running = contextlib.ExitStack()
        self.proxy = Proxy(0)
        self.serve(self.data)
        self.url = f"http://127.0.0.1:{self.proxy.port}"
        self.competition = build_competition(root / "competition")
        self.count = 0

    def serve(self, data: Path, **given: str) -> None:
        """Run the server over a data folder, at the one address that people know."""
        from acclimate.api.app import create_app
        from acclimate.api.server import configure, listen

        self.data, self.settings = data, config.load(data, environ={}, given=given)
        self.store = Store.open(self.settings, clock=lambda: self.now)
        self._running.callback(self.store.close)
        listener = listen("127.0.0.1", 0)
        server = uvicorn.Server(configure(create_app(self.settings, clock=lambda: self.now)))
        self._running.enter_context(serving(server, listener))
        self.proxy.to = listener.getsockname()[1]

    def stop(self) -> None:
        """End the server, for another `serve`."""
        self._running.close()

    def close(self) -> None:
        self.stop()
        self.proxy.close()

    def tick(self, round_id: str, **later: float) -> list[str]:
        """Let the database's time pass, and make the transitions that are due; those of a round."""
        self.now += timedelta(**later)
        done = [line.split(": ") for line in clockwork.tick(self.store, self.settings)]
        return [kind for name, kind in done if name == round_id]

    def accept_checked(self) -> None:
        """What the dispatcher does for each submission whose check has passed."""
        from sqlalchemy import select

        from acclimate.store import submissions

        with self.store.snapshot() as tx:
            waiting = tx.execute(select(submissions.c.id).where(submissions.c.state == "checking")).scalars().all()
        for submission in waiting:
            submitting.accept(self.store, submission)


def build_competition(folder: Path) -> Path:
    """The shipped definition with a few rows a split, and no tokenizer that all must share."""
    raw = (definition.shipped("digits") / "competition.toml").read_bytes()
    competition = definition.parse(raw)
    folder.mkdir()
    (folder / "competition.toml").write_bytes(raw)
    cluster = competition.ranking.cluster
    number = 0
    for task in competition.tasks:
        for split in ("preparation", "validation", "holdout"):
            names = [f"{task.name}-{number + i}" for i in range(6)]
            number += 6
            columns = {"example": names, "input": [f"in {name}" for name in names]}
            columns["target"] = [task.choices[i % len(task.choices)] for i in range(6)]
            if cluster is not None:
                columns[cluster] = names
            path = folder / "splits" / task.name / f"{split}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()}), path)
    return folder


def with_new_holdout(world: World, to: Path, *, said: str, like: dict[str, str] | None = None) -> Path:
    """The world's splits with another holdout; `like` gives inputs of its first rows by task."""
    shutil.copytree(world.competition / "splits", to / "splits")
    competition = definition.load(world.competition)
    for task in competition.tasks:
        path = to / "splits" / task.name / "holdout.parquet"
        columns = pq.read_table(path).to_pydict()
        columns["example"] = [f"{said}-{task.name}-{i}" for i in range(6)]
        columns["input"] = [f"{said} {task.name} {i}" for i in range(6)]
        if competition.ranking.cluster is not None:
            columns[competition.ranking.cluster] = columns["example"]
        if like and task.name in like:
            columns["input"][0] = like[task.name]
        pq.write_table(pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()}), path)
    return to


def build_model(folder: Path, *, seed: int = 0, filler: int = 0) -> Path:
    """A tiny model that reads strictly; `filler` blanks make its tokenizer file long."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(64)}, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer) + " " * filler)
    random = np.random.default_rng(seed)
    tensors = {
        name: random.normal(size=shape).astype(np.float32) for name, shape in architectures.shapes(CONFIG).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"))
    yield made
    made.close()


def person(acclimate: Run, world: World, name: str, role: str = "entrant") -> Path:
    """A key folder with an account, made once."""
    folder = world.root / "people" / name
    if not (folder / "account.json").exists():
        if role == "custodian":
            done(acclimate("custodian", "keygen", "--name", name, "--keys", folder))
        more: tuple[object, ...] = ()
        if role != "entrant":
            more = ("--invitation", done(acclimate("invite", "--data", world.data, "--role", role)).out.strip())
        done(acclimate("register", "--server", world.url, "--name", name, "--role", role, "--keys", folder, *more))
    return folder


def new_round(acclimate: Run, world: World, *, until: str = "open", closes: str = "+1h") -> str:
    """A round of its own, played up to a phase; its id."""
    me = person(acclimate, world, "organizer", "organizer")
    people = [person(acclimate, world, name, "custodian") for name in CUSTODIANS]
    world.count += 1
    given = [part for folder in people for part in ("--custodian", folder)]
    created = acclimate(
        "round", "create", world.competition, *given, "--opens", "+0s", "--closes", closes, "--closes-latest", "+50h",
        "--name", f"r{world.count}", "--keys", me,
    )  # fmt: skip
    round_id = done(created).out.strip()
    if until == "draft":
        return round_id
    done(acclimate("round", "seal", round_id, world.competition, "--keys", me))
    if until == "sealed":
        return round_id
    for folder in people:
        done(acclimate("custodian", "ack", round_id, "--keys", folder))
    assert world.tick(round_id, seconds=1) == ["RoundOpened"]
    return round_id


def kinds(world: World, round_id: str) -> list[str]:
    with actors.Client(world.url) as client:
        return [record.type for _, record in client.records(round_id)]


Change = Callable[[bytes], bytes]


class Cheat:
    """A stolen server: answers as the true one does, except where the thief wants otherwise; keeps what it is sent."""

    def __init__(self, to: str, changes: dict[str, Change], alias: tuple[str, str]) -> None:
        self.seen: list[tuple[str, str]] = []
        cheat = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                cheat.seen.append((self.command, self.path))
                kept = {name: self.headers[name] for name in ("Authorization", "Content-Type") if name in self.headers}
                found = cheat.http.request(self.command, self.path.replace(*alias), content=body, headers=kept)
                content = found.content
                for address, change in changes.items():
                    if found.is_success and re.search(address, self.path):
                        content = change(content)
                self.send_response(found.status_code)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = answer

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the library's name)
                pass

        self.http = httpx.Client(base_url=to, trust_env=False, timeout=60)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self.http.close()

    def folder(self, folder: Path, to: Path) -> Path:
        """A copy of a key folder whose server this is."""
        shutil.copytree(folder, to)
        account = json.loads((to / "account.json").read_text())
        (to / "account.json").write_text(json.dumps(account | {"server": self.url}))
        return to

    @property
    def written(self) -> list[str]:
        """The addresses to which anything was sent."""
        return [path for method, path in self.seen if method != "GET"]


@contextlib.contextmanager
def cheating(world: World, changes: dict[str, Change], alias: tuple[str, str] = ("-", "-")) -> Iterator[Cheat]:
    """A stolen server; each change is of the answers of addresses that match a pattern; alias: a round that is another's."""
    cheat = Cheat(world.url, changes, alias)
    try:
        yield cheat
    finally:
        cheat.close()


def in_json(**fields: Any) -> Change:
    """A change of an answer: other values for some of its fields."""
    return lambda content: json.dumps(json.loads(content) | fields).encode()


def always(value: Any) -> Change:
    return lambda content: json.dumps(value).encode()


def with_another_file(name: str, data: bytes) -> Change:
    """A change of a bundle: other bytes in one file, and a MANIFEST that agrees."""

    def change(content: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(content)) as source:
            members = {info.filename: source.read(info) for info in source.infolist()}
        (path,) = [member for member in members if member.rpartition("/")[2] == name]
        (manifest,) = [member for member in members if member.rpartition("/")[2] == "MANIFEST"]
        old, new = (hashlib.sha256(d).hexdigest().encode() for d in (members[path], data))
        assert old in members[manifest]
        members |= {path: data, manifest: members[manifest].replace(old, new)}
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as target:
            for member, held in members.items():
                target.writestr(member, held)
        return out.getvalue()

    return change


def forged(world: World, round_id: str, thief: Path, *, organizer: bool) -> tuple[str, Any]:
    """A RoundDefined like a round's, but with a recipient and the signature of a thief: its id, and the answer to …/records."""
    with actors.Client(world.url) as client:
        (_, defined), *_ = client.records(round_id)
    own = keys.load(thief)
    first, *others = defined["custodians"]
    fields = {**defined.fields, "custodians": [first | {"age": own.age_recipient}, *others]}
    if organizer:
        fields["organizer"] = {"name": "organizer", "ed25519": own.public}
    request = records.sign("RoundDefined", "", fields, key=own.ed25519)
    record = records.Record("RoundDefined", request["round"], defined.at, fields, request["by"], request["sig"])
    return record.round, [{"index": 0, "record": record.document()}]
