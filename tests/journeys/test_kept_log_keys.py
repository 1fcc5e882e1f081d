"""What a key folder keeps of a log whose key was handed over: receipts and bundles of before are checked with it as well as those of after."""

import json

import handing_over
import pytest
import rounds_made
from databases import run

from acclimate import log
from acclimate.cli.options import read_log_key
from acclimate.client import folder
from acclimate_competitions.errors import Refusal

OLD = log.Signer(rounds_made.ORIGIN, rounds_made.key("log")).vkey
NEW = log.Signer(rounds_made.ORIGIN, rounds_made.key("second key")).vkey
OTHER = log.Signer("other.example.org/log", rounds_made.key("x")).vkey


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A round of before the hand-over: its bundle, and a receipt."""
    place = tmp_path_factory.mktemp("old")
    made = rounds_made.make(place / "round")
    (place / "ada.tlog-proof").write_text(made.receipts[made.submissions[0]["index"]])
    return made.write(place / "bundle"), place / "ada.tlog-proof"


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    """A round of after it, in a log that begins with the old key."""
    with pytest.MonkeyPatch.context() as patch:
        splits = rounds_made.make_splits
        patch.setattr(
            rounds_made, "make_splits", lambda made: (splits(made), handing_over.hand_over(made, "second key"))[0]
        )
        place = tmp_path_factory.mktemp("new")
        made = rounds_made.make(place / "round")
        (place / "bob.tlog-proof").write_text(made.receipts[made.submissions[0]["index"]])
        return made.write(place / "bundle"), place / "bob.tlog-proof"


@pytest.fixture
def renewed(tmp_path):
    """A key folder that has followed the hand-over."""
    for key in (OLD, NEW, NEW):
        folder.keep_log_key(tmp_path, key)
    return tmp_path


def test_a_folder_that_followed_a_hand_over_keeps_the_keys_of_before(renewed):
    assert (renewed / "log.vkey").read_text() == f"{NEW}\n" and folder.kept_log_keys(renewed) == [NEW]
    assert folder.known_log_keys(renewed) == [OLD, NEW]
    for key in (OLD, NEW):
        folder.keep_log_key(renewed, key)
    assert set(folder.known_log_keys(renewed)) == {OLD, NEW} and folder.known_log_keys(renewed)[-1] == NEW


def test_bundles_and_receipts_of_both_times_are_checked_with_it(renewed, old, new):
    for bundle, receipt in (old, new):
        code, out, errors = run("verify", bundle, "--log-key", renewed, "--json")
        assert code == 0, (out, errors)
        whose = {check["name"]: check for check in json.loads(out)["checks"]}["whose log"]
        assert whose["status"] == "ok"
        for held in ((), ("--bundle", bundle)):
            code, out, errors = run("receipt", "verify", receipt, "--log-key", renewed, *held)
            assert code == 0 and "ok" in out, (out, errors)


def test_with_the_new_key_alone_both_messages_lead_to_the_hand_over(old, tmp_path):
    bundle, receipt = old
    folder.keep_log_key(tmp_path, NEW)
    code, _, errors = run("receipt", "verify", receipt, "--log-key", tmp_path)
    assert code == 1 and "no known key signed" in errors and "acclimate log keys" in errors
    code, out, _ = run("verify", bundle, "--log-key", tmp_path)
    assert code == 1 and "whose log" in out and "acclimate log keys" in out and OLD in out and NEW in out
    # No hand-over leads between logs of two names.
    code, out, _ = run("verify", bundle, "--log-key", OTHER)
    assert code == 1 and "acclimate log keys" not in out


def test_a_witness_s_key_in_its_place_is_named(old):
    bundle, receipt = old
    witness = rounds_made.witness("w1.example.org")
    code, _, errors = run("receipt", "verify", receipt, "--log-key", witness)
    assert code == 1 and "a witness's key" in errors and "--witness" in errors
    code, out, _ = run("verify", bundle, "--log-key", witness)
    assert code == 1 and "--witness" in out


def test_a_folder_that_keeps_keys_of_several_logs_gives_the_one_of_the_log_asked_for(renewed):
    pins = {name: {"log": key} for name, key in (("a-1", OLD), ("b-1", OTHER))}
    (renewed / "pins.json").write_text(json.dumps(pins))
    assert [read_log_key(str(renewed), of=key) for key in (OLD, NEW, OTHER)] == [OLD, NEW, OTHER]
    unknown = log.Signer(rounds_made.ORIGIN, rounds_made.key("third")).vkey
    assert read_log_key(str(renewed), of=unknown) == OLD
    with pytest.raises(Refusal, match="keys of several logs"):
        read_log_key(str(renewed))
