"""Holdouts of different rounds: what two share is found whichever way it is written, and nothing else is."""

from pathlib import Path

import pyarrow as pa
import tiny
from hypothesis import given
from hypothesis import strategies as st

from acclimate_competitions import definition, differences, holdouts

COMPETITION = definition.parse(tiny.DEFINITION.encode())
WORDS = st.text("aBcß é", min_size=1, max_size=8).filter(str.strip)
ROWS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=6)


def table(rows: list[tuple[str, str]], **more: str) -> pa.Table:
    columns = {
        "example": [name for name, _ in rows],
        "input": [text for _, text in rows],
        "target": ["red"] * len(rows),
        "cluster": [f"c{i}" for i in range(len(rows))],
    }
    return pa.table(columns | {name: [value] * len(rows) for name, value in more.items()})


@given(ROWS, ROWS)
def test_what_two_holdouts_share_is_found_and_nothing_else(one: list, other: list) -> None:
    kept = holdouts.kept({"tint": table(one)}, COMPETITION)
    found = {o.what: o.count for o in holdouts.shared(kept, {"size": table(other)}, COMPETITION)}

    def plain(text: str) -> str:
        return " ".join(text.casefold().split())

    names = {name for name, _ in one} & {name for name, _ in other}
    inputs = {plain(text) for _, text in one} & {plain(text) for _, text in other}
    assert found.get("example ids", 0) == len(names)
    assert found.get("inputs", 0) == len(inputs)
    assert found["clusters"] == min(len(one), len(other))


def test_case_blanks_and_unicode_form_hide_nothing() -> None:
    kept = holdouts.kept({"tint": table([("a", "Un  été à Paris")])}, COMPETITION)
    (overlap, *_) = holdouts.shared(kept, {"tint": table([("b", " un ÉTÉ a\u0300 paris")])}, COMPETITION)
    assert (overlap.what, overlap.sentence()) == ("inputs", "1 inputs, the first: tint, 'b'")


def test_inputs_are_compared_by_the_columns_of_then_and_of_now() -> None:
    text = tiny.DEFINITION.replace('prompt = "{{ input }}"', 'prompt = "{{ passage }} {{ input }}"', 1)
    wide = definition.parse(text.encode())
    kept = holdouts.kept({"tint": table([("a", "what?")], passage="a fox")}, wide)
    assert kept["columns"] == {"tint": ["input", "passage"]}
    again = {"tint": table([("b", "what?")], passage="a fox")}
    assert [o.what for o in holdouts.shared(kept, again, COMPETITION)] == ["inputs", "clusters"]
    narrow = {"tint": table([("b", "what?")])}
    assert [o.what for o in holdouts.shared(kept, narrow, COMPETITION)] == ["clusters"]
    assert holdouts.incomparable(kept, narrow) == ["tint"] and holdouts.incomparable(kept, again) == []


def test_digests_say_nothing_of_texts_or_their_order(tmp_path: Path) -> None:
    built = tiny.competition(tmp_path)
    rows = holdouts.tables_of(tmp_path, built, "holdout")
    kept = holdouts.kept(rows, built)
    assert holdouts.is_kept(kept) and not holdouts.is_kept({**kept, "v": 2}) and not holdouts.is_kept([])
    backwards = {task: found.take(list(range(len(found)))[::-1]) for task, found in rows.items()}
    assert holdouts.kept(backwards, built) == kept
    assert not [line for line in kept["examples"] if "holdout" in line]
    assert holdouts.public_tables(tmp_path, built).keys() == {
        f"{task}/{split}" for task in tiny.TASKS for split in ("preparation", "validation")
    }


def test_tasks_are_told_apart_by_name_and_dates_are_no_difference() -> None:
    other = tiny.DEFINITION.replace('name = "tiny"', 'name = "tiny-2"').replace("epochs = 2", "epochs = 3")
    other = other.replace('name = "size"', 'name = "weight"').replace("total = 5", "total = 6")
    found = differences.of_definitions(COMPETITION, definition.parse(other.encode()))
    assert {d.key for d in found if d.part == "recipe"} == {"preparation.epochs"}
    assert {d.key.rpartition(".")[0] for d in found if d.part == "tasks"} == {"tasks.size", "tasks.weight"}
    assert {d.key: (d.before, d.after) for d in found if d.part == "rules"} == {"submission.per_entrant.total": (5, 6)}
    assert differences.told(None) == "-" and len(differences.told("x" * 100)) == 60
