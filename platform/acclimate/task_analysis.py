"""Do entrants differ over several tasks? `acclimate.compare` of a table entrants × tasks: Friedman, Nemenyi, Wilcoxon with Holm, and each task left out."""

import math
from itertools import combinations
from typing import Any

import numpy as np

from acclimate import directions, score_tables
from acclimate.analysis_options import CompareOptions, chosen, confidence_level, left_out, number, require_left
from acclimate.score_tables import Source, counted
from acclimate_competitions import casp, several_tasks
from acclimate_competitions import stability as of_rounds
from acclimate_competitions.scores import Floats


def compare(source: Source, options: CompareOptions) -> dict[str, Any]:
    """`acclimate.compare` of a table entrants × tasks of one protocol and metric, whose first column names the entrant."""
    table = score_tables.wide(score_tables.read(source), tasks=options.get("tasks", ()))
    level = confidence_level(options.get("level", 0.95))
    lower, told = directions.of_tasks(table, options)
    notes = [*table.notes, *told]
    lacking = np.asarray(np.isnan(table.scores).any(axis=1))
    gone = [name for name, out in zip(table.entrants, lacking.tolist(), strict=True) if out]
    if chosen("policy for missing scores", options.get("missing", "fail"), ("fail", "exclude")) == "fail":
        score_tables.refuse(
            f"{counted(len(gone), 'entrant')} without a score in some task",
            [repr(name) for name in gone],
            hint="--missing exclude leaves them out; --tasks chooses tasks that all have",
        )
    notes += left_out(gone, "a score is missing")
    names = [name for name in table.entrants if name not in gone]
    require_left(
        names, table.entrants, "no entrant has a score in every task", hint="--tasks chooses tasks that entrants have"
    )
    sign = np.array([-1.0 if task in lower else 1.0 for task in table.tasks])
    scores = table.scores[~lacking] * sign
    ranks = several_tasks.average_ranks(scores)
    found = several_tasks.friedman(ranks, scores.shape[1], level=level)
    if scores.shape[1] < of_rounds.INFORMATIVE:
        notes.append(f"not informative: {scores.shape[1]} tasks are few (fewer than {of_rounds.INFORMATIVE})")
    places = casp.shared_ranks([-rank for rank in ranks])
    without = _left_one_out(scores)
    rows = [
        {
            "entrant": name,
            "rank": places[place],
            "average_rank": ranks[place],
            "rank_low": min(without[place]),
            "rank_high": max(without[place]),
        }
        for place, name in enumerate(names)
    ]
    rows.sort(key=lambda row: (row["rank"], row["entrant"]))
    return {
        "entrants": len(names),
        "tasks": scores.shape[1],
        "ranking": rows,
        "friedman_chi2": None if found is None else number(found.chi2),
        "friedman_p": None if found is None else number(found.chi2_p),
        "iman_davenport_f": None if found is None else number(found.f),
        "iman_davenport_p": None if found is None else number(found.f_p),
        "critical_difference": None if found is None else found.critical_difference,
        "pairs": _pairs(names, scores, ranks, math.inf if found is None else found.critical_difference),
        "level": level,
        "notes": notes,
    }


def _left_one_out(scores: Floats) -> list[set[int]]:
    """Of each entrant, the ranks by average rank with all tasks, and with each one left out."""
    count = scores.shape[1]
    kept = [list(range(count)), *([j for j in range(count) if j != out] for out in range(count if count > 1 else 0))]
    by_tasks = [
        casp.shared_ranks([-rank for rank in several_tasks.average_ranks(scores[:, columns])]) for columns in kept
    ]
    return [set(ranks) for ranks in zip(*by_tasks, strict=True)]


def _pairs(names: list[str], scores: Floats, ranks: list[float], critical: float) -> list[dict[str, Any]]:
    """Each pair, the one with the better average rank first."""
    tests = several_tasks.wilcoxon_holm(scores)
    order = sorted(range(len(names)), key=lambda place: (ranks[place], names[place]))
    rows = []
    for i, j in combinations(order, 2):
        p, held = tests[min(i, j), max(i, j)]
        apart = ranks[j] - ranks[i]
        rows.append(
            {
                "a": names[i],
                "b": names[j],
                "difference": apart,
                "nemenyi": apart > critical,
                "wilcoxon_p": p,
                "wilcoxon_p_holm": held,
            }
        )
    return rows
