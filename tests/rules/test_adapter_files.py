"""Submitted adapters: peft's files as peft writes them, read strictly, and merged into the numbers that peft has."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acclimate_competitions import bases, digests
from acclimate_competitions.errors import Refusal
from acclimate_runners import adapter_files, jobs

TARGETS: dict[str, list[str]] = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "gpt_neox": ["query_key_value", "gpt_neox.layers.0.mlp.dense_4h_to_h"],
    "phi3": ["qkv_proj", "gate_up_proj"],
    "mamba": ["in_proj", "x_proj"],
}
INNER = {"llama": "model.layers.0.self_attn.q_proj"}


def adapted(base: Path, out: Path, *, said: str = "hub/small", **changes: Any) -> Any:
    """An adapter with drawn weights in `out`, written by peft; peft's own model."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    kind = plain.config.model_type
    given = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS[kind], "task_type": "CAUSAL_LM", **changes}
    with warnings.catch_warnings():
        # peft asks transformers for what it calls by a new name now.
        warnings.simplefilter("ignore", FutureWarning)
        theirs = peft.get_peft_model(plain, peft.LoraConfig(fan_in_fan_out=kind == "gpt2", **given)).eval()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(theirs.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / 10)
    theirs.save_pretrained(out)
    edit(out, base_model_name_or_path=said)
    return theirs


def edit(folder: Path, *drop: str, **changes: Any) -> None:
    path = folder / adapter_files.CONFIG
    config = {**json.loads(path.read_text("utf-8")), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in drop}), "utf-8")


def files_of(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def kept(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and an adapter on it, not to be changed."""
    folder = tmp_path_factory.mktemp("adapter")
    base = tiny.model(folder / "base")
    adapted(base, folder / "adapter")
    return base, folder / "adapter"


@pytest.fixture
def both(kept: tuple[Path, Path], tmp_path: Path) -> tuple[Path, dict[str, Path]]:
    """The base, and copies of the adapter's files."""
    out = tmp_path / "adapter"
    out.mkdir()
    for name in adapter_files.NAMES:
        (out / name).write_bytes((kept[1] / name).read_bytes())
    return kept[0], files_of(out)


def refused(tiny: Any, base: Path, files: dict[str, Path]) -> str:
    with pytest.raises(Refusal) as caught:
        adapter_files.inspect(files, tiny.limits, config=base / "config.json")
    assert caught.value.code == "model_invalid"
    return "\n".join([caught.value.sentence, *caught.value.problems])


@pytest.mark.parametrize("architecture", sorted(TARGETS))
@pytest.mark.parametrize("use_rslora", [False, True])
def test_what_peft_writes_is_merged_to_what_peft_merges(
    tiny: Any, tmp_path: Path, architecture: str, use_rslora: bool
) -> None:
    import torch

    from acclimate_runners import building, network

    still = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}.get(architecture, {})
    base = tiny.model(tmp_path / "base", architecture, **still)
    theirs = adapted(base, tmp_path / "adapter", use_rslora=use_rslora)
    files = adapter_files.of_folder(tmp_path / "adapter")
    assert sorted(files) == sorted(adapter_files.NAMES)
    loaded = network.load(files, tiny.limits, max_length=16, base=files_of(base))
    plain = network.load(files_of(base), tiny.limits, max_length=16)
    inputs = torch.arange(3 * 15).reshape(3, 15) * 7 % len(tiny.words)
    with torch.no_grad():
        found = loaded.logits(inputs, torch.arange(inputs.numel()))
        unmerged = theirs(inputs).logits.flatten(0, 1)
        before = plain.logits(inputs, torch.arange(inputs.numel()))
    assert (unmerged - before).abs().max() > 0.001
    torch.testing.assert_close(found, unmerged, atol=1e-4, rtol=0)
    merged = building.by_file_name(theirs.merge_and_unload(), architecture)
    changed = {name for name, tensor in loaded.weights.items() if not tensor.equal(plain.weights[name])}
    adapter = adapter_files.inspect(files, tiny.limits, config=base / "config.json")
    assert changed == set(adapter.layers) != set()
    for name, tensor in loaded.weights.items():
        torch.testing.assert_close(tensor.detach(), merged[name].detach(), atol=1e-6, rtol=1e-6)
    assert loaded.facts.parameters == plain.facts.parameters
    assert loaded.facts.bytes == sum(path.stat().st_size for path in files.values())


def test_of_a_folder_only_the_two_files_are_taken(both: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    folder = next(iter(both[1].values())).parent
    (folder / "README.md").write_text("peft writes one")
    assert sorted(adapter_files.of_folder(folder)) == sorted(adapter_files.NAMES)
    assert adapter_files.kind_of(adapter_files.of_folder(folder)) == "lora-adapter"
    # A whole model that lies beside an adapter's leftovers is a whole model.
    (folder / "config.json").write_text("{}")
    assert adapter_files.kind_of(files_of(folder)) == "hf-causal-lm"
    assert adapter_files.are(adapter_files.NAMES) and not adapter_files.are(["config.json", "model.safetensors"])


def test_the_base_is_the_last_part_of_what_the_config_says(both: tuple[Path, dict[str, Path]]) -> None:
    path = both[1][adapter_files.CONFIG]
    for said in ("small", "/somewhere/round-files/bases/small/", "hub/small"):
        edit(path.parent, base_model_name_or_path=said)
        assert adapter_files.base_of(path, ["other", "small"]) == "small"
    for said, word in ((None, "is missing"), ("hub/Small", "is 'hub/Small'"), ("", "is ''"), (7, "is 7")):
        edit(path.parent, base_model_name_or_path=said)
        with pytest.raises(Refusal, match="the competition's bases are: other, small") as caught:
            adapter_files.base_of(path, ["other", "small"])
        assert caught.value.code == "model_invalid" and word in caught.value.sentence


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"r": 8}, "r and the base ask for [8, 16]"),
        ({"r": 0}, "r is 0, expected a whole number from 1 to 4096"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": 0}, "lora_alpha is 0, expected a number"),
        ({"target_modules": ["q_proj", "gate"]}, "target_modules has 'gate', which no linear layer of the base is called"),
        ({"target_modules": ["embed_tokens"]}, "they are: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        ({"target_modules": ["lm_head"]}, "has 'lm_head', which no linear layer"),
        ({"target_modules": ".*proj"}, "a list of names of layers; a pattern is not taken"),
        ({"target_modules": []}, "a list of names of layers"),
        ({"target_modules": ["q_proj", "v_proj"]}, "mlp.down_proj.lora_A.weight' is of no layer that target_modules names"),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "k_proj"]}, "k_proj.lora_A.weight' is missing"),
        ({"use_dora": True}, "use_dora is True, not carried"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], not carried"),
        ({"bias": "lora_only"}, "bias is 'lora_only', expected one of none"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', expected one of True, False, gaussian"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is {'q_proj': 2}, not carried"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"auto_mapping": {"parent_library": "evil"}}, "auto_mapping"),
        ({"megatron_core": "evil.module"}, "megatron_core is 'evil.module', expected one of"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', expected one of LORA"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"surprise": 1}, "'surprise' is not an allowed key"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(
    tiny: Any, both: tuple[Path, dict[str, Path]], changes: dict[str, Any], part: str
) -> None:
    base, files = both
    edit(files[adapter_files.CONFIG].parent, **changes)
    assert part in refused(tiny, base, files)


@pytest.mark.parametrize("key", ["r", "lora_alpha", "target_modules", "peft_type", "base_model_name_or_path"])
def test_what_cant_be_left_out(tiny: Any, both: tuple[Path, dict[str, Path]], key: str) -> None:
    base, files = both
    edit(files[adapter_files.CONFIG].parent, key)
    assert f"{key} is missing" in refused(tiny, base, files)


def test_weights_that_are_refused(tiny: Any, both: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    from acclimate_runners import network

    base, files = both
    path = files[adapter_files.WEIGHTS]
    stored = load_file(path)
    first, *others = sorted(stored)
    save_file({name: stored[name] for name in others}, path)
    assert f"tensor {first!r} is missing" in refused(tiny, base, files)
    save_file({**stored, "base_model.model.lm_head.weight": np.zeros((14, 16), np.float32)}, path)
    assert "is of no layer that target_modules names" in refused(tiny, base, files)
    save_file({**stored, first: stored[first].astype(np.float64)}, path)
    assert "has dtype 'F64'" in refused(tiny, base, files)
    path.write_bytes(b"PK\x03\x04 and more of an archive")
    assert "only safetensors is read, never pickle" in refused(tiny, base, files)
    poisoned = stored[first].copy()
    poisoned[0, 0] = np.nan
    save_file({**stored, first: poisoned}, path)
    with pytest.raises(Refusal, match="holds NaN or infinity") as caught:
        network.load(files, tiny.limits, max_length=16, base=files_of(base))
    assert caught.value.code == "model_invalid" and adapter_files.WEIGHTS in caught.value.sentence
    path.unlink()
    assert "adapter_model.safetensors: missing" in refused(
        tiny, base, {adapter_files.CONFIG: files[adapter_files.CONFIG]}
    )


def test_an_adapter_of_another_base_is_refused(tiny: Any, both: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    wider = tiny.model(tmp_path / "wider", hidden_size=32)
    assert "r and the base ask for [4, 32]" in refused(tiny, wider, both[1])
    other = tiny.model(tmp_path / "other", "gpt2")
    assert "target_modules has 'q_proj', which no linear layer of the base is called" in refused(tiny, other, both[1])


def test_sizes_are_those_of_the_rules(tiny: Any, both: tuple[Path, dict[str, Path]]) -> None:
    base, files = both
    for limits, part in (({"max_bytes": 10}, "at most 10 are allowed"), ({"max_parameters": 10}, "its base has 4")):
        with pytest.raises(Refusal, match=part):
            adapter_files.inspect(files, replace(tiny.limits, **limits), config=base / "config.json")


def test_it_is_prepared_and_evaluated_as_the_merged_model_is(
    tiny: Any, both: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    """From the merged weights on, every byte is that of a whole model with them."""
    from acclimate_runners import checking, evaluation, network, preparation

    base, files = both
    whole = tiny.model(tmp_path / "whole")
    merged = network.load(files, tiny.limits, max_length=16, base=files_of(base))
    network.write_weights(merged.weights, whole / "model.safetensors")
    made = {}
    for name, model in {
        "adapter": lambda folder: jobs.ModelFiles(
            {each: tiny.put(folder, path) for each, path in files.items()},
            {each: tiny.put(folder, path) for each, path in files_of(base).items()},
        ),
        "whole": lambda folder: jobs.ModelFiles({p.name: tiny.put(folder, p) for p in whole.iterdir()}),
    }.items():
        folder = tmp_path / f"job of {name}"
        given: dict[str, Any] = {"recipe": tiny.recipe(epochs=1, lr_grid=(3e-3,))}
        submitted = model(folder)

        def job_of(kind: str, folder: Path = folder, submitted: Any = submitted, **more: Any) -> Any:
            return replace(tiny.job(folder, whole, kind, **more), model=submitted)

        job = job_of("prepare", stages=(("words", 11),), **given)
        assert jobs.from_json(jobs.to_json(job)) == job
        assert set(job.model.files.values()) | set(job.model.base.values()) <= jobs.inputs(job)
        prepared = preparation.prepare(job, folder, lambda *words: None)
        direct = {"entrant": "fox", "stages": (("words", None, "direct"),), "prepared": {}, **given}
        asked = evaluation.evaluate(job_of("evaluate", **direct), folder, lambda *words: None)
        checked = checking.check(job_of("check", **given), folder, lambda *words: None)
        assert checked.results["architecture"] == "llama"
        made[name] = (prepared.files, asked.files, checked.results["losses"], checked.results["parameters"])
    assert made["adapter"] == made["whole"]
    # What was submitted is the two files, whatever they stand on.
    assert jobs.ModelFiles({"a": "b"}, {"c": "d"}).digest == digests.of_json({"a": "b"})


def test_public_files_are_exactly_those_of_the_bases_that_are_named() -> None:
    files = {"bases/small/config.json": "sha256:" + "1" * 64, "tokenizer.json": "sha256:" + "2" * 64}
    digest = digests.of_json({"config.json": "sha256:" + "1" * 64})
    assert bases.problems(files, {"small": digest}) == [] == bases.problems({}, {})
    assert bases.of(files, "small") == {"config.json": "sha256:" + "1" * 64}
    (found,) = bases.problems(files, {"small": "sha256:" + "0" * 64})
    assert f"the digest of its files is {digest}, the definition says" in found
    assert bases.problems({}, {"small": digest}) == ["bases/small: the base is missing"]
    for odd in (
        "bases/other/config.json",
        "bases/small/../x",
        "bases/small/a/b",
        "bases/small/.hidden",
        "bases/config.json",
    ):
        assert f"{odd}: the definition names no such base" in bases.problems({**files, odd: digest}, {"small": digest})
