"""Metrics of an analyst: predictions and targets give a value, its standard error, and scores by example where the metric is a mean of them.

None of them beyond those of `metrics.py` may be a round's metric. A ranking is a mean of scores by example; macro-F1, MCC, calibration error, RMSE,
bits per byte of all texts together and Spearman's correlation are none, and of the others no scorer of rounds is written. The former get their standard error by a jackknife over clusters.

Missing. An example whose prediction is None, or holds a NaN, is unscored: left out and counted, whatever the metric. A target that is missing is refused.

Sources: Naeini, Cooper & Hauskrecht, Obtaining Well Calibrated Probabilities Using Bayesian Binning; Brier, Verification of Forecasts Expressed in Terms
of Probability; Rajpurkar et al., SQuAD (token F1); Efron, The Jackknife; Gorodkin, Comparing two K-category assignments by a K-category correlation
coefficient (MCC). Macro-F1 and MCC are to the last bit scikit-learn's, which takes a second to import; Spearman's correlation is scipy's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from acclimate_competitions.answers import token_f1
from acclimate_competitions.errors import Refusal, installing
from acclimate_competitions.scores import Bools, Floats

BINS = 15
"""Of equal width, for the expected calibration error."""
GROUPS = 200
"""At most so many groups of clusters are left out in turn by the jackknife."""
_MOST_COUNTS = 2_000_000
"""Counts, groups × labels, that are held at once; three times over, 8 bytes each."""


@dataclass(frozen=True)
class Measure:
    """One metric.

    Attributes:
        name: of it.
        direction: max where more is better.
        low: its smallest value, None where unbounded.
        high: its largest value, None where unbounded.
        takes: what a prediction is. label; probabilities: one a label, in the labels' order; text; number; nats: negative log-likelihood of the example,
            whose target is its size in bytes.
        mean: whether it is a mean of scores by example.
    """

    name: str
    direction: Literal["max", "min"]
    low: float | None
    high: float | None
    takes: Literal["label", "probabilities", "text", "number", "nats"]
    mean: bool


MEASURES: dict[str, Measure] = {
    one.name: one
    for one in (
        Measure("accuracy", "max", 0.0, 1.0, "label", True),
        Measure("macro_f1", "max", 0.0, 1.0, "label", False),
        Measure("mcc", "max", -1.0, 1.0, "label", False),
        Measure("log_loss", "min", 0.0, None, "probabilities", True),
        Measure("brier", "min", 0.0, 2.0, "probabilities", True),
        Measure("ece", "min", 0.0, 1.0, "probabilities", False),
        Measure("exact_match", "max", 0.0, 1.0, "text", True),
        Measure("token_f1", "max", 0.0, 1.0, "text", True),
        Measure("bits_per_byte", "min", 0.0, None, "nats", False),
        Measure("rmse", "min", 0.0, None, "number", False),
        Measure("mae", "min", 0.0, None, "number", True),
        Measure("spearman", "max", -1.0, 1.0, "number", False),
    )
}


@dataclass(frozen=True)
class Measured:
    """A value of a metric.

    Attributes:
        value: None where it is undefined: nothing scored, or one value throughout for a correlation.
        se: its standard error, by cluster; None with fewer than two clusters, or where it is undefined.
        per_example: a score an example, NaN where unscored; None where the metric is no mean of such.
        n: scored examples.
        missing: unscored ones.
        direction: max where more is better.
    """

    value: float | None
    se: float | None
    per_example: Floats | None
    n: int
    missing: int
    direction: Literal["max", "min"]


def score(
    metric: str,
    predictions: Sequence[Any],
    targets: Sequence[Any],
    *,
    labels: Sequence[str] = (),
    clusters: Sequence[object] | None = None,
) -> Measured:
    """The value of a metric, with its standard error.

    Args:
        metric: a name of MEASURES.
        predictions: n, of the kind that the metric takes; None or NaN where there is none.
        targets: n; labels, texts, numbers, or sizes in bytes.
        labels: all labels, for probabilities in their order; else those that occur.
        clusters: n; each example is its own where there are none.

    Raises:
        Refusal: scores_invalid, for what can't be scored; extra_missing, where scipy is.
    """
    if metric not in MEASURES:
        raise Refusal("scores_invalid", f"unknown metric {metric!r}", hint=f"known are {', '.join(MEASURES)}")
    found, n = MEASURES[metric], len(targets)
    if len(predictions) != n or (clusters is not None and len(clusters) != n):
        raise Refusal(
            "scores_invalid", f"{n} targets, but {len(predictions)} predictions or another number of clusters"
        )
    for place, target in enumerate(targets):
        if target is None or target != target:
            raise Refusal("scores_invalid", f"example {place} has no target")
    known = np.array([not absent(prediction) for prediction in predictions], dtype=bool)
    kept = np.flatnonzero(known).tolist()
    given, right = [predictions[place] for place in kept], [targets[place] for place in kept]
    of = [clusters[place] if clusters is not None else place for place in kept]
    prepared = _prepared(found, given, right, labels)
    names = {cluster: number for number, cluster in enumerate(dict.fromkeys(of))}
    of_cluster = np.array([names[cluster] for cluster in of], dtype=np.int64)
    if found.mean:
        scores = _BY_EXAMPLE[metric](*prepared)
        whole = np.full(n, np.nan)
        whole[known] = scores
        value, error = _mean(scores, of_cluster, len(names))
        return Measured(value, error, whole, len(kept), n - len(kept), found.direction)
    whole_value = _WHOLE[metric](*prepared)
    by_counts = _BY_COUNTS.get(metric)
    if by_counts is not None and min(GROUPS, len(names)) * len({*given, *right}) <= _MOST_COUNTS:
        error = _jackknife_of_counts(by_counts, prepared, of_cluster, len(names))
    else:
        error = _jackknife(_WHOLE[metric], prepared, of_cluster, len(names))
    return Measured(whole_value, error, None, len(kept), n - len(kept), found.direction)


OF_CHOICE = ("accuracy", "macro_f1", "mcc", "log_loss", "brier", "ece")
"""Metrics of a task of kind choice, computed from the log-likelihoods of its choices."""


def of_choice(
    metric: str,
    loglikelihoods: Sequence[Sequence[float] | None],
    targets: Sequence[str],
    *,
    choices: Sequence[str],
    clusters: Sequence[object] | None = None,
) -> Measured:
    """A metric of multiple choice: the label is the choice with the largest log-likelihood, the first at a tie; probabilities are the softmax of all.

    Args:
        metric: one of OF_CHOICE.
        loglikelihoods: n lists of one natural logarithm a choice; None, of another length or not finite: unscored.
        targets: n right answers.
        choices: in the order of the log-likelihoods.
        clusters: as for score.

    Raises:
        Refusal: as score.
    """
    usable = [
        None if row is None or len(row) != len(choices) or not all(map(math.isfinite, row)) else list(row)
        for row in loglikelihoods
    ]
    given: list[Any]
    if MEASURES[metric].takes == "label":
        given = [None if row is None else choices[row.index(max(row))] for row in usable]
    else:
        given = [None if row is None else softmax(row) for row in usable]
    return score(metric, given, targets, labels=choices, clusters=clusters)


def softmax(logarithms: Sequence[float]) -> list[float]:
    """Probabilities in proportion to the exponentials."""
    most = max(logarithms)
    parts = [math.exp(one - most) for one in logarithms]
    whole = math.fsum(parts)
    return [part / whole for part in parts]


def pseudo_values(
    metric: str,
    predictions: Sequence[Any],
    targets: Sequence[Any],
    *,
    groups: Sequence[int],
    labels: Sequence[str] = (),
) -> dict[int, float | None]:
    """A number a group whose mean is the metric's value, and whose spread is that of the delete-a-group jackknife.

    They let a metric that is no mean of scores by example be ranked and compared like one (Efron, The Jackknife): value + (G − 1)(mean of the
    values without a group − value without this one).

    Args:
        metric: a name of MEASURES.
        predictions: n, none of them absent.
        targets: n.
        groups: n.
        labels: as for score.

    Returns:
        By group; None throughout where the metric is undefined, on all examples or without one of the groups.

    Raises:
        Refusal: as score.
    """
    found = MEASURES[metric]
    given = _prepared(found, list(predictions), list(targets), labels)
    by_example = _BY_EXAMPLE.get(metric)
    whole = (lambda *pair: _mean(by_example(*pair), [], 0)[0]) if by_example is not None else _WHOLE[metric]
    place, names = np.array(groups, dtype=np.int64), sorted(set(groups))
    value, without = whole(*given), [whole(given[0][place != name], given[1][place != name]) for name in names]
    if len(names) == 1:
        return {names[0]: value}
    known = [one for one in without if one is not None]
    if value is None or len(known) < len(names):
        return dict.fromkeys(names)
    middle = math.fsum(known) / len(known)
    return {name: value + (len(names) - 1) * (middle - one) for name, one in zip(names, known, strict=True)}


def absent(prediction: Any) -> bool:
    """Whether a prediction is None, or holds a NaN."""
    if prediction is None:
        return True
    if isinstance(prediction, str):
        return False
    return bool(np.isnan(np.asarray(prediction, dtype=np.float64)).any())


def _prepared(found: Measure, given: list[Any], right: list[Any], labels: Sequence[str]) -> tuple[Any, Any]:
    """Predictions and targets as arrays, checked."""
    if found.takes in ("label", "text"):
        return np.array(given, dtype=object), np.array(right, dtype=object)
    if found.takes == "probabilities":
        unknown = sorted({str(target) for target in right if target not in labels})
        if unknown or len(set(labels)) != len(labels):
            raise Refusal(
                "scores_invalid",
                f"targets {unknown} are no label, or a label stands twice",
                hint="give labels in the order of the probabilities",
            )
        table = np.array(given, dtype=np.float64).reshape(len(given), -1) if given else np.zeros((0, len(labels)))
        if table.shape[1] != len(labels) or (table < 0).any() or (np.abs(table.sum(axis=1) - 1) > 1e-6).any():
            raise Refusal("scores_invalid", f"a prediction must be {len(labels)} probabilities with the sum 1")
        return table, np.array([list(labels).index(target) for target in right], dtype=np.int64)
    numbers, sizes = np.array(given, dtype=np.float64), np.array(right, dtype=np.float64)
    if not np.isfinite(numbers).all() or not np.isfinite(sizes).all():
        raise Refusal("scores_invalid", "a prediction or target is infinite")
    if found.takes == "nats" and (sizes <= 0).any():
        raise Refusal("scores_invalid", "an example has a size of 0 bytes or less")
    return numbers, sizes


def _mean(scores: Floats, place: Any, count: int) -> tuple[float | None, float | None]:
    if not len(scores):
        return None, None
    mean = math.fsum(scores.tolist()) / len(scores)
    if count < 2:
        return mean, None
    residuals = np.bincount(place, weights=scores - mean, minlength=count)
    return mean, math.sqrt(math.fsum((residuals**2).tolist()) * count / (count - 1)) / len(scores)


def _jackknife(
    whole: Callable[[Any, Any], float | None], given: tuple[Any, Any], place: Any, count: int
) -> float | None:
    """Delete-a-group: clusters in turn, or in at most GROUPS groups of them, dealt out in their order."""
    groups = min(GROUPS, count)
    if groups < 2:
        return None
    values = []
    for group in range(groups):
        kept: Bools = place % groups != group
        value = whole(given[0][kept], given[1][kept])
        if value is None:
            return None
        values.append(value)
    return _of_groups(values)


def _jackknife_of_counts(
    by_counts: Callable[[Floats, Floats, Floats], Floats], given: tuple[Any, Any], place: Any, count: int
) -> float | None:
    """The same, of a metric that follows from how often each label is given, right, and both: all groups at once, from the counts without each of them."""
    groups = min(GROUPS, count)
    if groups < 2:
        return None
    each = _counts(given, place % groups, groups)
    return _of_groups(by_counts(*(part.sum(axis=0) - part for part in each)).tolist())


def _counts(pair: tuple[Any, Any], group: Any, groups: int) -> tuple[Floats, Floats, Floats]:
    """How often each label, in their order, is given, right, and both in each group: three of [groups, labels]."""
    given, right = (labels.astype(str) for labels in pair)
    names, codes = np.unique(np.concatenate([given, right]), return_inverse=True)
    given, right = codes[: len(given)], codes[len(given) :]

    def count(labels: Any, of: Any) -> Floats:
        found = np.bincount(of * len(names) + labels, minlength=groups * len(names))
        return found.reshape(groups, len(names)).astype(np.float64)

    hit = given == right
    return count(given, group), count(right, group), count(given[hit], group[hit])


def _of_groups(values: Sequence[float]) -> float:
    """The jackknife's standard error, of the values without each group."""
    groups, mean = len(values), math.fsum(values) / len(values)
    return math.sqrt((groups - 1) / groups * math.fsum((value - mean) ** 2 for value in values))


def _macro_f1_of_counts(given: Floats, right: Floats, both: Floats) -> Floats:
    """Of rows of counts a label; a label that is neither given nor right is none of the mean's."""
    sums = given + right
    return np.asarray((2 * both / np.maximum(sums, 1)).sum(axis=1) / (sums > 0).sum(axis=1))


def _mcc_of_counts(given: Floats, right: Floats, both: Floats) -> Floats:
    """Of rows of counts a label; 0 where all that is given, or all that is right, is one label."""
    n, hits = given.sum(axis=1), both.sum(axis=1)
    spread = (n * n - (given * given).sum(axis=1)) * (n * n - (right * right).sum(axis=1))
    covariance = hits * n - (given * right).sum(axis=1)
    return np.asarray(np.where(spread > 0, covariance / np.sqrt(np.where(spread > 0, spread, 1.0)), 0.0))


def _equal(given: Any, right: Any) -> Floats:
    return np.array([float(a == b) for a, b in zip(given, right, strict=True)])


def _log_loss(table: Floats, right: Any) -> Floats:
    # As scikit-learn clips: a certainty that is wrong costs about 36 nats, not infinitely many.
    chosen = np.clip(table[np.arange(len(table)), right], np.finfo(np.float64).eps, 1.0)
    return np.asarray(-np.log(chosen))


def _brier(table: Floats, right: Any) -> Floats:
    return np.asarray(((table - np.eye(table.shape[1])[right]) ** 2).sum(axis=1))


def _exact(given: Any, right: Any) -> Floats:
    return _equal([text.strip() for text in given], [text.strip() for text in right])


def _token_f1(given: Any, right: Any) -> Floats:
    return np.array([token_f1(said, target) for said, target in zip(given, right, strict=True)])


def _absolute(given: Floats, right: Floats) -> Floats:
    return np.abs(given - right)


def _ece(table: Floats, right: Any) -> float | None:
    if not len(table):
        return None
    sure, hit = table.max(axis=1), (table.argmax(axis=1) == right).astype(np.float64)
    bins = np.clip(np.ceil(sure * BINS).astype(np.int64) - 1, 0, BINS - 1)
    return float(np.abs(np.bincount(bins, weights=hit - sure, minlength=BINS)).sum() / len(table))


def _bits(given: Floats, sizes: Floats) -> float | None:
    return float(given.sum() / sizes.sum() / math.log(2)) if len(given) else None


def _rmse(given: Floats, right: Floats) -> float | None:
    return math.sqrt(float(((given - right) ** 2).mean())) if len(given) else None


def _spearman(given: Floats, right: Floats) -> float | None:
    if len(given) < 2 or (given == given[0]).all() or (right == right[0]).all():
        return None
    try:
        from scipy import stats
    except ModuleNotFoundError as error:
        raise Refusal(
            "extra_missing", "this needs scipy, which is not installed", hint=installing("analysis")
        ) from error
    return float(stats.spearmanr(given, right).statistic)


def _of_counts(by_counts: Callable[[Floats, Floats, Floats], Floats]) -> Callable[[Any, Any], float | None]:
    def whole(given: Any, right: Any) -> float | None:
        if not len(given):
            return None
        return float(by_counts(*_counts((given, right), np.zeros(len(given), dtype=np.int64), 1))[0])

    return whole


_BY_EXAMPLE: dict[str, Callable[[Any, Any], Floats]] = {
    "accuracy": _equal,
    "log_loss": _log_loss,
    "brier": _brier,
    "exact_match": _exact,
    "token_f1": _token_f1,
    "mae": _absolute,
}
_BY_COUNTS = {"macro_f1": _macro_f1_of_counts, "mcc": _mcc_of_counts}
_WHOLE: dict[str, Callable[[Any, Any], float | None]] = {
    "macro_f1": _of_counts(_macro_f1_of_counts),
    "mcc": _of_counts(_mcc_of_counts),
    "ece": _ece,
    "bits_per_byte": _bits,
    "rmse": _rmse,
    "spearman": _spearman,
}
