"""Standing entries: the model of an earlier round again, by the entrant's own word, without its bytes being sent once more (decision 0025)."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select

from acclimate.service import manifests
from acclimate.store import Tx, rounds, submissions
from acclimate_competitions import bases
from acclimate_competitions.errors import Refusal
from acclimate_competitions.manifests import STANDS
from acclimate_competitions.phases import Round


def check(tx: Tx, manifest: Mapping[str, Any], *, state: Round, entrant: str) -> None:
    """Refuse a manifest that says of which earlier submission it is the model, where that is not so.

    1. The earlier round is one of the same competition here.
    2. The entrant's submission there was accepted and stands; where that round is closed, it is the entrant's entry.
    3. Its files are the same, byte for byte; so are those of its base, where it is an adapter.

    Args:
        tx: a transaction.
        manifest: whose form was checked.
        state: the round that it is for.
        entrant: whose it is.

    Raises:
        Refusal: manifest_invalid.
    """
    stands = manifest.get(STANDS)
    if stands is None:
        return
    # 1
    row = tx.execute(select(rounds).where(rounds.c.id == stands["round"])).one_or_none()
    if row is None or row.competition != state.competition.slug:
        raise _wrong(f"{stands['round']} is no round of the competition {state.competition.slug!r} on this server")
    # 2
    before = tx.round(stands["round"])
    mine = before.submissions.get(stands["commitment"])
    if mine is None or mine.entrant != entrant or mine.accepted is None or mine.ended:
        raise _wrong(f"{entrant!r} has no accepted submission {stands['commitment']} in {before.id} that stands")
    if before.closed is not None and stands["commitment"] not in {entry.commitment for entry in before.entries}:
        raise _wrong(f"submission {stands['commitment']} is not the one of {entrant!r} that counted in {before.id}")
    # 3
    query = select(submissions.c.manifest).where(
        submissions.c.round == before.id, submissions.c.commitment == stands["commitment"]
    )
    earlier = tx.execute(query).scalar_one()
    if manifests.digests_of(earlier) != manifests.digests_of(manifest):
        raise _wrong(f"its files are not those of {entrant!r} in {before.id}")
    if manifest["kind"] == bases.KIND:
        was, now = (
            each.competition.submission.bases.get(said["base"]) for each, said in ((before, earlier), (state, manifest))
        )
        if was != now:
            raise _wrong(f"its base {manifest['base']!r} is {now}, in {before.id} it was {was}")


def _wrong(sentence: str) -> Refusal:
    return Refusal(
        "manifest_invalid",
        f"the submission stands for none: {sentence}",
        hint="nothing was logged and the quota is untouched; another model is a submission of its own: acclimate submit MODEL",
        problems=[sentence],
    )
