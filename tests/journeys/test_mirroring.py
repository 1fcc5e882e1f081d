"""MLflow held against the record, and rebuilt from it, of a round on a real server."""

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import live as staging
import pytest
from by_hand import evaluate_all, prepare_all, publish_checked, register_baseline, release_share
from live import Live, Staged
from typer.testing import CliRunner

from acclimate import mirroring, publisher, tracking
from acclimate.cli.main import app
from acclimate_competitions.errors import Refusal

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Staged]:
    """A published round that MLflow has."""
    folder = tmp_path_factory.mktemp("mirroring")
    with staging.serve(folder) as server:
        staged = staging.open_round(server, folder)
        register_baseline(staged)
        for seed, name in enumerate(("ada", "bea")):
            entrant = staging.enter(staged, server.actor(name))
            staging.submit_model(staged, entrant, seed=seed)
        server.clock.set(staged.fields["closes"], seconds=61)
        server.tick()
        prepare_all(staged)
        server.tick()
        documents = staged.share_documents(staged.seal, staged.envelopes)
        for index in (1, 3):
            release_share(staged, index, documents[index])
        server.tick()
        evaluate_all(staged)
        server.tick()
        document = staged.live.organizer().get(f"{staged.path}/ranking").json()
        publish_checked(staged, document)
        publisher.finish(server.store, server.settings, staged.round)
        yield staged


def check(server: Live) -> list[dict[str, object]]:
    found = mirroring.check(server.store, server.settings, [], progress=lambda *_: None)
    assert found["same"] == (not found["rounds"][0]["differences"])
    return list(found["rounds"][0]["differences"])


def sync(server: Live) -> list[dict[str, object]]:
    found = mirroring.sync(server.store, server.settings, [], progress=lambda *_: None)
    return list(found["rounds"][0]["differences"])


@contextlib.contextmanager
def database(server: Live) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(server.settings.tracking.removeprefix("sqlite:///"))) as connection:
        yield connection
        connection.commit()


def one_run(connection: sqlite3.Connection, role: str, place: int = 0) -> tuple[str, str]:
    query = "SELECT r.run_uuid, r.name FROM runs r JOIN tags t USING (run_uuid) WHERE t.key = 'acclimate.role' AND t.value = ?"
    rows = connection.execute(query + " AND r.lifecycle_stage = 'active' ORDER BY r.name", (role,)).fetchall()
    return rows[place]


def test_what_differs_is_named_and_mended_and_a_second_sync_changes_nothing(staged: Staged) -> None:
    server = staged.live
    assert check(server) == []
    where = (server.settings.tracking, staged.fields["competition"], staged.round)
    before = [tracking.ranking(*where), tracking.scores(*where), tracking.preparations(*where)]
    with database(server) as connection:
        changed, changed_name = one_run(connection, "entry")
        connection.execute(
            "UPDATE latest_metrics SET value = 0.99 WHERE run_uuid = ? AND key LIKE 'test/%'", (changed,)
        )
        gone, gone_name = one_run(connection, "evaluate")
        connection.execute("UPDATE runs SET lifecycle_stage = 'deleted' WHERE run_uuid = ?", (gone,))
        torn, torn_name = one_run(connection, "evaluate", 1)
        (place,) = connection.execute("SELECT artifact_uri FROM runs WHERE run_uuid = ?", (torn,)).fetchone()
        Path(place.removeprefix("file://"), "examples.parquet").write_bytes(b"nothing")
        twin, twin_name = one_run(connection, "evaluate", 2)
    client = tracking._client(server.settings.tracking)
    experiment = client.get_run(twin).info.experiment_id
    tags = {name: value for name, value in client.get_run(twin).data.tags.items() if name.startswith("acclimate.")}
    client.create_run(experiment, tags=tags, run_name="a twin")
    foreign = client.create_run(experiment, run_name="an analyst's own")
    found = {(one["kind"], one["run"]) for one in check(server)}
    # The first of two by their id is taken for the run, the other one is extra.
    assert {("changed", changed_name), ("missing", gone_name), ("changed", torn_name)} <= found
    assert any(kind == "extra" and name in ("a twin", twin_name) for kind, name in found)
    assert len(found) in (4, 5)
    assert check(server) == check(server)
    sync(server)
    # A run's new parent makes its children anew, too.
    assert check(server) == []
    assert sync(server) == []
    after = [tracking.ranking(*where), tracking.scores(*where), tracking.preparations(*where)]
    assert all(one.equals(other) for one, other in zip(before, after, strict=True))
    assert client.get_run(foreign.info.run_id).info.lifecycle_stage == "active"


def test_a_lost_mirror_is_rebuilt_from_the_record(staged: Staged) -> None:
    server = staged.live
    where = (server.settings.tracking, staged.fields["competition"], staged.round)
    before = tracking.examples(*where)
    client = tracking._client(server.settings.tracking)
    (experiment,) = [one for one in client.search_experiments() if "acclimate.round" in one.tags]
    shutil.rmtree(experiment.artifact_location.removeprefix("file://"))
    for run in client.search_runs([experiment.experiment_id]):
        client.delete_run(run.info.run_id)
    assert {one["kind"] for one in check(server)} == {"missing"}
    sync(server)
    assert check(server) == []
    assert tracking.examples(*where).equals(before)


def test_a_round_that_was_deleted_or_renamed_as_a_whole_is_mended(staged: Staged) -> None:
    server = staged.live
    client = tracking._client(server.settings.tracking)
    (experiment,) = [one for one in client.search_experiments() if "acclimate.round" in one.tags]
    sync(server)
    (run, *_) = client.search_runs([experiment.experiment_id], "tags.`acclimate.role` = 'evaluate'")
    tags = {name: value for name, value in run.data.tags.items() if name.startswith("acclimate.")}
    client.create_run(experiment.experiment_id, tags=tags, run_name="copied")
    client.delete_experiment(experiment.experiment_id)
    assert ("changed", "experiment") in {(one["kind"], one["run"]) for one in sync(server)}
    assert check(server) == []
    client.rename_experiment(experiment.experiment_id, "mine")
    assert [one["what"] for one in sync(server)] == [["name"]]
    assert check(server) == []
    done = CliRunner().invoke(app, ["mlflow", "sync", "--data", str(server.settings.data)])
    assert "agreed already" in done.stdout
    client.rename_experiment(experiment.experiment_id, "mine")
    done = CliRunner().invoke(app, ["mlflow", "sync", "--data", str(server.settings.data)])
    assert f"{staged.round}: 1 difference, mended" in done.stdout, done.output


def test_the_commands_say_what_differs_and_end_with_one(staged: Staged) -> None:
    server = staged.live
    words = ["--data", str(server.settings.data), "--json"]
    done = CliRunner().invoke(app, ["mlflow", "check", *words])
    assert (done.exit_code, json.loads(done.stdout)["same"]) == (0, True)
    with database(server) as connection:
        run, name = one_run(connection, "entry")
        connection.execute(
            "UPDATE tags SET value = 'mallory' WHERE run_uuid = ? AND key = 'acclimate.submission'", (run,)
        )
    done = CliRunner().invoke(app, ["mlflow", "check", *words[:2]])
    assert done.exit_code == 1
    assert f"changed {name}: tag acclimate.submission" in done.stdout
    done = CliRunner().invoke(app, ["mlflow", "sync", *words])
    assert (done.exit_code, len(json.loads(done.stdout)["rounds"])) == (0, 1)
    assert CliRunner().invoke(app, ["mlflow", "check", *words]).exit_code == 0
    assert CliRunner().invoke(app, ["mlflow", *words[:2], "check"]).exit_code == 2


def test_an_outage_of_the_artifacts_is_no_difference_and_deletes_no_run(staged: Staged) -> None:
    server = staged.live
    sync(server)
    with database(server) as connection:
        run, _ = one_run(connection, "evaluate")
        (place,) = connection.execute("SELECT artifact_uri FROM runs WHERE run_uuid = ?", (run,)).fetchone()
        before = connection.execute("SELECT run_uuid, lifecycle_stage FROM runs ORDER BY 1").fetchall()
    file = Path(place.removeprefix("file://"), "examples.parquet")
    kept = file.read_bytes()
    # What is there and can't be read, by root neither: as a disk that is ill, or a share that is gone.
    file.unlink()
    file.symlink_to(file)
    for act in (check, sync):
        with pytest.raises(Refusal) as caught:
            act(server)
        assert caught.value.code == "file_unreadable"
    # A store of artifacts where nobody answers: not even a list can be had of it.
    with database(server) as connection:
        connection.execute("UPDATE runs SET artifact_uri = 's3://gone/away' WHERE run_uuid = ?", (run,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_S3_ENDPOINT_URL", "http://127.0.0.1:9")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "nobody")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        with pytest.raises(Refusal) as caught:
            sync(server)
    assert caught.value.code == "server_unreachable"
    with database(server) as connection:
        assert connection.execute("SELECT run_uuid, lifecycle_stage FROM runs ORDER BY 1").fetchall() == before
        connection.execute("UPDATE runs SET artifact_uri = ? WHERE run_uuid = ?", (place, run))
    file.unlink()
    file.write_bytes(kept)
    assert check(server) == []
    # One that is gone while the store answers is a difference.
    file.unlink()
    assert [one["kind"] for one in sync(server)] == ["changed"]
    assert check(server) == []


def test_a_round_that_there_is_not_is_refused(staged: Staged) -> None:
    server = staged.live
    with pytest.raises(Refusal) as caught:
        mirroring.check(server.store, server.settings, ["tiny-9"], progress=lambda *_: None)
    assert (caught.value.code, staged.round in caught.value.hint) == ("round_unknown", True)
