"""What of a generated text is the answer, and what two answers are worth: exact match, token F1, bits per byte, their null predictor."""

import dataclasses
import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate_competitions import answers, corrections, metrics, splits, tables
from acclimate_competitions.errors import Refusal
from acclimate_competitions.tasks import Task

WRITE = Task(
    "sum", "generate", "{{ input }}", (), "exact_match", 0.0, stop=("\n",), max_tokens=8, normalize=("strip", "lower")
)
READ = Task("read", "perplexity", "{{ input }}", (), "bits_per_byte", 8.0)


def found(*texts, extract="", take="first", normalize=()):
    return answers.answers(texts, extract=extract, take=take, normalize=normalize)


def test_the_first_or_the_last_find_is_the_answer():
    assert found("x 12 and 345", extract=r"([0-9]+)") == ["12"]
    assert found("x 12 and 345", extract=r"([0-9]+)", take="last") == ["345"]
    assert found("#### 1,234", "none", None, extract=r"#### (-?[0-9.,]+)") == ["1,234", None, None]
    # A find of nothing is a find; marks of our own in a text are none.
    assert found("a=;", extract=r"=([0-9]*)") == [""]
    assert found("\ue000x\ue001 y7", extract=r"([0-9])") == ["7"]
    assert found("é 日本 7 🙂", extract="(日.)") == ["日本"]


def test_normalizations_are_applied_in_an_order_of_their_own():
    assert found("  The  Cat, sat. ", normalize=("strip", "blanks", "punctuation", "lower")) == ["the cat sat"]
    assert found("e\u0301", normalize=("nfc",)) == ["\u00e9"] and found("e\u0301") == ["e\u0301"]
    assert found(" A ", normalize=("strip",)) == ["A"]


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("([0-9]+", "is no regular expression of RE2: missing )"),
        ("[0-9]+", "has no group"),
        ("(a)(b)", "has several groups"),
        ("(a)(?:b)", ""),
        (r"(?=a)(b)", "is no regular expression of RE2"),
        (r"(a)\1", "is no regular expression of RE2"),
        ("(" + "a" * 500 + ")", "has 502 characters: must be at most 500"),
    ],
)
def test_what_is_no_expression_to_extract_by_is_named(pattern, says):
    problem = answers.pattern_problem(pattern)
    assert problem.startswith(says) and bool(problem) == bool(says)


def test_an_expression_that_would_take_others_forever_takes_no_time():
    # With a backtracking engine neither would end before the timeout that every test has.
    assert found("a" * 60_000 + "b", extract="^((?:a+)+)$") == [None]
    assert found("a" * 10**6, extract="(?:a|a)*(?:a|a)*(?:a|a)*(c)") == [None]


def test_a_text_that_is_the_target_scores_one_and_one_without_an_answer_zero():
    task = dataclasses.replace(WRITE, extract=r"#### ([0-9]+)")
    scored = metrics.score_generate(
        task, targets=["2 and 2 is 4\t#### 4"] * 4, texts=["2 and 2 is 4\t#### 4", "#### 4 #### 5", "4", None]
    )
    assert scored == [(1.0, None), (1.0, None), (0.0, None), (None, metrics.NO_TEXT)]
    assert metrics.NO_TEXT in metrics.OWN_FAULTS
    with pytest.raises(Refusal, match="finds nothing in the target"):
        metrics.score_generate(task, targets=["4"], texts=["#### 4"])


@given(st.text(max_size=40), st.sampled_from(["exact_match", "token_f1"]))
def test_the_target_itself_is_always_right(text, metric):
    task = dataclasses.replace(WRITE, metric=metric)
    assert metrics.score_generate(task, targets=[text], texts=[text]) == [(1.0, None)]


def test_token_f1_is_squads():
    task = dataclasses.replace(WRITE, metric="token_f1", normalize=())
    scored = metrics.score_generate(task, targets=["The cat sat."] * 4, texts=["a cat", "dog", "", "cat sat sat"])
    assert [score for score, _ in scored] == pytest.approx([2 / 3, 0.0, 0.0, 0.8])


def test_bits_per_byte_count_the_text_s_own_bytes():
    scored = metrics.score_perplexity(
        READ, texts=["ab", "日", "ab", "ab", "ab"], loglikelihoods=[[-math.log(4)], [-3.0], None, [math.nan], [0.5]]
    )
    assert scored[0] == (pytest.approx(1.0), None) and scored[1] == (pytest.approx(3 / math.log(2) / 3), None)
    assert [reason for _, reason in scored[2:]] == [
        metrics.NO_LOGLIKELIHOODS,
        metrics.NOT_FINITE,
        metrics.ABOVE_CERTAIN,
    ]
    assert metrics.score_perplexity(READ, texts=["ab"], loglikelihoods=[[-0.0]]) == [(0.0, None)]
    with pytest.raises(Refusal, match="the text is empty"):
        metrics.score_perplexity(READ, texts=[""], loglikelihoods=[[-1.0]])


def split(**columns):
    return pa.table({"example": [str(n) for n in range(len(next(iter(columns.values()))))], **columns})


def test_majority_gives_the_most_frequent_target_or_the_frequencies_of_bytes():
    preparation = split(input=["a"] * 5, target=["10", " 9", "9", "10 ", "8"])
    table = metrics.majority_scores(
        preparation, split(input=["b"] * 3, target=["10", "9", "8"]), WRITE, seeds=[11], cluster=None
    )
    # Ten and nine are as frequent, "10" comes first.
    assert table["score"].to_pylist() == [1.0, 0.0, 0.0] * 2
    table = metrics.majority_scores(split(input=["aab"]), split(input=["ab", "c"]), READ, seeds=[], cluster=None)
    expected = [-(math.log2(3 / 259) + math.log2(2 / 259)) / 2, -math.log2(1 / 259)]
    assert table["score"].to_pylist() == pytest.approx(expected)


def test_scores_of_predictions_are_by_text_and_by_whole_text():
    rows = [
        {"entrant": "e", "protocol": "direct", "task": "sum", "seed": None, "example": n, "text": text}
        for n, text in (("0", "4"), ("1", None))
    ]
    predictions = pa.Table.from_pylist(rows, schema=tables.PREDICTIONS)
    holdout = split(input=["2 + 2", "3 + 3", "1 + 1"], target=["4", "6", "2"])
    scored = metrics.score_predictions(predictions, holdout, WRITE, cluster=None)
    assert scored["score"].to_pylist() == [1.0, None, None]
    assert scored["reason"].to_pylist() == [None, metrics.NO_TEXT, metrics.NO_PREDICTION]
    rows = [row | {"task": "read", "loglikelihoods": [-8 * math.log(2)], "text": None} for row in rows]
    predictions = pa.Table.from_pylist(rows, schema=tables.PREDICTIONS)
    scored = metrics.score_predictions(predictions, holdout.drop_columns(["target"]), READ, cluster=None)
    assert scored["score"].to_pylist() == [pytest.approx(8 / 5), pytest.approx(8 / 5), None]


def test_wrong_targets_are_named():
    task = dataclasses.replace(WRITE, extract="([0-9]+)")
    assert splits.wrong_truths(task, ["4", " ", "4\n5", "x", "6"]) == {
        "blank targets": [1],
        "targets that hold a stop string, behind which nothing counts": [2],
        "targets without an answer, by the task's extract and normalize": [3],
    }
    assert splits.wrong_truths(READ, ["a", ""]) == {"blank inputs": [1]}
    assert splits.columns_needed(READ, cluster="c") == ["example", "input", "c"]


def test_corrections_know_the_kinds_of_tasks():
    class Competition:
        tasks = (dataclasses.replace(WRITE, extract="([0-9]+)"), READ)

        def task(self, name):
            return next(task for task in self.tasks if task.name == name)

    holdout = {"sum": split(input=["1 + 1", "2 + 2"], target=["2", "5"]), "read": split(input=["ab", "cd"])}
    right = {
        "v": 1,
        "metrics": {"sum": "token_f1"},
        "targets": {"sum": {"1": "4"}},
        "void": {"read": ["0"]},
        "nonce": "eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHg=",
    }
    correction = corrections.parse(right)
    corrections.check(correction, Competition(), holdout)
    assert correction.holdout("sum", holdout["sum"])["target"].to_pylist() == ["2", "4"]
    assert correction.holdout("read", holdout["read"])["input"].to_pylist() == ["cd"]
    wrong = right | {"targets": {"sum": {"1": "four"}, "read": {"1": "x"}}, "metrics": {"read": "accuracy"}}
    with pytest.raises(Refusal) as caught:
        corrections.check(corrections.parse(wrong), Competition(), holdout)
    assert list(caught.value.problems) == [
        "sum: 'four' for '1': targets without an answer, by the task's extract and normalize",
        "read: '1' is a text without a target",
        "read: accuracy does not score tasks of kind perplexity",
    ]
