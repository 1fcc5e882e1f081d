"""Judging a round again: what is wrong with a holdout's targets, or with the scorer, as data with a digest.

A correction says all that is to be judged otherwise than the definition and the opened holdout have it, not than the version before: so each version
follows from the predictions, the holdout and its own correction alone. Nothing is prepared or evaluated again; predictions stay what they are.
"""

import base64
import binascii
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from acclimate_competitions import digests, metrics, splits
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.metrics import MAJORITY, METRICS

if TYPE_CHECKING:
    import pyarrow as pa

NONCE_BYTES = 32
"""Bytes of a nonce, as of a submission's."""
_KEYS = frozenset({"v", "metrics", "targets", "void", "nonce"})


@dataclass(frozen=True)
class Correction:
    """What is judged otherwise.

    Attributes:
        targets: task -> example -> the right target.
        void: task -> examples that count for nobody.
        metrics: task -> the metric in the place of the definition's.
        nonce: base64 of 32 random bytes, which nobody guesses, so that the digest tells nothing of a private holdout's targets.
    """

    targets: Mapping[str, Mapping[str, str]]
    void: Mapping[str, tuple[str, ...]]
    metrics: Mapping[str, str]
    nonce: str

    def document(self) -> dict[str, Any]:
        """The correction as JSON-ready data."""
        return {
            "v": 1,
            "metrics": dict(self.metrics),
            "targets": {task: dict(each) for task, each in self.targets.items()},
            "void": {task: list(each) for task, each in self.void.items()},
            "nonce": self.nonce,
        }

    @property
    def digest(self) -> str:
        """Digest of the canonical JSON of document()."""
        return digests.of_json(self.document())

    def competition(self, competition: Competition) -> Competition:
        """The competition whose tasks have the metric in force; digest and policy are the definition's."""
        if not self.metrics:
            return competition
        tasks = tuple(
            dataclasses.replace(task, metric=self.metrics.get(task.name, task.metric)) for task in competition.tasks
        )
        return dataclasses.replace(competition, tasks=tasks)

    def holdout(self, task: str, rows: "pa.Table") -> "pa.Table":
        """A task's holdout as it is judged: with the right targets, without the void examples."""
        import pyarrow as pa

        rows = self.counted(task, rows)
        if "target" not in rows.schema.names:  # texts that are read as a whole have none
            return rows
        names = rows.column("example").to_pylist()
        right = self.targets.get(task, {})
        targets = [right.get(n, old) for n, old in zip(names, rows.column("target").to_pylist(), strict=True)]
        return rows.set_column(rows.schema.names.index("target"), "target", pa.array(targets, pa.string()))

    def counted(self, task: str, rows: "pa.Table") -> "pa.Table":
        """Rows, by their example, without those of void examples."""
        import pyarrow as pa
        import pyarrow.compute as pc

        gone = pa.array(self.void.get(task, ()), pa.string())
        return rows.filter(pc.invert(pc.is_in(rows.column("example"), gone)))


def scores(
    correction: Correction,
    competition: Competition,
    *,
    predictions: "Iterable[tuple[str, pa.Table]]",
    holdout: "Callable[[str], pa.Table]",
    preparation: "Callable[[str], pa.Table]",
) -> "pa.Table":
    """All scores as a correction has them, of the entries and of the null predictor.

    Args:
        correction: what is judged otherwise.
        competition: as it is defined.
        predictions: each with its task.
        holdout: gives a task's rows, as they were opened.
        preparation: gives a task's rows, which the null predictor counts.

    Returns:
        tables.SCORES.

    Raises:
        Refusal: scores_invalid.
    """
    import pyarrow as pa

    from acclimate_competitions import tables

    made, parts = correction.competition(competition), []
    cluster, seeds = made.ranking.cluster, made.preparation.seeds
    truth = {task.name: correction.holdout(task.name, holdout(task.name)) for task in made.tasks}
    for name, found in predictions:
        counted = correction.counted(name, found)
        parts.append(metrics.score_predictions(counted, truth[name], made.task(name), cluster=cluster))
    for task in made.tasks if MAJORITY in made.ranking.baselines else ():
        parts.append(
            metrics.majority_scores(preparation(task.name), truth[task.name], task, seeds=seeds, cluster=cluster)
        )
    return pa.concat_tables(parts) if parts else tables.SCORES.empty_table()


def parse(document: object) -> Correction:
    """The correction of JSON data: {v, metrics, targets, void, nonce}.

    Raises:
        Refusal: correction_invalid.
    """
    if not isinstance(document, dict) or set(document) != _KEYS or type(document["v"]) is not int or document["v"] != 1:
        raise _invalid([f"it must have exactly {', '.join(sorted(_KEYS))}, and v = 1"])
    targets, void, changed, nonce = (document[name] for name in ("targets", "void", "metrics", "nonce"))
    problems = []
    if not _of(targets, dict) or not all(isinstance(t, str) for each in targets.values() for t in each.values()):
        problems.append("targets must be {task: {example: target}}")
    if not _of(void, list) or not all(isinstance(name, str) for each in void.values() for name in each):
        problems.append("void must be {task: [example]}")
    if not _of(changed, str) or not set(changed.values()) <= set(METRICS):
        problems.append(f"metrics must be {{task: one of {', '.join(METRICS)}}}")
    if not _is_nonce(nonce):
        problems.append("nonce must be the base64 of 32 random bytes")
    if problems:
        raise _invalid(problems)
    return Correction(targets, {task: tuple(each) for task, each in void.items()}, changed, nonce)


def check(correction: Correction, competition: Competition, holdout: "Mapping[str, pa.Table]") -> None:
    """Refuse a correction that does not fit a round: an example that is not there, a target that is no choice, or was right before.

    Args:
        correction: whose form was checked.
        competition: the definition.
        holdout: the opened holdout, by task.

    Raises:
        Refusal: correction_invalid, with every problem.
    """
    problems: list[str] = []
    for task in dict.fromkeys([*correction.targets, *correction.void]):
        if task not in holdout:
            problems.append(f"there is no task {task!r}")
            continue
        rows = holdout[task]
        about = competition.task(task)
        known = dict(zip(rows.column("example").to_pylist(), rows.column(about.truth).to_pylist(), strict=True))
        gone = correction.void.get(task, ())
        for example, target in correction.targets.get(task, {}).items():
            if example not in known:
                problems.append(_unknown(task, example, known))
            elif about.truth != "target":
                problems.append(f"{task}: {example!r} is a text without a target")
            elif about.choices and target not in about.choices:
                problems.append(f"{task}: {target!r}, the target of {example!r}, is no choice")
            elif wrong := splits.wrong_truths(about, [target]):
                problems.append(f"{task}: {target!r} for {example!r}: {next(iter(wrong))}")
            elif target == known[example]:
                problems.append(f"{task}: {target!r} is the target of {example!r} already")
            elif example in gone:
                problems.append(f"{task}: {example!r} is void and has a target")
        problems += [_unknown(task, example, known) for example in gone if example not in known]
        if len(set(gone)) < len(gone):
            problems.append(f"{task}: an example is void twice")
        elif len(gone) >= len(known):
            problems.append(f"{task}: no example is left")
    for task, metric in correction.metrics.items():
        if task not in holdout:
            problems.append(f"there is no task {task!r}")
        elif competition.task(task).kind not in METRICS[metric].kinds:
            problems.append(f"{task}: {metric} does not score tasks of kind {competition.task(task).kind}")
        elif competition.task(task).metric == metric:
            problems.append(f"{task}: the metric is {metric} already")
    if not correction.metrics and not any(correction.targets.values()) and not any(correction.void.values()):
        problems.append("it corrects nothing")
    if problems:
        raise _invalid(problems)


def _unknown(task: str, example: str, known: Mapping[str, Any]) -> str:
    like = next(iter(known), None)
    return f"{task}: there is no example {example!r}" + (
        f"; ids there are such as {like!r}" if like is not None else ""
    )


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Entrants whose score or rank two rankings' documents tell differently, by the newer one's order.

    Returns:
        {entrant, rank_before, rank, score_before, score, direct_score_before, direct_score}; ranks of baselines are None.
    """
    old = {row["entrant"]: row for row in [*before["ranking"], *before["baselines"]]}
    found = []
    for row in [*after["ranking"], *after["baselines"]]:
        was = old.get(row["entrant"], {})
        names = ("rank", "score", "direct_score")
        if any(was.get(name) != row.get(name) for name in names):
            told = {"entrant": row["entrant"]}
            for name in names:
                told |= {f"{name}_before": was.get(name), name: row.get(name)}
            found.append(told)
    return found


def _of(value: object, kind: type) -> bool:
    return isinstance(value, dict) and all(isinstance(each, kind) for each in value.values())


def _is_nonce(value: object) -> bool:
    """Whether it is base64 of 32 bytes, in the one spelling that has: of a shorter one, whoever guesses the targets could try all."""
    try:
        raw = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except (binascii.Error, ValueError):  # ValueError: characters beyond ASCII
        return False
    return len(raw) == NONCE_BYTES and base64.b64encode(raw).decode() == value


def _invalid(problems: list[str]) -> Refusal:
    return Refusal(
        "correction_invalid",
        f"the correction has {len(problems)} problem{'' if len(problems) == 1 else 's'}: {problems[0]}",
        hint="nothing was signed; a correction is JSON: acclimate round revise --help",
        problems=problems,
    )
