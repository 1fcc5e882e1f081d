"""What a key folder keeps of a log whose key was handed over, and what a thief of the key that was given up can make pass: nothing.

A key is given up because it was stolen. Under it a log of any length can be made; what is true of before the hand-over, the newer key leads to.
"""

import json

import handing_over
import pytest
import rounds_made
import shown_logs
from databases import run

from acclimate import hand_overs, log
from acclimate.cli.options import read_log_key, read_log_keys
from acclimate.client import folder, history
from acclimate.log_keys import GivenUp, LogKeys
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal

OLD = log.Signer(rounds_made.ORIGIN, rounds_made.key("log")).vkey
NEW = log.Signer(rounds_made.ORIGIN, rounds_made.key("second key")).vkey
OTHER = log.Signer("other.example.org/log", rounds_made.key("x")).vkey


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A round of before the hand-over, in a log that ends before it: its bundle, and a receipt."""
    place = tmp_path_factory.mktemp("old")
    made = rounds_made.make(place / "round")
    (place / "ada.tlog-proof").write_text(made.receipts[made.submissions[0]["index"]])
    return made.write(place / "bundle"), place / "ada.tlog-proof", made


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
        return made.write(place / "bundle"), place / "bob.tlog-proof", made


def follow(where, made, index):
    """A key folder that has followed the hand-over at an entry of a log."""
    root = digests.root_of_hashes([digests.leaf_hash(entry) for entry in made.entries[: index + 1]])
    for key in (OLD, NEW, NEW):
        folder.keep_log_key(where, key, ended=[GivenUp(OLD, index, root)] if key == NEW else [])
    return where


@pytest.fixture
def renewed(tmp_path, new):
    return follow(tmp_path, new[2], 0)


def whose(bundle, keys, *more):
    """The exit code of `verify`, and what it says of whose log it is."""
    code, out, errors = run("verify", bundle, "--log-key", keys, "--json", *more)
    (check,) = [check for check in json.loads(out)["checks"] if check["name"] == "whose log"]
    return code, check["status"], f"{check['meaning']} {check['where']}"


def test_a_folder_that_followed_a_hand_over_keeps_the_keys_of_before_and_where_they_ended(renewed, new):
    assert (renewed / "log.vkey").read_text() == f"{NEW}\n" and folder.kept_log_keys(renewed) == [NEW]
    (known,) = folder.known_logs(renewed)
    assert known.texts == [OLD, NEW] and known.older[0].index == 0
    assert known.older == tuple(GivenUp.parse(one.text()) for one in known.older)
    for line in (f"{OLD} x y", f"{OLD} 1", f"{OLD} 1 =", f"{OLD} 1 AAAA more"):
        with pytest.raises(Refusal) as caught:
            GivenUp.parse(line)
        assert caught.value.code == "file_unreadable"


def test_a_bundle_and_a_receipt_of_after_the_hand_over_are_checked_with_it(renewed, new):
    bundle, receipt, _ = new
    assert whose(bundle, renewed)[:2] == (0, "ok")
    for held in ((), ("--bundle", bundle)):
        code, out, errors = run("receipt", "verify", receipt, "--log-key", renewed, *held)
        assert code == 0 and "ok" in out and "NOT CHECKED" not in out, (out, errors)


def test_what_the_old_key_alone_signed_before_it_was_given_up_is_not_checked(tmp_path, old):
    """It may be honest; a thief of the key could have made it as well."""
    bundle, receipt, made = old
    keys = follow(tmp_path, made, len(made.entries))
    code, status, said = whose(bundle, keys)
    assert (code, status) == (0, "NOT CHECKED") and "a thief of it could have made this" in said and OLD in said
    code, out, _ = run("receipt", "verify", receipt, "--log-key", keys)
    assert code == 0 and "NOT CHECKED  whose log: signed by" in out
    # Beside the entries to which the new key led this folder it is one of theirs.
    later = [*made.entries, made.entries[0]]
    root = digests.root_of_hashes([digests.leaf_hash(entry) for entry in later])
    known = LogKeys(NEW, (GivenUp(OLD, len(made.entries), root),))
    chain = hand_overs.Chain(log.parse_vkey(OLD))
    assert known.doubt(chain, 5) and not known.doubt(chain, 5, later)
    with pytest.raises(Refusal, match="these entries up to there are others"):
        known.doubt(chain, 5, [*later[:-1], made.entries[1]])
    # A folder that followed before it was kept where: nothing is said for or against it.
    (keys / "log.older.vkeys").write_text(f"{OLD}\n")
    assert whose(bundle, keys)[:2] == (0, "NOT CHECKED")


def test_what_a_thief_of_the_old_key_signs_after_it_was_given_up_is_refused(renewed, old, tmp_path_factory):
    """A whole log under it, with no hand-over in it: as a bundle, a receipt, a mirror, a server, a round to be acknowledged."""
    bundle, receipt, made = old
    code, status, said = whose(bundle, renewed)
    assert (code, status) == (1, "FAILED") and f"{OLD} was given up at log entry 0" in said
    for held in ((), ("--bundle", bundle)):
        code, out, errors = run("receipt", "verify", receipt, "--log-key", renewed, *held)
        assert code == 1 and f"{OLD} was given up at log entry 0" in errors, (held, out, errors)
    place = tmp_path_factory.mktemp("thief")
    shown = shown_logs.Shown(made, rounds_made.DEFINITION, made.entries, made.notes[len(made.entries)])
    with shown_logs.serving(shown) as url:
        # A mirror begun with the old key, before anything was known of a thief.
        code, _, errors = run("log", "mirror", "--server", url, "--log-key", OLD, "--out", place / "mirror")
        assert code == 0, errors
        for command in (
            ("log", "mirror", "--server", url, "--log-key", renewed, "--out", place / "mirror"),
            ("log", "check", place / "mirror", "--log-key", renewed),
            ("log", "keys", "--server", url, "--log-key", renewed),
            ("receipt", "verify", receipt, "--log-key", renewed, "--log", url),
        ):
            code, out, errors = run(*command)
            assert code == 1 and "was given up at log entry 0" in errors, (command, out, errors)
    # Neither a pin of before nor the round's own key makes it the log of now.
    (renewed / "pins.json").write_text(json.dumps({made.round: {"log": OLD}}))
    own = shown_logs.key_folder(place / "custodian", "custodian-b")
    for name in ("log.vkey", "log.older.vkeys", "pins.json"):
        (own.folder / name).write_bytes((renewed / name).read_bytes())
    source = shown_logs.mailed(
        made, place, definition=rounds_made.DEFINITION, entries=made.entries, note=made.notes[len(made.entries)]
    )
    defined = records.parse(shown_logs.defined_in(made))
    with pytest.raises(Refusal) as caught:
        history.read_history(source, defined, known=history.Known.of(own))
    assert caught.value.code == "log_inconsistent" and NEW in caught.value.sentence


def test_with_the_new_key_alone_both_messages_lead_to_the_hand_over(old, tmp_path):
    bundle, receipt, _ = old
    folder.keep_log_key(tmp_path, NEW)
    code, _, errors = run("receipt", "verify", receipt, "--log-key", tmp_path)
    assert code == 1 and "no known key signed" in errors and "acclimate log keys" in errors
    code, out, _ = run("verify", bundle, "--log-key", tmp_path)
    assert code == 1 and "whose log" in out and "acclimate log keys" in out and OLD in out and NEW in out
    # No hand-over leads between logs of two names.
    code, out, _ = run("verify", bundle, "--log-key", OTHER)
    assert code == 1 and "acclimate log keys" not in out


def test_a_witness_s_key_in_its_place_is_named(old):
    bundle, receipt, _ = old
    witness = rounds_made.witness("w1.example.org")
    code, _, errors = run("receipt", "verify", receipt, "--log-key", witness)
    assert code == 1 and "a witness's key" in errors and "--witness" in errors
    code, out, _ = run("verify", bundle, "--log-key", witness)
    assert code == 1 and "--witness" in out


def test_a_folder_that_keeps_keys_of_several_logs_gives_the_one_of_the_log_asked_for(renewed):
    pins = {name: {"log": key} for name, key in (("a-1", OLD), ("b-1", OTHER))}
    (renewed / "pins.json").write_text(json.dumps(pins))
    assert [read_log_keys(str(renewed), of=key).newest for key in (OLD, NEW, OTHER)] == [NEW, NEW, OTHER]
    unknown = log.Signer(rounds_made.ORIGIN, rounds_made.key("third")).vkey
    assert read_log_keys(str(renewed), of=unknown).newest == NEW
    with pytest.raises(Refusal, match="keys of several logs"):
        read_log_key(str(renewed))
    (renewed / "log.vkey").unlink()
    assert [read_log_keys(str(renewed), of=key).newest for key in (OLD, OTHER)] == [OLD, OTHER]
