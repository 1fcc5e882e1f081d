"""`acclimate demo`: a whole round on this machine, every actor with its own keys, over the public HTTP API."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from acclimate.cli.options import need
from acclimate.files import is_full
from acclimate_competitions.errors import Refusal


def demo(
    data: Annotated[
        Path, typer.Option(help="Folder for everything the demo makes; the same folder again goes on where it stopped.")
    ],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the result as JSON to this file.")
    ] = None,
    runner: Annotated[str, typer.Option(help="Where the models are prepared: ray or local.")] = "ray",
) -> None:
    """Play a whole blind round on this machine: seal, submit, prepare, release, evaluate, rank, verify.

    The holdout of the demo is made of public data: it shows the protocol, not blindness.

    Example: acclimate demo --data demo-data --json result.json
    """
    if runner not in ("ray", "local"):
        raise Refusal("config_invalid", f"--runner {runner}: choose ray or local")
    need(
        "all", "torch", "transformers", "sqlalchemy", "fastapi", "mlflow", "sklearn", "datasets", *({"ray"} & {runner})
    )
    if json_file is not None:
        folder = json_file.absolute().parent
        if (
            json_file.is_dir()
            or not folder.is_dir()
            or not os.access(json_file if json_file.exists() else folder, os.W_OK)
        ):
            raise Refusal(
                "file_unreadable", f"--json {json_file} can't be written", hint="name a file in a folder of yours"
            )
    from acclimate import demo as play

    console = Console(stderr=True, highlight=False)
    # Ended politely, the demo ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()

    def say(line: str) -> None:
        seconds = int(time.monotonic() - started)
        console.print(f"[dim]{seconds // 60}:{seconds % 60:02d}[/dim]  {line}", soft_wrap=True)

    try:
        result = play.play(data.resolve(), runner=runner, say=say, console=console)
        if json_file is not None:
            json_file.write_text(json.dumps(result.document, indent=1, sort_keys=True) + "\n", "utf-8")
    except OSError as error:
        code = "no_space" if is_full(error) else "file_unreadable"
        hint = "mend that and run the same command again: it goes on where it stopped"
        raise Refusal(code, f"{error.filename or data}: {error.strerror}", hint=hint) from error
    show(result, Console(highlight=False))
    if result.verdict != 0:
        raise typer.Exit(1)


def show(result: Any, console: Console) -> None:
    """Print the result for people: ranking, agreement, the crammer, where everything is, the auditor's verdict."""
    document = result.document
    table = Table(title=f"Ranking of {document['round']}", title_justify="left")
    for name in ("rank", "interval", "entrant", "prepared", "± se", "direct", "was", "seeds"):
        table.add_column(name, justify="left" if name == "entrant" else "right", no_wrap=True)
    for row in document["ranking"]:
        table.add_row(
            str(row["rank"]),
            f"{row['rank_low']}–{row['rank_high']}",
            row["entrant"],
            _number(row["score"]),
            _number(row["se"]),
            _number(row["direct_score"]),
            str(row["direct_rank"]),
            str(row["seeds"]),
        )
    for row in document["baselines"]:
        score, error, direct = (_number(row[key]) for key in ("score", "se", "direct_score"))
        table.add_row("–", "–", row["entrant"], score, error, direct, "–", str(row["seeds"]))
    console.print(table)
    lines = [
        "interval: ranks that the data can't rule out, 95 %, all at once · was: rank as submitted · –: baseline, unranked",
        "",
    ]
    a = document["agreement"]
    lines.append("Do the tasks agree about who is better? Mean Kendall tau-b between the tasks' rankings:")
    for protocol in ("direct", "prepared"):
        half, ceiling = _tau(a["half_" + protocol]), _tau(a["ceiling_" + protocol])
        lines.append(
            f"  {protocol:9}{_tau(a[protocol])}   (by half of the examples {half}; a task with itself, by halves: {ceiling})"
        )
    c = document["crammer"]
    lines.append(
        f"{c['entrant']} had crammed {c['task']}: rank {c['direct_rank']} on it as submitted, "
        f"rank {c['prepared_rank']} once all were prepared alike."
    )
    lines += ["", f"report   {document['report']}", f"bundle   {document['bundle']}"]
    lines += [
        f"MLflow   {document['tracking_uri']} (competition {document['competition']}, round {document['round_name']})"
    ]
    lines += [f"         {result.mlflow_command}"]
    lines += [f"auditor  {result.verdict_line}", f"         {result.verify_command}"]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def _tau(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
