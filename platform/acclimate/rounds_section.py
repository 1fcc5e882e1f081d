"""The report's section across rounds: scores by round, and how far the orders of rounds agree."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from acclimate import report_plots, round_links
from acclimate.plots import number, plain
from acclimate.report_data import RoundScores
from acclimate.report_sections import Section, Table
from acclimate_competitions import stability

SHOWN = 12
"""Entrants that a plot by round can show apart."""


def of(rounds: Sequence[RoundScores]) -> Section:
    """Scores of several rounds, and how far their orders agree."""
    held = [{row["entrant"]: row for row in found.ranking["ranking"] if row["score"] is not None} for found in rounds]
    names = sorted(
        {name for rows in held for name in rows},
        key=lambda name: (-sum(name in rows for rows in held), _mean_rank(held, name), name),
    )
    shown, cells = names[:SHOWN], []
    taus: list[dict[str, Any]] = []
    for i, j in combinations(range(len(rounds)), 2):
        both = sorted(set(held[i]) & set(held[j]))
        scores = [
            np.array([[-float(held[place][name]["rank"])] for name in both]).reshape(len(both), 1) for place in (i, j)
        ]
        value = float(stability.tau(*scores)[0, 0]) if len(both) > 1 else float("nan")
        known = None if np.isnan(value) else value
        taus.append({"rounds": [rounds[i].name, rounds[j].name], "entrants": len(both), "tau_b": known})
        cells.append((plain(rounds[i].name), plain(rounds[j].name), str(len(both)), number(known)))
    lines = {
        name: [(rows[name]["score"], rows[name]["se"]) if name in rows else None for rows in held] for name in shown
    }
    values = tuple(
        (
            plain(name),
            *(
                f"{number(rows[name]['score'], 4)} ± {number(rows[name]['se'], 4)}" if name in rows else "–"
                for rows in held
            ),
        )
        for name in names
    )
    found = [row["tau_b"] for row in taus if row["tau_b"] is not None]
    mean = sum(found) / len(found) if found else None
    sentence = f"The orders of {len(rounds)} rounds agree with a mean tau-b of {number(mean)} over {len(found)} pairs of rounds."
    caveats = ["scores of different rounds rest on different examples: orders may be compared, heights may not"]
    links = [one.linked for one in rounds if one.linked is not None]
    if len(links) == len(rounds):
        caveats += [*round_links.recipes(links), *round_links.notes(links)]
    if len(names) > SHOWN:
        caveats.append(f"the plot shows {SHOWN} of {len(names)} entrants")
    fewest = min((row["entrants"] for row in taus), default=0)
    if fewest < stability.INFORMATIVE:
        caveats.append(f"not informative: {fewest} entrants in common are fewer than {stability.INFORMATIVE}")
    tables = (
        Table("Score ± standard error by round", ("*entrant", *(plain(one.name) for one in rounds)), values),
        Table("Agreement of the orders of rounds", ("*round", "*with", "entrants in common", "tau-b"), tuple(cells)),
    )
    svg = report_plots.by_round([one.name for one in rounds], lines)
    numbers = {
        "scores": {name: [None if p is None else p[0] for p in points] for name, points in lines.items()},
        "agreement": taus,
        "anchors": round_links.drift(links) if len(links) == len(rounds) else [],
    }
    return Section("rounds", "Score by round", sentence, tuple(caveats), svg, tables, numbers)


def _mean_rank(held: Sequence[Mapping[str, Any]], name: str) -> float:
    ranks = [rows[name]["rank"] for rows in held if name in rows]
    return float(sum(ranks)) / len(ranks)
