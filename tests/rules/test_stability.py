import csv
import json
import math
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from acclimate_competitions import digests, stability, tables
from acclimate_competitions.definition import Interval, Policy, Task, Ties

SHARED = Path(os.environ.get("ACCLIMATE_REFERENCE_DATA", Path(__file__).parents[3] / "shared" / "data"))
POLICY = Policy("mean", "worst", Ties("shared", 0.0), Interval("simultaneous", 0.95, 200, 1), None, ("majority",))
TASKS = tuple(Task(name, "choice", "", ("a", "b"), "accuracy", 0.5) for name in ("digit", "parity", "prime"))
COLUMNS = ("entrant", "protocol", "task", "seed", "metric", "example", "cluster", "score", "reason")


def round_scores(direct, prepared, *, n=100, seeds=(11, 12, 13), seed=0):
    """Scores of entrants whose chance of a hit is given by [entrants][tasks], for each protocol."""
    random = np.random.default_rng(seed)
    rows = []
    for protocol, chances, runs in (("direct", direct, (None,)), ("prepared", prepared, seeds)):
        for entrant, of_tasks in enumerate(chances):
            for task, chance in zip(TASKS, of_tasks, strict=False):
                for run in runs:
                    for place, hit in enumerate((random.random(n) < chance).tolist()):
                        example = f"{task.name}-{place}"
                        key = (f"e{entrant}", protocol, task.name, run, "accuracy", example, example)
                        rows.append(dict(zip(COLUMNS, (*key, float(hit), None), strict=True)))
    return pa.Table.from_pylist(rows, schema=tables.SCORES)


def of_round(scores, count, **changes):
    entrants = [f"e{place}" for place in range(count)]
    return stability.of_round(scores, tasks=TASKS, policy=POLICY, entrants=entrants, **{"draws": 50, **changes})


# ---- against published numbers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def harmony():
    folder = SHARED / "lm-harmony"
    if not folder.is_dir():
        pytest.skip("the reference score tables are not on this machine (ACCLIMATE_REFERENCE_DATA)")
    matrices = []
    for name in ("direct_eval.csv", "train_before_test.csv"):
        with (folder / name).open(encoding="utf-8") as stream:
            rows = list(csv.reader(stream))
        models = [row[0] for row in rows[1:]]
        matrices.append(np.array([[float(cell) if cell else math.nan for cell in row[1:]] for row in rows[1:]]))
    return models, matrices[0], matrices[1]


def test_agreement_between_benchmarks_is_as_published(harmony):
    _, direct, prepared = harmony
    assert stability.agreement(direct[:, :24]) == pytest.approx(0.517332, abs=5e-7)
    assert stability.agreement(prepared[:, :24]) == pytest.approx(0.755234, abs=5e-7)
    change = stability.tau(prepared[:, :24], prepared[:, :24]) - stability.tau(direct[:, :24], direct[:, :24])
    assert (change[np.triu_indices(24, 1)] > 0).sum() == 274


def test_shares_of_the_first_component_are_as_published(harmony):
    models, direct, prepared = harmony
    qwen = [place for place, name in enumerate(models) if "qwen" in name.lower()]
    assert len(qwen) == 26
    found = [stability.first_component(matrix[:, :24]) for matrix in (direct, prepared)]
    found += [stability.first_component(matrix[qwen, :24]) for matrix in (direct, prepared)]
    assert found == pytest.approx([0.6958, 0.8636, 0.7366, 0.9280], abs=6e-5)


def test_perplexity_against_downstream_is_as_published(harmony):
    _, direct, prepared = harmony
    known = ~np.isnan(direct[:, 24:]).any(axis=1)
    assert known.sum() == 53
    found = [stability.tau(matrix[known, :24], -matrix[known, 24:]).mean() for matrix in (direct, prepared)]
    assert found == pytest.approx([0.477, 0.740], abs=6e-4)


def test_winners_and_ties_are_as_published(harmony):
    _, direct, prepared = (part[:, :24] if isinstance(part, np.ndarray) else part for part in harmony)
    assert (direct.argmax(axis=0) == prepared.argmax(axis=0)).sum() == 9
    assert (stability.tied_pairs(direct), stability.tied_pairs(prepared)) == (218, 225)


def test_bootstrap_intervals_are_as_published(harmony):
    _, direct, prepared = harmony
    found = [
        stability.bootstrap(matrix[:, :24], draws=1000, random=np.random.default_rng(1))
        for matrix in (direct, prepared)
    ]
    assert found[0] == pytest.approx((0.450, 0.574), abs=0.01)
    assert found[1] == pytest.approx((0.704, 0.796), abs=0.01)


def test_the_first_component_of_independent_scores_has_its_known_share():
    random = np.random.default_rng(0)
    scores = random.normal(size=(8, 4))
    null = stability.first_component_null(scores, draws=2000, random=random)
    assert null == pytest.approx(0.48, abs=0.01)


# ---- tau -----------------------------------------------------------------------------------------------------------


@given(arrays.arrays(np.float64, st.tuples(st.integers(2, 9), st.just(2)), elements=st.integers(0, 4).map(float)))
def test_tau_is_that_of_scipy(scores):
    found = stability.tau(scores[:, :1], scores[:, 1:])[0, 0]
    if len(set(scores[:, 0])) == 1 or len(set(scores[:, 1])) == 1:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(stats.kendalltau(scores[:, 0], scores[:, 1]).statistic)


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (4, 1), (4, 0)])
def test_agreement_of_too_little_is_undefined(shape):
    scores = np.random.default_rng(0).normal(size=shape)
    assert stability.agreement(scores) is None
    assert stability.bootstrap(scores, draws=10, random=np.random.default_rng(0)) is None


def test_constant_scores_agree_with_nothing():
    scores = np.column_stack([np.ones(4), np.arange(4.0), np.arange(4.0)])
    assert stability.agreement(scores) == 1.0
    assert stability.first_component(np.ones((4, 2))) is None
    assert stability.tied_pairs(scores) == 6


# ---- a round -------------------------------------------------------------------------------------------------------


def test_entrants_that_differ_only_by_noise_agree_up_to_the_ceiling():
    chances = np.linspace(0.55, 0.9, 8)[:, None].repeat(3, axis=1)
    found = of_round(round_scores(chances, chances, n=300), 8, draws=200).effects["prepared"]
    assert found.half == pytest.approx(found.ceiling, abs=0.05)
    assert found.agreement > found.half  # whole tasks rest on twice the items


def test_entrants_of_different_tasks_agree_less_than_the_ceiling():
    random = np.random.default_rng(4)
    order = np.linspace(0.4, 0.95, 8)
    apart = np.column_stack([random.permutation(order) for _ in TASKS])
    found = of_round(round_scores(apart, order[:, None].repeat(3, axis=1), n=300), 8)
    assert found.effects["direct"].half < found.effects["direct"].ceiling - 0.3
    assert found.effects["direct"].agreement < found.effects["prepared"].agreement - 0.3
    assert found.effects["direct"].component < found.effects["prepared"].component


def test_the_one_who_trained_on_the_test_task_falls():
    honest = np.linspace(0.6, 0.9, 5)[:, None].repeat(3, axis=1)
    direct, prepared = np.vstack([[0.99, 0.3, 0.3], honest - 0.3]), np.vstack([[0.4, 0.4, 0.4], honest])
    found = of_round(round_scores(direct, prepared, n=200), 6)
    worst = found.falls[0]
    assert (worst.entrant, worst.task, worst.direct_rank, worst.prepared_rank, worst.fall) == ("e0", "digit", 1, 6, 5)
    assert [row.task for row in found.winners if row.changed] == ["digit"]
    assert found.losers[0].entrant == "e0"
    assert len(found.falls) == len(found.losers) == 6


def test_the_document_is_plain_and_the_same_for_rows_in_any_order():
    chances = np.linspace(0.4, 0.9, 11)[:, None].repeat(3, axis=1)
    scores = round_scores(chances, chances, n=20)
    document = of_round(scores, 11).document()
    assert set(document["agreement"]) == {
        "direct", "prepared", "ceiling_direct", "ceiling_prepared", "half_direct", "half_prepared"
    }  # fmt: skip
    assert json.loads(digests.canonical(document)) == json.loads(json.dumps(document))
    order = np.random.default_rng(1).permutation(scores.num_rows)
    assert of_round(scores.take(order), 11).document() == document
    assert document["informative"] is True
    assert document["effects"]["direct"]["interval"][0] <= document["agreement"]["direct"]


def test_below_ten_entrants_no_interval_is_given():
    chances = np.linspace(0.4, 0.9, 9)[:, None].repeat(3, axis=1)
    document = of_round(round_scores(chances, chances, n=20), 9).document()
    assert document["informative"] is False
    assert document["effects"]["prepared"]["interval"] is None


def test_entrants_without_a_score_are_left_out_and_named():
    chances = np.linspace(0.4, 0.9, 4)[:, None].repeat(3, axis=1)
    found = of_round(round_scores(chances, chances[:3], n=20), 4)
    assert (found.entrants, found.left_out) == (("e0", "e1", "e2"), ("e3",))
    assert found.losers[0].entrant == "e3"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_entrants_leave_agreement_undefined(count):
    chances = np.linspace(0.4, 0.9, count)[:, None].repeat(3, axis=1)
    document = of_round(round_scores(chances, chances, n=20), count, draws=5).document()
    if count < 2:
        assert set(document["agreement"].values()) == {None}
        assert document["protocols"]["overall"] is None
    digests.canonical(document)


def test_a_task_of_one_cluster_has_no_ceiling():
    chances = np.array([[0.4] * 3, [0.9] * 3])
    scores = round_scores(chances, chances, n=20)
    one = scores.set_column(6, tables.SCORES.field("cluster"), pa.array(["all"] * scores.num_rows))
    document = of_round(one, 2, draws=10).document()
    assert document["agreement"]["ceiling_prepared"] is None
    assert document["agreement"]["prepared"] is not None
