"""Corrections of a round's results: what they must be, what they make of a holdout, and whom two rankings tell differently."""

import base64

import pyarrow as pa
import pytest
import tiny

from acclimate_competitions import corrections, definition
from acclimate_competitions.errors import Refusal

NONCE = base64.b64encode(b"n" * 32).decode()
COMPETITION = definition.parse(tiny.DEFINITION.encode())
ROWS = pa.table(
    {"example": ["a", "b", "c"], "input": ["m1", "m2", "m3"], "target": ["red", "blue", "green"], "cluster": ["x"] * 3}
)
HOLDOUT = {"tint": ROWS, "size": ROWS.set_column(2, "target", pa.array(["small", "large", "small"]))}


def document(**given: object) -> dict:
    return {"v": 1, "metrics": {}, "targets": {}, "void": {}, "nonce": NONCE, **given}


def test_a_correction_is_what_was_parsed_and_says_how_rows_are_judged() -> None:
    given = document(targets={"tint": {"a": "blue"}}, void={"tint": ["b"]}, metrics={"size": "nll"})
    found = corrections.parse(given)
    assert found.document() == given and found.digest == corrections.parse(dict(given)).digest
    corrections.check(found, COMPETITION, HOLDOUT)
    assert found.holdout("tint", ROWS).select(["example", "target"]).to_pylist() == [
        {"example": "a", "target": "blue"}, {"example": "c", "target": "green"},
    ]  # fmt: skip
    assert found.holdout("size", HOLDOUT["size"]) == HOLDOUT["size"]
    judged = found.competition(COMPETITION)
    assert {task.name: task.metric for task in judged.tasks} == {"tint": "accuracy", "size": "nll"}
    assert (judged.digest, judged.ranking) == (COMPETITION.digest, COMPETITION.ranking)
    assert corrections.parse(document()).competition(COMPETITION) is COMPETITION


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        {},
        document(v=2),
        document(v=True),
        document(more=1),
        document(targets=[]),
        document(targets={"tint": ["a"]}),
        document(targets={"tint": {"a": 1}}),
        document(void={"tint": {"a": 1}}),
        document(void={"tint": [1]}),
        document(metrics={"tint": "guess"}),
        document(metrics="nll"),
        document(nonce=None),
        document(nonce=""),
        document(nonce="n"),
        document(nonce="n" * 44),
        document(nonce=base64.b64encode(b"n" * 31).decode()),
        document(nonce=base64.b64encode(b"n" * 33).decode()),
        document(nonce=NONCE[:-2] + "5="),
        document(nonce="\u00e9" * 44),
        document(nonce="\ud800" * 44),
    ],
)
def test_what_is_no_correction_is_refused(given: object) -> None:
    with pytest.raises(Refusal) as caught:
        corrections.parse(given)
    assert caught.value.code == "correction_invalid"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"targets": {"hue": {"a": "red"}}}, "no task 'hue'"),
        ({"targets": {"tint": {"z": "red"}}}, "no example 'z'; ids there are such as 'a'"),
        ({"targets": {"tint": {"a": "small"}}}, "is no choice"),
        ({"targets": {"tint": {"a": "red"}}}, "is the target of 'a' already"),
        ({"targets": {"tint": {"a": "blue"}}, "void": {"tint": ["a"]}}, "is void and has a target"),
        ({"void": {"tint": ["z"]}}, "no example 'z'; ids there are such as 'a'"),
        ({"void": {"tint": ["a", "a"]}}, "void twice"),
        ({"void": {"tint": ["a", "b", "c"]}}, "no example is left"),
        ({"metrics": {"tint": "accuracy"}}, "is accuracy already"),
        ({"metrics": {"hue": "nll"}}, "no task 'hue'"),
        ({}, "corrects nothing"),
        ({"targets": {"tint": {}}}, "corrects nothing"),
    ],
)
def test_a_correction_must_fit_the_holdout(given: dict, why: str) -> None:
    with pytest.raises(Refusal) as caught:
        corrections.check(corrections.parse(document(**given)), COMPETITION, HOLDOUT)
    assert any(why in problem for problem in caught.value.problems)


def test_only_changed_scores_and_ranks_are_told() -> None:
    def ranking(**scores: tuple[int | None, float]) -> dict:
        rows = [{"entrant": n, "rank": r, "score": s, "direct_score": 0.5} for n, (r, s) in scores.items()]
        return {"ranking": [r for r in rows if r["rank"]], "baselines": [r for r in rows if not r["rank"]]}

    before = ranking(ada=(1, 0.9), bea=(2, 0.8), cleo=(3, 0.1), majority=(None, 0.3))
    after = ranking(bea=(1, 0.95), ada=(2, 0.9), cleo=(3, 0.1), majority=(None, 0.4))
    found = corrections.differences(before, after)
    assert [(row["entrant"], row["rank_before"], row["rank"], row["score_before"], row["score"]) for row in found] == [
        ("bea", 2, 1, 0.8, 0.95), ("ada", 1, 2, 0.9, 0.9), ("majority", None, None, 0.3, 0.4),
    ]  # fmt: skip
    assert corrections.differences(before, before) == []
