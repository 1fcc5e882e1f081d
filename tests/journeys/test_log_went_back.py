"""A server whose log has fewer entries, or others, than a key folder has seen: said by each command, and nothing is signed on it."""

import json
import uuid
from pathlib import Path

import pytest
from cli_world import World, build_model, cheating, new_round, person, world
from commands import Run, done, refused
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from acclimate import client as actors
from acclimate import log
from acclimate.client import seen_log

__all__ = ["world"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that went back stays there; the seconds for one that is behind for a moment are another test's."""
    monkeypatch.setattr(seen_log, "_PATIENCE", 0.3)


def checkpoint(world: World) -> str:
    with actors.Client(world.url) as client:
        return client.checkpoint()


def test_nothing_is_signed_on_a_log_that_went_back_and_what_is_left_is_listed(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    round_id = new_round(acclimate, world)
    me, model = person(acclimate, world, "ada"), build_model(tmp_path / "one", seed=31)
    done(acclimate("enter", round_id, "--keys", me))
    other = build_model(tmp_path / "two", seed=32)
    before = checkpoint(world)
    first = done(acclimate("submit", model, "--round", round_id, "--keys", me, "--no-wait", "--json")).json
    organizer = person(acclimate, world, "organizer", "organizer")
    custodian = person(acclimate, world, "custodian-a", "custodian")
    for folder in (organizer, custodian):
        done(acclimate("round", "list", "--keys", folder))
    assert (organizer / seen_log.CHECKPOINT_FILE).exists()
    with cheating(world, {"^/v1/log/checkpoint$": lambda content: before.encode()}) as server:
        mine, its = server.folder(me, tmp_path / "mine"), server.folder(organizer, tmp_path / "its")
        theirs = server.folder(custodian, tmp_path / "theirs")
        for command in (
            ("enter", round_id, "--keys", mine),
            ("submit", other, "--round", round_id, "--keys", mine),
            ("submission", "withdraw", first["commitment"][7:], "--keys", mine),
            ("round", "extend", round_id, "--closes", "+2d", "--keys", its),
            ("round", "void", round_id, "--reason", "lost", "--keys", its),
            ("custodian", "ack", round_id, "--keys", theirs),
        ):
            ran = acclimate(*command, "--json")
            assert "went back" in refused(ran, "log_inconsistent")
            assert "nothing was signed" in ran.err and "ask the operator" in ran.err
        listed = acclimate("submission", "status", "--keys", mine)
        assert listed.code == 1 and first["commitment"][7:15] in listed.out and "log_inconsistent" in listed.err
        read = done(acclimate("round", "list", "--keys", mine))
        assert "warning: " in read.err and "went back" in read.err and round_id in read.out
        assert server.written == []


def test_another_history_of_as_many_entries_is_no_growth(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "zoe")
    done(acclimate("round", "list", "--keys", me))
    path = me / seen_log.CHECKPOINT_FILE
    note = path.read_text().splitlines()
    note[2] = "A" * 43 + "="
    path.write_text("\n".join(note) + "\n")
    ran = acclimate("enter", round_id, "--keys", me, "--json")
    assert "not the same ones" in refused(ran, "log_inconsistent") and path.name in ran.err


@pytest.mark.parametrize(
    "answer", [b"no checkpoint", b"", b"{}", None], ids=["words", "nothing", "json", "another key's"]
)
def test_what_can_not_be_compared_is_not_signed_on(
    answer: bytes | None, acclimate: Run, world: World, tmp_path: Path
) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "ada")
    done(acclimate("round", "list", "--keys", me))
    if answer is None:
        stranger = log.Signer(log.parse_vkey((me / "log.vkey").read_text().strip()).name, Ed25519PrivateKey.generate())
        answer = log.sign_note("\n".join(checkpoint(world).splitlines()[:3]) + "\n", stranger).encode()
    with cheating(world, {"^/v1/log/checkpoint$": lambda content: answer}) as server:
        mine = server.folder(me, tmp_path / "mine")
        ran = acclimate("enter", round_id, "--keys", mine, "--json")
        assert ran.code != 0 and server.written == [], ran.err


def test_with_a_damaged_key_of_the_log_nothing_is_signed(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "ada")
    with cheating(world, {}) as server:
        mine = server.folder(me, tmp_path / "mine")
        (mine / "log.vkey").write_text("no key\n")
        ran = acclimate("enter", round_id, "--keys", mine, "--json")
        assert ran.code != 0 and server.written == [], ran.err


def test_a_receipt_is_enough_to_know_it(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me, model = person(acclimate, world, "ada"), build_model(tmp_path / "one", seed=33)
    before = checkpoint(world)
    done(acclimate("enter", round_id, "--keys", me))
    done(acclimate("submit", model, "--round", round_id, "--keys", me, "--no-wait"))
    (me / seen_log.CHECKPOINT_FILE).unlink()
    with cheating(world, {"^/v1/log/checkpoint$": lambda content: before.encode()}) as server:
        mine = server.folder(me, tmp_path / "mine")
        ran = acclimate("submit", model, "--round", round_id, "--keys", mine, "--json")
    assert ".tlog-proof has seen" in refused(ran, "log_inconsistent")


def test_a_submission_that_the_server_does_not_know_any_more_ends_no_list(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "ada")
    done(acclimate("enter", round_id, "--keys", me))
    sent = []
    for seed in (34, 35):
        model = build_model(tmp_path / str(seed), seed=seed)
        sent.append(done(acclimate("submit", model, "--round", round_id, "--keys", me, "--no-wait", "--json")).json)
    path = next((me / "submissions").glob(f"*{sent[0]['commitment'][7:15]}*"))
    held = json.loads(path.read_text()) | {"submission": str(uuid.uuid4())}
    path.write_text(json.dumps(held))
    ran = acclimate("submission", "status", "--keys", me)
    assert ran.code == 1 and "does not know 1 of these submissions" in ran.err and "receipt verify" in ran.err
    lines = {
        each["commitment"]: line for each in sent for line in ran.out.splitlines() if each["commitment"][7:15] in line
    }
    assert " lost " in lines[sent[0]["commitment"]] and " lost " not in lines[sent[1]["commitment"]]
    assert json.loads(path.read_text()) == held
