"""A score table taken apart into its evaluations: one for each entrant, protocol, task and seed, with means and errors."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from acclimate_competitions import digests

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Evaluation:
    """The scores of one evaluation; summaries: metric -> {"": mean, ".se", ".n", ".missing"}."""

    entrant: str
    protocol: str
    task: str
    seed: int | None
    table: "pa.Table"
    summaries: Mapping[str, Mapping[str, float | None]]


def groups(scores: "pa.Table") -> Iterator[Evaluation]:
    """The evaluations of a score table (tables.SCORES), by entrant, protocol, task and seed."""
    names = ("entrant", "protocol", "task", "seed")
    ordered = scores.sort_by([(name, "ascending") for name in (*names, "metric", "example")]).combine_chunks()
    keys = list(zip(*(ordered.column(name).to_pylist() for name in names), strict=True))
    start = 0
    for key, rows in groupby(keys):
        table = ordered.slice(start, sum(1 for _ in rows))
        start += table.num_rows
        columns = (table.column(name).to_pylist() for name in ("metric", "cluster", "score"))
        by_metric = groupby(zip(*columns, strict=True), key=lambda row: row[0])
        summaries = {metric: _summary((cluster, score) for _, cluster, score in found) for metric, found in by_metric}
        entrant, protocol, task, seed = key
        yield Evaluation(entrant, protocol, task, seed, table, summaries)


def _summary(rows: Iterable[tuple[str, float | None]]) -> dict[str, float | None]:
    """Mean of the known scores, its cluster-robust standard error, how many are known and how many are not."""
    all_rows = list(rows)
    known = [(cluster, score) for cluster, score in all_rows if score is not None]
    counts: dict[str, float | None] = {".n": len(known), ".missing": len(all_rows) - len(known)}
    if not known:
        return counts
    mean = math.fsum(score for _, score in known) / len(known)
    residuals: dict[str, list[float]] = {}
    for cluster, score in known:
        residuals.setdefault(cluster, []).append(score - mean)
    squares = math.fsum(math.fsum(values) ** 2 for values in residuals.values())
    g = len(residuals)
    return {"": mean, ".se": math.sqrt(squares * g / (g - 1)) / len(known) if g > 1 else None, **counts}


def examples(table: "pa.Table", targets: Mapping[str, str]) -> bytes:
    """examples.parquet: example, cluster, metric, target (digest of the target's text, null where unknown), score, reason."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    known = {target: digests.of_bytes(target.encode()) for target in set(targets.values())}
    column = [known.get(targets.get(example, ""), None) for example in table.column("example").to_pylist()]
    shown = table.select(["example", "cluster", "metric"]).append_column("target", pa.array(column, pa.string()))
    for name in ("score", "reason"):
        shown = shown.append_column(name, table.column(name))
    sink = pa.BufferOutputStream()
    pq.write_table(shown, sink, compression="zstd", write_statistics=False)
    written: bytes = sink.getvalue().to_pybytes()
    return written
