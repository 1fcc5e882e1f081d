"""What auditor and organizer sign follows from the log that their own machine has read, not from what a server or a bundle says of it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import rounds_made
import shown_logs
from rounds_made import Made
from stored import fill

from acclimate import bundle, config, keys, verify
from acclimate.client import Client, auditor, organizer
from acclimate.store import Store
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

LAB = {"name": "lab", "ed25519": rounds_made.public("lab"), "draw": digests.of_bytes(b"a secret")}
PRIVATE = rounds_made.DEFINITION.replace('"public"\n', '"private"\nauditor = "lab"\n')


@dataclass
class Two:
    """The log that everybody is shown, and one that its key signed for one reader: it lacks what a rival submitted last.

    Attributes:
        definition: of the round, which is the same in both.
        honest, fork: the histories; both publish the ranking of the fork.
        bundle: the fork's whole bundle.
    """

    definition: str
    honest: Made
    fork: Made
    bundle: Path

    def shown(self, made: Made, **more: Any) -> shown_logs.Shown:
        note = shown_logs.signed(made, made.entries, at=made.now)
        return shown_logs.Shown(made, self.definition, made.entries, note, **more)


def histories(where: Path, definition: str, *, publish: bool, **more: Any) -> Two:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "DEFINITION", definition)
        patch.setattr(rounds_made, "ROWS", 40)
        patch.setattr(rounds_made, "SUBMISSIONS", [s for s in rounds_made.SUBMISSIONS if s != ("ada", 2)])
        fork = shown_logs.played(where / "fork", definition=definition, publish=publish, **more)
        stored = Store.open(config.load(where / "data", environ={}))
        fill(stored, fork)
        whole = {"whole": True} if "private" in definition else {}
        written = bundle.write(stored, stored.blobs, fork.round, where / "bundle", **whole)
        stored.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "ROWS", 40)
        if publish:
            patch.setattr(rounds_made, "rank", lambda made: fork.ranking)
        honest = shown_logs.played(where / "honest", definition=definition, publish=publish, **more)
    assert honest.round == fork.round and honest.entries != fork.entries
    return Two(definition, honest, fork, written)


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Two:
    return histories(tmp_path_factory.mktemp("private"), PRIVATE, publish=True, auditor=LAB)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Two:
    return histories(tmp_path_factory.mktemp("evaluated"), rounds_made.DEFINITION, publish=False)


def refusal(code: str, shown: shown_logs.Shown, call: Callable[[Client], object]) -> str:
    """What is said; nothing was sent."""
    with shown_logs.serving(shown) as url, Client(url, patience=0) as client, pytest.raises(Refusal) as caught:
        call(client)
    assert caught.value.code == code and caught.value.hint, caught.value
    assert shown.posted == []
    return caught.value.sentence


def sent(shown: shown_logs.Shown, call: Callable[[Client], object]) -> dict[str, Any]:
    """The one record that was sent."""
    with shown_logs.serving(shown) as url, Client(url, patience=0) as client:
        call(client)
    ((_, body),) = shown.posted
    record: dict[str, Any] = body.get("record", body)
    return record


def test_the_auditor_signs_no_bundle_of_another_history_than_it_has_read(private: Two, tmp_path: Path) -> None:
    """Same round, log key and ranking; the bundle verifies, and nobody outside has a whole one to compare."""
    assert verify.verify(private.bundle, log_key=private.fork.signer.vkey).failed == ()
    own = shown_logs.key_folder(tmp_path / "lab", "lab")

    def report(client: Client) -> object:
        return auditor.report(client, own, private.honest.round, private.bundle)

    said = refusal("log_inconsistent", private.shown(private.honest), report)
    assert str(private.bundle) in said and "they differ at log entry" in said
    # Nothing but the comparison stands in the way.
    shutil.rmtree(own.folder / "checkpoints")
    record = sent(private.shown(private.fork), report)
    assert record["type"] == "RoundAudited" and record["fields"]["bundle"] == digests.of_file(
        private.bundle / "MANIFEST"
    )


def test_a_bundle_longer_than_what_the_quorum_has_seen_is_not_signed_yet(private: Two, tmp_path: Path) -> None:
    own = shown_logs.key_folder(tmp_path / "lab", "lab")
    made = private.fork
    shown = private.shown(made)
    last = len(made.entries) - 1
    # The ranking is in the log that was cosigned; the bundle has one entry more.
    longer = tmp_path / "longer"
    shutil.copytree(private.bundle, longer)
    lines = (longer / "entries.jsonl").read_bytes()
    (longer / "entries.jsonl").write_bytes(lines + made.entries[last] + b"\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("acclimate.client.history.CHECKPOINT_PATIENCE", 0)
        said = refusal("phase_wrong", shown, lambda client: auditor.report(client, own, made.round, longer))
    assert f"has {last + 1} entries, and not log entry {last + 1} yet" in said


def organizers(where: Path, round_id: str) -> keys.Keys:
    own = shown_logs.key_folder(where, "organizer")
    (own.folder / organizer.ROUNDS_FILE).write_text(json.dumps({round_id: {"server": "http://127.0.0.1"}}))
    return own


def test_the_organizer_signs_no_ranking_of_another_history_than_it_has_read(evaluated: Two, tmp_path: Path) -> None:
    own = organizers(tmp_path / "keys", evaluated.honest.round)
    packed = Path(shutil.make_archive(str(tmp_path / "fork"), "zip", evaluated.bundle)).read_bytes()

    def publish(client: Client) -> object:
        return organizer.publish(client, own, evaluated.honest.round, reason="first")

    files = {"/bundle": lambda: packed}
    said = refusal("log_inconsistent", evaluated.shown(evaluated.honest, files=files), publish)
    assert "they differ at log entry" in said
    record = sent(evaluated.shown(evaluated.fork, files=files), publish)
    assert record["type"] == "RankingPublished"
    assert record["fields"]["ranking"] == digests.of_json(evaluated.fork.ranking)


def test_what_an_organizer_voids_is_in_the_phase_that_the_log_says(
    private: Two, evaluated: Two, tmp_path: Path
) -> None:
    made = evaluated.honest
    own = organizers(tmp_path / "keys", made.round)
    shown = evaluated.shown(made, round={"phase": "open"})
    record = sent(shown, lambda client: organizer.void(client, own, made.round, reason="a test"))
    assert record["fields"]["phase"] == "evaluated"
    # A server that wants it void names a phase in which it could be: the log has its ranking.
    own = organizers(tmp_path / "published", private.honest.round)
    shown = private.shown(private.honest, round={"phase": "prepared"})
    said = refusal(
        "phase_wrong", shown, lambda client: organizer.void(client, own, private.honest.round, reason="a test")
    )
    assert "is published" in said


def test_a_bundle_that_changes_after_it_was_opened_is_signed_as_it_was_verified(private: Two, tmp_path: Path) -> None:
    """Another ZIP lies at its name once it was looked at: what is signed is what was verified."""
    path = tmp_path / "whole.zip"
    shutil.move(shutil.make_archive(str(tmp_path / "first"), "zip", private.bundle), path)
    own = shown_logs.key_folder(tmp_path / "lab", "lab")

    def swap(done: int, total: int, what: str) -> None:
        if what == "manifest":
            path.write_bytes(b"another file")

    record = sent(
        private.shown(private.fork),
        lambda client: auditor.report(client, own, private.fork.round, path, progress=swap),
    )
    assert path.read_bytes() == b"another file"
    assert record["fields"]["bundle"] == digests.of_file(private.bundle / "MANIFEST")
