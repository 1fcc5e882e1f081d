"""Whether MLflow holds what the record says of a round: each planned run against what is there, value by value. Needs no MLflow of its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from acclimate import tracked_state
from acclimate.projection import Planned
from acclimate_competitions import digests

_REASON, _CONTENT = "acclimate.reason", "acclimate.content"
_WORDS = [f"tag {_REASON}", "content digest"]
_LAST = "acclimate.log_last"
"""The one tag that says where the log stood when the round was written, and so may be older."""


@dataclass(frozen=True)
class Difference:
    """One thing in which MLflow differs.

    Attributes:
        kind: missing (the record has it), extra (the record does not), changed; reworded where a run tells its failure in other words and is
            otherwise as it should be, its own digest included: as an older version wrote it, or somebody who took care of the digest.
        run: the run's name, or "experiment".
        what: for changed and reworded, in which parts.
        run_id: MLflow's, of extra and changed ones.
    """

    kind: str
    run: str
    what: tuple[str, ...] = ()
    run_id: str = ""

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": self.kind, "run": self.run, "what": list(self.what), "run_id": self.run_id}


def experiment(held: Mapping[str, str], wanted: Mapping[str, str]) -> list[Difference]:
    """In which tags a round's experiment differs."""
    wrong = tuple(sorted(name for name, value in wanted.items() if name != _LAST and held.get(name) != value))
    if tracked_state.under_way(held):  # or broken off: nobody reads it
        wrong += (tracked_state.WRITTEN,)
    return [Difference("changed", "experiment", wrong)] if wrong else []


def runs(
    planned: Sequence[Planned],
    there: Sequence[Any],
    *,
    history: Callable[[str, str], list[tuple[int, float]]],
    artifact: Callable[[Any, str], bytes | None],
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[Difference]:
    """In what the runs of a round's experiment differ from what is planned.

    Args:
        planned: all runs that there must be, parents first.
        there: MLflow's runs.
        history: of a run's id and a metric's name: its (step, value).
        artifact: an artifact's bytes, by run and name; None where it is not there.
        progress: called after each planned run.
    """
    by_key: dict[str, Any] = {}
    found: list[Difference] = []
    plans = {plan.key: plan for plan in planned}
    for run in sorted(there, key=lambda run: str(run.info.run_id)):
        key = run.data.tags.get("acclimate.stage_key")
        if key in plans and key not in by_key:
            by_key[key] = run
        elif key is not None or "acclimate.role" in run.data.tags:
            found.append(Difference("extra", str(run.info.run_name), run_id=str(run.info.run_id)))
    for number, plan in enumerate(planned, start=1):
        run = by_key.get(plan.key)
        if run is None:
            found.append(Difference("missing", plan.name))
        else:
            parent = by_key.get(plan.parent) if plan.parent else None
            wrong = _differs(plan, run, "" if parent is None else str(parent.info.run_id))
            wrong += _curves(plan, run, history) + _artifacts(plan, run, artifact)
            if wrong:
                kind = "reworded" if wrong == _WORDS and _is_whole(plan, run.data.tags) else "changed"
                found.append(Difference(kind, plan.name, tuple(dict.fromkeys(wrong)), str(run.info.run_id)))
        progress(number, len(planned))
    return found


def _is_whole(plan: Planned, held: Mapping[str, str]) -> bool:
    """Whether a run's digest is that of what is planned, with the words that it has itself for why it failed."""
    tags = {name: value for name, value in plan.tags.items() if name != _REASON}
    tags |= {_REASON: held[_REASON]} if _REASON in held else {}
    return replace(plan, tags=tags).digest == held.get(_CONTENT)


def _differs(plan: Planned, run: Any, parent: str) -> list[str]:
    tags, wrong = run.data.tags, []
    if tags.get("mlflow.parentRunId", "") != parent:
        wrong.append("parent")
    own = {name: value for name, value in tags.items() if name.startswith("acclimate.") and name != _CONTENT}
    wrong += [f"tag {name}" for name in sorted({*plan.tags, *own}) if plan.tags.get(name) != own.get(name)]
    if tags.get(_CONTENT) != plan.digest:
        wrong.append("content digest")
    wrong += [
        f"param {n}" for n in sorted({*plan.params, *run.data.params}) if plan.params.get(n) != run.data.params.get(n)
    ]
    latest = {name: value for name, value, _ in sorted(plan.metrics, key=lambda metric: metric[2])}
    held = run.data.metrics
    wrong += [f"metric {name}" for name in sorted({*latest, *held}) if latest.get(name) != held.get(name)]
    times = (round(plan.start.timestamp() * 1000), round(plan.end.timestamp() * 1000))
    if (run.info.start_time, run.info.end_time) != times:
        wrong.append("times")
    if run.info.status != ("FAILED" if plan.failed else "FINISHED"):
        wrong.append("status")
    inputs = {(one.dataset.name, one.dataset.digest) for one in (run.inputs.dataset_inputs if run.inputs else ())}
    if inputs != {(one.name, one.digest.removeprefix("sha256:")[:32]) for one in plan.inputs}:
        wrong.append("inputs")
    return wrong


def _curves(plan: Planned, run: Any, history: Callable[[str, str], list[tuple[int, float]]]) -> list[str]:
    points: dict[str, list[tuple[int, float]]] = {}
    for name, value, step in plan.metrics:
        points.setdefault(name, []).append((step, value))
    curves = {name: found for name, found in points.items() if len(found) > 1}
    return [f"curve {name}" for name, found in curves.items() if history(str(run.info.run_id), name) != sorted(found)]


def _artifacts(plan: Planned, run: Any, artifact: Callable[[Any, str], bytes | None]) -> list[str]:
    wrong = []
    for name, wanted in plan.artifacts.items():
        held = artifact(run, name)
        if held is None or digests.of_bytes(held) != digests.of_bytes(wanted):
            wrong.append(f"artifact {name}")
    return wrong
