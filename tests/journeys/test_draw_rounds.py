"""An auditor's secret is told for one round: whoever copies its draw into another round learns nothing of what will be drawn."""

import base64
import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import rounds_made
import shown_logs
from rounds_made import Made

from acclimate import keys
from acclimate.client import Client, auditor
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal

SECRET = b"the auditor's secret: 32 bytes.."
LAB = {"name": "lab", "ed25519": rounds_made.public("lab"), "draw": digests.of_bytes(SECRET)}
LATER = records.format_time(rounds_made.START + timedelta(days=61))
DRAWN = rounds_made.DEFINITION.replace("audits = 0", 'audits = 1\nauditor = "lab"\naudit_tolerance = 0.0')


@dataclass
class Copied:
    """Two prepared rounds that name one draw: `real`, and `copy` of another name."""

    real: Made
    copy: Made

    def shown(self, made: Made, entries: list[bytes]) -> shown_logs.Shown:
        return shown_logs.Shown(made, DRAWN, entries, shown_logs.signed(made, entries, at=made.now))


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Copied:
    where = tmp_path_factory.mktemp("rounds")
    real = shown_logs.prepared(where / "real", definition=DRAWN, auditor=LAB)
    copy = shown_logs.prepared(where / "copy", definition=DRAWN, auditor=LAB, release_by=LATER)
    assert real.round != copy.round
    return Copied(real, copy)


def lab(where: Path) -> keys.Keys:
    own = shown_logs.key_folder(where, "lab")
    (own.folder / auditor.DRAWS_FILE).write_text(json.dumps({LAB["draw"]: base64.b64encode(SECRET).decode()}))
    return own


def draw(shown: shown_logs.Shown, own: keys.Keys) -> Refusal | None:
    """The refusal; None where the secret was sent. The made server logs nothing, so that what comes after is not waited for."""
    with shown_logs.serving(shown) as url, Client(url, patience=0) as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr("acclimate.client.history.CHECKPOINT_PATIENCE", 0)
        with pytest.raises(Refusal) as caught:
            auditor.draw(client, own, shown.made.round)
    sent = [body["fields"] for path, body in shown.posted if path.endswith("/draw")]
    if sent:
        assert sent == [{"secret": base64.b64encode(SECRET).decode()}] and caught.value.code == "phase_wrong"
        return None
    return caught.value


def test_the_secret_of_a_draw_that_the_log_has_for_another_round_is_not_told(rounds: Copied, tmp_path: Path) -> None:
    """In one log: the copy is defined after the real round was, and is prepared first."""
    first = next(entry for entry in rounds.real.entries if records.parse(entry).round == rounds.real.round)
    defined = records.parse(first)
    entries = [rounds.copy.entries[0], shown_logs.dated(first, records.parse(rounds.copy.entries[0]).at)]
    shown = rounds.shown(rounds.copy, [*entries, *rounds.copy.entries[1:]])
    # The copy's sealed entries name log indices: only the records up to here are shown.
    shown.entries = shown.entries[:4]
    shown.note = shown_logs.signed(rounds.copy, shown.entries, at=rounds.copy.now)
    own = lab(tmp_path / "lab")
    refused = draw(shown, own)
    assert refused is not None and refused.code == "conflict" and refused.hint
    assert LAB["draw"] in refused.sentence and f"the log has it first in {defined.round}" in refused.sentence
    # Nothing was pinned for the copy: the real round goes on.
    assert draw(rounds.shown(rounds.real, rounds.real.entries), own) is None


def test_the_secret_of_a_draw_is_not_told_at_another_server_either(rounds: Copied, tmp_path: Path) -> None:
    """In two logs: which round it is for, is settled by the first that the auditor looked at."""
    own = lab(tmp_path / "lab")
    with shown_logs.serving(rounds.shown(rounds.real, rounds.real.entries)) as url, Client(url, patience=0) as client:
        auditor.status(client, own, rounds.real.round)
    refused = draw(rounds.shown(rounds.copy, rounds.copy.entries), own)
    assert refused is not None and refused.code == "conflict"
    assert f"{own.folder / auditor.DRAW_ROUNDS_FILE} has it for {rounds.real.round}" in refused.sentence
    assert draw(rounds.shown(rounds.real, rounds.real.entries), own) is None
    # Another draw of the folder is not touched by it.
    (own.folder / auditor.DRAW_ROUNDS_FILE).unlink()
    assert draw(rounds.shown(rounds.copy, rounds.copy.entries), own) is None
