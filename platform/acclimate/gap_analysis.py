"""`acclimate gap`: the smallest difference that a round of some size can tell, asked before it opens, from a pilot or by the worst case."""

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import numpy as np

from acclimate import analysis, example_tables, item_sources
from acclimate.analysis_options import confidence_level, known
from acclimate.score_tables import Source
from acclimate_competitions import resolution
from acclimate_competitions.errors import Refusal
from acclimate_competitions.items import Items

INDEPENDENT = 0.5
"""The variance of a difference of two independent scores of 0 or 1, at its largest: of entrants who are right half of the time."""


class GapOptions(TypedDict, total=False):
    """What a round is to be; each as the command's option of the same name.

    Attributes:
        entrants: how many; those of the pilot, if not given.
        examples: how many (clusters, where examples come in clusters); those of the pilot, if not given.
        seeds: how many; those of the pilot, if not given.
        difference: a gap, for which examples are counted.
        power: with which probability a gap is told, 0.8.
        level: of confidence over all pairs, 0.95.
        missing: of the pilot's scores, as for rank.
        tasks: of the pilot.
        protocol: of the pilot.
        metric: of the pilot.
    """

    entrants: int
    examples: int
    seeds: int
    difference: float
    power: float
    level: float
    missing: str
    tasks: Sequence[str]
    protocol: str
    metric: str


def gap(items: Source = None, **options: Unpack[GapOptions]) -> dict[str, Any]:
    """The smallest difference between two entrants that a round can tell, and the floor that seeds set.

    Args:
        items: scores by example of a pilot or an earlier round, as for `acclimate.rank`; None for the worst case of scores 0 and 1.
        options: see GapOptions.

    Returns:
        {gap, floor (null without a pilot of several seeds), examples_needed (of `difference`; null where none is asked for, or where seeds forbid it),
        entrants, examples, seeds, critical, variance, seed_variance, power, level, notes}. variance is of one example's differences between two
        entrants, the mean over pairs; seed_variance of one seed's score.

    Raises:
        Refusal: scores_invalid; as `acclimate.rank`; extra_missing.
    """
    known(options, GapOptions)
    analysis.need_scipy()
    level = confidence_level(options.get("level", 0.95))
    power = options.get("power", 0.8)
    if not 0 < power < 1:
        raise Refusal("scores_invalid", f"a power of {power}", hint="between 0 and 1, such as 0.8")
    notes: list[str] = []
    pilot = None
    if items is not None:
        table, left = item_sources.opened(items, options)
        item_sources.require_one_scale(table)
        found, notes = example_tables.read(table, left)
        pilot = _require_two(example_tables.answered(found, left, notes))
    given: dict[str, Any] = {**_size(pilot), **{name: value for name, value in options.items() if name in _WORDS}}
    size: dict[str, Any] = {name: given.get(name) for name in _WORDS}
    for name, value in size.items():
        if value is None or value < (2 if name == "entrants" else 1):
            hint = (
                f"--{name} N, or scores by example of a pilot or an earlier round (--items, --bundle, --tracking-uri)"
            )
            raise Refusal("scores_invalid", f"how many {name}?" if value is None else f"{value} {name}", hint=hint)
    entrants, examples, seeds = (int(size[name]) for name in _WORDS)
    variance, by_seed = _variances(pilot) if pilot is not None else (INDEPENDENT, 0.0)
    errors, of_seeds = resolution.reach(entrants, level=level, power=power), 2 * by_seed / seeds
    wanted = options.get("difference")
    if wanted is not None and not wanted > 0:
        raise Refusal("scores_invalid", f"a difference of {wanted}", hint="above 0, such as 0.02")
    if pilot is None:
        notes.append(
            "without a pilot: scores 0 and 1 of independent entrants; those of real ones go together, so that smaller gaps are told"
        )
    return {
        "gap": resolution.gap(errors, variance, examples, of_seeds),
        "floor": errors * of_seeds**0.5 if pilot is not None and len(pilot.seeds) > 1 else None,
        "examples_needed": None if wanted is None else resolution.examples(errors, variance, wanted, of_seeds),
        "difference": wanted,
        "entrants": entrants,
        "examples": examples,
        "seeds": seeds,
        "critical": resolution.critical(entrants, level),
        "variance": variance,
        "seed_variance": by_seed,
        "power": power,
        "level": level,
        "notes": notes,
    }


_WORDS = ("entrants", "examples", "seeds")


def _size(pilot: Items | None) -> dict[str, int]:
    if pilot is None:
        return {"seeds": 1}
    return {"entrants": len(pilot.entrants), "examples": len(pilot.clusters), "seeds": len(pilot.seeds)}


def _require_two(pilot: Items) -> Items:
    if len(pilot.entrants) < 2 or len(pilot.clusters) < 2:
        sentence = f"a pilot of {len(pilot.entrants)} entrants and {len(pilot.clusters)} independent examples"
        raise Refusal("scores_invalid", sentence, hint="two of each are the least that vary")
    return pilot


def _variances(pilot: Items) -> tuple[float, float]:
    """The variance of one example's differences between two entrants, the mean over pairs; and of a seed's score."""
    errors, tasks = pilot.errors(), len(pilot.sets)
    residuals = np.sum([error.residuals for error in errors], axis=0) / tasks
    joint = residuals @ residuals.T
    m = len(joint)
    pairs = np.diag(joint)[:, None] + np.diag(joint)[None, :] - 2 * joint
    each = float(pairs.sum() / (m * (m - 1))) * len(pilot.clusters)
    by_seed = float(np.sum([error.seeds for error in errors], axis=0).mean()) / tasks**2 * len(pilot.seeds)
    return each, by_seed
