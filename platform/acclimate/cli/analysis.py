"""`acclimate rank`, `compare` and `stability`: rankings with honest uncertainty from anybody's results, without a server."""

from pathlib import Path
from typing import Annotated, Any

import typer

from acclimate.cli.options import AsJson
from acclimate.cli.output import emit

Items = Annotated[
    list[Path] | None,
    typer.Option(
        "--items",
        help="CSV or Parquet, a row a score: entrant, example, score, and if there are any set, cluster, seed, protocol, metric. "
        "Or a folder of lm-evaluation-harness or Every Eval Ever. May be repeated: tables are joined.",
        metavar="PATH",
    ),
]
TrackingUri = Annotated[
    str | None,
    typer.Option("--tracking-uri", help="Instead: MLflow's address or database, for published rounds.", metavar="URI"),
]
OneCompetition = Annotated[
    str | None, typer.Option("--competition", help="With --tracking-uri: whose rounds.", metavar="SLUG")
]
RoundNames = Annotated[
    list[str] | None,
    typer.Option("--round", help="With --tracking-uri: which round; may be repeated; else all.", metavar="NAME"),
]
OneBundle = Annotated[
    Path | None, typer.Option("--bundle", help="Instead: a round's bundle, its folder or ZIP.", metavar="PATH")
]
Level = Annotated[float, typer.Option("--level", help="The confidence of each statement.")]
Lower = Annotated[
    bool | None,
    typer.Option(
        "--lower-is-better/--higher-is-better",
        help="Which scores are better; else by the metric, where its name or the results tell it: higher.",
        show_default=False,
    ),
]
OneProtocol = Annotated[
    str | None,
    typer.Option(
        "--protocol",
        help="Whose rows count, where there are several; of rounds prepared, if none is named.",
        metavar="NAME",
    ),
]
OneMetric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="Whose rows count, where there are several; of rounds that of the ranking, if none is named. Of a table of predictions it is computed.",
        metavar="NAME",
    ),
]
_FAIL = "fail: refuse the table; exclude: leave out, and say so; worst: count as the worst (--items only)"


def rank(
    scores: Annotated[
        Path | None,
        typer.Option("--scores", help="CSV or Parquet, a row an entrant, named by the first column.", metavar="FILE"),
    ] = None,
    score: Annotated[str | None, typer.Option("--score", help="The column of scores.", metavar="COLUMN")] = None,
    se: Annotated[str | None, typer.Option("--se", help="The column of standard errors.", metavar="COLUMN")] = None,
    items: Items = None,
    tracking_uri: TrackingUri = None,
    competition: OneCompetition = None,
    rounds: RoundNames = None,
    bundle: OneBundle = None,
    top: Annotated[int, typer.Option("--top", help="Also say who can be among the best K.", metavar="K")] = 1,
    level: Level = 0.95,
    sets: Annotated[
        str,
        typer.Option("--sets", help="Intervals that hold each by itself (marginal), or all together (simultaneous)."),
    ] = "marginal",
    lower_is_better: Lower = None,
    missing: Annotated[
        str | None,
        typer.Option(
            "--missing", help=f"Missing scores. {_FAIL}. CASP: penalty (costs the threshold), skip.", metavar="POLICY"
        ),
    ] = None,
    method: Annotated[
        str, typer.Option("--method", help="sets, or casp: z-scores by target of a table entrants × targets.")
    ] = "sets",
    threshold: Annotated[
        float, typer.Option("--threshold", help="CASP: lower z-scores count as this, -2 or 0.")
    ] = -2.0,
    baselines: Annotated[
        str | None, typer.Option("--baselines", help="CASP: who is in no mean and has no rank.", metavar="A,B,…")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", help="Only these sets, tasks or targets count.", metavar="A,B,…")
    ] = None,
    protocol: OneProtocol = None,
    metric: OneMetric = None,
    ways: Annotated[
        bool, typer.Option("--ways", help="Also rank scores by example in five ways, and say how far they agree.")
    ] = False,
    as_latex: Annotated[
        bool, typer.Option("--latex", help="Print a LaTeX table (booktabs), notes as comments.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rank entrants, each with the interval in which its rank lies.

    Example: acclimate rank --scores pisa.csv --score math_score --se math_se --top 5
    """
    from acclimate import analysis
    from acclimate.cli import analysis_texts, latex

    if as_json and as_latex:
        raise typer.BadParameter("one of the two, or neither", param_hint="--json, --latex")
    options = _given(
        score=score, se=se, top=top, level=level, sets=sets, lower_is_better=lower_is_better, missing=missing,
        method=method, threshold=threshold, baselines=baselines, tasks=tasks, protocol=protocol, metric=metric,
        ways=ways,
    )  # fmt: skip
    source = item_source(items, bundle, tracking_uri=tracking_uri, competition=competition, rounds=rounds)
    found = analysis.rank(scores, items=source, **options)
    emit(found, as_json=as_json, text=latex.ranking(found) if as_latex else analysis_texts.ranking(found))


def compare(
    a: Annotated[str | None, typer.Argument(help="An entrant.", metavar="A")] = None,
    b: Annotated[str | None, typer.Argument(help="Another one; none for all pairs.", metavar="B")] = None,
    items: Items = None,
    tracking_uri: TrackingUri = None,
    competition: OneCompetition = None,
    rounds: RoundNames = None,
    bundle: OneBundle = None,
    scores: Annotated[
        Path | None,
        typer.Option(
            "--scores", help="Instead: a table entrants × tasks, to ask whether they differ over tasks.", metavar="FILE"
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All pairs, with Holm's adjustment.")] = False,
    alternative: Annotated[
        str, typer.Option("--alternative", help="two-sided; greater: the first is better; less.")
    ] = "two-sided",
    level: Level = 0.95,
    lower_is_better: Lower = None,
    lower: Annotated[
        str | None, typer.Option("--lower", help="Tasks of --scores in which a lower score is better.", metavar="T,U,…")
    ] = None,
    missing: Annotated[
        str,
        typer.Option(
            "--missing", help="fail, or exclude: examples that one of a pair lacks are left out.", metavar="POLICY"
        ),
    ] = "fail",
    tasks: Annotated[str | None, typer.Option("--tasks", help="Only these sets count.", metavar="A,B,…")] = None,
    protocol: OneProtocol = None,
    metric: OneMetric = None,
    as_json: AsJson = False,
) -> None:
    """Tell whether one entrant is better than another on the same examples.

    Example: acclimate compare amber blue --items scores.parquet
    """
    from acclimate import analysis
    from acclimate.cli import analysis_texts

    options = _given(
        all=every, alternative=alternative, level=level, lower_is_better=lower_is_better, lower=lower, missing=missing,
        tasks=tasks, protocol=protocol, metric=metric,
    )  # fmt: skip
    source = item_source(items, bundle, tracking_uri=tracking_uri, competition=competition, rounds=rounds)
    found = analysis.compare(a, b, items=source, scores=scores, **options)
    text = analysis_texts.comparison(found) if scores is None else analysis_texts.several_tasks(found)
    emit(found, as_json=as_json, text=text)


def stability(
    scores: Annotated[
        list[str] | None,
        typer.Option(
            "--scores",
            help="A table models × tasks, the model in the first column; two are compared.",
            metavar="NAME=FILE",
        ),
    ] = None,
    items: Items = None,
    tracking_uri: TrackingUri = None,
    competition: OneCompetition = None,
    rounds: RoundNames = None,
    bundle: OneBundle = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", help="Only these columns or sets count.", metavar="A,B,…")
    ] = None,
    lower: Annotated[
        str | None, typer.Option("--lower", help="Tasks in which a lower score is better.", metavar="T,U,…")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", help="Tasks to hold against all others, and to keep out of the rest.", metavar="T,U,…"
        ),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--models", help="Only models whose name matches, such as '*qwen*'; may be repeated.", metavar="PATTERN"
        ),
    ] = None,
    missing: Annotated[str, typer.Option("--missing", help=f"Missing scores. {_FAIL}.", metavar="POLICY")] = "fail",
    common: Annotated[
        bool,
        typer.Option(
            "--common",
            help="Compare two tables by the models and tasks that both have; rounds by the entries that all have, of the same model.",
        ),
    ] = False,
    level: Level = 0.95,
    sets: Annotated[
        str, typer.Option("--sets", help="Rank intervals by items: marginal, or simultaneous.")
    ] = "marginal",
    protocol: OneProtocol = None,
    metric: OneMetric = None,
    as_json: AsJson = False,
) -> None:
    """Tell how far tasks agree about who is better, and what changes from one table to another.

    Example: acclimate stability --scores direct=direct.csv --scores prepared=prepared.csv --lower perplexity
    """
    from acclimate import analysis
    from acclimate.cli import analysis_texts

    named = _named(scores) if scores else None
    options = _given(
        tasks=tasks, lower=lower, against=against, models=models, missing=missing, common=common,
        level=level, rank_sets=sets, protocol=protocol, metric=metric,
    )  # fmt: skip
    source = item_source(items, bundle, tracking_uri=tracking_uri, competition=competition, rounds=rounds)
    found = analysis.stability(named, items=source, **options)
    text = analysis_texts.agreement(found, list(named)) if named else analysis_texts.sets(found)
    emit(found, as_json=as_json, text=text)


def export(
    out: Annotated[Path, typer.Option("--out", help="The folder to write, not there yet.", metavar="DIR")],
    items: Items = None,
    tracking_uri: TrackingUri = None,
    competition: OneCompetition = None,
    rounds: RoundNames = None,
    bundle: OneBundle = None,
    form: Annotated[
        str, typer.Option("--format", help="csv, parquet, or every-eval-ever (JSON, schema 0.3.0).", metavar="FORMAT")
    ] = "csv",
    tasks: Annotated[str | None, typer.Option("--tasks", help="Only these sets.", metavar="A,B,…")] = None,
    protocol: OneProtocol = None,
    metric: OneMetric = None,
    lower_is_better: Lower = None,
    as_json: AsJson = False,
) -> None:
    """Write scores as tables for any tool, or as Every Eval Ever.

    Tables: examples (a row a score), scores (a row an entrant and set), and a table entrants × sets for each protocol. What is read may be
    rounds in MLflow, a bundle, a table, or results of lm-evaluation-harness or Every Eval Ever: so this converts them, too. --lower-is-better is
    for Every Eval Ever, of scores whose direction the source doesn't tell.

    Example: acclimate export --items lm_eval_results --metric acc --format parquet --out tables
    """
    from datetime import UTC, datetime

    from acclimate import exporting
    from acclimate_competitions.errors import Refusal

    source = item_source(items, bundle, tracking_uri=tracking_uri, competition=competition, rounds=rounds)
    if source is None:
        raise Refusal("scores_invalid", "no scores are given", hint="--items, --bundle or --tracking-uri")
    words = [word.strip() for word in tasks.split(",") if word.strip()] if tasks else None
    options = {"tasks": words, "protocol": protocol, "metric": metric, "lower_is_better": lower_is_better}
    found = exporting.export(source, out, form=form, options=options, at=datetime.now(UTC))
    lines = [f"{found['out']}: {', '.join(found['files'][:8])}{' …' if len(found['files']) > 8 else ''}"]
    emit(found, as_json=as_json, text=[*lines, *(f"note: {note}" for note in found["notes"])])


def item_source(
    items: list[Path] | None,
    bundle: Path | None,
    *,
    tracking_uri: str | None,
    competition: str | None,
    rounds: list[str] | None,
) -> Any:
    """Where scores by example come from, by the options; None where none names any.

    Raises:
        Refusal: scores_invalid, where several do, or one lacks another; as `acclimate.load_rounds`.
    """
    from acclimate_competitions.errors import Refusal

    given = {"--items": items or None, "--bundle": bundle, "--tracking-uri": tracking_uri}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise Refusal("scores_invalid", f"{' and '.join(named)} are both given", hint="name one source of scores")
    if tracking_uri is None and (competition or rounds):
        option = "--competition" if competition else "--round"
        raise Refusal(
            "scores_invalid", f"{option} without --tracking-uri", hint="--tracking-uri URI says where rounds are"
        )
    if tracking_uri is not None:
        if competition is None:
            raise Refusal("scores_invalid", "whose rounds?", hint="--competition SLUG")
        from acclimate.loaded_rounds import load_rounds

        return load_rounds(tracking_uri, competition, rounds or None)
    if bundle is not None:
        from acclimate.item_sources import Bundle

        return Bundle(bundle)
    return items[0] if items is not None and len(items) == 1 else items or None


def _given(**options: Any) -> Any:
    """The options that were given; the functions refuse words that they do not know."""
    return {name: value for name, value in options.items() if value is not None}


def _named(scores: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in scores:
        name, equals, file = word.partition("=")
        if not equals or not name or not file:
            example = f"mine={word}" if word else "mine=scores.csv"
            raise typer.BadParameter(f"{word!r} is not NAME=FILE, such as {example!r}", param_hint="--scores")
        if name in found:
            raise typer.BadParameter(f"two tables are called {name!r}", param_hint="--scores")
        found[name] = file
    return found
