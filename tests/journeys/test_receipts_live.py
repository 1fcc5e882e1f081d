"""An entrant's receipts while the witnesses are down, and once they are back."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from witnessed_rounds import NAMES, Stage, acknowledged, yesterdays

from acclimate import log
from acclimate.client import entrant
from acclimate.service import submit


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with yesterdays(tmp_path) as found:
        yield found


def cosigned(stage: Stage, path: Path) -> set[str]:
    """Who of the round's witnesses cosigned a receipt."""
    vkey = stage.staged.fields["log"]
    signed = log.Receipt.parse(path.read_bytes()).open(
        log.parse_vkey(vkey), [partner.verifier for partner in stage.witnesses]
    )[1]
    return {text.partition("+")[0] for text in signed.cosigned}


def test_a_receipt_gets_its_cosignatures_once_the_witnesses_are_back(stage: Stage, tmp_path: Path) -> None:
    running, round_id = stage.running, stage.staged.round
    acknowledged(stage)
    running.clock.set(stage.staged.fields["opens"])
    running.tick()
    running.actor("ada")
    client, own = stage.person("ada")
    entrant.enter_round(client, own, round_id)
    stage.cosigned()
    stage.stop(0, 1, 2)
    tiny.model(tmp_path / "model", seed=1)
    mine = entrant.submit(
        client, own, round_id, tmp_path / "model", title="A model", weights_after="publish", wait=False
    )
    submit.accept(running.store, mine.submission)
    (mine,) = entrant.submission_status(client, own)
    assert mine.state == "accepted"
    paths = [own.folder / "receipts" / f"{mine.short}{kind}.tlog-proof" for kind in (".committed", "")]
    before = [path.read_bytes() for path in paths]
    assert [cosigned(stage, path) for path in paths] == [set(), set()]
    # Looked at again while they are down: the same files.
    entrant.submission_status(client, own)
    assert [path.read_bytes() for path in paths] == before
    stage.start(0, 2)
    stage.cosigned()
    entrant.submission_status(client, own)
    for path in paths:
        assert cosigned(stage, path) >= {NAMES[0], NAMES[2]}
        assert log.Receipt.parse(path.read_bytes()).index in (mine.committed, mine.accepted)
    after = [path.read_bytes() for path in paths]
    entrant.submission_status(client, own)
    assert [path.read_bytes() for path in paths] == after
