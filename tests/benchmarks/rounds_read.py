"""How long `acclimate.load_rounds` takes beside MLflow's own search of the same runs and reading of the same artifacts.

One round of 200 entrants and 3 seeds is projected into MLflow on SQLite; its runs are then copied within the database into nine more rounds,
whose runs have the same artifacts: writing is not what is measured.
"""

import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "journeys"))

ROUNDS, ENTRANTS, TURNS = 10, 200, 2
_COPIED = ("tags", "latest_metrics", "params")


def measure(folder: Path, *, rounds: int = ROUNDS, entrants: int = ENTRANTS) -> list[tuple[str, float]]:
    """Seconds of both ways with and without single examples, the least of some turns, and the ratios."""
    uri = _filled(folder, rounds=rounds, entrants=entrants)
    rows: list[tuple[str, float]] = []
    for what, examples in (("runs", False), ("runs and single examples", True)):
        (own, own_busy), (plain, plain_busy) = _least(_load, uri, examples), _least(_search, uri, examples)
        label = f"{rounds} rounds of {entrants} entrants × 3 seeds, {what}"
        rows += [(f"{label}: load_rounds", own), (f"{label}: MLflow's search and artifacts", plain)]
        rows += [(f"{label}: ratio", own / plain), (f"{label}: ratio of processor time", own_busy / plain_busy)]
    return rows


def _least(read: Callable[[str, bool], int], uri: str, examples: bool) -> tuple[float, float]:
    """Seconds by the clock, and of processor time, which other work on the machine changes less."""
    seconds, busy = [], []
    for _ in range(TURNS):
        began, worked = time.perf_counter(), time.process_time()
        assert read(uri, examples) > 0
        seconds.append(time.perf_counter() - began)
        busy.append(time.process_time() - worked)
    return min(seconds), min(busy)


def _load(uri: str, examples: bool) -> int:
    import acclimate

    found = acclimate.load_rounds(uri, "digits")
    return len(found.examples()) if examples else len(found.scores)


def _search(uri: str, examples: bool) -> int:
    import mlflow
    import pandas
    import pyarrow.parquet as pq

    mlflow.set_tracking_uri(uri)
    experiments = [one.experiment_id for one in mlflow.search_experiments() if "acclimate.round" in one.tags]
    runs = mlflow.search_runs(experiments, max_results=100_000)
    if not examples:
        return len(runs)
    evaluated = runs[runs["tags.acclimate.role"] == "evaluate"]
    frames = []
    for uri_of_run in evaluated["artifact_uri"]:
        path = mlflow.artifacts.download_artifacts(f"{uri_of_run}/examples.parquet")
        frames.append(pq.ParquetFile(path).read().to_pandas())
    return len(pandas.concat(frames, ignore_index=True))


def _filled(folder: Path, *, rounds: int, entrants: int) -> str:
    from projected import made

    from acclimate import tracking

    folder.mkdir(parents=True)
    data: Any = made(
        entrants={f"entrant-{number:03d}": number / entrants for number in range(entrants)}, examples=20, losses=3
    )
    # One task's runs: 1 parent, 1 selection, 3 preparations, 4 evaluations an entrant.
    task = data.competition.tasks[0].name
    stages = tuple(stage for stage in data.stages if stage.task == task)
    scores = data.scores.filter([name == task for name in data.scores.column("task").to_pylist()])
    database = folder / "mlflow.db"
    uri = f"sqlite:///{database}"
    tracking.publish_round(uri, folder / "artifacts", replace(data, stages=stages, scores=scores))
    with sqlite3.connect(database) as connection:
        for number in range(2, rounds + 1):
            _copy(connection, number)
        connection.execute("ANALYZE")
    return uri


def _copy(connection: sqlite3.Connection, number: int) -> None:
    """Copy the first round's experiment and runs under new ids."""
    (first,) = connection.execute("SELECT experiment_id FROM experiment_tags WHERE key = 'acclimate.round'").fetchone()
    new = {"experiment_id": f"{first} + {number}", "name": f"name || '-{number}'"}
    _insert(connection, "experiments", new, f"experiment_id = {first}")
    value = f"CASE key WHEN 'acclimate.round' THEN value || '{number}' WHEN 'acclimate.round_name' THEN value || '-{number}' ELSE value END"
    _insert(
        connection,
        "experiment_tags",
        {"experiment_id": f"{first} + {number}", "value": value},
        f"experiment_id = {first}",
    )
    run = f"run_uuid || '-{number}'"
    _insert(connection, "runs", {"run_uuid": run, "experiment_id": f"{first} + {number}"}, f"experiment_id = {first}")
    for table in _COPIED:
        of_first = f"run_uuid IN (SELECT run_uuid FROM runs WHERE experiment_id = {first})"
        _insert(connection, table, {"run_uuid": run}, of_first)


def _insert(connection: sqlite3.Connection, table: str, new: dict[str, str], where: str) -> None:
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    chosen = ", ".join(new.get(column, column) for column in columns)
    connection.execute(f"INSERT INTO {table} ({', '.join(columns)}) SELECT {chosen} FROM {table} WHERE {where}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for name, seconds in measure(Path(temporary) / "rounds"):
            sys.stdout.write(f"{name}: {seconds:.2f}\n")
