"""Accounts and rounds at the command line, over real HTTP: what is refused before anything is sent, and what a server can't choose for whoever signs."""

import json
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from cli_world import CUSTODIANS, Change, World, always, cheating, forged, in_json, kinds, new_round, person, world
from commands import Run, done, refused

from acclimate import client as actors
from acclimate import keys
from acclimate.cli import status
from acclimate.client.definitions import definition_of
from acclimate_competitions import records
from acclimate_competitions.errors import Refusal

__all__ = ["world"]


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
    for command in (("submission", "withdraw", "x"), ("enter", round_id)):
        ran = acclimate(*command, "--keys", folder, "--json")
        refused(ran, "token_invalid")
        assert "hint: " in ran.err and "register --renew" in ran.err


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
    # What runs fills its bar as far as it is, and has not ended.
    stages = [{"kind": "prepare", "state": "committed"}, {"kind": "prepare", "state": "running", "progress": 0.98}]
    (told,) = (line for line in status.lines(document, stages) if line.startswith("preparations"))
    assert "1 of 2 ended, 1 under way" in told and told.count("█") == round(status.WIDTH * 1.98 / 2)
    (work,) = status._work(stages)
    assert status._short(work) == "preparations 1 of 2 ended (90 % done), 1 under way"
    frozen = {**document, "entries": 5, "entrants": 4, "submissions": 6}
    assert any("5 frozen (with the baselines' entries); 4 entrants, 6 sub" in line for line in status.lines(frozen, []))
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
