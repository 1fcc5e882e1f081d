"""Who does something at the wrong moment, or gives what can't be, is told in words what to do instead."""

import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from cli_world import CUSTODIANS, World, new_round, person, world
from commands import Run, done, refused

from acclimate import log
from acclimate_competitions import rounds
from acclimate_competitions.errors import Refusal

__all__ = ["world"]


@pytest.fixture
def me(acclimate: Run, world: World) -> Path:
    return person(acclimate, world, "organizer", "organizer")


def hint(acclimate: Run, *command: object, code: str, sentence: str = "") -> str:
    """The hint of a command that is refused; neither it nor the sentence is of records' names alone."""
    ran = acclimate(*command, "--json")
    said = refused(ran, code)
    assert sentence in said
    return str(ran.json["error"]["hint"])


def test_the_close_of_a_round_moves_while_it_is_open_and_not_beyond_what_was_fixed(
    acclimate: Run, world: World, me: Path
) -> None:
    round_id = new_round(acclimate, world, until="sealed")
    extend = ("round", "extend", round_id, "--keys", me, "--closes")
    told = hint(acclimate, *extend, "+2h", code="phase_wrong", sentence="is sealed and does not take a later close")
    assert "only once the round is open" in told and "acclimate round void" in told
    for one in CUSTODIANS:
        done(acclimate("custodian", "ack", round_id, "--keys", world.root / "people" / one))
    assert world.tick(round_id, seconds=1) == ["RoundOpened"]
    assert "--closes-latest" in hint(acclimate, *extend, "+60h", code="guard_failed")
    assert "--closes-latest" in hint(acclimate, *extend, "+1m", code="guard_failed")
    world.now += timedelta(hours=2)
    assert "before it passes" in hint(acclimate, *extend, "+3h", code="round_closed", sentence="a later close")


def test_a_share_of_a_void_round_is_not_acknowledged_and_its_terms_are_not_read(
    acclimate: Run, world: World, me: Path
) -> None:
    round_id = new_round(acclimate, world, until="sealed")
    done(acclimate("round", "void", round_id, "--reason", "a test", "--keys", me))
    ran = acclimate("custodian", "ack", round_id, "--keys", world.root / "people" / CUSTODIANS[0], "--json")
    assert "is voided and does not take the acknowledgement of a share" in refused(ran, "phase_wrong")
    assert "any 2 of 3 shares" not in ran.err and not any(kind in ran.json["error"]["hint"] for kind in rounds.TABLE)


def test_a_baseline_that_the_definition_does_not_name_is_told_those_that_it_names(
    acclimate: Run, world: World, me: Path, tmp_path: Path
) -> None:
    round_id = new_round(acclimate, world)
    enter = ("enter", round_id, "--keys", me, "--baseline", "untraned")
    submit = ("submit", tmp_path, "--round", round_id, "--keys", me, "--baseline", "untraned")
    for command in (enter, submit):
        assert hint(acclimate, *command, code="guard_failed", sentence="the definition names untrained")
    assert not (me / "baselines" / "untraned").exists()


def test_who_enters_twice_and_who_comes_too_late_is_told_what_stands(acclimate: Run, world: World) -> None:
    round_id, ada = new_round(acclimate, world), person(acclimate, world, "ada")
    enter = ("enter", round_id, "--keys", ada)
    done(acclimate(*enter))
    told = hint(acclimate, *enter, "--conflict", "organizer's student", code="conflict")
    assert "tell the organizer" in told


def test_keys_and_dates_that_can_not_be_are_told_with_what_they_should_be(
    acclimate: Run, world: World, me: Path
) -> None:
    people = [part for one in CUSTODIANS for part in ("--custodian", person(acclimate, world, one, "custodian"))]
    create = ("round", "create", world.competition, *people, "--name", "ways-on")
    dates = ("--opens", "+1m", "--closes", "+30s")
    assert "--closes +30d" in hint(acclimate, *create, *dates, "--keys", me, code="guard_failed")
    own = (*create, "--closes", "+1h", "--keys", world.root / "people" / CUSTODIANS[0])
    told = hint(acclimate, *own, code="guard_failed", sentence="custodian custodian-a and organizer have the same")
    assert "--keys DIR" in told
    key = (me / "log.vkey").read_text().strip()
    for cut in (key[:-7], key[:-1], key.replace("+", "", 1)):
        with pytest.raises(Refusal) as caught:
            log.parse_vkey(cut)
        assert "whole" in caught.value.hint


def test_a_ranking_that_is_published_is_not_published_again(acclimate: Run, world: World, me: Path) -> None:
    round_id = new_round(acclimate, world)
    world.tick(round_id, hours=1)
    for one in CUSTODIANS[:2]:
        done(acclimate("custodian", "release", round_id, "--keys", world.root / "people" / one))
    world.tick(round_id, seconds=1)
    done(acclimate("round", "publish", round_id, "--keys", me))
    again = ("round", "publish", round_id, "--reason", "once more", "--keys", me)
    assert "acclimate round revise" in hint(acclimate, *again, code="conflict")


@pytest.mark.parametrize("until", ["draft", "sealed"])
def test_nobody_waits_for_a_round_that_can_not_open_any_more(
    acclimate: Run, world: World, me: Path, until: str
) -> None:
    round_id = new_round(acclimate, world, until=until)
    world.now += timedelta(hours=2)
    wait = ("status", round_id, "--keys", me, "--until")
    for phase in ("open", "published"):
        ran = acclimate(*wait, phase)
        assert ran.code == 1 and ran.out.count("\n") == 1
        assert "passed before the round opened; the organizer voids it" in ran.out
    # What was there already is no wait.
    assert done(acclimate(*wait, until)).code == 0
    done(acclimate("round", "void", round_id, "--reason", "a test", "--keys", me))
    assert acclimate(*wait, "open").code == 1


def test_a_model_for_an_anchor_that_the_definition_does_not_name_is_not_passed_over(
    acclimate: Run, world: World, me: Path, tmp_path: Path
) -> None:
    round_id = new_round(acclimate, world)
    anchors = ("round", "anchors", round_id, "--keys", me)
    told = hint(acclimate, *anchors, "--model", f"untrained={tmp_path}", code="guard_failed", sentence="names none")
    assert "--baseline" in told
    assert "names no anchor" in done(acclimate(*anchors)).out
    # Where it names some, they are told as soon as the round is created, with the one command that enters them.
    folder = Path(shutil.copytree(world.competition, tmp_path / "anchored"))
    path = folder / "competition.toml"
    path.write_text(
        path.read_text("utf-8") + f'\n[[anchors]]\nname = "untrained"\nmodel = "sha256:{"0" * 64}"\n', "utf-8"
    )
    people = [part for one in CUSTODIANS for part in ("--custodian", world.root / "people" / one)]
    create = ("round", "create", folder, *people, "--name", "anchored", "--closes", "+1h", "--keys", me)
    ran = done(acclimate(*create))
    assert f"acclimate round anchors {ran.out.strip()} --keys {me}" in ran.err and "--baseline" not in ran.err
