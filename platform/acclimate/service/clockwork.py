"""The transitions that RoundDefined authorizes in advance: open, close, finish preparation, open the holdout, finish evaluation, publish.

Each is decided again inside its own transaction, by the database's clock and the round as it stands there; so any number of
processes may tick at once, and a tick that finds nothing due costs two small queries a round.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sqlalchemy import select

from acclimate import publication
from acclimate.config import Settings
from acclimate.service import release, submit
from acclimate.store import Store, Tx, rounds, seals, submissions, unsigned
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round, entries_root
from acclimate_runners import failpoints

_log = logging.getLogger(__name__)
# What was last said of each round: ticks come several times a second.
_told: dict[str, str] = {}
TERMINAL = frozenset({Phase.PUBLISHED, Phase.VOIDED})
# The trouble of all rounds, which whoever ticks must hear of.
_WHOLE = frozenset({"busy", "lease_lost", "database_unreachable"})


def tick(store: Store, settings: Settings, *, aside: Callable[[str], str | None] | None = None) -> list[str]:
    """Make all transitions that are due, of every round; one line for each that was made.

    Args:
        store: the store.
        settings: of the installation.
        aside: does, of a round, what takes its time, and says what it has logged; as carry_out does.

    Raises:
        Refusal: busy, lease_lost, database_unreachable.
    """
    aside = aside or partial(carry_out, store, settings)
    done: list[str] = []
    with store.snapshot() as tx:
        names = tx.execute(select(rounds.c.id).order_by(rounds.c.created, rounds.c.id)).scalars().all()
    for name in names:
        known = store.recall(name)
        if known is not None and known.phase in TERMINAL:
            continue
        try:
            # Several may be due at once: a round without entries goes from closed to prepared in the same tick.
            while (kind := _advance(store, name, aside)) is not None:
                done.append(f"{name}: {kind}")
        except Exception as error:
            if isinstance(error, Refusal) and error.code in _WHOLE:
                raise
            # One round's trouble (a full disk, a lost blob, a bug) must not hold up the others; the next tick tries again.
            tell(name, error)
    return done


def tell(name: str, error: Exception) -> None:
    """Log what a round's transition waits for, once for each wording."""
    words = f"{type(error).__name__}: {error}"
    if _told.get(name) != words:
        _told[name] = words
        _log.warning("round %s waits: %s", name, words, exc_info=None if isinstance(error, Refusal) else error)


def carry_out(store: Store, settings: Settings, round_id: str) -> str | None:
    """Do what takes its time where it is due: open the holdout, or publish the ranking; the type of the record that was logged, or None.

    Raises:
        Refusal: what hinders it; it is tried again.
    """
    if release.open_holdout(store, settings, round_id):
        return "HoldoutOpened"
    return "RankingPublished" if publication.publish_itself(store, settings, round_id) else None


def _advance(store: Store, round_id: str, aside: Callable[[str], str | None]) -> str | None:
    with store.snapshot() as tx:
        state = tx.round(round_id)
        long = state.phase is Phase.RELEASED or publication.is_due(tx, round_id)
        if not long and _due(tx, state) is None:
            return None
    if long:
        return aside(round_id)
    with store.transaction() as tx:
        state = tx.round(round_id)
        due = _due(tx, state)
        if due is None:
            return None
        kind, fields = due
        tx.append(unsigned(kind, round_id, fields))
        if kind == "RoundClosed":
            _forfeit(tx, state)
        failpoints.reach("moving")
    failpoints.reach("moved")
    return kind


def _due(tx: Tx, state: Round) -> tuple[str, dict[str, Any]] | None:
    """The record that is due in this phase, or None."""
    decide = _DECISIONS.get(state.phase)
    return decide(tx, state) if decide is not None else None


def _opening(tx: Tx, state: Round) -> tuple[str, dict[str, Any]] | None:
    assert state.seal is not None
    now = tx.now()
    ready = not missing_before_opening(tx, state) and state.opens <= now < state.closes
    return ("RoundOpened", {"seal": state.seal["seal"]}) if ready else None


def missing_before_opening(tx: Tx, state: Round) -> list[str]:
    """What a sealed round still waits for before it may open, apart from the time."""
    found = []
    have, need = len(state.acknowledged), state.acknowledgements_needed
    if have < need:
        silent = [c["name"] for i, c in enumerate(state.defined["custodians"], start=1) if i not in state.acknowledged]
        found.append(f"{any_of(need - have, silent)} must acknowledge their share")
    if not rehearsed(tx, state.id):
        found.append("the rehearsal on a dummy seal must succeed")
    return found


def any_of(count: int, names: Sequence[str]) -> str:
    """So many of these people, in words."""
    return ", ".join(names) if count >= len(names) else f"any {count} more of {', '.join(names)}"


def rehearsed(tx: Tx, round_id: str) -> bool:
    """Whether a rehearsal has succeeded."""
    query = select(seals.c.seal).where(
        seals.c.round == round_id, seals.c.kind == "rehearsal", seals.c.succeeded.is_not(None)
    )
    return tx.execute(query.limit(1)).first() is not None


def _closing(tx: Tx, state: Round) -> tuple[str, dict[str, Any]] | None:
    now = tx.now()
    if now < state.closes or (now < state.last_acceptance and state.outstanding):
        return None
    entries = state.frozen_entries()
    fields = {"count": len(entries), "entries_root": entries_root(entries), "forfeited": state.forfeited()}
    return "RoundClosed", fields


def _forfeit(tx: Tx, before: Round) -> None:
    """Tell the submissions that did not make it, by the round as it stood when it closed."""
    waiting = select(submissions).where(
        submissions.c.round == before.id, submissions.c.state.in_(("uploading", "checking"))
    )
    for row in tx.execute(waiting.order_by(submissions.c.committed_index)).all():
        submit.forfeit(tx, row, reason="the round closed before the model was accepted")


def _prepared(tx: Tx, state: Round) -> tuple[str, dict[str, Any]] | None:
    if len(state.prepared) < len(state.preparations):
        return None
    if state.prepared:
        window_ends = max(record.at for record in state.prepared.values()) + state.competition.round.objection_window
        if tx.now() < window_ends:
            return None
    return "PreparationFinished", _count_and_root(state.prepared_leaves)


def _evaluated(tx: Tx, state: Round) -> tuple[str, dict[str, Any]] | None:
    if len(state.evaluated) < len(state.models):
        return None
    return "EvaluationFinished", _count_and_root(state.evaluated_leaves)


def _count_and_root(leaves: Sequence[bytes]) -> dict[str, Any]:
    return {"count": len(leaves), "root": digests.root_of_leaves(leaves)}


_DECISIONS: dict[Phase, Callable[[Tx, Round], tuple[str, dict[str, Any]] | None]] = {
    Phase.SEALED: _opening,
    Phase.OPEN: _closing,
    Phase.CLOSED: _prepared,
    Phase.OPENED: _evaluated,
}
