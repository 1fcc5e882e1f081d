"""A whole round of three tasks of different kinds (choice, generate, perplexity): real processes, real preparation, verified and analysed by a stranger."""

import json
import random
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tiny
from players import ENTRANTS, Players, invitations

import acclimate
from acclimate import config, demo_servers, tracking, verify
from acclimate.client import custodian
from acclimate_competitions import definition, metrics, tables
from acclimate_competitions.phases import Phase

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TASKS = """[[tasks]]
name = "tint"
kind = "choice"
choices = ["red", "green", "blue"]
metric = "accuracy"

[[tasks]]
name = "tell"
kind = "generate"
prompt = "{{ input }}"
stop = [" small"]
max_tokens = 3
extract = "(red|green|blue)"
metric = "exact_match"

[[tasks]]
name = "read"
kind = "perplexity"
metric = "bits_per_byte"
"""


def competition(folder: Path) -> definition.Competition:
    """The tiny competition with these tasks: a word to choose, a word to write, a text to read that is longer than a sequence."""
    toml = folder / "competition.toml"
    head, _, rest = toml.read_text("utf-8").partition("[[tasks]]")
    text = head + TASKS + rest[rest.index("\n[preparation]") :]
    toml.write_text(text.replace('aggregate = "mean"', 'aggregate = "win_rate"'), "utf-8")
    draw = random.Random(6)
    drawn = iter(draw.sample(list(product(range(8), repeat=5)), 200))
    for path in (folder / "splits").glob("size/*"):
        path.unlink()
    (folder / "splits" / "size").rmdir()
    for task in ("tell", "read"):
        for split, count in {"preparation": 24, "validation": 8, "holdout": 12}.items():
            rows = []
            for number in range(count):
                marbles = next(drawn)
                row = {"example": f"{task}-{split}-{number}", "cluster": f"{split}-{number // 2}"}
                if task == "tell":
                    row["input"] = " ".join(f"m{m}" for m in marbles[:4]) + " red" * (marbles[4] % 2)
                    row["target"] = f"m{marbles[0]} {tiny.TASKS['tint'][marbles[0] % 3]}"
                else:
                    row["input"] = " ".join(f"m{m}" for m in marbles) + " " + " ".join(f"m{m % 4}" for m in marbles)
                rows.append(row)
            path = folder / "splits" / task / f"{split}.parquet"
            path.parent.mkdir(exist_ok=True)
            tables.write(pa.Table.from_pylist(rows), path)
    return definition.load(toml)


def command(*words: object, fails: bool = False) -> Any:
    done = subprocess.run(demo_servers.command(*map(str, words)), capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == fails, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_three_kinds_go_from_seal_to_a_ranking_that_a_stranger_verifies(tmp_path: Path) -> None:
    data = tmp_path / "server"
    with demo_servers.Servers(data, runner="local") as servers:
        with Players(tmp_path, [servers.url], invitations(data), servers.check) as players:
            players.competition = competition(players.built)
            players.play()
            assert players.state().phase is Phase.PUBLISHED
            bundle = players.bundle()
            key = custodian.pinned(players.custodians[0][1], players.id).log
            name, slug = players.state().defined["name"], players.competition.slug
    # 1. Every number follows from the records, by a program that imports no server.
    found = command("verify", bundle, "--log-key", key, "--json")["checks"]
    assert [check for check in found if check["status"] == "FAILED"] == []
    assert sum(check["status"] == "ok" for check in found) > 20
    # 2. The ranking is by wins; each task's rows keep its metric and direction.
    ranking = verify.recompute_ranking(bundle).document()
    assert {row["entrant"] for row in ranking["ranking"]} == set(ENTRANTS)
    for task in players.competition.tasks:
        scores = [row["score"] for row in ranking["tasks"][task.name]]
        lower = metrics.metric_of(task).direction == "min"
        assert scores == sorted(scores, reverse=not lower) and all(0 <= score for score in scores)
    # Being prepared, models read better than they did.
    assert all(row["score"] < row["direct_score"] for row in ranking["tasks"]["read"])
    (null,) = ranking["baselines"]
    assert null["entrant"] == metrics.MAJORITY and null["score"] is not None
    # 3. MLflow and the analyst's own functions have the same.
    table = tracking.ranking(config.load(data).tracking, slug, name)
    scored = dict(zip(table["entrant"], table["score"], strict=True))
    assert {row["entrant"]: row["score"] for row in ranking["ranking"]} == pytest.approx(
        {entrant: scored[entrant] for entrant in ENTRANTS}
    )
    for task in ("tint", "tell"):
        again = acclimate.rank(items=str(bundle), tasks=[task])
        assert {row["entrant"]: row["score"] for row in again["ranking"]} == pytest.approx(
            {row["entrant"]: row["score"] for row in ranking["tasks"][task]}
        )
    command("report", bundle, "--out", tmp_path / "report.html", "--json")
    assert all(entrant in (tmp_path / "report.html").read_text("utf-8") for entrant in ENTRANTS)
    # 4. Who has the weights gets the same predictions.
    model = tmp_path / "models" / "ada"
    rerun = command("verify", bundle, "--log-key", key, "--rerun", "ada", "--models", model, "--json")["checks"]
    assert [check for check in rerun if check["status"] == "FAILED"] == []


def test_an_entrant_tries_all_kinds_at_home(tmp_path: Path) -> None:
    built, model = tmp_path / "built", tmp_path / "model"
    tiny.competition(built)
    competition(built)
    tiny.model(model, seed=3)
    examples = tmp_path / "examples.parquet"
    found = acclimate.evaluate(model, built, examples=examples)["tasks"]
    assert {name: (task["n"], task["unscored"]) for name, task in found.items()} == dict.fromkeys(
        ("tint", "tell", "read"), (8, 0)
    )
    assert found["read"]["chance"] == 8.0 and found["read"]["bits_per_byte"] > 0
    table = tables.read(examples)
    kinds = {task: [row for row in table.to_pylist() if row["task"] == task] for task in found}
    assert all(row["text"] is not None and row["loglikelihoods"] is None for row in kinds["tell"])
    assert all(len(row["loglikelihoods"]) == 1 and row["target"] is None for row in kinds["read"])
    assert acclimate.check(model, built)["fits"]
    made = acclimate.prepare(model, built, out=tmp_path / "prepared", seed=11)
    assert {name: list(task["seeds"]) for name, task in made["tasks"].items()} == dict.fromkeys(found, ["11"])
    better = acclimate.evaluate(tmp_path / "prepared" / "read" / "11", built, task="read")["tasks"]["read"]
    assert better["bits_per_byte"] < found["read"]["bits_per_byte"]
