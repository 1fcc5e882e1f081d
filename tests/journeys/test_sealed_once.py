"""What is kept of a sealed holdout is of the seal that the log has, whatever was tried besides, and the folder that is sealed is the round's."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_world import CUSTODIANS, World, cheating, person, with_new_holdout, world
from commands import Run, done, refused

__all__ = ["world"]


def built(world: World, to: Path, *, said: str) -> Path:
    """The world's competition with a holdout of its own."""
    to.mkdir()
    shutil.copy(world.competition / "competition.toml", to)
    return with_new_holdout(world, to, said=said)


def created(acclimate: Run, world: World, folder: Path, *, name: str) -> str:
    me = person(acclimate, world, "organizer", "organizer")
    custodians = [part for one in CUSTODIANS for part in ("--custodian", person(acclimate, world, one, "custodian"))]
    command = ("round", "create", folder, "--name", name, "--closes", "+1h", *custodians, "--keys", me, "--json")
    return str(done(acclimate(*command)).json["round"])


def kept(me: Path) -> dict[str, bytes]:
    """All that the key folder keeps of holdouts and seals."""
    paths = [path for name in ("holdouts", "seals") for path in (me / name).rglob("*.json")]
    return {str(path.relative_to(me)): path.read_bytes() for path in paths}


def played(acclimate: Run, world: World, round_id: str) -> None:
    """A sealed round that nobody enters, to its publication."""
    for one in CUSTODIANS:
        done(acclimate("custodian", "ack", round_id, "--keys", world.root / "people" / one))
    assert world.tick(round_id, seconds=1) == ["RoundOpened"]
    world.tick(round_id, hours=1)
    for one in CUSTODIANS[:2]:
        done(acclimate("custodian", "release", round_id, "--keys", world.root / "people" / one))
    assert world.tick(round_id, seconds=1) == ["HoldoutOpened", "EvaluationFinished"]
    done(acclimate("round", "publish", round_id, "--keys", world.root / "people" / "organizer"))


def following(acclimate: Run, world: World, round_id: str, folder: Path) -> Any:
    me = world.root / "people" / "organizer"
    name = ("--name", f"after-{folder.name}", "--closes", "+1h", "--dry-run", "--json")
    return acclimate("round", "next", round_id, folder, *name, "--keys", me)


def test_a_seal_that_is_refused_changes_nothing_of_what_is_kept_of_the_one_in_the_log(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    me = person(acclimate, world, "organizer", "organizer")
    first, second = (built(world, tmp_path / said, said=said) for said in ("first", "second"))
    round_id = created(acclimate, world, first, name="refused")
    done(acclimate("round", "seal", round_id, first, "--keys", me))
    before = kept(me)
    seal = json.loads(before[f"seals/{round_id}/sealed.json"])["real"]["fields"]["seal"]
    assert json.loads(before[f"holdouts/{round_id}.json"])["seal"] == seal
    for more in ((), ("--holdout-changed",)):
        ran = acclimate("round", "seal", round_id, second, *more, "--keys", me, "--json")
        assert f"sealed already: {seal}" in refused(ran, "conflict")
        assert "acclimate round void" in ran.json["error"]["hint"]
        assert kept(me) == before
    # A server that shows no seal takes no second one either: the digests stay those of the first.
    with cheating(world, {r"/records(\?|$)": lambda raw: json.dumps(json.loads(raw)[:1]).encode()}) as cheat:
        mine = cheat.folder(me, tmp_path / "mine")
        refused(acclimate("round", "seal", round_id, second, "--holdout-changed", "--keys", mine, "--json"), "conflict")
        assert kept(mine)[f"holdouts/{round_id}.json"] == before[f"holdouts/{round_id}.json"]
    # The same command as at first goes on.
    assert done(acclimate("round", "seal", round_id, first, "--keys", me, "--json")).json["seal"] == seal
    assert kept(me) == before
    played(acclimate, world, round_id)
    # Its name is no other round's, and it does not begin again.
    custodians = [part for one in CUSTODIANS for part in ("--custodian", world.root / "people" / one)]
    for command in (("create", second, *custodians), ("next", round_id, second)):
        again = ("--name", "refused", "--closes", "+2h", "--keys", me, "--json")
        ran = acclimate("round", *command, *again)
        assert f"{round_id}, and it is published" in refused(ran, "round_exists")
        assert "--name" in ran.json["error"]["hint"] and "going on" not in ran.err
    assert kept(me) == before
    assert f"{round_id}: its holdout has" in str(following(acclimate, world, round_id, first).json["error"])
    (seen,) = [
        one for one in done(following(acclimate, world, round_id, second)).json["earlier"] if one["round"] == round_id
    ]
    assert (seen["by"], seen["problems"]) == ("kept digests", [])


@pytest.mark.parametrize("told", ["of another seal", "of none, by an earlier version"])
def test_digests_that_are_not_of_the_seal_in_the_log_decide_nothing(
    acclimate: Run, world: World, tmp_path: Path, told: str
) -> None:
    """As an earlier version left them, whose refused seal was kept: the published bundle decides, and until then nothing is known."""
    me = person(acclimate, world, "organizer", "organizer")
    number = len(told)
    first, second = (built(world, tmp_path / said, said=f"{said}-{number}") for said in ("true", "false"))
    round_id, draft = (
        created(acclimate, world, first, name=f"a{number}"),
        created(acclimate, world, second, name=f"b{number}"),
    )
    for each, folder in ((round_id, first), (draft, second)):
        done(acclimate("round", "seal", each, folder, "--keys", me))
    wrong = json.loads((me / "holdouts" / f"{draft}.json").read_text())
    if told != "of another seal":
        del wrong["seal"]
        shutil.copyfile(me / "seals" / draft / "sealed.json", me / "seals" / round_id / "sealed.json")
    (me / "holdouts" / f"{round_id}.json").write_text(json.dumps(wrong))
    done(acclimate("round", "void", draft, "--reason", "a test", "--keys", me))
    (me / "holdouts" / f"{draft}.json").unlink()
    (seen,) = [s for s in done(following(acclimate, world, round_id, second)).json["earlier"] if s["round"] == round_id]
    assert seen["holdout"] == "NOT CHECKED" and "the log has sha256:" in seen["why"]
    played(acclimate, world, round_id)
    ran = following(acclimate, world, round_id, first)
    assert f"{round_id}: its holdout has" in str(ran.json["error"])
    assert f"reading the holdout of {round_id} from its bundle" in ran.err
    done(following(acclimate, world, round_id, second))


def test_digests_that_an_earlier_version_kept_beside_the_seal_in_the_log_count(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    me = person(acclimate, world, "organizer", "organizer")
    folder = built(world, tmp_path / "older", said="older")
    round_id = created(acclimate, world, folder, name="older")
    done(acclimate("round", "seal", round_id, folder, "--keys", me))
    path = me / "holdouts" / f"{round_id}.json"
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "seal"}))
    ran = following(acclimate, world, round_id, folder)
    assert f"{round_id}: its holdout has" in refused(ran, "splits_invalid")


def test_the_folder_that_is_sealed_is_the_one_that_the_round_was_created_from(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    me = person(acclimate, world, "organizer", "organizer")
    first, second = (built(world, tmp_path / said, said=f"own-{said}") for said in ("mine", "other"))
    round_id = created(acclimate, world, first, name="folder")
    before = kept(me)
    ran = acclimate("round", "seal", round_id, second, "--keys", me, "--json")
    assert "is not the one that" in refused(ran, "conflict")
    assert "--holdout-changed" in ran.json["error"]["hint"]
    # What everybody may have is fixed in RoundDefined, and not to be changed by a word.
    public = Path(shutil.copytree(first, tmp_path / "public"))
    path = public / "splits" / "parity" / "preparation.parquet"
    columns = pq.read_table(path).to_pydict()
    columns["input"][0] = "something else"
    pq.write_table(pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()}), path)
    for more in ((), ("--holdout-changed",)):
        ran = acclimate("round", "seal", round_id, public, *more, "--keys", me, "--json")
        assert "splits/parity/preparation.parquet is not as" in refused(ran, "conflict")
    assert kept(me) == before
    # The same round begun again from the other folder is what is meant now, and so is a word.
    assert created(acclimate, world, second, name="folder") == round_id
    refused(acclimate("round", "seal", round_id, first, "--keys", me, "--json"), "conflict")
    done(acclimate("round", "seal", round_id, first, "--holdout-changed", "--keys", me))
    # A key folder that kept no holdout's digest, as of an earlier version, seals what it is given.
    third = created(acclimate, world, first, name="folder-2")
    rounds = json.loads((me / "rounds.json").read_text())
    del rounds[third]["holdout"]
    (me / "rounds.json").write_text(json.dumps(rounds))
    done(acclimate("round", "seal", third, second, "--keys", me))
