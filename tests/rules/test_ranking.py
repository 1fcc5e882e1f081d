import dataclasses
import math
import random
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from acclimate_competitions import digests, metrics, ranking, tables
from acclimate_competitions.definition import Interval, Policy, Task, Ties
from acclimate_competitions.errors import Refusal

DIGIT, PRIME = (Task(name, "choice", "", ("a", "b"), "accuracy", 0.5) for name in ("digit", "prime"))
POLICY = Policy(
    aggregate="mean",
    missing="worst",
    ties=Ties("shared", 0.0),
    interval=Interval("simultaneous", 0.95, 500, 1),
    cluster=None,
    baselines=("majority",),
)


def with_policy(**changes):
    return dataclasses.replace(POLICY, **changes)


def rows(entrant, scores, *, task="digit", seed=11, metric="accuracy", cluster=None):
    """Score rows of one evaluation; seed None: direct."""
    protocol = "direct" if seed is None else "prepared"
    return [
        {
            "entrant": entrant, "protocol": protocol, "task": task, "seed": seed, "metric": metric,
            "example": f"x{place}", "cluster": cluster or f"x{place}", "score": score, "reason": None,
        }
        for place, score in enumerate(scores)
    ]  # fmt: skip


def table(*parts):
    return pa.Table.from_pylist([row for part in parts for row in part], schema=tables.SCORES)


def both(entrant, scores, **more):
    return rows(entrant, scores, **more) + rows(entrant, scores, seed=None, **more)


def rank(*parts, entrants, tasks=(DIGIT,), policy=POLICY, **more):
    return ranking.rank(table(*parts), tasks=tasks, policy=policy, entrants=entrants, **more)


def by_entrant(result):
    return {row.entrant: row for row in result.rows}


def random_scores(entrants, *, n=30, seeds=(11, 12, 13), tasks=("digit", "prime"), seed=0, spread=0.3):
    rng = np.random.default_rng(seed)
    parts = []
    for place, entrant in enumerate(entrants):
        for task in tasks:
            for run in (None, *seeds):
                hit = rng.random(n) < 0.5 + spread * (place / max(1, len(entrants)))
                parts.append(rows(entrant, hit.astype(float).tolist(), task=task, seed=run))
    return parts


# ---- scores and ranks ----------------------------------------------------------------------------------------------


def test_the_score_is_the_mean_over_tasks_of_the_mean_over_seeds_of_the_mean_over_examples():
    result = rank(
        rows("ann", [1, 1, 0, 0]), rows("ann", [1, 1, 1, 1], seed=12),
        rows("ann", [0, 1], task="prime"), rows("ann", [0, 0], task="prime", seed=12),
        entrants=["ann"], tasks=(DIGIT, PRIME),
    )  # fmt: skip
    row = result.rows[0]
    assert row.score == (0.75 + 0.25) / 2
    assert (row.n, row.seeds) == (6, 2)
    assert [result.tasks[name][0].score for name in ("digit", "prime")] == [0.75, 0.25]


def test_who_declared_a_conflict_stands_beside_the_ranking():
    parts = [both("ann", [1, 1, 1, 1]), both("bob", [1, 1, 0, 0]), both("cyd", [1, 0, 0, 0])]
    found = rank(*parts, entrants=["ann", "bob", "cyd"], unranked=frozenset({"ann", "nobody", "majority"}))
    alone = rank(*parts[1:], entrants=["bob", "cyd"])
    assert found.rows == alone.rows and found.tasks == alone.tasks
    assert [(row.entrant, row.score, row.direct_score) for row in found.baselines] == [
        ("ann", 1.0, 1.0), ("majority", None, None),
    ]  # fmt: skip
    document = found.document()
    assert [row["entrant"] for row in document["ranking"]] == ["bob", "cyd"]
    assert set(document["baselines"][0]) == {"entrant", "score", "se", "n", "seeds", "direct_score"}


def test_equal_scores_share_a_rank():
    result = rank(
        both("ann", [1, 1, 1]), both("bob", [1, 1, 0]), both("cyd", [0, 1, 1]), both("dan", [0, 0, 1]),
        entrants=["ann", "bob", "cyd", "dan"],
    )  # fmt: skip
    assert [(row.entrant, row.rank) for row in result.rows] == [("ann", 1), ("bob", 2), ("cyd", 2), ("dan", 4)]
    assert [row.direct_rank for row in result.rows] == [1, 2, 2, 4]


def test_ties_are_decided_on_exact_numbers():
    # 1/3 + 2/3 and 1/2 + 1/2 are equal, however floats would round their parts.
    thirds = both("ann", [1, 0, 0] * 7) + both("ann", [1, 1, 0] * 7, task="prime")
    mixed = both("bob", [1, 1, 0] * 7) + both("bob", [1, 0, 0] * 7, task="prime")
    tenths = both("cyd", [0.1] * 7 + [0.9] * 7 + [0.5] * 7) + both("cyd", [0.5] * 21, task="prime")
    result = rank(thirds, mixed, tenths, entrants=["ann", "bob", "cyd"], tasks=(DIGIT, PRIME))
    assert {row.rank for row in result.rows} == {1}
    assert {row.score for row in result.rows} == {0.5}


def test_the_tolerance_is_the_decimal_number_it_prints_as():
    scores = [Fraction(80, 100), Fraction(77, 100), Fraction(74, 100), Fraction(70, 100), None]
    assert ranking.shared_ranks(scores, tolerance=0.03) == [1, 1, 3, 4, 5]
    assert ranking.shared_ranks(scores, tolerance=0.0) == [1, 2, 3, 4, 5]
    assert ranking.shared_ranks(scores, tolerance=1.0) == [1, 1, 1, 1, 5]


@given(st.lists(st.none() | st.integers(-3, 3), max_size=12))
def test_ranks_are_those_of_scipy(values):
    scores = [None if value is None else Fraction(value, 7) for value in values]
    expected = stats.rankdata([math.inf if value is None else -value for value in values], method="min")
    assert ranking.shared_ranks(scores, tolerance=0.0) == expected.astype(int).tolist()


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5),
    st.integers(0, 4),
    st.data(),
    st.sampled_from(["worst", "exclude", "fail"]),
)
def test_any_scores_give_a_total_order_in_which_unscored_never_beat_scored(count, n, data, missing):
    entrants = [f"e{place}" for place in range(count)]
    values = st.sampled_from([None, math.nan, 0.0, -0.0, 0.5, 1.0])
    parts = []
    for entrant in entrants:
        for seed in (None, 11, 12):
            if data.draw(st.booleans()):
                parts.append(rows(entrant, data.draw(st.lists(values, min_size=n, max_size=n)), seed=seed))
    result = rank(*parts, entrants=entrants, policy=with_policy(missing=missing, baselines=()))
    assert sorted(row.entrant for row in result.rows) == entrants
    known = [row for row in result.rows if row.score is not None]
    unknown = [row for row in result.rows if row.score is None]
    assert all(row.rank == len(known) + 1 and row.se is None for row in unknown)
    expected = stats.rankdata([-row.score for row in known], method="min").astype(int).tolist() if known else []
    assert [row.rank for row in known] == expected
    for row in result.rows:
        assert 1 <= row.rank_low <= row.rank <= row.rank_high <= count
        assert row.se is None or (row.se >= 0 and math.isfinite(row.se))
    assert digests.parse_canonical(digests.canonical(result.document())) == result.document()


def test_rows_entrants_and_chunks_in_any_order_give_the_same_bytes():
    entrants = ["zoe", "ann", "ömer", "bob", "東京"]
    scores = table(*random_scores([*entrants, "majority"]))
    expected = ranking.rank(scores, tasks=(DIGIT, PRIME), policy=POLICY, entrants=entrants)
    shuffler = random.Random(5)
    for _ in range(5):
        order = list(range(scores.num_rows))
        shuffler.shuffle(order)
        shuffled = scores.take(order)
        cut = shuffler.randrange(scores.num_rows)
        chunked = pa.concat_tables([shuffled.slice(cut), shuffled.slice(0, cut), shuffled.slice(0, 0)])
        other = ranking.rank(
            chunked, tasks=(DIGIT, PRIME), policy=POLICY, entrants=shuffler.sample(entrants, len(entrants))
        )
        assert other.digest == expected.digest
    encoded = scores.set_column(0, "entrant", scores.column("entrant").dictionary_encode())
    assert ranking.rank(encoded, tasks=(DIGIT, PRIME), policy=POLICY, entrants=entrants).digest == expected.digest


def test_the_digest_of_a_fixed_table_is_the_same_on_every_machine():
    scores = table(*random_scores(["ann", "bob", "cyd", "majority"], seed=3))
    result = ranking.rank(scores, tasks=(DIGIT, PRIME), policy=POLICY, entrants=["ann", "bob", "cyd"])
    assert result.digest == "sha256:55ee53323121ac0d3ee94948232b6adb958c8b63305f85f1c7ee509535dfa0fd"


# ---- missing scores ------------------------------------------------------------------------------------------------


def missing_one(policy, value=None):
    return rank(
        both("ann", [1, 1, 1, value]), both("bob", [1, 1, 1, 0]), both("cyd", [1, 1, 1, 1]),
        entrants=["ann", "bob", "cyd"], policy=policy,
    )  # fmt: skip


@pytest.mark.parametrize("value", [None, math.nan])
def test_worst_counts_an_unscored_example_as_the_worst_value(value):
    row = by_entrant(missing_one(with_policy(missing="worst"), value))["ann"]
    assert (row.score, row.rank, row.n) == (0.75, 2, 3)


def test_exclude_leaves_an_unscored_example_out_and_shows_it():
    row = by_entrant(missing_one(with_policy(missing="exclude")))["ann"]
    assert (row.score, row.rank, row.n) == (1.0, 1, 3)


@pytest.mark.parametrize(
    ("reason", "score", "place"),
    [
        (metrics.NOT_FINITE, 0.75, 2),
        (metrics.NO_LOGLIKELIHOODS, 0.75, 2),
        (metrics.WRONG_LENGTH, 0.75, 2),
        (metrics.NO_PREDICTION, 1.0, 1),
        (None, 1.0, 1),
    ],
)
def test_exclude_does_not_let_a_model_abstain(reason, score, place):
    ann = [{**row, "reason": reason if row["score"] is None else None} for row in both("ann", [1, 1, 1, None])]
    result = rank(
        ann, both("bob", [1, 1, 1, 0]), both("cyd", [1, 1, 1, 1]),
        entrants=["ann", "bob", "cyd"], policy=with_policy(missing="exclude"),
    )  # fmt: skip
    row = by_entrant(result)["ann"]
    assert (row.score, row.direct_score, row.rank, row.n) == (score, score, place, 3)


def test_a_model_that_abstains_has_no_score_where_the_metric_has_no_worst_value():
    task = dataclasses.replace(DIGIT, metric="nll")
    for reason, score in ((metrics.NOT_FINITE, None), (metrics.NO_PREDICTION, 0.5)):
        ann = [{**row, "reason": reason} for row in both("ann", [0.5, None], metric="nll")]
        policy = with_policy(missing="exclude")
        result = rank(ann, both("bob", [1.0, 1.0], metric="nll"), entrants=["ann", "bob"], tasks=(task,), policy=policy)
        assert by_entrant(result)["ann"].score == score


def test_an_absent_row_is_the_same_as_a_null_score():
    null = rank(both("ann", [1, 1, None]), both("bob", [1, 0, 0]), entrants=["ann", "bob"])
    absent = rank(both("ann", [1, 1]), both("bob", [1, 0, 0]), entrants=["ann", "bob"])
    assert null.digest == absent.digest


def test_a_missing_seed_counts_as_the_worst_in_all_its_examples():
    result = rank(rows("ann", [1, 1]), rows("bob", [1, 0]), rows("bob", [1, 0], seed=12), entrants=["ann", "bob"])
    row = by_entrant(result)["ann"]
    assert (row.score, row.n, row.seeds) == (0.5, 0, 1)


@pytest.mark.parametrize("reason", [None, *sorted(metrics.OWN_FAULTS)])
def test_fail_leaves_whoever_lacks_a_score_without_one_and_touches_nobody_else(reason):
    whole = [both("bob", [1, 1, 0]), both("cyd", [1, 0, 0])]
    one = both("ann", [1, 1, 1])
    lacking = [{**row, "score": None, "reason": reason} if row["example"] == one[0]["example"] else row for row in one]
    found = rank(lacking, *whole, entrants=["ann", "bob", "cyd"], policy=with_policy(missing="fail"))
    assert [(row.entrant, row.rank, row.score) for row in found.rows] == [
        ("bob", 1, 2 / 3), ("cyd", 2, 1 / 3), ("ann", 3, None),
    ]  # fmt: skip
    assert by_entrant(found)["ann"].direct_rank == 3
    nothing_missing = rank(one, *whole, entrants=["ann", "bob", "cyd"], policy=with_policy(missing="fail"))
    by_worst = rank(one, *whole, entrants=["ann", "bob", "cyd"])
    assert nothing_missing.rows == by_worst.rows


@pytest.mark.parametrize("missing", ["worst", "exclude", "fail"])
def test_an_entrant_whose_every_preparation_failed_ranks_last_without_a_score(missing):
    result = rank(
        rows("ann", [1, 1], seed=None), both("bob", [0, 0]), both("cyd", [1, 0]),
        entrants=["ann", "bob", "cyd", "dan"], policy=with_policy(missing=missing),
    )  # fmt: skip
    found = by_entrant(result)
    assert [(row.entrant, row.rank) for row in result.rows] == [("cyd", 1), ("bob", 2), ("ann", 3), ("dan", 3)]
    assert (found["ann"].score, found["ann"].se, found["ann"].n, found["ann"].seeds) == (None, None, 0, 0)
    assert (found["ann"].direct_rank, found["ann"].direct_score) == (1, 1.0)
    assert (found["ann"].rank_low, found["ann"].rank_high) == (3, 4)
    # Whoever has a score can't rank behind those who have none.
    assert [(found[name].rank_low, found[name].rank_high) for name in ("cyd", "bob")] == [(1, 2), (1, 2)]
    assert (found["dan"].direct_rank, found["dan"].direct_score) == (4, None)
    assert found["ann"].tier > found["bob"].tier >= found["cyd"].tier


def test_a_task_without_scores_costs_the_worst_there_only():
    result = rank(
        both("ann", [1, 1]), both("bob", [1, 0]), both("bob", [1, 0], task="prime"),
        entrants=["ann", "bob"], tasks=(DIGIT, PRIME),
    )  # fmt: skip
    assert by_entrant(result)["ann"].score == 0.5
    assert [(row.entrant, row.score, row.rank) for row in result.tasks["prime"]] == [("bob", 0.5, 1), ("ann", None, 2)]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_entrants(count):
    entrants = ["ann", "bob"][:count]
    result = rank(*(both(name, [1, 0, 1]) for name in entrants), entrants=entrants)
    assert [(row.rank, row.rank_low, row.rank_high) for row in result.rows] == [(1, 1, count)] * count
    assert len(result.text().splitlines()) == 2 + count  # head and the baseline, too
    nobody = rank(entrants=entrants, policy=with_policy(baselines=()))
    assert [row.score for row in nobody.rows] == [None] * count


def test_lower_is_better_where_the_metric_says_so():
    task = dataclasses.replace(DIGIT, metric="nll")
    result = rank(
        both("ann", [2.0, 2.5], metric="nll"), both("bob", [0.5, 0.1], metric="nll"),
        both("cyd", [0.1, None], metric="nll"), entrants=["ann", "bob", "cyd"], tasks=(task,),
    )  # fmt: skip
    assert [(row.entrant, row.rank) for row in result.rows] == [("bob", 1), ("ann", 2), ("cyd", 3)]
    assert by_entrant(result)["cyd"].score is None  # nll has no worst value to count


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((rows("ann", [1]), rows("ann", [0])), "row 1 .*'ann', prepared, task 'digit', seed 11.*second row"),
        ((rows("eve", [1]),), "unknown entrant"),
        ((rows("ann", [1], task="shape"),), "unknown task"),
        ((rows("ann", [1], metric="vibes"),), "unknown metric"),
        (([{**rows("ann", [1])[0], "protocol": "lucky"}],), "unknown protocol"),
        (([{**rows("ann", [1])[0], "protocol": "direct"}],), "has no seed"),
        (([{**rows("ann", [1])[0], "seed": None}],), "has a seed"),
        ((rows("ann", [1, 1.5]),), "row 1 .*score 1.5.*outside the range of accuracy"),
        ((rows("ann", [-0.1]),), "outside the range"),
        ((rows("ann", [math.inf]),), "outside the range"),
        ((rows("ann", [-math.inf]),), "outside the range"),
        ((rows("ann", [1]), rows("bob", [1], cluster="other")), "row 1 .*cluster 'other' differs"),
    ],
)  # fmt: skip
def test_impossible_rows_are_refused_by_name(parts, said):
    with pytest.raises(Refusal, match=said) as caught:
        rank(*parts, entrants=["ann", "bob"])
    assert caught.value.code == "scores_invalid"


def test_other_columns_are_refused():
    scores = table(rows("ann", [1])).drop_columns(["reason"])
    with pytest.raises(Refusal, match="columns"):
        ranking.rank(scores, tasks=(DIGIT,), policy=POLICY, entrants=["ann"])
    text = table(rows("ann", [1])).set_column(7, "score", pa.array(["much"]))
    with pytest.raises(Refusal, match="wrong type"):
        ranking.rank(text, tasks=(DIGIT,), policy=POLICY, entrants=["ann"])


def test_metrics_of_two_scales_are_not_averaged():
    other = dataclasses.replace(PRIME, metric="nll")
    with pytest.raises(Refusal, match="one scale") as caught:
        rank(entrants=[], tasks=(DIGIT, other))
    assert caught.value.code == "definition_invalid"


def test_a_second_metric_beside_the_tasks_own_changes_nothing():
    plain = rank(both("ann", [1, 0]), entrants=["ann"])
    more = rank(both("ann", [1, 0]), both("ann", [3.5, 0.1], metric="nll"), entrants=["ann"])
    assert plain.digest == more.digest


# ---- baselines, intervals, tiers -----------------------------------------------------------------------------------


def test_baselines_stand_in_the_table_unranked():
    result = rank(
        both("ann", [1, 0, 0]), both("majority", [1, 1, 1]), entrants=["ann", "majority"],
        policy=with_policy(baselines=("untrained", "majority")),
    )  # fmt: skip
    assert [row.entrant for row in result.rows] == ["ann"]
    assert [(row.entrant, row.score, row.direct_score) for row in result.baselines] == [
        ("majority", 1.0, 1.0),
        ("untrained", None, None),
    ]
    assert set(result.document()["baselines"][0]) == {"entrant", "score", "se", "n", "seeds", "direct_score"}


def test_the_document_is_that_of_the_protocol():
    document = rank(both("ann", [1, 0, 1]), entrants=["ann"]).document()
    assert list(document) == ["policy", "ranking", "baselines", "tasks"]
    assert set(document["ranking"][0]) == {
        "entrant", "rank", "rank_low", "rank_high", "tier", "score", "se", "n", "seeds", "direct_rank", "direct_score"
    }  # fmt: skip
    assert document["policy"]["baselines"] == ["majority"]


def test_clear_differences_separate_ranks_and_tiers():
    n = 200
    result = rank(
        both("ann", [1] * n), both("bob", ([1] * 9 + [0]) * (n // 10)), both("cyd", ([0] + [1] * 9) * (n // 10)),
        both("dan", [0, 1] * (n // 2)), entrants=["ann", "bob", "cyd", "dan"],
    )  # fmt: skip
    found = {row.entrant: (row.rank, row.rank_low, row.rank_high, row.tier) for row in result.rows}
    assert found == {"ann": (1, 1, 1, 1), "bob": (2, 2, 3, 2), "cyd": (2, 2, 3, 2), "dan": (4, 4, 4, 3)}


def test_identical_entrants_are_never_told_apart():
    result = rank(*(both(name, [1, 0, 1, 1]) for name in "abcd"), entrants=list("abcd"))
    assert {(row.rank, row.rank_low, row.rank_high, row.tier) for row in result.rows} == {(1, 1, 4, 1)}


def test_the_interval_holds_the_rank_where_the_tolerance_reaches_beyond_the_error():
    n = 400
    result = rank(
        both("ann", [1] * n), both("bob", [1] * (n - 40) + [0] * 40), entrants=["ann", "bob"],
        policy=with_policy(ties=Ties("shared", 0.5)),
    )  # fmt: skip
    assert [(row.rank, row.rank_low, row.rank_high) for row in result.rows] == [(1, 1, 1), (1, 1, 2)]


def test_one_cluster_leaves_the_error_unknown_and_the_interval_whole():
    result = rank(both("ann", [1, 1, 1], cluster="all"), both("bob", [0, 0, 0], cluster="all"), entrants=["ann", "bob"])
    assert [(row.rank, row.rank_low, row.rank_high, row.se) for row in result.rows] == [
        (1, 1, 2, None),
        (2, 1, 2, None),
    ]


def test_the_error_without_seeds_is_the_cluster_error_of_the_mean():
    result = rank(rows("ann", [1, 1, 0, 0]), entrants=["ann"])
    assert result.rows[0].se == pytest.approx(math.sqrt(4 / 3 * 4 * 0.25) / 4)


def test_examples_shared_between_tasks_are_one_cluster():
    scores = np.random.default_rng(1).integers(0, 2, 50).astype(float).tolist()
    shared = rank(rows("ann", scores), rows("ann", scores, task="prime"), entrants=["ann"], tasks=(DIGIT, PRIME))
    apart = [{**row, "cluster": "p" + row["cluster"]} for row in rows("ann", scores, task="prime")]
    disjoint = rank(rows("ann", scores), apart, entrants=["ann"], tasks=(DIGIT, PRIME))
    alone = shared.tasks["digit"][0].se
    assert shared.rows[0].se == pytest.approx(alone)  # the same items twice say nothing new
    assert disjoint.rows[0].se == pytest.approx(alone / math.sqrt(2))


def test_seeds_are_a_second_part_of_the_error_and_not_of_a_base_model():
    noisy = [rows("ann", [1] * (50 + move) + [0] * (50 - move), seed=11 + k) for k, move in enumerate((-20, 0, 20))]
    steady = [rows("bob", [1, 0] * 50, seed=seed) for seed in (11, 12, 13)]
    found = by_entrant(rank(*noisy, *steady, entrants=["ann", "bob"]))
    items = math.sqrt(100 / 99 * 0.25 / 100)
    assert found["bob"].se == pytest.approx(items)  # the same scores under every seed: the base was chosen
    assert found["ann"].se > 1.5 * items
    assert found["ann"].se < math.sqrt(items**2 + 0.04 / 3) + 1e-9


def test_the_table_for_terminals_escapes_names():
    text = rank(both("\u202eevil\x1b[31m", [1, 0]), entrants=["\u202eevil\x1b[31m"]).text()
    assert "\\u202eevil\\u001b[31m" in text
    assert text.isascii() or "\x1b" not in text
    lines = text.splitlines()
    assert lines[0].split() == "rank 95% set tier entrant prepared ± se direct direct rank n seeds".split()
