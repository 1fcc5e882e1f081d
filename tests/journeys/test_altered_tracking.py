"""What somebody deleted, renamed or altered in MLflow: analysts are told in words, and what was taken away as a whole comes back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from projected import made
from typer.testing import CliRunner

import acclimate
from acclimate import projection, tracking
from acclimate.cli.main import app
from acclimate.round_data import RoundData
from acclimate_competitions.errors import Refusal


@pytest.fixture(scope="module")
def data() -> RoundData:
    return made(entrants={"ada": 0.9, "bea": 0.5}, examples=6, losses=2)


@pytest.fixture
def uri(data: RoundData, tmp_path: Path) -> Iterator[str]:
    where = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracking.publish_round(where, tmp_path / "artifacts", data)
    yield where


def client_of(uri: str) -> tuple[Any, Any]:
    client = mlflow.MlflowClient(uri)
    return client, client.get_experiment_by_name("acclimate/digits/2027-1")


def evaluations(uri: str) -> list[Any]:
    client, experiment = client_of(uri)
    return list(client.search_runs([experiment.experiment_id], "tags.`acclimate.role` = 'evaluate'"))


def folder_of(run: Any) -> Path:
    return Path(run.info.artifact_uri.removeprefix("file://"))


def told(call: Any) -> str:
    with pytest.raises(Refusal) as refused:
        call()
    assert refused.value.code == "file_unreadable"
    assert refused.value.sentence.startswith("MLflow's copy of round 2027-1 is not as it was written: ")
    assert "acclimate mlflow sync" in str(refused.value.hint)
    return refused.value.sentence


@pytest.mark.parametrize("left", [None, b"", b"nothing", b"PAR1nothingPAR1"])
def test_scores_by_example_that_are_gone_or_torn_are_told_with_their_run(uri: str, left: bytes | None) -> None:
    run = evaluations(uri)[0]
    file = folder_of(run) / "examples.parquet"
    file.unlink()
    if left is not None:
        file.write_bytes(left)
    rounds = acclimate.load_rounds(uri, "digits")
    for call in (rounds.examples, lambda: acclimate.rank(items=rounds, protocol=run.data.tags["acclimate.protocol"])):
        assert run.info.run_name in told(call)
    done = CliRunner().invoke(app, ["rank", "--tracking-uri", uri, "--competition", "digits", "--protocol", "direct"])
    assert done.exit_code in (0, 1) and isinstance(done.exception, Refusal | None)


def test_a_copy_of_a_run_that_somebody_made_is_told(uri: str) -> None:
    client, experiment = client_of(uri)
    tags = {name: value for name, value in evaluations(uri)[0].data.tags.items() if name.startswith("acclimate.")}
    client.create_run(experiment.experiment_id, tags=tags, run_name="copied")
    assert "copied has no artifact examples.parquet" in told(acclimate.load_rounds(uri, "digits").examples)


def test_tags_that_were_taken_or_altered_are_told(uri: str) -> None:
    client, experiment = client_of(uri)
    kept = dict(experiment.tags)
    for tag in ("acclimate.metrics", "acclimate.policy"):
        client.set_experiment_tag(experiment.experiment_id, tag, "{")
        found = told(lambda: acclimate.rank(items=acclimate.load_rounds(uri, "digits")))
        assert tag.removeprefix("acclimate.") in found
        client.set_experiment_tag(experiment.experiment_id, tag, kept[tag])
    run = evaluations(uri)[0]
    client.delete_tag(run.info.run_id, "acclimate.entrant")
    assert "'acclimate.entrant'" in told(lambda: acclimate.load_rounds(uri, "digits"))
    assert "'acclimate.entrant'" in told(lambda: tracking.scores(uri, "digits", "2027-1"))


def test_a_deleted_experiment_comes_back_with_what_it_had_too_much(uri: str, data: RoundData) -> None:
    client, experiment = client_of(uri)
    tags = {name: value for name, value in evaluations(uri)[0].data.tags.items() if name.startswith("acclimate.")}
    client.create_run(experiment.experiment_id, tags=tags, run_name="copied")
    client.delete_experiment(experiment.experiment_id)
    assert {one.kind for one in tracking.check(uri, data)} == {"missing"}
    assert tracking.engine(uri, data) == data.engine
    assert [(one.kind, one.run, one.what) for one in tracking.restore(uri, data)] == [
        ("changed", "experiment", ("deleted",))
    ]
    # The first of two by their id is taken for the run.
    assert "extra" in {one.kind for one in tracking.check(uri, data)}
    assert tracking.restore(uri, data) == []


@pytest.mark.parametrize("deleted", [False, True])
def test_a_renamed_experiment_gets_its_name_again(uri: str, data: RoundData, deleted: bool) -> None:
    client, experiment = client_of(uri)
    client.rename_experiment(experiment.experiment_id, "mine")
    if deleted:
        client.delete_experiment(experiment.experiment_id)
    (one,) = tracking.restore(uri, data)
    assert one.what == (("name", "deleted") if deleted else ("name",))
    assert tracking.check(uri, data) == []
    assert json.loads(client_of(uri)[1].tags["acclimate.metrics"])


def doubled(uri: str, data: RoundData) -> tuple[Any, str]:
    """A round whose experiment was renamed and then written again, as versions before this one did: a client, and the older one's id."""
    client, experiment = client_of(uri)
    client.rename_experiment(experiment.experiment_id, "mine")
    name = projection.experiment_name(data.competition.slug, data.name)
    client.create_experiment(name, f"{experiment.artifact_location}-again", dict(experiment.tags))
    tracking.publish_round(uri, None, data)
    return client, str(experiment.experiment_id)


def test_an_experiment_that_was_renamed_is_written_under_its_name_and_not_twice(uri: str, data: RoundData) -> None:
    client, experiment = client_of(uri)
    client.rename_experiment(experiment.experiment_id, "mine")
    assert [(one.kind, one.run, one.what) for one in tracking.check(uri, data)] == [
        ("changed", "experiment", ("name",))
    ]
    tracking.publish_round(uri, None, data)
    assert [one.experiment_id for one in client.search_experiments() if "acclimate.round" in one.tags] == [
        experiment.experiment_id
    ]
    assert tracking.check(uri, data) == []


def test_a_round_that_stands_twice_is_told_read_once_and_mended(uri: str, data: RoundData) -> None:
    before = tracking.ranking(uri, "digits", "2027-1")
    client, older = doubled(uri, data)
    assert [(one.kind, one.run) for one in tracking.check(uri, data)] == [("extra", "experiment 'mine'")]
    assert tracking.ranking(uri, "digits", "2027-1").equals(before)
    assert len(tracking.rounds(uri)) == len(acclimate.load_rounds(uri, "digits").rounds) == 1
    assert [(one.kind, one.run) for one in tracking.restore(uri, data)] == [("extra", "experiment 'mine'")]
    assert client.get_experiment(older).lifecycle_stage == "deleted"
    assert tracking.check(uri, data) == tracking.restore(uri, data) == []


def test_what_is_not_ours_stays_where_a_round_stood_twice(uri: str, data: RoundData) -> None:
    client, older = doubled(uri, data)
    own = client.create_run(older, run_name="my own")
    tracking.restore(uri, data)
    assert [run.info.run_id for run in client.search_runs([older])] == [own.info.run_id]
    assert not [name for name in client.get_experiment(older).tags if name.startswith("acclimate.")]
    assert tracking.check(uri, data) == []


def test_a_store_without_the_round_has_nothing_to_take_back(data: RoundData, tmp_path: Path) -> None:
    assert tracking.restore(f"sqlite:///{tmp_path / 'empty.db'}", data) == []
