"""What a report is made of: scores by example of one or more rounds, whatever they came from.

`of_items` is the seam: whoever has scores by example under one or both protocols can make a report of them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from acclimate import directions, example_tables, item_analysis, item_sources, score_tables, tracked_rows
from acclimate.analysis_options import RankOptions
from acclimate.round_links import Linked
from acclimate.score_tables import Source
from acclimate_competitions.errors import Refusal
from acclimate_competitions.items import Items

PROTOCOLS = ("direct", "prepared")


@dataclass(frozen=True)
class RoundScores:
    """One round, or one table of scores.

    Attributes:
        name: of the round, or of the file.
        items: protocol -> scores by example, nothing missing; none where the holdout stays private. The same entrants and sets under both.
        ranking: as Ranking.document() of ranking.json; direct_rank and direct_score are None where there is no direct evaluation.
        lower: whether a lower score is a better one.
        private: whether the holdout stays private.
        public_data: whether the definition says that the data were public before; None where nothing says so.
        notes: what was left out, or taken for what.
        linked: what ties it to other rounds; None where nothing says.
    """

    name: str
    items: Mapping[str, Items]
    ranking: Mapping[str, Any]
    lower: bool
    private: bool = False
    public_data: bool | None = None
    notes: tuple[str, ...] = ()
    linked: Linked | None = None

    @property
    def main(self) -> Items | None:
        """The scores that the ranking is of: prepared, where there are any."""
        return self.items.get("prepared", self.items.get("direct"))


def read(source: Source, *, options: Mapping[str, Any], name: str | None = None) -> list[RoundScores]:
    """The rounds of a source: a bundle, rounds in MLflow, or a table of scores by example, with a column `round` or without.

    Args:
        source: a path, rounds of `acclimate.load_rounds`, a pyarrow Table or a pandas DataFrame.
        options: missing (exclude, worst, fail), lower_is_better, metric, tasks.
        name: of the round, where the source does not tell it.

    Raises:
        Refusal: bundle_invalid, file_unreadable, scores_invalid.
    """
    if isinstance(source, item_sources.Bundle):
        return [_bundle(source.path, options)]
    if hasattr(source, "example_table"):
        return _tracked(source, options)
    if isinstance(source, str | Path) and item_sources.is_bundle(Path(source)):
        return [_bundle(Path(source), options)]
    table = score_tables.read(source)
    column = next((column for column in table.cells if column.lower() == "round"), None)
    called = name or (Path(source).stem if isinstance(source, str | Path) else "scores")
    if column is None:
        return [_table(source, called, options)]
    names = table.names(column)
    rounds = []
    for one in dict.fromkeys(names):
        kept = [place for place, word in enumerate(names) if word == one]
        cells = {key: [values[place] for place in kept] for key, values in table.cells.items() if key != column}
        rounds.append(_table(pa.table(cells), one, options))
    return rounds


def of_items(
    name: str, found: Mapping[str, Items], *, options: Mapping[str, Any], notes: Sequence[str] = ()
) -> RoundScores:
    """A round of scores by example by protocol: missing ones are treated, those who lack a protocol left out, a ranking made.

    Raises:
        Refusal: scores_invalid.
    """
    said, lower = list(notes), bool(options.get("lower_is_better", False))
    chosen = {"missing": "exclude", **options}
    whole = {protocol: _complete(items, chosen, said) for protocol, items in found.items()}
    common = sorted(set.intersection(*(set(items.entrants) for items in whole.values())))
    sets = sorted(set.intersection(*(set(items.sets) for items in whole.values())))
    for protocol, items in whole.items():
        gone = [one for one in items.entrants if one not in common]
        if gone:
            said.append(f"{protocol}: left out, as scored under one protocol only: {score_tables.listed(gone)}")
        ordered = items.of([items.entrants.index(one) for one in common])
        whole[protocol] = ordered.of_sets([ordered.sets.index(one) for one in sets])
    return RoundScores(name, whole, _ranking(whole, lower=lower), lower, notes=tuple(dict.fromkeys(said)))


def _table(source: Source, name: str, options: Mapping[str, Any]) -> RoundScores:
    table = score_tables.read(source)
    column = next((column for column in table.cells if column.lower() == "protocol"), None)
    known = sorted(set(table.names(column))) if column is not None else []
    unknown = [word for word in known if word not in PROTOCOLS]
    if unknown:
        hint = "a column protocol holds direct and prepared"
        raise Refusal("scores_invalid", f"{name}: unknown protocol {score_tables.listed(unknown)}", hint=hint)
    chosen = {key: options[key] for key in ("metric", "tasks") if options.get(key) is not None}
    found, notes = {}, []
    for protocol in known or ["prepared"]:
        asked = {**chosen, "protocol": protocol} if known else chosen
        table_, left = item_sources.opened(source, asked)
        found[protocol], told = example_tables.read(table_, left)
        options = {**options, **{key: left[key] for key in ("lower_is_better", "worst_score") if key in left}}
        notes += [note for note in told if "rows are of what was chosen" not in note]
    if not known:
        notes.append(f"{name}: no column says under which protocol scores were got; they are shown as prepared")
    return of_items(name, found, options=options, notes=notes)


def of_round(
    one: item_sources.Round, *, options: Mapping[str, Any], label: str, notes: Sequence[str] = (), policy: Any = None
) -> RoundScores:
    """A published round: its ranking as it was published, the rest from its scores by example under both protocols; as `_of_round`."""
    made = _of_round(one, options=options, label=label, notes=notes, policy=policy)
    return dataclasses.replace(made, linked=one.linked)


def _of_round(
    one: item_sources.Round, *, options: Mapping[str, Any], label: str, notes: Sequence[str] = (), policy: Any = None
) -> RoundScores:
    """A published round: its ranking as it was published, the rest from its scores by example under both protocols.

    Args:
        one: with its ranking.
        options: missing (else as the policy has it), metric, tasks.
        label: what refusals and notes call its source.
        notes: what is known before.
        policy: of the ranking, where the ranking does not hold it.

    Raises:
        Refusal: scores_invalid.
    """
    rule = policy or (one.ranking or {}).get("policy", {})
    lower = bool(one.metrics) and directions.LOSSES.issuperset(one.metrics.values())
    if one.scores is None:
        assert one.ranking is not None
        return RoundScores(one.name, {}, one.ranking, lower, private=True, public_data=one.public_data)
    asked = {key: options[key] for key in ("metric", "tasks") if options.get(key) is not None}
    found, told = {}, list(notes)
    for protocol in PROTOCOLS:
        table, left = item_sources.chosen([one], label, (), {**asked, "protocol": protocol})
        if table.mixed and one.ranking is not None:
            several = score_tables.listed(sorted(set(one.metrics.values())))
            why = f"{one.name}: its tasks have several metrics ({several}), so only the published ranking is shown; --metric or --tasks chooses"
            return RoundScores(one.name, {}, one.ranking, lower, public_data=one.public_data, notes=(why,))
        item_sources.require_one_scale(table)
        found[protocol], said = example_tables.read(table, left)
        told += said
    down = bool(left.get("lower_is_better", False))
    if rule.get("missing") == "fail" and not options.get("missing"):
        found, rule = _without_failed(found, told), {}
    rule = {"missing": options.get("missing") or rule.get("missing", "exclude"), "lower_is_better": down}
    rule |= {key: left[key] for key in ("worst_score",) if key in left}
    made = of_items(one.name, found, options={**options, **rule}, notes=told)
    if one.ranking is None or asked:
        notes = (*made.notes, "ranks are those of acclimate rank by what was chosen, not the published ones")
        return dataclasses.replace(made, public_data=one.public_data, notes=notes)
    counted = {row["entrant"]: row for row in made.ranking["ranking"]}
    rows = [
        {**row, **({key: counted[row["entrant"]][key] for key in ("n", "seeds")} if _uncounted(row, counted) else {})}
        for row in one.ranking["ranking"]
    ]
    return dataclasses.replace(made, ranking={**one.ranking, "ranking": rows}, lower=lower, public_data=one.public_data)


def _without_failed(found: Mapping[str, Items], notes: list[str]) -> dict[str, Items]:
    """Without those who have no score where one that is missing fails an entrant."""
    failed = {
        name
        for items in found.values()
        for name, missing in zip(items.entrants, items.missing().sum(axis=1).tolist(), strict=True)
        if missing
    }
    if failed:
        notes.append(f"without a score, as one that is missing fails an entrant: {score_tables.listed(sorted(failed))}")
    return {
        protocol: items.of([place for place, name in enumerate(items.entrants) if name not in failed])
        for protocol, items in found.items()
    }


def _uncounted(row: Mapping[str, Any], counted: Mapping[str, Any]) -> bool:
    return row.get("n") is None and row["entrant"] in counted


def _bundle(path: Path, options: Mapping[str, Any]) -> RoundScores:
    found = item_sources.of_bundle(path, metric=options.get("metric"))
    made = of_round(found, options=options, label=f"the bundle {path.name!r}")
    notes = list(dict.fromkeys((*made.notes, *found.given_up)))
    if not made.private:
        notes.append("the bundle was read, not verified: acclimate verify does that")
    return dataclasses.replace(made, notes=tuple(notes))


def _tracked(found: Any, options: Mapping[str, Any]) -> list[RoundScores]:
    """Rounds of `acclimate.load_rounds`, which must be ranked."""
    waiting = found.rounds[~found.rounds["ranked"]]["round"].tolist()
    if waiting:
        hint = "name others with --round"
        raise Refusal("scores_invalid", f"no ranking is published yet of {score_tables.listed(waiting)}", hint=hint)
    made = []
    for name in found.rounds["round"]:
        tags = found.tracked[name].tags
        policy = tracked_rows.policy_of(tags)
        private = tags.get("acclimate.holdout") == "private"
        frame = found.ranking[found.ranking["round"] == name]
        own = dict(tracked_rows.metrics_of(tags))
        scores = None if private else found.example_table(rounds=[name]).select(item_sources.COLUMNS)
        baselines = frozenset(frame[frame["baseline"]]["entrant"])
        document = _published(frame, policy, own) if policy is not None else None
        if private and document is None:
            raise Refusal(
                "holdout_private",
                f"round {name}: MLflow has too little of it for a report",
                hint="acclimate mlflow sync",
            )
        beside = item_sources.unranked(frame)
        one = item_sources.Round(
            name,
            scores,
            own,
            baselines,
            document,
            linked=found.linked(name),
            unranked=beside,
            entrants=frozenset(frame["entrant"]) - baselines,
        )
        read = of_round(one, options=options, label="MLflow", notes=found.notes, policy=policy)
        told = (*read.notes, *item_sources.given_up_in(found, name))
        made.append(dataclasses.replace(read, notes=tuple(dict.fromkeys(told))))
    return made


def _published(frame: Any, policy: Mapping[str, Any], tasks: Mapping[str, str]) -> dict[str, Any]:
    """The ranking document of what MLflow says of entries and baselines."""
    rows: list[dict[str, Any]] = [
        {key: None if value != value or value is None else value for key, value in row.items() if key != "round"}
        for row in frame.astype(object).where(frame.notna(), None).to_dict("records")
    ]
    for row in rows:
        row |= {"tier": None, "n": None, "seeds": None}
        row |= {key: int(row[key]) for key in ("rank", "rank_low", "rank_high", "direct_rank") if row[key] is not None}
    ranked = [row for row in rows if not row.pop("baseline")]
    beside = [row for row in rows if row["rank"] is None]
    return {
        "policy": dict(policy),
        "ranking": [row for row in ranked if row["rank"] is not None],
        "baselines": beside,
        "tasks": {name: [] for name in tasks},
    }


def _complete(found: Items, options: Mapping[str, Any], notes: list[str]) -> Items:
    """Items without missing cells: where they are left out, each entrant's own mean of the set and seed stands for them."""
    held = example_tables.answered(found, options, notes)
    values = []
    for value in held.values:
        known = ~np.isnan(value)
        count = known.sum(axis=2, keepdims=True)
        mean = np.divide(np.where(known, value, 0.0).sum(axis=2, keepdims=True), np.maximum(count, 1))
        whole = known.sum(axis=(1, 2), keepdims=True)
        overall = np.where(known, value, 0.0).sum(axis=(1, 2), keepdims=True) / np.maximum(whole, 1)
        values.append(np.where(known, value, np.where(count > 0, mean, overall)))
    if int(held.missing().sum()):
        notes.append(
            "where scores are missing, an entrant's mean of the others stands for them: errors look smaller than they are"
        )
    return dataclasses.replace(held, values=tuple(values), gaps=held.with_gaps())


def _ranking(found: Mapping[str, Items], *, lower: bool) -> dict[str, Any]:
    """A ranking document of scores by example: that of `acclimate.rank`, with the direct evaluation's ranks beside it."""
    main = found["prepared"] if "prepared" in found else found["direct"]
    options = RankOptions(lower_is_better=lower, sets="marginal")
    made = item_analysis.ranked(main, options)
    direct = item_analysis.ranked(found["direct"], options)["ranking"] if set(found) == set(PROTOCOLS) else []
    before = {row["entrant"]: row for row in direct}
    rows = [
        {
            **row,
            "tier": 0,
            "n": sum(value.shape[2] for value in main.values),
            "seeds": len(main.seeds),
            "direct_rank": before[row["entrant"]]["rank"] if before else None,
            "direct_score": before[row["entrant"]]["score"] if before else None,
        }
        for row in made["ranking"]
    ]
    interval = {"kind": made["sets"], "level": made["level"], "draws": made["draws"]}
    return {"policy": {"interval": interval}, "ranking": rows, "baselines": [], "tasks": {}}
