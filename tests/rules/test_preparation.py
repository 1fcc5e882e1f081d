"""The mandated preparation: golden losses, an independent re-implementation, equal bytes, selection and divergence by rule."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acclimate_competitions.recipe import Schedule
from acclimate_runners import jobs, packing
from acclimate_runners.checkpoints import Checkpoints

# Loss of each step of the tiny Llama on the task "more", learning rate 0.01, seed 11 (42 rows in batches of 8, 3 epochs).
GOLDEN = [
    2.8246913,
    2.6513033,
    2.2829344,
    2.210325,
    1.9305633,
    1.9378209,
    1.7723287,
    1.6311523,
    1.5960501,
    1.5044463,
    1.4439602,
    1.3810229,
    1.3311335,
    1.2731786,
    1.2600056,
    1.2057836,
    1.1180562,
    1.2800488,
]


def opened(tiny: Any, folder: Path, architecture: str = "llama", **changes: Any) -> Any:
    """A loaded tiny model with both tasks packed."""
    from acclimate_runners import computing, preparation

    computing.be_deterministic(1)
    job = tiny.job(folder, tiny.model(folder / "model", architecture, **changes), "check")
    model, tokenizer = preparation.open_model(job, folder)
    return model, [preparation.pack_splits(job, folder, data, model, tokenizer) for data in job.tasks]


def prepared(tiny: Any, folder: Path, *, stages: Any = None, model: Path | None = None, **changes: Any) -> jobs.Outcome:
    stages = stages or tuple((task.name, seed) for task in tiny.tasks for seed in (11, 12))
    model = model or tiny.model(folder / "model")
    return run(tiny.job(folder, model, "prepare", stages=stages, recipe=tiny.recipe(**changes)), folder)


def run(job: Any, folder: Path) -> jobs.Outcome:
    from acclimate_runners import preparation

    return preparation.prepare(job, folder, lambda *words: None)


def test_the_learning_rate_rises_then_falls_to_its_final_share() -> None:
    from acclimate_runners.preparation import learning_rate

    rates = [learning_rate(step, total=12, peak=2.0, schedule=Schedule("linear", 2, 0.1)) for step in range(1, 13)]
    assert rates[:3] == [1.0, 2.0, pytest.approx(2.0 - 1.8 / 10)]
    assert rates[-1] == pytest.approx(0.2)
    assert learning_rate(1, total=1, peak=2.0, schedule=Schedule("linear", 0, 0.5)) == 1.0
    assert learning_rate(3, total=3, peak=2.0, schedule=Schedule("linear", 10, 0.5)) == pytest.approx(0.6)


def test_each_epoch_visits_each_row_once_in_an_order_of_its_own() -> None:
    visits = [packing.batch_of_step(step, rows=42, global_batch=8, seed=11) for step in range(12)]
    first, second = np.concatenate(visits[:6]), np.concatenate(visits[6:])
    assert sorted(first) == sorted(second) == list(range(42))
    assert [len(batch) for batch in visits] == [8, 8, 8, 8, 8, 2] * 2
    assert first.tolist() != second.tolist()
    assert first.tolist() != packing.order(42, seed=12, epoch=0).tolist()
    assert packing.steps(42, epochs=2, global_batch=8) == 12
    # Fixed for good: another order is another preparation.
    assert packing.order(8, seed=11, epoch=0).tolist() == [3, 6, 0, 7, 4, 1, 2, 5]


def test_golden_losses(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import preparation

    model, packed = opened(tiny, tmp_path)
    done = preparation.fit(model, packed[0], tiny.recipe(), lr=0.01, seed=11)
    assert len(done.losses) == 18 and done.tokens == 3 * 42 * 6
    assert done.losses == pytest.approx(GOLDEN, rel=1e-5)
    assert done.losses[-1] < done.losses[0]


def plain_llama(weights: dict[str, Any], ids: list[int], config: dict[str, Any]) -> Any:
    """Logits [tokens, vocabulary] of one sequence by the formulas, in the dtype of the weights; nothing of transformers."""
    import torch

    def norm(x: Any, gain: Any) -> Any:
        return gain * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size, count = config["hidden_size"] // heads, len(ids)
    angles = torch.arange(count)[:, None].double() / 10000.0 ** (torch.arange(0, size, 2).double() / size)

    def turn(x: Any) -> Any:
        left, right = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat(
            [left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1
        )

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        own = {n.removeprefix(f"model.layers.{layer}."): w for n, w in weights.items() if f"layers.{layer}." in n}
        y = norm(x, own["input_layernorm.weight"])
        q = turn((y @ own["self_attn.q_proj.weight"].T).reshape(count, heads, size).transpose(0, 1))
        k = turn((y @ own["self_attn.k_proj.weight"].T).reshape(count, groups, size).transpose(0, 1))
        v = (y @ own["self_attn.v_proj.weight"].T).reshape(count, groups, size).transpose(0, 1)
        mixed = []
        for head in range(heads):
            group = head // (heads // groups)
            scores = q[head] @ k[group].T / math.sqrt(size)
            scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -math.inf)
            mixed.append(scores.softmax(-1) @ v[group])
        x = x + torch.cat(mixed, dim=-1) @ own["self_attn.o_proj.weight"].T
        y = norm(x, own["post_attention_layernorm.weight"])
        gate = y @ own["mlp.gate_proj.weight"].T
        x = x + (gate * gate.sigmoid() * (y @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T


@pytest.mark.parametrize("task", [0, 1])
def test_an_independent_loop_gives_the_same_losses(tiny: Any, tmp_path: Path, task: int) -> None:
    """Row by row, float64, every token's logits, AdamW by its formula; the second task has padding and answers of many tokens."""
    import torch

    from acclimate_runners import preparation

    steps, lr, seed, recipe = 5, 0.003, 12, tiny.recipe()
    model, packed = opened(tiny, tmp_path)
    mine = {n: w.detach().double().requires_grad_() for n, w in model.copy_weights().items()}
    rows = packed[task][0]
    got = preparation.fit(model, packed[task], recipe, lr=lr, seed=seed, stop_after=steps)

    first = {n: torch.zeros_like(w) for n, w in mine.items()}
    second = {n: torch.zeros_like(w) for n, w in mine.items()}
    wanted = []
    for step in range(1, steps + 1):
        terms = []
        for row in np.argsort(np.random.PCG64([seed, 0]).random_raw(42), kind="stable")[(step - 1) * 8 : step * 8]:
            length = rows.lengths[row]
            chances = plain_llama(mine, rows.inputs[row, :length].tolist(), model.facts.config).log_softmax(-1)
            terms += [-chances[i, label] for i, label in enumerate(rows.labels[row, :length]) if label >= 0]
        loss = torch.stack(terms).mean()
        wanted.append(loss.item())
        gradients = dict(zip(mine, torch.autograd.grad(loss, list(mine.values())), strict=True))
        length = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        scale = min(1.0, recipe.clip / (length + 1e-6))
        rate = lr * (step / 2 if step <= 2 else 1 - 0.9 * (step - 2) / 16)
        with torch.no_grad():
            for name, weight in mine.items():
                g = gradients[name] * scale
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.999 * second[name] + 0.001 * g**2
                away = first[name] / (1 - 0.9**step) / ((second[name] / (1 - 0.999**step)).sqrt() + 1e-8)
                weight -= rate * 0.01 * weight + rate * away
    assert got.losses == pytest.approx(wanted, rel=1e-5)
    for name, weight in model.weights.items():
        assert torch.allclose(weight.double(), mine[name], atol=2e-5), name


@pytest.mark.parametrize("task", [0, 1])
def test_a_batch_in_parts_gives_the_same_but_for_the_last_bits(tiny: Any, tmp_path: Path, task: int) -> None:
    """Answers of one to three tokens: a mean over the parts' means would be another loss."""
    from acclimate_runners import preparation

    model, packed = opened(tiny, tmp_path)
    start, losses, weights = model.copy_weights(), [], []
    for size in (None, 8, 4, 3, 2, 1):
        model.set_weights(start)
        done = preparation.fit(model, packed[task], tiny.recipe(), lr=0.003, seed=12, micro_batch=size)
        losses.append(done.losses)
        weights.append(model.copy_weights())
    assert losses[1] == losses[0] and all(weights[1][name].equal(tensor) for name, tensor in weights[0].items())
    for number in range(2, 6):
        assert losses[number] != losses[0]
        np.testing.assert_allclose(losses[number], losses[0], atol=1e-5, rtol=0)
        assert all((weights[number][name] - tensor).abs().max() < 1e-5 for name, tensor in weights[0].items())


def test_the_micro_batch_is_of_the_job(tiny: Any, tmp_path: Path) -> None:
    stages = (("words", 11),)
    whole = prepared(tiny, tmp_path / "whole", stages=stages)
    job = tiny.job(tmp_path, tiny.model(tmp_path / "model"), "prepare", stages=stages, micro_batch=3)
    assert jobs.from_json(jobs.to_json(job)) == job
    parts = run(job, tmp_path)
    assert parts.files != whole.files
    losses = [outcome.results["prepared"][0]["losses"] for outcome in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert parts.files == run(job, tmp_path).files


def test_validation_nll_is_the_mean_over_examples_of_sums_over_tokens(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import preparation

    model, packed = opened(tiny, tmp_path)
    rows = packed[1][1]
    weights = {n: w.double() for n, w in model.copy_weights().items()}
    total = 0.0
    for row in range(len(rows)):
        length = rows.lengths[row]
        chances = plain_llama(weights, rows.inputs[row, :length].tolist(), model.facts.config).log_softmax(-1)
        total -= sum(float(chances[i, label]) for i, label in enumerate(rows.labels[row, :length]) if label >= 0)
    assert preparation.validation_nll(model, rows) == pytest.approx(total / len(rows), rel=1e-6)


def test_sequences_lose_tokens_at_their_left() -> None:
    packed = packing.pack([[1, 2, 3], [4]], [[8, 9], [7]], max_length=4)
    assert packed.inputs.tolist() == [[2, 3, 8], [4, 0, 0]]
    assert packed.labels.tolist() == [[-100, 8, 9], [7, -100, -100]]
    assert packed.lengths.tolist() == [3, 1]


DROPPED = {
    "gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "phi": ("attention_dropout", "resid_pdrop", "embd_pdrop"),
    "gpt_neox": ("attention_dropout", "hidden_dropout"),
    "falcon": ("attention_dropout", "hidden_dropout"),
    "llama": ("attention_dropout",),
}


@pytest.mark.parametrize("kind", DROPPED)
def test_no_model_brings_its_own_dropout(tiny: Any, tmp_path: Path, kind: str) -> None:
    """It would be held back otherwise than others, and by noise that depends on what is read at once."""
    found = []
    for share in (0.0, 0.5):
        changes = dict.fromkeys(DROPPED[kind], share)
        model = tiny.model(tmp_path / f"model-{share}", kind, **changes)
        found.append(prepared(tiny, tmp_path / f"{share}", model=model, stages=(("words", 11),)))
    assert found[0].files == found[1].files and len(found[0].files) == 1
    assert not found[0].results["prepared"][0]["base"]


def test_the_same_bytes_again_and_in_another_process(tiny: Any, tmp_path: Path) -> None:
    stages = (("more", 11), ("words", 13))
    model = tiny.model(tmp_path / "model", "gpt2")
    first = prepared(tiny, tmp_path / "first", model=model, stages=stages)
    again = prepared(tiny, tmp_path / "again", model=model, stages=tuple(reversed(stages)))
    tiny.job(tmp_path / "other", model, "prepare", stages=stages)
    ran = subprocess.run(
        [sys.executable, "-m", "acclimate_runners", str(tmp_path / "other")],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert ran.returncode == 0, ran.stderr
    other = jobs.read_outcome(tmp_path / "other")
    assert other is not None
    assert first.files == again.files == other.files and len(first.files) == 2
    for name, digest in first.files.items():
        assert (tmp_path / "first" / "out" / name).read_bytes() == (tmp_path / "other" / "out" / name).read_bytes()
        assert {entry["prepared"] for entry in first.results["prepared"] if entry["file"] == name} == {digest}
    json.dumps(first.results, allow_nan=False)


def test_results_say_what_happened(tiny: Any, tmp_path: Path) -> None:
    outcome = prepared(tiny, tmp_path)
    selections, entries = outcome.results["selections"], outcome.results["prepared"]
    assert [s["task"] for s in selections] == ["more", "words"]
    for selection in selections:
        assert [(c["lr"], c["epoch"]) for c in selection["candidates"]] == [(None, 0), (3e-3, 3), (1e-2, 3)]
        best = min(selection["candidates"], key=lambda c: c["validation"])
        assert selection["selected"] == {"lr": best["lr"], "epoch": best["epoch"]}
        assert selection["cost"]["steps"] == 36
    assert [(e["task"], e["seed"]) for e in entries] == [("more", 11), ("more", 12), ("words", 11), ("words", 12)]
    assert len({e["prepared"] for e in entries}) == 4
    for entry in entries:
        assert entry["cost"]["steps"] == len(entry["losses"]) == 18
        assert entry["cost"]["flops"] == 6 * 4144 * entry["cost"]["tokens"] > 0
        assert outcome.files[entry["file"]] == entry["prepared"]


def test_only_the_tasks_that_are_asked_for_are_prepared(tiny: Any, tmp_path: Path) -> None:
    outcome = prepared(tiny, tmp_path, stages=(("words", 13),))
    assert list(outcome.files) == ["words-13.safetensors"]
    assert [s["task"] for s in outcome.results["selections"]] == ["words"]


def test_progress_counts_all_steps(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import preparation

    told: list[tuple[int, int, str]] = []
    job = tiny.job(tmp_path, tiny.model(tmp_path / "model"), "prepare", stages=(("more", 11),))
    preparation.prepare(job, tmp_path, lambda *words: told.append(words))
    assert [step for step, _, _ in told] == sorted(step for step, _, _ in told)
    assert {total for _, total, _ in told} == {54}
    assert told[0][2] == "more, choosing the rate" and told[-1][2] == "more, seed 11"


def test_the_model_as_submitted_counts_where_training_makes_it_worse(tiny: Any, tmp_path: Path) -> None:
    outcome = prepared(tiny, tmp_path, lr_grid=(30.0, 60.0), stages=(("more", 11), ("more", 12)))
    assert outcome.results["selections"][0]["selected"] == {"lr": None, "epoch": 0}
    base = outcome.results["selections"][0]["candidates"][0]["validation"]
    for entry in outcome.results["prepared"]:
        assert entry["validation"] == base and entry["cost"]["steps"] == 0 and entry["losses"] == []
        assert "as submitted" in entry["note"]
        path = tmp_path / "out" / entry["file"]
        assert path.read_bytes() == (tmp_path / "model" / "model.safetensors").read_bytes()
    assert len({entry["prepared"] for entry in outcome.results["prepared"]}) == 1


def test_ties_go_to_the_lower_rate() -> None:
    from acclimate_runners.preparation import best

    def candidate(lr: float | None, validation: float | None) -> dict[str, Any]:
        return {"lr": lr, "epoch": 0, "validation": validation}

    assert best([candidate(5e-3, 1.0), candidate(2e-3, 1.0)]) == candidate(2e-3, 1.0)
    assert best([candidate(2e-3, 1.0), candidate(None, 1.0)]) == candidate(None, 1.0)
    assert best([candidate(2e-3, None), candidate(5e-3, 2.0)]) == candidate(5e-3, 2.0)
    assert best([candidate(2e-3, None)]) is None


@pytest.mark.parametrize("rule", ["base", "missing", "fail"])
def test_divergence_has_an_outcome_by_rule(tiny: Any, tmp_path: Path, rule: str) -> None:
    selection = replace(tiny.recipe().selection, candidates=("last",))
    outcome = prepared(
        tiny, tmp_path, lr_grid=(1e30,), selection=selection, diverged=rule, stages=(("more", 11), ("more", 12))
    )
    assert outcome.status == "done"
    assert outcome.results["selections"][0]["selected"] is None
    for entry in outcome.results["prepared"]:
        if rule == "base":
            assert "failed" not in entry and "diverged" in entry["note"]
            assert "the loss at step" in entry["diverged"]
            base = (tmp_path / "model" / "model.safetensors").read_bytes()
            assert (tmp_path / "out" / entry["file"]).read_bytes() == base
        else:
            assert "diverged" in entry["failed"]["reason"] and entry["prepared"] is None
    assert len(outcome.files) == (2 if rule == "base" else 0)
    json.dumps(outcome.results, allow_nan=False)


def test_a_seed_may_diverge_alone(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import preparation

    model, packed = opened(tiny, tmp_path)
    start = preparation.Start(
        model, model.copy_weights(), tiny.recipe(), Checkpoints(tmp_path, identity={}, seconds=60)
    )
    done = preparation.fit(model, packed[0], tiny.recipe(), lr=1e30, seed=11)
    assert done.validation is None and "the loss at step" in done.diverged
    assert not math.isfinite(done.losses[-1]) and all(map(math.isfinite, done.losses[:-1]))
    # Its entry says so for itself: the selection, which is of another seed, names a learning rate.
    choice = preparation.Choice(1e30, "", {"candidates": [], "selected": {"lr": 1e30, "epoch": 3}})
    words: Any = {"on_step": lambda step: None, "part": "more, seed 11"}
    entry = preparation._prepare_seed(start, packed[0], choice, 11, **words)
    assert entry["base"] and entry["diverged"].startswith("at learning rate 1e+30: the loss at step")
    fine = preparation._prepare_seed(start, packed[0], replace(choice, lr=1e-3), 11, **words)
    assert not fine["base"] and "diverged" not in fine


def test_long_curves_are_thinned() -> None:
    from acclimate_runners.preparation import curve

    losses = tuple(float(i) for i in range(1001))
    thinned = curve((*losses, math.nan))
    assert len(thinned["losses"]) == len(thinned["loss_steps"]) <= 200
    assert thinned["loss_steps"][:2] == [1, 7] and thinned["losses"][1] == 6.0
    assert curve((1.0, math.inf)) == {"losses": [1.0, None], "loss_steps": [1, 2]}


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "mamba"])
def test_padding_and_batching_change_nothing(tiny: Any, tmp_path: Path, architecture: str) -> None:
    import torch

    from acclimate_runners import network

    model, packed = opened(tiny, tmp_path, architecture)
    rows = packed[1][0]
    together = network.answer_loglikelihoods(model, rows)
    for row in range(0, len(rows), 5):
        length = rows.lengths[row]
        inputs = torch.from_numpy(rows.inputs[row : row + 1, :length])
        with torch.no_grad():
            chances = model.model(input_ids=inputs).logits[0].log_softmax(-1)
        alone = sum(float(chances[i, label]) for i, label in enumerate(rows.labels[row, :length]) if label >= 0)
        assert float(together[row]) == pytest.approx(alone, abs=1e-5)
