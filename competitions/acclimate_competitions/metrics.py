"""Metrics, named and versioned: (targets, predictions) -> one score an example. Pure Python; Arrow only in and out of tables.

Unknown is not zero: an example whose prediction is missing or unusable has score None and a reason; what that costs is the
ranking policy's affair. A target is never looked at for such an example.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from acclimate_competitions.anchors import MAJORITY as MAJORITY
from acclimate_competitions.answers import answers, token_f1
from acclimate_competitions.errors import Refusal
from acclimate_competitions.probabilities import LARGEST_LOG_LOSS, brier, log_loss
from acclimate_competitions.tasks import Task

if TYPE_CHECKING:
    import pyarrow as pa

Scored = tuple[float | None, str | None]
"""(score, None) or (None, reason)."""

NO_PREDICTION = "no prediction"
NO_LOGLIKELIHOODS = "no log-likelihoods"
WRONG_LENGTH = "wrong number of log-likelihoods"
NOT_FINITE = "a log-likelihood is not a finite number"
NO_TEXT = "no text"
ABOVE_CERTAIN = "a text's log-likelihood is above 0"

OWN_FAULTS = frozenset({NO_LOGLIKELIHOODS, WRONG_LENGTH, NOT_FINITE, NO_TEXT, ABOVE_CERTAIN})
"""Reasons that lie with the model: it was asked and gave nothing usable. NO_PREDICTION does not: nobody asked it."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: as in `[[tasks]] metric` and in the column `metric` of score tables.
        version: rises with any change of the scorer that can move a number.
        direction: "max" where more is better.
        scale: metrics of one scale and direction may be averaged over tasks.
        low: the smallest possible score of an example, None where unbounded.
        high: the largest possible score of an example, None where unbounded.
        kinds: the kinds of task that it scores.
    """

    name: str
    version: int
    direction: Literal["max", "min"]
    scale: str
    low: float | None
    high: float | None
    kinds: tuple[str, ...]

    @property
    def worst(self) -> float | None:
        """The worst possible score of an example, None where there is none."""
        return self.low if self.direction == "max" else self.high

    @property
    def best(self) -> float | None:
        """The best possible score of an example, None where there is none."""
        return self.high if self.direction == "max" else self.low

    def above_chance(self, score: float, *, chance: float) -> float | None:
        """The score where a blind guess is 0 and a perfect answer is 1; None where the metric has no best value, or chance is it."""
        if self.best is None or self.best == chance:
            return None
        return (score - chance) / (self.best - chance)

    def document(self) -> dict[str, Any]:
        """What of the metric can change a number, as JSON-ready data: part of a round's `scorer` digest."""
        return {"name": self.name, "version": self.version, "direction": self.direction, "scale": self.scale}


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        # Share of examples whose target has the largest log-likelihood of the choices; the first choice wins a tie.
        Metric("accuracy", 1, "max", "share", 0.0, 1.0, ("choice", "classify")),
        # The same of log-likelihoods divided by their choice's length in characters, as lm-evaluation-harness has it.
        Metric("acc_norm", 1, "max", "share", 0.0, 1.0, ("choice",)),
        # Negative log-likelihood of the target, in nats, not renormalized over the choices.
        Metric("nll", 1, "min", "nats", None, None, ("choice", "classify")),
        # The same of the choices' softmax, and the squared distance of that from certainty of the target.
        Metric("log_loss", 1, "min", "nats among choices", 0.0, LARGEST_LOG_LOSS, ("choice", "classify")),
        Metric("brier", 1, "min", "brier", 0.0, 2.0, ("choice", "classify")),
        # Whether the answer in the generated text is the one in the target, both extracted and normalized as the task declares.
        Metric("exact_match", 1, "max", "share", 0.0, 1.0, ("generate",)),
        # Harmonic mean of precision and recall over the words of both, as SQuAD has it.
        Metric("token_f1", 1, "max", "share", 0.0, 1.0, ("generate",)),
        # Negative log-likelihood of a text in bits, divided by its bytes in UTF-8; the score of a task is the mean of that over its texts.
        Metric("bits_per_byte", 1, "min", "bits", 0.0, None, ("perplexity",)),
    )
}


def metric_of(task: Task) -> Metric:
    """The task's metric.

    Raises:
        Refusal: definition_invalid, for a metric that METRICS lacks or that does not score this kind of task.
    """
    metric = METRICS.get(task.metric)
    if metric is None:
        raise Refusal(
            "definition_invalid",
            f"task {task.name!r}: unknown metric {task.metric!r}",
            hint=f"known are {', '.join(sorted(METRICS))}",
        )
    if task.kind not in metric.kinds:
        raise Refusal(
            "definition_invalid",
            f"task {task.name!r}: metric {metric.name!r} does not score tasks of kind {task.kind!r}",
            hint=f"it scores {', '.join(metric.kinds)}",
        )
    return metric


def turns(tasks: Sequence[Task]) -> list[float]:
    """1 for each task whose better direction is that of the first, else −1: by these all scores point the same way."""
    directions = [metric_of(task).direction for task in tasks]
    return [1.0 if direction == directions[0] else -1.0 for direction in directions]


def score_choice(
    task: Task, *, targets: Sequence[str], loglikelihoods: Sequence[Sequence[float] | None]
) -> list[Scored]:
    """Score multiple-choice examples by the log-likelihoods of their choices.

    Args:
        task: its metric decides; its choices give the order of the log-likelihoods.
        targets: n right answers.
        loglikelihoods: n lists of one natural logarithm a choice, or None.

    Returns:
        n pairs (score, reason); the score is None, with a reason, where the log-likelihoods are missing, of the wrong
        number, or not all finite. Equal largest log-likelihoods go to the first choice.

    Raises:
        Refusal: scores_invalid, for a target that is no choice, or where n differs; definition_invalid.
    """
    metric = metric_of(task)
    if len(targets) != len(loglikelihoods):
        raise Refusal("scores_invalid", f"{len(targets)} targets, but {len(loglikelihoods)} predictions")
    positions = {choice: position for position, choice in enumerate(task.choices)}
    lengths = [len(choice) for choice in task.choices]
    scorers: dict[str, Callable[[Sequence[float], int], float]] = {
        "accuracy": _correct,
        "acc_norm": partial(_correct_by_length, lengths),
        "nll": _surprise,
        "log_loss": log_loss,
        "brier": brier,
    }
    result: list[Scored] = []
    for row, (target, values) in enumerate(zip(targets, loglikelihoods, strict=True)):
        if target not in positions:
            raise Refusal("scores_invalid", f"task {task.name!r}, row {row}: target {target!r} is not a choice")
        result.append(_usable(values, positions[target], len(positions), scorers[metric.name]))
    return result


def _usable(
    values: Sequence[float] | None, right: int, count: int, score: Callable[[Sequence[float], int], float]
) -> Scored:
    if values is None:
        return None, NO_LOGLIKELIHOODS
    if len(values) != count:
        return None, WRONG_LENGTH
    for value in values:
        if value is None or not math.isfinite(value):
            return None, NOT_FINITE
    return score(values, right), None


def _correct(values: Sequence[float], right: int) -> float:
    return 1.0 if values.index(max(values)) == right else 0.0


def _correct_by_length(lengths: Sequence[int], values: Sequence[float], right: int) -> float:
    return _correct([value / length for value, length in zip(values, lengths, strict=True)], right)


def _surprise(values: Sequence[float], right: int) -> float:
    return -float(values[right])


def score_generate(task: Task, *, targets: Sequence[str], texts: Sequence[str | None]) -> list[Scored]:
    """Score generated texts by the answers that the task's extraction finds in them.

    Args:
        task: its metric, extract, take and normalize decide.
        targets: n right texts; the answer is found in them as in the generated ones.
        texts: n generated texts, or None.

    Returns:
        n pairs (score, reason). A text in which the expression finds nothing scores 0: the model was asked, and did not answer.

    Raises:
        Refusal: scores_invalid, for a target without an answer; definition_invalid.
    """
    metric = metric_of(task)
    how: dict[str, Any] = {"extract": task.extract, "take": task.take, "normalize": task.normalize}
    result: list[Scored] = []
    pairs = zip(answers(targets, **how), answers(texts, **how), texts, strict=True)
    for row, (right, said, text) in enumerate(pairs):
        if right is None:
            raise Refusal(
                "scores_invalid", f"task {task.name!r}, row {row}: {task.extract!r} finds nothing in the target"
            )
        if text is None:
            result.append((None, NO_TEXT))
        elif said is None:
            result.append((0.0, None))
        else:
            result.append((float(said == right) if metric.name == "exact_match" else token_f1(said, right), None))
    return result


def score_perplexity(
    task: Task, *, texts: Sequence[str], loglikelihoods: Sequence[Sequence[float] | None]
) -> list[Scored]:
    """Score texts by the bits that a model needs for each of their bytes.

    Args:
        task: of kind perplexity.
        texts: n texts; the bytes of their UTF-8 are counted, so that tokenizers can't change what is divided by.
        loglikelihoods: n lists with one natural logarithm, of the whole text, or None.

    Returns:
        n pairs (score, reason).

    Raises:
        Refusal: scores_invalid, for a text without a byte; definition_invalid.
    """
    metric_of(task)
    result: list[Scored] = []
    for row, (text, values) in enumerate(zip(texts, loglikelihoods, strict=True)):
        if not text:
            raise Refusal("scores_invalid", f"task {task.name!r}, row {row}: the text is empty")
        score, reason = _usable(values, 0, 1, _surprise)
        if score is not None and score < 0:
            score, reason = None, ABOVE_CERTAIN
        # Without a sign: a certain text costs 0, not -0.
        result.append((None if score is None else abs(score) / math.log(2) / len(text.encode()), reason))
    return result


@dataclass(frozen=True)
class _Given:
    """What a model gave for an example."""

    loglikelihoods: Sequence[float] | None = None
    text: str | None = None


def _score(task: Task, truths: Sequence[str], given: Sequence[_Given]) -> list[Scored]:
    """One pair an example, by the task's kind."""
    if task.kind == "generate":
        return score_generate(task, targets=truths, texts=[one.text for one in given])
    loglikelihoods = [one.loglikelihoods for one in given]
    if task.kind == "perplexity":
        return score_perplexity(task, texts=truths, loglikelihoods=loglikelihoods)
    return score_choice(task, targets=truths, loglikelihoods=loglikelihoods)


def score_predictions(
    predictions: pa.Table, holdout: pa.Table, task: Task, *, cluster: str | None, metric: str | None = None
) -> pa.Table:
    """Scores of the predictions of one or more (entrant, protocol, seed) for one task.

    Args:
        predictions: tables.PREDICTIONS.
        holdout: the task's holdout with `example`, the task's `truth`, and the column named by `cluster`.
        task: the task.
        cluster: column whose value names an example's cluster; None: each example is its own.
        metric: another metric than the task's own, for analysis.

    Returns:
        tables.SCORES: one row for each holdout example and (entrant, protocol, seed), in the holdout's order; an
        example without a prediction is null with a reason.

    Raises:
        Refusal: scores_invalid, for an empty table, another task, an unknown or doubled example, a protocol that does
            not fit its seed, or a holdout with doubled examples or without a needed column; definition_invalid.
    """
    task = task if metric is None else dataclasses.replace(task, metric=metric)
    metric_of(task)
    examples, targets, clusters = _holdout(holdout, task, cluster)
    known = set(examples)
    given: dict[tuple[str, str, int | None], dict[str, _Given]] = {}
    columns = (predictions.column(name).to_pylist() for name in ("entrant", "protocol", "task", "seed", "example"))
    values = (predictions.column(name).to_pylist() for name in ("loglikelihoods", "text"))
    rows = zip(*columns, *values, strict=True)
    for row, (entrant, protocol, name, seed, example, loglikelihoods, text) in enumerate(rows):
        where = f"predictions of {entrant!r} for {name!r}, {protocol}, seed {seed}, row {row}"
        if name != task.name:
            raise Refusal("scores_invalid", f"{where}: expected task {task.name!r}")
        group = given.get((entrant, protocol, seed))
        if group is None:
            check_key(protocol, seed, where=where)
            group = given[entrant, protocol, seed] = {}
        if example not in known:
            raise Refusal("scores_invalid", f"{where}: example {example!r} is not in the holdout")
        if example in group:
            raise Refusal("scores_invalid", f"{where}: example {example!r} has two predictions")
        group[example] = _Given(loglikelihoods, text)
    if not given:
        raise Refusal("scores_invalid", f"task {task.name!r}: the table of predictions is empty")
    table = _Rows(task, examples, clusters)
    for (entrant, protocol, seed), group in given.items():
        scored = _score(task, targets, [group.get(example, _Given()) for example in examples])
        missing = [
            pair if example in group else (None, NO_PREDICTION) for example, pair in zip(examples, scored, strict=True)
        ]
        table.add(entrant, protocol, seed, missing)
    return table.table()


def unscored(
    holdout: pa.Table, task: Task, *, key: tuple[str, str, int | None], reason: str, cluster: str | None
) -> pa.Table:
    """Score rows of an evaluation that failed: every holdout example null, with the reason. `key`: (entrant, protocol, seed)."""
    examples, _, clusters = _holdout(holdout, task, cluster)
    check_key(key[1], key[2], where=f"{key[0]!r}")
    table = _Rows(task, examples, clusters)
    table.add(*key, [(None, reason)] * len(examples))
    return table.table()


def majority_scores(
    preparation: pa.Table, holdout: pa.Table, task: Task, *, seeds: Sequence[int], cluster: str | None
) -> pa.Table:
    """Scores of the null predictor `majority`: the most frequent target of the preparation split.

    At a tie it is the first choice; of generated texts, the first by code points. For nll it predicts the targets' frequencies, each raised
    by one; of whole texts, those of their bytes, one after the other. Rows as score_predictions, for protocol direct
    (seed null) and for protocol prepared with each of `seeds`.
    """
    guess = {
        "choice": _frequencies,
        "classify": _frequencies,
        "generate": _most_frequent,
        "perplexity": _byte_frequencies,
    }[task.kind]
    examples, truths, clusters = _holdout(holdout, task, cluster)
    given = guess(task, preparation.column(task.truth).to_pylist(), truths)
    # It answers, whatever the answer's length.
    answering = dataclasses.replace(task, metric="accuracy") if task.metric == "acc_norm" else task
    scored = _score(answering, truths, given)
    table = _Rows(task, examples, clusters)
    table.add(MAJORITY, "direct", None, scored)
    for seed in seeds:
        table.add(MAJORITY, "prepared", seed, scored)
    return table.table()


def _frequencies(task: Task, taught: Sequence[str], asked: Sequence[str]) -> list[_Given]:
    counts = dict.fromkeys(task.choices, 0)
    for row, target in enumerate(taught):
        if target not in counts:
            raise Refusal(
                "scores_invalid", f"task {task.name!r}, preparation row {row}: target {target!r} is not a choice"
            )
        counts[target] += 1
    total = sum(counts.values()) + len(counts)
    return [_Given([math.log((count + 1) / total) for count in counts.values()])] * len(asked)


def _most_frequent(task: Task, taught: Sequence[str], asked: Sequence[str]) -> list[_Given]:
    how: dict[str, Any] = {"extract": task.extract, "take": task.take, "normalize": task.normalize}
    # By their answers, which may be written in several ways.
    counts = Counter(answer for answer in answers(taught, **how) if answer is not None)
    most = max(counts.values(), default=0)
    answer = min((answer for answer, count in counts.items() if count == most), default=None)
    found = [text for text, own in zip(taught, answers(taught, **how), strict=True) if own == answer]
    return [_Given(text=min(found, default=""))] * len(asked)


def _byte_frequencies(task: Task, taught: Sequence[str], asked: Sequence[str]) -> list[_Given]:
    counts = Counter(byte for text in taught for byte in text.encode())
    total = sum(counts.values()) + 256
    nats = [math.log((counts[byte] + 1) / total) for byte in range(256)]
    return [_Given([math.fsum(nats[byte] for byte in text.encode())]) for text in asked]


def check_key(protocol: str, seed: int | None, *, where: str) -> None:
    """Refuse a protocol that is unknown or does not fit its seed: direct has none, prepared has one."""
    if protocol not in ("direct", "prepared"):
        raise Refusal("scores_invalid", f"{where}: unknown protocol {protocol!r}", hint="direct or prepared")
    if (seed is None) != (protocol == "direct"):
        expected = "no seed" if protocol == "direct" else "a seed"
        raise Refusal("scores_invalid", f"{where}: protocol {protocol!r} has {expected}, found {seed}")


class _Rows:
    """Score rows of one task, gathered evaluation by evaluation."""

    def __init__(self, task: Task, examples: list[str], clusters: list[str]) -> None:
        self._task, self._examples, self._clusters = task, examples, clusters
        self._keys: list[tuple[str, str, int | None]] = []
        self._scored: list[Scored] = []

    def add(self, entrant: str, protocol: str, seed: int | None, scored: Iterable[Scored]) -> None:
        self._keys.append((entrant, protocol, seed))
        self._scored.extend(scored)

    def table(self) -> pa.Table:
        import pyarrow as pa

        from acclimate_competitions import tables

        n, groups = len(self._examples), len(self._keys)
        columns: list[Any] = [[key[position] for key in self._keys for _ in range(n)] for position in range(3)]
        columns.insert(2, [self._task.name] * (n * groups))
        columns += [[self._task.metric] * (n * groups), self._examples * groups, self._clusters * groups]
        columns += [[score for score, _ in self._scored], [reason for _, reason in self._scored]]
        arrays = [pa.array(column, type=field.type) for column, field in zip(columns, tables.SCORES, strict=True)]
        return pa.Table.from_arrays(arrays, schema=tables.SCORES)


def _holdout(holdout: pa.Table, task: Task, cluster: str | None) -> tuple[list[str], list[str], list[str]]:
    """Columns example, the task's truth, and cluster of a holdout, checked."""
    for name in ("example", task.truth, *([cluster] if cluster else [])):
        if name not in holdout.column_names:
            raise Refusal("scores_invalid", f"task {task.name!r}: the holdout has no column {name!r}")
    examples: list[str] = holdout.column("example").to_pylist()
    if len(set(examples)) != len(examples):
        double = next(example for example in examples if examples.count(example) > 1)
        raise Refusal("scores_invalid", f"task {task.name!r}: example {double!r} stands twice in the holdout")
    targets: list[str] = holdout.column(task.truth).to_pylist()
    if cluster is None:
        return examples, targets, examples
    clusters: list[Any] = holdout.column(cluster).to_pylist()
    for example, value in zip(examples, clusters, strict=True):
        if value is None:
            raise Refusal("scores_invalid", f"task {task.name!r}: example {example!r} has no {cluster!r}")
    return examples, targets, [str(value) for value in clusters]
