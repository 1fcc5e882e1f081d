"""Where scores by example come from beside a table: published rounds in MLflow, a round's bundle, results of other programs.

Each becomes a long table as `--items` takes it. Of a round one protocol and the metric of its ranking are taken; direct and prepared scores are
never pooled. Of several rounds each is a set where they are compared with each other, else each of their tasks is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from acclimate import foreign_results, measured_items
from acclimate.score_tables import Named, Source, listed
from acclimate_competitions.errors import Refusal

PROTOCOL = "prepared"
"""The protocol of a round that counts where none is chosen."""
_COLUMNS = ("entrant", "task", "protocol", "seed", "metric", "example", "cluster", "score")


@dataclass(frozen=True)
class Bundle:
    """A round's bundle: its folder, or its ZIP."""

    path: Path


@dataclass(frozen=True)
class _Round:
    """A round's scores by example.

    Attributes:
        name: of the round.
        scores: with _COLUMNS.
        metrics: task -> the metric of its ranking.
        baselines: who is beside the ranking.
    """

    name: str
    scores: pa.Table
    metrics: Mapping[str, str]
    baselines: frozenset[str]


def opened(source: Source, options: Any, *, rounds_are_sets: bool = False) -> tuple[Source, Any]:
    """A source as a table that `--items` takes, and the options that are left to be looked at there.

    Args:
        source: rounds of `acclimate.load_rounds`, a Bundle, the path of a bundle or of another program's results; anything else is given back.
        options: protocol, metric and tasks choose what is taken of rounds.
        rounds_are_sets: of several rounds each is a set, not each of their tasks.

    Raises:
        Refusal: bundle_invalid, file_unreadable, holdout_private, scores_invalid.
    """
    if isinstance(source, str | Path) and is_bundle(Path(source)):
        source = Bundle(Path(source))
    if isinstance(source, Bundle):
        return _chosen([_of_bundle(source.path)], f"the bundle {source.path.name}", (), options, sets=False)
    if hasattr(source, "example_table"):
        wanted = options.get("protocol", PROTOCOL)
        if wanted not in ("direct", "prepared"):
            raise Refusal("scores_invalid", f"no protocol {wanted!r}", hint="direct or prepared")
        return _chosen(_of_rounds(source, wanted), "MLflow", source.notes, options, sets=rounds_are_sets)
    if isinstance(source, str | Path) and foreign_results.is_foreign(Path(source)):
        return foreign_results.items(Path(source)), options
    return measured_items.opened(source, options) or (source, options)


def is_rounds(source: Source) -> bool:
    """Whether a source is of rounds, so that it knows protocols."""
    return (
        isinstance(source, Bundle)
        or hasattr(source, "example_table")
        or (isinstance(source, str | Path) and is_bundle(Path(source)))
    )


def is_bundle(path: Path) -> bool:
    """Whether there is a round's bundle at a path, by its form."""
    return (path / "MANIFEST").is_file() or (path.suffix.lower() == ".zip" and path.is_file())


def _of_rounds(found: Any, protocol: str) -> list[_Round]:
    parts = []
    metrics = dict(zip(found.rounds["round"], found.rounds["metric"], strict=True))
    for name, metric in metrics.items():
        table = found.example_table(rounds=[name], protocol=protocol).select(_COLUMNS)
        ranking = found.ranking[found.ranking["round"] == name]
        baselines = frozenset(ranking[ranking["baseline"]]["entrant"])
        parts.append(_Round(name, table, {task: metric for task in _values(table, "task")}, baselines))
    return parts


def _of_bundle(path: Path) -> _Round:
    from acclimate.verify import files, order
    from acclimate.verify.report import Failed
    from acclimate_competitions import definition, tables
    from acclimate_competitions.metrics import MAJORITY

    try:
        with files.opened(path) as bundle:
            files.manifest(bundle)
            called = order.round_name(bundle)
            competition = definition.parse(bundle.read("definition.toml"))
            names = bundle.under("scores")
            if not names:
                raise Refusal(
                    "holdout_private" if competition.round.holdout_after == "private" else "bundle_invalid",
                    f"the bundle {path} has no scores of single examples",
                    hint="of a private holdout only the whole bundle has them, which its organizer and its auditor get",
                )
            parts = [tables.read(bundle.path(name), tables.SCORES).select(_COLUMNS) for name in names]
    except Failed as failed:
        raise Refusal(
            "bundle_invalid", f"the bundle {path}: {failed}", hint="acclimate verify tells all that is wrong with it"
        ) from failed
    metrics = {task.name: task.metric for task in competition.tasks}
    return _Round(called, pa.concat_tables(parts), metrics, frozenset({*competition.ranking.baselines, MAJORITY}))


def _chosen(
    rounds: Sequence[_Round], name: str, notes: Sequence[str], options: Any, *, sets: bool
) -> tuple[Named, dict[str, Any]]:
    """One table of rounds: the rows of one protocol and metric, without baselines."""
    left, said = dict(options), list(notes)
    if "protocol" not in left:
        said.append(f"{name}: the protocol is {PROTOCOL}, as none was chosen")
    protocol = left.pop("protocol", PROTOCOL)
    metric = left.pop("metric", None)
    parts: list[pa.Table] = []
    gone: set[str] = set()
    for one in rounds:
        table = one.scores.filter(pc.equal(one.scores["protocol"], protocol))
        known = _values(table, "metric")
        if metric is not None and metric not in known:
            hint = f"there are {listed(known)}"
            raise Refusal("scores_invalid", f"{name}: no metric {metric!r} in round {one.name}", hint=hint)
        own = pa.array([metric or one.metrics.get(task) for task in table["task"].to_pylist()], pa.string())
        table = table.filter(pc.equal(table["metric"], own))
        gone |= one.baselines & set(_values(table, "entrant"))
        table = table.filter(pc.invert(pc.is_in(table["entrant"], pa.array(sorted(one.baselines), pa.string()))))
        parts.append(table.add_column(0, "round", pa.repeat(pa.scalar(one.name, pa.string()), len(table))))
    table = pa.concat_tables(parts).drop_columns(["protocol"])
    if gone:
        said.append(f"{name}: left out, as baselines: {listed(sorted(gone), most=40)}")
    if not len(table):
        raise Refusal("scores_invalid", f"{name}: no scores of single examples", hint="is the ranking published?")
    wanted = left.get("tasks")
    if wanted and set(wanted) <= set(_values(table, "task")):
        table = table.filter(pc.is_in(table["task"], pa.array(list(wanted), pa.string())))
        if len(rounds) > 1:
            left.pop("tasks")
    if sets and len(rounds) > 1:
        table = _by_round(table, said)
    elif len(rounds) == 1:
        table = table.drop_columns(["round"])
    return Named(table, name, tuple(said)), left


def _by_round(table: pa.Table, notes: list[str]) -> pa.Table:
    """The table with each round as one set, where all its tasks have as many examples, so that they count alike."""
    if len(_values(table, "task")) == 1:
        return table.drop_columns(["task"])
    counted = table.group_by(["round", "task"]).aggregate([("example", "count_distinct")]).to_pylist()
    sizes: dict[str, set[int]] = {}
    for row in counted:
        sizes.setdefault(row["round"], set()).add(row["example_count_distinct"])
    if any(len(found) > 1 for found in sizes.values()):
        notes.append("tasks of a round differ in their number of examples: each task of each round is a set of its own")
        return table
    notes.append("each round is a set; its tasks count alike, as they have as many examples each")
    example = pc.binary_join_element_wise(table["task"], table["example"], ": ")
    table = table.set_column(table.column_names.index("example"), "example", example)
    return table.drop_columns(["task"])


def _values(table: pa.Table, column: str) -> list[str]:
    return sorted(table[column].unique().to_pylist())
