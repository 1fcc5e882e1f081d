"""Results of other programs, as the tables that `rank`, `compare` and `stability` read.

- lm-evaluation-harness (0.4): a folder with `results_*.json` and `samples_*.jsonl`, at any depth, as `--output_path` with `--log_samples` leaves them.
- Every Eval Ever (schema 0.2 and 0.3): a file `*.json` of one evaluation, or a folder of such files, with the `*.jsonl` of single samples that they name.

What can't be told apart is refused, not guessed: two results of one model and task, or samples of one number that are not the same example.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from acclimate.score_tables import Named, listed, refuse
from acclimate_competitions import reading
from acclimate_competitions.errors import Refusal

_RESULTS, _SAMPLES = "results_*.json", "samples_*.jsonl"
_EEE = "evaluation_results"
_MOST = 1 << 30
_LARGEST = 1 << 1023
"""Whole numbers above it are no floats."""


@dataclass
class _Found:
    """What was read: a row a score, where it stands, and what was taken for what."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    files: dict[tuple[str, ...], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    hashes: dict[tuple[str, str], str] = field(default_factory=dict)
    lower: set[tuple[str, str]] = field(default_factory=set)
    odd: set[str] = field(default_factory=set)
    lacking: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def claim(self, file: Path, *key: str) -> bool:
        """Whether a key comes first from this file; else it is a problem."""
        first = self.files.setdefault(key, str(file))
        if first != str(file):
            self.problems.append(f"{' / '.join(map(repr, key))}: {first} and {file}")
        return first == str(file)

    def same(self, task: str, example: str, digest: str) -> None:
        """Note what an example is; another one of its name is a problem."""
        if self.hashes.setdefault((task, example), digest) != digest:
            self.problems.append(f"{task!r}, example {example!r}: not the same for all models")

    def named(self, columns: tuple[str, ...]) -> Named:
        """The table.

        Raises:
            Refusal: scores_invalid.
        """
        refuse(
            f"{self.name}: results that can't be told apart",
            sorted(set(self.problems)),
            hint="take out the older files, or give each run a folder of its own",
        )
        notes = list(dict.fromkeys(self.notes))
        if self.odd:
            notes.append(f"{self.name}: not looked at, as no numbers: {listed(sorted(self.odd))}")
        if self.lower:
            told = listed(" ".join(one) for one in sorted(self.lower))
            notes.append(f"{self.name}: its results say that lower is better in {told}")
        types = {"score": pa.float64(), "se": pa.float64()}
        # JSON can hold half of a character, which is no text.
        halves = {
            f"{column} {row[column]!r}"
            for row in self.rows
            for column in columns
            if isinstance(row.get(column), str) and not _is_text(row[column])
        }
        refuse(f"{self.name}: names with half of a character", sorted(halves), hint="write these names as text")
        arrays = {
            column: pa.array([row.get(column) for row in self.rows], types.get(column, pa.string()))
            for column in columns
        }
        return Named(pa.table(arrays), self.name, tuple(notes), lower=frozenset(self.lower))


def is_harness(path: Path) -> bool:
    """Whether all results at a path are of lm-evaluation-harness.

    Raises:
        Refusal: file_unreadable.
    """
    return is_foreign(path) and not _forms(path)[1]


def is_foreign(path: Path) -> bool:
    """Whether a path holds another program's results, by its form."""
    return path.is_dir() or path.suffix.lower() in (".json", ".jsonl")


def items(path: Path) -> Named:
    """Scores by example: entrant, task, example, cluster, metric, score; protocol where all evaluations tell it, seed where a sample does.

    The number of an example means something in its task only. What two tasks share is told by its hash, and by nothing else.

    Raises:
        Refusal: file_unreadable, where there are none or they can't be read; scores_invalid, where they contradict each other.
    """
    found = _Found(str(path))
    harness, ever = _forms(path)
    for file in harness:
        _samples(found, file)
    for file, document in ever:
        _instances(found, file, document)
    if found.lacking and found.rows:
        found.notes.append(f"{path}: no scores of single examples of {listed(sorted(found.lacking))}")
    if not found.rows and not found.problems:
        hint = "lm_eval --log_samples writes samples_*.jsonl; without, --scores reads the means"
        raise Refusal("file_unreadable", f"{path}: no scores of single examples", hint=hint)
    told = ["protocol"] if all(row.get("protocol") for row in found.rows) else []
    told += ["seed"] if any(row.get("seed") for row in found.rows) else []
    return found.named(("entrant", "task", "example", "cluster", *told, "metric", "score"))


def scores(path: Path, *, metric: str | None = None) -> Named:
    """Means, as a long table: entrant, task, score.

    Args:
        path: folder or file.
        metric: which, where the tasks have several.

    Raises:
        Refusal: as items; scores_invalid, where several metrics stand for a task and none is chosen.
    """
    whole = means(path)
    table = whole.table
    if metric is not None:
        table = table.filter(pa.array([_is(name, metric) for name in table["metric"].to_pylist()]))
    by_cell: dict[tuple[str, str], set[str]] = {}
    for row in table.select(["entrant", "task", "metric"]).to_pylist():
        by_cell.setdefault((row["entrant"], row["task"]), set()).add(row["metric"])
    known = sorted(set(whole.table["metric"].to_pylist()))
    if not len(table) or any(len(metrics) > 1 for metrics in by_cell.values()):
        what = f"no metric {metric!r}" if metric is not None else "tasks have several metrics"
        raise Refusal("scores_invalid", f"{path}: {what}", hint=f"choose one with --metric: {listed(known, most=20)}")
    pairs = set(zip(table["task"].to_pylist(), table["metric"].to_pylist(), strict=True))
    # Of a row's metric with a filter (`exact_match,strict`) results tell the direction without.
    lower = {pair for pair in pairs if pair in whole.lower or (pair[0], pair[1].partition(",")[0]) in whole.lower}
    return Named(table.select(["entrant", "task", "score"]), whole.name, whole.notes, lower=frozenset(lower))


def means(path: Path) -> Named:
    """All means: entrant, task, metric, score, se.

    Raises:
        Refusal: as items.
    """
    found = _Found(str(path))
    harness, ever = _forms(path)
    for file in harness:
        _results(found, file)
    for file, document in ever:
        _aggregates(found, file, document)
    return found.named(("entrant", "task", "metric", "score", "se"))


def _is(name: str, wanted: str) -> bool:
    return name == wanted or name.removesuffix(",none") == wanted or f"{name},none" == wanted


def _forms(path: Path) -> tuple[list[Path], list[tuple[Path, dict[str, Any]]]]:
    """The files of results that there are, of each form.

    Raises:
        Refusal: file_unreadable.
    """
    if path.is_dir():
        files = sorted(path.rglob("*.json"))
    else:
        reading.regular(path)
        files = [path]
    harness: list[Path] = []
    ever: list[tuple[Path, dict[str, Any]]] = []
    for file in files:
        document = _json(file)
        if isinstance(document, dict) and "results" in document and "configs" in document:
            harness.append(file)
        elif isinstance(document, dict) and _EEE in document and "schema_version" in document:
            if not str(document["schema_version"]).startswith(("0.2.", "0.3.")):
                what = f"{file}: schema {document['schema_version']!r} of Every Eval Ever"
                raise Refusal("file_unreadable", what, hint="this version reads 0.2 and 0.3")
            ever.append((file, document))
    if not harness and not ever:
        raise Refusal(
            "file_unreadable",
            f"{path}: no results of lm-evaluation-harness ({_RESULTS}), none of Every Eval Ever, and no bundle",
            hint="a table is CSV or Parquet; a bundle has MANIFEST",
        )
    return harness, ever


def _object(value: Any, file: Path, what: str) -> dict[str, Any]:
    """A part of a document that must be an object; nothing where it is null.

    Raises:
        Refusal: file_unreadable.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Refusal("file_unreadable", f"{file}: {what} is no JSON object", hint="is it what the program wrote?")
    return value


def _json(file: Path) -> Any:
    try:
        if file.stat().st_size > _MOST:
            raise Refusal("file_unreadable", f"{file}: more than {_MOST} bytes", hint="is it results?")
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal("file_unreadable", f"{file}: {error}", hint="is it whole?") from error


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise Refusal("file_unreadable", f"{file}, line {number}: {error}", hint="is it whole?") from error
                if not isinstance(row, dict):
                    raise Refusal("file_unreadable", f"{file}, line {number}: no JSON object")
                yield row
    except OSError as error:
        raise Refusal("file_unreadable", f"{file}: {error.strerror}") from error


# ---- lm-evaluation-harness -----------------------------------------------------------------------------------------


def _tasks(found: _Found, file: Path) -> tuple[str, list[str], dict[str, Any]]:
    """The model, its tasks without groups, and the document."""
    document = _json(file)
    model = document.get("model_name") or file.parent.name
    results = _object(document["results"], file, "`results`")
    document["results"] = {task: _object(values, file, f"`results` of {task!r}") for task, values in results.items()}
    better = _object(document.get("higher_is_better"), file, "`higher_is_better`")
    counted = _object(document.get("n-samples"), file, "`n-samples`") or results
    tasks = [task for task in results if task in counted]
    for task in tasks:
        for metric, higher in _object(better.get(task), file, f"`higher_is_better` of {task!r}").items():
            if higher is False:
                found.lower.add((task, metric))
    return str(model), tasks, document


def _results(found: _Found, file: Path) -> None:
    model, tasks, document = _tasks(found, file)
    for task in tasks:
        if not found.claim(file, model, task):
            continue
        for key, value in document["results"][task].items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            name = metric if chosen == "none" else key
            if not _numeric(value):
                found.odd.add(f"{task} {name}")
                continue
            error = document["results"][task].get(f"{metric}_stderr,{chosen}")
            row = {"entrant": model, "task": task, "metric": name, "score": float(value)}
            found.rows.append({**row, "se": _float(error)})


def _samples(found: _Found, file: Path) -> None:
    model, tasks, _ = _tasks(found, file)
    moment = file.stem.removeprefix("results_")
    for task in tasks:
        samples = file.parent / f"samples_{task}_{moment}.jsonl"
        # A name is no path; and none of a file can hold these.
        if "/" in task or "\0" in task or not samples.is_file():
            found.lacking.add(f"{model}, {task}")
            continue
        if not found.claim(file, model, task):
            continue
        for row in _lines(samples):
            if "doc_id" not in row:
                raise Refusal("file_unreadable", f"{samples}: a sample without doc_id", hint="lm_eval 0.4 writes it")
            example, chosen = str(row["doc_id"]), row.get("filter", "none")
            found.same(task, example, str(row.get("doc_hash", "")))
            cluster, names = str(row.get("doc_hash") or f"{task}/{example}"), row.get("metrics", ())
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
                raise Refusal("file_unreadable", f"{samples}: `metrics` is no list of names")
            for metric in names:
                name = metric if chosen == "none" else f"{metric},{chosen}"
                value = _float(row.get(metric))
                if value is None:
                    found.odd.add(f"{task} {name}")
                    continue
                one = {"entrant": model, "task": task, "example": example, "cluster": cluster, "metric": name}
                found.rows.append({**one, "score": value})


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def _numeric(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= _LARGEST)


def _float(value: Any) -> float | None:
    return float(value) if _numeric(value) else None


# ---- Every Eval Ever -----------------------------------------------------------------------------------------------


def _every(file: Path, document: dict[str, Any]) -> list[dict[str, Any]]:
    results = document[_EEE]
    if not isinstance(results, list):
        raise Refusal("file_unreadable", f"{file}: `{_EEE}` is no list", hint="Every Eval Ever asks for one")
    whole = [_object(result, file, f"one of `{_EEE}`") for result in results]
    for result in whole:
        for name in ("metric_config", "score_details"):
            result[name] = _object(result.get(name), file, f"`{name}`")
    return whole


def _metric(result: dict[str, Any]) -> str:
    config = result.get("metric_config") or {}
    return str(config.get("metric_id") or config.get("metric_name") or config.get("evaluation_description") or "score")


def _aggregates(found: _Found, file: Path, document: dict[str, Any]) -> None:
    model = _model(file, document)
    for result in _every(file, document):
        task, metric = str(result.get("evaluation_name")), _metric(result)
        details = result.get("score_details") or {}
        if not found.claim(file, model, task, metric):
            continue
        if (result.get("metric_config") or {}).get("lower_is_better"):
            found.lower.add((task, metric))
        if not _numeric(details.get("score")) or _unknown(result, details.get("score")):
            found.odd.add(f"{task} {metric}")
            continue
        spread = _object(details.get("uncertainty"), file, "`uncertainty`").get("standard_error")
        error = _object(spread, file, "`standard_error`").get("value")
        row = {"entrant": model, "task": task, "metric": metric, "score": float(details["score"])}
        found.rows.append({**row, "se": _float(error)})


def _instances(found: _Found, file: Path, document: dict[str, Any]) -> None:
    model, protocol = _model(file, document), _protocol(file, document)
    results = _every(file, document)
    detailed = _object(document.get("detailed_evaluation_results"), file, "`detailed_evaluation_results`")
    if not detailed.get("file_path"):
        found.lacking |= {f"{model}, {result.get('evaluation_name')}" for result in results}
        return
    identity = str(document.get("evaluation_id"))
    if not found.claim(file, model, identity):
        return
    # Never a path that the file names: the file of that name that lies beside it.
    name = Path(str(detailed["file_path"])).name
    samples = file.parent / name
    if not samples.is_file():  # which no file can be that holds NUL or half of a character
        what = f"{file}: its samples {name!r} are not there"
        raise Refusal("file_unreadable", what, hint="the samples lie beside the evaluation")
    _require_whole(samples, detailed)
    by_id = {str(result["evaluation_result_id"]): [result] for result in results if result.get("evaluation_result_id")}
    by_name: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_name.setdefault(str(result.get("evaluation_name")), []).append(result)
    for row in _lines(samples):
        if str(row.get("evaluation_id", identity)) != identity:
            what = f"{samples}: a sample of {row['evaluation_id']!r}, not of {identity!r}"
            raise Refusal("file_unreadable", what, hint="each evaluation has samples of its own")
        task, example = str(row.get("evaluation_name")), str(row.get("sample_id"))
        of = by_id.get(str(row.get("evaluation_result_id"))) or by_name.get(task, [])
        names = list(dict.fromkeys(map(_metric, of)))
        if len(names) > 1:
            found.notes.append(
                f"{model!r}, {task!r}: of which metric the samples are isn't told ({listed(names)}): `score`"
            )
        metric = names[0] if len(names) == 1 else "score"
        if any(result["metric_config"].get("lower_is_better") for result in of):
            found.lower.add((task, metric))
        if row.get("sample_hash"):
            found.same(task, example, str(row["sample_hash"]))
        value = _object(row.get("evaluation"), samples, "`evaluation`").get("score")
        told = _object(row.get("metadata"), samples, "`metadata`")
        cluster = str(told.get("cluster") or row.get("sample_hash") or f"{task}/{example}")
        one = {"entrant": model, "task": task, "example": example, "cluster": cluster, "metric": metric}
        # Repetitions are a seed as written here, an epoch as written of Inspect, which has a first one always.
        epoch = str(told.get("epoch") or "")
        one |= {"protocol": protocol, "seed": str(told.get("seed") or ("" if epoch == "1" else epoch))}
        # A sample with an error has a score that stands for nothing.
        score = None if row.get("error") or any(_unknown(result, value) for result in of) else value
        found.rows.append({**one, "score": _float(score)})


def _require_whole(samples: Path, detailed: dict[str, Any]) -> None:
    """Hold a file of samples against what its evaluation says of it.

    Raises:
        Refusal: file_unreadable.
    """
    algorithm, told = detailed.get("hash_algorithm"), detailed.get("checksum")
    if not told or algorithm not in ("sha256", "md5"):
        return
    try:
        with samples.open("rb") as stream:
            digest = hashlib.file_digest(stream, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise Refusal(
            "file_unreadable", f"{samples}: {error.strerror}", hint="the samples lie beside the evaluation"
        ) from error
    if digest != str(told).lower():
        what = f"{samples}: {algorithm} {digest}, but its evaluation says {told!r}"
        raise Refusal("file_unreadable", what, hint="is it whole, and of this evaluation?")


def _unknown(result: dict[str, Any], value: Any) -> bool:
    """Whether a score stands for the level that means unknown."""
    return bool(result["metric_config"].get("has_unknown_level")) and value == -1


def _protocol(file: Path, document: dict[str, Any]) -> str:
    source = _object(document.get("source_metadata"), file, "`source_metadata`")
    return str(_object(source.get("additional_details"), file, "`additional_details`").get("protocol") or "")


def _model(file: Path, document: dict[str, Any]) -> str:
    model = _object(document.get("model_info"), file, "`model_info`").get("id")
    if not model:
        raise Refusal("file_unreadable", f"{file}: no model_info.id", hint="Every Eval Ever asks for it")
    return str(model)
