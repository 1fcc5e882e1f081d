"""The study of what equal preparation does: its rounds are played by the platform, its numbers are those of its scores."""

import dataclasses
import importlib
import json
import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "studies" / "preparation"


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("play")


@pytest.fixture
def analyse(play: ModuleType) -> ModuleType:
    return importlib.import_module("analyse")


def test_the_plan_is_what_the_page_says(play: ModuleType) -> None:
    parts = play.parts()
    assert len({part.name for part in parts}) == len(parts) == 12
    assert sum(len(part.rounds) for part in parts if part.entrants == 24) == 10
    for part in parts:
        specs = play.specs(part)
        assert len({spec.name for spec in specs}) == len({spec.seed for spec in specs}) == part.entrants
        assert len({play.capacity(spec) for spec in specs}) > part.entrants // 2
        crammers = sum(spec.cram > 0 for spec in specs)
        assert crammers == ({24: 3, 12: 2}[part.entrants] if part.practice == "drawn" else 0)
    # The twelve of a dose are the same models as among the 24.
    some = {spec.name: spec for spec in play.specs(parts[0])}
    assert all(some[spec.name] == spec for spec in play.specs(next(p for p in parts if p.name == "dose 100")))


def test_the_rounds_of_a_repetition_share_no_holdout_image_and_all_public_rows(
    play: ModuleType, tmp_path: Path
) -> None:
    one, again = play.Part("one", 1), play.Part("other", 2)
    for part, which in ((one, "first"), (one, "second"), (again, "first")):
        play.build(part, which, tmp_path / part.name / which)

    def images(folder: Path, split: str) -> list[str]:
        found = [
            pq.read_table(folder / "splits" / task / f"{split}.parquet").column("cluster").to_pylist()
            for task in play.tasks()
        ]
        assert all(of == found[0] for of in found)
        return found[0]

    first, second, other = tmp_path / "one/first", tmp_path / "one/second", tmp_path / "other/first"
    for split in ("preparation", "validation"):
        assert images(first, split) == images(second, split)
        assert not set(images(first, split)) & {*images(first, "holdout"), *images(second, "holdout")}
    assert len(images(first, "holdout")) == len(images(second, "holdout")) == 400
    assert not set(images(first, "holdout")) & set(images(second, "holdout"))
    assert images(first, "holdout") != images(other, "holdout")


def kept(play: ModuleType, results: Path, which: str, *, spread: float) -> dict[str, np.ndarray]:
    """Scores of a made-up round: direct, each task has an order of its own; prepared, all have the same. protocol -> [entrants, tasks]."""
    random, part = np.random.default_rng(len(which)), play.parts()[0]
    specs, size = play.specs(part), play.SIZES[which]
    skill = np.linspace(0.3, 0.3 + spread, len(specs))
    rows, means = [], {}
    for protocol, seeds in (("direct", [None]), ("prepared", [11, 12, 13])):
        means[protocol] = np.zeros((len(specs), len(play.tasks())))
        for task, name in enumerate(play.tasks()):
            chances = random.permutation(skill) if protocol == "direct" else skill
            for place, spec in enumerate(specs):
                right = random.random((len(seeds), size)) < chances[place]
                means[protocol][place, task] = right.mean()
                for seed, bits in zip(seeds, right, strict=True):
                    row = {"entrant": spec.name, "protocol": protocol, "task": name, "seed": seed}
                    rows.append({**row, "bits": np.packbits(bits).tobytes()})
    about = {"part": dataclasses.asdict(part), "which": which, "crammed": {"entrant-04": "digit"}}
    about["capacity"] = {spec.name: float(place) for place, spec in enumerate(specs)}
    table = pa.Table.from_pylist(rows, schema=play.SCHEMA).replace_schema_metadata({"study": json.dumps(about)})
    path = play.result(part, which, results)
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path)
    return means


def test_numbers_are_those_of_the_scores(
    play: ModuleType, analyse: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = pytest.importorskip("scipy.stats")
    monkeypatch.setattr(analyse, "DRAWS", 20)
    monkeypatch.setattr(analyse, "REPLICATES", 100)
    means = [kept(play, tmp_path, which, spread=0.4) for which in play.ROUNDS]
    text = analyse.page(tmp_path)
    assert "**Partial: 2 of 17 rounds have been played, 1 of 5 repetitions are whole.**" in text
    assert "rises with the mandated preparation" in text
    expected = {
        protocol: np.mean(
            [
                stats.kendalltau(of[protocol][:, a], of[protocol][:, b]).statistic
                for of in means
                for a, b in combinations(range(6), 2)
            ]
        )
        for protocol in ("direct", "prepared")
    }
    found = analyse.pooled([analyse.rounds(tmp_path, play.parts()[0])])
    for protocol, value in expected.items():
        assert found[protocol][0] == pytest.approx(value, abs=1e-12)
        assert found[protocol][1] < value < found[protocol][2]
    assert found["difference"][0] == pytest.approx(expected["prepared"] - expected["direct"], abs=1e-12)
    played = analyse.rounds(tmp_path, play.parts()[0])[0]
    assert played.scores("prepared") == pytest.approx(means[0]["prepared"])
    # Prepared, all have the order of their capacity.
    assert analyse.stability.tau(played.scores("prepared").mean(axis=1)[:, None], played.capacity)[0, 0] > 0.8
    drawn = analyse.plot(tmp_path)
    assert drawn.count("<circle") == 4 and "repetition 1, second" in drawn


def test_rounds_with_the_same_seeds_agree_by_halves_no_more_than_a_round_with_itself(
    play: ModuleType, analyse: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analyse, "DRAWS", 60)
    # Each seed has an order of its own, and it is all that there is: the same in both rounds, as they prepare the same models.
    random = np.random.default_rng(5)
    chances = np.stack([random.permutation(np.linspace(0.1, 0.9, 24)) for _ in range(3)], axis=1)

    def played() -> object:
        tasks = [(random.random((24, 3, 400)) < chances[:, :, None]).astype(float) for _ in play.tasks()]
        return analyse.Played({}, [f"entrant-{place:02d}" for place in range(24)], {"prepared": tasks})

    found = analyse.between(played(), played(), "prepared")
    assert found["whole"] > 0.9
    assert found["halves"] == pytest.approx(found["ceiling"], abs=0.05)


def test_a_dose_stands_beside_the_same_twelve_with_the_usual_one(
    play: ModuleType, analyse: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analyse, "DRAWS", 5)
    kept(play, tmp_path, "first", spread=0.4)
    (whole,) = analyse.rounds(tmp_path, play.parts()[0])
    dose = next(part for part in play.parts() if part.name == "dose 100")
    twelve = [spec.name for spec in play.specs(dose)]
    some = whole.of(twelve)
    assert some.entrants == twelve
    assert some.scores("direct") == pytest.approx(whole.scores("direct")[::2])
    path = play.result(dose, "first", tmp_path)
    path.write_bytes(play.result(play.parts()[0], "first", tmp_path).read_bytes())
    text = analyse.page(tmp_path)
    assert text.index("| the same twelve, dose 150, first |") < text.index("| dose 100, first |")


def test_nothing_played_is_said(analyse: ModuleType, tmp_path: Path) -> None:
    assert "**Partial: 0 of 17 rounds have been played" in analyse.page(tmp_path)
    assert "<svg" in analyse.plot(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_round_of_three_is_played_and_kept(play: ModuleType, analyse: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    part = dataclasses.replace(play.parts()[0], epochs=1, rounds=("first",))
    wanted, results = play.specs(part)[3:6], tmp_path / "results"
    data, say = tmp_path / "first", list[str]().append
    models = tmp_path / "models"
    document = play.play(part, "first", data, models=models, say=say, wanted=wanted)
    play.keep(part, "first", data / "bundle", document, wanted, play.result(part, "first", results))
    (played,) = analyse.rounds(results, part)
    assert played.entrants == [spec.name for spec in wanted]
    published = json.loads((data / "bundle" / "ranking.json").read_text("utf-8"))
    for row in published["ranking"]:
        place = played.entrants.index(row["entrant"])
        assert played.scores("prepared")[place].mean() == pytest.approx(row["score"])
        assert played.scores("direct")[place].mean() == pytest.approx(row["direct_score"])
    assert played.about["crammed"] == {"entrant-04": "digit"}
    assert sys.getsizeof(play.result(part, "first", results).read_bytes()) < 100_000
