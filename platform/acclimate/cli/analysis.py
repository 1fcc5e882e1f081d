"""`acclimate rank` and `acclimate stability`: rankings with honest uncertainty from anybody's score tables, without a server."""

from pathlib import Path
from typing import Annotated

import typer

from acclimate.cli.options import AsJson
from acclimate.cli.output import emit

_MISSING = (
    "What becomes of an entrant that lacks a score: fail (refuse the table) or exclude (leave it out, and say so)."
)


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


def rank(
    scores: Annotated[
        Path,
        typer.Option("--scores", help="CSV or Parquet, a row an entrant, named by the first column.", metavar="FILE"),
    ],
    score: Annotated[str | None, typer.Option("--score", help="The column of scores.", metavar="COLUMN")] = None,
    se: Annotated[
        str | None, typer.Option("--se", help="The column of their standard errors.", metavar="COLUMN")
    ] = None,
    top: Annotated[int, typer.Option("--top", help="Also say who can be among the best K.", metavar="K")] = 1,
    level: Annotated[float, typer.Option("--level", help="The confidence of each statement.")] = 0.95,
    sets: Annotated[
        str,
        typer.Option("--sets", help="Intervals that hold each by itself (marginal), or all together (simultaneous)."),
    ] = "marginal",
    lower_is_better: Annotated[bool, typer.Option("--lower-is-better", help="A lower score is a better one.")] = False,
    missing: Annotated[str, typer.Option("--missing", help=_MISSING)] = "fail",
    as_json: AsJson = False,
) -> None:
    """Rank entrants, each with the interval in which its rank lies.

    Example: acclimate rank --scores pisa.csv --score math_score --se math_se --top 5
    """
    from acclimate import analysis
    from acclimate.cli import analysis_texts

    options: analysis.RankOptions = {
        "top": top,
        "level": level,
        "sets": sets,  # type: ignore[typeddict-item]  # rank refuses other words
        "lower_is_better": lower_is_better,
        "missing": missing,
    }
    if score is not None:
        options["score"] = score
    if se is not None:
        options["se"] = se
    found = analysis.rank(scores, **options)
    emit(found, as_json=as_json, text=analysis_texts.ranking(found))


def stability(
    scores: Annotated[
        list[str],
        typer.Option(
            "--scores",
            help="A table models × tasks, the model in the first column; two are compared.",
            metavar="NAME=FILE",
        ),
    ],
    tasks: Annotated[str | None, typer.Option("--tasks", help="Only these columns count.", metavar="A,B,…")] = None,
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
    missing: Annotated[str, typer.Option("--missing", help=_MISSING)] = "fail",
    common: Annotated[
        bool, typer.Option("--common", help="Compare two tables by the models and tasks that both have.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tell how far the tasks of a score table agree about who is better, and what changes from one table to another.

    Example: acclimate stability --scores direct=direct.csv --scores prepared=prepared.csv --lower perplexity
    """
    from acclimate import analysis
    from acclimate.cli import analysis_texts

    named = _named(scores)
    found = analysis.stability(
        named,
        tasks=_words(tasks),
        lower=_words(lower),
        against=_words(against),
        models=models or [],
        missing=missing,
        common=common,
    )
    emit(found, as_json=as_json, text=analysis_texts.agreement(found, list(named)))


def _named(scores: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in scores:
        name, equals, file = word.partition("=")
        if not equals or not name or not file:
            raise typer.BadParameter(f"{word!r} is not NAME=FILE", param_hint="--scores")
        if name in found:
            raise typer.BadParameter(f"two tables are called {name!r}", param_hint="--scores")
        found[name] = file
    return found
