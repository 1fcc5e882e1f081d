"""`rank`, `compare` and `stability` of rounds in MLflow, of bundles, and of other programs' results."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import foreign
import numpy as np
import pyarrow as pa
import pytest
import rounds_made
from projected import made
from typer.testing import CliRunner

import acclimate
from acclimate import item_sources, report_data, report_page, tracking
from acclimate.cli.main import app
from acclimate.tracking import RoundData
from acclimate_competitions import ranking, tables
from acclimate_competitions.errors import Refusal

SKILL = {"amber-fox": 0.9, "blue-whale": 0.6, "cat": 0.4, "untrained": 0.1}
NAMES = ("2027-1", "2027-2")


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RoundData]:
    folder = tmp_path_factory.mktemp("rounds")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    for name in NAMES:
        data = replace(
            made(entrants=SKILL, examples=40, losses=2), name=name, round=f"digits-{name}-0123456789ab", stages=()
        )
        tracking.publish_round(uri, folder / "artifacts", data)
    return uri, data


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    rounds_made.make(folder / "made").write(folder / "bundle")
    return folder / "bundle"


def command(*words: object) -> tuple[int, dict[str, object], str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(done.exception, Refusal):
        return 1, {}, f"{done.exception.code}: {done.exception.sentence} ({done.exception.hint})"
    return done.exit_code, json.loads(done.stdout) if done.exit_code == 0 else {}, done.output


def test_a_round_in_mlflow_is_ranked_as_its_published_ranking(rounds: tuple[str, RoundData]) -> None:
    uri, data = rounds
    found = acclimate.rank(items=acclimate.load_rounds(uri, "digits", ["2027-2"]))
    assert data.ranking is not None
    assert [(row["entrant"], row["rank"]) for row in found["ranking"]] == [
        (row["entrant"], row["rank"]) for row in data.ranking["ranking"]
    ]
    for row, published in zip(found["ranking"], data.ranking["ranking"], strict=True):
        assert row["score"] == pytest.approx(published["score"], abs=1e-12)
        assert row["se"] == pytest.approx(published["se"], rel=1e-6)
    assert "MLflow: the protocol is prepared, as none was chosen" in found["notes"]
    assert "MLflow: left out, as baselines: 'majority', 'untrained'" in found["notes"]
    code, same, _ = command("rank", "--tracking-uri", uri, "--competition", "digits", "--round", "2027-2", "--json")
    assert (code, same) == (0, found)


def test_direct_scores_of_a_round_are_never_pooled_with_prepared_ones(rounds: tuple[str, RoundData]) -> None:
    uri, data = rounds
    source = acclimate.load_rounds(uri, "digits", "2027-1")
    found = acclimate.rank(items=source, protocol="direct")
    assert data.ranking is not None
    direct = {row["entrant"]: row["direct_score"] for row in data.ranking["ranking"]}
    assert {row["entrant"]: row["score"] for row in found["ranking"]} == pytest.approx(direct)
    for wrong in ({"protocol": "both"}, {"metric": "bleu"}):
        with pytest.raises(Refusal) as caught:
            acclimate.rank(items=source, **wrong)  # type: ignore[arg-type]
        assert caught.value.code == "scores_invalid"


def test_rounds_are_the_sets_of_stability(rounds: tuple[str, RoundData]) -> None:
    uri, _ = rounds
    found = acclimate.stability(items=acclimate.load_rounds(uri, "digits"))
    assert list(found["sets"]) == list(NAMES)
    assert found["sets"]["2027-1"]["n"] == 80
    assert [pair["sets"] for pair in found["pairs"]] == [list(NAMES)]
    assert found["pairs"][0]["tau_b"] == pytest.approx(1.0)
    assert any("its tasks count alike" in note for note in found["notes"])
    one = acclimate.stability(items=acclimate.load_rounds(uri, "digits"), tasks=["prime"])
    assert {name: one["sets"][name]["n"] for name in one["sets"]} == dict.fromkeys(NAMES, 40)
    several = acclimate.rank(items=acclimate.load_rounds(uri, "digits"))
    assert any("4 sets" in note for note in several["notes"])


def by_metrics(data: RoundData, **metrics: str) -> RoundData:
    """The same round, whose tasks are scored by these metrics; of nll a right answer costs 0, a wrong one 1."""
    tasks = tuple(replace(task, metric=metrics.get(task.name, task.metric)) for task in data.competition.tasks)
    assert data.scores is not None
    rows = data.scores.to_pylist()
    for row in rows:
        row["metric"] = metrics.get(row["task"], row["metric"])
        row["score"] = 1.0 - row["score"] if row["metric"] == "nll" else row["score"]
    scores = pa.Table.from_pylist(rows, schema=tables.SCORES)
    competition = replace(data.competition, tasks=tasks)
    names = [entry.entrant for entry in data.entries]
    if len({metric == "nll" for metric in metrics.values()}) > 1:
        return replace(data, competition=competition, scores=scores)
    ranked = ranking.rank(scores, tasks=tasks, policy=competition.ranking, entrants=names)
    return replace(data, competition=competition, scores=scores, ranking=ranked.document())


def test_each_task_of_a_round_counts_by_its_own_metric_and_in_its_direction(tmp_path: Path) -> None:
    uri, plain = f"sqlite:///{tmp_path / 'mlflow.db'}", made(entrants=SKILL, examples=30, losses=2)
    kinds = {
        "mixed": {"digit": "accuracy", "prime": "acc_norm"},
        "lower": {"digit": "nll", "prime": "nll"},
        "both": {"digit": "accuracy", "prime": "nll"},
    }
    for name, metrics in kinds.items():
        data = replace(by_metrics(plain, **metrics), name=name, round=f"digits-{name}-0123456789ab", stages=())
        tracking.publish_round(uri, tmp_path / "artifacts", data)
        source = acclimate.load_rounds(uri, "digits", name)
        # All rows are there: 3 entrants, 2 tasks, 3 seeds, 30 examples.
        found = acclimate.stability(items=source)
        assert {one: found["sets"][one]["n"] for one in found["sets"]} == {"digit": 30, "prime": 30}
        best = {one: found["sets"][one]["ranking"][0]["entrant"] for one in found["sets"]}
        assert best == {"digit": "amber-fox", "prime": "amber-fox"}
        if name == "both":
            for call in (acclimate.rank, acclimate.compare):
                with pytest.raises(Refusal, match="several scales or directions"):
                    call(items=source)
            assert acclimate.rank(items=source, tasks=["prime"])["ranking"][0]["entrant"] == "amber-fox"
            continue
        ranked = acclimate.rank(items=source)
        assert data.ranking is not None
        assert [(row["entrant"], row["rank"], row["score"]) for row in ranked["ranking"]] == [
            (row["entrant"], row["rank"], pytest.approx(row["score"])) for row in data.ranking["ranking"]
        ]
        assert any("lower is better, as of the metric" in note for note in ranked["notes"]) == (name == "lower")


def test_a_task_without_rows_of_its_metric_is_refused_or_named(rounds: tuple[str, RoundData]) -> None:
    table = acclimate.load_rounds(rounds[0], "digits", "2027-1").example_table(protocol="prepared")
    one = item_sources.Round(
        "r", table.select(item_sources.COLUMNS), {"digit": "accuracy", "prime": "nll"}, frozenset()
    )
    with pytest.raises(Refusal, match="no scores by the metric of 'prime'"):
        acclimate.rank(items=item_sources.chosen([one], "it", (), {})[0])
    named = item_sources.chosen([replace(one, metrics={})], "it", (), {"metric": "accuracy"})[0]
    assert acclimate.rank(items=named)["ranking"]


def test_a_report_of_rounds_in_mlflow_shows_their_published_rankings(
    rounds: tuple[str, RoundData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, data = rounds
    out, book = tmp_path / "r.html", tmp_path / "r.ipynb"
    words = ["--tracking-uri", uri, "--competition", "digits", "-o", out, "--notebook", book, "--json"]
    code, document, output = command("report", *words)
    assert code == 0, output
    shown: Any = document["rounds"]
    assert [one["round"] for one in shown] == list(NAMES)
    assert list(document["across"]) == ["rounds"]  # type: ignore[call-overload]
    numbers = shown[1]["sections"]["ranks"]["numbers"]
    assert data.ranking is not None
    keys = ("entrant", "rank", "rank_low", "rank_high", "score", "se", "n", "seeds", "direct_rank", "direct_score")
    assert [{key: row[key] for key in keys} for row in numbers["ranking"]] == [
        {key: pytest.approx(row[key]) for key in keys} for row in data.ranking["ranking"]
    ]
    assert numbers["interval"] == data.ranking["policy"]["interval"]
    assert list(shown[0]["sections"]) == [
        "ranks",
        "slope",
        "agreement",
        "significance",
        "podium",
        "ways",
        "preparation",
    ]
    monkeypatch.chdir(tmp_path)
    out.unlink()
    names: dict[str, Any] = {}
    for cell in json.loads(book.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["numbers"]["rounds"][0]["sections"].keys() == shown[0]["sections"].keys()
    assert "a report of what?" in command("report", "-o", out)[2]


def test_a_report_of_a_private_round_in_mlflow_shows_its_ranking_alone(tmp_path: Path) -> None:
    uri, data = f"sqlite:///{tmp_path / 'mlflow.db'}", made(entrants=SKILL, examples=10, losses=2)
    competition = replace(data.competition, round=replace(data.competition.round, holdout_after="private"))
    tracking.publish_round(uri, tmp_path / "artifacts", replace(data, competition=competition, stages=()))
    (found,) = report_data.read(acclimate.load_rounds(uri, "digits"), options={})
    page, document = report_page.make([found])
    assert found.private and "private" in page
    assert list(document["rounds"][0]["sections"]) == ["ranks", "slope"]


def test_a_bundle_is_ranked_as_its_published_ranking(bundle: Path) -> None:
    found = acclimate.rank(items=bundle, missing="worst")
    published = json.loads((bundle / "ranking.json").read_text())["ranking"]
    assert {row["entrant"]: row["rank"] for row in found["ranking"]} == {
        row["entrant"]: row["rank"] for row in published
    }
    # Whoever lacks a score under some seed has no part in how much seeds vary.
    errors = {row["entrant"]: row["se"] for row in published}
    assert {row["entrant"]: row["se"] for row in found["ranking"]} == pytest.approx(errors, rel=1e-6)
    code, same, _ = command("rank", "--bundle", bundle, "--missing", "worst", "--json")
    assert (code, same) == (0, found)
    assert command("stability", "--bundle", bundle, "--missing", "worst", "--json")[0] == 0


def test_a_baseline_of_a_round_can_not_be_compared_and_the_hint_says_so(
    bundle: Path, rounds: tuple[str, RoundData]
) -> None:
    both = {"untrained": acclimate.load_rounds(rounds[0], "digits", NAMES[0]), "majority": bundle}
    for baseline, source in both.items():
        with pytest.raises(Refusal) as caught:
            acclimate.compare(baseline, "nobody", items=source)
        assert caught.value.hint.startswith(f"{baseline!r} is a baseline of the round, and baselines can't be compared")
        with pytest.raises(Refusal) as caught:
            acclimate.compare("nobody", baseline, items=source)
        assert "baseline" not in caught.value.hint


def test_a_bundle_is_called_by_its_quoted_name(bundle: Path) -> None:
    found = acclimate.rank(items=bundle, missing="worst")
    assert "the bundle 'bundle': the protocol is prepared, as none was chosen" in found["notes"]


def test_a_round_is_ranked_by_its_own_aggregate_and_says_which(tmp_path: Path) -> None:
    plain = made(entrants=SKILL, examples=20, losses=0)
    for aggregate in ("win_rate", "mean_rank", "mean"):
        policy = replace(plain.competition.ranking, aggregate=aggregate)
        names = [entry.entrant for entry in plain.entries]
        assert plain.scores is not None
        ranked = ranking.rank(plain.scores, tasks=plain.competition.tasks, policy=policy, entrants=names).document()
        competition = replace(plain.competition, ranking=policy)
        round_id = f"digits-{aggregate.replace('_', '-')}-0123456789ab"
        data = replace(plain, name=aggregate, round=round_id, competition=competition, ranking=ranked, stages=())
        uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
        tracking.publish_round(uri, tmp_path / "artifacts", data)
        where = ("rank", "--tracking-uri", uri, "--competition", "digits", "--round", aggregate)
        code, found, _ = command(*where, "--json")
        said = f"({aggregate}), as the definition of {aggregate} declares"
        assert code == 0
        assert any(said in note for note in found["notes"])  # type: ignore[attr-defined]
        assert said in " ".join(CliRunner().invoke(app, list(where)).output.split())
        published = {row["entrant"]: (row["rank"], row["score"]) for row in ranked["ranking"]}
        for row in found["ranking"]:  # type: ignore[attr-defined]
            assert (row["rank"], pytest.approx(row["score"])) == published[row["entrant"]], aggregate
            assert row["rank_low"] <= row["rank"] <= row["rank_high"]
            assert (row["se"] is None) == (aggregate != "mean")
        one = command(*where, "--tasks", "prime", "--json")[1]
        assert not any("declares" in note for note in one["notes"])  # type: ignore[attr-defined]
        says = f"the published ranking of {aggregate} is by {aggregate} over its tasks; means over tasks"
        held = command("stability", *where[1:], "--json")[1]
        assert any(says in note for note in held["notes"]) == (aggregate != "mean")  # type: ignore[attr-defined]


def test_two_rounds_of_one_definition_keep_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, found = rounds_made.defined_fields, []
    for name in ("spring", "autumn"):
        monkeypatch.setattr(rounds_made, "defined_fields", lambda made, name=name: {**fields(made), "name": name})
        path = rounds_made.make(tmp_path / f"{name}-round").write(tmp_path / name)
        found.append(item_sources.of_bundle(path).name)
    assert found == ["spring", "autumn"]


def test_a_bundle_that_was_changed_or_is_none_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in bundle.rglob("*"):
        if path.is_file():
            (copy / path.relative_to(bundle)).parent.mkdir(parents=True, exist_ok=True)
            (copy / path.relative_to(bundle)).write_bytes(path.read_bytes())
    scores = copy / "scores" / "ada.parquet"
    scores.write_bytes((copy / "scores" / "bea.parquet").read_bytes())
    assert "bundle_invalid" in command("rank", "--bundle", copy)[2]
    assert "bundle_invalid" in command("rank", "--bundle", tmp_path / "none")[2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tracking-uri", "sqlite:///x.db"], "whose rounds?"),
        (["--competition", "digits"], "--competition without --tracking-uri"),
        (["--round", "2027-1"], "--round without --tracking-uri"),
        (["--items", "a.csv", "--bundle", "b"], "--items and --bundle are both given"),
        ([], "no table is given"),
    ],
)
def test_sources_that_do_not_go_together_are_refused(words: list[str], says: str) -> None:
    for name in ("rank", "compare", "stability"):
        code, _, output = command(name, *words)
        assert code == 1
        assert says in output


# ---- other programs' results ---------------------------------------------------------------------------------------


def harness(folder: Path) -> dict[str, dict[str, list[int]]]:
    draw = Random(3)
    answers = {
        f"org/model-{number}": {
            task: [int(draw.random() < 0.2 + 0.2 * number) for _ in range(50)] for task in ("arc", "boolq")
        }
        for number in range(4)
    }
    for model, right in answers.items():
        foreign.lm_eval(folder, model, right)
    return answers


def test_a_folder_of_lm_eval_is_ranked_by_its_samples_and_its_means_agree(tmp_path: Path) -> None:
    answers = harness(tmp_path)
    found = acclimate.rank(items=tmp_path, metric="acc")
    expected = {model: sum(sum(right) / 50 for right in tasks.values()) / 2 for model, tasks in answers.items()}
    assert {row["entrant"]: row["score"] for row in found["ranking"]} == pytest.approx(expected)
    table = acclimate.stability({"a": tmp_path}, metric="acc")
    assert (table["a"]["models"], table["a"]["tasks"]) == (4, 2)
    sets = acclimate.stability(items=tmp_path, metric="acc")
    assert sets["pairs"][0]["tau_b"] == pytest.approx(table["a"]["mean_tau_b"])
    assert command("compare", "org/model-3", "org/model-0", "--items", tmp_path, "--metric", "acc", "--json")[0] == 0


def test_what_can_not_be_told_apart_in_a_folder_of_lm_eval_is_refused(tmp_path: Path) -> None:
    harness(tmp_path / "a")
    with pytest.raises(Refusal, match="mixes 2 metrics"):
        acclimate.rank(items=tmp_path / "a")
    with pytest.raises(Refusal, match="tasks have several metrics"):
        acclimate.stability({"a": tmp_path / "a"})
    foreign.lm_eval(tmp_path / "a", "org/model-0", {"arc": [1, 0]}, moment="2026-12-01T00-00-00.0")
    with pytest.raises(Refusal, match="can't be told apart") as caught:
        acclimate.rank(items=tmp_path / "a", metric="acc")
    assert (caught.value.code, len(caught.value.problems)) == ("scores_invalid", 1)
    own = foreign.lm_eval(tmp_path / "b", "org/x", {"arc": [1, 0]})
    foreign.lm_eval(tmp_path / "b", "org/y", {"arc": [1, 0]})
    samples = next(own.glob("samples_*"))
    samples.write_text(samples.read_text().replace('"arc-1"', '"other"'))
    with pytest.raises(Refusal) as caught:
        acclimate.rank(items=tmp_path / "b", metric="acc")
    assert caught.value.problems == ("'arc', example '1': not the same for all models",)
    samples.write_text('{"doc_id": 0')
    with pytest.raises(Refusal, match="line 1") as caught:
        acclimate.rank(items=tmp_path / "b", metric="acc")
    assert caught.value.code == "file_unreadable"
    foreign.lm_eval(tmp_path / "c", "org/x", {"arc": [1, 0]}, samples=False)
    with pytest.raises(Refusal, match="no scores of single examples"):
        acclimate.rank(items=tmp_path / "c", metric="acc")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refusal, match="no results of lm-evaluation-harness"):
        acclimate.rank(items=tmp_path / "empty")


# ---- exports -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_exported_tables_read_back_give_the_same_ranking(
    rounds: tuple[str, RoundData], tmp_path: Path, form: str
) -> None:
    uri, _ = rounds
    words = ["--tracking-uri", uri, "--competition", "digits", "--round", "2027-2"]
    code, found, output = command("export", *words, "--format", form, "--out", tmp_path / "out", "--json")
    assert code == 0, output
    assert found["files"] == [f"{name}.{form}" for name in ("examples", "scores", "table-direct", "table-prepared")]
    for protocol in ("direct", "prepared"):
        before = acclimate.rank(items=acclimate.load_rounds(uri, "digits", "2027-2"), protocol=protocol)
        after = acclimate.rank(items=tmp_path / "out" / f"examples.{form}", protocol=protocol)
        assert after["ranking"] == before["ranking"]
        wide = acclimate.stability({"t": tmp_path / "out" / f"table-{protocol}.{form}"})["t"]
        assert (wide["models"], wide["tasks"]) == (3, 2)
        assert acclimate.stability({"t": tmp_path / "out" / f"scores.{form}"}, protocol=protocol)["t"] == wide
    refused = command("export", *words, "--out", tmp_path / "out")
    assert refused[0] == 1
    assert "is there and not empty" in refused[2]


def test_every_eval_ever_read_back_gives_the_same_scores_and_ranks(tmp_path: Path) -> None:
    harness(tmp_path / "lm")
    before = acclimate.rank(items=tmp_path / "lm", metric="acc")
    out = tmp_path / "eee"
    code, _, output = command(
        "export", "--items", tmp_path / "lm", "--metric", "acc", "--format", "every-eval-ever", "--out", out, "--json"
    )
    assert code == 0, output
    assert acclimate.rank(items=out)["ranking"] == before["ranking"]
    (file,) = out.glob("data/acclimate/org/model-0/*.json")
    document = json.loads(file.read_text())
    assert document["model_info"]["id"] == "org/model-0"
    assert document["schema_version"] == "0.3.0"
    line = json.loads((out / document["detailed_evaluation_results"]["file_path"]).read_text().splitlines()[0])
    assert (line["sample_id"], line["evaluation_name"], line["evaluation"].keys()) == (
        "0", "arc", {"score", "is_correct"},
    )  # fmt: skip
    assert acclimate.stability({"a": out})["a"]["tasks"] == 2
    file.write_text(json.dumps(document | {"schema_version": "0.1.0"}))
    with pytest.raises(Refusal, match="schema '0.1.0'"):
        acclimate.rank(items=out)


def test_a_bundle_and_its_unscored_examples_survive_an_export(bundle: Path, tmp_path: Path) -> None:
    before = acclimate.rank(items=bundle, missing="worst")
    for form in ("csv", "every-eval-ever"):
        code, _, output = command("export", "--bundle", bundle, "--format", form, "--out", tmp_path / form, "--json")
        assert code == 0, output
    after = acclimate.rank(items=tmp_path / "csv" / "examples.csv", protocol="prepared", missing="worst")
    assert after["ranking"] == before["ranking"]
    files = sorted((tmp_path / "every-eval-ever").rglob("*_samples.jsonl"))
    assert len(files) == 2


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    assert "no format 'xml'" in command("export", "--items", "a.csv", "--format", "xml", "--out", tmp_path / "x")[2]
    assert "no scores are given" in command("export", "--out", tmp_path / "x")[2]


def test_examples_of_one_number_in_two_tasks_are_not_one(tmp_path):
    rng = np.random.default_rng(4)
    for model in ("a", "b"):
        foreign.lm_eval(tmp_path, model, {task: rng.integers(0, 2, 20).tolist() for task in ("arc", "boolq")})
    found = acclimate.compare("a", "b", items=tmp_path, metric="acc")
    assert (found["n"], found["clusters"]) == (40, 40)
    (next(tmp_path.rglob("samples_arc_*"))).unlink()
    notes = acclimate.rank(items=tmp_path, metric="acc", missing="exclude")["notes"]
    assert any("no scores of single examples of" in note and "arc" in note for note in notes), notes


WRONG = {
    "results": [["arc"], {"arc": 5}],
    "higher_is_better": [["arc"], {"arc": [1]}],
    "n-samples": [3],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_results_of_another_form_are_refused(tmp_path, key, value):
    own = foreign.lm_eval(tmp_path, "org/x", {"arc": [1, 0]})
    path = next(own.glob("results_*.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    for ask in (lambda: acclimate.rank(items=tmp_path), lambda: acclimate.stability({"one": tmp_path})):
        with pytest.raises(Refusal) as caught:
            ask()
        assert caught.value.code == "file_unreadable"


def test_who_declared_a_conflict_is_ranked_by_no_reading_of_a_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As `acclimate ranking` has it: beside the ranking, and said so."""
    monkeypatch.setitem(rounds_made.CONFLICTS, "bea", ["organizer"])
    own = rounds_made.make(tmp_path / "made").write(tmp_path / "bundle")
    code, found, said = command("rank", "--items", own, "--json")
    assert code == 0, said
    assert "bea" not in {row["entrant"] for row in found["ranking"]}
    assert any("declared a conflict of interest" in note and "bea" in note for note in found["notes"])
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    data = made(entrants=SKILL, examples=40, losses=2)
    assert data.ranking is not None
    row = next(row for row in data.ranking["ranking"] if row["entrant"] == "cat")
    beside = {key: value for key, value in row.items() if not key.startswith(("rank", "direct_rank", "tier"))}
    rest = [{**each} for each in data.ranking["ranking"] if each["entrant"] != "cat"]
    document = {**data.ranking, "ranking": rest, "baselines": [*data.ranking["baselines"], beside]}
    tracking.publish_round(uri, tmp_path / "artifacts", replace(data, ranking=document, stages=()))
    read = acclimate.rank(items=acclimate.load_rounds(uri, "digits"))
    assert "cat" not in {row["entrant"] for row in read["ranking"]}
    assert any("declared a conflict of interest" in note and "cat" in note for note in read["notes"])
