"""Image classifiers as submissions: tried at home, and ranked in a round that a stranger verifies and makes again."""

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
from acclimate_competitions import definition, splits, tables
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "competition"
    tiny.competition(folder)
    adapted.with_images(folder)
    return folder


def test_an_image_classifier_is_checked_prepared_and_evaluated_at_home(built: Path, tmp_path: Path) -> None:
    assert splits.check(built, definition.load(built))["tokenizer"] is None
    model = adapted.image_classifier(tmp_path / "model", seed=1, labels=tiny.TASKS["size"])
    checked = acclimate.check(model, built)
    assert checked["architecture"] == "vit" and checked["fits"] and len(checked["losses"]) == 3
    made = acclimate.prepare(model, built, out=tmp_path / "out", task="tint", lr=2e-2, seed=11)
    prepared = tmp_path / "out" / made["tasks"]["tint"]["seeds"]["11"]["folder"]
    assert sorted(path.name for path in prepared.iterdir()) == ["config.json", "model.safetensors"]
    assert len(json.loads((prepared / "config.json").read_text("utf-8"))["id2label"]) == 3
    again = acclimate.prepare(model, built, out=tmp_path / "again", task="tint", lr=2e-2, seed=11)
    assert again["tasks"]["tint"]["seeds"]["11"]["prepared"] == made["tasks"]["tint"]["seeds"]["11"]["prepared"]
    # In shards it is the same model.
    shutil.copytree(model, tmp_path / "parts")
    found = acclimate.prepare(
        adapted.in_shards(tmp_path / "parts"), built, out=tmp_path / "more", task="tint", lr=2e-2, seed=11
    )
    assert found["tasks"]["tint"]["seeds"]["11"]["prepared"] == made["tasks"]["tint"]["seeds"]["11"]["prepared"]
    for folder in (model, prepared, tmp_path / "parts"):
        assert acclimate.evaluate(folder, built, task="tint")["tasks"]["tint"]["n"] == 8


def test_images_go_with_image_classifiers_and_have_the_size_that_is_said(built: Path, tmp_path: Path) -> None:
    raw = (built / "competition.toml").read_text("utf-8")
    for text, part in (
        (raw.replace('image = "8x8x1"', "", 1), "hf-image-classifier goes with tasks that all have an `image`"),
        (raw.replace('["hf-image-classifier"]', '["hf-causal-lm"]'), "hf-image-classifier goes with tasks"),
        (raw.replace('["hf-image-classifier"]', '["hf-image-classifier", "hf-causal-lm"]'), "neither with other kinds"),
        (raw.replace('"8x8x1"', '"8 by 8"', 1), "height x width x channels"),
        (
            raw.replace("max_length = 65", "max_length = 64"),
            "its 64 numbers must be fewer than preparation.max_length, 64",
        ),
    ):
        with pytest.raises(Refusal) as caught:
            definition.parse(text.encode())
        assert any(part in problem for problem in caught.value.problems), caught.value.problems
    folder = tmp_path / "odd"
    shutil.copytree(built, folder)
    path = folder / "splits/tint/validation.parquet"
    table = tables.read(path)
    rows = table.to_pylist()
    rows[0]["input"] = rows[0]["input"][:-4]
    tables.write(table.from_pylist(rows, schema=table.schema), path)
    with pytest.raises(Refusal) as caught:
        splits.check(folder, definition.load(folder))
    assert "tint/validation.parquet: 1 inputs that are no image of 8x8x1 bytes in base64" in caught.value.problems[0]
    model = adapted.classifier(tmp_path / "model", seed=1, labels=tiny.TASKS["size"])
    with pytest.raises(Refusal, match="is a hf-sequence-classifier by its files, allowed: hf-image-classifier"):
        acclimate.evaluate(model, built)


class Seeing(Players):
    """The people of a round of images."""

    def __enter__(self) -> "Seeing":
        super().__enter__()
        self.competition = adapted.with_images(self.built)
        return self

    def gather(self) -> "Seeing":
        super().gather()
        models = self.where / "models"
        for seed, path in enumerate(sorted(models.iterdir())):
            shutil.rmtree(path)
            adapted.image_classifier(path, seed=seed, labels=tiny.TASKS["tint"])
        adapted.in_shards(models / "ada")
        return self


@pytest.mark.slow
def test_a_whole_round_of_images_is_ranked_verified_and_made_again(tmp_path: Path) -> None:
    data = tmp_path / "server"
    with (
        demo_servers.Servers(data, runner="local") as servers,
        Seeing(tmp_path, [servers.url], invitations(data), servers.check) as people,
    ):
        people.play()
        state, bundle = people.state(), people.bundle()
    assert state.phase == Phase.PUBLISHED
    rows = verify.recompute_ranking(bundle).document()["ranking"]
    assert len(rows) == 4 and all(row["score"] is not None for row in rows)
    checks = verify.verify(bundle, rerun=EntrantRerun("ada", people.where / "models" / "ada")).checks
    assert [check for check in checks if check.status == "FAILED"] == []
    (again,) = [check for check in checks if check.name == "re-run"]
    assert again.status == "ok", again
