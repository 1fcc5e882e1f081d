"""The next round of a competition at the command line: what it takes over, what must be new, what can't be told."""

import json
import shutil
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_world import CUSTODIANS, World, new_round, person, with_new_holdout, world
from commands import Run, done, refused

from acclimate import client as actors
from acclimate import keys
from acclimate.client import holdouts
from acclimate_competitions import definition
from acclimate_competitions.errors import Refusal

__all__ = ["world"]


def published(acclimate: Run, world: World, round_id: str) -> None:
    """A round that nobody enters, played to its end."""
    me = world.root / "people" / "organizer"
    world.tick(round_id, hours=1)
    for name in CUSTODIANS[:2]:
        done(acclimate("custodian", "release", round_id, "--keys", world.root / "people" / name))
    assert world.tick(round_id, seconds=1) == ["HoldoutOpened", "EvaluationFinished"]
    done(acclimate("round", "publish", round_id, "--keys", me))


@pytest.fixture(scope="module")
def first(world: World) -> dict[str, str]:
    return {}


@pytest.fixture
def played(acclimate: Run, world: World, first: dict[str, str]) -> str:
    """The competition's published first round."""
    if not first:
        first["id"] = new_round(acclimate, world)
        published(acclimate, world, first["id"])
    return first["id"]


def test_the_next_round_takes_over_definition_and_custodians_and_has_a_new_holdout(
    acclimate: Run, world: World, played: str, tmp_path: Path
) -> None:
    me = person(acclimate, world, "organizer", "organizer")
    folder = with_new_holdout(world, tmp_path / "second", said="second")
    command = ("round", "next", "digits", folder, "--name", "second", "--closes", "+1h", "--keys", me)
    looked = done(acclimate(*command, "--dry-run", "--json")).json
    assert (looked["round"], looked["last"], looked["differences"]) == (None, played, [])
    assert [(seen["round"], seen["by"], seen["problems"]) for seen in looked["earlier"]] == [
        (played, "kept digests", [])
    ]
    assert (folder / "competition.toml").read_bytes() == (world.competition / "competition.toml").read_bytes()
    ran = done(acclimate(*command, "--json"))
    second = ran.json["round"]
    assert second.startswith("digits-second-") and f"acclimate round seal {second}" in ran.err
    # As `round create` says it: what the definition names is the organizer's to enter.
    assert f"acclimate enter {second} --baseline untrained --keys {me}" in ran.err
    assert f"acclimate submit MODEL --round {second} --baseline untrained --keys {me}" in ran.err
    # Once more, as after a connection that was lost: the same round, whatever time it is now.
    world.now += timedelta(seconds=30)
    again = done(acclimate(*command, "--json"))
    assert again.json["round"] == second and "going on with" in again.err
    with actors.Client(world.url) as client:
        records = {round_id: client.records(round_id)[0][1] for round_id in (played, second)}
    assert records[second]["predecessor"] == played
    for name in ("definition", "recipe", "custodians", "policy", "scorer"):
        assert records[second][name] == records[played][name]
    # Its seal is of the new rows, and its digests are kept for the one after it.
    done(acclimate("round", "seal", second, folder, "--keys", me))
    assert (me / "holdouts" / f"{second}.json").stat().st_mode & 0o077 == 0
    third = with_new_holdout(world, tmp_path / "third", said="second")
    ran = acclimate("round", "next", second, third, "--name", "third", "--closes", "+1h", "--keys", me, "--json")
    assert f"{second}: its holdout has" in " ".join(ran.json["error"]["problems"])
    refused(ran, "splits_invalid")


def test_a_holdout_that_was_published_is_not_sealed_again(
    acclimate: Run, world: World, played: str, tmp_path: Path
) -> None:
    """Also in a round that follows none: the key folder keeps what it sealed. It is told before a round is begun, and once more."""
    me = person(acclimate, world, "organizer", "organizer")
    custodians = [part for name in CUSTODIANS for part in ("--custodian", world.root / "people" / name)]

    def create(name: str, folder: Path) -> Any:
        command = ("round", "create", folder, "--name", name, "--closes", "+1h", *custodians, "--keys", me)
        return acclimate(*command, "--json")

    def copied(public: bool) -> Path:
        folder = Path(shutil.copytree(world.competition, tmp_path / f"public-{public}"))
        text = (folder / "competition.toml").read_text("utf-8")
        lines = [line for line in text.splitlines() if not line.startswith("data_is_public")]
        lines.insert(1, f"data_is_public = {str(public).lower()}")
        (folder / "competition.toml").write_text("\n".join(lines), "utf-8")
        return folder

    secret = copied(public=False)
    ran = create("again-false", secret)
    assert played in refused(ran, "splits_invalid")
    assert "again-false" not in done(acclimate("round", "list", "--server", world.url)).out
    # The folder is built again after the round was created.
    other = with_new_holdout(world, tmp_path / "other", said="other")
    shutil.copyfile(secret / "competition.toml", other / "competition.toml")
    if (secret / "tokenizer.json").exists():
        shutil.copyfile(secret / "tokenizer.json", other / "tokenizer.json")
    round_id = done(create("again-false", other)).json["round"]
    ran = acclimate("round", "seal", round_id, secret, "--holdout-changed", "--keys", me, "--json")
    assert played in refused(ran, "splits_invalid")
    # What everybody may have is a warning, at both.
    public = copied(public=True)
    ran = done(create("again-true", public))
    assert f"warning: {played}: its holdout has" in ran.err
    ran = done(acclimate("round", "seal", ran.json["round"], public, "--keys", me, "--json"))
    assert f"warning: {played}: its holdout has" in ran.err
    # A round that follows another has rows of its own also then, and the way on is told.
    following = ("round", "next", played, public, "--name", "again-next", "--closes", "+1h", "--keys", me, "--json")
    ran = acclimate(*following)
    refused(ran, "splits_invalid")
    assert "acclimate round create" in ran.json["error"]["hint"]


def test_a_holdout_is_read_only_where_an_earlier_round_of_the_keys_is_known(
    acclimate: Run, world: World, played: str, tmp_path: Path
) -> None:
    """It may have millions of rows."""
    competition = definition.load(world.competition)
    broken = Path(shutil.copytree(world.competition, tmp_path / "broken"))
    for path in broken.glob("splits/*/holdout.parquet"):
        path.write_bytes(b"nothing that can be read")
    for name, reads in (("organizer", True), ("somebody-new", False)):
        own = keys.load(person(acclimate, world, name, "organizer"))
        with actors.Client(world.url) as client:
            asked = partial(holdouts.require_unknown, client, own, competition, broken, but="", follows=False)
            if reads:
                with pytest.raises(Refusal):
                    asked()
            else:
                asked()


def test_the_newest_round_of_ones_own_is_followed_and_no_strangers(
    acclimate: Run, world: World, played: str, tmp_path: Path
) -> None:
    me = person(acclimate, world, "organizer", "organizer")
    other = person(acclimate, world, "other-organizer", "organizer")
    custodians = [part for name in CUSTODIANS for part in ("--custodian", world.root / "people" / name)]
    world.now += timedelta(seconds=30)
    strange = ("round", "create", world.competition, "--name", "zz", "--closes", "+1h", *custodians, "--keys", other)
    stranger = done(acclimate(*strange, "--json")).json["round"]
    folder = with_new_holdout(world, tmp_path / "third", said="third")
    command = ("round", "next", "digits", folder, "--name", "third", "--closes", "+1h", "--dry-run", "--json")
    ran = done(acclimate(*command, "--keys", me))
    assert ran.json["last"] != stranger and ran.json["last"].startswith("digits-")
    assert f"note: {stranger} is newer, and another organizer's" in ran.err
    ran = done(acclimate(*command, "--keys", other))
    assert ran.json["last"] == stranger and "another organizer" not in ran.err
    ran = done(acclimate("round", "next", stranger, *command[3:], "--keys", me))
    assert ran.json["last"] == stranger


def test_an_example_or_an_input_that_stood_in_an_earlier_round_is_refused(
    acclimate: Run, world: World, played: str, tmp_path: Path
) -> None:
    me = person(acclimate, world, "organizer", "organizer")
    before = pq.read_table(world.competition / "splits" / "digit" / "holdout.parquet")["input"][3].as_py()
    # Another example id, and the input but for case and blanks.
    folder = with_new_holdout(world, tmp_path / "like", said="like", like={"digit": f"  {before.upper()} "})
    command = ("round", "next", played, folder, "--name", "like", "--closes", "+1h", "--keys", me, "--json")
    assert "1 inputs, the first: digit, 'like-digit-0'" in refused(acclimate(*command), "splits_invalid")
    # Without what the key folder kept, the published holdout is read, and says the same.
    kept = me / "holdouts" / f"{played}.json"
    digests = json.loads(kept.read_text())
    kept.unlink()
    ran = acclimate(*command)
    assert "1 inputs, the first: digit, 'like-digit-0'" in refused(ran, "splits_invalid")
    assert f"reading the holdout of {played} from its bundle" in ran.err
    read = json.loads(kept.read_text())
    assert read.pop("source") == "published holdout"
    del digests["seal"]
    assert read == digests
    with actors.Client(world.url) as client:
        assert "like" not in {summary["name"] for summary in client.rounds()}


def test_what_a_round_gave_to_everybody_is_in_no_later_holdout(
    acclimate: Run, world: World, played: str, tmp_path: Path
) -> None:
    me = person(acclimate, world, "organizer", "organizer")
    path = world.competition / "splits" / "parity" / "preparation.parquet"
    known = pq.read_table(path)["input"][0].as_py()
    folder = with_new_holdout(world, tmp_path / "known", said="known", like={"parity": known})
    # The new round's own preparation split no longer has it.
    prepared = pq.read_table(folder / "splits" / "parity" / "preparation.parquet").to_pydict()
    prepared["input"][0] = "something else"
    pq.write_table(pa.table(prepared), folder / "splits" / "parity" / "preparation.parquet")
    ran = acclimate("round", "next", played, folder, "--name", "known", "--closes", "+1h", "--keys", me, "--json")
    sentence = refused(ran, "splits_invalid")
    assert "everybody has had, in splits/parity/preparation.parquet, 1 inputs" in sentence


def test_another_recipe_is_refused_unless_it_is_meant_and_then_said(
    acclimate: Run, world: World, played: str, tmp_path: Path
) -> None:
    me = person(acclimate, world, "organizer", "organizer")
    folder = with_new_holdout(world, tmp_path / "other", said="other")
    text = (world.competition / "competition.toml").read_text().replace("epochs = 6", "epochs = 7")
    (folder / "competition.toml").write_text(text.replace('title = "Hand', 'title = "More hand'))
    command = ("round", "next", played, folder, "--name", "other", "--closes", "+1h", "--keys", me)
    ran = acclimate(*command, "--json")
    assert "the recipe is sha256:" in refused(ran, "guard_failed")
    assert ran.json["error"]["problems"] == ["preparation.epochs: 6 → 7"]
    ran = done(acclimate(*command, "--recipe-changed", "--dry-run"))
    assert "ANOTHER" in ran.out and "preparation.epochs" in ran.out and "6 → 7" in ran.out
    assert f"recipe are not those of {played}" in ran.err
    looked = done(acclimate(*command, "--recipe-changed", "--dry-run", "--json")).json
    assert {(d["part"], d["key"]) for d in looked["differences"]} == {
        ("recipe", "preparation.epochs"),
        ("rules", "title"),
    }


def test_what_could_not_be_checked_is_said(acclimate: Run, world: World, played: str, tmp_path: Path) -> None:
    """A sealed round of which the key folder knows nothing; one that was voided unopened may serve again."""
    me = person(acclimate, world, "organizer", "organizer")
    sealed = new_round(acclimate, world, until="sealed")
    digests = me / "holdouts" / f"{sealed}.json"
    aside = digests.rename(tmp_path / "aside.json")
    folder = with_new_holdout(world, tmp_path / "blind", said="blind")
    command = ("round", "next", played, folder, "--name", "blind", "--closes", "+1h", "--keys", me, "--dry-run")
    ran = done(acclimate(*command))
    (line,) = [line for line in ran.out.splitlines() if sealed in line]
    assert "NOT CHECKED" in line and "keeps no digests of it" in line
    aside.rename(digests)
    # What stands in a holdout that is secret still must not be given to everybody by the next round.
    task = definition.load(world.competition).tasks[0].name
    old = pq.read_table(world.competition / "splits" / task / "holdout.parquet").to_pydict()
    path = folder / "splits" / task / "preparation.parquet"
    pq.write_table(pa.table({name: pa.array(values, pa.string()) for name, values in old.items()}), path)
    assert f"{sealed}: its holdout is secret still" in " ".join(
        (ran := acclimate(*command, "--json")).json["error"]["problems"]
    )
    refused(ran, "splits_invalid")
    done(acclimate("round", "void", sealed, "--reason", "a test", "--keys", me))
    again = with_new_holdout(world, tmp_path / "again", said="again")
    assert done(acclimate("round", "next", sealed, again, *command[4:], "--json")).json["last"] == sealed


def test_a_round_follows_one_of_its_own_competition(acclimate: Run, world: World, played: str, tmp_path: Path) -> None:
    me = person(acclimate, world, "organizer", "organizer")
    folder = with_new_holdout(world, tmp_path / "foreign", said="foreign")
    text = (world.competition / "competition.toml").read_text().replace('slug = "digits"', 'slug = "letters"')
    (folder / "competition.toml").write_text(text)
    command = ("round", "next", played, folder, "--name", "foreign", "--closes", "+1h", "--keys", me, "--json")
    assert "is of the competition 'letters'" in refused(acclimate(*command), "definition_invalid")
    refused(acclimate("round", "next", "no-such", *command[3:]), "round_unknown")


def test_a_close_that_is_past_is_told_plainly(acclimate: Run, world: World) -> None:
    me = person(acclimate, world, "organizer", "organizer")
    people = [part for name in CUSTODIANS for part in ("--custodian", person(acclimate, world, name, "custodian"))]
    command = ("round", "create", world.competition, "--name", "past", "--closes", "2020-01-01T00:00:00Z", *people)
    ran = acclimate(*command, "--keys", me, "--json")
    assert "the round would close 2020-01-01" in refused(ran, "guard_failed")
    assert "--closes +30d" in ran.json["error"]["hint"]
