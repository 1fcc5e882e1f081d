"""What a server names for a round is not what an organizer signs unseen: log, witnesses and quorum are the organizer's own, or it is refused."""

import json
from pathlib import Path

import live
import pytest
import rounds_made
import tiny
from commands import Run, refused
from partners import partners, server
from witnessed_rounds import NAMES, write_folder

from acclimate import files, log
from acclimate.client import folder
from acclimate.client.servers import SERVER_FILE


@pytest.fixture
def built(tmp_path: Path) -> Path:
    tiny.competition(tmp_path / "competition")
    return tmp_path / "competition"


def organizer(running: live.Live, where: Path) -> Path:
    """The organizer's key folder as it is after `acclimate register`, and its custodians' documents beside it."""
    mine = where / "organizer"
    write_folder(running.organizer(), mine, url=running.url)
    folder.keep_log_key(mine, running.anyone().get("/v1/server").json()["log"])
    for custodian in running.custodians():
        document = {"name": custodian.name, "age": str(custodian.identity.to_public()), "ed25519": custodian.public}
        files.write_json(where / f"{custodian.name}.json", {**document, "backup": None})
    return mine


def create(where: Path, name: str, *more: object) -> tuple[object, ...]:
    people = [part for custodian in live.CUSTODIANS for part in ("--custodian", where / f"{custodian}.json")]
    dates = ("--opens", "+1h", "--closes", "+2h")
    return ("round", "create", where / "competition", *people, *dates, "--name", name, "--keys", where / "organizer", *more, "--json")  # fmt: skip


def moved(mine: Path, url: str) -> None:
    """The folder's account, at the same server on another port."""
    files.write_json(mine / "account.json", {**json.loads((mine / "account.json").read_text()), "server": url})


def rounds_of(running: live.Live) -> int:
    return len(running.anyone().get("/v1/rounds").json())


def test_a_server_that_lost_its_witnesses_gets_no_signature(tmp_path: Path, built: Path, acclimate: Run) -> None:
    with partners(tmp_path / "witnesses", *NAMES) as made:
        texts = [partner.verifier.text() for partner in made]
        named = [part for text in texts for part in ("--witness", text)]
        with server(tmp_path, made, quorum=2) as running:
            mine = organizer(running, tmp_path)
            # Named by the organizer from the first round on, and told before it is signed.
            code, out, err = acclimate(*create(tmp_path, "r1", *named, "--quorum", "2"))
            assert code == 0, err
            assert f"2 of {', '.join(texts)} must see the log before a share is released" in err
            assert files.read_json(mine / SERVER_FILE)["quorum"] == 2
            wrong = acclimate(*create(tmp_path, "r2", *named[:4], "--quorum", "2"))
            assert texts[2] in refused(wrong, "guard_failed")
            wrong = acclimate(*create(tmp_path, "r2", *named, "--quorum", "3"))
            assert "a quorum of 2" in refused(wrong, "guard_failed")
            assert acclimate(*create(tmp_path, "r2", *named))[0] == 2
            assert acclimate(*create(tmp_path, "r2", "--quorum", "1"))[0] == 2
            assert rounds_of(running) == 1
        # Stolen in between: no witnesses, then other ones.
        with live.serve(tmp_path) as running:
            moved(mine, running.url)
            said = refused(acclimate(*create(tmp_path, "r2")), "guard_failed")
            assert "names no witnesses" in said and "your last round had a quorum of 2" in said
            assert rounds_of(running) == 1
            # The organizer may want it so, and says it.
            assert acclimate(*create(tmp_path, "r2", "--quorum", "0"))[0] == 0
            code, _, err = acclimate(*create(tmp_path, "r3"))
            assert code == 0 and "witnesses:  none" in err and "note:" not in err
        with server(tmp_path, made[:1], quorum=1) as running:
            moved(mine, running.url)
            assert "your last round had no witnesses" in refused(acclimate(*create(tmp_path, "r4")), "guard_failed")
            assert rounds_of(running) == 3


def test_for_the_first_round_no_witness_is_signed_for_that_the_server_alone_names(
    tmp_path: Path, built: Path, acclimate: Run
) -> None:
    with partners(tmp_path / "witnesses", *NAMES) as made, server(tmp_path, made, quorum=2) as running:
        mine = organizer(running, tmp_path)
        said = refused(acclimate(*create(tmp_path, "r1")), "guard_failed")
        assert "you have named none, and had no round before: asked for is no witnesses" in said
        assert not (mine / SERVER_FILE).exists() and rounds_of(running) == 0
        named = [part for partner in made for part in ("--witness", partner.verifier.text())]
        assert acclimate(*create(tmp_path, "r1", *named, "--quorum", "2"))[0] == 0
        kept = json.loads((mine / SERVER_FILE).read_text())
        assert kept["witnesses"] == [partner.verifier.text() for partner in made] and kept["quorum"] == 2
        (mine / SERVER_FILE).write_text(json.dumps({**kept, "evaluators": ["another"]}))
        code, _, err = acclimate(*create(tmp_path, "r2"))
        assert code == 0 and "the evaluators were another: ask the operator why" in err
        (mine / SERVER_FILE).write_text('{"witnesses": 1}')
        refused(acclimate(*create(tmp_path, "r3")), "file_unreadable")


def test_for_the_first_round_no_witnesses_are_told_of_as_none(tmp_path: Path, built: Path, acclimate: Run) -> None:
    with live.serve(tmp_path) as running:
        organizer(running, tmp_path)
        code, _, err = acclimate(*create(tmp_path, "r1"))
        assert code == 0 and "witnesses:  none" in err and "the server named these: compare them" in err, err


def test_another_log_than_the_one_kept_is_signed_for_by_nobody(tmp_path: Path, built: Path, acclimate: Run) -> None:
    with live.serve(tmp_path) as running:
        mine = organizer(running, tmp_path)
        mine_log = log.Signer("log.example.org", rounds_made.key("another log")).vkey
        (mine / folder.LOG_KEY_FILE).write_text(f"{mine_log}\n")
        said = refused(acclimate(*create(tmp_path, "r1")), "log_inconsistent")
        assert mine_log in said and rounds_of(running) == 0
