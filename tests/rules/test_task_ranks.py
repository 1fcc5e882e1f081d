"""Rankings over tasks of different metrics, by the ranks in each."""

import dataclasses
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from acclimate_competitions import confidence, ranking, stability, tables, task_ranks
from acclimate_competitions.definition import Interval, Policy, Task, Ties
from acclimate_competitions.errors import Refusal

HIT = Task("hit", "choice", "", ("a", "b"), "accuracy", 0.5)
NLL = Task("nll", "choice", "", ("a", "b"), "nll", 0.7)
POLICY = Policy("win_rate", "worst", Ties("shared", 0.0), Interval("simultaneous", 0.95, 500, 1), None, ("majority",))


def table(scores, *, n=20, noise=0.0, seed=0):
    """A table of (entrant, task) -> level; accuracy as that share of hits, nll as that mean."""
    rng = np.random.default_rng(seed)
    rows = []
    for (entrant, task), level in scores.items():
        for run in (None, 11, 12, 13):
            values = (np.arange(n) < round(level * n)) if task.metric == "accuracy" else level + noise * rng.random(n)
            for place, value in enumerate(np.asarray(values, dtype=float).tolist()):
                key = {
                    "entrant": entrant,
                    "protocol": "direct" if run is None else "prepared",
                    "task": task.name,
                    "seed": run,
                }
                example = f"{task.name}-{place}"
                rows.append(
                    {
                        **key,
                        "metric": task.metric,
                        "example": example,
                        "cluster": example,
                        "score": value,
                        "reason": None,
                    }
                )
    return pa.Table.from_pylist(rows, schema=tables.SCORES)


LEVELS = {
    ("ann", HIT): 0.9, ("bob", HIT): 0.5, ("cyd", HIT): 0.5, ("majority", HIT): 0.1,
    ("ann", NLL): 0.5, ("bob", NLL): 0.1, ("cyd", NLL): 0.9, ("majority", NLL): 0.3,
}  # fmt: skip


def rank(scores, policy=POLICY, entrants=("ann", "bob", "cyd")):
    return ranking.rank(scores, tasks=(HIT, NLL), policy=policy, entrants=entrants)


def test_the_score_is_the_mean_over_tasks_of_the_share_of_others_that_are_beaten():
    found = rank(table(LEVELS, noise=1e-3))
    # hit: ann beats both, bob and cyd tie; nll, lower is better: bob, ann, cyd.
    assert {row.entrant: row.score for row in found.rows} == {"ann": 0.75, "bob": (0.25 + 1) / 2, "cyd": 0.125}
    assert [(row.entrant, row.rank, row.se) for row in found.rows] == [
        ("ann", 1, None),
        ("bob", 2, None),
        ("cyd", 3, None),
    ]
    # A baseline is compared with the entrants, who are not compared with it.
    assert [(row.entrant, row.score) for row in found.baselines] == [("majority", pytest.approx((0 + 2 / 3) / 2))]
    # A task alone is ranked by its metric.
    assert [(row.entrant, row.score) for row in found.tasks["hit"]] == [("ann", 0.9), ("bob", 0.5), ("cyd", 0.5)]
    assert [row.entrant for row in found.tasks["nll"]] == ["bob", "ann", "cyd"]


def test_mean_rank_gives_the_same_order_the_other_way_around():
    policy = dataclasses.replace(POLICY, aggregate="mean_rank")
    scores = table(LEVELS, noise=1e-3)
    found, rates = rank(scores, policy), rank(scores)
    assert {row.entrant: row.score for row in found.rows} == {"ann": 1.5, "bob": 1.75, "cyd": 2.75}
    assert [(row.entrant, row.rank, row.rank_low, row.tier) for row in found.rows] == [
        (row.entrant, row.rank, row.rank_low, row.tier) for row in rates.rows
    ]
    assert ranking.direction(policy, (HIT, NLL)) == "min" and ranking.direction(POLICY, (NLL, HIT)) == "max"
    by_mean = dataclasses.replace(POLICY, aggregate="mean")
    assert ranking.direction(by_mean, (NLL,)) == "min"
    with pytest.raises(Refusal, match="one scale") as refusal:
        rank(scores, by_mean)
    assert "win_rate" in (refusal.value.hint or "")


def test_who_lacks_a_score_is_last_and_nobody_else_is_compared_with_them():
    scores = table({**LEVELS, ("dan", HIT): 1.0}, noise=1e-3)  # nll has no worst value
    found = rank(scores, entrants=("ann", "bob", "cyd", "dan"))
    assert [(row.entrant, row.score) for row in found.rows][-1] == ("dan", None)
    alike = [(row.entrant, row.score, row.rank) for row in found.rows]
    assert alike[:3] == [(row.entrant, row.score, row.rank) for row in rank(table(LEVELS, noise=1e-3)).rows]
    only = {key: level for key, level in LEVELS.items() if key[0] in ("ann", "majority")}
    alone = rank(table(only), entrants=("ann",))
    assert [(row.score, row.rank, row.rank_low, row.rank_high) for row in alone.rows] == [(1.0, 1, 1, 1)]


def test_one_task_alone_gives_the_intervals_of_its_metric():
    rng = np.random.default_rng(4)
    levels = {(f"e{place}", HIT): share for place, share in enumerate(rng.random(8))}
    one = {"tasks": (HIT,), "entrants": sorted(name for name, _ in levels)}
    scores = table(levels, n=300)
    by_rate = ranking.rank(scores, policy=POLICY, **one)
    by_mean = ranking.rank(scores, policy=dataclasses.replace(POLICY, aggregate="mean"), **one)
    assert [(r.entrant, r.rank, r.rank_low, r.rank_high, r.tier) for r in by_rate.rows] == [
        (r.entrant, r.rank, r.rank_low, r.rank_high, r.tier) for r in by_mean.rows
    ]  # fmt: skip
    assert len({row.rank_low for row in by_rate.rows}) > 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=5, max_size=5), min_size=1, max_size=4))
def test_mean_ranks_are_scipys(scores):
    expected = stats.rankdata(-np.array(scores), axis=1).mean(axis=0)
    for place in range(5):
        own = [Fraction(row[place]) for row in scores]
        others = [sorted(map(Fraction, row[:place] + row[place + 1 :])) for row in scores]
        assert float(task_ranks.mean_rank(own, others)) == pytest.approx(expected[place])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_what_is_sure_is_true_of_every_order_that_the_tasks_leave_open(seed):
    """Draw true scores, sets that hold for them, and see that no true mean rank contradicts what is said to be sure."""
    rng = np.random.default_rng(seed)
    m, count = int(rng.integers(2, 7)), int(rng.integers(1, 4))
    parts, ranks = [], np.zeros(m)
    for _ in range(count):
        true = rng.integers(0, 5, m)
        known = rng.random((m, m)) < rng.choice([0.3, 0.8, 1.0])
        better = (true[:, None] > true[None, :]) & known
        parts.append(confidence.RankSets(1 + better.sum(axis=0), m - better.sum(axis=1), better, np.zeros(m)))
        ranks += stats.rankdata(-true)
    found = task_ranks.rank_sets(parts)
    assert not (found.better & ~(ranks[:, None] < ranks[None, :])).any()
    assert (found.low <= stats.rankdata(ranks, method="min")).all()
    assert (found.high >= stats.rankdata(ranks, method="max")).all()


def test_the_sets_of_alike_entrants_hold_at_their_level():
    rng, wrong, rounds, m = np.random.default_rng(7), 0, 400, 6
    rule = {"kind": "simultaneous", "level": task_ranks.task_level(0.9, 3), "draws": 500, "seed": 1}
    for _ in range(rounds):
        sets = [confidence.rank_sets(rng.standard_normal(m), np.eye(m), **rule) for _ in range(3)]
        wrong += bool(task_ranks.rank_sets(sets).better.any())
    assert wrong <= 0.1 * rounds + 3 * np.sqrt(0.09 * rounds)


def test_tasks_that_point_the_other_way_agree_where_they_agree():
    levels = {(f"e{place}", task): level for task in (HIT, NLL) for place, level in enumerate(np.linspace(0.1, 0.9, 6))}
    turned = {(name, task): 1 - level if task is NLL else level for (name, task), level in levels.items()}
    rule = {"tasks": (HIT, NLL), "policy": POLICY, "entrants": [f"e{place}" for place in range(6)], "draws": 20}
    apart, alike = (stability.of_round(table(scores), **rule) for scores in (levels, turned))
    assert apart.effects["prepared"].agreement == -1 and alike.effects["prepared"].agreement == 1
    assert apart.effects["direct"].half < -0.9 and alike.effects["direct"].half > 0.9
