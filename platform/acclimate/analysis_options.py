"""What may be chosen of `acclimate.rank`, `compare` and `stability`: the options of the commands, under the same names."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from acclimate.score_tables import listed
from acclimate_competitions.errors import Refusal

DRAWS = 20_000
"""Of Monte Carlo, for rank intervals of up to MANY entrants."""
MANY = 100
FEWEST_DRAWS = 2_000
"""Of Monte Carlo, however many entrants there are."""
RESAMPLES = 2_000
"""Of the bootstrap over entrants."""
SPLITS = 400
"""Of a set's examples into halves."""
FLIPS = 9_999
"""Of the signs of differences, of one pair."""
FLIPS_A_PAIR = 200
"""Of many pairs, so that Holm's adjustment leaves a p that tells."""
MOST_FLIPPED = 500_000_000_000
"""Flips × clusters × pairs: some minutes."""
_LISTS = frozenset({"tasks", "lower", "against", "models", "baselines"})


class RankOptions(TypedDict, total=False):
    """How to rank; each as the command's option of the same name.

    Attributes:
        score: column of the scores.
        se: column of their standard errors.
        top: K of the top set, 1 where not given.
        level: of confidence, 0.95.
        sets: whether each interval holds by itself (marginal, the default) or all together (simultaneous).
        lower_is_better: whether it is; where not given, by the metric, if its name or the source tells it, else not.
        missing: what becomes of a missing score. By scores: fail (the default), exclude. By items: also worst. CASP: penalty (the
            default), skip.
        method: casp, for z-scores by target; else by confidence sets of scores.
        threshold: of CASP, -2 or 0: lower z-scores count as that.
        baselines: entrants that are left out of CASP's means and deviations, and unranked.
        tasks: the sets or targets that count, all where not given.
        protocol: whose rows count, where there are several; of rounds prepared, if not given.
        metric: whose rows count, where there are several; of rounds that of the ranking, if not given.
        ways: also rank by items in each of five ways, and say how far they agree.
        draws: of Monte Carlo.
        seed: of Monte Carlo.
    """

    score: str
    se: str
    top: int
    level: float
    sets: Literal["marginal", "simultaneous"]
    lower_is_better: bool
    missing: str
    method: str
    threshold: float
    baselines: Sequence[str]
    tasks: Sequence[str]
    protocol: str
    metric: str
    ways: bool
    draws: int
    seed: int


class CompareOptions(TypedDict, total=False):
    """How to compare; each as the command's option of the same name.

    Attributes:
        all: all pairs, with Holm's adjustment; always where no two are named.
        alternative: what is held against no difference: two-sided (the default), greater (the first is better), less.
        level: of the interval of a difference, 0.95.
        lower_is_better: whether it is; where not given, by the metric, if its name or the source tells it, else not.
        lower: tasks of a score table in which lower is better; where not given, those whose name or source tells it.
        missing: fail (the default), or exclude: examples that one of a pair lacks are left out of the pair; of a score table,
            entrants that lack a score are.
        tasks: the sets or tasks that count, all where not given.
        protocol: whose rows count, where there are several; of rounds prepared, if not given.
        metric: whose rows count, where there are several; of rounds that of the ranking, if not given.
        draws: of the signs.
        seed: of the signs.
    """

    all: bool
    alternative: Literal["two-sided", "greater", "less"]
    level: float
    lower_is_better: bool
    lower: Sequence[str]
    missing: str
    tasks: Sequence[str]
    protocol: str
    metric: str
    draws: int
    seed: int


class StabilityOptions(TypedDict, total=False):
    """What of the tables counts; each as the command's option of the same name.

    Attributes:
        tasks: the columns or sets that count, all where not given.
        lower: tasks in which lower is better; where not given, those whose name or source tells it.
        against: tasks whose agreement with all others is told apart, and which are in no other number; of score tables.
        models: patterns, of which an entrant's name matches one (*, ?, [abc]; capitals don't matter); of score tables.
        missing: what becomes of an entrant that lacks a score: fail (the default) or exclude; of items also worst.
        common: whether two tables are compared by what both have, and rounds by the entries that all have with the same model; else they must have the
            same entrants and tasks.
        level: of the intervals by items, 0.95.
        rank_sets: marginal (the default) or simultaneous; of items.
        protocol: whose rows count, in items that have several; of rounds prepared, if not given.
        metric: whose rows count, where there are several; of rounds that of the ranking, if not given.
        draws: of the bootstrap.
        seed: of all draws.
    """

    tasks: Sequence[str]
    lower: Sequence[str]
    against: Sequence[str]
    models: Sequence[str]
    missing: str
    common: bool
    level: float
    rank_sets: Literal["marginal", "simultaneous"]
    protocol: str
    metric: str
    draws: int
    seed: int


def known(options: Any, kind: Any) -> None:
    """Refuse an option that there is not, as Python does with an argument; names in one text, separated by commas, are taken apart.

    Raises:
        TypeError: there is one.
    """
    unknown = sorted(set(options) - set(kind.__annotations__))
    if unknown:
        raise TypeError(f"unknown option {listed(unknown)}; there are {listed(kind.__annotations__, most=20)}")
    for name in _LISTS & set(options):
        if isinstance(options[name], str):
            options[name] = [word.strip() for word in options[name].split(",") if word.strip()]


def chosen(what: str, word: str, allowed: Sequence[str]) -> str:
    """A word of an option, if it is one of those allowed.

    Raises:
        Refusal: scores_invalid.
    """
    if word not in allowed:
        raise Refusal("scores_invalid", f"unknown {what} {word!r}", hint=f"one of {listed(allowed)}")
    return word


def confidence_level(level: float) -> float:
    """A level of confidence.

    Raises:
        Refusal: scores_invalid, for one that is none.
    """
    if not 0 < level < 1:
        raise Refusal("scores_invalid", f"a level of confidence of {level}", hint="between 0 and 1, such as 0.95")
    return level


def draws(options: Mapping[str, Any], entrants: int) -> int:
    """Of Monte Carlo, for rank intervals: as asked for, or fewer for many entrants, whose pairs take time by their square."""
    fewer = int(DRAWS * (MANY / max(MANY, entrants)) ** 2)
    return int(options.get("draws", max(FEWEST_DRAWS, fewer)))


def flips(options: Mapping[str, Any], clusters: int, pairs: int) -> int:
    """Of the signs: as asked for, else more for many pairs, as far as time allows."""
    affordable = MOST_FLIPPED // max(1, clusters * pairs)
    return int(options.get("draws", max(FLIPS, min(FLIPS_A_PAIR * pairs, affordable))))


def number(value: Any) -> float | None:
    """A float for JSON: None where it is not known."""
    return None if value is None or not math.isfinite(value) else float(value)


def require_left(left: Sequence[object], whole: Sequence[object], sentence: str, *, hint: str) -> None:
    """Refuse to compute anything where nobody, or no task, of a table is left: a result of nothing looks like one.

    Raises:
        Refusal: scores_invalid.
    """
    if whole and not left:
        raise Refusal("scores_invalid", sentence, hint=hint)


def left_out(names: Sequence[str], why: str) -> list[str]:
    """The note on names that were left out, if any."""
    return [f"left out, as {why}: {listed(names, most=100)}"] if names else []
