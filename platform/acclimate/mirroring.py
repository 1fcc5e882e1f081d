"""MLflow held against the record, and rebuilt from it: `acclimate mlflow check` and `acclimate mlflow sync`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import select

from acclimate import publisher, tracking, tracking_places
from acclimate.config import Settings
from acclimate.finishing import DUE
from acclimate.round_data import RoundData
from acclimate.store import Store, log_entries
from acclimate.tracking_check import Difference
from acclimate_competitions.errors import Refusal

Progress = Callable[[int, int, str], None]
"""Called with (runs seen of a round, of how many, which round)."""


def check(store: Store, settings: Settings, rounds: Sequence[str], *, progress: Progress) -> dict[str, Any]:
    """Each round's differences between MLflow and the record; nothing is written.

    Args:
        store: the record.
        settings: where MLflow's results lie.
        rounds: ids; none: all that MLflow should have.
        progress: told how far it is.

    Returns:
        {same, rounds: [{round, name, same, differences: [{kind, run, what, run_id}]}]}.

    Raises:
        Refusal: round_unknown, phase_wrong; extra_missing; server_unreachable, file_unreadable; as publisher.gather.
    """
    found = []
    for data in _gathered(store, settings, rounds):
        found.append(_row(data, tracking.check(settings.tracking, data, progress=_told(progress, data))))
    return {"same": all(row["same"] for row in found), "rounds": found}


def sync(store: Store, settings: Settings, rounds: Sequence[str], *, progress: Progress) -> dict[str, Any]:
    """Make MLflow agree with the record: what differs is written anew, what the record doesn't have is deleted. Idempotent.

    Arguments and refusals as check.

    Returns:
        As check, of what was found and mended.
    """
    found = []
    for data in _gathered(store, settings, rounds):
        # 1. What somebody deleted as a whole comes back: its runs are then held against the record, those too that are too many.
        taken_back = tracking.restore(settings.tracking, data)
        # 2. What differs is deleted, and written anew.
        differences = tracking.check(settings.tracking, data, progress=_told(progress, data))
        if differences:
            tracking.remove(settings.tracking, data, [one.run_id for one in differences if one.run_id])
            artifacts = None if tracking_places.is_server(settings.tracking) else settings.artifacts
            publish = tracking.publish_preparations if data.ranking is None else tracking.publish_round
            publish(settings.tracking, artifacts, data, progress=_told(progress, data))
        found.append(_row(data, [*taken_back, *differences]))
    return {"same": all(row["same"] for row in found), "rounds": found}


def _gathered(store: Store, settings: Settings, rounds: Sequence[str]) -> Iterator[RoundData]:
    with store.snapshot() as tx:
        query = select(log_entries.c.round).where(log_entries.c.round != "").distinct()
        known = sorted(tx.execute(query).scalars())
        phases = {name: tx.round(name).phase for name in known}
    for name in rounds:
        if name not in phases:
            raise Refusal("round_unknown", f"no round {name!r}", hint=f"there are: {', '.join(known) or 'none'}")
        if phases[name] not in DUE:
            raise Refusal("phase_wrong", f"round {name} is {phases[name]}: MLflow gets a round once it is prepared")
    for name in rounds or [name for name in known if phases[name] in DUE]:
        data = publisher.gather(store, settings, name)
        # What the round ran on is in no record: MLflow's word stands, so that another setting of today is no difference.
        yield replace(data, engine=tracking.engine(settings.tracking, data) or data.engine)


def _told(progress: Progress, data: RoundData) -> Callable[[int, int], None]:
    return lambda done, total: progress(done, total, data.name)


def _row(data: RoundData, differences: Sequence[Difference]) -> dict[str, Any]:
    rows = [one.document() for one in differences]
    return {"round": data.round, "name": data.name, "same": not rows, "differences": rows}
