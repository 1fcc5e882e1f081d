"""`acclimate export`: scores of rounds, bundles, tables or other programs' results, as tables for any tool, or as Every Eval Ever.

As CSV or Parquet a folder gets `examples` (long: a row a score), `scores` (a row an entrant and set, with error and counts) and for each protocol
`table-PROTOCOL` (entrants × sets): `rank`, `compare` and `stability` read all of them, of one protocol. As Every Eval Ever (every_eval_ever.py) it gets
for each entrant one evaluation of one protocol, and beside it the single samples.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from acclimate import __version__, directions, every_eval_ever, example_tables, foreign_results, item_sources
from acclimate.score_tables import Named, Source
from acclimate_competitions import confidence, tables
from acclimate_competitions.errors import Refusal
from acclimate_competitions.items import Items, arrange
from acclimate_competitions.tables import PROTOCOLS

FORMATS = ("csv", "parquet", "every-eval-ever")


def export(source: Source, out: Path, *, form: str, options: Mapping[str, Any], at: datetime) -> dict[str, Any]:
    """Write scores into a folder that is not there yet, or empty.

    Args:
        source: as the items of `acclimate.rank`.
        out: the folder.
        form: one of FORMATS.
        options: protocol, metric, tasks; without protocol tables have both, each named, and Every Eval Ever the prepared one. lower_is_better says so
            in Every Eval Ever, where the source doesn't know it.
        at: when, for Every Eval Ever.

    Returns:
        {out, files, notes}.

    Raises:
        Refusal: file_unreadable, scores_invalid, bundle_invalid, holdout_private; no_space.
    """
    if form not in FORMATS:
        hint = f"one of {', '.join(FORMATS)}; acclimate rank --latex prints a ranking as a LaTeX table"
        raise Refusal("scores_invalid", f"no format {form!r}", hint=hint)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refusal("file_unreadable", f"{out} is there and not empty", hint="name a folder that is not there yet")
    notes: dict[str, None] = {}
    given = {name: value for name, value in options.items() if value is not None}
    parts = _parts(source, given, form=form)
    found: dict[str, Items] = {}
    labels: dict[str, list[str]] = {}
    for protocol, (named, left) in parts.items():
        rows, said = example_tables.rows(named, left)
        found[protocol] = arrange(rows)
        notes |= dict.fromkeys(said)
        for one in found[protocol].sets:
            own = {label for label, of in zip(rows.examples, rows.sets, strict=True) if of == one}
            labels[one] = sorted(own)
    out.mkdir(parents=True, exist_ok=True)
    if form == "every-eval-ever":
        ((protocol, (named, left)),) = parts.items()
        if protocol:
            notes |= {f"of the protocol {protocol}; --protocol chooses": None}
        sets = found[protocol].sets
        own_metrics = _metrics(named, given, sets)
        lower = _lower(own_metrics, named, left, sets)
        # Of a path the name alone: where a table lay is nobody's affair.
        about = every_eval_ever.About(Path(named.name).name, protocol, _library(source), own_metrics, lower, at)
        files = every_eval_ever.write(out, found[protocol], labels, about)
    else:
        files = _tables(out, {protocol: named.table for protocol, (named, _) in parts.items()}, found, form)
    return {"out": str(out), "files": files, "notes": list(notes)}


def _parts(source: Source, chosen: dict[str, Any], *, form: str) -> dict[str, tuple[Named, dict[str, Any]]]:
    """The long tables to export, by protocol ("" where a source knows none), and the options that are left."""
    wanted = chosen.get("protocol")
    one = form == "every-eval-ever"
    if item_sources.is_rounds(source):
        names = [wanted] if wanted else [item_sources.PROTOCOL] if one else list(PROTOCOLS)
        return {name: item_sources.opened(source, {**chosen, "protocol": name}) for name in names}
    table, left = item_sources.opened(source, chosen)
    named = table if isinstance(table, Named) else _as_named(table)
    if "protocol" not in named.table.column_names:
        return {"": (named, left)}
    left.pop("protocol", None)
    known = sorted(set(named.table["protocol"].to_pylist()))
    names = [wanted] if wanted else [item_sources.PROTOCOL] if one and len(known) > 1 else known
    if unknown := [name for name in names if name not in known]:
        hint = f"there are {', '.join(known)}"
        raise Refusal("scores_invalid", f"{named.name}: no protocol {unknown[0]!r}", hint=hint)
    return {name: (_of(named, name), left) for name in names}


def _library(source: Source) -> tuple[str, str]:
    """Name and version of the program that evaluated, as far as its form tells."""
    if item_sources.is_rounds(source):
        return "acclimate", __version__
    return (
        "lm_eval" if isinstance(source, str | Path) and foreign_results.is_harness(Path(source)) else "unknown",
        "unknown",
    )


def _metrics(named: Named, given: Mapping[str, Any], sets: Sequence[str]) -> dict[str, str]:
    """The metric of each set, as far as it is known."""
    if named.metrics:
        return dict(named.metrics)
    if given.get("metric") is not None:
        return dict.fromkeys(sets, str(given["metric"]))
    columns = {column.lower(): column for column in named.table.column_names}
    words = {str(word) for word in named.table[columns["metric"]].to_pylist()} if "metric" in columns else set()
    return dict.fromkeys(sets, words.pop()) if len(words) == 1 else {}


def _lower(own: Mapping[str, str], named: Named, left: Mapping[str, Any], sets: Sequence[str]) -> frozenset[str]:
    """The sets in which lower is better: as asked for, as the source says, or as the metric is known."""
    if left.get("lower_is_better") is not None:
        return frozenset(sets if left["lower_is_better"] else ())
    return frozenset(left.get("lower", ())) | {
        one for one in sets if own.get(one) in directions.LOSSES or (one, own.get(one)) in named.lower
    }


def _as_named(source: Source) -> Named:
    from acclimate import score_tables

    columns = score_tables.read(source)
    cells = {
        name: [None if score_tables.absent(cell) else str(cell) for cell in own] for name, own in columns.cells.items()
    }
    table = pa.table({name: pa.array(own, pa.string()) for name, own in cells.items()})
    return Named(table, columns.name, columns.notes)


def _of(named: Named, protocol: str) -> Named:
    """The rows of one protocol, without the column."""
    kept = named.table.filter(pa.array([name == protocol for name in named.table["protocol"].to_pylist()]))
    return dataclasses.replace(named, table=kept.drop_columns(["protocol"]))


def _tables(out: Path, parts: Mapping[str, pa.Table], found: Mapping[str, Items], form: str) -> list[str]:
    long = []
    for protocol, table in parts.items():
        if protocol:
            table = table.append_column("protocol", pa.repeat(pa.scalar(protocol), len(table)))
        long.append(table)
    files = [_write(out, "examples", pa.concat_tables(long), form)]
    rows: list[dict[str, Any]] = []
    for protocol, items in found.items():
        own = _summaries(items)
        rows += [{**row, "protocol": protocol} if protocol else row for row in own]
    files.append(_write(out, "scores", pa.Table.from_pylist(rows), form))
    for protocol, items in found.items():
        wide: dict[str, Any] = {"entrant": list(items.entrants)}
        for name, column in zip(items.sets, items.means(), strict=True):
            wide[name or "score"] = pa.array(column, pa.float64())
        files.append(_write(out, f"table-{protocol}" if protocol else "table", pa.table(wide), form))
    return files


def _write(out: Path, name: str, table: pa.Table, form: str) -> str:
    if form == "parquet":
        tables.write(table, out / f"{name}.parquet")
        return f"{name}.parquet"
    from pyarrow import csv

    csv.write_csv(table, out / f"{name}.csv")
    return f"{name}.csv"


def _summaries(items: Items) -> list[dict[str, Any]]:
    """A row an entrant and set: its score, its standard error by cluster and seed, and how many scores are known and missing."""
    rows = []
    for place, name in enumerate(items.sets):
        alone = items.alone(place)
        spread = np.array(confidence.standard_errors(alone.errors()))
        for number, (entrant, score) in enumerate(zip(alone.entrants, alone.scores(), strict=True)):
            values = alone.values[0][number]
            error = float(spread[number])
            rows.append(
                {
                    "entrant": entrant,
                    "set": name,
                    "score": score,
                    "se": None if np.isnan(error) else error,
                    "n": int((~np.isnan(values)).sum()),
                    "missing": int(np.isnan(values).sum()),
                }
            )
    return rows
