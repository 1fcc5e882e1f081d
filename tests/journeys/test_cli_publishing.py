"""Publishing, downloading and watching a round at the command line, over real HTTP."""

import json
import subprocess
import sys
import time
from pathlib import Path

from cli_world import CUSTODIANS, World, cheating, kinds, new_round, person, with_another_file, world
from commands import Run, done, refused
from waiting import WITHIN

from acclimate import client as actors
from acclimate_competitions import digests

__all__ = ["world"]


def test_a_round_is_published_from_what_the_organizer_recomputes(acclimate: Run, world: World, tmp_path: Path) -> None:
    """Even one that nobody entered: the baseline that needs no model stands alone."""
    round_id = new_round(acclimate, world)
    me, b = world.root / "people" / "organizer", world.root / "people" / CUSTODIANS[1]
    world.tick(round_id, hours=1)
    for name in CUSTODIANS[:2]:
        done(acclimate("custodian", "release", round_id, "--keys", world.root / "people" / name))
    assert world.tick(round_id, seconds=1) == ["HoldoutOpened", "EvaluationFinished"]
    for command in (("ranking",), ("round", "bundle", "--out", tmp_path / "early.zip")):
        refused(acclimate(*command, round_id, "--server", world.url, "--json"), "phase_wrong")
    refused(acclimate("round", "publish", round_id, "--keys", b, "--json"), "signature_invalid")
    # A bundle that is wrong in a place from which no score follows is no ground for a signature either.
    with cheating(world, {"/bundle$": with_another_file("prepared.json", b"[{}]")}) as cheat:
        ran = acclimate("round", "publish", round_id, "--keys", cheat.folder(me, tmp_path / "cheated"), "--json")
    refused(ran, "bundle_invalid")
    assert "prepared" in ran.err
    assert kinds(world, round_id)[-1] == "EvaluationFinished"
    ran = done(acclimate("round", "publish", round_id, "--keys", me, "--json"))
    assert "the baseline untrained, which the definition names, was never submitted" in ran.err
    value = ran.json
    assert kinds(world, round_id)[-1] == "RankingPublished"
    assert done(acclimate("round", "publish", round_id, "--keys", me, "--json")).json == value

    document = done(acclimate("ranking", round_id, "--server", world.url, "--json")).json
    assert digests.of_json(document) == value["digest"]
    assert "majority (baseline)" in done(acclimate("ranking", round_id, "--server", world.url)).out
    bundle = tmp_path / "bundle.zip"
    done(acclimate("round", "bundle", round_id, "--out", bundle, "--server", world.url))
    with actors.Client(world.url) as client:
        vkey = client.server()["log"]
        (tmp_path / "r.tlog-proof").write_text(client.proof(value["index"]))
        (tmp_path / "first.tlog-proof").write_text(client.proof(0))
    report = done(acclimate("verify", bundle, "--log-key", vkey, "--json")).json
    assert report["round"] == round_id
    for receipt in ("r", "first"):
        ran = acclimate("receipt", "verify", tmp_path / f"{receipt}.tlog-proof", "--bundle", bundle)
        assert "NOT CHECKED  whose log" in done(ran).out
        assert "ok           bundle" in ran.out
        assert "ok           same history" in ran.out
    # A receipt from later says nothing of whether the bundle's log goes on to its checkpoint.
    new_round(acclimate, world, until="draft")
    with actors.Client(world.url) as client:
        # The first makes sure that there is a checkpoint of the longer log.
        (tmp_path / "new.tlog-proof").write_text(client.proof(value["index"] + 1))
        (tmp_path / "later.tlog-proof").write_text(client.proof(0))
    (tmp_path / "log.key").write_text(vkey + "\n")
    checked = {"later": ("ok", "NOT CHECKED"), "new": ("NOT CHECKED", "NOT CHECKED")}
    for receipt, statuses in checked.items():
        path = tmp_path / f"{receipt}.tlog-proof"
        ran = acclimate("receipt", "verify", path, "--bundle", bundle, "--log-key", tmp_path / "log.key", "--json")
        found = {check["name"]: check["status"] for check in done(ran).json["checks"]}
        assert (found["bundle"], found["same history"]) == statuses


def test_everybody_gets_the_public_files_and_never_a_holdout(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world, until="draft")
    out = tmp_path / "public"
    found = done(acclimate("round", "files", round_id, "--out", out, "--server", world.url, "--json")).json
    assert sorted(found["files"]) == sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert (out / "competition.toml").read_bytes() == (world.competition / "competition.toml").read_bytes()
    assert not [name for name in found["files"] if "holdout" in name]
    # What is there is kept, what is damaged is fetched anew.
    damaged = out / "splits" / "digit" / "preparation.parquet"
    damaged.write_bytes(b"not these")
    done(acclimate("round", "files", round_id, "--out", out, "--server", world.url))
    assert damaged.read_bytes() == (world.competition / "splits" / "digit" / "preparation.parquet").read_bytes()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    refused(
        acclimate("round", "files", round_id, "--out", tmp_path / "mine", "--server", world.url, "--json"),
        "file_unreadable",
    )


def test_a_server_can_swap_no_public_file(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world, until="draft")
    with cheating(world, {"/files/splits/parity/": lambda content: content + b"x"}) as cheat:
        ran = acclimate("round", "files", round_id, "--out", tmp_path / "public", "--server", cheat.url, "--json")
    assert "splits/parity/" in refused(ran, "log_inconsistent")


def test_waiting_for_a_phase_ends_when_it_has_come(acclimate: Run, world: World) -> None:
    round_id = new_round(acclimate, world, until="sealed")
    ran = done(acclimate("status", round_id, "--server", world.url, "--until", "sealed"))
    assert "sealed" in ran.out
    me = person(acclimate, world, "organizer", "organizer")
    done(acclimate("round", "void", round_id, "--reason", "a test", "--keys", me))
    assert acclimate("status", round_id, "--server", world.url, "--until", "open", "--json").code == 1
    assert acclimate("status", round_id, "--server", world.url, "--until", "nonsense").code == 2


def test_watching_prints_a_line_for_each_change(acclimate: Run, world: World) -> None:
    round_id = new_round(acclimate, world, until="draft")
    process = subprocess.Popen(
        [sys.executable, "-m", "acclimate", "status", round_id, "--server", world.url, "--watch", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    assert first["phase"] == "draft"
    me = world.root / "people" / "organizer"
    done(acclimate("round", "void", round_id, "--reason", "a test", "--keys", me))
    until = time.monotonic() + WITHIN
    assert json.loads(process.stdout.readline())["phase"] == "voided"
    assert process.wait(max(1.0, until - time.monotonic())) == 0
    process.stdout.close()
