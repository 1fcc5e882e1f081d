"""Whatever a server answers, a client's method ends with a refusal that names the server, or with the answer that its form asks for."""

import base64
import json
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from strange_servers import answering

from acclimate.client import Client, answers, custodian, problems, requests
from acclimate_competitions import reading
from acclimate_competitions.errors import Refusal

ROUND = "digits-2027-1-" + "0" * 32
DIGEST = "sha256:" + "0" * 64

OBJECTS: dict[str, tuple[Callable[[Client], object], dict[str, Any]]] = {
    "server": (lambda c: c.server(), answers.SERVER),
    "terms": (lambda c: c.terms(), answers.TERMS),
    "make_account": (
        lambda c: c.make_account("a", role="entrant", ed25519="k", proof="p", challenge="c"),
        answers.ACCOUNT,
    ),
    "define": (lambda c: c.define({}), answers.DEFINED),
    "round": (lambda c: c.round(ROUND), answers.ROUND),
    "retry": (lambda c: c.retry(ROUND, []), answers.RETRIED),
    "give_up": (lambda c: c.give_up(ROUND, ["sha256:" + "7" * 64], reason="it crashes"), answers.RETRIED),
    "stage": (lambda c: c.stage(ROUND, "key"), answers.STORY),
    "forecast": (lambda c: c.forecast(ROUND), answers.FORECAST),
    "seal": (lambda c: c.seal(ROUND, {}, envelopes=[]), answers.INDEXED),
    "envelopes": (lambda c: c.envelopes(ROUND), answers.ENVELOPES),
    "post": (lambda c: c.post(ROUND, "void", {}), answers.INDEXED),
    "release": (lambda c: c.release(ROUND, {}, document=""), answers.INDEXED),
    "publish": (lambda c: c.publish(ROUND, {}, ranking={}), answers.INDEXED),
    "revise": (lambda c: c.revise(ROUND, {}, ranking={}, correction={}), answers.INDEXED),
    "ranking": (lambda c: c.ranking(ROUND), answers.RANKING),
    "submit": (lambda c: c.submit(ROUND, committed={}, accepted={}, nonce="", manifest={}), answers.SUBMITTED),
    "complete": (lambda c: c.complete("s"), answers.COMPLETED),
    "submission": (lambda c: c.submission("s"), answers.SUBMISSION),
    "consistency": (lambda c: c.consistency(0, 1), answers.PROOF),
    "hand_overs": (lambda c: c.hand_overs(), answers.RECEIPTS),
}
LISTS: dict[str, tuple[Callable[[Client], object], dict[str, Any]]] = {
    "rounds": (lambda c: c.rounds(), answers.SUMMARY),
    "records": (lambda c: c.records(ROUND), answers.LOGGED),
    "stages": (lambda c: c.stages(ROUND), answers.STAGE),
    "outputs": (lambda c: c.outputs(ROUND, "key"), answers.OUTPUT),
    "audits": (lambda c: c.audits(ROUND), answers.JOB),
    "versions": (lambda c: c.versions(ROUND), answers.VERSION),
}
DOWNLOADS: dict[str, Callable[[Client, Path], object]] = {
    "file": lambda c, path: c.file(ROUND, "name", path),
    "audit_file": lambda c, path: c.audit_file(ROUND, DIGEST, path),
    "bundle": lambda c, path: c.bundle(ROUND, path),
    "report": lambda c, path: c.report(ROUND, path),
}


def test_every_method_that_reads_an_answer_is_here() -> None:
    free = {"ready", "close", "pool", "put_blob", "put_file", "definition", "checkpoint", "entries", "proof"}
    unread = {"rehearse", "rehearsal_share"}
    methods = {name for name, value in vars(Client).items() if callable(value) and not name.startswith("_")}
    assert methods == free | unread | OBJECTS.keys() | LISTS.keys() | DOWNLOADS.keys()


def example(form: Any) -> Any:
    """The smallest value of a form, with all that it may have."""
    if isinstance(form, answers.Maybe):
        return example(form.form)
    if isinstance(form, list):
        return [example(form[0])]
    if isinstance(form, tuple):
        return example(form[0])
    if isinstance(form, dict):
        return {name: example(inner) for name, inner in form.items()}
    return {str: "", int: 7, float: 0.5, bool: False, object: None}.get(form, {})


def broken(form: Any, value: Any) -> list[Any]:
    """The value with one thing in it that is not of the form, for each such thing."""
    if isinstance(form, answers.Maybe):
        return [other for other in broken(form.form, value) if other is not None]
    if isinstance(form, list):
        return [*([inner] for inner in broken(form[0], value[0])), {}, None, "x", [None]]
    if isinstance(form, dict):
        found: list[Any] = [[], None, "x", 3]
        for name, inner in form.items():
            if not isinstance(inner, answers.Maybe):
                found.append({key: item for key, item in value.items() if key != name})
            found += [{**value, name: other} for other in broken(inner, value[name])]
        return found
    others: dict[Any, list[Any]] = {str: [None, 3, ["a"]], int: [None, "3", 1.5, True, [3]], bool: [None, 1, "x"]}
    return others.get(form, [] if form is object else ["x"])


@pytest.mark.parametrize("what", [*OBJECTS, *LISTS])
def test_an_answer_that_lacks_something_or_has_another_type_is_one_refusal(what: str) -> None:
    call, form = OBJECTS.get(what) or LISTS[what]
    whole = form if what in OBJECTS else [form]
    good = example(whole)
    assert answers.fits(good, whole)
    bad = [value for value in broken(whole, good) if not isinstance(whole, list) or value != {}]
    assert len(bad) > 3
    for value in bad:
        assert not answers.fits(value, whole), value
    # The method asks for it: over HTTP a handful is enough.
    texts = [json.dumps(value) for value in bad[:: max(1, len(bad) // 6)]]
    texts += ["null", "{", json.dumps(good).replace("7", "1e999", 1)]
    for text in texts:
        with answering(text.encode()) as url, Client(url, patience=0) as client:
            if text == json.dumps(good):
                continue
            with pytest.raises(Refusal) as caught:
                call(client)
        assert (caught.value.code, url in caught.value.sentence) == ("server_unreachable", True), text


@pytest.mark.parametrize("what", [*OBJECTS, *LISTS])
@pytest.mark.parametrize("status", [204, 200])
def test_an_empty_or_badly_packed_answer_is_one_refusal(what: str, status: int) -> None:
    call = (OBJECTS.get(what) or LISTS[what])[0]
    headers = {"Content-Encoding": "gzip"} if status == 200 else {}
    with answering(b"" if status == 204 else b"no gzip", status=status, headers=headers) as url:
        with Client(url, patience=0) as client, pytest.raises(Refusal) as caught:
            call(client)
    assert url in caught.value.sentence


@pytest.mark.parametrize(
    "problem", [{"code": ["x"]}, {"code": "conflict", "detail": {}, "problems": 3}, [], 1e999, None]
)
def test_a_broken_problem_document_is_a_refusal_all_the_same(problem: Any) -> None:
    with answering(json.dumps(problem).encode(), status=409) as url, Client(url, patience=0) as client:
        with pytest.raises(Refusal) as caught:
            client.round(ROUND)
    assert caught.value.code == "conflict"


# ---- downloads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", DOWNLOADS)
@pytest.mark.parametrize(("status", "headers"), [(200, {"Content-Encoding": "gzip"}), (204, {}), (206, {})])
def test_a_download_of_something_else_is_one_refusal_and_leaves_nothing(
    what: str, status: int, headers: dict[str, str], tmp_path: Path
) -> None:
    with answering(b"" if status == 204 else b"no gzip", status=status, headers=headers) as url:
        with Client(url, patience=0) as client, pytest.raises(Refusal) as caught:
            DOWNLOADS[what](client, tmp_path / "to")
    assert url in caught.value.sentence
    assert list(tmp_path.iterdir()) == []


def test_a_name_below_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with answering(b"x") as url, Client(url, patience=0) as client, pytest.raises(Refusal) as caught:
        client.bundle(ROUND, tmp_path / "file" / "b.zip")
    assert caught.value.code == "file_unreadable"
    assert str(tmp_path / "file") in caught.value.sentence


def test_a_download_without_end_fills_no_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The disk's size is the machine's: here it says that 4 MiB are free.
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(problems.shutil, "disk_usage", lambda path: usage(1 << 30, 0, 4 << 20))
    with answering(b"x" * 65536, endless=True) as url, Client(url, patience=0) as client:
        with pytest.raises(Refusal) as caught:
            client.bundle(ROUND, tmp_path / "b.zip")
    assert caught.value.code == "no_space"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["round", "bundle"])
def test_a_byte_now_and_then_keeps_nobody_waiting(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(problems, "_SLOWEST_START", 0.5)
    with answering(b"x", endless=True, pause=0.1) as url, Client(url, patience=0) as client:
        with pytest.raises(Refusal) as caught:
            client.bundle(ROUND, tmp_path / "b.zip") if what == "bundle" else client.round(ROUND)
    assert caught.value.code == "server_unreachable" and "bytes of an answer in" in caught.value.sentence


# ---- what was sent already -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"{}", b'{"index": 1e999}', b'{"index": "1"}', b"<html>", b""])
def test_a_custodian_whose_release_is_answered_oddly_is_told_that_the_share_may_have_left(body: bytes) -> None:
    made = requests.Answer(ROUND, 1, {}, b"document")
    with answering(body) as url, Client(url, patience=0) as client, pytest.raises(Refusal) as caught:
        custodian.send(client, made)
    assert "the share was sent, and may have been received" in caught.value.sentence
    assert f"acclimate round records {ROUND}" in caught.value.hint
    with answering(b'{"index": 5}') as url, Client(url, patience=0) as client:
        assert custodian.send(client, made).index == 5


@pytest.mark.parametrize("index", ["1e999", "NaN", "true", '"1"', "1.0", "null", "[1]"])
def test_a_mailed_answer_whose_numbers_are_none_is_one_refusal(index: str, tmp_path: Path) -> None:
    path = tmp_path / "answer"
    document = base64.b64encode(b"x").decode()
    path.write_text(
        f'{{"v":1,"type":"ReleaseAnswer","round":"{ROUND}","record":{{"fields":{{"index":{index}}}}},"document":"{document}"}}'
    )
    with pytest.raises(Refusal) as caught:
        requests.read_answer(path)
    assert caught.value.code == "file_unreadable" and str(path) in caught.value.sentence
    path.write_text(path.read_text().replace(f'"index":{index}', '"index":2'))
    assert requests.read_answer(path).share == 2


def test_json_has_finite_numbers_only() -> None:
    for text in ("1e999", "-1e999", "NaN", "Infinity", "[" * 100_000, "9" * 5000, b"\xff"):
        with pytest.raises(ValueError):
            reading.parse_json(text)
    assert reading.parse_json("[1e3, -0.5, 7]") == [1000.0, -0.5, 7]
