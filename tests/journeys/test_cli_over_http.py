"""Actors at their command lines, against the real API with a real store; only the database's clock is set by the test.

The dispatcher's part that needs no model (scheduled transitions, the acceptance of a checked submission) is called through the same
service functions that the dispatcher calls.
"""

import base64
import contextlib
import hashlib
import io
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
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
from commands import Ran, Run
from safetensors.numpy import save_file

from acclimate import client as actors
from acclimate import config, custody, keys, log, sealing
from acclimate.client.entrant import definition_of
from acclimate.service import clockwork, identity
from acclimate.service import submit as submitting
from acclimate.store import Store
from acclimate_competitions import definition, digests, records
from acclimate_competitions.errors import Refusal
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
            far = socket.create_connection(("127.0.0.1", self.to))
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
        from acclimate.api.app import create_app
        from acclimate.api.server import configure, listen

        self.root, self.data = root, root / "data"
        self.now = YESTERDAY
        self.settings = config.load(self.data, environ={})
        self.store = Store.open(self.settings, clock=lambda: self.now)
        self._server = uvicorn.Server(configure(create_app(self.settings, clock=lambda: self.now)))
        listener = listen("127.0.0.1", 0)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        self._listener = listener
        self.proxy = Proxy(listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.proxy.port}"
        self.competition = build_competition(root / "competition")
        self.count = 0

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()
        self.proxy.close()
        self.store.close()

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


def done(ran: Ran) -> Ran:
    assert ran.code == 0, ran.err
    return ran


def refused(ran: Ran, code: str) -> str:
    """A refusal for people on stderr, and for programs on stdout; its sentence."""
    assert ran.code == 1, ran
    assert "Traceback" not in ran.err
    document = ran.json["error"]
    assert document["code"] == code, document
    assert f"error: {document['sentence']}\n" in ran.err
    return str(document["sentence"])


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


# ---- a stolen server -----------------------------------------------------------------------------------------------

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


# ---- accounts ------------------------------------------------------------------------------------------------------


def test_a_token_is_shown_once_kept_privately_and_can_be_renewed(acclimate: Run, world: World) -> None:
    folder = world.root / "people" / "ada"
    register = ("register", "--server", world.url, "--name", "ada", "--keys", folder, "--json")
    first = done(acclimate(*register)).json
    assert first["token"].startswith("acc_")
    assert (folder / "account.json").stat().st_mode & 0o077 == 0
    assert done(acclimate(*register)).json["token"] is None
    with actors.Client(world.url) as client:
        assert first["log"] == client.server()["log"] == (folder / "log.vkey").read_text().strip()
    world.now += timedelta(seconds=1)
    second = done(acclimate(*register, "--renew")).json["token"]
    assert second != first["token"]
    # The old token has ended.
    stale = json.loads((folder / "account.json").read_text()) | {"token": first["token"]}
    with actors.Client(world.url, token=stale["token"]) as client, pytest.raises(Refusal) as caught:
        client.submission("x")
    assert caught.value.code == "token_invalid"


def test_a_name_is_taken_and_a_role_needs_an_invitation(acclimate: Run, world: World) -> None:
    person(acclimate, world, "bea")
    other = world.root / "people" / "other-bea"
    ran = acclimate("register", "--server", world.url, "--name", "bea", "--keys", other, "--json")
    assert "bea" in refused(ran, "name_taken")
    assert f"no account was made; the new key in {other} is kept" in ran.err
    assert not (other / "log.vkey").exists()
    refused(
        acclimate(
            "register", "--server", world.url, "--name", "boss", "--role", "organizer", "--keys", other, "--json"
        ),
        "invitation_invalid",
    )
    code = done(acclimate("invite", "--data", world.data, "--role", "organizer", "--json")).json["invitation"]
    options = ("--role", "organizer", "--keys", other, "--invitation", code, "--json")
    done(acclimate("register", "--server", world.url, "--name", "boss", *options))
    third = world.root / "people" / "third"
    options = ("--role", "organizer", "--keys", third, "--invitation", code, "--json")
    refused(acclimate("register", "--server", world.url, "--name", "boss-two", *options), "invitation_invalid")


def test_a_wrong_token_is_refused_with_a_way_out(acclimate: Run, world: World) -> None:
    folder = person(acclimate, world, "cleo")
    account = json.loads((folder / "account.json").read_text())
    (folder / "account.json").write_text(json.dumps(account | {"token": "acc_wrong"}))
    round_id = new_round(acclimate, world, until="draft")
    ran = acclimate("submission", "withdraw", "x", "--keys", folder, "--json")
    refused(ran, "submission_unknown")
    ran = acclimate("enter", round_id, "--keys", folder, "--json")
    refused(ran, "token_invalid")
    assert "hint: " in ran.err


# ---- rounds --------------------------------------------------------------------------------------------------------


def test_an_unknown_round_is_refused_everywhere(acclimate: Run, world: World) -> None:
    for command in (
        ("status",),
        ("ranking",),
        ("round", "records"),
        ("round", "bundle", "--out", world.root / "b.zip"),
    ):
        refused(acclimate(*command, "no-such-round", "--server", world.url, "--json"), "round_unknown")
    assert not (world.root / "b.zip").exists()


def test_wrong_dates_and_custodians_are_refused_before_anything_is_sent(acclimate: Run, world: World) -> None:
    me = person(acclimate, world, "organizer", "organizer")
    people = [person(acclimate, world, name, "custodian") for name in CUSTODIANS]
    given = [part for folder in people for part in ("--custodian", folder)]
    create = ("round", "create", world.competition, "--keys", me, "--json", "--name", "wrong")
    with actors.Client(world.url) as client:
        before = len(client.rounds())
        refused(acclimate(*create, *given, "--opens", "2027-03-01T12:00:00", "--closes", "+1h"), "time_invalid")
        refused(acclimate(*create, *given, "--opens", "+2h", "--closes", "+1h"), "guard_failed")
        refused(acclimate(*create, *given), "definition_invalid")
        sentence = refused(acclimate(*create, *given[:4], "--opens", "+0s", "--closes", "+1h"), "definition_invalid")
        assert "custodian-c" in sentence
        ran = acclimate(*create)
        refused(ran, "definition_invalid")
        assert len(ran.json["error"]["problems"]) == 2
        assert len(client.rounds()) == before


def test_a_round_opens_now_unless_told_and_its_baselines_are_named(acclimate: Run, world: World) -> None:
    me = person(acclimate, world, "organizer", "organizer")
    given = [p for name in CUSTODIANS for p in ("--custodian", person(acclimate, world, name, "custodian"))]
    create = ("round", "create", world.competition, *given, "--closes", "+1h", "--keys", me, "--json")
    for name, more in (("unsaid", ()), ("said", ("--opens", "now"))):
        ran = done(acclimate(*create, "--name", name, *more))
        assert records.parse_time(ran.json["opens"]) == world.now
        round_id = ran.json["round"]
        assert f"acclimate submit MODEL --round {round_id} --baseline untrained --keys {me}" in ran.err
        assert "baseline majority" not in ran.err


def test_a_killed_sealing_goes_on_with_the_same_seal(acclimate: Run, world: World) -> None:
    round_id = new_round(acclimate, world, until="draft")
    me = person(acclimate, world, "organizer", "organizer")
    account = actors.load_account(me)

    class Killed(BaseException):
        pass

    def die(done: int, total: int) -> None:
        raise Killed

    with account.connect() as client, pytest.raises(Killed):
        actors.seal_round(client, keys.load(me), round_id, world.competition, progress=die)
    made = json.loads((me / "seals" / round_id / "sealed.json").read_text())
    sealed = done(acclimate("round", "seal", round_id, world.competition, "--keys", me, "--json")).json
    assert sealed["seal"] == made["real"]["fields"]["seal"]
    assert kinds(world, round_id) == ["RoundDefined", "HoldoutSealed"]
    assert list((me / "seals" / round_id).glob("*.sealed")) == []
    again = done(acclimate("round", "seal", round_id, world.competition, "--keys", me, "--json")).json
    assert again == sealed


def test_status_says_what_is_missing_and_json_is_complete(acclimate: Run, world: World) -> None:
    round_id = new_round(acclimate, world, until="sealed")
    ran = done(acclimate("status", round_id[:-3], "--server", world.url))
    assert "draft→[sealed]→open" in ran.out
    assert "shows the protocol, not blindness" in ran.out
    assert "must acknowledge their share" in ran.out
    assert ran.err == ""
    document = done(acclimate("round", "status", round_id, "--server", world.url, "--json")).json
    assert document["phase"] == "sealed"
    assert document["work"] == []
    people = [world.root / "people" / name for name in CUSTODIANS]
    value = done(acclimate("custodian", "ack", round_id, "--keys", people[0], "--json")).json
    assert (value["index"], value["round"]) == (1, round_id)
    # Again: the same entry, not a second one.
    assert done(acclimate("custodian", "ack", round_id, "--keys", people[0], "--json")).json["entry"] == value["entry"]
    ran = done(acclimate("status", round_id, "--keys", people[0]))
    assert "custodian-a (1 of 3, 2 open the seal)" in ran.out
    listed = done(acclimate("round", "list", "--server", world.url, "--json")).json
    assert round_id in [item["round"] for item in listed]


def test_an_organizer_is_no_custodian(acclimate: Run, world: World) -> None:
    round_id = new_round(acclimate, world, until="sealed")
    outsider = person(acclimate, world, "custodian-x", "custodian")
    refused(acclimate("custodian", "ack", round_id, "--keys", outsider, "--json"), "signature_invalid")
    refused(acclimate("custodian", "release", round_id, "--keys", outsider, "--json"), "round_unknown")


def test_the_close_moves_by_signature_only_and_a_round_can_be_voided(acclimate: Run, world: World) -> None:
    round_id = new_round(acclimate, world)
    me = world.root / "people" / "organizer"
    refused(acclimate("round", "extend", round_id, "--closes", "+60h", "--keys", me, "--json"), "guard_failed")
    done(acclimate("round", "extend", round_id, "--closes", "+2h", "--keys", me))
    state = done(acclimate("status", round_id, "--keys", me, "--json")).json
    assert records.parse_time(state["closes"]) == world.now + timedelta(hours=2)
    boss = person(acclimate, world, "another-organizer", "organizer")
    ran = acclimate("round", "void", round_id, "--reason", "I may", "--keys", boss, "--json")
    assert "was defined by" in refused(ran, "signature_invalid")
    # Nor does the server take it, from whoever does not ask their own machine first.
    with actors.load_account(boss).connect() as client, pytest.raises(Refusal) as caught:
        request = records.sign("RoundVoided", round_id, {"reason": "I may"}, key=keys.load(boss).ed25519)
        client.post(round_id, "void", request)
    assert caught.value.code == "role_missing"
    assert round_id in done(acclimate("round", "void", round_id, "--reason", "labels were wrong", "--keys", me)).out
    assert "[voided]" in done(acclimate("status", round_id, "--keys", me)).out
    # Watching a round that has ended ends too.
    watched = done(acclimate("status", round_id, "--keys", me, "--watch"))
    assert watched.out.count("\n") == 1


def test_a_server_does_not_choose_for_whom_or_for_which_round_an_organizer_signs(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    round_id, other = new_round(acclimate, world, until="draft"), new_round(acclimate, world, until="draft")
    prefix = round_id[: -records.ID_DIGITS]
    me, thief = person(acclimate, world, "organizer", "organizer"), person(acclimate, world, "custodian-y", "custodian")
    forgotten = tmp_path / "forgotten"
    shutil.copytree(me, forgotten)
    (forgotten / "rounds.json").unlink()
    commands = (
        ("round", "seal", prefix, world.competition),
        ("round", "extend", prefix, "--closes", "+2h"),
        ("round", "publish", prefix),
        ("round", "void", prefix, "--reason", "a test"),
    )
    # 1: Another round of the same organizer. 2: a forged one whose organizer did not sign it. 3: one of the thief's own.
    forgeries = [forged(world, round_id, thief, organizer=organizer) for organizer in (False, True)]
    for number, (name, answer) in enumerate([(other, None), *forgeries]):
        changes: dict[str, Change] = {f"/rounds/{prefix}[^/]*$": in_json(round=name)}
        if answer is not None:
            changes[r"/records(\?|$)"] = always(answer)
        with cheating(world, changes, alias=(name, round_id if answer is not None else name)) as cheat:
            mine = cheat.folder(me, tmp_path / f"me-{number}")
            lost = cheat.folder(forgotten, tmp_path / f"lost-{number}")
            for command in commands:
                ran = acclimate(*command, "--keys", mine, "--json")
                assert "the server answers with" in refused(ran, "log_inconsistent")
                code = "signature_invalid" if answer is not None else "log_inconsistent"
                refused(acclimate(*command, "--keys", lost, "--json"), code)
            assert cheat.written == []
            if number == 1:
                with actors.Client(cheat.url) as client, pytest.raises(Refusal, match="not defined by the organizer"):
                    definition_of(client, prefix)
    # A folder that lost its list needs the whole id; a beginning of it is not enough.
    ran = acclimate("round", "seal", prefix, world.competition, "--keys", forgotten, "--json")
    assert "has no round that begins with" in refused(ran, "round_unknown")
    assert round_id in ran.err
    assert kinds(world, round_id) == ["RoundDefined"]
    assert done(acclimate("round", "seal", round_id, world.competition, "--keys", forgotten, "--json")).json["seal"]


def test_a_round_has_a_recipient_of_its_own_for_each_custodian(acclimate: Run, world: World, tmp_path: Path) -> None:
    me = person(acclimate, world, "organizer", "organizer")
    people = [json.loads((person(acclimate, world, n, "custodian") / "custodian.json").read_text()) for n in CUSTODIANS]
    for changes in ({"age": people[1]["age"]}, {"backup": people[1]["age"]}, {"backup": people[0]["age"]}):
        given: list[object] = []
        for document in ({**people[0], **changes}, *people[1:]):
            path = tmp_path / f"{document['name']}.json"
            path.write_text(json.dumps(document))
            given += ["--custodian", path]
        dates = ("--opens", "+0s", "--closes", "+1h", "--name", "twice")
        ran = acclimate("round", "create", world.competition, *given, *dates, "--keys", me, "--json")
        assert "age recipient" in refused(ran, "definition_invalid")


def test_records_are_one_json_value(acclimate: Run, world: World) -> None:
    round_id = new_round(acclimate, world, until="sealed")
    value = done(acclimate("round", "records", round_id, "--server", world.url, "--json")).json
    assert [item["record"]["type"] for item in value] == ["RoundDefined", "HoldoutSealed"]
    assert value[0]["index"] < value[1]["index"]


# ---- submissions ---------------------------------------------------------------------------------------------------


def test_a_submission_is_checked_before_it_is_sent(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "dora")
    done(acclimate("enter", round_id, "--keys", me, "--conflict", "works with the organizer"))
    empty = build_model(tmp_path / "empty")
    (empty / "model.safetensors").write_bytes(b"")
    pickled = build_model(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    garbled = build_model(tmp_path / "garbled")
    (garbled / "model.safetensors").write_bytes(b"\x80\x04 a pickle by another name")
    for model in (empty, pickled, garbled, tmp_path):
        ran = acclimate("submit", model, "--round", round_id, "--keys", me, "--json")
        refused(ran, "model_invalid")
        assert "model.safetensors" in ran.err
    refused(acclimate("submit", tmp_path / "none", "--round", round_id, "--keys", me, "--json"), "file_unreadable")
    model = build_model(tmp_path / "fine")
    options = ("--round", round_id, "--keys", me, "--json")
    refused(acclimate("submit", model, *options, "--weights-after", "sell"), "manifest_invalid")
    assert "SubmissionCommitted" not in kinds(world, round_id)
    assert not (me / "submissions").exists()
    stranger = person(acclimate, world, "eve")
    ran = acclimate("submit", model, "--round", round_id, "--keys", stranger, "--json")
    refused(ran, "entrant_unknown")
    assert "acclimate enter" in ran.err
    assert not (stranger / "submissions").exists()


def test_an_upload_that_was_killed_goes_on_as_the_same_submission(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "fay")
    done(acclimate("enter", round_id, "--keys", me))
    model = build_model(tmp_path / "model", filler=FILLER)
    command = ("submit", model, "--round", round_id, "--title", "Tiny", "--weights-after", "publish", "--keys", me)
    world.proxy.stall_after = FILLER // 2
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "acclimate", *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert world.proxy.stalled.wait(30)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
    finally:
        world.proxy.stall_after = None
    kept = [json.loads(path.read_text()) for path in (me / "submissions").iterdir()]
    assert [item["state"] for item in kept] == ["uploading"]
    assert (me / "receipts" / f"{round_id}-{kept[0]['commitment'][7:15]}.committed.tlog-proof").exists()

    # The same command again: it goes on, and waits for the check.
    ran = done(acclimate(*command, "--no-wait", "--json"))
    assert "going on with submission" in ran.err
    value = ran.json
    assert (value["commitment"], value["state"]) == (kept[0]["commitment"], "checking")
    assert "nonce" not in value
    assert kinds(world, round_id).count("SubmissionCommitted") == 1
    world.accept_checked()
    value = done(acclimate(*command, "--json")).json
    assert value["state"] == "accepted"
    receipt = Path(value["receipt"])
    assert receipt.name == f"{round_id}-{value['commitment'][7:15]}.tlog-proof"

    # The receipt stands on its own.
    with actors.Client(world.url) as client:
        vkey = client.server()["log"]
    shown = done(acclimate("receipt", "verify", receipt, "--log-key", vkey, "--json")).json
    assert shown["index"] == value["accepted"]
    assert shown["record"]["type"] == "SubmissionAccepted"
    assert shown["record"]["commitment"] == value["commitment"]

    # Once accepted, the same command changes nothing.
    assert done(acclimate(*command, "--json")).json == value
    listed = done(acclimate("submission", "status", "--keys", me, "--json")).json
    assert [item["state"] for item in listed] == ["accepted"]
    assert kinds(world, round_id).count("SubmissionCommitted") == 1


def test_waiting_ends_when_the_server_has_decided(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "gwen")
    done(acclimate("enter", round_id, "--keys", me))
    model = build_model(tmp_path / "model", seed=1)
    stop = threading.Event()

    def dispatcher() -> None:
        while not stop.wait(0.05):
            world.accept_checked()

    thread = threading.Thread(target=dispatcher)
    thread.start()
    try:
        ran = done(acclimate("submit", model, "--round", round_id, "--keys", me))
    finally:
        stop.set()
        thread.join()
    assert ran.out.startswith("accepted: ")
    short = ran.out.split()[1].rstrip(",")
    done(acclimate("submission", "withdraw", short, "--keys", me))
    assert kinds(world, round_id)[-1] == "SubmissionWithdrawn"
    # Withdrawn is withdrawn; anew needs to be said.
    assert "withdrawn" in done(acclimate("submit", model, "--round", round_id, "--keys", me)).out
    value = done(acclimate("submit", model, "--round", round_id, "--keys", me, "--again", "--no-wait", "--json")).json
    assert value["state"] == "checking"
    assert value["commitment"][7:15] not in short


def test_nothing_is_uploaded_without_a_logged_commitment_nor_accepted_without_a_receipt(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "ines")
    done(acclimate("enter", round_id, "--keys", me))
    model = build_model(tmp_path / "model", seed=5)
    wrong = [None, "7", True]
    with cheating(world, {"/submissions$": lambda content: in_json(index=wrong.pop())(content)}) as cheat:
        mine = cheat.folder(me, tmp_path / "committed")
        while wrong:
            ran = acclimate("submit", model, "--round", round_id, "--keys", mine, "--json")
            assert "is committed, and names no log entry" in refused(ran, "proof_invalid")
        assert set(cheat.written) == {f"/v1/rounds/{round_id}/submissions"}
    # The same with the acceptance, which the commitment's receipt does not stand in for.
    with cheating(world, {"^/v1/submissions/[^/]*$": in_json(state="accepted", accepted_index=None)}) as cheat:
        mine = cheat.folder(mine, tmp_path / "accepted")
        for command in (("submit", model, "--round", round_id), ("submission", "status")):
            ran = acclimate(*command, "--keys", mine, "--json")
            if command[0] == "submit":
                assert "is accepted, and names no log entry" in refused(ran, "proof_invalid")
        assert any(path.endswith("/complete") for path in cheat.written)


def test_the_organizer_submits_for_a_baseline(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me = world.root / "people" / "organizer"
    done(acclimate("enter", round_id, "--baseline", "untrained", "--keys", me))
    model = build_model(tmp_path / "untrained", seed=2)
    options = ("--round", round_id, "--baseline", "untrained", "--no-wait", "--keys", me, "--json")
    value = done(acclimate("submit", model, *options)).json
    assert (value["entrant"], value["state"]) == ("untrained", "checking")
    world.accept_checked()
    assert done(acclimate("submit", model, *options)).json["state"] == "accepted"


def test_nothing_is_taken_after_the_close(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "hal")
    done(acclimate("enter", round_id, "--keys", me))
    model = build_model(tmp_path / "model", seed=3)
    world.now += timedelta(hours=1)
    ran = acclimate("submit", model, "--round", round_id, "--keys", me, "--json")
    sentence = refused(ran, "round_closed")
    assert "closed" in sentence
    assert "received" in sentence


# ---- custody and publication ---------------------------------------------------------------------------------------


def test_shares_are_released_only_when_the_custodians_own_machine_agrees(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    round_id = new_round(acclimate, world)
    a, b, c = (world.root / "people" / name for name in CUSTODIANS)
    # Too early, by the log.
    ran = acclimate("custodian", "release", round_id, "--keys", a, "--json")
    assert "RoundClosed" in refused(ran, "too_early")
    assert "ok           consistency" in ran.err
    inspected = acclimate("custodian", "inspect", round_id, "--keys", a, "--json")
    assert inspected.code == 1
    last = inspected.json["checks"][-1]
    assert (last["name"], last["status"]) == ("RoundClosed", "NOT YET")
    assert world.tick(round_id, hours=1) == ["RoundClosed", "PreparationFinished"]
    inspected = done(acclimate("custodian", "inspect", round_id, "--keys", a, "--json"))
    names = [check["name"] for check in inspected.json["checks"]]
    assert names == [
        "round", "log", "consistency", "records", "witnesses", "RoundClosed", "PreparationFinished", "phase", "clock",
        "dates", "share",
    ]  # fmt: skip
    # Another history than the pinned one: signed by the same log key, over other entries; and a longer one.
    pins = b / "pins.json"
    true = pins.read_text()
    signer = identity.load(world.settings, world.store).signer
    before = log.open_checkpoint(json.loads(true)[round_id]["checkpoint"], log.parse_vkey(signer.vkey)).checkpoint
    fork = log.sign_checkpoint(signer, before.size, digests.leaf_hash(b"another history"))
    for note in (fork, log.sign_checkpoint(signer, before.size + 1000, before.root)):
        changed = json.loads(true)
        changed[round_id]["checkpoint"] = note
        pins.write_text(json.dumps(changed))
        ran = acclimate("custodian", "release", round_id, "--keys", b, "--json")
        assert "does not extend the pinned checkpoint" in refused(ran, "log_inconsistent")
        assert "ok           log" in ran.err
        inspected = acclimate("custodian", "inspect", round_id, "--keys", b, "--json")
        assert [(c["name"], c["status"]) for c in inspected.json["checks"]][-1] == ("consistency", "FAILED")
    # Another organizer, another log than the pinned ones.
    for name in ("organizer", "log"):
        changed = json.loads(true)
        changed[round_id][name] = log.Signer("other", keys.create(tmp_path / name, age=False).ed25519).vkey
        pins.write_text(json.dumps(changed))
        ran = acclimate("custodian", "release", round_id, "--keys", b, "--json")
        assert "another log or organizer" in refused(ran, "log_inconsistent")
    pins.write_text(true)
    assert "ShareReleased" not in kinds(world, round_id)

    released = done(acclimate("custodian", "release", round_id, "--keys", a, "--json"))
    assert released.json["share"] == 1
    assert {check["status"] for check in released.json["checks"]} == {"ok", "NOT CHECKED"}
    # Again: the same release.
    assert (
        done(acclimate("custodian", "release", round_id, "--keys", a, "--json")).json["entry"] == released.json["entry"]
    )
    done(acclimate("custodian", "release", round_id, "--keys", b))
    ran = acclimate("custodian", "release", round_id, "--keys", c, "--json")
    assert "yours is not needed" in refused(ran, "phase_wrong")
    assert "HoldoutOpened" in world.tick(round_id, seconds=1)


def test_a_custodian_is_no_decryption_oracle(acclimate: Run, world: World, tmp_path: Path) -> None:
    """A stolen server shows a real seal as the rehearsal, of this round or of another; it gets no share in clear."""
    other, round_id = (new_round(acclimate, world, until="sealed") for _ in range(2))
    a = world.root / "people" / CUSTODIANS[0]
    with actors.load_account(a).connect() as client:
        real, elsewhere = (client.envelopes(name)["real"] for name in (round_id, other))
    for number, shown in enumerate((real, elsewhere)):
        with cheating(world, {"/envelopes$": in_json(rehearsal=shown)}) as cheat:
            ran = acclimate("custodian", "ack", round_id, "--keys", cheat.folder(a, tmp_path / f"{number}"), "--json")
            assert "is a Share, and only a RehearsalShare will do" in refused(ran, "share_false")
            assert "tell the other custodians" in ran.err
            assert cheat.written == []
    assert "ShareAcknowledged" not in kinds(world, round_id)

    # A true server does not take one either, nor keep it: here of a dummy that an organizer made as if it were real.
    me = world.root / "people" / "organizer"
    with actors.load_account(me).connect() as client:
        defined, _ = definition_of(client, round_id)
        people = [sealing.Recipient(c["name"], c["age"], c["backup"]) for c in defined["custodians"]]
        files = sealing.rehearsal_files(tmp_path)
        made = sealing.seal(files, tmp_path / "sealed", round_id=round_id, recipients=people, k=2)
        client.put_blob(tmp_path / "sealed")
        client.rehearse(round_id, made.fields, envelopes=made.envelopes)
    refused(acclimate("custodian", "ack", round_id, "--keys", a, "--json"), "share_false")
    own = keys.load(a).age_identity
    assert own is not None
    share = made.fields["shares"][0]
    of = custody.Split(round_id, made.fields["seal"], 2, 3)
    document = custody.open_envelope(made.envelopes[0], own, share=share, of=of)
    with actors.load_account(a).connect() as client, pytest.raises(Refusal) as caught:
        client.rehearsal_share(round_id, index=1, document=base64.b64encode(document).decode())
    assert caught.value.code == "share_false"
    assert document not in b"".join(path.read_bytes() for path in world.data.glob("acclimate.db*"))


def test_a_share_is_released_for_its_own_round_only(acclimate: Run, world: World, tmp_path: Path) -> None:
    """Whoever has a round's envelopes shows its seal in a round that closes sooner: nobody acknowledges it, nothing is kept."""
    me = keys.load(person(acclimate, world, "organizer", "organizer"))
    folders = [world.root / "people" / name for name in CUSTODIANS]
    victim = new_round(acclimate, world)
    hidden, shown, other = (new_round(acclimate, world, until="draft") for _ in range(3))
    with actors.load_account(me.folder).connect() as client:
        envelopes = client.envelopes(victim)["real"]
        logged = next(record for _, record in client.records(victim) if record.type == "HoldoutSealed").fields
        defined, _ = definition_of(client, hidden)
        people = [sealing.Recipient(c["name"], c["age"], c["backup"]) for c in defined["custodians"]]
        # A seal of a round that this log does not tell of: of another server, say.
        away = sealing.seal(
            sealing.rehearsal_files(tmp_path), tmp_path / "away", round_id=hidden, recipients=people, k=2
        )
        for name in (shown, other):
            (tmp_path / name).mkdir()
            dummy = sealing.seal(
                sealing.rehearsal_files(tmp_path / name), tmp_path / name / "dummy", round_id=name, recipients=people,
                k=2, rehearsal=True,
            )  # fmt: skip
            client.put_blob(tmp_path / name / "dummy")
            client.rehearse(name, dummy.fields, envelopes=dummy.envelopes)
    # An honest server takes a seal's id once; this one was stolen, with the organizer's key.
    for name, fields in ((shown, logged), (other, away.fields)):
        with world.store.transaction() as tx:
            tx.append_once(records.sign("HoldoutSealed", name, fields, key=me.ed25519))
    sealed = {
        shown: {**envelopes},
        other: {"seal": away.fields["seal"], "fields": away.fields, "envelopes": away.envelopes},
    }
    for name, code, words in (
        (shown, "seal_mismatch", f"which is the seal of {victim}"),
        (other, "share_false", f"the round {hidden} for {other}"),
    ):
        for number, folder in enumerate(folders):
            index = number + 1
            with actors.load_account(folder).connect() as client:
                own = [e for e in sealed[name]["envelopes"] if e["index"] == index]
            with cheating(world, {"/envelopes$": in_json(real={**sealed[name], "envelopes": own})}) as cheat:
                mine = cheat.folder(folder, tmp_path / f"{name}-{number}")
                if name == shown and number == 0:
                    # Also where nothing is left of the first acknowledgement.
                    (mine / "pins.json").unlink()
                ran = acclimate("custodian", "ack", name, "--keys", mine, "--json")
                assert words in refused(ran, code)
                assert cheat.written == []
    assert kinds(world, shown) == kinds(world, other) == ["RoundDefined", "HoldoutSealed"]


def test_a_custodian_acknowledges_in_the_log_that_it_registered_with_and_under_an_id_that_binds(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    round_id = new_round(acclimate, world, until="sealed")
    folder = world.root / "people" / CUSTODIANS[0]
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    (elsewhere / "pins.json").unlink(missing_ok=True)
    (elsewhere / "log.vkey").write_text(
        log.Signer("log.example.org", keys.create(tmp_path / "k", age=False).ed25519).vkey
    )
    ran = acclimate("custodian", "ack", round_id, "--keys", elsewhere, "--json")
    assert "keeps log.example.org+" in refused(ran, "log_inconsistent")
    # A round with a short id, from a server that took it.
    me = keys.load(world.root / "people" / "organizer")
    with actors.Client(world.url) as client:
        (_, defined), *_ = client.records(round_id)
    fields = {name: value for name, value in defined.fields.items() if name != "id_digits"}
    request = records.sign("RoundDefined", "", fields, key=me.ed25519)
    short = records.Record("RoundDefined", request["round"], defined.at, fields, request["by"], request["sig"])
    changes = {
        f"/rounds/{short.round}$": in_json(round=short.round),
        r"/records(\?|$)": always([{"index": 0, "record": short.document()}]),
    }
    with cheating(world, changes, alias=(short.round, round_id)) as cheat:
        mine = cheat.folder(folder, tmp_path / "mine")
        ran = acclimate("custodian", "ack", short.round, "--keys", mine, "--json")
        assert "has 12 digits" in refused(ran, "record_invalid")
        assert cheat.written == []
    # A true server does not take it.
    with actors.load_account(me.folder).connect() as client, pytest.raises(Refusal, match="has no id_digits") as caught:
        client.define(request)
    assert caught.value.code == "record_invalid"
    assert kinds(world, round_id) == ["RoundDefined", "HoldoutSealed"]


def test_a_custodian_sees_what_it_acknowledges_and_refuses_recipients_that_are_not_its_own(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    me = person(acclimate, world, "organizer", "organizer")
    people = [person(acclimate, world, name, "custodian") for name in CUSTODIANS]
    foreign = keys.create(tmp_path / "foreign", age=True).age_recipient
    own = json.loads((people[0] / "custodian.json").read_text())
    for field_, code in (("backup", "key_refused"), ("age", "key_refused"), ("", "")):
        path = tmp_path / "given.json"
        path.write_text(json.dumps(own | ({field_: foreign} if field_ else {})))
        given = [part for document in (path, *people[1:]) for part in ("--custodian", document)]
        world.count += 1
        dates = ("--opens", "+0s", "--closes", "+1h", "--name", f"r{world.count}")
        round_id = done(acclimate("round", "create", world.competition, *given, *dates, "--keys", me)).out.strip()
        done(acclimate("round", "seal", round_id, world.competition, "--keys", me))
        ran = acclimate("custodian", "ack", round_id, "--keys", people[0], "--json")
        if code:
            assert foreign in refused(ran, code)
            assert kinds(world, round_id) == ["RoundDefined", "HoldoutSealed"]
        else:
            done(ran)
            for shown in (round_id, "closes 2", "any 2 of 3", *(keys.load(folder).age_recipient for folder in people)):
                assert shown in ran.err
    # Without its document a custodian still knows its own recipient.
    bare = tmp_path / "bare"
    shutil.copytree(people[0], bare)
    (bare / "custodian.json").unlink()
    done(acclimate("custodian", "ack", round_id, "--keys", bare, "--json"))
    (bare / "age.txt").write_bytes((tmp_path / "foreign" / "age.txt").read_bytes())
    refused(acclimate("custodian", "ack", round_id, "--keys", bare, "--json"), "key_refused")


def test_a_round_is_published_from_what_the_organizer_recomputes(acclimate: Run, world: World, tmp_path: Path) -> None:
    """Even one that nobody entered: the baseline that needs no model stands alone."""
    round_id = new_round(acclimate, world)
    me, b = world.root / "people" / "organizer", world.root / "people" / CUSTODIANS[1]
    world.tick(round_id, hours=1)
    for name in CUSTODIANS[:2]:
        done(acclimate("custodian", "release", round_id, "--keys", world.root / "people" / name))
    assert world.tick(round_id, seconds=1) == ["HoldoutOpened", "EvaluationFinished"]
    for command in (("ranking",), ("round", "bundle", "--out", tmp_path / "early.zip")):
        refused(acclimate(*command, round_id, "--server", world.url, "--json"), "phase_wrong")
    refused(acclimate("round", "publish", round_id, "--keys", b, "--json"), "signature_invalid")
    # A bundle that is wrong in a place from which no score follows is no ground for a signature either.
    with cheating(world, {"/bundle$": with_another_file("prepared.json", b"[{}]")}) as cheat:
        ran = acclimate("round", "publish", round_id, "--keys", cheat.folder(me, tmp_path / "cheated"), "--json")
    refused(ran, "bundle_invalid")
    assert "prepared" in ran.err
    assert kinds(world, round_id)[-1] == "EvaluationFinished"
    ran = done(acclimate("round", "publish", round_id, "--keys", me, "--json"))
    assert "the baseline untrained, which the definition names, was never submitted" in ran.err
    value = ran.json
    assert kinds(world, round_id)[-1] == "RankingPublished"
    assert done(acclimate("round", "publish", round_id, "--keys", me, "--json")).json == value

    document = done(acclimate("ranking", round_id, "--server", world.url, "--json")).json
    assert digests.of_json(document) == value["digest"]
    assert "majority (baseline)" in done(acclimate("ranking", round_id, "--server", world.url)).out
    bundle = tmp_path / "bundle.zip"
    done(acclimate("round", "bundle", round_id, "--out", bundle, "--server", world.url))
    with actors.Client(world.url) as client:
        vkey = client.server()["log"]
        (tmp_path / "r.tlog-proof").write_text(client.proof(value["index"]))
        (tmp_path / "first.tlog-proof").write_text(client.proof(0))
    report = done(acclimate("verify", bundle, "--log-key", vkey, "--json")).json
    assert report["round"] == round_id
    for receipt in ("r", "first"):
        ran = acclimate("receipt", "verify", tmp_path / f"{receipt}.tlog-proof", "--bundle", bundle)
        assert "NOT CHECKED  whose log" in done(ran).out
        assert "ok           bundle" in ran.out
        assert "ok           same history" in ran.out
    # A receipt from later says nothing of whether the bundle's log goes on to its checkpoint.
    new_round(acclimate, world, until="draft")
    with actors.Client(world.url) as client:
        # The first makes sure that there is a checkpoint of the longer log.
        (tmp_path / "new.tlog-proof").write_text(client.proof(value["index"] + 1))
        (tmp_path / "later.tlog-proof").write_text(client.proof(0))
    (tmp_path / "log.key").write_text(vkey + "\n")
    checked = {"later": ("ok", "NOT CHECKED"), "new": ("NOT CHECKED", "NOT CHECKED")}
    for receipt, statuses in checked.items():
        path = tmp_path / f"{receipt}.tlog-proof"
        ran = acclimate("receipt", "verify", path, "--bundle", bundle, "--log-key", tmp_path / "log.key", "--json")
        found = {check["name"]: check["status"] for check in done(ran).json["checks"]}
        assert (found["bundle"], found["same history"]) == statuses


def test_a_closed_round_is_voided_with_its_custodians_only(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    world.tick(round_id, hours=1)
    me = world.root / "people" / "organizer"
    void = ("round", "void", round_id, "--reason", "the holdout leaked", "--keys", me, "--json")
    refused(acclimate(*void), "guard_failed")
    approvals: list[object] = []
    for name in CUSTODIANS[:2]:
        folder = world.root / "people" / name
        path = tmp_path / f"{name}.json"
        path.write_text(
            done(
                acclimate("custodian", "approve-void", round_id, "--reason", "the holdout leaked", "--keys", folder)
            ).out
        )
        approvals += ["--approval", path]
    other = ("round", "void", round_id, "--reason", "I lost", "--keys", me, "--json")
    refused(acclimate(*other, *approvals), "signature_invalid")
    # A custodian approves the voiding of a round that it has pinned, and of no other that a server names.
    pinned, loose = world.root / "people" / CUSTODIANS[0], new_round(acclimate, world, until="sealed")
    approve = ("custodian", "approve-void", "--reason", "the holdout leaked", "--keys")
    ran = acclimate(*approve, pinned, loose)
    assert (ran.code, ran.out) == (1, "")
    assert "pins no round" in ran.err
    with cheating(world, {"/rounds/[^/]*$": in_json(round=loose)}) as cheat:
        ran = acclimate(*approve, cheat.folder(pinned, tmp_path / "cheated"), round_id[:-12])
    assert (ran.code, ran.out) == (1, "")
    assert "the server answers with" in ran.err
    assert round_id in done(acclimate(*approve, pinned, round_id[:-12])).err
    done(acclimate(*void, *approvals))
    ran = acclimate("custodian", "release", round_id, "--keys", world.root / "people" / CUSTODIANS[0], "--json")
    assert "voided" in refused(ran, "phase_wrong")


def test_everybody_gets_the_public_files_and_never_a_holdout(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world, until="draft")
    out = tmp_path / "public"
    found = done(acclimate("round", "files", round_id, "--out", out, "--server", world.url, "--json")).json
    assert sorted(found["files"]) == sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert (out / "competition.toml").read_bytes() == (world.competition / "competition.toml").read_bytes()
    assert not [name for name in found["files"] if "holdout" in name]
    # What is there is kept, what is damaged is fetched anew.
    damaged = out / "splits" / "digit" / "preparation.parquet"
    damaged.write_bytes(b"not these")
    done(acclimate("round", "files", round_id, "--out", out, "--server", world.url))
    assert damaged.read_bytes() == (world.competition / "splits" / "digit" / "preparation.parquet").read_bytes()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    refused(
        acclimate("round", "files", round_id, "--out", tmp_path / "mine", "--server", world.url, "--json"),
        "file_unreadable",
    )


def test_a_server_can_swap_no_public_file(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world, until="draft")
    with cheating(world, {"/files/splits/parity/": lambda content: content + b"x"}) as cheat:
        ran = acclimate("round", "files", round_id, "--out", tmp_path / "public", "--server", cheat.url, "--json")
    assert "splits/parity/" in refused(ran, "log_inconsistent")


def test_waiting_for_a_phase_ends_when_it_has_come(acclimate: Run, world: World) -> None:
    round_id = new_round(acclimate, world, until="sealed")
    ran = done(acclimate("status", round_id, "--server", world.url, "--until", "sealed"))
    assert "sealed" in ran.out
    me = person(acclimate, world, "organizer", "organizer")
    done(acclimate("round", "void", round_id, "--reason", "a test", "--keys", me))
    assert acclimate("status", round_id, "--server", world.url, "--until", "open", "--json").code == 1
    assert acclimate("status", round_id, "--server", world.url, "--until", "nonsense").code == 2


def test_watching_prints_a_line_for_each_change(acclimate: Run, world: World) -> None:
    round_id = new_round(acclimate, world, until="draft")
    process = subprocess.Popen(
        [sys.executable, "-m", "acclimate", "status", round_id, "--server", world.url, "--watch", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    assert first["phase"] == "draft"
    me = world.root / "people" / "organizer"
    done(acclimate("round", "void", round_id, "--reason", "a test", "--keys", me))
    until = time.monotonic() + 30
    assert json.loads(process.stdout.readline())["phase"] == "voided"
    assert process.wait(max(1.0, until - time.monotonic())) == 0
    process.stdout.close()


def test_a_server_whose_clock_runs_ahead_gets_no_share(acclimate: Run, world: World) -> None:
    """The last test of this file: it leaves the database's clock in the future."""
    round_id = new_round(acclimate, world, closes="+40h")
    assert world.tick(round_id, hours=40) == ["RoundClosed", "PreparationFinished"]
    # The server's log has it all; the custodian's machine knows that it is hours too early.
    ran = acclimate("custodian", "release", round_id, "--keys", world.root / "people" / CUSTODIANS[0], "--json")
    assert "this machine's clock says" in refused(ran, "too_early")
    assert kinds(world, round_id)[-1] == "PreparationFinished"
