"""The method "lora": peft's numbers, whole weights at the end, the same bytes again, and the model as submitted as a candidate."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acclimate_competitions import recipe as recipes
from acclimate_competitions.errors import Refusal
from acclimate_competitions.recipe import LINEAR, Lora
from acclimate_runners import architectures, jobs, packing, tensors

BOTH = Lora(rank=4, alpha=12.0, targets=LINEAR)
LLAMA = {
    "attention": ["k_proj", "o_proj", "q_proj", "v_proj"],
    "mlp": ["down_proj", "gate_proj", "up_proj"],
}
NAMED: dict[str, dict[str, list[str]]] = {
    "gpt2": {"attention": ["c_attn", "c_proj"], "mlp": ["c_fc", "c_proj"]},
    "gpt_neox": {"attention": ["dense", "query_key_value"], "mlp": ["dense_4h_to_h", "dense_h_to_4h"]},
    "falcon": {"attention": ["dense", "query_key_value"], "mlp": ["dense_4h_to_h", "dense_h_to_4h"]},
    "phi": {"attention": ["dense", "k_proj", "q_proj", "v_proj"], "mlp": ["fc1", "fc2"]},
    "phi3": {"attention": ["o_proj", "qkv_proj"], "mlp": ["down_proj", "gate_up_proj"]},
    "mamba": {"attention": ["in_proj", "x_proj"], "mlp": []},
    "falcon_mamba": {"attention": ["in_proj", "x_proj"], "mlp": []},
}


def opened(tiny: Any, folder: Path, architecture: str, **changes: Any) -> Any:
    """A loaded tiny model without dropout, and the second task's rows, of any length."""
    from acclimate_runners import computing, preparation

    computing.be_deterministic(1)
    still = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}.get(architecture, {})
    job = tiny.job(folder, tiny.model(folder / "model", architecture, **still, **changes), "check")
    model, tokenizer = preparation.open_model(job, folder)
    return model, preparation.pack_splits(job, folder, job.tasks[1], model, tokenizer)


def with_peft(model: Any, lora: Lora) -> tuple[Any, dict[str, Any]]:
    """The same model in peft's hands, and its adapters by our names."""
    import copy

    import peft

    names = tensors.linear(architectures.shapes(model.facts.config), lora.targets)
    layers = [name.removesuffix(".weight") for name in names]
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=layers,
        fan_in_fan_out=model.facts.architecture == "gpt2",
        task_type="CAUSAL_LM",
    )
    theirs = peft.get_peft_model(copy.deepcopy(model.model), config)
    own = dict(theirs.base_model.model.named_parameters())
    return theirs, {
        f"{layer}.weight.{part}": own[f"{layer}.lora_{part}.default.weight"] for layer in layers for part in "AB"
    }


def theirs_logits(theirs: Any, rows: Any, chosen: Any) -> tuple[Any, Any]:
    import torch

    longest = int(rows.lengths[chosen].max())
    wanted = torch.from_numpy(rows.labels[chosen, :longest]).flatten()
    at = (wanted != packing.NOT_SCORED).nonzero()[:, 0]
    logits = theirs(input_ids=torch.from_numpy(rows.inputs[chosen, :longest])).logits.flatten(0, 1)
    return logits[at], wanted[at]


def ours_logits(model: Any, rows: Any, chosen: Any) -> Any:
    from acclimate_runners import preparation

    return preparation._read(model, rows, chosen, packed=False)[0]


# peft asks transformers for what it calls by a new name now.
with_its_warnings = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@with_its_warnings
@pytest.mark.parametrize("architecture", sorted(n for n, k in architectures.ARCHITECTURES.items() if not k.encodes))
def test_the_forward_pass_is_pefts_and_merged_is_unmerged(tiny: Any, tmp_path: Path, architecture: str) -> None:
    import torch

    from acclimate_runners import adapters

    model, (rows, _) = opened(tiny, tmp_path, architecture)
    theirs, pairs = with_peft(model, BOTH)
    before, chosen = model.copy_weights(), np.arange(len(rows))
    with torch.no_grad():
        plain = ours_logits(model, rows, chosen)
        with adapters.learned(model, BOTH, seed=11) as made:
            assert set(made) == set(pairs) and {name: t.shape for name, t in made.items()} == {
                name: t.shape for name, t in pairs.items()
            }
            # Nothing is added yet; what a sum lays elsewhere, some processors read in another order.
            torch.testing.assert_close(ours_logits(model, rows, chosen), plain, atol=1e-6, rtol=0)
            draw = torch.Generator().manual_seed(3)
            for name, tensor in made.items():
                tensor.add_(torch.randn(tensor.shape, generator=draw) / 10)
                pairs[name].copy_(tensor)
            unmerged = ours_logits(model, rows, chosen)
            assert all(tensor.equal(before[name]) for name, tensor in model.weights.items())
        merged = ours_logits(model, rows, chosen)
        reference, _ = theirs_logits(theirs, rows, chosen)
    assert (unmerged - plain).abs().max() > 0.005
    torch.testing.assert_close(unmerged, reference, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(merged, unmerged, atol=1e-5, rtol=1e-5)
    whole = dict(theirs.merge_and_unload().named_parameters())
    adapted = {name.removesuffix(".A") for name in made if name.endswith(".A")}
    for name, tensor in model.weights.items():
        assert tensor.equal(before[name]) is (name not in adapted), name
        assert tensor.requires_grad
        if name in adapted:
            torch.testing.assert_close(tensor, whole[name], atol=1e-6, rtol=1e-6)


@with_its_warnings
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_loop_over_pefts_model_gives_the_same_losses_and_weights(
    tiny: Any, tmp_path: Path, architecture: str
) -> None:
    import torch
    from torch.nn import functional

    from acclimate_runners import adapters, preparation

    steps, lr, seed, recipe = 6, 0.01, 12, tiny.recipe(method="lora", lora=BOTH)
    model, packed = opened(tiny, tmp_path, architecture)
    theirs, pairs = with_peft(model, BOTH)
    with adapters.learned(model, BOTH, seed=seed) as made:
        for name, tensor in made.items():
            pairs[name].data.copy_(tensor.detach())
    done = preparation.fit(model, packed, recipe, lr=lr, seed=seed, stop_after=steps)

    theirs.train()
    learned = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    assert 6 * sum(parameter.numel() for parameter in learned) == done.beside
    optimizer = torch.optim.AdamW(learned, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    losses = []
    for step in range(1, steps + 1):
        batch = packing.batch_of_step(step - 1, rows=42, global_batch=8, seed=seed)
        optimizer.param_groups[0]["lr"] = preparation.learning_rate(step, total=18, peak=lr, schedule=recipe.schedule)
        optimizer.zero_grad()
        loss = functional.cross_entropy(*theirs_logits(theirs, packed[0], batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert done.losses == pytest.approx(losses, rel=1e-5)
    whole = dict(theirs.merge_and_unload().named_parameters())
    for name, tensor in model.weights.items():
        torch.testing.assert_close(tensor, whole[name].detach().requires_grad_(), atol=1e-5, rtol=1e-4)


def test_all_linear_layers_of_every_architecture_have_a_name_in_the_rule(tiny: Any) -> None:
    import torch
    from transformers.pytorch_utils import Conv1D

    from acclimate_runners import building

    assert tuple(tensors.PARTS) == LINEAR
    for architecture, config in tiny.configs.items():
        model, head = building.build(config, max_length=16), architectures.ARCHITECTURES[architecture].head
        linear = {
            f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear | Conv1D)
        }
        shapes = architectures.shapes(config)
        found = tensors.linear(shapes, LINEAR)
        # Mamba multiplies with these by itself, and an adapter would not be asked.
        own = {name for name in linear if name.endswith(("dt_proj.weight", "mixer.out_proj.weight"))}
        assert set(found) == linear - own - {head, "lm_head.weight"}, architecture
        for part in LINEAR:
            names = {name.split(".")[-2] for name in tensors.linear(shapes, (part,))}
            assert sorted(names) == NAMED.get(architecture, LLAMA)[part], architecture
        assert sorted(name for part in LINEAR for name in tensors.linear(shapes, (part,))) == found


def test_only_the_targets_are_changed(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import preparation

    for part, other in (LINEAR, LINEAR[::-1]):
        model, packed = opened(tiny, tmp_path / part, "llama")
        before = model.copy_weights()
        recipe = tiny.recipe(method="lora", lora=Lora(2, 4.0, (part,)), epochs=1)
        preparation.fit(model, packed, recipe, lr=0.01, seed=11)
        changed = {name for name, tensor in model.weights.items() if not tensor.equal(before[name])}
        shapes = architectures.shapes(model.facts.config)
        assert changed == set(tensors.linear(shapes, (part,))) and not changed & set(tensors.linear(shapes, (other,)))


def test_adapters_on_layers_that_an_architecture_lacks_are_the_models_fault(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import checking

    model = tiny.model(tmp_path / "model", "mamba")
    recipe = tiny.recipe(method="lora", lora=Lora(2, 4.0, ("mlp",)))
    job = tiny.job(tmp_path / "job", model, "check", recipe=recipe)
    with pytest.raises(Refusal, match="the recipe has adapters on mlp, which mamba has no layers of") as caught:
        checking.check(job, tmp_path / "job", lambda *words: None)
    assert caught.value.code == "model_invalid"


def test_a_failure_leaves_no_adapters_behind(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import adapters

    model, (rows, _) = opened(tiny, tmp_path, "llama")
    before, chosen = model.copy_weights(), np.arange(4)
    plain = ours_logits(model, rows, chosen)
    with pytest.raises(MemoryError), adapters.learned(model, BOTH, seed=11) as made:
        for tensor in made.values():
            tensor.data.fill_(1.0)
        raise MemoryError
    assert ours_logits(model, rows, chosen).equal(plain)
    assert all(tensor.equal(before[name]) and tensor.requires_grad for name, tensor in model.weights.items())


def test_each_seed_draws_adapters_of_its_own(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import adapters

    model, _ = opened(tiny, tmp_path, "llama")
    drawn = []
    for seed in (11, 11, 12):
        with adapters.learned(model, BOTH, seed=seed) as made:
            drawn.append({name: tensor.detach().clone() for name, tensor in made.items()})
    for name, tensor in drawn[0].items():
        assert tensor.equal(drawn[1][name])
        if name.endswith(".B"):
            assert not tensor.any() and tensor.shape[1] == BOTH.rank
        else:
            bound = tensor.shape[1] ** -0.5
            assert not tensor.equal(drawn[2][name]) and bound / 2 < tensor.abs().max() <= bound


STAGES = (("more", 11), ("words", 13))


def prepared(
    tiny: Any, folder: Path, *, model: Path | None = None, stages: Any = STAGES, **changes: Any
) -> jobs.Outcome:
    from acclimate_runners import preparation

    given = {"method": "lora", "lora": BOTH, **changes}
    model = model or tiny.model(folder / "model")
    job = tiny.job(folder, model, "prepare", stages=stages, recipe=tiny.recipe(**given))
    assert jobs.from_json(jobs.to_json(job)) == job
    return preparation.prepare(job, folder, lambda *words: None)


@pytest.mark.slow
def test_the_same_bytes_again_and_in_another_process(tiny: Any, tmp_path: Path) -> None:
    model = tiny.model(tmp_path / "model", "gpt2", attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)
    first = prepared(tiny, tmp_path / "first", model=model)
    again = prepared(tiny, tmp_path / "again", model=model)
    other = tmp_path / "other"
    other.mkdir()
    recipe = tiny.recipe(method="lora", lora=BOTH)
    tiny.job(other, model, "prepare", stages=STAGES, recipe=recipe)
    ran = subprocess.run(
        [sys.executable, "-m", "acclimate_runners", str(other)], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    outcome = jobs.read_outcome(other)
    assert outcome is not None and first.files == again.files == outcome.files and len(first.files) == 2
    for name in first.files:
        assert (tmp_path / "first/out" / name).read_bytes() == (other / "out" / name).read_bytes()
    # Other adapters, other bytes.
    assert prepared(tiny, tmp_path / "wider", model=model, lora=Lora(4, 13.0, LINEAR)).files != first.files


def test_results_are_those_of_whole_models(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import network, preparation

    outcome = prepared(tiny, tmp_path)
    job = jobs.from_json((tmp_path / "job.json").read_text("utf-8"))
    assert isinstance(job, jobs.PrepareJob)
    model, tokenizer = preparation.open_model(job, tmp_path)
    beside = sum(
        BOTH.rank * sum(shape)
        for name, shape in architectures.shapes(model.facts.config).items()
        if name in tensors.linear(architectures.shapes(model.facts.config), LINEAR)
    )
    for data, selection, entry in zip(
        job.tasks, outcome.results["selections"], outcome.results["prepared"], strict=True
    ):
        assert [(c["lr"], c["epoch"]) for c in selection["candidates"]] == [(None, 0), (3e-3, 3), (1e-2, 3)]
        assert not entry["base"] and entry["losses"][-1] < entry["losses"][0]
        per_token = 4 * model.facts.parameters + 6 * beside
        assert entry["cost"]["flops"] == per_token * entry["cost"]["tokens"] > 0
        # What is written is what was validated, and an evaluation reads it as it reads any model.
        model.set_weights(network.read_weights([tmp_path / "out" / entry["file"]], model.facts))
        _, validation = preparation.pack_splits(job, tmp_path, data, model, tokenizer)
        assert preparation.validation_nll(model, validation) == entry["validation"]


def test_the_model_as_submitted_counts_where_training_makes_it_worse(tiny: Any, tmp_path: Path) -> None:
    # A model that has learned the first task already.
    learned = prepared(tiny, tmp_path / "first", method="full", lora=None, epochs=6, lr_grid=(1e-2,))
    model = tiny.model(tmp_path / "model")
    (model / "model.safetensors").write_bytes((tmp_path / "first/out/more-11.safetensors").read_bytes())
    assert not learned.results["prepared"][0]["base"]
    outcome = prepared(tiny, tmp_path, model=model, stages=(("more", 11), ("more", 12)), lr_grid=(30.0, 60.0))
    assert len(outcome.results["prepared"]) == 2
    assert outcome.results["selections"][0]["selected"] == {"lr": None, "epoch": 0}
    for entry in outcome.results["prepared"]:
        assert entry["base"]
        base = (tmp_path / "model" / "model.safetensors").read_bytes()
        assert (tmp_path / "out" / entry["file"]).read_bytes() == base


def test_divergence_has_an_outcome_by_rule(tiny: Any, tmp_path: Path) -> None:
    selection = recipes.Selection("nll", 0, ("last",))
    outcome = prepared(tiny, tmp_path, lr_grid=(1e30,), selection=selection)
    for entry in outcome.results["prepared"]:
        assert entry["base"] and "diverged" in entry["note"]
        base = (tmp_path / "model" / "model.safetensors").read_bytes()
        assert (tmp_path / "out" / entry["file"]).read_bytes() == base
    json.dumps(outcome.results, allow_nan=False)


def test_packed_and_in_parts_the_losses_are_the_same(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import preparation

    losses = []
    for number, (packed, size) in enumerate([(False, None), (True, None), (False, 3)]):
        model, data = opened(tiny, tmp_path / str(number), "llama")
        recipe = tiny.recipe(method="lora", lora=BOTH, packing=packed, epochs=1)
        losses.append(preparation.fit(model, data, recipe, lr=0.003, seed=12, micro_batch=size).losses)
    assert losses[1] == pytest.approx(losses[0], abs=1e-5) and losses[2] == pytest.approx(losses[0], abs=1e-5)


def test_a_model_is_checked_with_its_adapters(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import checking

    recipe = tiny.recipe(method="lora", lora=BOTH)
    job = tiny.job(tmp_path, tiny.model(tmp_path / "model"), "check", recipe=recipe)
    found = checking.check(job, tmp_path, lambda *words: None)
    assert found.status == "done" and len(found.results["losses"]) == 3 and found.results["forecast"] > 0


def test_a_recipe_without_adapters_has_the_digest_it_always_had(tiny: Any) -> None:
    assert "lora" not in tiny.recipe().document()
    one = tiny.recipe(method="lora", lora=BOTH)
    for recipe in (tiny.recipe(), one):
        assert recipes.from_document(recipe.document()) == recipe
        assert recipes.from_document(json.loads(json.dumps(recipe.document()))) == recipe
    others = [Lora(5, 12.0, LINEAR), Lora(4, 12.5, LINEAR), Lora(4, 12.0, ("mlp",))]
    assert len({tiny.recipe(method="lora", lora=each).digest for each in (BOTH, *others)} | {tiny.recipe().digest}) == 5
