"""Every Eval Ever, schema 0.3.0: scores by example as its files, one evaluation an entrant with its samples beside it.

What the schema has a place for is written: seed and cluster of a sample in its `metadata`, the protocol among the details of the source, the metric
with its direction. What it has none for is said otherwise: a sample without a score has an `error`. Inputs and answers are left empty, which no
table of scores has. https://github.com/evaleval/every_eval_ever
"""

import hashlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from acclimate_competitions import confidence, digests, measures, metrics
from acclimate_competitions.items import Items

SCHEMA = "0.3.0"
"""As written."""
_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")
_RESERVED = frozenset(
    {"data", "con", "prn", "aux", "nul", *(f"{word}{number}" for word in ("com", "lpt") for number in range(1, 10))}
)
"""What no folder there may be called."""


@dataclass(frozen=True)
class About:
    """What is known of the scores beside themselves.

    Attributes:
        source: what they come from, in words.
        protocol: "" where the source knows none.
        library: name and version of the program that evaluated; "unknown" what isn't known.
        metrics: set -> metric; of others it isn't known.
        lower: sets in which lower is better.
        at: when.
    """

    source: str
    protocol: str
    library: tuple[str, str]
    metrics: Mapping[str, str]
    lower: frozenset[str]
    at: datetime

    @property
    def moment(self) -> str:
        """Seconds of Unix."""
        return f"{self.at.timestamp():.0f}"


def write(out: Path, items: Items, labels: Mapping[str, Sequence[str]], about: About) -> list[str]:
    """Two files an entrant, under `data/` of a folder that is there.

    Args:
        out: the folder.
        items: scores.
        labels: of each set its examples' names, sorted.
        about: what is known of them.

    Returns:
        The files' paths in the folder.
    """
    whole = [
        [_result(items.alone(place), number, about) for number in range(len(items.entrants))]
        for place in range(len(items.sets))
    ]
    collection = "-".join(word for word in (about.source, about.protocol) if word)
    files = []
    for number, entrant in enumerate(items.entrants):
        identity = "/".join((_word(collection), entrant.replace("/", "_"), about.moment))
        rows = [row for place in range(len(items.sets)) for row in _samples(items, (number, place), labels, about)]
        # In ASCII: some programs take other marks than \n for the end of a line.
        data = b"".join(
            json.dumps({"evaluation_id": identity, **row}, allow_nan=False).encode() + b"\n" for row in rows
        )
        developer, _, model = entrant.rpartition("/")
        folder = f"data/acclimate/{_word(developer or 'unknown')}/{_word(model)}"
        # The schema asks for a random UUID's form; from the content, the same scores have the same name.
        stem = f"{folder}/{uuid.UUID(bytes=hashlib.sha256(identity.encode() + data).digest()[:16], version=4)}"
        (out / folder).mkdir(parents=True, exist_ok=True)
        (out / f"{stem}_samples.jsonl").write_bytes(data)
        document = {
            "schema_version": SCHEMA,
            "evaluation_id": identity,
            "retrieved_timestamp": about.moment,
            "source_metadata": {
                "source_name": about.source,
                "source_type": "evaluation_run",
                "source_organization_name": "unknown",
                "evaluator_relationship": "third_party",
                "additional_details": {"protocol": about.protocol} if about.protocol else {},
            },
            "eval_library": dict(zip(("name", "version"), about.library, strict=True)),
            "model_info": {
                "name": model,
                "id": entrant,
                **({"developer": developer} if developer else {}),
                "additional_details": {"deployment_type": "unknown", "model_availability": "unknown"},
            },
            "evaluation_results": [results[number] for results in whole if results[number] is not None],
            "detailed_evaluation_results": {
                "format": "jsonl",
                "file_path": f"{stem}_samples.jsonl",
                "hash_algorithm": "sha256",
                "checksum": digests.of_bytes(data).removeprefix("sha256:"),
                "total_rows": len(rows),
            },
        }
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        (out / f"{stem}.json").write_text(text, "utf-8")
        files += [f"{stem}.json", f"{stem}_samples.jsonl"]
    return files


def _word(name: str) -> str:
    """A name as a folder's."""
    word = _PLAIN.sub("-", name)[:80].strip(".") or "unnamed"
    return f"_{word}" if word.partition(".")[0].lower() in _RESERVED else word


def _binary(values: Any) -> bool:
    """Whether scores are of 0 and 1 alone."""
    return bool(np.isin(values[~np.isnan(values)], (0.0, 1.0)).all())


def _result(alone: Items, number: int, about: About) -> dict[str, Any] | None:
    """An entrant's score in the only set of `alone`; None where it has none."""
    name, values = alone.sets[0], alone.values[0]
    score = alone.scores()[number]
    if score is None:
        return None
    error = confidence.standard_errors(alone.errors())[number]
    own = values[number]
    spread: dict[str, Any] = {"num_samples": int((~np.isnan(own)).any(axis=0).sum())}
    if not np.isnan(error):
        spread["standard_error"] = {"value": error, "method": "analytic"}
    details = {
        "clusters": len(np.unique(alone.places[0])),
        "seeds": len(alone.seeds),
        "missing": int(np.isnan(own).sum()),
    }
    return {
        "evaluation_result_id": name or "all",
        "evaluation_name": name or "all",
        "source_data": {"dataset_name": name or "all", "source_type": "other"},
        "metric_config": _metric(name, values, about),
        "score_details": {
            "score": score,
            "details": {key: str(value) for key, value in details.items()},
            "uncertainty": spread,
        },
    }


def _metric(name: str, values: Any, about: About) -> dict[str, Any]:
    """What is known of a set's metric; a range only where it is one of ours, and all scores are in it."""
    metric = about.metrics.get(name, "")
    config: dict[str, Any] = {"lower_is_better": name in about.lower, "metric_id": metric or "acclimate.score"}
    if _binary(values):
        return {**config, "score_type": "binary"}
    known = metrics.METRICS.get(metric) or measures.MEASURES.get(metric)
    if known is None:
        return config
    low, high = known.low, known.high
    inside = (values >= (-np.inf if low is None else low)) & (values <= (np.inf if high is None else high))
    if not (inside | np.isnan(values)).all():
        return config
    bounds = {"min_score": "-Infinity" if low is None else low, "max_score": "Infinity" if high is None else high}
    return {**config, "score_type": "continuous", **bounds}


def _samples(
    items: Items, at: tuple[int, int], labels: Mapping[str, Sequence[str]], about: About
) -> list[dict[str, Any]]:
    """The samples of an entrant in a set, whose places `at` has: one a seed and example."""
    entrant, place = at
    of = items.sets[place]
    best = 0.0 if of in about.lower else 1.0
    rows = []
    for number, seed in enumerate(items.seeds):
        for example, label in enumerate(labels[of]):
            value = float(items.values[place][entrant, number, example])
            cluster = items.clusters[items.places[place][example]]
            told = {"seed": seed} if seed else {}
            row: dict[str, Any] = {
                "schema_version": SCHEMA,
                "model_id": items.entrants[entrant],
                "evaluation_name": of or "all",
                "evaluation_result_id": of or "all",
                "sample_id": label,
                "interaction_type": "single_turn",
                "input": {"raw": "", "reference": []},
                "output": {"raw": []},
                "answer_attribution": [],
                "evaluation": {"score": 0.0 if np.isnan(value) else value, "is_correct": value == best},
                "metadata": {**told, "cluster": cluster},
            }
            # Unknown is not zero, which the schema can't say: the error says it.
            rows.append({**row, "error": "not scored"} if np.isnan(value) else row)
    return rows
