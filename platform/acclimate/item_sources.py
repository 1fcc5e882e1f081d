"""Where scores by example come from beside a table: published rounds in MLflow, a round's bundle, results of other programs.

Each becomes a long table as `--items` takes it. Of a round one protocol and the metric of its ranking are taken; direct and prepared scores are
never pooled. Of several rounds each is a set where they are compared with each other, else each of their tasks is.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from acclimate import (
    corrected_scores,
    directions,
    example_tables,
    foreign_results,
    joined_items,
    measured_items,
    round_links,
    score_tables,
    tracked_rows,
)
from acclimate.round_links import Linked
from acclimate.score_tables import Named, Source, listed
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record, was_given_up

PROTOCOL = "prepared"
"""The protocol of a round that counts where none is chosen."""
_AGGREGATES = {
    "mean": "the mean over its tasks (mean)",
    "mean_rank": "the mean of ranks in its tasks (mean_rank)",
    "win_rate": "the share of others beaten in its tasks (win_rate)",
}
COLUMNS = ("entrant", "task", "protocol", "seed", "metric", "example", "cluster", "score")


@dataclass(frozen=True)
class Bundle:
    """A round's bundle: its folder, or its ZIP."""

    path: Path


@dataclass(frozen=True)
class Round:
    """A round as it was published.

    Attributes:
        name: of the round.
        scores: by example, with COLUMNS; None where the holdout stays private.
        metrics: task -> the metric of its ranking.
        baselines: who is beside the ranking.
        ranking: as Ranking.document(); None where it is not known.
        public_data: whether the definition says that the data were public before; None where it is not known.
        linked: what ties it to other rounds; None where it is not known.
        version: of its ranking; above 1 where it was revised and has scores, which are judged as that version has them.
        aggregate: how its ranking makes one score of several tasks.
        unranked: entrants beside the ranking too, as they declared a conflict of interest.
        given_up: whose work its organizer gave up, and why, a sentence each; none where it is not known.
        entrants: who stands in its ranking; none where it is not known.
        others: metrics that its scores are not by, and that its predictions can be judged by.
    """

    name: str
    scores: pa.Table | None
    metrics: Mapping[str, str]
    baselines: frozenset[str]
    ranking: Mapping[str, Any] | None = None
    public_data: bool | None = None
    linked: Linked | None = None
    version: int = 1
    aggregate: str = "mean"
    unranked: frozenset[str] = frozenset()
    given_up: tuple[str, ...] = ()
    entrants: frozenset[str] = frozenset()
    others: tuple[str, ...] = ()


def opened(
    source: Source, options: Any, *, rounds_are_sets: bool = False, as_published: bool = False
) -> tuple[Source, Any]:
    """A source as a table that `--items` takes, and the options that are left to be looked at there.

    Args:
        source: rounds of `acclimate.load_rounds`, a Bundle, the path of a bundle or of another program's results, or several tables, which are
            joined; anything else is given back.
        options: protocol, metric and tasks choose what is taken of rounds.
        rounds_are_sets: of several rounds each is a set, not each of their tasks.
        as_published: a round of several tasks keeps the way that its ranking joins them by; else their mean is taken.

    Raises:
        Refusal: bundle_invalid, file_unreadable, holdout_private, scores_invalid.
    """
    if isinstance(source, list | tuple):
        source = joined_items.joined(source)
    if isinstance(source, str | Path) and is_bundle(Path(source)):
        source = Bundle(Path(source))
    if isinstance(source, Bundle):
        return chosen(
            [of_bundle(source.path, metric=options.get("metric"))],
            f"the bundle {source.path.name!r}",
            (),
            options,
            as_published=as_published,
        )
    if hasattr(source, "example_table"):
        wanted = options.get("protocol", PROTOCOL)
        if wanted not in ("direct", "prepared"):
            raise Refusal("scores_invalid", f"no protocol {wanted!r}", hint="direct or prepared")
        rounds, notes = of_tracked(source, wanted), list(source.notes)
        if rounds_are_sets and len(rounds) > 1 and options.get("common"):
            rounds, options = standing_only(rounds, notes), {**options, "common": False}
        return chosen(rounds, "MLflow", notes, options, sets=rounds_are_sets, as_published=as_published)
    if isinstance(source, str | Path) and foreign_results.is_foreign(Path(source)):
        return example_tables.directed(foreign_results.items(Path(source)), options)
    return measured_items.opened(source, options) or example_tables.directed(source, options)


def require_one_scale(items: Source) -> None:
    """Refuse a table whose tasks are of several scales, where a mean over them is needed.

    Raises:
        Refusal: scores_invalid.
    """
    if isinstance(items, Named) and items.mixed and items.aggregate == "mean":
        raise Refusal(
            "scores_invalid",
            f"{items.name}: tasks are scored by metrics of several scales or directions, of which there is no mean",
            hint="--tasks chooses tasks of one; stability takes each task as a set of its own",
        )


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


def of_tracked(found: Any, protocol: str) -> list[Round]:
    """The rounds of `acclimate.load_rounds`, with scores under one protocol.

    Raises:
        Refusal: holdout_private.
    """
    parts = []
    for name in found.rounds["round"]:
        table = found.example_table(rounds=[name], protocol=protocol).select(COLUMNS)
        ranking = found.ranking[found.ranking["round"] == name]
        baselines = frozenset(ranking[ranking["baseline"]]["entrant"])
        tags = found.tracked[name].tags
        own = tracked_rows.metrics_of(tags)
        aggregate = (tracked_rows.policy_of(tags) or {}).get("aggregate", "mean")
        beside = unranked(ranking)
        parts.append(
            Round(
                name,
                table,
                own,
                baselines,
                linked=found.linked(name),
                aggregate=aggregate,
                unranked=beside,
                given_up=given_up_in(found, name),
                entrants=frozenset(ranking["entrant"]) - baselines,
            )
        )
    return parts


def unranked(ranking: Any) -> frozenset[str]:
    """Entrants whom a round's published ranking, a data frame of `acclimate.load_rounds`, leaves without a rank; none where nothing is ranked yet."""
    entries = ranking[~ranking["baseline"].astype(bool)]
    known = entries["rank"].notna()
    return frozenset(entries[~known]["entrant"]) if known.any() else frozenset()


def standing_only(rounds: Sequence[Round], notes: list[str]) -> list[Round]:
    """Rounds with the scores of those entries alone that all of them have, of the same model; who is left out is noted.

    Raises:
        Refusal: scores_invalid, where there is none.
    """
    same, _ = round_links.standing([one.linked or Linked(one.name) for one in rounds])
    entrants = {name for one in rounds if one.scores is not None for name in _values(one.scores, "entrant")}
    kept = sorted(set(same) - frozenset().union(*(one.baselines for one in rounds)))
    if not kept:
        raise Refusal(
            "scores_invalid",
            f"no entry stands in all of {listed([one.name for one in rounds])} with the same model",
            hint="without --common entrants are compared whatever their models are, with --missing exclude those that all have",
        )
    gone = sorted(entrants - set(kept) - frozenset().union(*(one.baselines for one in rounds)))
    notes.append(f"only the {len(kept)} entries that all rounds have with the same model")
    if gone:
        notes.append(f"left out, as not in all rounds with the same model: {listed(gone, most=40)}")
    wanted = pa.array([*kept, *sorted({name for one in rounds for name in one.baselines})], pa.string())
    return [
        replace(
            one,
            scores=None if one.scores is None else one.scores.filter(pc.is_in(one.scores["entrant"], wanted)),
            entrants=one.entrants & set(kept),
        )
        for one in rounds
    ]


def of_bundle(path: Path, *, metric: str | None = None) -> Round:
    """The round of a bundle, once its files are what its MANIFEST says.

    Args:
        path: folder or ZIP.
        metric: by which its predictions are judged, too, where its scores are by others.

    Raises:
        Refusal: bundle_invalid.
    """
    from acclimate.verify import files, order
    from acclimate.verify.report import Failed
    from acclimate_competitions import definition, tables
    from acclimate_competitions.metrics import MAJORITY

    try:
        with files.opened(path) as bundle:
            files.manifest(bundle)
            own = order.own_records(bundle)
            called = str(own[0][1]["name"])
            ranking = corrected_scores.ranking_in_force(bundle, own)
            competition = definition.parse(bundle.read("definition.toml"))
            accepted = _accepted(own)
            linked = _linked(own, accepted, called, competition, ranking)
            names = corrected_scores.score_files(bundle, competition, own)
            given_up = given_up_of((record for _, record in own), accepted)
            if not names and competition.round.holdout_after != "private":
                raise Refusal("bundle_invalid", f"the bundle {path} has no scores of single examples")
            parts = [tables.read(bundle.path(name), tables.SCORES).select(COLUMNS) for name in names]
            version, correction = corrected_scores.correction_in_force(bundle, own) if parts else (1, None)
            if correction is not None:
                parts = [corrected_scores.judged(bundle, competition, correction, own).select(COLUMNS)]
                competition = correction.competition(competition)
            others = corrected_scores.other_metrics(competition) if parts else ()
            if metric in others:
                scored = corrected_scores.by_metric(bundle, competition, correction, metric, own=own)
                parts.append(scored.select(COLUMNS))
    except Failed as failed:
        raise Refusal(
            "bundle_invalid", f"the bundle {path}: {failed}", hint="acclimate verify tells all that is wrong with it"
        ) from failed
    return Round(
        called,
        pa.concat_tables(parts) if parts else None,
        {task.name: task.metric for task in competition.tasks},
        frozenset({*competition.ranking.baselines, MAJORITY}),
        ranking,
        competition.data_is_public,
        linked,
        version,
        competition.ranking.aggregate,
        frozenset(row["entrant"] for row in ranking["baselines"]) - {*competition.ranking.baselines, MAJORITY},
        given_up,
        frozenset(row["entrant"] for row in ranking["ranking"]),
        others,
    )


def _accepted(own: Sequence[tuple[int, Record]]) -> dict[int, str]:
    """Submission -> whose it is.

    Raises:
        Failed: a record is of another one.
    """
    from acclimate.verify.report import Failed

    accepted = {index: record["entrant"] for index, record in own if record.type == "SubmissionAccepted"}
    for index, record in own:
        if "submission" in record.fields and record["submission"] not in accepted:
            raise Failed(
                f"log entry {index}", f"it is of submission {record['submission']}, which the round did not accept"
            )
    return accepted


def given_up_of(found: Iterable[Record], entrants: Mapping[int, str]) -> tuple[str, ...]:
    """What of these records' work was given up, a sentence for each entrant, kind and reason.

    Args:
        found: any records.
        entrants: submission -> whose it is.
    """
    counted: dict[tuple[str, str, str], int] = {}
    for record in filter(was_given_up, found):
        reason = record.fields.get("given_up") or record["failed"]["reason"]
        key = (entrants[record["submission"]], "preparation" if "failed" in record.fields else "evaluation", reason)
        counted[key] = counted.get(key, 0) + 1
    return tuple(_given_up(*key, count=count) for key, count in counted.items())


def given_up_in(found: Any, name: str) -> tuple[str, ...]:
    """The same of a round of `acclimate.load_rounds`, as MLflow has it."""
    rows = found.given_up[found.given_up["round"] == name].drop(columns="round").to_dict("records")
    return tuple(_given_up(row["entrant"], row["work"], row["reason"], count=row["count"]) for row in rows)


def _given_up(entrant: str, work: str, reason: str, *, count: int) -> str:
    return f"{entrant}: {count} {work}{'' if count == 1 else 's'} {reason}"


def _linked(
    own: Sequence[tuple[int, Record]],
    accepted: Mapping[int, str],
    name: str,
    competition: Any,
    ranking: Mapping[str, Any],
) -> Linked:
    """What ties a bundle's round to others, by what its records say."""
    models = {accepted[r["submission"]]: r["base"] for _, r in own if r.type == "ModelPrepared"}
    beside = {row["entrant"]: (row["score"], row["se"]) for row in ranking["baselines"]}
    anchors = {anchor.name: beside[anchor.name] for anchor in competition.anchors if anchor.name in beside}
    return Linked(name, competition.preparation.digest, models, anchors)


def chosen(
    rounds: Sequence[Round],
    name: str,
    notes: Sequence[str],
    options: Any,
    *,
    sets: bool = False,
    as_published: bool = False,
) -> tuple[Named, dict[str, Any]]:
    """One table of rounds, as `--items` takes it: the rows of one protocol and of each task's metric, without baselines.

    Args:
        rounds: at least one.
        name: what refusals and notes call it.
        notes: what is known before.
        options: protocol, metric, tasks; those that are left are given back, with the direction of the metric.
        sets: of several rounds each is a set, not each of their tasks.
        as_published: of one round with several tasks, its ranking's way to join them is told with the table.

    Raises:
        Refusal: scores_invalid, holdout_private.
    """
    left, said = dict(options), [*notes, *_known(rounds, name)]
    if "protocol" not in left:
        said.append(f"{name}: the protocol is {PROTOCOL}, as none was chosen")
    protocol = left.pop("protocol", PROTOCOL)
    metric, wanted = left.pop("metric", None), left.get("tasks")
    parts: list[pa.Table] = []
    gone, beside = set[str](), set[str]()
    aggregate = "mean"
    for one in rounds:
        if one.scores is None:
            raise Refusal(
                "holdout_private",
                f"{name} has no scores of single examples",
                hint="of a private holdout only the whole bundle has them, which its organizer and its auditor get",
            )
        table = one.scores.filter(pc.equal(one.scores["protocol"], protocol))
        if wanted and set(wanted) <= set(_values(table, "task")):
            table = table.filter(pc.is_in(table["task"], pa.array(list(wanted), pa.string())))
        table = _of_metrics(table, one, metric, said, name=name)
        several = len(_values(table, "task")) > 1
        if several and as_published and len(rounds) == 1:
            aggregate = one.aggregate
            said.append(f"{name}: ranked by {_AGGREGATES[aggregate]}, as the definition of {one.name} declares")
        elif several and one.aggregate != "mean":
            said.append(
                f"{name}: the published ranking of {one.name} is by {one.aggregate} over its tasks; means over tasks, and ranks by them, are others"
            )
        lacking = sorted(one.entrants - one.baselines - one.unranked - set(_values(table, "entrant")))
        if lacking:
            said.append(f"{name}: left out, as without any score in round {one.name}: {listed(lacking, most=40)}")
        gone |= one.baselines & set(_values(table, "entrant"))
        beside |= (one.unranked - one.baselines) & set(_values(table, "entrant"))
        left_out = pa.array(sorted(one.baselines | one.unranked), pa.string())
        table = table.filter(pc.invert(pc.is_in(table["entrant"], left_out)))
        parts.append(table.add_column(0, "round", pa.repeat(pa.scalar(one.name, pa.string()), len(table))))
    table = pa.concat_tables(parts).drop_columns(["protocol"])
    if gone:
        said.append(f"{name}: left out, as baselines: {listed(sorted(gone), most=40)}")
    if beside:
        listing = listed(sorted(beside), most=40)
        said.append(f"{name}: left out, as they declared a conflict of interest and have no rank: {listing}")
    if not len(table):
        raise Refusal("scores_invalid", f"{name}: no scores of single examples", hint="is the ranking published?")
    if wanted and len(rounds) > 1 and set(wanted) <= set(_values(table, "task")):
        left.pop("tasks")
    scales = {directions.scale(one) for one in _values(table, "metric")}
    if sets and len(rounds) > 1 and len(scales) == 1:
        table = _by_round(table, said)
    elif len(rounds) == 1:
        table = table.drop_columns(["round"])
    left |= _directions(table, said)
    own = _by_set(table)
    if len(_values(table, "metric")) > 1:
        said.append(f"{name}: each task by its own metric, of {listed(_values(table, 'metric'))}")
        table = table.drop_columns(["metric"])
    return Named(table, name, tuple(said), len(scales) > 1, frozenset(gone), aggregate, own), left


def _by_set(table: pa.Table) -> dict[str, str]:
    """The metric of each set, of which there is one."""
    return dict(zip(example_tables.sets_of(score_tables.read(table)), table["metric"].to_pylist(), strict=True))


def _of_metrics(table: pa.Table, one: Round, metric: str | None, notes: list[str], *, name: str) -> pa.Table:
    """The rows of a metric, or of each task's own; a task that has none is refused or named, never left out in silence."""
    known = _values(table, "metric")
    if metric is not None and metric not in known:
        hint = f"there are {listed(known)}"
        hint += (
            f"; from its predictions {listed(one.others)} can be computed"
            if one.others
            else "; of a round's bundle others are computed from its predictions (--bundle PATH --metric NAME)"
        )
        raise Refusal("scores_invalid", f"{name}: no metric {metric!r} in round {one.name}", hint=hint)
    tasks = _values(table, "task")
    if metric in one.others:
        notes.append(f"{name}: {metric} is computed from the predictions of round {one.name}; it is not what ranked it")
    own = pa.array([metric or one.metrics.get(task) for task in table["task"].to_pylist()], pa.string())
    kept = table.filter(pc.equal(table["metric"], own))
    lost = sorted(set(tasks) - set(_values(kept, "task")))
    if lost and metric is None:
        hint = f"--metric chooses one of {listed(known)}"
        raise Refusal("scores_invalid", f"{name}: no scores by the metric of {listed(lost)}", hint=hint)
    if lost:
        notes.append(f"{name}: round {one.name}: left out, as without scores by {metric}: {listed(lost)}")
    return kept


def _directions(table: pa.Table, notes: list[str]) -> dict[str, Any]:
    """The options that say which way the metrics of a round go, and what their worst score is."""
    sets = example_tables.sets_of(score_tables.read(table))
    found, said = directions.of_metrics(zip(sets, table["metric"].to_pylist(), strict=True))
    notes += said
    return found


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


def _known(rounds: Sequence[Round], name: str) -> Iterator[str]:
    """What rounds tell of themselves, whatever is chosen of them."""
    for one in rounds:
        yield from (f"{one.name}: {said}" if len(rounds) > 1 else said for said in one.given_up)
        if one.version > 1:
            yield f"{name}: the ranking was revised; it and scores by example are of version {one.version}"


def _values(table: pa.Table, column: str) -> list[str]:
    return sorted(table[column].unique().to_pylist())
