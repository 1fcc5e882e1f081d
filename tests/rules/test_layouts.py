"""Several sequences in one row have the numbers of sequences read apart, on every accepted architecture."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acclimate_competitions import recipe as recipes
from acclimate_runners import architectures, layouts, packing

PROMPTS = [[1, 3, 4], [1, 5, 6, 7, 3, 4], [1, 3]]
WINDOWED = ("mistral", "gemma2", "gemma3_text", "phi3")
ANSWERS = [[[9], [10, 11, 11], [3, 4]], [[9, 9], [10], [4, 5, 6]], [[9], [10], [11]]]


def variants(tiny: Any, length: int) -> list[tuple[str, dict[str, Any]]]:
    """All architectures for sequences of so many tokens; those with windows also with one that is shorter than some, and than all.

    Up to 128 tokens take the plain attention, more another one.
    """
    found: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in tiny.configs]
    found += [(name, {"sliding_window": window}) for name in WINDOWED for window in (4, 8)]
    named = {name: architectures.ARCHITECTURES[name].positions for name in tiny.configs}
    return [(name, changes | ({each[0]: length} if (each := named[name]) else {})) for name, changes in found]


def loaded(tiny: Any, folder: Path, architecture: str, *, max_length: int = 16, **changes: Any) -> Any:
    from acclimate_runners import computing, network

    computing.be_deterministic(1)
    model = tiny.model(folder / architecture, architecture, **changes)
    return network.load({path.name: path for path in model.iterdir()}, tiny.limits, max_length=max_length)


def attending(tiny: Any) -> list[str]:
    """Architectures whose tokens see each other by attention, so that a mask can keep them apart."""
    return [name for name in tiny.configs if architectures.ARCHITECTURES[name].attends]


def test_who_sees_whom() -> None:
    made = layouts.answered([[1, 2]], [[[3, 4], [5, 6, 7]]])
    assert made.laid.inputs.tolist() == [[1, 2, 3, 5, 6]]
    assert made.laid.positions.tolist() == [[0, 1, 2, 2, 3]]
    assert made.laid.sees()[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert made.at.tolist() == [[1, 2, 0], [1, 3, 4]]
    assert made.real.tolist() == [[True, True, False], [True, True, True]]


@pytest.mark.parametrize("max_length", [16, 200])
def test_a_prompt_read_once_has_the_numbers_of_each_answer_apart(tiny: Any, tmp_path: Path, max_length: int) -> None:
    from acclimate_runners import network

    pairs = [(p, a) for p, row in zip(PROMPTS, ANSWERS, strict=True) for a in row]
    packed = packing.pack([p for p, _ in pairs], [a for _, a in pairs], max_length=16)
    laid = set()
    for number, (architecture, changes) in enumerate(variants(tiny, max_length)):
        model = loaded(tiny, tmp_path / str(number), architecture, max_length=max_length, **changes)
        if model.can_lay(int(packed.lengths.max())):
            apart = network.answer_loglikelihoods(model, packed)
            shared = network.shared_loglikelihoods(model, layouts.answered(PROMPTS, ANSWERS))
            np.testing.assert_allclose(shared, apart, atol=1e-5, err_msg=f"{architecture} {changes}")
            laid.add((architecture, changes.get("sliding_window")))
    # Where a window is shorter than a sequence they are read apart.
    assert laid == {(name, None) for name in attending(tiny)} | {(name, 8) for name in WINDOWED}


def test_what_has_a_state_instead_of_attention_reads_each_answer_apart(tiny: Any, tmp_path: Path) -> None:
    """Nothing could keep sequences of one row apart there: evaluation and packing recipes fall back, with the same numbers (below)."""
    from acclimate_runners import evaluation

    assert set(tiny.configs) - set(attending(tiny)) == {"mamba", "falcon_mamba"}
    model = loaded(tiny, tmp_path, "mamba")
    assert not model.can_lay(1)
    tokenizer, task = packing.load_tokenizer(tiny.tokenizer), tiny.tasks[1]
    rows = [{"example": str(n), "input": "a b c"[: 2 * n + 1], "target": "yes"} for n in range(3)]
    asked = evaluation.Questions(tokenizer, task, rows, model=model, max_length=16)
    assert asked._shared == [] and asked._alone != []
    shared = evaluation.Questions(tokenizer, task, rows, model=loaded(tiny, tmp_path, "llama"), max_length=16)
    assert shared._shared != [] and shared._alone == []


def test_many_long_answers_are_not_read_in_one_row(tiny: Any, tmp_path: Path) -> None:
    """Attention's memory grows by the square of a row, and a row of all answers has no bound but their number."""
    from acclimate_runners import evaluation

    tokenizer, model = packing.load_tokenizer(tiny.tokenizer), loaded(tiny, tmp_path, "llama")
    rows = [{"example": "0", "input": "a b", "target": "yes"}]
    longest = {}
    for count in (2, 3, 40):
        task = replace(tiny.tasks[1], choices=tuple(f"{'a b ' * 3}{number}" for number in range(count)))
        (prompt,), (answers,) = packing.asked(tokenizer, task, rows)
        asked = evaluation.Questions(tokenizer, task, rows, model=model, max_length=16)
        longest[count] = layouts.read_tokens(prompt, answers)
        widths = [part.laid.inputs.shape[1] for _, part in asked._shared]
        assert all(width <= 2 * 16 for width in widths)
        assert bool(widths) == (longest[count] <= 32), longest
    assert min(longest.values()) <= 32 < max(longest.values())


def test_the_order_of_the_rows_changes_no_bit(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from acclimate_competitions import tables
    from acclimate_runners import evaluation

    monkeypatch.setattr(packing, "CACHED_TOKENS", 60)
    model = loaded(tiny, tmp_path, "llama")
    tokenizer = packing.load_tokenizer(tiny.tokenizer)
    for task in tiny.tasks:
        rows = tables.read(tiny.data / "splits" / task.name / "holdout.parquet").to_pylist()
        numbers = [
            evaluation.Questions(tokenizer, task, given, model=model, max_length=16)
            .answers(model)
            .loglikelihoods.to_pylist()
            for given in (rows, rows[::-1])
        ]
        assert numbers[0] == numbers[1][::-1]


def test_side_by_side_is_dense_and_keeps_each_label() -> None:
    rows = packing.pack([[1] * n for n in (3, 9, 2, 5)], [[4], [5], [6], [7]], max_length=16)
    made, labels = layouts.side_by_side(rows)
    assert made.groups.tolist() == [[1] * 9, [1] * 5 + [2] * 3 + [-1], [1] * 2 + [-1] * 7]
    assert sorted(labels[labels >= 0].tolist()) == [4, 5, 6, 7]
    assert int((made.groups > 0).sum()) == int(rows.lengths.sum())


@pytest.mark.parametrize("max_length", [16, 200])
def test_packed_losses_are_the_unpacked_ones(tiny: Any, tmp_path: Path, max_length: int) -> None:
    """Rows of any length, of which some windows are shorter than all, some than the longest."""
    from acclimate_runners import preparation

    recipe = tiny.recipe(epochs=1, max_length=max_length)
    for number, (architecture, changes) in enumerate(variants(tiny, max_length)):
        folder = tmp_path / str(number)
        job = tiny.job(folder, tiny.model(folder / "model", architecture, **changes), "check", recipe=recipe)
        model, tokenizer = preparation.open_model(job, folder)
        data = preparation.pack_splits(job, folder, job.tasks[1], model, tokenizer)
        start, losses = model.copy_weights(), []
        for packed in (False, True):
            model.set_weights(start)
            wanted = dataclasses.replace(recipe, packing=packed)
            losses.append(preparation.fit(model, data, wanted, lr=3e-3, seed=11).losses)
        np.testing.assert_allclose(losses[0], losses[1], atol=1e-5, err_msg=f"{architecture} {changes}")


def test_a_recipe_without_packing_has_the_digest_it_always_had(tiny: Any) -> None:
    assert "packing" not in tiny.recipe().document()
    assert tiny.recipe(packing=True).digest != tiny.recipe().digest
    for recipe in (tiny.recipe(), tiny.recipe(packing=True)):
        assert recipes.from_document(recipe.document()) == recipe
