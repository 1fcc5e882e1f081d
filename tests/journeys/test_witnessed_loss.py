"""A log of which its witness has cosigned more than the database has: entries were lost, and the witness is who knows it."""

import httpx
import kept
import partners
import pytest
from backed_up import back_up, more

from acclimate import config, garbage, log
from acclimate.api.app import begin, create_app
from acclimate.witness_client import ask, parse_endpoint
from acclimate_competitions.errors import Refusal


def _settings(folder, witness):
    """A round that was made has records of a time to come: no clock is behind them."""
    path = folder / "settings.toml"
    words = (f'origin = "{kept.rounds_made.ORIGIN}"', f'witnesses = ["{witness.text}"]', "clock_behind = 1000000000")
    path.write_text("".join(f"{word}\n" for word in words))
    return path


@pytest.fixture
def lost(tmp_path, acclimate):
    """An installation as restored from a backup of before its last entry, with new blobs; (its options, size of the backup's log)."""
    whole = kept.installation(tmp_path)
    back_up(whole, tmp_path / "backup", keys=True)
    more(whole)
    signer, tree, size = whole.made.signer, whole.made.tree, len(whole.made.entries)
    with whole.store.snapshot() as tx:
        tree.append(log.leaf_hash(tx.entry(size)))
    whole.store.close()
    with partners.partners(tmp_path / "witnesses", "w.example.org") as (witness,):
        witness.start(signer.vkey)
        note = log.sign_checkpoint(signer, size + 1, tree.root())
        with httpx.Client() as client:
            ask(parse_endpoint(witness.text), note, old=0, proof_of=lambda old: [], client=client)
        settings = _settings(tmp_path, witness)
        given = ["--data", tmp_path / "new", "--config", settings]
        restored = acclimate("restore", tmp_path / "backup", *given)
        assert restored.code == 1, restored.err
        assert f"lost: {size + 1} entries were signed" in restored.out
        yield given, size


def test_doctor_and_db_check_say_it_and_nothing_is_signed_over_it_until_it_is_accepted(lost, tmp_path, acclimate):
    given, size = lost
    sentence = f"{size + 1} entries were signed"
    check = acclimate("db", "check", *given)
    assert check.code == 1 and f"lost: {sentence}" in check.out and "cosigned by witness w.example.org" in check.out
    assert f"the database has {size}" in check.out and "nothing is wrong" not in check.out
    doctor = acclimate("doctor", *given, "--json")
    found = [one for one in doctor.json["findings"] if one["name"] == "log"]
    assert doctor.code == 1 and sentence in found[0]["found"] and "accept-loss" in found[0]["hint"]
    settings = config.load(tmp_path / "new", file=tmp_path / "settings.toml", environ={})
    services = create_app(settings).state.services
    with pytest.raises(Refusal, match=sentence) as refused:
        begin(services)
    assert refused.value.code == "log_inconsistent" and "accept-loss" in refused.value.hint
    with pytest.raises(Refusal, match=sentence):
        # What the lost entries name would be collected.
        garbage.collect(
            services.store, settings, services.identity.signer.verifier, older_than=1.0, dry=True, progress=print
        )
    services.store.close()
    accepted = acclimate("db", "accept-loss", *given)
    assert accepted.code == 0 and f"accepted: {sentence} (cosigned by witness" in accepted.out
    assert "lost:" not in acclimate("db", "check", *given).out
    assert not [one for one in acclimate("doctor", *given, "--json").json["findings"] if one["name"] == "log"]
    again = create_app(settings).state.services
    begin(again)
    again.collector.close()
    again.sequencer.close()
    again.store.close()


def test_what_a_witness_says_counts_only_by_the_logs_own_signature(tmp_path, acclimate):
    whole = kept.installation(tmp_path)
    whole.store.close()
    other = log.Signer(whole.settings.origin, kept.rounds_made.key("another"))
    with partners.partners(tmp_path / "witnesses", "w.example.org") as (witness,):
        witness.start(other.vkey)
        note = log.sign_checkpoint(other, 1000, b"\1" * 32)
        with httpx.Client() as client:
            ask(parse_endpoint(witness.text), note, old=0, proof_of=lambda old: [], client=client)
        settings = _settings(tmp_path, witness)
        check = acclimate("db", "check", "--data", whole.settings.data, "--config", settings)
    assert check.code == 0 and "lost:" not in check.out


def test_a_witness_that_does_not_answer_keeps_nobody_from_starting(tmp_path, acclimate):
    whole = kept.installation(tmp_path)
    whole.store.close()
    with partners.partners(tmp_path / "witnesses", "w.example.org") as (witness,):
        settings = _settings(tmp_path, witness)
        check = acclimate("db", "check", "--data", whole.settings.data, "--config", settings)
        assert check.code == 0 and "nothing is wrong" in check.out
