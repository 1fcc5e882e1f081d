"""What the client makes of a server's answers: busy, refusing, broken, absent, or meant to steer the terminal."""

from pathlib import Path

import pytest
from commands import Run
from scripted import BUSY, SERVER, as_json, scripted

from acclimate.client import Client
from acclimate.client.connection import CHUNK
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal


def test_a_busy_server_is_asked_again() -> None:
    with scripted(BUSY, BUSY, SERVER) as (url, script), Client(url) as client:
        assert client.server()["version"] == "1"
    assert len(script.seen) == 3


def test_patience_ends_with_the_servers_own_refusal() -> None:
    # A slow machine takes long to answer at all, so it is given longer.
    for patience in (0.5, 5.0, 50.0):
        with scripted(BUSY) as (url, script), Client(url, patience=patience) as client:
            with pytest.raises(Refusal) as caught:
                client.server()
        assert (caught.value.code, caught.value.sentence) == ("busy", "taken")
        if len(script.seen) >= 2:
            return
    raise AssertionError("it was asked once")


def test_a_refusal_arrives_as_it_was_sent() -> None:
    body = {
        "type": "urn:x", "title": "t", "status": 422, "detail": "two things", "code": "manifest_invalid", "hint": "mend",
        "problems": ["a", "b"], "request_id": "r",
    }  # fmt: skip
    with scripted((422, {}, as_json(body))) as (url, script), Client(url) as client:
        with pytest.raises(Refusal) as caught:
            client.round("x")
    refusal = caught.value
    assert (refusal.code, refusal.sentence, refusal.hint) == ("manifest_invalid", "two things", "mend")
    assert refusal.problems == ("a", "b")
    assert len(script.seen) == 1


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ((502, {}, b"<html>bad gateway"), "server_unreachable"),
        ((404, {}, b"not here"), "not_found"),
        ((409, {}, as_json({"code": "of_a_newer_server", "detail": "new"})), "conflict"),
        ((200, {}, b"<html>welcome to my blog"), "server_unreachable"),
        ((200, {}, b"[1]"), "server_unreachable"),
    ],
)
def test_an_answer_that_is_not_ours_is_a_refusal(answer: tuple[int, dict[str, str], bytes], code: str) -> None:
    with scripted(answer) as (url, _), Client(url) as client:
        with pytest.raises(Refusal) as caught:
            client.server()
    assert caught.value.code == code
    assert caught.value.sentence


def test_nobody_there_is_server_unreachable_with_a_hint() -> None:
    with Client("http://127.0.0.1:9", patience=0.3) as client:
        with pytest.raises(Refusal) as caught:
            client.server()
    assert caught.value.code == "server_unreachable"
    assert "http://127.0.0.1:9" in caught.value.sentence
    assert caught.value.hint


@pytest.mark.parametrize("url", ["rounds.example.org", "ftp://x", "", "http://", "http://[::1"])
def test_an_address_that_is_none_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(Refusal) as caught:
        Client(url)
    assert caught.value.code == "config_invalid"


def test_a_large_upload_is_streamed_and_repeated_whole(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "sealed"
    with path.open("wb") as stream:
        stream.truncate(48 * CHUNK)
    told: list[int] = []
    with scripted(BUSY, (200, {}, b"{}")) as (url, script), Client(url, token="acc_x") as client:
        tracemalloc.start()
        try:
            digest = client.put_blob(path, progress=lambda done, total: told.append(done * 100 // total))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert digest == digests.of_file(path)
    assert [(method, got) for method, _, _, got in script.seen] == [("PUT", 48 * CHUNK)] * 2
    headers = script.seen[1][2]
    assert headers["Content-Length"] == str(48 * CHUNK)
    assert headers["Authorization"] == "Bearer acc_x"
    assert told[-1] == 100
    assert peak < 16 * CHUNK


def test_a_download_that_fails_leaves_no_file(tmp_path: Path) -> None:
    cut = (200, {"Content-Length": "1000", "Connection": "close"}, b"short")
    with scripted(cut) as (url, _), Client(url, patience=0.3) as client:
        with pytest.raises(Refusal) as caught:
            client.bundle("r", tmp_path / "bundle.zip")
    assert caught.value.code == "server_unreachable"
    assert list(tmp_path.iterdir()) == []


HOSTILE = "a\x1b]0;owned\x07\x9b2J\x7f\r\u202eb\nhint: run this\ud800"
"""What a server may write to steer a terminal: title, screen, line, direction, a hint of its own, half a character."""


def tame(text: str) -> bool:
    return all(c.isprintable() for c in text.replace("\n", ""))


def test_what_a_server_writes_does_not_steer_the_terminal(acclimate: Run) -> None:
    state = {
        "round": HOSTILE, "title": HOSTILE, "phase": "voided", "next": HOSTILE, "data_is_public": False, "entrants": 0,
        "submissions": 0, "now": "2027-03-01T12:00:00.000000Z", "closes": "2027-03-01T12:00:00.000000Z",
        "waiting_for": [HOSTILE], "custodians": [{"name": HOSTILE, "acknowledged": True, "released": False}],
        "threshold": 1,
    }  # fmt: skip
    problem = {"code": "conflict", "detail": HOSTILE, "hint": HOSTILE, "problems": [HOSTILE]}
    json_headers = {"Content-Type": "application/json"}
    answers: dict[tuple[str, ...], list[tuple[int, dict[str, str], bytes]]] = {
        ("status", "x"): [(200, json_headers, as_json(state)), (200, json_headers, b"[]")],
        ("status", "x", "--watch"): [(200, json_headers, as_json(state)), (200, json_headers, b"[]")],
        ("round", "list"): [(200, json_headers, as_json([state]))],
        ("ranking", "x"): [(409, json_headers, as_json(problem))],
    }
    for command, given in answers.items():
        for more in ((), ("--json",)):
            with scripted(*given) as (url, _):
                ran = acclimate(*command, "--server", url, *more)
            assert tame(ran.out) and tame(ran.err), (command, more)
            assert "owned" in ran.out + ran.err
            assert "\nhint: run this" not in ran.out + ran.err
            if more:
                # Nothing is lost for a program.
                value = ran.json[0] if isinstance(ran.json, list) else ran.json
                said = value["error"]["sentence"] if "error" in value else value["next"]
                assert said == HOSTILE
