"""Rank sets beside a plain loop and beside the matrix product that bounds them, and the memory of a joint bootstrap.

The plain loop takes each pair and each draw by itself, in Python, as the formula reads; it is timed on a part of the draws. The matrix product
gives every difference of every draw: contrasts [pairs, entrants] by draws [entrants, draws].
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np

from acclimate_competitions import confidence

ENTRANTS, ITEMS, DRAWS, TURNS, PART = 100, 10_000, 10_000, 3, 50
_BOOTSTRAP = """
import json, sys, time
from pathlib import Path
import numpy as np
from acclimate_competitions import rank_draws
from acclimate_competitions.items import Items
m, n, draws = json.loads(sys.argv[1])
names = tuple(f"e{place:03}" for place in range(m))
values = (np.random.default_rng(1).random((m, 1, n)) < 0.7).astype(float)
clusters = np.arange(n)
items = Items(names, ("s",), ("",), tuple(map(str, range(n))), (values,), (clusters,))
def peak():
    return int(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])
before, began = peak(), time.perf_counter()
rank_draws.bootstrap_ranks(items, draws=draws, seed=1)
after = peak()
print(json.dumps([time.perf_counter() - began, after / 1024, (after - before) / 1024]))
"""


def measure(*, entrants: int = ENTRANTS, items: int = ITEMS, draws: int = DRAWS) -> list[tuple[str, float]]:
    """Seconds of the three ways, the least of some turns, and the ratios."""
    random = np.random.default_rng(1)
    ability = np.linspace(0.5, 0.8, entrants)[:, None]
    values = (random.random((entrants, items)) < ability).astype(np.float64)
    scores, covariance = values.mean(axis=1), np.cov(values) / items
    sample = random.multivariate_normal(np.zeros(entrants), covariance, size=draws, method="cholesky").T
    contrasts = np.zeros((entrants * (entrants - 1) // 2, entrants))
    for row, (i, j) in enumerate(combinations(range(entrants), 2)):
        contrasts[row, i], contrasts[row, j] = 1.0, -1.0
    settings: dict[str, Any] = {"kind": "simultaneous", "level": 0.95, "draws": draws, "seed": 1}
    own = _least(lambda: confidence.rank_sets(scores, covariance, **settings))
    whole = _least(lambda: _from_items(values, settings))
    product = _least(lambda: contrasts @ sample)
    few = sample[:, : max(1, draws // PART)]
    loop = _least(lambda: plain(few.tolist(), covariance.tolist()), turns=1) * draws / few.shape[1]
    label = f"{entrants} entrants × {items:,} items, {draws:,} draws"
    return [
        (f"{label}: rank sets, all steps", own),
        (f"{label}: the same with the covariance from the items", whole),
        (f"{label}: plain loop over pairs, one step", loop),
        (f"{label}: matrix product", product),
        (f"{label}: plain loop ÷ rank sets", loop / own),
        (f"{label}: rank sets ÷ matrix product", own / product),
    ]


def _from_items(values: Any, settings: dict[str, Any]) -> confidence.RankSets:
    entrants, items = values.shape
    pool, clusters = np.ones(entrants, dtype=bool), np.arange(items)
    errors = [confidence.task_error(values[:, None, :], clusters, count=items, pool=pool)]
    return confidence.rank_sets(values.mean(axis=1), confidence.covariance(errors), **settings)


def plain(sample: list[list[float]], covariance: list[list[float]]) -> list[float]:
    """The largest studentized difference of each draw, pair by pair."""
    largest = [0.0] * len(sample[0])
    for i, j in combinations(range(len(sample)), 2):
        scale = (covariance[i][i] + covariance[j][j] - 2 * covariance[i][j]) ** -0.5
        for draw in range(len(largest)):
            largest[draw] = max(largest[draw], abs(sample[i][draw] - sample[j][draw]) * scale)
    return largest


def bootstrap(*, entrants: int = 60, items: int = ITEMS, draws: int = DRAWS) -> dict[str, float]:
    """Seconds and MiB (the process's peak, and above what it had before) of a joint bootstrap, in a process of its own."""
    line = [sys.executable, "-c", _BOOTSTRAP, json.dumps([entrants, items, draws])]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    seconds, peak, above = json.loads(done.stdout)
    return {"seconds": seconds, "peak": peak, "above": above}


def lines() -> list[str]:
    """Tables in Markdown."""
    joint = bootstrap()
    rows = [f"| {name} | {value:.2f} |" for name, value in measure()]
    label = f"60 entrants × {ITEMS:,} items, {DRAWS:,} joint bootstrap replicates"
    rows += [
        f"| {label}: seconds | {joint['seconds']:.2f} |",
        f"| {label}: peak memory of the process, MiB | {joint['peak']:.0f} |",
    ]
    return ["| ranks and how sure they are | seconds, or ratio |", "| --- | --- |", *rows]


def _least(work: Callable[[], object], *, turns: int = TURNS) -> float:
    seconds = []
    for _ in range(turns):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
