"""`acclimate export`: scores of rounds, bundles, tables or other programs' results, as tables for any tool, or as Every Eval Ever.

As CSV or Parquet a folder gets `examples` (long: a row a score), `scores` (a row an entrant and set, with error and counts) and for each protocol
`table-PROTOCOL` (entrants × sets): `rank`, `compare` and `stability` read the first and the last. As Every Eval Ever (schema 0.3.0) it gets for
each entrant one evaluation of one protocol, and beside it the single samples, whose scores are means over seeds.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from acclimate import __version__, example_tables, item_sources
from acclimate.score_tables import Named, Source
from acclimate_competitions import confidence, digests, tables
from acclimate_competitions.errors import Refusal
from acclimate_competitions.items import Items, arrange
from acclimate_competitions.tables import PROTOCOLS

FORMATS = ("csv", "parquet", "every-eval-ever")
SCHEMA = "0.3.0"
"""Of Every Eval Ever, as written."""
_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")


def export(source: Source, out: Path, *, form: str, options: Mapping[str, Any], at: datetime) -> dict[str, Any]:
    """Write scores into a folder that is not there yet, or empty.

    Args:
        source: as the items of `acclimate.rank`.
        out: the folder.
        form: one of FORMATS.
        options: protocol, metric, tasks; without protocol tables have both, each named, and Every Eval Ever the prepared one.
        at: when, for Every Eval Ever.

    Returns:
        {out, files, notes}.

    Raises:
        Refusal: file_unreadable, scores_invalid, bundle_invalid, holdout_private; no_space.
    """
    if form not in FORMATS:
        raise Refusal("scores_invalid", f"no format {form!r}", hint=f"one of {', '.join(FORMATS)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refusal("file_unreadable", f"{out} is there and not empty", hint="name a folder that is not there yet")
    notes: dict[str, None] = {}
    parts = _parts(source, {name: value for name, value in options.items() if value is not None}, form=form)
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
        ((protocol, (named, _)),) = parts.items()
        if protocol:
            notes |= {f"of the protocol {protocol}; --protocol chooses": None}
        if len(found[protocol].seeds) > 1 or found[protocol].clustered:
            lost = "the form has neither seeds nor clusters: scores are means over seeds, and errors from them are too small"
            notes |= {lost: None}
        files = _every_eval_ever(out, found[protocol], labels, about=(protocol, named.name), at=at)
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
    return Named(kept.drop_columns(["protocol"]), named.name, named.notes)


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


# ---- Every Eval Ever -----------------------------------------------------------------------------------------------


def _every_eval_ever(
    out: Path, items: Items, labels: Mapping[str, Sequence[str]], *, about: tuple[str, str], at: datetime
) -> list[str]:
    """Two files an entrant; about: the protocol, and what the scores come from."""
    protocol, name = about
    moment = f"{at.timestamp():.0f}"
    summaries = {(row["entrant"], row["set"]): row for row in _summaries(items)}
    files = []
    for number, entrant in enumerate(items.entrants):
        identity = f"acclimate/{entrant}/{moment}"
        samples = [
            row for place in range(len(items.sets)) for row in _instances(items, (number, place), labels, identity)
        ]
        data = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in samples)
        developer, _, model = entrant.rpartition("/")
        folder = f"data/acclimate/{_word(developer or 'unknown')}/{_word(model)}"
        # The schema asks for a random UUID's form; from the content, the same scores have the same name.
        stem = f"{folder}/{uuid.UUID(bytes=hashlib.sha256(identity.encode() + data).digest()[:16], version=4)}"
        (out / folder).mkdir(parents=True, exist_ok=True)
        (out / f"{stem}_samples.jsonl").write_bytes(data)
        own = [summaries[entrant, one] for one in items.sets]
        document = {
            "schema_version": SCHEMA,
            "evaluation_id": identity,
            "retrieved_timestamp": moment,
            "source_metadata": {
                "source_name": name,
                "source_type": "evaluation_run",
                "source_organization_name": "unknown",
                "evaluator_relationship": "third_party",
                "additional_details": {"protocol": protocol} if protocol else {},
            },
            "eval_library": {"name": "acclimate", "version": __version__},
            "model_info": {
                "name": entrant,
                "id": entrant,
                "additional_details": {"deployment_type": "unknown", "model_availability": "unknown"},
            },
            "evaluation_results": [_result(row, binary=items.binary) for row in own if row["score"] is not None],
            "detailed_evaluation_results": {
                "format": "jsonl",
                "file_path": f"{stem}_samples.jsonl",
                "hash_algorithm": "sha256",
                "checksum": digests.of_bytes(data).removeprefix("sha256:"),
                "total_rows": len(samples),
            },
        }
        (out / f"{stem}.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", "utf-8")
        files += [f"{stem}.json", f"{stem}_samples.jsonl"]
    return files


def _word(name: str) -> str:
    """A name as a folder's."""
    return _PLAIN.sub("-", name).strip(".")[:80] or "unnamed"


def _result(row: Mapping[str, Any], *, binary: bool) -> dict[str, Any]:
    spread: dict[str, Any] = {"num_samples": row["n"]}
    if row["se"] is not None:
        spread["standard_error"] = {"value": row["se"], "method": "analytic"}
    return {
        "evaluation_result_id": row["set"] or "all",
        "evaluation_name": row["set"] or "all",
        "source_data": {"dataset_name": row["set"] or "all", "source_type": "other"},
        # Whether lower is better no table of scores tells; as everywhere here, higher is.
        "metric_config": {
            "lower_is_better": False,
            "metric_id": "score",
            **({"score_type": "binary"} if binary else {}),
        },
        "score_details": {"score": row["score"], "uncertainty": spread},
    }


def _instances(
    items: Items, at: tuple[int, int], labels: Mapping[str, Sequence[str]], identity: str
) -> list[dict[str, Any]]:
    """The samples of an entrant in a set, whose places `at` has."""
    entrant, place = at
    name, values = items.sets[place] or "all", items.values[place][entrant]
    rows = []
    for example, label in enumerate(labels[items.sets[place]]):
        known = values[:, example][~np.isnan(values[:, example])]
        score = float(known.mean()) if known.size else None
        row: dict[str, Any] = {
            "schema_version": f"instance_level_eval_{SCHEMA}",
            "evaluation_id": identity,
            "model_id": items.entrants[entrant],
            "evaluation_name": name,
            "evaluation_result_id": name,
            "sample_id": label,
            "interaction_type": "single_turn",
            "input": {"raw": "", "reference": []},
            "output": {"raw": []},
            "answer_attribution": [],
            "evaluation": {"score": 0.0 if score is None else score, "is_correct": score == 1.0},
        }
        # Unknown is not zero, which the schema can't say: the error says it.
        rows.append(row if score is not None else {**row, "error": "not scored"})
    return rows
