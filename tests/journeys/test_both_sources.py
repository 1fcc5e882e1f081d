"""One round, read from its bundle and from MLflow alone: the same ranking, and the same words about it."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
import rounds_made

import acclimate
from acclimate import tracking
from acclimate.round_data import EntryData, RoundData
from acclimate_competitions import digests

AGGREGATES = ("mean", "mean_rank", "win_rate")


@pytest.fixture(scope="module", params=AGGREGATES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A played round whose definition joins its tasks in one of the ways; what reads its bundle, and what reads MLflow."""
    folder = tmp_path_factory.mktemp(request.param)
    text = rounds_made.DEFINITION.replace('aggregate = "mean"', f'aggregate = "{request.param}"')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "DEFINITION", text)
        made = rounds_made.make(folder / "made")
        bundle = made.write(folder / "bundle")
        uri = f"sqlite:///{folder / 'mlflow.db'}"
        tracking.publish_round(uri, folder / "artifacts", tracked(made))
        found = acclimate.load_rounds(uri, made.competition.slug)
        yield {"aggregate": request.param, "bundle": bundle, "MLflow": found, "made": made}


def tracked(made: rounds_made.Made) -> RoundData:
    """A played round as MLflow gets it, without its stages."""
    names = [row["entrant"] for row in made.ranking["ranking"]]
    return RoundData(
        competition=made.competition,
        name=str(made.fold().defined["name"]),
        round=made.round,
        origin="acclimate.example.org/log",
        at=datetime(2027, 1, 1, tzinfo=UTC),
        code=digests.of_bytes(b"code"),
        engine="local",
        files={},
        entries=tuple(EntryData(name, f"submission-{name}", {}, digests.of_json([name])) for name in names),
        stages=(),
        targets={
            task: dict(zip(table["example"].to_pylist(), table["target"].to_pylist(), strict=True))
            for task, table in made.holdout.items()
        },
        scores=pa.concat_tables(made.scores.values()),
        ranking=made.ranking,
    )


def read(both: dict[str, Any], call: str, **options: Any) -> dict[str, tuple[Any, list[str]]]:
    """What a function gives of either source: its result, and its notes with one name for the source."""
    found = {}
    for source, label in (("bundle", f"the bundle {both['bundle'].name!r}"), ("MLflow", "MLflow")):
        result = getattr(acclimate, call)(items=both[source], missing="worst", **options)
        notes = [note.replace(label, "the source") for note in result.pop("notes")]
        found[source] = (result, notes)
    return found


@pytest.mark.parametrize("call", ["rank", "stability"])
@pytest.mark.parametrize("protocol", ["direct", "prepared"])
def test_bundle_and_mlflow_give_the_same_and_say_the_same(both: dict[str, Any], call: str, protocol: str) -> None:
    found = read(both, call, protocol=protocol)
    assert found["bundle"] == found["MLflow"]


def test_both_say_how_the_round_joins_its_tasks(both: dict[str, Any]) -> None:
    aggregate, name = both["aggregate"], both["made"].fold().defined["name"]
    for notes in (notes for _, notes in read(both, "rank").values()):
        (said,) = [note for note in notes if "as the definition of" in note]
        assert said.startswith("the source: ranked by the ")
        assert said.endswith(f"({aggregate}), as the definition of {name} declares")
    for notes in (notes for _, notes in read(both, "stability").values()):
        other = f"the source: the published ranking of {name} is by {aggregate} over its tasks"
        assert any(note.startswith(other) for note in notes) == (aggregate != "mean"), notes
