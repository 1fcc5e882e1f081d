"""The demo's entrants: whole folders that the platform accepts, the same bytes each time, finished after an interruption."""

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from acclimate_competitions import definition
from acclimate_competitions.errors import Refusal
from acclimate_runners import lineup, models


@pytest.fixture(scope="module")
def data(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny competition with a definition of its own: that of digits, with the tiny tasks."""
    folder = tmp_path_factory.mktemp("competition")
    text = (definition.shipped("digits") / "competition.toml").read_text("utf-8")
    first, last = text.index("[[tasks]]"), text.index("[preparation]")
    tasks = "".join(
        f'[[tasks]]\nname = "{task.name}"\nkind = "choice"\nprompt = "{task.prompt}"\n'
        f'choices = {json.dumps(task.choices)}\nmetric = "accuracy"\nchance = {task.chance}\n\n'
        for task in tiny.tasks
    )
    (folder / "competition.toml").write_text(text[:first] + tasks + text[last:], "utf-8")
    (folder / "splits").symlink_to(tiny.data / "splits")
    (folder / "tokenizer.json").write_bytes(tiny.tokenizer.read_bytes())
    return folder


def spec(name: str, **changes: Any) -> lineup.Spec:
    return replace(next(spec for spec in lineup.LINEUP if spec.name == name), **changes)


def test_the_lineup_is_what_the_readme_says() -> None:
    honest = [s for s in lineup.LINEUP if s.practice]
    assert sorted((s.width, s.layers, s.steps) for s in honest) == [
        (16, 1, 150), (24, 1, 400), (32, 1, 600), (32, 2, 200), (32, 2, 700), (48, 2, 600), (64, 2, 900),
    ]  # fmt: skip
    crammer = spec(lineup.CRAMMER)
    assert (crammer.width, crammer.layers, crammer.steps, crammer.cram) == (16, 1, 150, 800)
    assert lineup.practice(crammer, ["digit", "parity"]) == {"digit": 800, "parity": 0}
    assert lineup.practice(spec("untrained"), ["digit"]) == {"digit": 0}
    drawn = [lineup.practice(s, ["a", "b", "c", "d"]) for s in honest]
    assert {steps for entry in drawn for steps in entry.values()} == {0, 10, 20, 40}
    assert len({s.seed for s in lineup.LINEUP}) == len({s.name for s in lineup.LINEUP}) == 9


def test_practice_is_spread_over_the_second_half() -> None:
    one = spec("alder")
    steps = lineup.plan(one, {"more": 20, "words": 10})
    assert len(steps) == one.steps + 30
    assert set(steps[: one.steps // 2]) == {""}
    assert steps.count("more") == 20 and steps.count("words") == 10
    assert steps[-105:] != sorted(steps[-105:])


def test_an_entrant_is_accepted_and_the_same_each_time(tiny: Any, data: Path, tmp_path: Path) -> None:
    lessons = lineup.read_lessons(data)
    small = spec("alder", steps=12, practice=False, cram=8)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        lineup.make_one(small, tmp_path / name, data, lessons)
    folder = tmp_path / "one" / "alder"
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "two" / "alder" / path.name).read_bytes()
    about = json.loads((folder / "entrant.json").read_text())
    files = {path.name: path for path in folder.iterdir() if path.name != "entrant.json"}
    facts = models.inspect(files, tiny.limits)
    assert about == {
        "entrant": "alder",
        "title": "Alder",
        "family": "broadleaf",
        "base": "",
        "parameters": facts.parameters,
        "released": lineup.RELEASED,
        "practised": {"more": 8, "words": 0},
    }
    other = replace(small, seed=99)
    lineup.make_one(other, tmp_path / "two", data, lessons)
    assert (tmp_path / "two" / "alder" / "model.safetensors").read_bytes() != files["model.safetensors"].read_bytes()


def test_training_learns_texts_and_labels(data: Path) -> None:
    from acclimate_runners import network

    lessons = lineup.read_lessons(data)
    small = spec("alder", steps=60)
    scores = []
    for steps, practised in ((0, {"more": 0}), (60, {"more": 0}), (60, {"more": 40})):
        trained = lineup.train(replace(small, steps=steps), lessons, practised)
        texts = float(network.answer_loglikelihoods(trained, lessons.texts).mean())
        scores.append((texts, float(network.answer_loglikelihoods(trained, lessons.tasks["more"]).mean())))
    assert scores[1][0] > scores[0][0] + 1
    assert scores[2][1] > scores[1][1] + 1


def test_make_finishes_what_is_missing(data: Path, tmp_path: Path) -> None:
    names = [one.name for one in lineup.LINEUP]
    for name in names:
        if name not in lineup.BASELINES:
            (tmp_path / name).mkdir()
            (tmp_path / name / "entrant.json").write_text("{}")
    # Of this one an interrupted run left a part.
    (tmp_path / "untrained").mkdir()
    (tmp_path / "untrained" / "config.json").write_text("{")
    told: list[tuple[int, int, str]] = []
    assert lineup.make(tmp_path, data, processes=2, progress=lambda *words: told.append(words)) == names
    assert told == [(8, 9, ""), (9, 9, "untrained")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    made = tmp_path / "untrained"
    assert sorted(path.name for path in made.iterdir()) == sorted([*models.NAMES, "entrant.json"])
    (tmp_path / "again").mkdir()
    lineup.make_one(spec("untrained"), tmp_path / "again", data, lineup.read_lessons(data))
    weights = (made / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "again" / "untrained" / "model.safetensors").read_bytes()
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert lineup.make(tmp_path, data, processes=2, progress=lambda *words: None) == names
    assert (made / "model.safetensors").stat().st_mtime_ns == before


def test_a_failing_process_is_told(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="the line-up could not be made") as caught:
        lineup.make(tmp_path / "out", tmp_path / "nowhere", processes=1, progress=lambda *words: None)
    assert caught.value.code == "job_failed"


@pytest.mark.parametrize("most", [pytest.param(64, marks=pytest.mark.slow), 4096])
def test_a_full_disk_is_no_space_and_leaves_no_part(data: Path, tmp_path: Path, most: int) -> None:
    # Of the two, one ends the writing of config.json, the other that of the weights, by a library with errors of its own.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(Refusal, match="no space") as caught:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
        try:
            lineup.make(tmp_path / "out", data, processes=1, specs=[spec("untrained")])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.code == "no_space" and list((tmp_path / "out").iterdir()) == []
    assert lineup.make(tmp_path / "out", data, processes=1, specs=[spec("untrained")]) == ["untrained"]
