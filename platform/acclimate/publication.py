"""Rounds that publish their ranking themselves, where the definition says so (decision 0018)."""

import tempfile
from pathlib import Path

from sqlalchemy import update

from acclimate import bundle, recomputing
from acclimate.config import Settings
from acclimate.service import identity, publish, release
from acclimate.store import Store, Tx, openings, timestamp
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase
from acclimate_runners import failpoints


def is_due(tx: Tx, round_id: str) -> bool:
    """Whether a round may publish its ranking itself now, by the database's clock."""
    state = tx.round(round_id)
    moment = state.publishes_itself
    return state.phase is Phase.EVALUATED and moment is not None and tx.now() >= moment


def publish_itself(store: Store, settings: Settings, round_id: str) -> bool:
    """Publish the ranking of an evaluated round without its organizer; whether it was published now.

    1. The definition lets the round publish itself, and the time has come.
    2. The ranking is computed here, from the stored scores.
    3. A second process, which has the whole bundle and nothing else, verifies it as an auditor would: nothing FAILED, and the ranking
       that it computes from the predictions is the same.
    4. It is kept as a blob, and logged with the signature of the evaluator whom RoundDefined names, if 1 still holds.
    What 3 finds is kept for the round's status; the organizer may publish, or the custodians void the round, as ever.

    Raises:
        Refusal: guard_failed, where 3 does not give the same; busy, no_space, blob_unknown, …: it is tried again.
    """
    # 1
    with store.snapshot() as tx:
        if not is_due(tx, round_id):
            return False
        state = tx.round(round_id)
    # 2
    own = publish.ranking(store, round_id)
    # 3
    settings.work.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=settings.work, prefix=release.PUBLISHING) as folder:
        whole = bundle.write(store, store.blobs, round_id, Path(folder) / "bundle", whole=True)
        found = recomputing.ranking(whole, log_key=state.defined["log"])
    if (found["round"], found["ranking"]) != (round_id, own.digest):
        raise _differs(store, round_id, own.digest, found)
    # 4
    store.blobs.put_bytes(digests.canonical(own.document()))
    fields = {"ranking": own.digest, "policy": state.defined["policy"], "reason": ""}
    key = identity.load(settings, store).evaluator_key
    failpoints.reach("ranked")
    with store.transaction() as tx:
        if not is_due(tx, round_id):
            return False
        tx.append(records.sign("RankingPublished", round_id, fields, key=key))
        failpoints.reach("publishing")
    return True


def _differs(store: Store, round_id: str, own: str, found: dict[str, object]) -> Refusal:
    """What stops the publication, kept for the status."""
    failed = found["failed"]
    reasons = [str(line) for line in failed] if isinstance(failed, list) else []
    sentence = f"the ranking is not published: the server computed {own}, a second process {found['ranking'] or 'none'}"
    sentence += f"; {'; '.join(reasons[:3]) or found['summary']}"
    with store.transaction() as tx:
        values = {"code": "guard_failed", "problem": sentence, "at": timestamp(tx)}
        tx.execute(update(openings).where(openings.c.round == round_id).values(**values))
    hint = "fetch the bundle and see: acclimate round bundle ROUND --whole, acclimate verify"
    return Refusal("guard_failed", sentence, hint=hint, problems=reasons)
