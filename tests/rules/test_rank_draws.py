"""Ranks in bootstrap samples: against a plain loop, and in bounded memory."""

import importlib.util
from pathlib import Path
from random import Random

import numpy as np
import pytest

from acclimate_competitions import rank_draws
from acclimate_competitions.items import Items

BENCHMARK = Path(__file__).parents[1] / "benchmarks/rank_confidence.py"


def drawn(m=4, n=30):
    """Two sets, of which the second shares half of its clusters with the first."""
    random = np.random.default_rng(3)
    values = tuple((random.random((m, 1, n)) < np.linspace(0.4, 0.7, m)[:, None, None]).astype(float) for _ in range(2))
    places = (np.arange(n), np.arange(n) + n // 2)
    names = tuple(f"e{place}" for place in range(m))
    return Items(names, ("s", "t"), ("",), tuple(map(str, range(n + n // 2))), values, places)


def plainly(items, draws):
    random = Random(5)
    m = len(items.entrants)
    inside = [set(place.tolist()) for place in items.places]
    strata = {}
    for cluster in range(len(items.clusters)):
        strata.setdefault(tuple(cluster in one for one in inside), []).append(cluster)
    shares = np.zeros((m, m))
    for _ in range(draws):
        chosen = [random.choice(own) for own in strata.values() for _ in own]
        scores = np.zeros(m)
        for value, place in zip(items.values, items.places, strict=True):
            where = {cluster: number for number, cluster in enumerate(place.tolist())}
            kept = [where[cluster] for cluster in chosen if cluster in where]
            scores += value[:, 0, kept].mean(axis=1) / len(items.values)
        for entrant in range(m):
            shares[entrant, int((scores > scores[entrant] + 1e-9).sum())] += 1 / draws
    return shares


def test_the_shares_are_those_of_a_plain_loop():
    items = drawn()
    found = rank_draws.bootstrap_ranks(items, draws=3_000, seed=1)
    assert found.sum(axis=1) == pytest.approx(np.ones(4))
    # 5 standard errors of the difference of two shares.
    assert np.abs(found - plainly(items, 3_000)).max() < 5 * np.sqrt(0.25 * 2 / 3_000)
    # Who is nearly always first is nearly always last where lower is better.
    assert found[3, 0] > 0.9 and rank_draws.bootstrap_ranks(items, draws=300, seed=1, lower_is_better=True)[3, 3] > 0.9


@pytest.mark.slow
def test_a_joint_bootstrap_of_many_items_stays_in_bounded_memory():
    spec = importlib.util.spec_from_file_location("rank_confidence", BENCHMARK)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    assert benchmark.bootstrap()["peak"] < 1024
    ratios = dict(benchmark.measure(draws=2_000))
    assert next(value for name, value in ratios.items() if "plain loop ÷" in name) > 20
