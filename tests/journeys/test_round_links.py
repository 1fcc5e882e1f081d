"""What ties rounds together for an analyst: the same models, anchors and their drift, recipes; from MLflow alone, and from bundles."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rounds_made
from projected import made
from typer.testing import CliRunner

import acclimate
from acclimate import report_data, report_page, round_links, tracking
from acclimate.cli.main import app
from acclimate.round_links import Linked
from acclimate_competitions import digests
from acclimate_competitions.anchors import Anchor
from acclimate_competitions.errors import Refusal

SKILL = {"amber-fox": 0.9, "blue-whale": 0.6, "cat": 0.4, "untrained": 0.1}
ANCHORS = (Anchor("majority", None), Anchor("untrained", digests.of_json(["untrained"])))


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two rounds: in the second one cat comes with another model, and dog is new."""
    folder = tmp_path_factory.mktemp("rounds")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    for name, skill, seed in (("2027-1", SKILL, 7), ("2027-2", {**SKILL, "dog": 0.5}, 8)):
        data = made(entrants=skill, examples=40, losses=2, seed=seed)
        competition = replace(data.competition, anchors=ANCHORS)
        entries = tuple(
            replace(e, model=digests.of_json([e.entrant, name])) if e.entrant == "cat" else e for e in data.entries
        )
        own = {"name": name, "round": f"digits-{name}-0123456789ab", "stages": (), "entries": entries}
        tracking.publish_round(uri, folder / "artifacts", replace(data, competition=competition, **own))
    return uri


@pytest.mark.slow
def test_entries_say_which_model_it_was_and_anchors_how_far_they_moved(rounds: str) -> None:
    found = acclimate.load_rounds(rounds, "digits")
    entries = found.entries[found.entries["round"] == "2027-2"].set_index("entrant")
    assert list(entries.index[~entries["baseline"]]) == ["amber-fox", "blue-whale", "cat", "dog"]
    assert dict(entries["anchor"]) == {name: name in ("majority", "untrained") for name in entries.index}
    assert entries.loc["cat", "model"] == digests.of_json(["cat", "2027-2"])
    drift = found.drift().set_index("anchor")
    scores = found.ranking.set_index(["round", "entrant"])
    for name in ("majority", "untrained"):
        before, after = scores.loc[("2027-1", name)], scores.loc[("2027-2", name)]
        row = drift.loc[name]
        assert (row["before"], row["after"]) == ("2027-1", "2027-2")
        assert row["change"] == pytest.approx(after["score"] - before["score"], abs=1e-12)
        assert row["se"] == pytest.approx(math.hypot(before["se"], after["se"]))
    said = " | ".join(found.notes)
    assert "each round has a holdout of its own" in said
    assert (
        "entrants that all of these rounds have: 4, 3 of them with the same model; with several models: 'cat'" in said
    )
    assert "anchor untrained from 2027-1 to 2027-2: " in said and "the holdout moved them" in said
    assert "same recipe" not in said
    one = acclimate.load_rounds(rounds, "digits", ["2027-1"])
    assert one.notes == () and len(one.drift()) == 0


@pytest.mark.slow
def test_agreement_of_rounds_is_of_the_entries_that_stand_in_all_of_them(rounds: str) -> None:
    found = acclimate.stability(items=acclimate.load_rounds(rounds, "digits"), common=True)
    assert found["entrants"] == 2 and set(found["sets"]) == {"2027-1", "2027-2"}
    said = " | ".join(found["notes"])
    assert "only the 2 entries that all rounds have with the same model" in said
    assert "left out, as not in all rounds with the same model: 'cat', 'dog'" in said
    command = (
        "stability",
        "--tracking-uri",
        rounds,
        "--competition",
        "digits",
        "--round",
        "2027-1",
        "--round",
        "2027-2",
    )
    ran = CliRunner().invoke(app, [*command, "--common", "--json"])
    assert json.loads(ran.stdout) == json.loads(json.dumps(found))
    # Else an entrant that a round lacks is refused, or left out where that is asked for; never in silence.
    with pytest.raises(Refusal):
        acclimate.stability(items=acclimate.load_rounds(rounds, "digits"))
    assert acclimate.stability(items=acclimate.load_rounds(rounds, "digits"), missing="exclude")["entrants"] == 3


@pytest.mark.slow
def test_where_no_entry_stands_in_all_rounds_that_is_said(rounds: str) -> None:
    found = acclimate.load_rounds(rounds, "digits")
    found.entries.loc[found.entries["round"] == "2027-2", "model"] = "sha256:" + "0" * 64
    with pytest.raises(Refusal, match="no entry stands in all of"):
        acclimate.stability(items=found, common=True)


@pytest.mark.slow
def test_a_report_of_rounds_says_what_ties_them(rounds: str) -> None:
    page, document = report_page.make(
        report_data.read(acclimate.load_rounds(rounds, "digits"), options={}), title="Two"
    )
    assert "the holdout moved them" in page and "with several models" in page
    section: Any = document["across"]["rounds"]
    numbers = section.get("numbers", section)
    assert {row["anchor"] for row in numbers["anchors"]} == {"majority", "untrained"}


def test_bundles_of_different_recipes_are_not_compared_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: digests.of_bytes(f"untrained 1 {name}".encode()) for name in ("config.json", "model.safetensors")}
    model = digests.of_json({**files, "tokenizer.json": digests.of_bytes(rounds_made.TOKENIZER)})
    text = rounds_made.DEFINITION + f'\n[[anchors]]\nname = "untrained"\nmodel = "{model}"\n'
    bundles = []
    for number, changed in enumerate((text, text.replace("clip = 1.0", "clip = 2.0"))):
        monkeypatch.setattr(rounds_made, "DEFINITION", changed)
        bundles.append(rounds_made.make(tmp_path / f"made-{number}").write(tmp_path / f"bundle-{number}"))
    assert "clip = 1.0" in text
    read = [one for bundle in bundles for one in report_data.read(bundle, options={})]
    links = [one.linked for one in read]
    assert links[0] is not None and links[0].models["untrained"] == model and set(links[0].anchors) == {"untrained"}
    page, _ = report_page.make(read, title="Two")
    assert "not all rounds have the same recipe" in page and "the holdout moved them" in page


def test_links_are_told_where_they_are_known_and_only_there() -> None:
    a = Linked("a", "r1", {"x": "1", "y": "2", "z": "3"}, {"m": (0.5, 0.3), "n": (0.1, None)})
    b = Linked("b", "r1", {"x": "1", "y": "9", "w": "4"}, {"m": (0.7, 0.4), "n": (0.1, None), "o": (0.2, 0.1)})
    assert round_links.standing([a, b]) == (["x"], ["y"]) and round_links.standing([]) == ([], [])
    first, second = round_links.drift([a, b])
    assert (first["anchor"], first["se"]) == ("m", 0.5) and first["change"] == pytest.approx(0.2)
    assert (second["anchor"], second["se"], second["change"]) == ("n", None, 0.0)
    assert round_links.recipes([a, b]) == [] and len(round_links.recipes([a, replace(b, recipe="r2")])) == 1
    assert round_links.notes([a]) == [] and round_links.notes([Linked("a"), Linked("b")]) == []
    assert "anchor m from a to b: 0.500 to 0.700, +0.200 ± 0.500" in round_links.notes([a, b])[1]
    lone = [Linked("a", anchors={"m": (0.5, 0.1)}), Linked("b", anchors={"n": (0.5, 0.1)})]
    assert round_links.notes(lone) == ["no anchor has a score in two of these rounds, one after the other"]
