"""An analyst's metrics: scikit-learn's and scipy's values, published examples, invariances."""

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as reference

from acclimate_competitions import measures
from acclimate_competitions.errors import Refusal

LABELS = ["a", "b", "c"]


def drawn(n=150):
    random = np.random.default_rng(7)
    table = random.dirichlet([1, 1, 1], size=n)
    targets = [LABELS[place] for place in random.integers(0, 3, n)]
    return (
        table,
        targets,
        [LABELS[place] for place in table.argmax(axis=1)],
        random.normal(size=n),
        random.normal(size=n),
    )


def test_values_are_those_of_the_libraries():
    table, targets, labels, numbers, others = drawn()
    places = [LABELS.index(target) for target in targets]
    found = {
        "accuracy": (labels, targets, reference.accuracy_score(targets, labels)),
        "macro_f1": (labels, targets, reference.f1_score(targets, labels, average="macro")),
        "mcc": (labels, targets, reference.matthews_corrcoef(targets, labels)),
        "log_loss": (table, targets, reference.log_loss(targets, table, labels=LABELS)),
        "brier": (table, targets, float(((table - np.eye(3)[places]) ** 2).sum(axis=1).mean())),
        "rmse": (numbers, others, math.sqrt(reference.mean_squared_error(others, numbers))),
        "mae": (numbers, others, reference.mean_absolute_error(others, numbers)),
        "spearman": (numbers, others, stats.spearmanr(numbers, others).statistic),
    }
    for name, (predictions, right, value) in found.items():
        made = measures.score(name, predictions, right, labels=LABELS)
        assert made.value == pytest.approx(value, abs=1e-12), name
        assert made.se is not None and made.se > 0
        assert (made.per_example is not None) == measures.MEASURES[name].mean
        assert (made.n, made.missing, made.direction) == (150, 0, measures.MEASURES[name].direction)


def test_published_and_hand_made_examples():
    assert measures.score("token_f1", ["The cat sat."], ["a cat sat down"]).value == pytest.approx(0.8)
    assert measures.score("exact_match", [" 42 ", "x"], ["42", "y"]).value == 0.5
    # Two examples of 8 and 4 bytes at ln 2 nats a byte have one bit a byte.
    assert measures.score("bits_per_byte", [8 * math.log(2), 4 * math.log(2)], [8, 4]).value == pytest.approx(1.0)
    # Ten answers at confidence 0.8, of which eight are right, are calibrated; of which five are, 0.3 off.
    for right, off in ((8, 0.0), (5, 0.3)):
        targets = ["a"] * right + ["b"] * (10 - right)
        assert measures.score("ece", [[0.8, 0.2]] * 10, targets, labels=["a", "b"]).value == pytest.approx(
            off, abs=1e-9
        )
    # Brier 1950: a certain and wrong forecast costs 2.
    assert measures.score("brier", [[1.0, 0.0]], ["b"], labels=["a", "b"]).value == 2.0


def test_a_jackknife_of_a_mean_is_its_standard_error():
    _, _, _, numbers, others = drawn(90)
    whole = measures._jackknife(lambda a, b: float(np.abs(a - b).mean()), (numbers, others), np.arange(90), 90)
    assert whole == pytest.approx(measures.score("mae", numbers, others).se, rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(2, 40), st.integers(1, 5), st.sampled_from(["macro_f1", "mcc"]))
def test_the_jackknife_of_counts_is_that_of_the_metric_itself(
    data: st.DataObject, n: int, labels: int, metric: str
) -> None:
    # Few examples and many labels: in some groups' absence a label is gone, or one alone is left.
    label, place = st.sampled_from("abcde"[:labels]), st.lists(st.integers(0, 5), min_size=n, max_size=n)
    pair = tuple(np.array(data.draw(st.lists(label, min_size=n, max_size=n)), dtype=object) for _ in range(2))
    _, of = np.unique(data.draw(place), return_inverse=True)
    groups = int(of.max()) + 1
    one = measures._jackknife(measures._WHOLE[metric], pair, of, groups)
    other = measures._jackknife_of_counts(measures._BY_COUNTS[metric], pair, of, groups)
    assert other == (None if one is None else pytest.approx(one, rel=1e-9, abs=1e-12))


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 60), st.integers(1, 40))
def test_macro_f1_and_mcc_are_scikit_learns_to_the_last_bit(data: st.DataObject, n: int, labels: int) -> None:
    # More than eight labels are added up in another order than one after the other.
    names = [f"{number * 7 % 41} é" for number in range(labels)]
    said, right = (data.draw(st.lists(st.sampled_from(names), min_size=n, max_size=n)) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        f1 = reference.f1_score(right, said, average="macro", zero_division=0.0)
        mcc = reference.matthews_corrcoef(right, said)
    assert measures.score("macro_f1", said, right).value == f1
    assert measures.score("mcc", said, right).value == mcc


def test_counts_that_take_too_much_memory_are_not_made(monkeypatch):
    targets, predictions = [f"label {n % 50}" for n in range(400)], [f"label {n % 49}" for n in range(400)]
    whole = measures.score("macro_f1", predictions, targets).se
    monkeypatch.setattr(measures, "_MOST_COUNTS", 9_999)
    monkeypatch.setattr(measures, "_jackknife_of_counts", None)
    assert measures.score("macro_f1", predictions, targets).se == pytest.approx(whole, rel=1e-9)


def test_missing_predictions_are_counted_and_missing_targets_refused():
    made = measures.score("mae", [1.0, None, math.nan, 2.0], [1.0, 1.0, 1.0, 4.0])
    assert (made.value, made.n, made.missing) == (1.0, 2, 2)
    assert np.isnan(made.per_example[1:3]).all()
    assert measures.score("mcc", [None], ["a"]).value is None
    assert measures.score("spearman", [1.0, 1.0, 1.0], [1.0, 2.0, 3.0]).value is None
    for call in (
        lambda: measures.score("mae", [1.0], [math.nan]),
        lambda: measures.score("bleu", ["a"], ["a"]),
        lambda: measures.score("brier", [[0.5, 0.6]], ["a"], labels=["a", "b"]),
        lambda: measures.score("brier", [[0.5, 0.5]], ["z"], labels=["a", "b"]),
        lambda: measures.score("mae", [math.inf], [1.0]),
        lambda: measures.score("mae", [1.0], [1.0, 2.0]),
    ):
        with pytest.raises(Refusal) as refused:
            call()
        assert refused.value.code == "scores_invalid"


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(24)), st.sampled_from(sorted(measures.MEASURES)))
def test_the_order_of_examples_changes_no_value(order, name):
    table, targets, labels, numbers, others = drawn(24)
    kinds = {
        "label": (labels, targets), "text": (labels, targets), "probabilities": (table.tolist(), targets),
        "number": (numbers.tolist(), others.tolist()), "nats": (np.abs(numbers).tolist(), (1 + np.abs(others)).tolist()),
    }  # fmt: skip
    predictions, right = kinds[measures.MEASURES[name].takes]
    one = measures.score(name, predictions, right, labels=LABELS)
    other = measures.score(name, [predictions[p] for p in order], [right[p] for p in order], labels=LABELS)
    assert other.value == pytest.approx(one.value, abs=1e-12)
    assert other.se == pytest.approx(one.se, abs=1e-9)
    low, high = measures.MEASURES[name].low, measures.MEASURES[name].high
    assert (low is None or one.value >= low) and (high is None or one.value <= high)


def test_a_single_label_has_a_value_without_a_warning():
    assert measures.score("mcc", ["a"] * 5, ["a"] * 5).value == 0.0
    assert measures.score("macro_f1", ["a"] * 5, ["a"] * 5).value == 1.0


def test_the_page_has_each_metric_with_its_direction_and_error():
    page = (Path(__file__).parents[2] / "docs/analysts.md").read_text("utf-8")
    for one in measures.MEASURES.values():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{one.name}` |")]
        better, error = ("more" if one.direction == "max" else "less"), ("by cluster" if one.mean else "jackknife")
        assert row.split(" | ")[1] == better and row.endswith(f"| {error} |")
