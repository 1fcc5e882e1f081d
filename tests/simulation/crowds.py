"""Many entries of an open round at once: their records and rows, as if a server had taken each of them in."""

import base64
import hashlib
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import insert, select
from worlds import World

from acclimate.store import Tx, accounts, submissions
from acclimate_competitions import digests, records

_AT_ONCE = 200


def fill(world: World, count: int) -> None:
    """Add so many entrants, each with one accepted submission of the files that the round's first one has."""
    state = world.state()
    with world.store.snapshot() as tx:
        first = tx.execute(select(submissions).where(submissions.c.round == state.id).limit(1)).one()
    for start in range(0, count, _AT_ONCE):
        with world.store.transaction() as tx:
            rows = [_enter(tx, state.id, first.manifest, n) for n in range(start, min(count, start + _AT_ONCE))]
            tx.execute(insert(submissions), rows)


def _enter(tx: Tx, round_id: str, manifest: dict[str, Any], number: int) -> dict[str, Any]:
    name, nonce = f"crowd-{number:05}", number.to_bytes(32)
    key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())
    public = records.public_text(key.public_key())
    tx.execute(insert(accounts), {"id": name, "role": "entrant", "ed25519": public, "token_hash": name, "created": ""})
    own = {**manifest, "entrant": name, "parameters": 1000 + 37 * number % 5000}
    fields = {"entrant": name, "commitment": digests.of_bytes(nonce + digests.canonical(own))}

    def log(kind: str, **fields: Any) -> int:
        return tx.append(records.sign(kind, round_id, fields, key=key))[0]

    log("EntrantRegistered", entrant=name, ed25519=public, conflicts=[])
    committed, accepted = log("SubmissionCommitted", **fields), log("SubmissionAccepted", **fields)
    return {
        "id": name,
        "round": round_id,
        "entrant": name,
        "owner": name,
        "commitment": fields["commitment"],
        "nonce": base64.b64encode(nonce).decode(),
        "manifest": own,
        "acceptance": {},
        "state": "accepted",
        "reason": "",
        "committed_index": committed,
        "accepted_index": accepted,
        "created": "",
    }
