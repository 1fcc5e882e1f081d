"""A server that goes on after `acclimate db accept-loss`: its round ends, and whoever saw what was lost is told so by their own program."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_world import World, build_model, new_round, person
from commands import Ran, Run, acclimate, done, refused

pytest.importorskip("fastapi")
__all__ = ["acclimate"]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "world")
    yield made
    made.close()


def test_a_round_goes_on_to_publication_and_whoever_saw_more_is_told(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    """Of a round without witnesses; with them its custodians' programs would release nothing, as no quorum cosigns what came in the place."""
    round_id = new_round(acclimate, world)
    organizer, ada = person(acclimate, world, "organizer"), person(acclimate, world, "ada")
    key, early, late = organizer / "log.vkey", tmp_path / "early", tmp_path / "late"
    done(acclimate("enter", round_id, "--keys", ada))

    def mirrored(out: Path, *more: object) -> Ran:
        return acclimate("log", "mirror", "--out", out, "--server", world.url, "--log-key", key, *more)

    done(mirrored(early))
    # 1. After the backup bea comes, commits to a model, and has a receipt; somebody mirrors the log.
    size = done(acclimate("backup", tmp_path / "backup", "--data", world.data, "--keys", "--json")).json["log"]["size"]
    bea = person(acclimate, world, "bea")
    done(acclimate("enter", round_id, "--keys", bea))
    done(acclimate("submit", build_model(tmp_path / "model"), "--round", round_id, "--keys", bea, "--no-wait"))
    (receipt,) = (bea / "receipts").glob("*.committed.*")
    done(mirrored(late))
    # 2. The database is lost, the blobs are not; the operator accepts what the older one lacks.
    blobs = world.settings.blobs
    world.stop()
    new = ["--data", tmp_path / "new", "--blobs", blobs]
    lost = acclimate("restore", tmp_path / "backup", *new)
    assert lost.code == 1 and f"lost: {size + 2} entries were signed" in lost.out
    assert f"accepted: {size + 2} entries were signed" in done(acclimate("db", "accept-loss", *new)).out
    world.serve(tmp_path / "new", blobs=blobs)
    # 3. Who saw no more goes on; who did is told that the log went back.
    done(mirrored(early))
    assert f"shows a log of {size} entries, it signed one of {size + 2} before" in refused(
        mirrored(late, "--json"), "log_inconsistent"
    )
    asked = ("receipt", "verify", receipt, "--log-key", bea, "--json")
    assert "it went back" in refused(acclimate(*asked, "--log", world.url), "log_inconsistent")
    # Her account is gone with the rest, her key is not.
    refused(acclimate("enter", round_id, "--keys", bea, "--json"), "token_invalid")
    done(acclimate("register", "--renew", "--server", world.url, "--name", "bea", "--keys", bea))
    assert "went back" in refused(acclimate("enter", round_id, "--keys", bea, "--json"), "log_inconsistent")
    # She accepts it, and keeps what is lost elsewhere.
    receipts = (bea / "receipts").rename(tmp_path / "bea's lost receipts")
    (bea / "log.checkpoint").unlink(missing_ok=True)
    asked = ("receipt", "verify", receipts / receipt.name, "--log-key", bea, "--json")
    done(acclimate("enter", round_id, "--keys", bea))
    # 4. The round ends as any other.
    assert world.tick(round_id, hours=1) == ["RoundClosed", "PreparationFinished"]
    for name in ("custodian-a", "custodian-b"):
        done(acclimate("custodian", "release", round_id, "--keys", world.root / "people" / name))
    assert world.tick(round_id, seconds=1) == ["HoldoutOpened", "EvaluationFinished"]
    done(acclimate("round", "publish", round_id, "--keys", organizer))
    bundle = tmp_path / "bundle.zip"
    done(acclimate("round", "bundle", round_id, "--out", bundle, "--server", world.url))
    report = done(acclimate("verify", bundle, "--log-key", key, "--json")).json
    stands = {check["name"]: check["status"] for check in report["checks"]}
    assert "FAILED" not in stands.values() and stands["split view"] == "NOT CHECKED"
    # 5. Entries in the place of the lost ones are two histories, which receipt and mirror prove.
    assert "something else as entry" in refused(acclimate(*asked, "--bundle", bundle), "proof_invalid")
    assert done(acclimate(*asked, "--bundle", late)).code == 0
    assert "does not begin with" in refused(mirrored(late, "--json"), "log_inconsistent")
    assert "does not begin with" in refused(acclimate(*asked, "--log", world.url), "log_inconsistent")
    done(acclimate("log", "check", late, "--log-key", key))
    done(mirrored(early))
