"""The report as data: each section has one plot, the plot's numbers as tables, one sentence computed from them, and what they can't carry."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from acclimate import plots, report_plots, ways_plot
from acclimate.plots import number, plain
from acclimate.report_data import PROTOCOLS, RoundScores
from acclimate_competitions import agreement, paired, rank_draws, stability, ways
from acclimate_competitions.items import Items
from acclimate_competitions.scores import Floats

LEVEL = 0.05
"""Of Holm's adjusted p."""
COMPARED = 20
"""Entrants whose pairs are tested, the best ones: with more, no p of so many draws could pass Holm's adjustment."""
PLOTTED = 30
"""Entrants and ranks that the plot of bootstrap ranks shows, the best ones: more can't be read on paper."""
SAMPLES = 2_000
"""Of the bootstrap of examples."""
SPLITS = 400
"""Of examples into halves, and permutations."""
WAYS = {
    "mean": "mean: of the scores",
    "mean_rank": "mean of ranks: on each example",
    "win_rate": "win rate: share of others beaten",
    "test_then_rank": "tests won: share of others beaten significantly",
    "bradley_terry": "Bradley-Terry: strength by what is won on examples",
}
"""What each way to rank is called, and what it is."""


@dataclass(frozen=True)
class Table:
    """Numbers of a plot.

    Attributes:
        caption: what they are.
        heads: of the columns; one with * holds names.
        rows: texts.
    """

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """One statement of the report.

    Attributes:
        key: its name in the JSON form, and its anchor.
        title: its heading.
        sentence: what the plot shows, from the data.
        caveats: what the data can't carry.
        svg: the plot; empty where there is nothing to show.
        tables: the plot's numbers.
        numbers: the same for programs.
    """

    key: str
    title: str
    sentence: str
    caveats: tuple[str, ...] = ()
    svg: str = ""
    tables: tuple[Table, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """JSON-ready, without the plot."""
        return {key: value for key, value in asdict(self).items() if key not in ("svg", "tables")}


def of_round(found: RoundScores, *, seed: int = 1) -> list[Section]:
    """The sections of one round."""
    made = [_ranks(found), _slope(found)]
    if found.main is None:
        return made
    effects = _effects(found, seed=seed)
    return [
        *made,
        _agreement(found, effects),
        _significance(found, found.main, seed=seed),
        _podium(found, found.main, seed=seed),
        _ways(found, found.main),
        _preparation(found, effects),
    ]


def of_examples(found: RoundScores, *, seed: int = 1) -> list[Section]:
    """The sections that a published ranking and its stability don't say: they need scores by example; none where there are none."""
    if found.main is None:
        return []
    return [_significance(found, found.main, seed=seed), _podium(found, found.main, seed=seed)]


def _few(found: RoundScores) -> tuple[str, ...]:
    m = len(found.ranking["ranking"])
    few = (
        f"not informative: {m} entrants are fewer than {stability.INFORMATIVE}, most of what such numbers say is chance",
    )
    return few if m < stability.INFORMATIVE else ()


def _ranks(found: RoundScores) -> Section:
    rows = found.ranking["ranking"]
    title, interval = "Ranks and how sure they are", found.ranking["policy"]["interval"]
    if not rows:
        return Section("ranks", title, "No entrant stands in this ranking.", numbers={"ranking": []})
    first = [plain(row["entrant"]) for row in rows if row["rank"] == 1]
    best = sum(row["rank_low"] == 1 for row in rows)
    sentence = f"First {'is' if len(first) == 1 else 'are'} {', '.join(first)}; the data leave {best} of {len(rows)} entrants possible as the best."
    caveats = ["one task only: another task may order the entrants otherwise"] if _tasks(found) == 1 else []
    missing = [note for note in found.notes if "missing" in note]
    if found.private:
        caveats.append(
            "the holdout stays private: without scores of single examples only the published ranking can be shown"
        )
    if len(rows) == 1:
        caveats.append("one entrant: there is nobody to rank it against")
    heads = ("rank", "interval", "*entrant", "score", "± se", "direct rank", "direct score", "n")
    cells = tuple(
        (
            str(row["rank"]),
            f"{row['rank_low']}–{row['rank_high']}",
            plain(row["entrant"]),
            number(row["score"], 4),
            number(row["se"], 4),
            "–" if row["direct_rank"] is None else str(row["direct_rank"]),
            number(row["direct_score"], 4),
            "–" if row["n"] is None else str(row["n"]),
        )
        for row in rows
    )
    caption = f"Ranks with {interval['kind']} {interval['level']:.0%} confidence sets"
    numbers = {"ranking": [dict(row) for row in rows], "interval": dict(interval)}
    picture = plots.rank_intervals(found.ranking)
    return Section("ranks", title, sentence, (*caveats, *missing), picture, (Table(caption, heads, cells),), numbers)


def _tasks(found: RoundScores) -> int:
    return len(found.main.sets) if found.main is not None else len(found.ranking["tasks"])


def _slope(found: RoundScores) -> Section:
    title, rows = "From direct evaluation to preparation", found.ranking["ranking"]
    if not rows or any(row["direct_rank"] is None for row in rows):
        return Section(
            "slope", title, "There is no evaluation under both protocols: what preparation changed can't be told."
        )
    moved = [(row["rank"] - row["direct_rank"], row["entrant"]) for row in rows]
    changed = sum(step != 0 for step, _ in moved)
    fall, who = max(moved)
    sentence = f"Preparation changed the rank of {changed} of {len(rows)} entrants"
    sentence += f"; most ranks, {fall}, were lost by {plain(who)}." if fall > 0 else "; nobody lost a rank."
    cells = tuple(
        (
            plain(row["entrant"]),
            str(row["direct_rank"]),
            str(row["rank"]),
            f"{row['rank'] - row['direct_rank']:+d}".replace("-", "−").replace("+0", "0"),
        )
        for row in rows
    )
    table = Table(
        "Ranks before and after preparation", ("*entrant", "direct rank", "prepared rank", "ranks lost"), cells
    )
    moves = [{"entrant": row["entrant"], "direct_rank": row["direct_rank"], "rank": row["rank"]} for row in rows]
    caveats = ("changes within the rank intervals may be noise",)
    return Section("slope", title, sentence, caveats, plots.slope(found.ranking), (table,), {"moves": moves})


def _matrix(items: Items, *, lower: bool) -> Floats:
    """[m, sets], larger is better."""
    sign = -1.0 if lower else 1.0
    return sign * np.array(items.means(), dtype=np.float64).T.reshape(len(items.entrants), len(items.sets))


def _effects(found: RoundScores, *, seed: int) -> dict[str, stability.Effect]:
    effects = {}
    for protocol in (name for name in PROTOCOLS if name in found.items):
        items = found.items[protocol]
        scores = _matrix(items, lower=found.lower)
        order = agreement.canonical(scores, items.entrants)
        values = [value[order] * (-1.0 if found.lower else 1.0) for value in items.values]
        halves = stability.Halves.of_values(values, items.places, count=len(items.clusters))
        random = np.random.Generator(np.random.PCG64(seed))
        effects[protocol] = stability.effect(scores[order], halves, draws=SPLITS, random=random)
    return effects


def _agreement(found: RoundScores, effects: Mapping[str, stability.Effect]) -> Section:
    title = "Agreement between tasks, and what noise allows"
    assert found.main is not None
    tasks = [name or "all examples" for name in found.main.sets]
    summary = {
        f"{kind}{protocol}": getattr(effects[protocol], attribute) if protocol in effects else None
        for protocol in PROTOCOLS
        for kind, attribute in (("", "agreement"), ("half_", "half"), ("ceiling_", "ceiling"))
    }
    if len(tasks) < 2:
        sentence = "There is one task: tasks can't agree or disagree."
        return Section("agreement", title, sentence, ("one task",), numbers={"summary": summary, "tasks": tasks})
    parts, tables = [], []
    for protocol, effect in effects.items():
        part = f"{protocol}, mean tau-b {number(effect.agreement)}, of halves {number(effect.half)} where noise allows {number(effect.ceiling)}"
        if effect.interval is not None:
            part += f" (tau-b {number(effect.interval[0])} to {number(effect.interval[1])} over entrants)"
        parts.append(part)
        rows = tuple(
            (plain(task), *(number(value) for value in effect.pairs[place]), number(effect.ceilings[place]))
            for place, task in enumerate(tasks)
        )
        tables.append(Table(f"tau-b between tasks, {protocol}", ("*task", *map(plain, tasks), "noise ceiling"), rows))
    cells = tuple(
        (name, number(effect.agreement), number(effect.half), number(effect.ceiling))
        for name, effect in effects.items()
    )
    tables.append(Table("Means over pairs of tasks", ("*protocol", "tau-b", "of halves", "ceiling of halves"), cells))
    plain_effects = {name: {"pairs": effect.pairs, "ceilings": effect.ceilings} for name, effect in effects.items()}
    svg = plots.agreement({"tasks": tasks, "agreement": summary, "effects": plain_effects})
    caveats = (
        "the ceiling is to be held against the agreement of halves, which rests on as many examples",
        *_few(found),
    )
    numbers = {
        "summary": summary,
        "tasks": tasks,
        "effects": {name: asdict(effect) for name, effect in effects.items()},
    }
    return Section(
        "agreement", title, f"How far tasks agree: {'; '.join(parts)}.", caveats, svg, tuple(tables), numbers
    )


def _significance(found: RoundScores, items: Items, *, seed: int) -> Section:
    title = "Which differences are significant"
    scores = dict(zip(items.entrants, items.scores(), strict=True))
    sign = -1.0 if found.lower else 1.0
    ranked = sorted(scores, key=lambda name: (-sign * (scores[name] or 0.0), name))
    names = ranked[:COMPARED]
    pairs = list(combinations(names, 2))
    if not pairs:
        return Section("significance", title, "There are no two entrants to compare.", numbers={"pairs": []})
    parts = sign * items.contributions()
    place = {name: number for number, name in enumerate(items.entrants)}
    apart = np.array([parts[place[one]] - parts[place[other]] for one, other in pairs]).T
    adjusted = paired.holm(list(paired.sign_flip(apart, draws=max(9_999, 200 * len(pairs)), seed=seed)))
    signed: list[list[float | None]] = [[None] * len(names) for _ in names]
    rows: list[dict[str, Any]] = []
    told = 0
    for (one, other), p, difference in zip(pairs, adjusted, apart.sum(axis=0).tolist(), strict=True):
        i, j, value = names.index(one), names.index(other), p or 0.0
        signed[i][j], signed[j][i] = value, -value if value > 0 else -1e-12
        told += value <= LEVEL
        rows.append(
            {"a": one, "b": other, "difference": sign * difference, "p_holm": value, "significant": value <= LEVEL}
        )
    sentence = f"{told} of {len(pairs)} pairs differ significantly (sign-flip permutation, Holm, p ≤ {LEVEL:g})."
    caveats = [f"only the best {COMPARED} of {len(ranked)} are compared"] if len(ranked) > COMPARED else []
    if len(items.seeds) > 1:
        caveats.append(
            "the tests take the seeds of preparation as given, the ranks' intervals count them, too: a pair may differ here, and its ranks overlap"
        )
    if len(items.clusters) < 6:
        caveats.append(f"{len(items.clusters)} independent examples are too few for any test to tell entrants apart")
    cells = tuple(
        (
            plain(row["a"]),
            plain(row["b"]),
            number(row["difference"], 4),
            number(row["p_holm"], 4),
            "yes" if row["significant"] else "no",
        )
        for row in rows
    )
    heads = ("*entrant", "*compared with", "difference", "p by Holm", "significant")
    svg = report_plots.significance(names, signed, level=LEVEL)
    return Section(
        "significance", title, sentence, tuple(caveats), svg, (Table("All pairs", heads, cells),), {"pairs": rows}
    )


def _podium(found: RoundScores, items: Items, *, seed: int) -> Section:
    title = "Ranks if other examples had been drawn"
    if not items.entrants or not items.clusters:
        return Section("podium", title, "No entrant has scores.", numbers={"ranks": {}})
    shares = rank_draws.bootstrap_ranks(items, draws=SAMPLES, seed=seed, lower_is_better=found.lower)
    mean = shares @ np.arange(1, len(shares) + 1)
    order = sorted(range(len(shares)), key=lambda place: (mean[place], items.entrants[place]))
    names = [items.entrants[place] for place in order]
    held = shares[order].tolist()
    firsts = [row[0] for row in held]
    often = max(range(len(names)), key=lambda place: firsts[place])
    sentence = f"{plain(names[often])} is first in {firsts[often]:.0%} of {SAMPLES} bootstrap samples of the examples, seeds and tasks kept."
    cells = tuple(
        (
            plain(name),
            number(float(mean[order[place]]), 2),
            *(f"{row[r]:.1%}" for r in range(min(3, len(row)))),
            _span(row),
        )
        for place, (name, row) in enumerate(zip(names, held, strict=True))
    )
    tops = tuple(f"rank {r + 1}" for r in range(min(3, len(names))))
    table = Table(
        "Share of samples, and the ranks that hold 95 % of them",
        ("*entrant", "mean rank", *tops, "95 % of ranks"),
        cells,
    )
    caveats = [
        "the bootstrap repeats the noise of the examples that were drawn: these shares are no confidence sets, which stand above"
    ]
    if len(names) > PLOTTED:
        caveats.append(
            f"the plot shows the best {PLOTTED} of {len(names)} entrants and ranks 1 to {PLOTTED}; the table has all"
        )
    picture = report_plots.podium(names[:PLOTTED], [row[:PLOTTED] for row in held[:PLOTTED]])
    numbers = {"samples": SAMPLES, "ranks": dict(zip(names, held, strict=True))}
    return Section("podium", title, sentence, tuple(caveats), picture, (table,), numbers)


def _ways(found: RoundScores, items: Items) -> Section:
    title = "If another way of ranking had been chosen"
    if not items.entrants or not all(value.shape[2] for value in items.values) or not items.sets:
        return Section("ways", title, "No entrant has scores.", numbers={"ranks": {}})
    made = ways.ways(items, lower_is_better=found.lower)
    order = sorted(range(len(items.entrants)), key=lambda place: (made.ranks["mean"][place], items.entrants[place]))
    names = [items.entrants[place] for place in order]
    ranked = {way: [made.ranks[way][place] for place in order] for way in ways.WAYS if way in made.ranks}
    spans = [(made.low[place], made.high[place]) for place in order]
    firsts = {way: {name for name, rank in zip(names, row, strict=True) if rank == 1} for way, row in ranked.items()}
    same = all(one == firsts["mean"] for one in firsts.values())
    moved, who = max((high - low, name) for (low, high), name in zip(spans, names, strict=True))
    sentence = (
        f"{len(ranked)} ways of ranking the same scores {'have the same first' if same else 'differ in who is first'}"
    )
    sentence += f"; most by the choice of a way moves {plain(who)}, by {moved}." if moved else "; no rank moves."
    caveats = [
        "ranks that move with the way are not to be insisted on; the published ranks are by the way that the definition declares"
    ]
    if items.binary and len(items.seeds) == 1:
        alike = "where each example is right or wrong, means, ranks on examples and Bradley-Terry must give one order"
        caveats.append(f"{alike}{' in each task' if len(items.sets) > 1 else ''}: that these agree shows nothing")
    caveats += [
        f"{_called(way)}: undefined, as some entrants never lose to the others"
        for way in ways.WAYS
        if way not in ranked
    ]
    if len(names) > PLOTTED:
        caveats.append(f"the plot shows the best {PLOTTED} of {len(names)} entrants; the table has all")
    cells = tuple(
        (plain(name), *(str(row[place]) for row in ranked.values()), f"{low}–{high}")
        for place, (name, (low, high)) in enumerate(zip(names, spans, strict=True))
    )
    taus = tuple(
        (_called(one), *("" if one == other else number(made.tau[one][other]) for other in ranked)) for one in ranked
    )
    heads = tuple(map(_called, ranked))
    tables = (
        Table("Rank by way", ("*entrant", *heads, "between"), cells),
        Table("tau-b between the orders of two ways", ("*way", *heads), taus),
    )
    picture = ways_plot.ranks(names[:PLOTTED], {WAYS[way]: row[:PLOTTED] for way, row in ranked.items()})
    numbers = {"ranks": {way: dict(zip(names, row, strict=True)) for way, row in ranked.items()}, "tau_b": made.tau}
    return Section("ways", title, sentence, tuple(caveats), picture, tables, numbers)


def _called(way: str) -> str:
    return WAYS[way].split(":")[0]


def _span(row: Sequence[float]) -> str:
    total = np.cumsum(row)
    low, high = int(np.searchsorted(total, 0.025)) + 1, int(np.searchsorted(total, 0.975 - 1e-12)) + 1
    return f"{low}–{min(high, len(row))}"


def _preparation(found: RoundScores, effects: Mapping[str, stability.Effect]) -> Section:
    title = "What preparation changed"
    if set(effects) != set(PROTOCOLS):
        return Section("preparation", title, "Scores are of one protocol only: an effect of preparation can't be told.")
    direct, prepared = found.items["direct"], found.items["prepared"]
    before, after = (_matrix(found.items[name], lower=found.lower) for name in PROTOCOLS)
    winners: list[dict[str, Any]] = []
    for place, task in enumerate(direct.sets):
        first = [
            [
                name
                for name, score in zip(direct.entrants, scores[:, place], strict=True)
                if score == scores[:, place].max()
            ]
            for scores in (before, after)
        ]
        changed = not set(first[0]) & set(first[1])
        winners.append({"task": task or "all examples", "direct": first[0], "prepared": first[1], "changed": changed})
    falls = sorted(
        (
            {"entrant": row["entrant"], "lost": row["rank"] - (row["direct_rank"] or row["rank"])}
            for row in found.ranking["ranking"]
        ),
        key=lambda row: (-row["lost"], row["entrant"]),
    )
    shares = {name: (effect.component, effect.component_null) for name, effect in effects.items()}
    count = sum(row["changed"] for row in winners)
    one, two = (number(shares[name][0]) for name in PROTOCOLS)
    sentence = (
        f"The winner changed in {count} of {len(winners)} tasks; the first component holds {one} of the scores' variance "
        f"before preparation and {two} after, {number(shares['prepared'][1])} by chance."
    )
    caveats = ["one task: its first component is all there is"] if len(prepared.sets) == 1 else []
    tables = (
        Table("Share of the first principal component", ("*protocol", "share", "by chance"), tuple((name, number(a), number(b)) for name, (a, b) in shares.items())),
        Table(
            "Who is first", ("*task", "*direct", "*prepared", "changed"),
            tuple((plain(row["task"]), _joined(row["direct"]), _joined(row["prepared"]), "yes" if row["changed"] else "no") for row in winners),
        ),
        Table("Ranks lost over all tasks", ("*entrant", "ranks lost"), tuple((plain(row["entrant"]), f"{row['lost']:+d}".replace("-", "−").replace("+0", "0")) for row in falls)),
    )  # fmt: skip
    numbers = {
        "winners": winners,
        "lost": falls,
        "components": {name: {"share": a, "null": b} for name, (a, b) in shares.items()},
    }
    svg = report_plots.components(shares)
    return Section("preparation", title, sentence, (*caveats, *_few(found)), svg, tables, numbers)


def _joined(names: Sequence[str]) -> str:
    return ", ".join(map(plain, names)) or "–"
