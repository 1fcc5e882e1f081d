"""`acclimate.load_rounds`: the published rounds of a competition, as tidy tables read from MLflow alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from acclimate import round_links, tracked_rows, tracked_state, tracking
from acclimate.round_links import Linked
from acclimate.score_tables import listed
from acclimate.tracked_rows import Row, Shape
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_ROUNDS = (
    *("round", "id", "installation", "metric", "tasks", "holdout", "entries", "ranked"),
    *("definition_digest", "recipe_digest", "policy_digest", "code_digest", "ranking_digest"),
)


@dataclass(frozen=True)
class Rounds:
    """Rounds of a competition; each table has the same columns for every round, the first of them `round`, its name.

    Attributes:
        competition: slug.
        rounds: a row a round: round, id, installation, metric (that of its ranking), tasks, holdout (public | private), entries (how many),
            ranked (whether its ranking is published), and the digests of definition, recipe, policy, code and ranking.
        ranking: round, then as tracking.ranking.
        scores: round, then as tracking.scores.
        preparations: round, then as tracking.preparations.
        entries: round, entrant, model (its digest; null for the null predictor), baseline, anchor (whether the definition has it as one).
        given_up: round, entrant, work (preparation | evaluation), reason, count: what the organizer gave up; it has no scores.
        notes: what must be known before rounds are compared, such as different recipes.
        tracked: where single examples are read from when they are asked for.
    """

    competition: str
    rounds: "pd.DataFrame"
    ranking: "pd.DataFrame"
    scores: "pd.DataFrame"
    preparations: "pd.DataFrame"
    entries: "pd.DataFrame"
    given_up: "pd.DataFrame"
    notes: tuple[str, ...]
    tracked: Mapping[str, tracking.Tracked] = field(repr=False)

    def examples(
        self,
        *,
        rounds: Sequence[str] | None = None,
        entrant: str | None = None,
        task: str | None = None,
        protocol: str | None = None,
    ) -> "pd.DataFrame":
        """Every score of every example, fetched now: round, then as tracking.examples; narrow it to fetch less.

        Raises:
            Refusal: round_unknown; holdout_private, where the holdout of one of these rounds stays private.
        """
        table = self.example_table(rounds=rounds, entrant=entrant, task=task, protocol=protocol)
        frame = table.to_pandas().astype({"seed": "Int64"})
        by = ["round", *tracked_rows.EXAMPLES_BY]
        return frame.sort_values(by, ignore_index=True, na_position="last")

    def linked(self, name: str) -> Linked:
        """What ties a round to others."""
        return _linked(name, self.rounds, self.entries, self.ranking)

    def drift(self) -> "pd.DataFrame":
        """How far each anchor moved from a round to the next: anchor, before and after (names of rounds), score_before, score, change, se."""
        moved = round_links.drift([self.linked(name) for name in self.rounds["round"]])
        columns = ["anchor", "before", "after", "score_before", "score", "change", "se"]
        rows = [[m["anchor"], *m["rounds"], m["before"], m["after"], m["change"], m["se"]] for m in moved]
        return tracking.with_pandas().DataFrame(rows, columns=columns)

    def example_table(self, *, rounds: Sequence[str] | None = None, **narrow: str | None) -> "pa.Table":
        """The same as an Arrow table, in no order.

        Raises:
            Refusal: as examples.
        """
        import pyarrow as pa

        parts = []
        for name in list(self.tracked) if rounds is None else _known(list(self.tracked), rounds):
            part = self.tracked[name].examples(**narrow)
            parts.append(part.add_column(0, "round", pa.repeat(pa.scalar(name, pa.string()), len(part))))
        return pa.concat_tables(parts)


def load_rounds(tracking_uri: str, competition: str, rounds: Sequence[str] | None = None) -> Rounds:
    """Published rounds of a competition, from MLflow alone: no account, no server of ours.

    Args:
        tracking_uri: MLflow's address or database.
        competition: slug.
        rounds: names of rounds, or their ids; None: all.

    Returns:
        The rounds in the order asked for, else by name; examples are fetched only when they are asked for.

    Raises:
        Refusal: round_unknown, with the rounds that there are; extra_missing, server_unreachable; busy, while one of them is written.
    """
    found: dict[str, tracking.Tracked] = {}

    def find() -> Sequence[tracking.Tracked]:
        found.clear()
        found.update(_chosen(tracking.tracked(tracking_uri, competition), competition, rounds))
        return list(found.values())

    return tracked_state.whole(find, lambda _: _read(competition, dict(found)))


def _chosen(
    there: Sequence[tracking.Tracked], competition: str, rounds: Sequence[str] | None
) -> dict[str, tracking.Tracked]:
    """The rounds asked for, by name."""
    names = {one.tags.get("acclimate.round_name", one.tags["acclimate.round"]): one for one in there}
    ids = {one.tags["acclimate.round"]: name for name, one in names.items()}
    if isinstance(rounds, str):
        rounds = [rounds]
    wanted = list(names) if rounds is None else [ids.get(name, name) for name in rounds]
    return {name: names[name] for name in _known(list(names), wanted, competition)}


def _read(competition: str, found: Mapping[str, tracking.Tracked]) -> Rounds:
    pandas = tracking.with_pandas()
    rows: dict[Shape, list[Row]] = {shape: [] for shape in _SHAPES}
    described = []
    for name, one in found.items():
        by_role: dict[str, list[Any]] = {}
        for run in one.runs():
            by_role.setdefault(run.data.tags.get("acclimate.role", ""), []).append(run)
        for shape in _SHAPES:
            runs = [run for role in shape.roles for run in by_role.get(role, ())]
            rows[shape] += [{"round": name, **row} for row in tracked_rows.rows_of(shape, runs, one.tags)]
        described.append(_described(name, one.tags, len(by_role.get("entry", ()))))
    order = {name: place for place, name in enumerate(found)}
    frames = []
    for shape in _SHAPES:
        frame = pandas.DataFrame(rows[shape], columns=["round", *shape.columns])
        frame = frame.astype({column: "Int64" for column in shape.whole})
        frame["_"] = frame["round"].map(order)
        frame = frame.sort_values(["_", *shape.by], ignore_index=True, na_position="last").drop(columns="_")
        frames.append(frame)
    table = pandas.DataFrame(described, columns=list(_ROUNDS))
    ranking, scores, preparations, entries, given_up = frames
    links = [_linked(name, table, entries, ranking) for name in found]
    lost = given_up.groupby("round", sort=False)["count"].sum()
    told = [
        f"{name}: preparations and evaluations that the organizer gave up, and that have no scores: {count} (given_up says whose and why)"
        for name, count in lost.items()
    ]
    notes = [*_notes(table), *_revisions(found), *told, *round_links.notes(links)]
    return Rounds(competition, table, ranking, scores, preparations, entries, given_up, tuple(notes), found)


_SHAPES = (
    tracked_rows.RANKING,
    tracked_rows.SCORES,
    tracked_rows.PREPARATIONS,
    tracked_rows.ENTRIES,
    tracked_rows.GIVEN_UP,
)


def _linked(name: str, rounds: "pd.DataFrame", entries: "pd.DataFrame", ranking: "pd.DataFrame") -> Linked:
    own = entries[(entries["round"] == name) & entries["model"].notna()]
    anchors = set(entries[(entries["round"] == name) & entries["anchor"].astype(bool)]["entrant"])
    scored = ranking[(ranking["round"] == name) & ranking["entrant"].isin(anchors)]
    return Linked(
        name,
        rounds[rounds["round"] == name]["recipe_digest"].iloc[0],
        dict(zip(own["entrant"], own["model"], strict=True)),
        {row.entrant: (_known_number(row.score), _known_number(row.se)) for row in scored.itertuples()},
    )


def _known_number(value: Any) -> float | None:
    return None if value is None or value != value else float(value)


def _known(there: Sequence[str], wanted: Sequence[str], competition: str = "") -> list[str]:
    """The names asked for, each once.

    Raises:
        Refusal: round_unknown.
    """
    unknown = [name for name in wanted if name not in there]
    if unknown or not wanted:
        of = f" of competition {competition!r}" if competition else ""
        what = f"no round {listed(unknown)}" if unknown else "no round is asked for"
        raise Refusal("round_unknown", f"{what}{of}", hint=f"there are {listed(there, most=40)}")
    return list(dict.fromkeys(wanted))


def _described(name: str, tags: Mapping[str, str], entries: int) -> Row:
    own = {column: tags.get(f"acclimate.{column}") for column in _ROUNDS}
    return {
        **own,
        "round": name,
        "id": tags["acclimate.round"],
        "installation": tags.get("acclimate.origin"),
        "holdout": tags.get("acclimate.holdout", "public"),
        "entries": entries,
        "ranked": "acclimate.ranking_digest" in tags,
    }


def _revisions(found: Mapping[str, tracking.Tracked]) -> list[str]:
    versions = {name: int(one.tags.get("acclimate.version", "1")) for name, one in found.items()}
    return [
        f"the ranking of {name} was revised: ranking and scores by example are of version {number}, the newest in MLflow"
        for name, number in versions.items()
        if number > 1
    ]


def _notes(table: "pd.DataFrame") -> list[str]:
    notes = []
    for column, what in (("recipe_digest", "recipe"), ("metric", "metric")):
        kinds = table.groupby(column, sort=False, dropna=False)["round"].agg(list)
        if len(kinds) > 1:
            parts = "; ".join(listed(names, quoted=False) for names in kinds)
            notes.append(f"not all rounds have the same {what}, which makes each another question: {parts}")
    if len(table) > 1:
        notes.append("each round has a holdout of its own: scores of different rounds are of different examples")
    waiting = table[~table["ranked"]]["round"].tolist()
    if waiting:
        notes.append(f"without a published ranking yet: {listed(waiting, quoted=False)}")
    return notes
