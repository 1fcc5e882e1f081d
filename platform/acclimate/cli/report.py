"""`acclimate report`: one page from bundles, rounds in MLflow and tables of scores by example, that opens offline and prints."""

from pathlib import Path
from typing import Annotated, Any

import typer

from acclimate.cli.analysis import OneCompetition, RoundNames, TrackingUri, item_source
from acclimate.cli.options import AsJson, need
from acclimate.cli.output import emit
from acclimate_competitions.errors import Refusal


def report(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Bundles of rounds (folder or ZIP), or CSV or Parquet with a row a score, as --items of `acclimate rank` has it.",
            metavar="SOURCE...",
        ),
    ] = None,
    tracking_uri: TrackingUri = None,
    competition: OneCompetition = None,
    names: RoundNames = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The HTML file to write.", metavar="REPORT.html")
    ] = None,
    notebook: Annotated[
        Path | None,
        typer.Option("--notebook", help="Also write a Jupyter notebook that makes the numbers.", metavar="OUT.ipynb"),
    ] = None,
    title: Annotated[str, typer.Option("--title", help="The page's title.")] = "Stability report",
    metric: Annotated[
        str | None, typer.Option("--metric", help="Whose rows count, where a source has several.", metavar="NAME")
    ] = None,
    tasks: Annotated[str | None, typer.Option("--tasks", help="Only these sets count.", metavar="A,B,…")] = None,
    missing: Annotated[
        str | None,
        typer.Option(
            "--missing",
            help="Missing scores: exclude, worst or fail; else as the round's policy has it, exclude in tables.",
            metavar="POLICY",
        ),
    ] = None,
    lower_is_better: Annotated[
        bool, typer.Option("--lower-is-better", help="In tables, a lower score is a better one.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a report of rounds: plots, each with its numbers, what they say, and what they can't carry.

    Sources may be bundles, tables, and published rounds in MLflow, together.

    Example: acclimate report digits-2027-1.zip digits-2028-1.zip -o report.html
    """
    from acclimate import files, report_data, report_page

    if out is None and notebook is None and not as_json:
        raise Refusal(
            "scores_invalid", "nothing is to be written", hint="-o report.html, --notebook OUT.ipynb or --json"
        )
    options: dict[str, Any] = {
        "metric": metric,
        "tasks": [word.strip() for word in tasks.split(",") if word.strip()] if tasks else None,
        "missing": missing,
        "lower_is_better": lower_is_better or None,
    }
    options = {name: value for name, value in options.items() if value is not None}
    paths = sources or []
    for path in (out, notebook):
        if path is not None and path.resolve() in {source.resolve() for source in paths}:
            raise Refusal("conflict", f"{path} is a source of this report", hint="name another file")
    need("analysis", "scipy")
    tracked = item_source(None, None, tracking_uri=tracking_uri, competition=competition, rounds=names)
    if not paths and tracked is None:
        raise Refusal("scores_invalid", "a report of what?", hint="name bundles or tables, or --tracking-uri")
    given = [*paths, *([] if tracked is None else [tracked])]
    rounds = [one for source in given for one in report_data.read(source, options=options)]
    page, document = report_page.make(rounds, title=title)
    said = []
    if out is not None:
        files.write(out, page.encode(), mode=0o644)
        said.append(f"report  {out}")
    if notebook is not None:
        loaded = None if tracking_uri is None else (tracking_uri, str(competition), names)
        text = report_page.notebook([str(path) for path in paths], options, tracked=loaded)
        files.write(notebook, text.encode(), mode=0o644)
        said.append(f"notebook  {notebook}")
    for one in document["rounds"]:
        said += [f"{one['round']}: {section['sentence']}" for section in one["sections"].values()]
    said += [section["sentence"] for section in document["across"].values()]
    emit(document, as_json=as_json, text=said)
