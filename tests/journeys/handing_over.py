"""Hand-overs of a log's key for tests: in a made round, and in a store."""

from pathlib import Path

import rounds_made

from acclimate import hand_overs, log
from acclimate.checkpoints import Copies
from acclimate.sequencer import Sequencer
from acclimate.service import identity
from acclimate_competitions import digests, records

REASON = "a new machine"


def hand_over(made: rounds_made.Made, to: str, *, reason: str = REASON) -> int:
    """Log a hand-over from the made log's key to another, and sign with that one from then on; the log index."""
    old, new = made.signer, log.Signer(made.signer.origin, rounds_made.key(to))
    index = made.append(hand_overs.request(old, new, reason=reason), keep=True)
    root = log.root([digests.leaf_hash(entry) for entry in made.entries])
    made.notes[index + 1] = log.sign_note(log.checkpoint(old.origin, index + 1, root), old, new)
    made.signer = new
    return index


def grow(settings, store, folder: Path, *names: str, void: bool = True) -> list[str]:
    """Log a round of each name, void at once; their ids."""
    identity.begin(settings, store)
    request = rounds_made.request(store.blobs, folder)
    organizer, found = rounds_made.key("organizer"), []
    for name in names:
        with store.transaction() as tx:
            _, record = tx.append(records.sign("RoundDefined", "", {**request["fields"], "name": name}, key=organizer))
            if tx.execute(_rounds().select().where(_rounds().c.id == record.round)).first() is None:
                _insert(tx, record)
            if void:
                tx.append(records.sign("RoundVoided", record.round, {"reason": "a test"}, key=organizer))
        found.append(record.round)
    return found


def end(store, round_id: str) -> None:
    with store.transaction() as tx:
        tx.append(records.sign("RoundVoided", round_id, {"reason": "a test"}, key=rounds_made.key("organizer")))


def sign(settings, store) -> str:
    """The newest checkpoint, by the key in force."""
    signer = identity.begin(settings, store).signer
    sequencer = Sequencer(store, signer, copies=Copies(store.blobs, settings.data, signer.verifier))
    sequencer.start()
    try:
        return sequencer.checkpoint()
    finally:
        sequencer.close()


def _rounds():
    from acclimate.store import rounds

    return rounds


def _insert(tx, record) -> None:
    from acclimate.store import accounts, timestamp

    now = timestamp(tx)
    if tx.execute(accounts.select()).first() is None:
        key = {"ed25519": rounds_made.public("organizer"), "token_hash": digests.of_bytes(b"organizer")}
        tx.execute(accounts.insert(), {"id": "organizer", "role": "organizer", "created": now, **key})
    row = {"id": record.round, "competition": record["competition"], "name": record["name"], "owner": "organizer"}
    tx.execute(_rounds().insert(), {**row, "definition": record["definition"], "created": now})
