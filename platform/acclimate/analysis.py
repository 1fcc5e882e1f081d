"""What an analyst asks of anybody's results, without a server: `acclimate.rank`, `acclimate.compare`, `acclimate.stability`.

Each takes tables (a path of CSV or Parquet, a pyarrow Table, a pandas DataFrame), and as items also rounds of `acclimate.load_rounds`, the path of a
round's bundle, or results of lm-evaluation-harness or Every Eval Ever; it returns what the command of the same name prints with --json:
numbers, names, and under `notes` each thing that was left out or taken for something. Nothing is left out unless it was asked for.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from acclimate import (
    chosen_rows,
    foreign_results,
    item_analysis,
    item_sources,
    table_analysis,
    task_analysis,
)
from acclimate.analysis_options import CompareOptions, RankOptions, StabilityOptions, chosen, known
from acclimate.score_tables import Source
from acclimate_competitions.errors import Refusal, installing


def rank(scores: Source = None, *, items: Source = None, **options: Unpack[RankOptions]) -> dict[str, Any]:
    """Rank entrants, with confidence sets for the ranks (Mogstad et al.), or by CASP's z-scores.

    Args:
        scores: a table with one row an entrant, whose first column names it; options score and se name its columns, or with
            method="casp" each other column is a target.
        items: a long table of scores by example: entrant, example, score, and if there are any set, cluster, seed, protocol, metric; or rounds
            of `acclimate.load_rounds`, a bundle's path, or the path of another program's results.
        options: see RankOptions.

    Returns:
        {ranking: [{entrant, rank, rank_low, rank_high, score, se}], top_set, top, level, sets, left_out, notes}; the best first, equal
        scores share a rank. Of a round whose tasks are joined by ranks (mean_rank, win_rate) so are these, se is None, and the intervals hold together. top_set holds all of the best `top` with probability `level`. With ways=True also ways: {ranks: [{entrant, a rank for
        each way, rank_low, rank_high}], tau_b, level}, as competitions' ways.py has them.

    Raises:
        Refusal: scores_invalid, file_unreadable; extra_missing, for ways without scipy.
    """
    known(options, RankOptions)
    _one_of(scores, items)
    if options.get("ways"):
        if items is None:
            raise Refusal(
                "scores_invalid", "five ways to rank need scores by example", hint="--items, --bundle, --tracking-uri"
            )
        need_scipy()
    items, options = item_sources.opened(items, options, as_published=True)
    item_sources.require_one_scale(items)
    if chosen("method", options.get("method", "sets"), ("sets", "casp")) == "casp":
        return table_analysis.casp_rank(items if scores is None else scores, options)
    return item_analysis.rank(items, options) if scores is None else table_analysis.rank(scores, options)


def compare(
    a: str | None = None,
    b: str | None = None,
    *,
    items: Source = None,
    scores: Source = None,
    **options: Unpack[CompareOptions],
) -> dict[str, Any]:
    """Is a better than b on the same examples? Without names, or with all=True: all pairs, adjusted by Holm.

    Of a table of scores entrants × tasks, whether they differ over tasks: Friedman, Nemenyi, and Wilcoxon with Holm.

    Args:
        a: an entrant.
        b: another one.
        items: a long table of scores by example, as for rank.
        scores: a table entrants × tasks, whose first column names the entrant, instead; all its entrants are compared.
        options: see CompareOptions.

    Returns:
        {a, b, n, clusters, left_out, score_a, score_b, difference, low, high, se_paired, se_unpaired, only_a, only_b, mcnemar_p, permutation_p,
        permutation_least_p, wilcoxon_p, wilcoxon_p_one_sided, and each p_holm, alternative, notes}; of all pairs such rows under `pairs`. difference
        is score_a − score_b. permutation_least_p is the least p that the number of random flips allows, None where all ways to flip are counted.
        wilcoxon_p_one_sided is that a is better, as challengeR has it.
        Of scores {entrants, tasks, ranking: [{entrant, rank, average_rank, rank_low, rank_high}], friedman_chi2, friedman_p, iman_davenport_f,
        iman_davenport_p, critical_difference, pairs: [{a, b, difference, nemenyi, wilcoxon_p, wilcoxon_p_holm}], level, notes}; there rank_low and
        rank_high are the best and worst rank where one task is left out.

    Raises:
        Refusal: scores_invalid, file_unreadable, extra_missing.
    """
    known(options, CompareOptions)
    _one_of(scores, items)
    need_scipy()
    if items is not None:
        items, options = item_sources.opened(items, options)
        item_sources.require_one_scale(items)
        return item_analysis.compare(a, b, items, options)
    if a is not None or b is not None:
        raise Refusal(
            "scores_invalid", "of a table of scores all entrants are compared", hint="give no names, or --items"
        )
    return task_analysis.compare(_of_tasks(scores, options), options)


def stability(
    scores: Mapping[str, Source] | None = None, *, items: Source = None, **options: Unpack[StabilityOptions]
) -> dict[str, Any]:
    """How far tasks or sets agree about who is better, and what changes from one score table to another.

    Args:
        scores: name -> table entrants × tasks, whose first column names the entrant; one table, or two.
        items: a long table of scores by example, as for rank, of one or more sets.
        options: see StabilityOptions.

    Returns:
        Of scores {NAME: {models, tasks, pairs, mean_tau_b, tau_b_low, tau_b_high, pc1_share, noise_ceiling, ties, undefined_pairs, tau_b, lower}}. Of
        two tables also pairs_risen and same_winner (who is first, by the order of the first table). tau_b is {task: {task: tau-b}}, lower the tasks in which lower is better.
        What is undefined is None: a task that ties all entrants, an interval of fewer than ten entrants, the noise ceiling, as a table
        of scores does not tell how far they are noise. With `against`, {against: {NAME: {tasks, pairs, mean_tau_b}}}.
        Of items {entrants, sets: {SET: {n, clusters, interval, ranking: [rank's rows with n, correct, low, high], noise_ceiling, …_low, …_high}},
        pairs: [{sets, tau_b, tau_b_low, tau_b_high, half_agreement, noise_ceiling}], tau_b, tau_b_low, tau_b_high, noise_ceiling,
        noise_ceiling_low, noise_ceiling_high, half_agreement, level, splits}. A ceiling is the mean agreement of two halves of the same
        examples, its interval where it falls from split to split; half_agreement is of halves of two sets, and to be compared with it.

    Raises:
        Refusal: scores_invalid, file_unreadable, name_invalid, extra_missing.
    """
    known(options, StabilityOptions)
    _one_of(scores, items)
    if scores is not None:
        tables = {name: _of_tasks(one, options, name=name) for name, one in scores.items()}
        return table_analysis.stability(tables, options)
    need_scipy()
    items, options = item_sources.opened(items, options, rounds_are_sets=True)
    return item_analysis.stability(items, options)


def _of_tasks(source: Source, options: Mapping[str, Any], *, name: str | None = None) -> Source:
    """A table entrants × tasks, of the protocol and metric that count; of other programs' results, their means."""
    if _is_foreign(source):
        source = foreign_results.scores(Path(source), metric=options.get("metric"))
        options = {key: value for key, value in options.items() if key != "metric"}
    return chosen_rows.narrowed(source, options, name=name)


def _is_foreign(source: Source) -> bool:
    return isinstance(source, str | Path) and foreign_results.is_foreign(Path(source))


def _one_of(scores: Any, items: Any) -> None:
    if (scores is None) == (items is None):
        raise Refusal(
            "scores_invalid",
            "no table is given" if scores is None else "two kinds of tables are given",
            hint="--scores for a table of scores; --items, --bundle or --tracking-uri for scores by example",
        )


def need_scipy() -> None:
    """Refuse what can't be computed without scipy.

    Raises:
        Refusal: extra_missing.
    """
    try:
        import scipy  # noqa: F401
    except ModuleNotFoundError as error:
        raise Refusal(
            "extra_missing", "this needs scipy, which is not installed", hint=installing("analysis")
        ) from error
