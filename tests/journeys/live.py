"""A real server for tests: uvicorn in a thread on a port of its own, a real data folder, a clock that the test sets.

Actors speak plain HTTP; what they sign is signed by their own key. Nothing here knows the server's inside, except for three things
that a test must do in its place: set the database's clock, make invitations, and tick what the dispatcher would tick.
"""

import base64
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pyrage
import tiny
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from in_threads import serving
from waiting import WITHIN

from acclimate import config, custody, sealing
from acclimate.api.app import create_app
from acclimate.api.server import configure, listen
from acclimate.service import accounts, clockwork, submit
from acclimate.store import Store
from acclimate_competitions import definition, digests, records, rounds, splits
from acclimate_competitions.records import format_time

START = datetime(2027, 3, 1, 12, tzinfo=UTC)
CUSTODIANS = ("custodian-a", "custodian-b", "custodian-c")


class Clock:
    """The database's clock: stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def set(self, text: str, **later: float) -> None:
        self.now = records.parse_time(text) + timedelta(**later)

    def forward(self, **by: float) -> None:
        self.now += timedelta(**by)


@dataclass
class Actor:
    """Somebody with a key, an account and a connection."""

    name: str
    role: str
    key: Ed25519PrivateKey
    http: httpx.Client
    token: str = ""
    identity: pyrage.x25519.Identity = field(default_factory=pyrage.x25519.Identity.generate)

    @property
    def public(self) -> str:
        return records.public_text(self.key.public_key())

    def sign(self, kind: str, round_id: str, **fields: Any) -> dict[str, Any]:
        return records.sign(kind, round_id, fields, key=self.key)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def proof(
        self, path: str, *, about: dict[str, Any] | None = None, key: Ed25519PrivateKey | None = None
    ) -> dict[str, str]:
        """The header that signs a GET request; `about` is what the server said of itself, asked for now where it is None."""
        about = about or self.http.get("/v1/server").json()
        address, _, query = path.partition("?")
        covers = {"by": self.public, "log": about["log"], "challenge": about["challenge"]}
        signed = (key or self.key).sign(records.request_statement(address, query, **covers))
        return {"Acclimate-Proof": f"{about['challenge']} {base64.b64encode(signed).decode()}"}

    def secret(self, path: str) -> httpx.Response:
        """A signed request."""
        return self.get(path, headers=self.proof(path))

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return self.http.post(path, json=body)

    def put(self, path: str, data: bytes) -> httpx.Response:
        return self.http.put(path, content=data)

    def registration(self, about: dict[str, Any] | None = None) -> dict[str, str]:
        """What is sent to register; `about` is what the server said of itself, asked for now where it is None."""
        about = about or self.http.get("/v1/server").json()
        signed = {"name": self.name, "role": self.role, "ed25519": self.public, "challenge": about["challenge"]}
        proof = self.key.sign(accounts.statement(**signed, log=about["log"]))
        return {**signed, "proof": base64.b64encode(proof).decode()}


@dataclass
class Live:
    """A running server and who calls it."""

    url: str
    settings: config.Settings
    store: Store
    clock: Clock
    stack: contextlib.ExitStack
    actors: dict[str, Actor] = field(default_factory=dict)

    def connect(self, token: str = "") -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        http = httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=WITHIN)
        return self.stack.enter_context(http)

    def stranger(self, name: str = "stranger", role: str = "entrant") -> Actor:
        """Somebody without an account."""
        return Actor(name, role, Ed25519PrivateKey.generate(), self.connect())

    def actor(self, name: str, role: str = "entrant") -> Actor:
        """Somebody with an account; the same one for the same name."""
        if name not in self.actors:
            new = self.stranger(name, role)
            body = new.registration()
            if role != "entrant":
                body["invitation"] = accounts.invite(self.store, role)
            answer = new.post("/v1/accounts", body)
            assert answer.status_code == 201, answer.text
            new.token = answer.json()["token"]
            new.http.headers["Authorization"] = f"Bearer {new.token}"
            self.actors[name] = new
        return self.actors[name]

    def organizer(self) -> Actor:
        return self.actor("organizer", "organizer")

    def custodians(self) -> list[Actor]:
        return [self.actor(name, "custodian") for name in CUSTODIANS]

    def tick(self) -> list[str]:
        return [line.rpartition(": ")[2] for line in clockwork.tick(self.store, self.settings)]

    def anyone(self) -> httpx.Client:
        return self.connect()

    def phase(self, round_id: str) -> str:
        return str(self.anyone().get(f"/v1/rounds/{round_id}").json()["phase"])


@contextlib.contextmanager
def serve(folder: Path, *, clock: Clock | None = None, **given: Any) -> Iterator[Live]:
    """A server on a data folder.

    Args:
        folder: its data folder lies in it.
        clock: of another server over the same database, which must tell the same time.
        given: settings, such as `database`.
    """
    settings = config.load(folder / "data", environ={}, given={"port": 0, **given})
    clock = clock or Clock()
    app = create_app(settings, clock=clock)
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(configure(app))
    with serving(server, listener), contextlib.ExitStack() as stack:
        host, port = listener.getsockname()
        yield Live(f"http://{host}:{port}", settings, app.state.services.store, clock, stack)


# ---- a competition and its round -----------------------------------------------------------------------------------


@dataclass
class Staged:
    """A round on a live server, and what its organizer knows."""

    live: Live
    folder: Path
    round: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    seal: dict[str, Any] = field(default_factory=dict)
    envelopes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def path(self) -> str:
        return f"/v1/rounds/{self.round}"

    def upload(self, path: Path) -> str:
        digest = digests.of_file(path)
        answer = self.live.organizer().put(f"/v1/blobs/{digest}", path.read_bytes())
        assert answer.status_code == 200, answer.text
        return digest

    def share_documents(self, seal: dict[str, Any], envelopes: list[dict[str, Any]]) -> dict[int, bytes]:
        found = {}
        for share, envelope, custodian in zip(seal["shares"], envelopes, self.live.custodians(), strict=True):
            rehearsal = seal["seal"] != self.seal.get("seal")
            of = custody.Split(self.round, seal["seal"], self.fields["k"], len(seal["shares"]), rehearsal)
            found[share["index"]] = custody.open_envelope(envelope, str(custodian.identity), share=share, of=of)
        return found


def defined(
    live: Live, folder: Path, *, name: str = "tiny", compute: str = "", **changes: Any
) -> tuple[Staged, dict[str, Any]]:
    """A built competition, with these lines in its [compute], with its files uploaded, and the signed RoundDefined, not sent yet."""
    built = folder / f"competition-{name}"
    tiny.competition(built)
    toml = built / "competition.toml"
    text = (
        toml.read_text("utf-8").replace('grace = "0s"', 'grace = "60s"').replace("[compute]\n", f"[compute]\n{compute}")
    )
    toml.write_text(text.replace('baselines = ["majority"]', 'baselines = ["majority", "untrained"]'), "utf-8")
    staged = Staged(live, built)
    competition = definition.load(built)
    files = {public: staged.upload(path) for public, path in splits.public_files(built).items()}
    staged.upload(toml)
    server = live.anyone().get("/v1/server").json()
    custodians = [
        {"name": c.name, "age": str(c.identity.to_public()), "ed25519": c.public, "backup": None}
        for c in live.custodians()
    ]
    staged.fields = {
        "competition": competition.slug,
        "name": name,
        "definition": competition.digest,
        "files": files,
        "recipe": competition.preparation.digest,
        "scorer": rounds.scorer_digest(competition),
        "policy": competition.ranking.digest,
        "opens": format_time(START + timedelta(hours=1)),
        "closes": format_time(START + timedelta(days=1)),
        "closes_latest": format_time(START + timedelta(days=3)),
        "grace": 60,
        "release_by": format_time(START + timedelta(days=10)),
        "k": 2,
        "custodians": custodians,
        "organizer": {"name": "organizer", "ed25519": live.organizer().public},
        "id_digits": records.ID_DIGITS,
        **{key: server[key] for key in ("code", "log", "evaluators", "witnesses", "quorum")},
        **changes,
    }
    return staged, live.organizer().sign("RoundDefined", "", **staged.fields)


def create(live: Live, folder: Path, **changes: Any) -> Staged:
    """A draft round."""
    staged, request = defined(live, folder, **changes)
    answer = live.organizer().post("/v1/rounds", request)
    assert answer.status_code == 201, answer.text
    staged.round = answer.json()["round"]
    return staged


def make_seal(staged: Staged, *, dummy: bool = False) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Seal holdout or dummy for the custodians, and upload the ciphertext."""
    work = staged.folder / ("dummy" if dummy else "real")
    work.mkdir(exist_ok=True)
    contents = sealing.rehearsal_files(work) if dummy else splits.holdout_files(staged.folder)
    recipients = [sealing.Recipient(c["name"], c["age"], c["backup"]) for c in staged.fields["custodians"]]
    sealed = sealing.seal(contents, work / "sealed", round_id=staged.round, recipients=recipients, k=2, rehearsal=dummy)
    staged.upload(work / "sealed")
    return sealed.fields, sealed.envelopes


def seal(staged: Staged) -> Staged:
    """A sealed round."""
    staged.seal, staged.envelopes = make_seal(staged)
    record = staged.live.organizer().sign("HoldoutSealed", staged.round, **staged.seal)
    answer = staged.live.organizer().post(f"{staged.path}/seal", {"record": record, "envelopes": staged.envelopes})
    assert answer.status_code == 200, answer.text
    return staged


def acknowledgement(staged: Staged, custodian: Actor) -> dict[str, Any]:
    index = CUSTODIANS.index(custodian.name) + 1
    commitment = staged.seal["shares"][index - 1]["commitment"]
    return custodian.sign(
        "ShareAcknowledged", staged.round, seal=staged.seal["seal"], index=index, commitment=commitment
    )


def rehearse(staged: Staged) -> Staged:
    """Rehearse with a dummy seal and two custodians; all three acknowledge."""
    fields, envelopes = make_seal(staged, dummy=True)
    answer = staged.live.organizer().post(f"{staged.path}/rehearsal", {"fields": fields, "envelopes": envelopes})
    assert answer.status_code == 200, answer.text
    documents = staged.share_documents(fields, envelopes)
    for index, custodian in enumerate(staged.live.custodians(), start=1):
        body = {"index": index, "document": base64.b64encode(documents[index]).decode()}
        answer = custodian.post(f"{staged.path}/rehearsal/shares", body)
        assert answer.status_code == 200, answer.text
        answer = custodian.post(f"{staged.path}/acknowledgements", acknowledgement(staged, custodian))
        assert answer.status_code == 200, answer.text
    return staged


def open_round(live: Live, folder: Path, **changes: Any) -> Staged:
    """An open round."""
    staged = rehearse(seal(create(live, folder, **changes)))
    live.clock.set(staged.fields["opens"])
    assert live.tick() == ["RoundOpened"]
    return staged


# ---- entrants ------------------------------------------------------------------------------------------------------


def enter(staged: Staged, entrant: Actor) -> Actor:
    request = entrant.sign(
        "EntrantRegistered", staged.round, entrant=entrant.name, ed25519=entrant.public, conflicts=[]
    )
    answer = entrant.post(f"{staged.path}/entrants", request)
    assert answer.status_code == 200, answer.text
    return entrant


def model(staged: Staged, *, seed: int) -> dict[str, Path]:
    """A tiny model's files; the competition's own tokenizer."""
    folder = staged.folder / f"model-{seed}"
    if not folder.exists():
        tiny.model(folder, seed=seed)
    return {path.name: path for path in sorted(folder.iterdir())}


def manifest(staged: Staged, entrant: str, paths: dict[str, Path], **changes: Any) -> dict[str, Any]:
    return {
        "v": 1,
        "round": staged.round,
        "entrant": entrant,
        "title": "A tiny model",
        "kind": "hf-causal-lm",
        "files": [
            {"name": name, "size": path.stat().st_size, "sha256": digests.of_file(path)} for name, path in paths.items()
        ],
        "family": "",
        "base": None,
        "parameters": 1000,
        "released": None,
        "weights_after": "publish",
        **changes,
    }


def submission(
    staged: Staged, entrant: Actor, document: dict[str, Any], *, nonce: bytes = b"\x07" * 32
) -> dict[str, Any]:
    """The body of POST …/submissions."""
    commitment = digests.of_bytes(nonce + digests.canonical(document))
    fields = {"entrant": document["entrant"], "commitment": commitment}
    return {
        "committed": entrant.sign("SubmissionCommitted", staged.round, **fields),
        "accepted": entrant.sign("SubmissionAccepted", staged.round, **fields),
        "nonce": base64.b64encode(nonce).decode(),
        "manifest": document,
    }


def commit(staged: Staged, entrant: Actor, *, seed: int) -> tuple[dict[str, Any], dict[str, Path]]:
    """A committed submission, its bytes still to come."""
    files = model(staged, seed=seed)
    body = submission(staged, entrant, manifest(staged, entrant.name, files), nonce=bytes([seed % 256]) * 32)
    answer = entrant.post(f"{staged.path}/submissions", body)
    assert answer.status_code == 201, answer.text
    return answer.json(), files


def send_files(entrant: Actor, made: dict[str, Any], files: dict[str, Path]) -> None:
    for path in files.values():
        address = f"/v1/submissions/{made['submission']}/files/{digests.of_file(path)}"
        answer = entrant.put(address, path.read_bytes())
        assert answer.status_code == 200, answer.text


def submit_model(staged: Staged, entrant: Actor, *, seed: int) -> str:
    """An accepted submission; the check, which is the dispatcher's, is taken as passed."""
    made, files = commit(staged, entrant, seed=seed)
    send_files(entrant, made, files)
    answer = entrant.post(f"/v1/submissions/{made['submission']}/complete")
    assert answer.json()["state"] == "checking", answer.text
    accepted = submit.accept(staged.live.store, made["submission"])
    assert accepted["state"] == "accepted"
    return str(made["submission"])
