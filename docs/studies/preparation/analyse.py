"""Tables, plots and sentences of the study, from what `play.py` kept: writes findings.md and agreement.svg beside this program.

    python docs/studies/preparation/analyse.py

It needs no server, and says of itself what is still missing.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import play
import pyarrow.parquet as pq

from acclimate import plots
from acclimate_competitions import stability

HERE = Path(__file__).parent
PROTOCOLS = ("direct", "prepared")
DRAWS = 400
REPLICATES = 2000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Played:
    """A finished round.

    Attributes:
        about: what play.py wrote with it.
        entrants: names, in the order of the arrays.
        values: protocol -> one array a task, [entrants, seeds, examples], of 0 and 1.
    """

    about: dict[str, Any]
    entrants: list[str]
    values: dict[str, list[Floats]]

    def scores(self, protocol: str) -> Floats:
        """[entrants, tasks]: mean over seeds and examples."""
        return np.stack([task.mean(axis=(1, 2)) for task in self.values[protocol]], axis=1)

    @property
    def capacity(self) -> Floats:
        """Of each entrant, [entrants, 1]."""
        return np.array([[self.about["capacity"][name]] for name in self.entrants])

    def of(self, names: Sequence[str]) -> "Played":
        """The same round, of these entrants alone: nobody's scores depend on who else was there."""
        places = [self.entrants.index(name) for name in names]
        values = {protocol: [task[places] for task in tasks] for protocol, tasks in self.values.items()}
        return Played(self.about, list(names), values)

    def effect(self, protocol: str) -> stability.Effect:
        """Agreement between tasks, its interval, ceiling and halves."""
        values = self.values[protocol]
        count = values[0].shape[2]
        places = [np.arange(count)] * len(values)  # all tasks ask about the same images
        halves = stability.Halves.of_values(values, places, count=count)
        return stability.effect(self.scores(protocol), halves, draws=DRAWS, random=np.random.default_rng(1))


def read(path: Path) -> Played:
    """A round that play.py kept."""
    table = pq.read_table(path)
    about = json.loads(table.schema.metadata[b"study"])
    size, tasks = play.SIZES[about["which"]], play.tasks()
    found: dict[tuple[str, str, str], list[Floats]] = {}
    for row in sorted(table.to_pylist(), key=lambda row: row["seed"] or 0):
        bits = np.unpackbits(np.frombuffer(row["bits"], dtype=np.uint8), count=size).astype(np.float64)
        found.setdefault((row["protocol"], row["task"], row["entrant"]), []).append(bits)
    names = sorted({entrant for _, _, entrant in found})
    values = {
        protocol: [np.stack([np.stack(found[protocol, task, name]) for name in names]) for task in tasks]
        for protocol in PROTOCOLS
    }
    return Played(about, names, values)


def rounds(results: Path, part: play.Part) -> list[Played]:
    """The finished rounds of a part."""
    paths = [play.result(part, which, results) for which in part.rounds]
    return [read(path) for path in paths if path.exists()]


# ---- numbers ---------------------------------------------------------------------------------------------------------


def pooled(repetitions: Sequence[Sequence[Played]]) -> dict[str, tuple[float, float, float]]:
    """Mean tau-b between tasks over all rounds, direct, prepared and the difference, each with a 95 % bootstrap interval.

    Repetitions are drawn, and in each its entrants, the same for both protocols and both rounds.
    """
    random = np.random.default_rng(2)
    tables = [[[played.scores(protocol) for protocol in PROTOCOLS] for played in one] for one in repetitions]

    def means(drawn: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> Floats:
        found = [
            [_known(stability.agreement(scores[chosen])) for scores in both]
            for one, chosen in drawn
            for both in tables[one]
        ]
        return np.nanmean(np.array(found), axis=0)

    sizes = [len(one[0].entrants) for one in repetitions]
    value = means([(one, np.arange(size)) for one, size in enumerate(sizes)])
    drawn = np.array(
        [
            means(
                [
                    (one, random.integers(0, sizes[one], sizes[one]))
                    for one in random.integers(0, len(sizes), len(sizes))
                ]
            )
            for _ in range(REPLICATES)
        ]
    )
    found = {}
    for name, at, every in (
        *((protocol, value[place], drawn[:, place]) for place, protocol in enumerate(PROTOCOLS)),
        ("difference", value[1] - value[0], drawn[:, 1] - drawn[:, 0]),
    ):
        low, high = np.quantile(every, [0.025, 0.975]).tolist()
        found[name] = float(at), low, high
    return found


def between(first: Played, second: Played, protocol: str) -> dict[str, float]:
    """Agreement of two rounds' rankings by mean score: of the whole rounds, of halves, and of the first round's own halves (the ceiling).

    The rounds have the same seeds and public rows, so their prepared models are the same. Halves of different rounds therefore are of
    disjoint seeds, as those of one round are, and of as many.
    """
    random = np.random.default_rng(3)
    whole = stability.tau(_overall(first.values[protocol]), _overall(second.values[protocol]))[0, 0]
    halves, own = [], []
    for _ in range(DRAWS):
        seeds = random.permutation(first.values[protocol][0].shape[1])
        (a, b), (_, c) = (_split(played.values[protocol], seeds, random) for played in (first, second))
        halves.append(stability.tau(a, c)[0, 0])
        own.append(stability.tau(a, b)[0, 0])
    return {"whole": float(whole), "halves": float(np.nanmean(halves)), "ceiling": float(np.nanmean(own))}


def _overall(values: Sequence[Floats]) -> Floats:
    return np.mean([task.mean(axis=(1, 2)) for task in values], axis=0)[:, None]


def _split(
    values: Sequence[Floats], seeds: npt.NDArray[np.int64], random: np.random.Generator
) -> tuple[Floats, Floats]:
    """Mean scores by a random half of the images and the first half of the seeds, and by the others; a single seed is in both."""
    images = random.permutation(values[0].shape[2])
    middle, few = len(images) // 2, len(seeds) // 2
    parts = [(seeds[:few] if few else seeds, images[:middle]), (seeds[few:], images[middle:])]
    one, other = (_overall([task[:, of][:, :, at] for task in values]) for of, at in parts)
    return one, other


def exposed(played: Played) -> list[tuple[str, str, int, int]]:
    """Each crammer, its task, and its rank there as submitted and prepared."""
    ranks = {
        protocol: 1 + (played.scores(protocol)[:, None, :] < played.scores(protocol)[None, :, :]).sum(axis=1)
        for protocol in PROTOCOLS
    }
    tasks, found = play.tasks(), []
    for name, task in sorted(played.about["crammed"].items()):
        place = played.entrants.index(name), tasks.index(task)
        found.append((name, task, int(ranks["direct"][place]), int(ranks["prepared"][place])))
    return found


def _known(value: float | None) -> float:
    return math.nan if value is None else value


# ---- the page --------------------------------------------------------------------------------------------------------


def page(results: Path) -> str:
    """findings.md."""
    parts = play.parts()
    main = [found for part in parts if part.entrants == 24 and len(found := rounds(results, part)) == len(play.ROUNDS)]
    controls = [(part, found) for part in parts if part.entrants == 12 and (found := rounds(results, part))]
    there = sum(play.result(part, which, results).exists() for part in parts for which in part.rounds)
    whole = sum(len(part.rounds) for part in parts)
    lines = [
        "# What came out",
        "",
        "Made by `analyse.py` from the files in `results`; nothing here is written by hand.",
        "",
    ]
    if there < whole:
        lines += [
            f"**Partial: {there} of {whole} rounds have been played, {len(main)} of {play.REPETITIONS} repetitions are whole.**",
            "",
        ]
    if main:
        lines += _main(main)
    if controls:
        lines += _controls(controls, rounds(results, parts[0]))
    return "\n".join(lines)


def _main(main: Sequence[Sequence[Played]]) -> list[str]:
    found = pooled(main)
    low, high = found["difference"][1:]
    if low > 0:
        verdict = "rises with the mandated preparation"
    elif high < 0:
        verdict = "falls with the mandated preparation"
    else:
        verdict = "is not shown to change with the mandated preparation: the interval holds 0"
    lines = [
        "## Agreement between tasks",
        "",
        f"24 entrants of unequal practice, six tasks, {_repetitions(len(main))}. Mean Kendall tau-b over the 15 pairs of tasks {verdict}.",
        "",
        "| | mean tau-b | 95 % interval |",
        "| --- | --- | --- |",
        *(f"| {name} | {_n(value)} | {_n(low)} to {_n(high)} |" for name, (value, low, high) in found.items()),
        "",
        "The interval is of 2,000 draws of repetitions and of entrants in them.",
        "",
        "| repetition, round | direct | prepared | … of halves | ceiling | first component, null | with capacity |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for number, both in enumerate(main, start=1):
        for played in both:
            lines.append(_row(f"{number}, {played.about['which']}", played))
    lines += [
        "",
        "Each cell: direct → prepared. *Of halves* is the agreement of different tasks by disjoint halves of images and seeds, *ceiling* that of a task with",
        "itself by such halves: only these two may be compared. *First component* is its share of the variance of the score matrix, and the same after each",
        "column was permuted. *With capacity* is tau-b of the mean score with what `play.py` declares as capacity.",
        "",
        "![Mean tau-b between tasks, direct and prepared, by round](agreement.svg)",
        "",
        "## Agreement between the two rounds",
        "",
        "Rankings by mean score over six tasks, two holdouts with no image in common. Only the two columns of halves may be compared: they are of as many",
        "images and seeds, and what they compare has no seed in common. Of whole rounds the prepared models are the same, seed by seed.",
        "",
        "| repetition | whole rounds | halves of different rounds | halves of the first round (ceiling) |",
        "| --- | --- | --- | --- |",
    ]
    for number, both in enumerate(main, start=1):
        at = [between(both[0], both[1], protocol) for protocol in PROTOCOLS]
        lines.append(
            f"| {number} | "
            + " | ".join(_arrow(at[0][name], at[1][name]) for name in ("whole", "halves", "ceiling"))
            + " |"
        )
    lines += [
        "",
        "## Who had crammed one task",
        "",
        "| repetition | entrant | task | rank there in the first round, of 24 |",
        "| --- | --- | --- | --- |",
    ]
    for number, both in enumerate(main, start=1):
        lines += [
            f"| {number} | {name} | {task} | {direct} → {prepared} |"
            for name, task, direct, prepared in exposed(both[0])
        ]
    return [*lines, ""]


def _repetitions(count: int) -> str:
    if count == 1:
        return "one repetition of two rounds, so that the intervals know nothing of how repetitions differ"
    return f"{count} repetitions of two rounds"


def _controls(controls: Sequence[tuple[play.Part, Sequence[Played]]], whole: Sequence[Played]) -> list[str]:
    twelve = [spec.name for spec in play.specs(play.Part("", 1, entrants=12))]
    lines = [
        "## Controls",
        "",
        "Twelve entrants, one repetition, its first round. One repetition each: they show directions, not sizes. A dose is a number of steps of the",
        "mandated preparation. Its models are those of the first rows: the same twelve in repetition 1, where all had 150 steps.",
        "",
        "| control, round | direct | prepared | … of halves | ceiling | first component, null | with capacity |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_row(f"the same twelve, dose 150, {played.about['which']}", played.of(twelve)) for played in whole]
    for part, found in controls:
        lines += [_row(f"{part.name}, {played.about['which']}", played) for played in found]
    return [*lines, ""]


def _row(name: str, played: Played) -> str:
    direct, prepared = (played.effect(protocol) for protocol in PROTOCOLS)
    capacity = [
        stability.tau(played.scores(protocol).mean(axis=1)[:, None], played.capacity)[0, 0] for protocol in PROTOCOLS
    ]
    components = f"{_arrow(direct.component, prepared.component)}, {_n(prepared.component_null)}"
    cells = (
        _n(direct.agreement),
        _n(prepared.agreement),
        _arrow(direct.half, prepared.half),
        _arrow(direct.ceiling, prepared.ceiling),
        components,
        _arrow(*capacity),
    )
    return f"| {name} | " + " | ".join(cells) + " |"


def _arrow(left: float | None, right: float | None) -> str:
    return f"{_n(left)} → {_n(right)}"


def _n(value: float | None) -> str:
    return plots.number(value, 2)


def plot(results: Path) -> str:
    """agreement.svg: a line a round, from direct (open circle) to prepared (filled circle)."""
    shown = [(part.name, played) for part in play.parts() for played in rounds(results, part)]
    top, left, right, step = 46.0, 240.0, 700.0, 22.0
    bottom = top + step * len(shown)
    svg = plots.Svg(760, bottom + 50, title="Mean Kendall tau-b between tasks, as submitted and prepared")
    values = [[_known(stability.agreement(played.scores(protocol))) for protocol in PROTOCOLS] for _, played in shown]
    lowest = min(0.0, *(value for pair in values for value in pair if not math.isnan(value)), 0.0)

    def x(value: float) -> float:
        return left + (value - lowest) / (1 - lowest) * (right - left)

    for tick in range(round(lowest * 5), 6):
        svg.line((x(tick / 5), top - 8), (x(tick / 5), bottom), stroke=plots.FAINT)
        svg.text((x(tick / 5), bottom + 18), f"{tick / 5:.1f}", anchor="middle", fill=plots.GREY)
    svg.text((left, 22), "○ as submitted   ● prepared alike", fill=plots.INK)
    for row, ((name, played), (direct, prepared)) in enumerate(zip(shown, values, strict=True)):
        y = top + step * (row + 0.5)
        svg.text((left - 12, y + 4), f"{name}, {played.about['which']}", anchor="end", fill=plots.INK)
        if math.isnan(direct) or math.isnan(prepared):
            continue
        svg.line((x(direct), y), (x(prepared), y), stroke=plots.GREY)
        svg.add("circle", cx=f"{x(direct):.1f}", cy=f"{y:.1f}", r="5", fill="white", stroke=plots.INK)
        svg.add("circle", cx=f"{x(prepared):.1f}", cy=f"{y:.1f}", r="5", fill=plots.INK)
    svg.text(((left + right) / 2, bottom + 38), "mean tau-b over pairs of tasks", anchor="middle", fill=plots.GREY)
    return svg.document()


def main(results: Path) -> None:
    """Write the page and its plot beside this program."""
    (HERE / "findings.md").write_text(page(results), "utf-8")
    (HERE / "agreement.svg").write_text(plot(results), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results")
