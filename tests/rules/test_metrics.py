import dataclasses
import decimal
import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate_competitions import measures, metrics, probabilities, tables
from acclimate_competitions.definition import Task
from acclimate_competitions.errors import Refusal

TASK = Task("colour", "choice", "{{ input }}", ("red", "green", "blue"), "accuracy", 1 / 3)
NORM = Task("colour", "choice", "{{ input }}", ("red", "green", "blue"), "acc_norm", 1 / 3)
NLL = Task("colour", "choice", "{{ input }}", ("red", "green", "blue"), "nll", 1.1)


def holdout(targets, clusters=None):
    rows = {"example": [f"x{i}" for i in range(len(targets))], "target": list(targets)}
    return pa.table({**rows, **({"image": clusters} if clusters else {})})


def predictions(answers, *, entrant="ann", protocol="direct", task="colour", seed=None):
    return pa.Table.from_pylist(
        [
            {
                "entrant": entrant,
                "protocol": protocol,
                "task": task,
                "seed": seed,
                "example": example,
                "loglikelihoods": v,
            }
            for example, v in answers
        ],
        schema=tables.PREDICTIONS,
    )


def score(values, target="green", task=TASK):
    return metrics.score_choice(task, targets=[target], loglikelihoods=[values])[0]


def test_the_largest_loglikelihood_wins():
    assert score([-2.0, -1.0, -3.0]) == (1.0, None)
    assert score([-1.0, -2.0, -3.0]) == (0.0, None)


def test_equal_loglikelihoods_go_to_the_first_choice():
    assert score([-1.0, -1.0, -1.0], "red") == (1.0, None)
    assert score([-2.0, -1.0, -1.0], "blue") == (0.0, None)


def test_acc_norm_divides_by_the_choices_length_in_characters():
    # -2/3, -3/5 and -2.6/4: the largest is green's; undivided it would be red's.
    assert score([-2.0, -3.0, -2.6], task=NORM) == (1.0, None)
    assert score([-2.0, -3.0, -2.6]) == (0.0, None)
    # Characters, not bytes or tokens: -1/2 against -1.2/3, which is the largest though its word has fewer bytes.
    letters = Task("t", "choice", "{{ input }}", ("日本", "abc"), "acc_norm", 0.5)
    assert metrics.score_choice(letters, targets=["abc"], loglikelihoods=[[-1.0, -1.2]]) == [(1.0, None)]
    assert score([-3.0, -5.0, -4.0], "red", task=NORM) == (1.0, None)


def test_the_majority_answers_the_same_whatever_the_length():
    preparation = pa.table({"target": ["red", "red", "green"]})
    for task in (TASK, NORM):
        table = metrics.majority_scores(preparation, holdout(["red", "green"]), task, seeds=[], cluster=None)
        assert table["score"].to_pylist() == [1.0, 0.0]
        assert set(table["metric"].to_pylist()) == {task.metric}


def test_nll_is_the_negative_loglikelihood_of_the_target():
    assert score([-2.0, -0.25, -3.0], task=NLL) == (0.25, None)


LOSSES = {name: dataclasses.replace(TASK, metric=name) for name in ("log_loss", "brier")}


@pytest.mark.parametrize("name", LOSSES)
@given(values=st.lists(st.floats(-60, 0) | st.sampled_from([0.0, -1.0, -1e300]), min_size=3, max_size=3))
def test_a_loss_is_that_of_the_softmax_to_ten_decimals_and_within_its_bounds(name, values):
    (found, reason), metric = score(values, "green", task=LOSSES[name]), metrics.METRICS[name]
    expected = measures.of_choice(name, [values], ["green"], choices=TASK.choices).value
    assert reason is None and found == pytest.approx(expected, abs=1.01e-10) and found == round(found, 10)
    assert metric.low <= found <= metric.high and math.copysign(1, found) == 1


@pytest.mark.parametrize("name", LOSSES)
@given(values=st.lists(st.floats(-40, 0), min_size=2, max_size=5))
def test_a_loss_is_what_decimal_arithmetic_gives(name, values):
    # As if every one of them were near a tie of its rounding.
    usual = getattr(probabilities, name)(values, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probabilities, "_ERROR", 1.0)
        assert getattr(probabilities, name)(values, 0) == usual


def test_ties_of_the_rounding_are_decided_by_the_exact_value(monkeypatch):
    exactly = []
    quantize = decimal.localcontext
    monkeypatch.setattr(probabilities.decimal, "localcontext", lambda *a: (exactly.append(1), quantize(*a))[1])
    # 1 − 2p + 2p² of two choices that differ by little: 0.5 and some.
    assert probabilities.brier([0.0, 0.0], 0) == 0.5 and not exactly
    found = [probabilities.log_loss([0.0, -place / 1000], 0) for place in range(20_000)]
    assert found == sorted(found, reverse=True)
    assert len(exactly) < 400


@pytest.mark.parametrize("metric", ["accuracy", "acc_norm", "nll"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_a_value_that_is_no_finite_number_leaves_the_example_unscored(bad, place, metric):
    values = [-3.0, -1.0, -2.0]
    values[place] = bad
    assert score(values, task=TASK if metric == "accuracy" else NLL) == (None, metrics.NOT_FINITE)


def test_missing_or_short_loglikelihoods_leave_the_example_unscored():
    assert score(None) == (None, metrics.NO_LOGLIKELIHOODS)
    assert score([]) == (None, metrics.WRONG_LENGTH)
    assert score([-1.0, -2.0]) == (None, metrics.WRONG_LENGTH)
    assert score([-1.0, -2.0, -3.0, -4.0]) == (None, metrics.WRONG_LENGTH)


def test_a_target_that_is_no_choice_is_refused():
    with pytest.raises(Refusal, match="'pink'") as caught:
        score([-1.0, -2.0, -3.0], "pink")
    assert caught.value.code == "scores_invalid"


@given(st.lists(st.none() | st.lists(st.floats() | st.none(), max_size=4), max_size=8))
def test_a_score_is_a_number_or_has_a_reason(answers):
    scored = metrics.score_choice(TASK, targets=["green"] * len(answers), loglikelihoods=answers)
    assert len(scored) == len(answers)
    for value, reason in scored:
        assert (value in (0.0, 1.0)) if reason is None else value is None


def test_every_holdout_row_yields_a_row_of_the_score_table():
    table = metrics.score_predictions(
        predictions([("x2", [-1.0, -2.0, -3.0]), ("x0", None)]), holdout(["red", "green", "red"]), TASK, cluster=None
    )
    assert table.schema.equals(tables.SCORES)
    assert table.select(["example", "cluster", "score", "reason"]).to_pylist() == [
        {"example": "x0", "cluster": "x0", "score": None, "reason": metrics.NO_LOGLIKELIHOODS},
        {"example": "x1", "cluster": "x1", "score": None, "reason": metrics.NO_PREDICTION},
        {"example": "x2", "cluster": "x2", "score": 1.0, "reason": None},
    ]


def test_clusters_come_from_the_named_column():
    table = metrics.score_predictions(
        predictions([("x0", [-1.0, -2.0, -3.0])]), holdout(["red"], ["photo-7"]), TASK, cluster="image"
    )
    assert table.column("cluster").to_pylist() == ["photo-7"]


def test_several_evaluations_are_scored_in_one_call():
    parts = [
        predictions([("x0", [-1.0, -2.0, -3.0])], protocol="prepared", seed=seed, entrant=entrant)
        for entrant in ("ann", "bob")
        for seed in (11, 12)
    ]
    table = metrics.score_predictions(pa.concat_tables(parts), holdout(["red"]), TASK, cluster=None)
    keys = list(zip(table.column("entrant").to_pylist(), table.column("seed").to_pylist(), strict=True))
    assert keys == [("ann", 11), ("ann", 12), ("bob", 11), ("bob", 12)]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (predictions([("x0", None), ("x9", None)]), "'x9' is not in the holdout"),
        (predictions([("x0", None), ("x0", None)]), "'x0' has two predictions"),
        (predictions([("x0", None)], task="shape"), "expected task 'colour'"),
        (predictions([("x0", None)], protocol="prepared"), "has a seed"),
        (predictions([("x0", None)], seed=11), "has no seed"),
        (predictions([("x0", None)], protocol="lucky"), "unknown protocol 'lucky'"),
        (predictions([]), "empty"),
    ],
)
def test_wrong_predictions_are_refused(table, said):
    with pytest.raises(Refusal, match=said) as caught:
        metrics.score_predictions(table, holdout(["red"]), TASK, cluster=None)
    assert caught.value.code == "scores_invalid"


def test_a_holdout_without_its_columns_or_with_doubled_examples_is_refused():
    given_table = predictions([("x0", None)])
    with pytest.raises(Refusal, match="no column 'image'"):
        metrics.score_predictions(given_table, holdout(["red"]), TASK, cluster="image")
    doubled = pa.table({"example": ["x0", "x0"], "target": ["red", "red"]})
    with pytest.raises(Refusal, match="'x0' stands twice"):
        metrics.score_predictions(given_table, doubled, TASK, cluster=None)


def test_a_failed_evaluation_leaves_every_example_unscored():
    table = metrics.unscored(
        holdout(["red", "blue"]), TASK, key=("ann", "prepared", 11), reason="out of memory", cluster=None
    )
    assert table.column("score").null_count == 2
    assert table.column("reason").to_pylist() == ["out of memory"] * 2


def test_the_majority_is_the_most_frequent_target_of_the_preparation_split():
    preparation = pa.table({"target": ["blue", "green", "green", "blue"]})
    table = metrics.majority_scores(preparation, holdout(["green", "blue"]), TASK, seeds=[11, 12], cluster=None)
    assert table.schema.equals(tables.SCORES)
    assert table.column("protocol").to_pylist() == ["direct"] * 2 + ["prepared"] * 4
    assert table.column("seed").to_pylist() == [None, None, 11, 11, 12, 12]
    assert table.column("score").to_pylist() == [1.0, 0.0] * 3  # a tie: green is the first choice of the two


def test_the_majority_predicts_frequencies_for_nll():
    preparation = pa.table({"target": ["green", "green"]})
    table = metrics.majority_scores(preparation, holdout(["green", "red"]), NLL, seeds=[], cluster=None)
    assert table.column("score").to_pylist() == pytest.approx([-math.log(3 / 5), -math.log(1 / 5)])


def test_scores_above_chance():
    accuracy = metrics.METRICS["accuracy"]
    assert accuracy.above_chance(0.1, chance=0.1) == 0.0
    assert accuracy.above_chance(1.0, chance=0.1) == 1.0
    assert accuracy.above_chance(1.0, chance=1.0) is None
    assert metrics.METRICS["nll"].above_chance(1.0, chance=1.0) is None


def test_an_unknown_metric_is_refused():
    task = Task("colour", "choice", "", ("a", "b"), "vibes", 0.5)
    with pytest.raises(Refusal, match="'vibes'") as caught:
        metrics.metric_of(task)
    assert caught.value.code == "definition_invalid"
    with pytest.raises(Refusal, match="does not score"):
        metrics.metric_of(Task("colour", "generate", "", (), "accuracy", 0.0))
