"""Trying a model at home: the same numbers and bytes as a round's, by the same child, and a reason where it can't be."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner
from waiting import WITHIN

import acclimate
from acclimate.cli.main import app
from acclimate_competitions import definition, digests, tables
from acclimate_competitions.errors import Refusal
from acclimate_runners import jobs
from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.local import LocalRunner


@pytest.fixture(scope="module")
def at_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what tiny.prepare_job makes: competition/, model/; and its job and blobs."""
    folder = tmp_path_factory.mktemp("home")
    blobs = FolderBlobs(folder / "blobs")
    job = tiny.prepare_job(folder, blobs)
    (folder / "job.json").write_text(jobs.to_json(job), "utf-8")
    return folder


def carried_out(folder: Path, job: Any) -> jobs.Outcome:
    """A job's outcome by the local runner, which is what a round's dispatcher uses."""
    runner = LocalRunner(folder / "runner", 1)
    try:
        handle = runner.start(digests.of_bytes(jobs.to_json(job).encode())[7:39], job, FolderBlobs(folder / "blobs"))
        until = time.monotonic() + 240
        while (status := handle.poll()).state == "running":
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        runner.close()
    assert status.outcome is not None, status.reason
    return status.outcome


def test_a_preparation_at_home_has_the_digests_that_a_round_records(at_home: Path, tmp_path: Path) -> None:
    outcome = carried_out(at_home, jobs.from_json((at_home / "job.json").read_text("utf-8")))
    recorded = {entry["seed"]: entry for entry in outcome.results["prepared"]}
    (selection,) = outcome.results["selections"]
    told: list[tuple[int, int, str]] = []
    found = acclimate.prepare(
        at_home / "model",
        at_home / "competition",
        out=tmp_path / "out",
        task="tint",
        progress=lambda *w: told.append(w),
    )
    part = found["tasks"]["tint"]
    # The round's job was asked for two of the recipe's three seeds.
    assert set(part["seeds"]) == {"11", "12", "13"} and set(recorded) == {11, 12}
    for seed, entry in recorded.items():
        mine = part["seeds"][str(seed)]
        assert mine["prepared"] == entry["prepared"] is not None
        assert mine["micro_batch"] == entry["micro_batch"] == 8
        assert mine["losses"] == entry["losses"] and mine["validation"] == entry["validation"]
        assert digests.of_file(tmp_path / "out" / mine["folder"] / "model.safetensors") == entry["prepared"]
    assert part["lr"] == selection["selected"]["lr"] and part["candidates"] == selection["candidates"]
    assert found["hardware"] == outcome.hardware and found["versions"] == outcome.versions
    # 24 rows of 5 tokens, two epochs: one rate and three seeds.
    assert found["tokens"] == 4 * 2 * 24 * 5 and found["seconds"] > 0
    assert found["memory"] > 50 * 2**20 and told
    assert json.loads((tmp_path / "out" / "preparation.json").read_text("utf-8")) == found
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_one_seed_at_one_rate_for_some_steps(at_home: Path, tmp_path: Path) -> None:
    model, competition = at_home / "model", at_home / "competition"
    whole = acclimate.prepare(model, competition, out=tmp_path / "whole", task="size", lr=0.01, seed=5)
    short = acclimate.prepare(model, competition, out=tmp_path / "short", task="size", lr=0.01, seed=5, max_steps=2)
    (long_fit,), (short_fit,) = (list(each["tasks"]["size"]["seeds"].values()) for each in (whole, short))
    assert whole["tasks"]["size"]["lr"] == 0.01 and whole["tasks"]["size"]["candidates"] == []
    assert long_fit["steps"] == 6 and short_fit["steps"] == 2
    # The schedule is the whole one's.
    assert short_fit["losses"] == long_fit["losses"][:2]
    assert short_fit["prepared"] != long_fit["prepared"]


def test_the_processes_of_a_definition_share_each_batch(at_home: Path, tmp_path: Path) -> None:
    shutil.copytree(at_home / "competition", tmp_path / "competition")
    path = tmp_path / "competition/competition.toml"
    path.write_text(path.read_text("utf-8").replace("[compute]\n", "[compute]\nprocesses = 2\ncpus = 2\n"), "utf-8")
    how = {"task": "size", "lr": 0.01, "seed": 5, "max_steps": 3}
    (one,), (two,) = (
        acclimate.prepare(at_home / "model", folder, out=tmp_path / f"out-{name}", **how)["tasks"]["size"][
            "seeds"
        ].values()
        for name, folder in (("one", at_home / "competition"), ("two", tmp_path / "competition"))
    )
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5) and len(two["losses"]) == 3


@pytest.mark.slow
def test_a_definition_s_shards_are_checked_prepared_and_evaluated_at_home(at_home: Path, tmp_path: Path) -> None:
    shutil.copytree(at_home / "competition", tmp_path / "competition")
    path = tmp_path / "competition/competition.toml"
    lines = '[compute]\nprocesses = 2\ncpus = 2\nweights = "shards"\n'
    path.write_text(path.read_text("utf-8").replace("[compute]\n", lines), "utf-8")
    how = {"task": "size", "lr": 0.01, "seed": 5, "max_steps": 3}
    one, two = (
        acclimate.prepare(at_home / "model", folder, out=tmp_path / f"out-{name}", **how)
        for name, folder in (("one", at_home / "competition"), ("two", tmp_path / "competition"))
    )
    ((first,), (second,)) = (each["tasks"]["size"]["seeds"].values() for each in (one, two))
    assert second["losses"] == pytest.approx(first["losses"], rel=1e-5) and len(second["losses"]) == 3
    # The processes' memory counts together, and each of them takes some before it has a model.
    assert two["memory"] > 1.5 * one["memory"]
    scores = [
        acclimate.evaluate(at_home / "model", folder, task="size")["tasks"]
        for folder in (at_home / "competition", tmp_path / "competition")
    ]
    assert scores[0] == scores[1]
    assert acclimate.check(at_home / "model", tmp_path / "competition")["model"].startswith("sha256:")


def test_a_device_that_is_not_here_is_refused_before_anything_runs(at_home: Path, tmp_path: Path) -> None:
    for device, words in (("cuda", "this machine shows no NVIDIA GPU"), ("tpu", "preparations run on cpu or cuda")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            with pytest.raises(Refusal, match=words) as caught:
                acclimate.prepare(at_home / "model", at_home / "competition", out=tmp_path / device, device=device)
        assert caught.value.code == "request_invalid" and not (tmp_path / device).exists()


def with_adapters(folder: Path, to: Path) -> Path:
    """The same competition, whose recipe learns adapters."""
    shutil.copytree(folder, to)
    path = to / "competition.toml"
    lines = 'method = "lora"\nlora = { rank = 4, alpha = 8 }'
    path.write_text(path.read_text("utf-8").replace('method = "full"', lines), "utf-8")
    return to


def test_a_recipe_of_adapters_is_prepared_at_home_as_in_a_round(at_home: Path, tmp_path: Path) -> None:
    model, competition = at_home / "model", with_adapters(at_home / "competition", tmp_path / "competition")
    lines = ["prepare", str(model), "--competition", str(competition), "--out", str(tmp_path / "p"), "--task", "tint"]
    done = CliRunner().invoke(app, lines)
    assert done.exit_code == 0, done.output
    assert "tint, as submitted: validation nll" in done.stdout and "tint, seed 13: loss" in done.stdout
    mine = json.loads((tmp_path / "p/preparation.json").read_text("utf-8"))["tasks"]["tint"]
    job = jobs.from_json((at_home / "job.json").read_text("utf-8"))
    recipe = definition.load(competition / "competition.toml").preparation
    assert recipe.method == "lora" and recipe.digest != job.recipe.digest
    outcome = carried_out(at_home, dataclasses.replace(job, recipe=recipe))
    assert mine["candidates"] == outcome.results["selections"][0]["candidates"]
    before = load_file(model / "model.safetensors")
    for entry in outcome.results["prepared"]:
        assert mine["seeds"][str(entry["seed"])]["prepared"] == entry["prepared"] is not None and not entry["base"]
        # Whole weights, of which the embedding and the norms are as submitted.
        after = load_file(tmp_path / "p/tint" / str(entry["seed"]) / "model.safetensors")
        changed = {name.split(".")[-2] for name, weight in after.items() if not np.array_equal(weight, before[name])}
        assert after.keys() == before.keys()
        assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for command in ("check", "evaluate"):
        done = CliRunner().invoke(app, [command, str(tmp_path / "p/tint/11"), "--competition", str(competition)])
        assert done.exit_code == 0, done.output


def test_an_evaluation_at_home_is_the_rounds(at_home: Path, tmp_path: Path) -> None:
    out = tmp_path / "examples.parquet"
    found = acclimate.evaluate(at_home / "model", at_home / "competition", examples=out)
    rows = pq.read_table(out).to_pylist()
    assert found["split"] == "validation" and list(found["tasks"]) == ["tint", "size"]
    for task, choices in tiny.TASKS.items():
        split = tables.read(at_home / "competition/splits" / task / "validation.parquet").to_pylist()
        mine = [row for row in rows if row["task"] == task]
        assert [row["cluster"] for row in mine] == [row["cluster"] for row in split]
        assert {row["entrant"] for row in mine} == {"model"}
        assert [(row["example"], row["target"]) for row in mine] == [(row["example"], row["target"]) for row in split]
        right = [float(np.argmax(row["loglikelihoods"]) == choices.index(row["target"])) for row in mine]
        assert [row["score"] for row in mine] == right
        assert all(len(row["loglikelihoods"]) == len(row["choices"]) == len(choices) for row in mine)
        summary = found["tasks"][task]
        assert summary["accuracy"] == pytest.approx(np.mean(right)) and summary["n"] == len(split) == 8
        # By cluster, of two rows each.
        pairs = (np.array(right) - np.mean(right)).reshape(-1, 2).sum(1)
        assert summary["se"] == pytest.approx(math.sqrt((pairs**2).sum() * 4 / 3) / 8)
        assert summary["unscored"] == 0
        measured = summary["metrics"]
        assert list(measured) == ["accuracy", "macro_f1", "mcc", "log_loss", "brier", "ece"]
        assert measured["accuracy"] == {"value": summary["accuracy"], "se": pytest.approx(summary["se"]), "n": 8}
        logs = np.array([row["loglikelihoods"] for row in mine])
        p = np.exp(logs) / np.exp(logs).sum(axis=1, keepdims=True)
        wanted = np.array([choices.index(row["target"]) for row in mine])
        assert measured["log_loss"]["value"] == pytest.approx(-np.log(p[np.arange(8), wanted]).mean())
        assert measured["brier"]["value"] == pytest.approx(((p - np.eye(len(choices))[wanted]) ** 2).sum(1).mean())
        assert all(set(one) == {"value", "se", "n"} and one["n"] == 8 for one in measured.values())
    # As the round's own job has it, from the rows without targets.
    blobs = FolderBlobs(at_home / "blobs")
    base: Any = jobs.from_json((at_home / "job.json").read_text("utf-8"))
    table = tables.read(at_home / "competition/splits/tint/validation.parquet").drop_columns(["target"])
    tables.write(table, tmp_path / "inputs.parquet")
    data = jobs.TaskData(base.tasks[0].task, holdout_inputs=blobs.put(tmp_path / "inputs.parquet"))
    job = jobs.EvaluateJob(
        "evaluate",
        base.model,
        (data,),
        base.recipe,
        base.limits,
        base.tokenizer,
        "fox",
        (("tint", None, "direct"),),
        {},
    )
    (file,) = carried_out(at_home, job).files.values()
    with blobs.local(file) as path:
        theirs = tables.read(path).column("loglikelihoods").to_pylist()
    assert theirs == [row["loglikelihoods"] for row in rows if row["task"] == "tint"]


def test_an_evaluation_from_the_command_line_begins_without_pandas(at_home: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "acclimate", "evaluate", str(at_home / "model")]
    command += ["--competition", str(at_home / "competition"), "--task", "tint", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["tasks"]["tint"]["n"] == 8
    imported = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "pyarrow.parquet" in imported and "pandas.core" not in imported


def test_evaluations_at_home_are_compared_as_they_are(at_home: Path, tmp_path: Path) -> None:
    """Each file as `--examples` writes it is read by `--items`; the clusters count, and the joined numbers are those of one table."""
    competition, files = at_home / "competition", [tmp_path / f"{name}.parquet" for name in ("amber", "blue", "part")]
    tiny.model(tmp_path / "blue", seed=77)
    for model, file, more in ((at_home / "model", files[0], ["--entrant", "amber"]), (tmp_path / "blue", files[1], [])):
        line = ["evaluate", str(model), "--competition", str(competition), "--examples", str(file), *more]
        assert CliRunner().invoke(app, line).exit_code == 0
    given = [word for file in files[:2] for word in ("--items", str(file))]
    lines = {
        "compare": ["compare", "amber", "blue"],
        "rank": ["rank"],
        "stability": ["stability"],
        "log_loss": ["rank", "--metric", "log_loss"],
    }
    found = {}
    for name, line in lines.items():
        done = CliRunner().invoke(app, [*line, *given, "--json"])
        assert done.exit_code == 0, done.output
        found[name] = json.loads(done.stdout)
    table = pa.concat_tables([pq.read_table(file) for file in files[:2]])
    one = acclimate.compare("amber", "blue", items=table)
    assert {**found["compare"], "notes": []} == {**one, "notes": []} and one["clusters"] == 4
    assert found["compare"] == acclimate.compare("amber", "blue", items=[str(file) for file in files[:2]])
    assert {row["entrant"] for row in found["rank"]["ranking"]} == {"amber", "blue"}
    assert found["log_loss"]["ranking"] != found["rank"]["ranking"]
    # Eight examples in four clusters of each task.
    assert {name: (part["n"], part["clusters"]) for name, part in found["stability"]["sets"].items()} == {
        "tint": (8, 4),
        "size": (8, 4),
    }
    twice = refused("scores_invalid", "16 scores stand twice in", acclimate.rank, items=[files[0], files[0]])
    assert "--entrant" in (twice.hint or "") and "row 1" in twice.problems[0]
    pq.write_table(pq.read_table(files[1]).slice(1), files[2])
    other = refused("scores_invalid", "not all scored on the same examples", acclimate.rank, items=[files[0], files[2]])
    assert other.problems == ("'blue': 1 of 8 in tint",)
    pq.write_table(pq.read_table(files[1]).drop_columns(["cluster"]), files[2])
    lacking = refused("scores_invalid", "can't be joined", acclimate.rank, items=[files[0], files[2]])
    assert lacking.problems == (f"cluster: not in {files[2]}",)
    refused("request_invalid", "is blank", acclimate.evaluate, at_home / "model", competition, entrant=" ")


def test_a_check_at_home_forecasts_time_and_memory(at_home: Path) -> None:
    done = CliRunner().invoke(
        app, ["check", str(at_home / "model"), "--competition", str(at_home / "competition"), "--json"]
    )
    found = json.loads(done.stdout)
    assert found["architecture"] == "llama" and found["parameters"] == 2864 and len(found["losses"]) == 3
    assert 0 <= found["forecast"]["seconds"] <= found["allowed"]["seconds"] == 300
    assert 50 * 2**20 < found["forecast"]["memory"] <= found["allowed"]["memory"] == 2 * 2**30
    assert found["fits"] is True and found["bytes"] < found["allowed"]["bytes"]


def test_people_read_what_came_of_it(at_home: Path, tmp_path: Path) -> None:
    model, competition = str(at_home / "model"), str(at_home / "competition")
    lines = ["prepare", model, "--competition", competition, "--out", str(tmp_path / "p"), "--task", "tint"]
    done = CliRunner().invoke(app, [*lines, "--seed", "11", "--max-steps", "2"])
    assert done.exit_code == 0, done.output
    assert "tint, lr 0.02: validation nll" in done.stdout and "tint, seed 11: loss" in done.stdout
    assert "every fit ended after 2 steps at most" in done.stdout
    assert "none of the round's" not in done.stdout and "not selected" not in done.stdout
    lines[lines.index("--out") + 1] = str(tmp_path / "q")
    done = CliRunner().invoke(app, [*lines, "--seed", "99", "--lr", "0.01", "--max-steps", "1"])
    assert "seed 99 is none of the round's, which are 11, 12, 13" in done.stdout, done.output
    assert "lr 0.01 was given and not selected" in done.stdout
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "p/tint/11"), "--competition", competition])
    assert done.exit_code == 0 and done.stdout.splitlines()[0].split() == [
        "task", "metric", "validation", "se", "n", "unscored",
    ]  # fmt: skip
    done = CliRunner().invoke(app, ["check", model, "--competition", competition])
    assert "ok: the server would accept it" in done.stdout


def refused(code: str, saying: str, call: Any, *given: Any, **more: Any) -> Refusal:
    with pytest.raises(Refusal, match=saying) as caught:
        call(*given, **more)
    assert caught.value.code == code
    return caught.value


def test_what_can_not_be_tried_is_refused_with_a_reason(at_home: Path, tmp_path: Path) -> None:
    model, competition = at_home / "model", at_home / "competition"
    refused("file_unreadable", "is not a folder", acclimate.evaluate, tmp_path / "none", competition)
    assert "config.json: missing" in str(
        refused("model_invalid", "3 problems", acclimate.evaluate, tmp_path, competition).problems
    )
    refused("file_unreadable", "competition.toml", acclimate.check, model, tmp_path)
    no_split = refused(
        "splits_invalid", "no split 'practice'", acclimate.evaluate, model, competition, split="practice"
    )
    assert no_split.hint == "there is preparation, validation"
    refused("request_invalid", "no split 'test'", acclimate.evaluate, model, competition, split="test")
    refused("holdout_private", "by the round", acclimate.evaluate, model, competition, split="holdout")
    unknown = refused("request_invalid", "no task 'hue'", acclimate.evaluate, model, competition, task="hue")
    assert unknown.hint == "one of tint, size"
    out = tmp_path / "out"
    wrong = {"lr": math.nan, "seed": -1, "max_steps": 0, "device": "cuda"}
    every = refused("request_invalid", "learning rate is nan", acclimate.prepare, model, competition, out=out, **wrong)
    assert all(word in every.sentence for word in ("seed is -1", "max_steps is 0", "device is 'cuda'"))
    refused("conflict", "exists already", acclimate.prepare, model, competition, out=model)
    refused("conflict", "something else", acclimate.evaluate, model, competition, examples=model / "config.json")
    (tmp_path / "bare").mkdir()
    shutil.copy(competition / "competition.toml", tmp_path / "bare")
    refused("splits_invalid", "not built", acclimate.evaluate, model, tmp_path / "bare")
    assert not out.exists()


def test_a_split_with_a_foreign_target_is_refused_before_anything_runs(at_home: Path, tmp_path: Path) -> None:
    shutil.copytree(at_home / "competition", tmp_path / "c")
    path = tmp_path / "c/splits/tint/validation.parquet"
    rows = tables.read(path)
    targets = ["mauve", *rows.column("target").to_pylist()[1:]]
    tables.write(rows.set_column(rows.column_names.index("target"), "target", [targets]), path)
    refused("splits_invalid", "1 problem", acclimate.evaluate, at_home / "model", tmp_path / "c")
    # The holdout is not needed, nor are other tasks.
    shutil.rmtree(tmp_path / "c/splits/tint")
    (tmp_path / "c/splits/size/holdout.parquet").unlink()
    assert acclimate.evaluate(at_home / "model", tmp_path / "c", task="size")["tasks"]["size"]["n"] == 8


def test_a_model_that_the_child_refuses_has_the_childs_reason(at_home: Path, tmp_path: Path) -> None:
    tiny.model(tmp_path / "poisoned", seed=2, poisoned=True)
    for call in (acclimate.evaluate, acclimate.check):
        refused("model_invalid", "holds NaN or infinity", call, tmp_path / "poisoned", at_home / "competition")


def test_a_model_that_takes_too_much_has_the_limits_reason(at_home: Path, tmp_path: Path) -> None:
    shutil.copytree(at_home / "competition", tmp_path / "c")
    path = tmp_path / "c/competition.toml"
    path.write_text(path.read_text("utf-8").replace('memory = "2GiB"', 'memory = "32MiB"'), "utf-8")
    found = refused("limit_exceeded", "0.03 GiB", acclimate.check, at_home / "model", tmp_path / "c")
    assert "[isolation]" in found.hint


def test_a_missing_extra_is_named(at_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = refused("extra_missing", "needs torch", acclimate.evaluate, at_home / "model", at_home / "competition")
    assert "[runner]" in found.hint


def test_the_package_itself_stays_light() -> None:
    code = "import sys, acclimate; assert 'prepare' in acclimate.__all__; print('acclimate.trials' in sys.modules)"
    code += "; acclimate.evaluate; print('torch' in sys.modules, 'acclimate.trials' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WITHIN)
    assert done.stdout.split() == ["False", "False", "True"], done.stderr
    with pytest.raises(AttributeError, match="no attribute 'guess'"):
        acclimate.guess  # noqa: B018


def in_shards(folder: Path, model: Path) -> Path:
    """The same model, its weights in two shards."""
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    parts = {f"model-{n + 1:05}-of-00002.safetensors": names[n::2] for n in range(2)}
    folder.mkdir()
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(model / name, folder)
    return folder


def test_a_model_in_shards_is_checked_prepared_and_evaluated_as_in_one_file(at_home: Path, tmp_path: Path) -> None:
    whole, competition = at_home / "model", at_home / "competition"
    parts = in_shards(tmp_path / "parts", whole)
    assert acclimate.check(parts, competition)["losses"] == acclimate.check(whole, competition)["losses"]
    made = [
        acclimate.prepare(each, competition, out=tmp_path / f"out-{each.name}", task="size", lr=0.01, seed=5)["tasks"]
        for each in (parts, whole)
    ]
    assert made[0]["size"]["seeds"]["5"]["prepared"] == made[1]["size"]["seeds"]["5"]["prepared"]
    # What is prepared is one file, whatever was submitted.
    out = tmp_path / "out-parts" / "size" / "5"
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    found = [acclimate.evaluate(each, competition, task="size")["tasks"] for each in (parts, whole)]
    assert found[0] == found[1]
    (parts / "model-00002-of-00002.safetensors").unlink()
    refused("model_invalid", "model-00002-of-00002.safetensors: missing", acclimate.check, parts, competition)
