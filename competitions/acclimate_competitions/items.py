"""Scores by example of any evaluation, as dense arrays in canonical order: what rankings and comparisons with the items' joint covariance need.

A set is what examples stand in: a test set, a task, a round. An entrant's score in a set is the mean over seeds of the mean over examples, its score
the mean over sets. A cluster's name, and so an example's where it has no other cluster, means the same in every set. What is not there is NaN.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from acclimate_competitions import confidence
from acclimate_competitions.errors import Refusal
from acclimate_competitions.scores import Bools, Floats, Ints, mean_over_seeds


@dataclass(frozen=True)
class Rows:
    """A long table by columns, all of one length.

    Attributes:
        entrants: who was scored.
        sets: the set of each example.
        examples: its name in the set.
        clusters: its cluster.
        seeds: of the evaluation; "" where there is none.
        scores: NaN where unscored.
    """

    entrants: Sequence[str]
    sets: Sequence[str]
    examples: Sequence[str]
    clusters: Sequence[str]
    seeds: Sequence[str]
    scores: Floats


@dataclass(frozen=True)
class Items:
    """Scores of m entrants in each set.

    Attributes:
        entrants: sorted.
        sets: sorted.
        seeds: sorted.
        clusters: sorted, over all sets.
        values: a set's scores, [m, seeds, examples], NaN where not scored.
        places: the cluster of each of a set's examples, index into clusters.
        gaps: by set [m], who lacked a score before something was put in its place; empty where nothing was.
    """

    entrants: tuple[str, ...]
    sets: tuple[str, ...]
    seeds: tuple[str, ...]
    clusters: tuple[str, ...]
    values: tuple[Floats, ...]
    places: tuple[Ints, ...]
    gaps: tuple[Bools, ...] = ()

    @property
    def binary(self) -> bool:
        """Whether all scores are 0 or 1."""
        return all(bool(np.isin(value[~np.isnan(value)], (0.0, 1.0)).all()) for value in self.values)

    @property
    def clustered(self) -> bool:
        """Whether a cluster holds more than one example of a set."""
        return any(len(np.unique(place)) < len(place) for place in self.places)

    @property
    def repeated(self) -> int:
        """How many clusters stand in more than one set under one name."""
        counts = np.zeros(len(self.clusters), dtype=np.int64)
        for place in self.places:
            counts[np.unique(place)] += 1
        return int((counts > 1).sum())

    def missing(self) -> Ints:
        """[m, sets]: how many scores an entrant lacks that the table's examples and seeds ask for."""
        return np.array([np.isnan(value).sum(axis=(1, 2)) for value in self.values], dtype=np.int64).T.reshape(
            len(self.entrants), len(self.sets)
        )

    def filled(self, worst: float) -> "Items":
        """The same with the worst score where there is none."""
        values = tuple(np.where(np.isnan(v), worst, v) for v in self.values)
        return dataclasses.replace(self, values=values, gaps=self.with_gaps())

    def with_gaps(self) -> tuple[Bools, ...]:
        """By set [m]: who lacked a score under some seed, whatever stands there now."""
        lacking: list[Bools] = [np.asarray(np.isnan(value).any(axis=(1, 2))) for value in self.values]
        return tuple(now | before for now, before in zip(lacking, self.gaps or lacking, strict=True))

    def of(self, entrants: Sequence[int]) -> "Items":
        """The same with these entrants only."""
        chosen = list(entrants)
        names = tuple(self.entrants[place] for place in chosen)
        values = tuple(value[chosen] for value in self.values)
        return dataclasses.replace(self, entrants=names, values=values, gaps=tuple(gap[chosen] for gap in self.gaps))

    def shared(self) -> tuple["Items", int]:
        """The same with the examples only that all entrants have under all seeds, and how many others there were."""
        kept = [~np.isnan(value).any(axis=(0, 1)) for value in self.values]
        values = tuple(value[:, :, keep] for value, keep in zip(self.values, kept, strict=True))
        places = tuple(place[keep] for place, keep in zip(self.places, kept, strict=True))
        return dataclasses.replace(self, values=values, places=places), int(sum((~keep).sum() for keep in kept))

    def alone(self, number: int) -> "Items":
        """The same with one set only."""
        return self.of_sets([number])

    def of_sets(self, sets: Sequence[int]) -> "Items":
        """The same with these sets only."""
        values, places = tuple(self.values[place] for place in sets), tuple(self.places[place] for place in sets)
        gaps = tuple(self.gaps[place] for place in sets) if self.gaps else ()
        names = tuple(self.sets[place] for place in sets)
        return dataclasses.replace(self, sets=names, values=values, places=places, gaps=gaps)

    def means(self) -> list[list[float | None]]:
        """[sets][m]: each entrant's score in each set, exactly summed, None where it has none."""
        return [[_float(mean_over_seeds(rows)) for rows in value] for value in self.values]

    def scores(self) -> list[float | None]:
        """[m]: the mean over sets of an entrant's scores, None where it lacks one."""
        found = []
        for place in range(len(self.entrants)):
            means = [mean_over_seeds(value[place]) for value in self.values]
            whole = [mean for mean in means if mean is not None]
            found.append(_float(sum(whole, Fraction(0)) / len(whole)) if whole and len(whole) == len(means) else None)
        return found

    def contributions(self) -> Floats:
        """[m, clusters]: what each cluster adds to an entrant's score; they sum to it where nothing is missing."""
        total = np.zeros((len(self.entrants), len(self.clusters)))
        for value, place in zip(self.values, self.places, strict=True):
            by_example = value.mean(axis=1) / max(1, value.shape[2]) / len(self.values)
            for row, examples in zip(total, by_example, strict=True):
                row += np.bincount(place, weights=examples, minlength=len(self.clusters))
        return total

    def errors(self) -> list[confidence.TaskError]:
        """The error of the means of each set, by cluster and seed; the seed variance is pooled over those without gaps, as in a round's ranking."""
        return [
            confidence.task_error(value, place, count=len(self.clusters), pool=~gap)
            for value, place, gap in zip(self.values, self.places, self.with_gaps(), strict=True)
        ]


def arrange(rows: Rows) -> Items:
    """Rows of a long table as Items; the order of rows leaves no trace.

    Raises:
        Refusal: scores_invalid: two rows of one key, an example in two clusters.
    """
    entrant, entrants = _codes(rows.entrants)
    of_set, sets = _codes(rows.sets)
    example, examples = _codes(rows.examples)
    cluster, clusters = _codes(rows.clusters)
    seed, seeds = _codes(rows.seeds)
    key = ((of_set * max(1, len(entrants)) + entrant) * max(1, len(seeds)) + seed) * max(1, len(examples)) + example
    double = _first_repeated(key)
    if double is not None:
        where = f"entrant {rows.entrants[double]!r}, set {rows.sets[double]!r}, example {rows.examples[double]!r}"
        raise Refusal(
            "scores_invalid",
            f"two rows of the same key: {where}" + (f", seed {rows.seeds[double]!r}" if rows.seeds[double] else ""),
            hint="repetitions need a column seed; rows of several metrics a column metric, and --metric",
        )
    values, places = [], []
    for number in range(len(sets)):
        here = of_set == number
        names, position = np.unique(example[here], return_inverse=True)
        place = np.zeros(len(names), dtype=np.int64)
        place[position] = cluster[here]
        other = place[position] != cluster[here]
        if other.any():
            name = examples[names[position[int(np.argmax(other))]]]
            raise Refusal("scores_invalid", f"example {name!r} of set {sets[number]!r} stands in more than one cluster")
        value = np.full((len(entrants), len(seeds), len(names)), np.nan)
        value[entrant[here], seed[here], position] = rows.scores[here]
        values.append(value)
        places.append(place)
    return Items(tuple(entrants), tuple(sets), tuple(seeds), tuple(clusters), tuple(values), tuple(places))


def _codes(names: Sequence[str]) -> tuple[Ints, list[str]]:
    known = sorted(set(names))
    number = {name: place for place, name in enumerate(known)}
    return np.fromiter((number[name] for name in names), dtype=np.int64, count=len(names)), known


def _first_repeated(key: Ints) -> int | None:
    order = np.argsort(key, kind="stable")
    again: Bools = np.zeros(len(key), dtype=bool)
    again[order[1:]] = key[order[1:]] == key[order[:-1]]
    return int(np.argmax(again)) if again.any() else None


def _float(value: Any) -> float | None:
    return None if value is None else float(value)
