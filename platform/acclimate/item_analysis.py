"""Rankings, comparisons and agreement from scores by example, with the joint covariance of the items."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, permutations
from typing import Any, cast

import numpy as np

from acclimate import example_tables, table_analysis
from acclimate.analysis_options import (
    RESAMPLES,
    SPLITS,
    CompareOptions,
    RankOptions,
    StabilityOptions,
    chosen,
    confidence_level,
    draws,
    flips,
    number,
)
from acclimate.score_tables import Named, Source, counted, listed
from acclimate_competitions import agreement, confidence, paired, ranking, task_ranks, ways
from acclimate_competitions import stability as of_rounds
from acclimate_competitions.errors import Refusal
from acclimate_competitions.items import Items
from acclimate_competitions.scores import Floats


def rank(source: Source, options: RankOptions) -> dict[str, Any]:
    """`acclimate.rank` of scores by example."""
    found, notes = example_tables.read(source, options)
    everybody = found.entrants
    found = example_tables.answered(found, options, notes)
    notes += _described(found)
    beside = {"ways": in_all_ways(found, options, notes)} if options.get("ways") else {}
    aggregate = source.aggregate if isinstance(source, Named) else "mean"  # a DataFrame has a method of this name
    made = ranked(found, options) if aggregate == "mean" else _by_ranks(found, options, notes, aggregate=aggregate)
    return {
        **made,
        **beside,
        "left_out": [name for name in everybody if name not in found.entrants],
        "notes": notes,
    }


def ranked(found: Items, options: RankOptions) -> dict[str, Any]:
    """The ranking of items, with their covariance."""
    if not found.sets:
        return table_analysis.ranked([], np.zeros(0), np.zeros((0, 0)), errors=np.zeros(0), options=options)
    errors = found.errors()
    scores = np.array(found.scores(), dtype=np.float64)
    spread = np.array(confidence.standard_errors(errors))
    return table_analysis.ranked(found.entrants, scores, confidence.covariance(errors), errors=spread, options=options)


def _by_ranks(found: Items, options: RankOptions, notes: list[str], *, aggregate: str) -> dict[str, Any]:
    """The ranking of items by ranks in each set, as competitions' task_ranks.py has it; sets hold together, and there are no errors."""
    level, count = confidence_level(options.get("level", 0.95)), len(found.sets)
    lower = cast(dict[str, Any], options).get("lower", ())
    signs = [-1 if name in lower else 1 for name in found.sets]
    means = [[sign * Fraction(value or 0.0) for value in row] for sign, row in zip(signs, found.means(), strict=True)]
    m = len(found.entrants)
    ordered = [sorted(row) for row in means]
    ranks = [
        task_ranks.mean_rank([row[place] for row in means], ordered) - Fraction(1, 2) for place in range(m)
    ]  # nobody ties with oneself
    rates = [task_ranks.win_rate(rank, others=m - 1) for rank in ranks]
    drawn: dict[str, Any] = {"draws": draws(options, m), "seed": options.get("seed", 1)}
    sets = task_ranks.rank_sets(
        [
            confidence.rank_sets(
                [float(value) for value in row],
                confidence.covariance([error]),
                kind="simultaneous",
                level=task_ranks.task_level(level, count),
                **drawn,
            )
            for row, error in zip(means, found.errors(), strict=True)
        ]
    )
    scores = rates if aggregate == "win_rate" else ranks
    rows: list[dict[str, Any]] = [
        {
            "entrant": name,
            "rank": place,
            "rank_low": min(int(low), place),
            "rank_high": max(int(high), place),
            "score": float(score),
            "se": None,
        }
        for name, place, low, high, score in zip(
            found.entrants, ranking.shared_ranks(rates, tolerance=0.0), sets.low, sets.high, scores, strict=True
        )
    ]
    rows.sort(key=lambda row: (row["rank"], row["entrant"]))
    top = options.get("top", 1)
    if top < 1:
        raise Refusal("scores_invalid", f"a top set of {top}", hint="--top 1 or more")
    if options.get("sets", "simultaneous") != "simultaneous":
        notes.append("intervals of ranks over tasks hold together: there are no wider or narrower ones")
    held = [row["entrant"] for row in rows if row["rank_low"] <= top]
    return {
        "ranking": rows,
        "top_set": held,
        "top": top,
        "level": level,
        "sets": "simultaneous",
        "draws": drawn["draws"],
    }


def in_all_ways(found: Items, options: RankOptions, notes: list[str]) -> dict[str, Any]:
    """Ranks in each way, the ranking's own order first: {ranks: [{entrant, WAY…, rank_low, rank_high}], tau_b: {WAY: {WAY: tau-b}}, level}.

    Of examples that somebody lacks none counts; which ways are undefined is said.
    """
    shared, gone = found.shared()
    level = confidence_level(options.get("level", 0.95))
    if not shared.entrants or not shared.sets or not all(value.shape[2] for value in shared.values):
        notes.append("there are no five ways to rank: no example in some set was scored for everybody")
        return {"ranks": [], "tau_b": {}, "level": level}
    if gone:
        notes.append(f"the five ways leave out {gone} examples, which not everybody has")
    made = ways.ways(shared, lower_is_better=options.get("lower_is_better", False), level=level)
    for name in ways.WAYS:
        if name not in made.values:
            notes.append(f"{name} is undefined: some entrants never lose, or never win, against the others")
    rows = [
        {
            "entrant": name,
            **{way: made.ranks[way][place] if way in made.ranks else None for way in ways.WAYS},
            "rank_low": made.low[place],
            "rank_high": made.high[place],
        }
        for place, name in enumerate(shared.entrants)
    ]
    rows.sort(key=lambda row: (row["mean"], row["entrant"]))
    return {"ranks": rows, "tau_b": made.tau, "level": level}


def compare(one: str | None, other: str | None, source: Source, options: CompareOptions) -> dict[str, Any]:
    """`acclimate.compare` of scores by example."""
    found, notes = example_tables.read(source, options)
    chosen("policy for missing scores", options.get("missing", "fail"), ("fail", "exclude"))
    for name in (one, other):
        if name is not None and name not in found.entrants:
            hint = f"there are {listed(found.entrants, most=40)}"
            if name in getattr(source, "baselines", ()):
                hint = f"{name!r} is a baseline of the round, and baselines can't be compared; {hint}"
            raise Refusal("scores_invalid", f"nobody is called {name!r}", hint=hint)
    if one is not None and one == other:
        raise Refusal("scores_invalid", f"{one!r} can't be compared with itself", hint="name two entrants")
    if (one is None) != (other is None):
        raise Refusal("scores_invalid", "one entrant alone can't be compared", hint="name two, or none for all pairs")
    many = one is None or options.get("all", False)
    if options.get("missing", "fail") == "fail":
        compared = found if many else found.of([found.entrants.index(str(name)) for name in (one, other)])
        example_tables.answered(compared, options, notes)
    alternative = chosen("alternative", options.get("alternative", "two-sided"), paired.ALTERNATIVES)
    pairs = _pairs(found, options) if many else [(str(one), str(other))]
    rows = _compared(found, pairs, options)
    for test in ("mcnemar_p", "permutation_p", "wilcoxon_p"):
        for row, adjusted in zip(rows, paired.holm([row[test] for row in rows]), strict=True):
            row[f"{test}_holm"] = adjusted
    notes += _described(found)
    if len(found.seeds) > 1:
        notes.append("the tests take the seeds as given; the errors and the interval of a difference count them, too")
    notes += _floors(rows)
    if found.clustered:
        notes.append("McNemar's test is not made: examples of one cluster are not independent")
    elif not found.binary or len(found.seeds) > 1 or len(found.sets) > 1:
        notes.append("McNemar's test is not made: it needs one set of examples, each right (1) or wrong (0) once")
    own = next((row for row in rows if (row["a"], row["b"]) == (one, other)), None)
    if own is None and one is not None:
        (own,) = _compared(found, [(one, str(other))], options)
    return {**(own or {}), **({"pairs": rows} if many else {}), "alternative": alternative, "notes": notes}


def stability(source: Source, options: StabilityOptions) -> dict[str, Any]:
    """`acclimate.stability` of scores by example: the sets, each with its rank sets and ceiling, and how far they agree."""
    found, notes = example_tables.read(source, options)
    unknown = sorted(set(options.get("lower", ())) - set(found.sets))
    if unknown:
        raise Refusal("scores_invalid", f"--lower: no set {listed(unknown)}", hint=f"there are {listed(found.sets)}")
    found = example_tables.answered(found, cast(dict[str, Any], options), notes)
    notes += [note for note in _described(found) if "sets of each one's mean" not in note]
    level = confidence_level(options.get("level", 0.95))
    m, seed = len(found.entrants), options.get("seed", 1)
    sign = np.array([-1.0 if name in options.get("lower", ()) else 1.0 for name in found.sets])
    scores = np.array(found.means(), dtype=np.float64).T.reshape(m, len(found.sets)) * sign
    order = agreement.canonical(scores, found.entrants)
    ordered = found.of(order.tolist())
    values = [value * turn for value, turn in zip(ordered.values, sign, strict=True)]
    halves = of_rounds.Halves.of_values(values, ordered.places, count=len(found.clusters))
    random = np.random.Generator(np.random.PCG64(seed))
    tables = list(halves.tables(draws=SPLITS, random=random)) if found.sets else []
    splits = np.array(tables).reshape(len(tables), len(found.sets), len(found.sets))
    sets = {
        name: {**_set(found, number, options, level=level), **_ceiling(splits[:, number, number], level)}
        for number, name in enumerate(found.sets)
    }
    whole = agreement.of_table(scores, names=found.entrants, draws=options.get("draws", RESAMPLES), seed=seed)
    low, high = whole.interval or (None, None)
    apart = ~np.eye(len(found.sets), dtype=bool)
    if m < of_rounds.INFORMATIVE:
        notes.append(
            f"not informative: agreement of {counted(m, 'entrant')} is mostly chance (fewer than {of_rounds.INFORMATIVE})"
        )
    return {
        "entrants": m,
        "sets": sets,
        "pairs": _set_pairs(found.sets, scores, splits, options),
        "tau_b": whole.mean,
        "tau_b_low": low,
        "tau_b_high": high,
        **_ceiling(np.diagonal(splits, axis1=1, axis2=2), level),
        "half_agreement": number(_mean(splits[:, apart])),
        "level": level,
        "splits": SPLITS,
        "notes": notes,
    }


def _set(found: Items, place: int, options: StabilityOptions, *, level: float) -> dict[str, Any]:
    """One set: how many examples, and each entrant's accuracy or score, its interval and its rank set."""
    alone, name = found.alone(place), found.sets[place]
    ranks: RankOptions = {"level": level, "lower_is_better": name in options.get("lower", ())}
    if "rank_sets" in options:
        ranks["sets"] = options["rank_sets"]
    counted = alone.binary and len(found.seeds) == 1 and not alone.clustered
    rows = []
    for row in ranked(alone, ranks)["ranking"]:
        values = alone.values[0][found.entrants.index(row["entrant"])]
        scored = int((~np.isnan(values)).sum())
        if counted:
            right = int(np.nansum(values))
            low, high = _clopper_pearson(right, scored, level)
        else:
            right, (low, high) = None, _by_t(row["score"], row["se"], len(np.unique(alone.places[0])), level)
        rows.append({**row, "n": scored, "correct": right, "low": low, "high": high})
    return {
        "n": int(alone.values[0].shape[2]),
        "clusters": len(np.unique(alone.places[0])),
        "interval": "clopper-pearson" if counted else "t",
        "ranking": rows,
    }


def _set_pairs(names: Sequence[str], scores: Floats, splits: Floats, options: StabilityOptions) -> list[dict[str, Any]]:
    rows = []
    for i, j in combinations(range(len(names)), 2):
        one = agreement.of_table(
            scores[:, [i, j]],
            names=[str(place) for place in range(len(scores))],
            draws=options.get("draws", RESAMPLES),
            seed=options.get("seed", 1),
        )
        low, high = one.interval or (None, None)
        half = number(_mean(splits[:, [i, j], [j, i]]))
        ceiling = number(_mean(splits[:, [i, j], [i, j]]))
        rows.append(
            {
                "sets": [names[i], names[j]],
                "tau_b": one.mean,
                "tau_b_low": low,
                "tau_b_high": high,
                "half_agreement": half,
                "noise_ceiling": ceiling,
            }
        )
    return rows


def _ceiling(values: Floats, level: float) -> dict[str, float | None]:
    """Mean agreement of two halves of the same items, and the interval in which it falls from split to split."""
    means = [value for value in (_mean(row) for row in values) if not np.isnan(value)]
    if not means:
        return {"noise_ceiling": None, "noise_ceiling_low": None, "noise_ceiling_high": None}
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return {"noise_ceiling": float(np.mean(means)), "noise_ceiling_low": low, "noise_ceiling_high": high}


def _mean(values: Any) -> float:
    known = np.asarray(values)[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def _pairs(found: Items, options: CompareOptions) -> list[tuple[str, str]]:
    """All pairs, the better one first; where the test has a side, each pair both ways."""
    known = [name for name, score in zip(found.entrants, found.scores(), strict=True) if score is not None]
    if options.get("alternative", "two-sided") != "two-sided":
        return list(permutations(known, 2))
    scores = dict(zip(found.entrants, found.scores(), strict=True))
    turn = 1.0 if options.get("lower_is_better") else -1.0
    return list(combinations(sorted(known, key=lambda name: (turn * (scores[name] or 0.0), name)), 2))


def _compared(found: Items, pairs: Sequence[tuple[str, str]], options: CompareOptions) -> list[dict[str, Any]]:
    """Each pair on the examples that both have; the signs are the same for all pairs."""
    turn = -1.0 if options.get("lower_is_better") else 1.0
    apart = np.zeros((len(found.clusters), len(pairs)))
    rows = []
    for place, (one, other) in enumerate(pairs):
        both, gone = found.of([found.entrants.index(one), found.entrants.index(other)]).shared()
        parts = both.contributions()
        apart[:, place] = (parts[0] - parts[1]) * turn
        rows.append({"a": one, "b": other, **_pair(both, apart[:, place], options), "left_out": gone})
    drawn = flips(options, *apart.shape)
    found_p = paired.sign_flip(
        apart, alternative=options.get("alternative", "two-sided"), draws=drawn, seed=options.get("seed", 1)
    )
    floors = paired.least(apart, draws=drawn)
    return [
        {**row, "permutation_p": p, "permutation_least_p": floor}
        for row, p, floor in zip(rows, found_p, floors, strict=True)
    ]


def _floors(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the number of random flips keeps the permutation test from saying."""
    reached = [row["permutation_least_p"] for row in rows if row["permutation_p"] == row["permutation_least_p"]]
    if not reached:
        return []
    floor, count = reached[0], len(rows)
    drawn = round(1 / floor) - 1
    notes = [f"the permutation test flips the signs at random, {drawn:,} times: its p is never below {floor:.2g}"]
    if count > 1 and count * floor > 0.05:
        notes.append(
            f"over {count:,} pairs no p of it is below {min(1.0, count * floor):.2g} by Holm, so that it can't show that any pair differs; "
            "Wilcoxon's has no such floor"
        )
    return notes


def _pair(both: Items, apart: Floats, options: CompareOptions) -> dict[str, Any]:
    """Two entrants; apart: [clusters], what each adds to how much better the first is."""
    if not both.sets or not all(value.shape[2] for value in both.values):
        names = " and ".join(map(repr, both.entrants))
        raise Refusal(
            "scores_invalid", f"{names} have no example in common in some set", hint="choose sets with --tasks"
        )
    se_paired, se_unpaired = confidence.difference_errors(both.errors(), 0, 1)
    scores = [score or 0.0 for score in both.scores()]
    difference, units = scores[0] - scores[1], len(np.unique(np.concatenate(both.places)))
    side = options.get("alternative", "two-sided")
    low, high = _by_t(difference, number(se_paired), units, confidence_level(options.get("level", 0.95)))
    counted = both.binary and not both.clustered and len(both.seeds) == len(both.sets) == 1
    more, less = int((apart > 0).sum()), int((apart < 0).sum())
    return {
        "n": sum(value.shape[2] for value in both.values),
        "clusters": units,
        "score_a": scores[0],
        "score_b": scores[1],
        "difference": difference,
        "low": low,
        "high": high,
        "se_paired": number(se_paired),
        "se_unpaired": number(se_unpaired),
        "only_a": more if counted else None,
        "only_b": less if counted else None,
        "mcnemar_p": paired.mcnemar(more, less, side) if counted else None,
        "wilcoxon_p": paired.wilcoxon(apart, side),
        "wilcoxon_p_one_sided": paired.wilcoxon(apart, "greater"),
    }


def _clopper_pearson(right: int, n: int, level: float) -> tuple[float | None, float | None]:
    from scipy import stats

    if not n:
        return None, None
    interval = stats.binomtest(right, n).proportion_ci(level, method="exact")
    return float(interval.low), float(interval.high)


def _by_t(mean: float, error: float | None, clusters: int, level: float) -> tuple[float | None, float | None]:
    """The interval of a mean by t with one degree of freedom fewer than clusters."""
    from scipy import stats

    if error is None or clusters < 2:
        return None, None
    reach = float(stats.t.ppf((1 + level) / 2, clusters - 1)) * error
    return mean - reach, mean + reach


def _described(found: Items) -> list[str]:
    """What the scores are of, where it is more than one mean."""
    notes = []
    if len(found.sets) > 1:
        notes.append(f"scores are means over {len(found.sets)} sets of each one's mean: {listed(found.sets)}")
    if len(found.seeds) > 1:
        notes.append(f"scores are means over {len(found.seeds)} seeds")
    if found.clustered:
        notes.append(f"errors are by cluster: {len(found.clusters)} clusters")
    if found.repeated:
        kind, several = ("cluster" if found.clustered else "example"), found.repeated > 1
        notes.append(
            f"{counted(found.repeated, kind)} of {len(found.clusters)} {'stand' if several else 'stands'} in several sets under one name: errors take them as the same"
        )
    return notes
