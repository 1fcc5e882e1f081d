"""The end of a round without its organizer, or against one who keeps approvals for later: at the command lines of real custodians."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Run, refused
from live import CUSTODIANS
from witnessed_rounds import Stage, acknowledged, closed, yesterdays

from acclimate.client import organizer
from acclimate_competitions import rounds

REASON = "the organizer does not answer any more"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with yesterdays(tmp_path) as found:
        acknowledged(found)
        yield found


def folder(stage: Stage, name: str) -> Path:
    stage.person(name)
    return stage.where / "people" / name


def approved(stage: Stage, acclimate: Run, name: str, *more: object) -> Path:
    """The approval that a custodian mails."""
    command = ("custodian", "approve-void", stage.staged.round, "--reason", REASON, "--keys", folder(stage, name))
    code, out, err = acclimate(*command, *more)
    assert code == 0, err
    assert f"is {json.loads(out)['phase']}: this approval is good in that phase only" in err
    path = stage.where / f"{name}.json"
    path.write_text(out)
    return path


def test_custodians_end_a_round_whose_organizer_is_gone(stage: Stage, acclimate: Run) -> None:
    closed(stage)
    stage.stop(0, 1, 2)  # a voiding must be possible while witnesses are down
    first = ("custodian", "void", stage.staged.round, "--reason", REASON, "--keys", folder(stage, CUSTODIANS[0]))
    assert "2 custodians must agree to a voiding, 1 did" in refused(acclimate(*first, "--json"), "guard_failed")
    # What is approved for the organizer's signature is of no use to another custodian.
    for_organizer = approved(stage, acclimate, CUSTODIANS[1])
    sentence = refused(acclimate(*first, "--approval", for_organizer, "--json"), "signature_invalid")
    assert "for the signer" in sentence and stage.running.organizer().public in sentence
    stray = ("custodian", "approve-void", stage.staged.round, "--reason", REASON, "--signer", "ada", "--keys")
    assert acclimate(*stray, folder(stage, CUSTODIANS[1]))[0] == 1
    given = approved(stage, acclimate, CUSTODIANS[1], "--signer", CUSTODIANS[0])
    other = ("custodian", "void", stage.staged.round, "--reason", "I lost", "--keys", folder(stage, CUSTODIANS[0]))
    assert "'I lost'" in refused(acclimate(*other, "--approval", given, "--json"), "signature_invalid")
    assert stage.running.phase(stage.staged.round) == "prepared"

    code, out, err = acclimate(*first, "--approval", given, "--json")
    assert code == 0, err
    record = json.loads(out)["record"]
    assert record["by"] == stage.running.actors[CUSTODIANS[0]].public and record["phase"] == "prepared"
    assert stage.running.phase(stage.staged.round) == "voided"
    # Sent again it is the same record, or the end of the round.
    assert "voided" in refused(acclimate(*first, "--approval", given, "--json"), "phase_wrong")


def test_the_last_custodian_ends_a_round_that_has_lapsed(stage: Stage, acclimate: Run) -> None:
    """Two of three custodians and the organizer are gone: nobody could end the round, and it would keep the log's key."""
    closed(stage)
    release_by = stage.staged.fields["release_by"]
    alone = (
        "custodian",
        "void",
        stage.staged.round,
        "--reason",
        REASON,
        "--keys",
        folder(stage, CUSTODIANS[0]),
        "--json",
    )
    stage.running.clock.set(release_by, seconds=1)
    sentence = refused(acclimate(*alone), "guard_failed")
    assert "2 custodians must agree to a voiding, 1 did" in sentence and f"release_by, {release_by}" in sentence
    stage.running.clock.set(release_by, seconds=rounds.LAPSE.total_seconds() + 1)
    code, out, err = acclimate(*alone)
    assert code == 0, err
    record = json.loads(out)["record"]
    assert record["by"] == stage.running.actors[CUSTODIANS[0]].public and "approvals" not in record
    assert stage.running.phase(stage.staged.round) == "voided"


def test_an_approval_of_before_the_close_voids_nothing_after_it(stage: Stage, acclimate: Run) -> None:
    """The organizer keeps what custodians once agreed to, until a result is there that it dislikes."""
    early = [approved(stage, acclimate, name) for name in CUSTODIANS[:2]]
    assert json.loads(early[0].read_text())["phase"] == "sealed"
    closed(stage)
    client, own = stage.person("organizer")
    kept = [json.loads(path.read_text()) for path in early]
    call = lambda given: organizer.void(client, own, stage.staged.round, reason=REASON, approvals=given)  # noqa: E731
    told = stage.refuses("signature_invalid", lambda: call(kept))
    assert "for the phase 'sealed', the voiding has 'prepared'" in told.sentence and "approve-void" in told.hint
    # By a client of its own making: the signatures say sealed.
    bare = [{"by": approval["by"], "sig": approval["sig"]} for approval in kept]
    stage.refuses("signature_invalid", lambda: call(bare))
    record = stage.running.organizer().sign("RoundVoided", stage.staged.round, reason=REASON, phase="sealed")
    record["fields"]["approvals"] = bare
    answer = stage.running.organizer().post(f"{stage.staged.path}/void", record)
    assert (answer.status_code, answer.json()["code"]) == (409, "guard_failed"), answer.text
    assert stage.running.phase(stage.staged.round) == "prepared"
    now = [json.loads(approved(stage, acclimate, name).read_text()) for name in CUSTODIANS[:2]]
    assert call(now)["record"]["phase"] == "prepared"


def test_only_custodians_of_the_round_void_it(stage: Stage) -> None:
    stranger = stage.running.actor("another-custodian", "custodian")
    record = stranger.sign("RoundVoided", stage.staged.round, reason=REASON, phase="sealed")
    answer = stranger.post(f"{stage.staged.path}/void", record)
    assert (answer.status_code, answer.json()["code"]) == (403, "role_missing"), answer.text
    # A custodian's token without its key is no custodian.
    custodian = stage.running.custodians()[0]
    answer = custodian.post(f"{stage.staged.path}/void", record)
    assert (answer.status_code, answer.json()["code"]) == (403, "signature_invalid"), answer.text
