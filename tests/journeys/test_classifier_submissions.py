"""Sequence classifiers as submissions: tried at home, and ranked in a round beside language models and an adapter that answer by words."""

import json
import shutil
from pathlib import Path

import adapted
import pytest
import tiny
from players import Players, invitations

import acclimate
from acclimate import demo_servers, verify
from acclimate.bundle_rerun import EntrantRerun
from acclimate_competitions import definition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels") / "competition"
    tiny.competition(folder)
    adapted.with_labels(folder)
    return folder


def test_a_classifier_is_checked_prepared_and_evaluated_at_home(built: Path, tmp_path: Path) -> None:
    model = adapted.classifier(tmp_path / "model", seed=1, labels=tiny.TASKS["size"])
    checked = acclimate.check(model, built)
    assert checked["architecture"] == "llama" and checked["fits"] and len(checked["losses"]) == 3
    made = acclimate.prepare(model, built, out=tmp_path / "out", task="tint", lr=2e-2, seed=11)
    seed = made["tasks"]["tint"]["seeds"]["11"]
    assert seed["steps"] == 6 and max(seed["losses"]) - min(seed["losses"]) > 0
    # Its head was made for the task's labels, and its config says so: anybody may go on with it.
    prepared = tmp_path / "out" / seed["folder"]
    told = json.loads((prepared / "config.json").read_text("utf-8"))
    assert told["id2label"] == {"0": "red", "1": "green", "2": "blue"}
    for folder in (model, prepared):
        assert acclimate.evaluate(folder, built, task="tint")["tasks"]["tint"]["n"] == 8


def test_an_encoder_is_checked_prepared_and_evaluated_at_home(built: Path, tmp_path: Path) -> None:
    model = adapted.encoder(tmp_path / "model", seed=1, labels=tiny.TASKS["size"])
    checked = acclimate.check(model, built)
    assert checked["architecture"] == "bert" and checked["fits"] and len(checked["losses"]) == 3
    made = acclimate.prepare(model, built, out=tmp_path / "out", task="tint", lr=2e-2, seed=11)
    prepared = tmp_path / "out" / made["tasks"]["tint"]["seeds"]["11"]["folder"]
    again = acclimate.prepare(model, built, out=tmp_path / "again", task="tint", lr=2e-2, seed=11)
    assert again["tasks"]["tint"]["seeds"]["11"]["prepared"] == made["tasks"]["tint"]["seeds"]["11"]["prepared"]
    for folder in (model, prepared):
        assert acclimate.evaluate(folder, built, task="tint")["tasks"]["tint"]["n"] == 8


def test_classifiers_and_choices_dont_go_together(built: Path, tmp_path: Path) -> None:
    raw = (built / "competition.toml").read_text("utf-8")
    for text, part in (
        (raw.replace('kind = "classify"', 'kind = "choice"', 1), 'classifiers do kind "classify" only'),
        (raw.replace('metric = "accuracy"', 'metric = "acc_norm"'), "tasks[0].metric"),
    ):
        with pytest.raises(Refusal) as caught:
            definition.parse(text.encode())
        assert any(part in problem for problem in caught.value.problems), caught.value.problems
    tiny.competition(tmp_path / "plain")
    model = adapted.classifier(tmp_path / "model", seed=1, labels=tiny.TASKS["size"])
    with pytest.raises(Refusal, match="is a hf-sequence-classifier by its files, allowed: hf-causal-lm"):
        acclimate.evaluate(model, tmp_path / "plain")


class Labelling(Players):
    """The people of a round in which ada and dora send classifiers, a decoder and an encoder, bela a Llama, and celik-team an adapter."""

    def __enter__(self) -> "Labelling":
        super().__enter__()
        adapted.with_base(self.built)
        self.competition = adapted.with_labels(self.built)
        return self

    def gather(self) -> "Labelling":
        super().gather()
        models = self.where / "models"
        for name in ("ada", "celik-team", "dora"):
            shutil.rmtree(models / name)
        adapted.classifier(models / "ada", seed=1, labels=tiny.TASKS["tint"])
        adapted.encoder(models / "dora", seed=4, labels=("this", "that"))
        adapted.adapter(models / "celik-team", seed=3)
        return self


@pytest.mark.slow
def test_a_whole_round_of_classifiers_a_llama_and_an_adapter_is_ranked_and_made_again(tmp_path: Path) -> None:
    data = tmp_path / "server"
    with (
        demo_servers.Servers(data, runner="local") as servers,
        Labelling(tmp_path, [servers.url], invitations(data), servers.check) as people,
    ):
        people.play()
        state, bundle = people.state(), people.bundle()
    assert state.phase == Phase.PUBLISHED and len(state.prepared) == 4 * 2 * 3
    rows = verify.recompute_ranking(bundle).document()["ranking"]
    assert len(rows) == 4 and all(row["score"] is not None for row in rows)
    checks = verify.verify(bundle, rerun=EntrantRerun("ada", people.where / "models" / "ada")).checks
    assert [check for check in checks if check.status == "FAILED"] == []
    (again,) = [check for check in checks if check.name == "re-run"]
    assert again.status == "ok", again
