import re
import shutil
import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from projected import AT, made

from acclimate import tracking
from acclimate.tracking import RoundData
from acclimate_competitions import digests
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal

BASELINE = "untrained"
SKILL = {"amber-fox": 0.8, "blue-whale": 0.65, "crammer": 0.4, "untrained": 0.1}


@dataclass(frozen=True)
class Published:
    uri: str
    artifacts: Path
    data: RoundData
    competition: Competition

    @property
    def where(self) -> tuple[str, str, str]:
        return self.uri, self.competition.slug, self.competition.round.name

    def count(self, table: str) -> int:
        with sqlite3.connect(self.uri.removeprefix("sqlite:///")) as connection:
            return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without a round: making its tables takes seconds, copying it does not."""
    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    with pytest.raises(Refusal, match="MLflow has no round"):
        tracking.ranking(f"sqlite:///{path}", "digits", "2027-1")
    return path


@pytest.fixture
def uri(tmp_path: Path, empty_store: Path) -> str:
    shutil.copyfile(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    folder = tmp_path_factory.mktemp("mlflow")
    data = made(entrants=SKILL, examples=60, losses=230, failed="crammer", diverged="blue-whale")
    found = Published(f"sqlite:///{folder / 'mlflow.db'}", folder / "mlartifacts", data, data.competition)
    before = replace(data, scores=None, ranking=None, holdout={}, targets={})
    tracking.publish_preparations(found.uri, found.artifacts, before)
    tracking.publish_round(found.uri, found.artifacts, data)
    return found


def test_the_ranking_from_mlflow_alone_is_the_published_one(published: Published):
    frame = tracking.ranking(*published.where)
    document = published.data.ranking
    assert document is not None
    ranked = frame[~frame["baseline"]]
    keys = ["entrant", "rank", "rank_low", "rank_high", "score", "se", "direct_rank", "direct_score"]
    assert ranked[keys].to_dict("records") == [{key: row[key] for key in keys} for row in document["ranking"]]
    baselines = frame[frame["baseline"]]
    assert list(baselines["entrant"]) == ["majority", "untrained"]
    assert baselines[["rank", "rank_low", "rank_high", "direct_rank"]].isna().all(axis=None)
    assert list(baselines["score"]) == [row["score"] for row in document["baselines"]]


def test_nothing_of_the_holdout_before_the_opening(tmp_path: Path, uri: str):
    data = made(entrants={"amber-fox": 0.5}, examples=5, losses=3)
    tracking.publish_preparations(uri, tmp_path / "artifacts", data)
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        keys = {key for (key,) in connection.execute("SELECT DISTINCT key FROM metrics")}
        datasets = {name for (name,) in connection.execute("SELECT name FROM datasets")}
        roles = {value for (value,) in connection.execute("SELECT value FROM tags WHERE key = 'acclimate.role'")}
    assert not [key for key in keys if key.startswith(("test/", "direct/", "rank/"))]
    assert keys >= {"train/loss", "valid/nll", "valid/base/nll", "valid/lr-0.002-epoch-6/nll", "cost/tokens"}
    assert not [name for name in datasets if "holdout" in name]
    assert roles == {"entry", "select", "prepare"}
    assert not list(tmp_path.rglob("examples.parquet"))
    frame = tracking.ranking(uri, "digits", "2027-1")
    assert list(frame["entrant"]) == ["amber-fox"]
    assert frame[["rank", "score"]].isna().all(axis=None)


def test_publishing_again_changes_nothing(published: Published):
    names = (
        "runs",
        "metrics",
        "latest_metrics",
        "params",
        "tags",
        "datasets",
        "inputs",
        "experiments",
        "experiment_tags",
    )
    before = {name: published.count(name) for name in names}
    files = {path: path.stat().st_mtime_ns for path in published.artifacts.rglob("*")}
    tracking.publish_preparations(published.uri, published.artifacts, published.data)
    tracking.publish_round(published.uri, published.artifacts, published.data)
    assert {name: published.count(name) for name in names} == before
    assert {path: path.stat().st_mtime_ns for path in published.artifacts.rglob("*")} == files


def test_what_was_lost_or_torn_is_written_again(published: Published):
    before = tracking.scores(*published.where)
    runs = published.count("runs")
    with sqlite3.connect(published.uri.removeprefix("sqlite:///")) as connection:
        query = "SELECT r.run_uuid FROM runs r JOIN tags t USING (run_uuid) WHERE t.key = 'acclimate.role' AND t.value = 'evaluate'"
        first, second = [run for (run,) in connection.execute(query + " LIMIT 2")]
        connection.execute("DELETE FROM tags WHERE run_uuid = ? AND key = 'acclimate.content'", (first,))
        connection.execute("DELETE FROM metrics WHERE run_uuid = ?", (first,))
        connection.execute("DELETE FROM latest_metrics WHERE run_uuid = ?", (first,))
        connection.execute("UPDATE runs SET status = 'RUNNING' WHERE run_uuid = ?", (second,))
    assert len(tracking.scores(*published.where)) == len(before) - 1
    tracking.publish_round(published.uri, published.artifacts, published.data)
    assert tracking.scores(*published.where).equals(before)
    assert published.count("runs") == runs
    with sqlite3.connect(published.uri.removeprefix("sqlite:///")) as connection:
        assert connection.execute("SELECT count(*) FROM runs WHERE status = 'RUNNING'").fetchone() == (0,)


def test_a_second_run_of_one_stage_is_deleted(published: Published):
    from mlflow import MlflowClient

    client = MlflowClient(published.uri)
    experiment = client.get_experiment_by_name("acclimate/digits/2027-1")
    key = published.data.stages[0].key
    client.create_run(experiment.experiment_id, tags={"acclimate.stage_key": key, "acclimate.role": "select"})
    tracking.publish_round(published.uri, published.artifacts, published.data)
    runs = client.search_runs([experiment.experiment_id], f"tags.`acclimate.stage_key` = '{key}'")
    assert [run.data.metrics.get("valid/nll") is not None for run in runs] == [True]


def test_runs_whose_parent_was_one_of_two_and_is_deleted_get_the_one_that_stays(published: Published):
    from mlflow import MlflowClient

    client = MlflowClient(published.uri)
    experiment = client.get_experiment_by_name("acclimate/digits/2027-1").experiment_id
    entry = client.search_runs([experiment], "tags.`acclimate.role` = 'entry'")[0]
    child = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{entry.info.run_id}'")[0].info.run_id
    other = client.create_run(experiment, tags=entry.data.tags)
    client.set_tag(child, "mlflow.parentRunId", max(entry.info.run_id, other.info.run_id))
    tracking.publish_round(published.uri, published.artifacts, published.data)
    alive = {run.info.run_id for run in client.search_runs([experiment])}
    assert client.get_run(child).data.tags["mlflow.parentRunId"] in alive
    assert len(alive & {entry.info.run_id, other.info.run_id}) == 1


def test_runs_carry_tags_inputs_and_artifacts(published: Published):
    from mlflow import MlflowClient

    client = MlflowClient(published.uri)
    stage = next(s for s in published.data.stages if s.kind == "evaluate" and s.seed == 12 and s.entrant == "amber-fox")
    experiment = client.get_experiment_by_name("acclimate/digits/2027-1")
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`acclimate.stage_key` = '{stage.key}'")
    tags = {name.removeprefix("acclimate."): value for name, value in run.data.tags.items()}
    assert (tags["role"], tags["task"], tags["seed"], tags["protocol"]) == ("evaluate", "digit", "12", "prepared")
    assert (tags["submission"], tags["attempt"], tags["engine"]) == ("submission-amber-fox", "a2", "local")
    assert tags["model_digest"] == digests.of_json(["p", "amber-fox", "digit", 12])
    assert (run.info.end_time, run.info.end_time - run.info.start_time) == (int(AT.timestamp() * 1000), 200)
    (used,) = run.inputs.dataset_inputs
    whole = digests.of_json(["holdout", "digit"])
    assert (used.dataset.name, used.dataset.digest) == ("digits/digit/holdout", whole[7:39])
    assert {tag.key: tag.value for tag in used.tags} == {"mlflow.data.context": "evaluation", "acclimate.digest": whole}
    parent = client.get_run(run.data.tags["mlflow.parentRunId"])
    assert sorted(file.path for file in client.list_artifacts(parent.info.run_id)) == [
        "environment.json", "manifest.json", "recipe.json",
    ]  # fmt: skip
    assert parent.data.metrics["cost/tokens"] == 6 * 91200 + 2 * 182400


def test_a_long_curve_is_thinned_and_a_failure_is_shown(published: Published):
    from mlflow import MlflowClient

    client = MlflowClient(published.uri)
    experiment = client.get_experiment_by_name("acclimate/digits/2027-1")
    query = "tags.`acclimate.role` = 'prepare' and tags.`acclimate.outcome` = 'failed'"
    (failed,) = client.search_runs([experiment.experiment_id], query)
    assert (failed.info.status, failed.data.tags["acclimate.reason"]) == ("FAILED", "the loss became NaN at step 3")
    (done, *_) = client.search_runs(
        [experiment.experiment_id], "tags.`acclimate.role` = 'prepare' and metrics.`cost/steps` > 0"
    )
    steps = [point.step for point in client.get_metric_history(done.info.run_id, "train/loss")]
    assert (len(steps), min(steps), max(steps)) == (200, 1, 230)
    frame = tracking.preparations(*published.where)
    assert list(frame[frame["outcome"] == "failed"]["entrant"]) == ["crammer"]


def test_a_diverged_selection_is_no_number(published: Published):
    from mlflow import MlflowClient

    client = MlflowClient(published.uri)
    experiment = client.get_experiment_by_name("acclimate/digits/2027-1")
    mine = "tags.`acclimate.entrant` = 'blue-whale' and tags.`acclimate.task` = 'digit' and tags.`acclimate.role` = "
    (select,) = client.search_runs([experiment.experiment_id], mine + "'select'")
    assert (select.info.status, select.data.tags["acclimate.reason"]) == ("FAILED", "every candidate diverged")
    assert "valid/nll" not in select.data.metrics
    assert "selected" not in select.data.params
    (prepared, *_) = client.search_runs([experiment.experiment_id], mine + "'prepare'")
    assert prepared.data.tags["acclimate.note"] == "it diverged"
    assert [point.step for point in client.get_metric_history(prepared.info.run_id, "train/loss")] == [1]


def test_scores_and_examples_agree_with_the_table(published: Published):
    frame = tracking.scores(*published.where)
    table = published.data.scores
    assert table is not None
    rows = table.to_pandas()
    means = rows.groupby(["entrant", "task", "protocol", "seed"], dropna=False)["score"].mean()
    assert len(frame) == len(means)
    for row in frame.to_dict("records"):
        seed = float("nan") if row["protocol"] == "direct" else row["seed"]
        expected = means.loc[row["entrant"], row["task"], row["protocol"]].loc[[seed]].iloc[0]
        if row["n"]:
            assert row["score"] == pytest.approx(expected)
        else:
            assert row["missing"] == 60
            assert row["score"] != row["score"]
    examples = tracking.examples(*published.where, entrant="amber-fox", task="prime", protocol="direct")
    targets = published.data.targets["prime"]
    assert len(examples) == 60
    assert all(
        digests.of_bytes(targets[row["example"]].encode()) == row["target"] for row in examples.to_dict("records")
    )
    assert examples["score"].mean() == pytest.approx(means.loc["amber-fox", "prime", "direct"].iloc[0])


def test_an_evaluation_without_scores_is_unknown_not_zero(published: Published):
    frame = tracking.scores(*published.where)
    unscored = frame[frame["n"] == 0]
    assert unscored[["entrant", "task", "seed"]].to_dict("records") == [
        {"entrant": "crammer", "task": "prime", "seed": 13}
    ]
    examples = tracking.examples(*published.where, entrant="crammer", task="prime", protocol="prepared")
    lost = examples[examples["seed"] == 13]
    assert lost["score"].isna().all()
    assert set(lost["reason"]) == {"the preparation failed"}


def test_a_revised_ranking_replaces_the_shown_one(published: Published, tmp_path: Path, uri: str):
    data = replace(made(entrants={"amber-fox": 0.9, "blue-whale": 0.2}, examples=20, losses=3), stages=())
    tracking.publish_round(uri, tmp_path / "artifacts", data)
    assert list(tracking.ranking(uri, "digits", "2027-1")["entrant"])[:2] == ["amber-fox", "blue-whale"]
    assert data.ranking is not None
    swapped = [row | {"rank": 3 - row["rank"]} for row in data.ranking["ranking"]]
    revised = replace(data, ranking={**data.ranking, "ranking": swapped}, revision=1)
    tracking.publish_round(uri, tmp_path / "artifacts", revised)
    assert list(tracking.ranking(uri, "digits", "2027-1")["entrant"])[:2] == ["blue-whale", "amber-fox"]


def test_several_installations_stand_beside_each_other(published: Published, tmp_path: Path, uri: str):
    # Only the parents: that is what a ranking is made of.
    other = replace(published.data, origin="elsewhere.example.org/log", round="digits-2027-1-ffffffffffff", stages=())
    tracking.publish_round(uri, tmp_path / "artifacts", other)
    frame = tracking.ranking([published.uri, uri], "digits", "2027-1")
    assert list(dict.fromkeys(frame["installation"])) == ["acclimate.example.org/log", "elsewhere.example.org/log"]
    assert len(frame) == 2 * len(tracking.ranking(*published.where))
    assert len(tracking.ranking([published.uri, uri], "digits", "digits-2027-1-ffffffffffff")) == len(frame) / 2
    assert len(tracking.rounds([published.uri, uri])) == 2


def test_what_mlflow_does_not_have_is_refused(published: Published, tmp_path: Path):
    with pytest.raises(Refusal, match="no round '1999-1'") as caught:
        tracking.ranking(published.uri, "digits", "1999-1")
    assert (caught.value.code, caught.value.hint) == ("round_unknown", "it has: digits 2027-1")
    other = replace(published.data, round="digits-2027-1-ffffffffffff")
    with pytest.raises(Refusal, match="belongs to round") as caught:
        tracking.publish_round(published.uri, published.artifacts, other)
    assert caught.value.code == "conflict"


def test_the_database_has_statistics(published: Published):
    assert published.count("sqlite_stat1") > 10


BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (Path(__file__).parents[2] / "docs/analysts.md").read_text("utf-8"), re.M | re.S
)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_documented_code_runs_as_it_stands(published: Published, block: str, capsys: pytest.CaptureFixture[str]):
    tracking_uri, competition, round_name = published.where
    exec(
        compile(block, "docs/analysts.md", "exec"),
        {"tracking_uri": tracking_uri, "competition": competition, "round_name": round_name},
    )
    printed = capsys.readouterr().out
    assert printed.strip()
    if "rank_low" in block or "tracking.ranking(tracking_uri" in block:
        lines = [line for line in printed.splitlines() if "amber-fox" in line or "blue-whale" in line]
        assert len(lines) == 2


def test_every_documented_search_finds_something(published: Published, capsys: pytest.CaptureFixture[str]):
    (block,) = [block for block in BLOCKS if "queries = {" in block]
    exec(
        block.replace("> 0.5", "> 0.1"),
        dict(zip(("tracking_uri", "competition", "round_name"), published.where, strict=True)),
    )
    counts = dict(line.rsplit(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert len(counts) == 9
    # Nothing of this round was given up: test_given_up_bundles.py has one.
    none = ("selections that kept the base model", "work that the organizer gave up")
    assert all(int(count) > 0 for name, count in counts.items() if name not in none), counts
