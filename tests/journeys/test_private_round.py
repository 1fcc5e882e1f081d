"""A round whose holdout stays private, on a real server: nothing of it in any answer that is not its organizer's or its auditor's.

Every row of the holdout holds words that stand nowhere else. Whatever a caller may get is searched for them, unpacked and as text: only
the rows that the draw opened may be found.
"""

import contextlib
import io
import json
import re
import sqlite3
import zipfile
from collections.abc import Iterator
from pathlib import Path

import live as staging
import pyarrow as pa
import pytest
import tiny
from by_hand import evaluate_all, prepare_all, refused, register_baseline, release_share
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from live import Actor, Live, Staged
from unpacked import parquet

from acclimate import publisher, tracking, verify
from acclimate.api.access import ACCESS
from acclimate.client import connection
from acclimate_competitions import digests, tables
from acclimate_competitions.errors import Refusal

ROWS = 30
CALLERS = ("anyone", "ada", "custodian-a", "other-auditor", "other-organizer", "reader")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    text = tiny.DEFINITION.replace('holdout_after = "public"', 'holdout_after = "private"\nauditor = "lab"')
    monkeypatch.setattr(tiny, "DEFINITION", text)
    with staging.serve(tmp_path, metrics="on") as running:
        for name in ("lab", "other-auditor"):
            running.actor(name, "auditor")
        running.actor("other-organizer", "organizer")
        running.actor("reader", "analyst")
        yield running


def create(server: Live, folder: Path) -> Staged:
    lab = server.actor("lab", "auditor")
    staged = staging.create(
        server, folder, auditor={"name": "lab", "ed25519": lab.public, "draw": digests.of_bytes(b"")}
    )
    for task in tiny.TASKS:
        numbers = range(ROWS)
        table = {
            "example": [f"zanzibar-{task}-{number:03d}" for number in numbers],
            "input": [f"m1 m2 quetzalcoatl-{task}-{number:03d}" for number in numbers],
            "target": [tiny.TASKS[task][number % 2] for number in numbers],
            "cluster": [f"xylophagous-{task}-{number:03d}" for number in numbers],
        }
        tables.write(pa.table(table), staged.folder / f"splits/{task}/holdout.parquet")
    return staged


def words(task: str, number: int) -> set[bytes]:
    return {f"{word}-{task}-{number:03d}".encode() for word in ("zanzibar", "quetzalcoatl", "xylophagous")}


ALL = {word for task in tiny.TASKS for number in range(ROWS) for word in words(task, number)}
_WORD = re.compile(rb"(?:zanzibar|quetzalcoatl|xylophagous)-[a-z]+-\d{3}")


def found_in(content: bytes) -> set[bytes]:
    """The holdout's words in bytes: as they are, unpacked from a ZIP, as values of Parquet."""
    found = set(_WORD.findall(content))
    for table in parquet(content):
        found |= set(_WORD.findall(json.dumps(table.to_pylist()).encode()))
    if content[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for name in archive.namelist():
                found |= found_in(archive.read(name))
    return found


def shown(staged: Staged) -> dict[str, set[bytes]]:
    """Caller and address -> what of the holdout an answer to a GET holds; every route that the server has is asked."""
    found: dict[str, set[bytes]] = {}
    size = int(staged.live.anyone().get("/v1/log/checkpoint").text.splitlines()[1])
    known = {"round_id": staged.round, "name": "splits/tint/preparation.parquet", "index": str(size - 1)}
    queries = {
        "/v1/log/entries": f"?start=0&end={size}",
        "/v1/log/consistency": f"?first=1&second={size}",
        "/v1/rounds/{round_id}/bundle": "?whole=true",
    }
    for caller in CALLERS:
        http = staged.live.anyone() if caller == "anyone" else staged.live.actors[caller].http
        for method, path in ACCESS:
            address = re.sub(r"\{(\w+)(?::path)?\}", lambda m: known.get(m[1], "0"), path)
            for query in {"", queries.get(path, "")} if method == "GET" else ():
                answer = http.get(address + query)
                if there := found_in(answer.content):
                    found[f"{caller} {address}{query}"] = there
    return found


def opened(bundle: bytes) -> set[bytes]:
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        return set(_WORD.findall(archive.read("rows.jsonl")))


def played(server: Live, folder: Path) -> Staged:
    """The round up to `evaluated`."""
    staged = staging.rehearse(staging.seal(create(server, folder)))
    server.clock.set(staged.fields["opens"])
    assert server.tick() == ["RoundOpened"]
    entrants = [staging.enter(staged, server.actor(name)) for name in ("ada", "bea")]
    for seed, entrant in enumerate((*entrants, register_baseline(staged)), start=1):
        staging.submit_model(staged, entrant, seed=seed)
    server.clock.set(staged.fields["closes"])
    assert server.tick() == ["RoundClosed"]
    prepare_all(staged)
    assert server.tick() == ["PreparationFinished"]
    documents = staged.share_documents(staged.seal, staged.envelopes)
    for index in (1, 3):
        assert release_share(staged, index, documents[index]).status_code == 200
    assert server.tick() == ["HoldoutOpened"]
    assert shown(staged) == {}
    evaluate_all(staged)
    assert server.tick() == ["EvaluationFinished"]
    return staged


def publish(staged: Staged) -> dict:
    organizer = staged.live.organizer()
    document = organizer.get(f"{staged.path}/ranking").json()
    fields = {"ranking": digests.of_json(document), "policy": staged.fields["policy"], "reason": ""}
    body = {"record": organizer.sign("RankingPublished", staged.round, **fields), "ranking": document}
    assert organizer.post(f"{staged.path}/ranking", body).status_code == 200
    return document


def test_nothing_of_a_private_holdout_is_shown_but_the_drawn_rows(
    server: Live, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    staged = played(server, tmp_path)
    # 1. Evaluated: the organizer has it all; nobody else, not even the auditor, has anything yet.
    assert shown(staged) == {}
    assert found_in(server.organizer().secret(f"{staged.path}/bundle?whole=true").content) == ALL
    refused(server.actors["lab"].secret(f"{staged.path}/bundle?whole=true"), "phase_wrong", 409)
    # 2. Published: the drawn rows, in the bundle, and nothing else anywhere.
    document = publish(staged)
    public = server.anyone().get(f"{staged.path}/bundle").content
    drawn = opened(public)
    assert len(drawn) == 3 * 32 and drawn < ALL
    assert shown(staged) == {f"{caller} {staged.path}/bundle": drawn for caller in CALLERS}
    for caller in CALLERS[1:]:
        problem = refused(server.actors[caller].get(f"{staged.path}/bundle?whole=true"), "holdout_private", 403)
        assert staged.round in problem["detail"] and caller in problem["detail"]
    problem = refused(server.anyone().get(f"{staged.path}/bundle?whole=true"), "holdout_private", 403)
    assert "not for whoever gives no account" in problem["detail"]
    # 3. Organizer and auditor get the whole; without being asked for, it is the public one for them, too.
    for name in ("organizer", "lab"):
        own = server.actors[name]
        assert found_in(own.secret(f"{staged.path}/bundle?whole=true").content) == ALL
        check_token_alone(own, f"{staged.path}/bundle?whole=true")
        assert own.get(f"{staged.path}/bundle").content == public
    report = server.anyone().get(f"{staged.path}/report").text
    assert "It stays private." in report
    # 4. MLflow has means, counts and ranks; neither examples nor what would confirm a guessed file.
    publisher.finish(server.store, server.settings, staged.round)
    check_mlflow(server, staged, document)
    # 5. What the auditor reports stands in a later bundle.
    check_report(staged, server.actors["lab"])
    said = "".join(capfd.readouterr()).encode()
    assert found_in(said) == set()


def check_token_alone(own: Actor, address: str) -> None:
    """Who has the token and not the key gets nothing, with whatever they saw of others' signatures."""
    assert "not signed by its key" in refused(own.get(address), "signature_invalid", 403)["detail"]
    thief = Ed25519PrivateKey.generate()
    other = address.replace("whole=true", "whole=1")
    for headers, code in (
        (own.proof(address, key=thief), "signature_invalid"),
        (own.proof(other), "signature_invalid"),
        (own.proof(address.partition("?")[0]), "signature_invalid"),
        ({"Acclimate-Proof": "nothing"}, "signature_invalid"),
        (own.proof(address, about=own.get("/v1/server").json() | {"log": "log.example.org+00000000+AAAA"}), "signature_invalid"),
        (own.proof(address, about=own.get("/v1/server").json() | {"challenge": "2027-01-01T00:00:00.000000Z.AAAA"}), "challenge_invalid"),
    ):  # fmt: skip
        answer = own.get(address, headers=headers)
        refused(answer, code, 403)
        assert found_in(answer.content) == set()


def check_mlflow(server: Live, staged: Staged, document: dict) -> None:
    data = server.settings.data
    artifacts = [path for path in (data / "mlartifacts").rglob("*") if path.is_file()]
    assert artifacts and not [path for path in artifacts if path.suffix == ".parquet"]
    held = [path.read_bytes() for path in artifacts]
    with contextlib.closing(sqlite3.connect(data / "mlflow.db")) as database:
        held.append("\n".join(database.iterdump()).encode())
    assert not [content for content in held if found_in(content)]
    secret = [digests.of_file(path) for path in staged.folder.rglob("holdout.parquet")]
    assert len(secret) == 2 and not [
        d for d in secret for content in held if d.removeprefix("sha256:").encode() in content
    ]
    assert staged.seal["row_root"].encode() in held[-1]
    means = tracking.ranking(server.settings.tracking, "marbles", "tiny")
    expected = {row["entrant"]: row["score"] for row in document["ranking"]}
    got = means[~means["baseline"]].set_index("entrant")["score"].to_dict()
    assert got == pytest.approx(expected)
    assert set(tracking.scores(server.settings.tracking, "marbles", "tiny")["n"]) >= {ROWS}
    with pytest.raises(Refusal) as caught:
        tracking.examples(server.settings.tracking, "marbles", "tiny")
    assert caught.value.code == "holdout_private" and staged.round in caught.value.sentence


def check_report(staged: Staged, lab: Actor) -> None:
    fields = {"ranking": staged.live.anyone().get(staged.path).json()["ranking"]}
    whole = lab.secret(f"{staged.path}/bundle?whole=true").content
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        fields["bundle"] = digests.of_bytes(archive.read("MANIFEST"))
    fields["checks"] = {"ok": 31, "failed": 0, "not_checked": 4}
    record = lab.sign("RoundAudited", staged.round, **fields)
    address = f"{staged.path}/reports"
    other = staged.live.actors["other-auditor"]
    refused(other.post(address, record), "role_missing", 403)
    refused(other.post(address, other.sign("RoundAudited", staged.round, **fields)), "role_missing", 403)
    refused(lab.post(address, other.sign("RoundAudited", staged.round, **fields)), "signature_invalid", 403)
    older = lab.sign("RoundAudited", staged.round, **{**fields, "ranking": digests.of_bytes(b"?")})
    refused(lab.post(address, older), "guard_failed", 409)
    waits = staged.live.anyone().get(staged.path).json()
    assert waits["waiting_for"] == ["the report of lab"] and "audit report" in waits["next"]
    first = lab.post(address, record)
    assert first.status_code == 200, first.text
    assert lab.post(address, record).json() == first.json()
    assert staged.live.anyone().get(staged.path).json()["waiting_for"] == []
    with connection.Client(staged.live.url) as anybody:
        path = anybody.bundle(staged.round, staged.folder / "later.zip")
    found = {check.name: check for check in verify.verify(path).checks}
    assert found["opened rows"].status == "ok"
    # The outcomes of this round are made up, so `rules` alone is what a report needs.
    assert (found["rules"].status, found["auditor's report"].status) == ("ok", "ok")
    assert fields["bundle"] in found["auditor's report"].where
    assert found_in(path.read_bytes()) == opened(path.read_bytes())


def test_a_report_comes_only_once_there_is_a_ranking(server: Live, tmp_path: Path) -> None:
    staged = staging.seal(create(server, tmp_path))
    lab = server.actors["lab"]
    checks = {"ok": 1, "failed": 0, "not_checked": 0}
    fields = {"bundle": digests.of_bytes(b"?"), "ranking": digests.of_bytes(b"?"), "checks": checks}
    answer = lab.post(f"{staged.path}/reports", lab.sign("RoundAudited", staged.round, **fields))
    refused(answer, "phase_wrong", 409)
