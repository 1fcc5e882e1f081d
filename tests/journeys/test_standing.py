"""Standing entries and anchors at the command line: the same bytes in the next round, by a new signature, without being sent again."""

import json
import shutil
from pathlib import Path

import pytest
from cli_world import World, build_model, new_round, person, world
from commands import Run, done, refused
from sqlalchemy import func, select

from acclimate import client as actors
from acclimate.store import submissions, uploads
from acclimate_competitions import definition, digests, manifests

__all__ = ["world"]


def sent(world: World) -> int:
    """How many files the server was sent."""
    with world.store.snapshot() as tx:
        return tx.execute(select(func.count()).select_from(uploads)).scalar_one()


def manifest(world: World, commitment: str) -> dict:
    with world.store.snapshot() as tx:
        return tx.execute(select(submissions.c.manifest).where(submissions.c.commitment == commitment)).scalar_one()


def entered(acclimate: Run, world: World, name: str, round_id: str) -> Path:
    folder = person(acclimate, world, name)
    done(acclimate("enter", round_id, "--keys", folder))
    return folder


def submitted(acclimate: Run, world: World, folder: Path, round_id: str, *more: object) -> dict:
    done(acclimate("submit", *more, "--round", round_id, "--keys", folder, "--no-wait", "--json"))
    world.accept_checked()
    found = done(acclimate("submission", "status", "--round", round_id, "--keys", folder, "--json")).json
    return found[-1]


def test_the_same_model_stands_in_the_next_round_without_being_sent_again(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    first = new_round(acclimate, world)
    ada = entered(acclimate, world, "ada", first)
    model = build_model(tmp_path / "ada", seed=1)
    words = ("--title", "Ada's", "--weights-after", "publish", "--family", "tiny")
    old = submitted(acclimate, world, ada, first, model, *words)
    world.tick(first, hours=2)
    second = new_round(acclimate, world)
    # Whoever has not entered is told so, and nothing is begun.
    command = ("submit", "--round", second, "--standing-from", first, "--keys", ada)
    refused(acclimate(*command, "--json"), "entrant_unknown")
    entered(acclimate, world, "ada", second)
    shutil.rmtree(model)
    before = sent(world)
    new = submitted(acclimate, world, ada, second, "--standing-from", first)
    assert new["state"] == "accepted" and sent(world) == before
    assert new["commitment"] != old["commitment"]
    then, now = manifest(world, old["commitment"]), manifest(world, new["commitment"])
    assert now.pop("stands") == {"round": first, "commitment": old["commitment"]}
    assert now == then | {"round": second}
    # The same command again is the same submission; other words are another one, within the quota.
    assert submitted(acclimate, world, ada, second, "--standing-from", first)["commitment"] == new["commitment"]
    other = submitted(acclimate, world, ada, second, "--standing-from", first, "--title", "Ada's, again")
    assert other["commitment"] != new["commitment"] and other["state"] == "accepted"
    with actors.Client(world.url) as client:
        assert [r.type for _, r in client.records(second)][-4:] == ["SubmissionCommitted", "SubmissionAccepted"] * 2
    done(acclimate("submission", "withdraw", other["submission"], "--keys", ada))
    with world.store.snapshot() as tx:
        (entry,) = tx.round(second).frozen_entries()
    assert entry.commitment == new["commitment"]


@pytest.mark.slow
def test_what_does_not_stand_is_refused_and_costs_nothing(acclimate: Run, world: World, tmp_path: Path) -> None:
    first = new_round(acclimate, world)
    bea = entered(acclimate, world, "bea", first)
    model = build_model(tmp_path / "bea", seed=2)
    second = new_round(acclimate, world)
    entered(acclimate, world, "bea", second)
    command = ("submit", "--round", second, "--standing-from", first, "--keys", bea, "--json")
    # Nothing counts there yet.
    assert "nothing of 'bea' counts in" in refused(acclimate(*command), "submission_unknown")
    old = submitted(acclimate, world, bea, first, model)
    # Other files than those that counted.
    other = build_model(tmp_path / "other", seed=3)
    assert "other files" in refused(acclimate("submit", other, *command[1:]), "manifest_invalid")
    # The server asks the same, whatever a client says.
    kept = next((bea / "submissions").glob(f"{first}*.json"))
    true = kept.read_text()
    told = json.loads(true)
    told["manifest"]["files"][0]["sha256"] = digests.of_bytes(b"other")
    kept.write_text(json.dumps(told))
    assert "its files are not those of 'bea'" in refused(acclimate(*command), "manifest_invalid")
    kept.write_text(true)
    # From a key folder that did not submit it, the model's folder is needed.
    kept.unlink()
    assert "does not have the submission" in refused(acclimate(*command), "submission_unknown")
    new = submitted(acclimate, world, bea, second, model, "--standing-from", first)
    assert manifest(world, new["commitment"])["stands"]["commitment"] == old["commitment"]
    done(acclimate("submission", "withdraw", new["submission"], "--keys", bea))
    kept.write_text(true)
    # What was withdrawn in time counts nowhere.
    done(acclimate("submission", "withdraw", old["submission"], "--keys", bea))
    refused(acclimate(*command), "submission_unknown")
    ran = acclimate("submit", "--round", second, "--keys", bea)
    assert ran.code == 2 and "--standing-from" in ran.err
    with world.store.snapshot() as tx:
        state = tx.round(second)
    assert len(state.submissions) == 1


@pytest.fixture
def anchored(world: World, tmp_path: Path) -> tuple[World, Path, str]:
    """The world's competition with an anchor of which the definition names the model."""
    model = build_model(tmp_path / "untrained", seed=9)
    digest = digests.of_json({path.name: digests.of_file(path) for path in model.iterdir()})
    before = (world.competition / "competition.toml").read_bytes()
    text = (
        before.decode() + f'\n[[anchors]]\nname = "majority"\n\n[[anchors]]\nname = "untrained"\nmodel = "{digest}"\n'
    )
    (world.competition / "competition.toml").write_text(text)
    yield world, model, digest
    (world.competition / "competition.toml").write_bytes(before)


def test_anchors_enter_each_round_as_the_definition_names_them(
    acclimate: Run, anchored: tuple[World, Path, str], tmp_path: Path
) -> None:
    world, model, digest = anchored
    first = new_round(acclimate, world)
    me = person(acclimate, world, "organizer", "organizer")
    command = ("round", "anchors", first, "--keys", me, "--no-wait", "--json")
    assert "--model untrained=DIR" in acclimate(*command).err
    other = build_model(tmp_path / "other", seed=10)
    ran = acclimate(*command, "--model", f"untrained={other}")
    assert f"the definition's anchor is {digest}" in refused(ran, "manifest_invalid")
    (row,) = done(acclimate(*command, "--model", f"untrained={model}")).json
    assert (row["anchor"], row["model"], row["from"]) == ("untrained", digest, None)
    world.accept_checked()
    (row,) = done(acclimate(*command)).json
    assert row["state"] == "accepted"
    world.tick(first, hours=2)
    second = new_round(acclimate, world)
    shutil.rmtree(model)
    before = sent(world)
    done(acclimate("round", "anchors", second, "--keys", me, "--no-wait"))
    world.accept_checked()
    (row,) = done(acclimate("round", "anchors", second, "--keys", me, "--json")).json
    assert (row["from"], row["state"], sent(world)) == (first, "accepted", before)
    with world.store.snapshot() as tx:
        state = tx.round(second)
    (entry,) = state.frozen_entries()
    assert manifests.model_of(manifest(world, entry.commitment)) == digest
    assert state.competition.anchor("majority") == definition.Anchor("majority", None)
