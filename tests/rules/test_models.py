"""Reading a submitted model: what is accepted, what is refused before any library touches it, and that both agree with the library."""

import json
import pickle
import struct
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from acclimate_competitions.errors import Refusal
from acclimate_runners import architectures, models, reading

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": None, "head_dim": 6}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5000.0}),
    (
        "llama",
        {
            "rope_theta": 500.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    ("gpt2", {}),
    ("gpt2", {"n_inner": None, "tie_word_embeddings": False}),
    ("gpt_neox", {}),
    ("gpt_neox", {"attention_bias": False, "tie_word_embeddings": True, "rotary_pct": 0.5}),
    ("mistral", {}),
    ("mistral", {"sliding_window": 3, "rope_theta": 5000.0}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": False, "num_key_value_heads": None}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ("gemma", {}),
    ("gemma", {"attention_bias": True, "pad_token_id": 3}),
    ("gemma2", {}),
    ("gemma2", {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"], "pad_token_id": 3}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}),
    ("gemma3_text", {}),
    (
        "gemma3_text",
        {"sliding_window": 4, "sliding_window_pattern": 2, "rope_theta": 5e5, "rope_local_base_freq": 500.0},
    ),
    (
        "gemma3_text",
        {"final_logit_softcapping": 3.0, "tie_word_embeddings": False, "layer_types": ["full_attention"] * 2},
    ),
    ("falcon", {}),
    ("falcon", {"multi_query": False, "bias": True, "parallel_attn": False, "tie_word_embeddings": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 24, "rope_theta": 500.0}),
    ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "activation": "relu"}),
    ("olmo", {}),
    ("olmo", {"attention_bias": True, "tie_word_embeddings": True}),
    ("olmo2", {}),
    ("olmo2", {"attention_bias": True, "pad_token_id": 3}),
    ("phi", {}),
    ("phi", {"num_key_value_heads": None, "resid_pdrop": 0.1}),
    ("phi3", {}),
    ("phi3", {"num_key_value_heads": None, "sliding_window": 3, "tie_word_embeddings": True, "embd_pdrop": 0.1}),
    ("mamba", {}),
    (
        "mamba",
        {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False, "time_step_rank": 3, "expand": 3},
    ),
    # As the files of the first models say it, and what is computed otherwise elsewhere.
    (
        "mamba",
        {"d_inner": 32, "n_layer": 2, "ssm_cfg": {}, "use_mambapy": True, "conv_kernel": 2, "time_step_rank": "auto"},
    ),
    ("falcon_mamba", {}),
    ("falcon_mamba", {"expand": 16, "intermediate_size": 24}),
    ("falcon_mamba", {"mixer_rms_eps": 0.01, "use_falcon_mambapy": True, "tie_word_embeddings": False}),
]


def refused(files: Path | dict[str, Path], tiny: Any, **rules: Any) -> str:
    with pytest.raises(Refusal) as caught:
        models.inspect(files, replace(tiny.limits, **rules))
    assert caught.value.code == "model_invalid"
    assert caught.value.hint and caught.value.problems
    return "\n".join(caught.value.problems)


@pytest.fixture
def model(tiny: Any, tmp_path: Path) -> Path:
    return tiny.model(tmp_path / "model")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def write_header(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


@pytest.mark.parametrize(("architecture", "changes"), VARIANTS)
def test_expected_tensors_are_those_of_the_library(
    tiny: Any, tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    from acclimate_runners import building, network

    folder = tiny.model(tmp_path / "model", architecture, **changes)
    facts = models.inspect(folder, tiny.limits)
    built = building.build(facts.config, max_length=16)
    assert {
        name: tuple(p.shape) for name, p in building.by_file_name(built, architecture).items()
    } == architectures.shapes(facts.config)
    assert facts.parameters == sum(p.numel() for p in built.parameters())
    assert facts.architecture == architecture
    assert facts.bytes == sum(path.stat().st_size for path in folder.iterdir())
    files = {path.name: path for path in folder.iterdir()}
    loaded = network.load(files, tiny.limits, max_length=16)
    assert sorted(loaded.weights) == sorted(architectures.shapes(facts.config))


@pytest.mark.parametrize("max_length", [16, 200])
@pytest.mark.parametrize(("architecture", "changes"), VARIANTS)
def test_logits_are_those_of_the_librarys_own_forward(
    tiny: Any, tmp_path: Path, architecture: str, changes: dict[str, Any], max_length: int
) -> None:
    """The whole way of the library, from the folder to the logits, knows nothing of what is chosen here; 200 tokens take another attention."""
    import torch
    from transformers import AutoModelForCausalLM

    from acclimate_runners import network

    named = architectures.ARCHITECTURES[architecture].positions
    folder = tiny.model(
        tmp_path / "model", architecture, **{**changes, **({named[0]: max_length} if named is not None else {})}
    )
    theirs, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = network.load({path.name: path for path in folder.iterdir()}, tiny.limits, max_length=max_length)
    inputs = torch.arange(3 * 15).reshape(3, 15) * 7 % len(tiny.words)
    with torch.no_grad():
        expected = theirs.eval()(inputs).logits
        found = loaded.logits(inputs, torch.arange(inputs.numel()))
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected.flatten(0, 1), atol=1e-5, rtol=1e-5)


def test_a_phi_that_rotates_an_odd_part_of_a_head_is_refused(tiny: Any, tmp_path: Path) -> None:
    folder = tiny.model(tmp_path / "model", "phi")
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    for changes in ({"partial_rotary_factor": 0.8}, {"rope_parameters": {**rope, "partial_rotary_factor": 0.8}}):
        edit(folder, **changes)
        assert "is odd" in refused(folder, tiny)
    edit(folder, rope_parameters=rope, partial_rotary_factor=0.5)
    assert models.inspect(folder, tiny.limits).architecture == "phi"
    config = json.loads((folder / "config.json").read_text())
    del config["partial_rotary_factor"]
    assert architectures.problems({**config, "num_attention_heads": 8}, ("phi",)) != []


@pytest.mark.parametrize(
    ("architecture", "changes", "part"),
    [
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers is 2"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 2}, "a list of full_attention and sliding_attention"),
        ("gemma2", {"use_bidirectional_attention": True}, "one of None, False"),
        ("gemma2", {"hidden_act": "relu"}, "one of gelu_pytorch_tanh"),
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, "one of None"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "for full_attention and sliding_attention"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "with rope_type one of"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
            "rope_parameters has a partial_rotary_factor, which gemma3_text can't have",
        ),
        ("gemma3_text", {"rope_parameters": {"full_attention": None}}, "expected without null"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}},
            "rope_scaling has a partial_rotary_factor, which llama can't have",
        ),
        ("falcon", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads is 2, without multi_query there are 4"),
        ("falcon", {"num_key_value_heads": 4}, "num_key_value_heads is 4, the other fields make it 1"),
        (
            "falcon",
            {"multi_query": False, "num_key_value_heads": 1},
            "num_key_value_heads is 1, the other fields make it 4",
        ),
        ("falcon", {"alibi": True}, "alibi is True, expected one of False"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "no model is of both"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "no model is of both"),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 3}, "is not a multiple of num_kv_heads 3"),
        ("phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "without stretched or partial positions"),
        ("phi3", {"rope_scaling": {"rope_type": "longrope"}}, "with rope_type one of"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "without stretched or partial positions"),
        ("phi3", {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is not an allowed field of phi3"),
        ("mamba", {"time_step_rank": "wide"}, 'expected "auto", or a whole number'),
        ("mamba", {"intermediate_size": 40}, "intermediate_size is 40, the other fields make it 32"),
        ("mamba", {"n_layer": 3}, "n_layer is 3, the other fields make it 2"),
        ("mamba", {"ssm_cfg": {"dt_rank": 1}}, "ssm_cfg is {'dt_rank': 1}, expected one of {}"),
        ("mamba", {"num_attention_heads": 4}, "'num_attention_heads' is not an allowed field of mamba"),
        ("mamba", {"mixer_rms_eps": 0.01}, "'mixer_rms_eps' is not an allowed field of mamba"),
        ("mamba", {"state_size": 5}, "has shape [32, 4], config.json asks for [32, 5]"),
    ],
)
def test_configs_of_other_architectures_that_are_refused(
    tiny: Any, tmp_path: Path, architecture: str, changes: dict[str, Any], part: str
) -> None:
    folder = tiny.model(tmp_path / "model", architecture)
    edit(folder, **changes)
    assert part in refused(folder, tiny)


@pytest.mark.parametrize("architecture", sorted(architectures.ARCHITECTURES))
def test_what_a_config_leaves_out_is_the_librarys_default(tiny: Any, architecture: str) -> None:
    """The tensors that are expected without a field are those of the model that is built without it; or it is asked for."""
    from acclimate_runners import building

    kind, built = architectures.ARCHITECTURES[architecture], 0
    whole = {**tiny.every_config[architecture], **({"id2label": {"0": "a", "1": "b"}} if kind.encodes else {})}
    for field in kind.fields:
        config = {name: value for name, value in whole.items() if name != field}
        if field in whole and not architectures.problems(config, (architecture,)):
            model = building.build(config, max_length=16)
            found = {name: tuple(p.shape) for name, p in building.by_file_name(model, architecture).items()}
            assert found == architectures.shapes(config), field
            built += 1
    assert built or set(kind.fields) & set(whole) <= set(kind.required)


def test_what_the_library_writes_into_a_config_stays_there(tiny: Any) -> None:
    from acclimate_runners import building

    config = {**tiny.every_config["phi"], "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    kept = json.loads(json.dumps(config))
    building.build(config, max_length=16)
    assert config == kept


@pytest.mark.parametrize("architecture", ["gemma", "gemma2", "gemma3_text", "olmo2", "phi", "phi3"])
def test_a_padding_tokens_embedding_is_learned_as_any_other(tiny: Any, tmp_path: Path, architecture: str) -> None:
    from acclimate_runners import network

    folder = tiny.model(tmp_path / "model", architecture, pad_token_id=3)
    model = network.load({path.name: path for path in folder.iterdir()}, tiny.limits, max_length=16).model
    assert model.get_input_embeddings().padding_idx is None


@pytest.mark.parametrize("architecture", sorted(architectures.ARCHITECTURES))
def test_what_the_rules_accept_transformers_classes_take(tiny: Any, architecture: str) -> None:
    """Whole numbers for real ones, null, switches: whatever a field's own rule lets through."""
    from acclimate_runners import building

    kind, made = architectures.ARCHITECTURES[architecture], 0
    config_class, _ = building.classes(architecture)
    labels = {"id2label": {"0": "a", "1": "b"}} if kind.encodes else {}
    for field in kind.fields:
        for value in (0, 1, 2, 10000, 0.5, 1.0, None, True, False):
            config = {**tiny.every_config[architecture], **labels, field: value}
            if not architectures.problems(config, (architecture,)):
                config_class(**architectures.effective(config))
                made += 1
    assert made > len(kind.required)


@pytest.mark.parametrize("architecture", sorted(n for n, k in architectures.ARCHITECTURES.items() if not k.encodes))
def test_what_the_library_saves_is_accepted(tiny: Any, tmp_path: Path, architecture: str) -> None:
    from acclimate_runners import building

    first = tiny.model(tmp_path / "first", architecture)
    facts = models.inspect(first, tiny.limits)
    saved = tmp_path / "saved"
    building.build(facts.config, max_length=16).save_pretrained(saved)
    (saved / "generation_config.json").unlink(missing_ok=True)
    (saved / "tokenizer.json").write_bytes(tiny.tokenizer.read_bytes())
    assert models.inspect(saved, tiny.limits).parameters == facts.parameters


def test_inspecting_needs_no_torch() -> None:
    code = (
        "import sys; from acclimate_runners import models; models.inspect; "
        "sys.exit(bool({'torch', 'transformers', 'tokenizers', 'jinja2'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_pickles_are_refused_unread(model: Path, tiny: Any) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return exec, ("raise SystemExit('unpickled')",)

    (model / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    assert "pickle" in refused(model, tiny)
    with zipfile.ZipFile(model / "model.safetensors", "w") as archive:
        archive.writestr("data.pkl", pickle.dumps(Bomb()))
    assert "pickle" in refused(model, tiny)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    said = refused(model, tiny)
    assert "pytorch_model.bin: not one of" in said and "model.safetensors: missing" in said


@pytest.mark.parametrize("length", [0x1080, int.from_bytes(b"PK\x00", "little")])
def test_a_header_whose_length_looks_like_a_pickle_is_read(model: Path, tiny: Any, length: int) -> None:
    """Of 32 models one has such a header, as lengths are multiples of 8."""
    path = model / "model.safetensors"
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(struct.pack("<Q", length) + data[8:begin].ljust(length) + data[begin:])
    assert models.inspect(model, tiny.limits).architecture == "llama"


def test_all_problems_are_told_at_once(model: Path, tiny: Any) -> None:
    (model / "model.safetensors").write_bytes(b"")
    (model / "tokenizer.json").unlink()
    edit(model, auto_map={"AutoModel": "evil.Model"}, hidden_size=True, surprise=1, hidden_act="exec")
    said = refused(model, tiny)
    for part in (
        "model.safetensors: 0 bytes",
        "tokenizer.json: missing",
        "auto_map: remote code is never run",
        "hidden_size is True, expected a whole number",
        "'surprise' is not an allowed field of llama",
        "hidden_act is 'exec', expected one of",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model_type": "t5"}, "model_type is 't5', allowed are llama, gpt2, gpt_neox"),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
        ({"architectures": ["Evil"]}, "architectures is ['Evil']"),
        ({"trust_remote_code": True}, "remote code is never run"),
        ({"num_hidden_layers": 10**9}, "a whole number from 1 to 1024"),
        ({"num_hidden_layers": 900}, "parameters, at most 100000 are allowed"),
        ({"intermediate_size": 23}, "has shape [24, 16], config.json asks for [23, 16]"),
        ({"num_hidden_layers": 1}, "is not part of the model that config.json describes"),
        ({"num_hidden_layers": 3}, "tensor 'model.layers.2.self_attn.q_proj.weight' is missing"),
        ({"num_attention_heads": 3}, "hidden_size 16 is not a multiple of num_attention_heads 3"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"num_attention_heads": 16, "num_key_value_heads": 16}, "the width of a head is odd"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "with rope_type one of"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "with factor, high_freq_factor"),
        ({"vocab_size": 5}, "token 13 is outside the model's vocabulary of 5"),
        ({"rms_norm_eps": "x" * 500}, "…, expected a number from"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected one of True, False"),
    ],
)
def test_configs_that_are_refused(model: Path, tiny: Any, changes: dict[str, Any], part: str) -> None:
    edit(model, **changes)
    assert part in refused(model, tiny)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b"{", "not acceptable JSON"),
        (b"[]", "not a JSON object"),
        (b'{"model_type": "llama", "model_type": "gpt2"}', "a key stands twice"),
        (b'{"rms_norm_eps": NaN}', "JSON has no NaN"),
        (b"[" * 5000, "nested too deep"),
        (b"[" * 40 + b"]" * 40, "nested deeper than 24 levels"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (rb'{"a": "\ud800"}', r"holds \ud800, half of a surrogate pair"),
        (rb'{"a": ["\uDE00\uD83D"]}', r"holds \ude00, half of a surrogate pair"),
        (rb'{"a": {"\udfff": 1}}', r"holds \udfff, half of a surrogate pair"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not acceptable JSON"),
        (b" " * (4 << 20) + b"{}", "at most 4194304 are read"),
    ],
)
def test_config_files_that_are_refused(model: Path, tiny: Any, text: bytes, part: str) -> None:
    (model / "config.json").write_bytes(text)
    assert part in refused(model, tiny, max_bytes=8 << 20)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "part"),
    [
        ({"a": F32}, b"1234567", "the tensors end at 8, the data at 7"),
        ({"a": F32}, b"123456789", "the tensors end at 8, the data at 9"),
        ({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12), "a gap or overlap"),
        ({"a": F32, "b": {**F32, "data_offsets": [9, 17]}}, bytes(17), "a gap or overlap"),
        ({"a": {**F32, "shape": [3]}}, bytes(8), "'a' of shape [3] and F32 has 8 bytes"),
        (
            {"a": {**F32, "dtype": "F64", "data_offsets": [0, 16]}},
            bytes(16),
            "has dtype 'F64', allowed are F32, F16, BF16",
        ),
        ({"a": {**F32, "shape": [-2]}}, bytes(8), "has no proper shape"),
        ({"a": {**F32, "data_offsets": [8, 0]}}, bytes(8), "has -8 bytes"),
        ({"a": {**F32, "more": 1}}, bytes(8), "has not exactly dtype, shape and data_offsets"),
        ({"a": {**F32, "data_offsets": [10**4000, 10**4000 + 8]}}, bytes(8), "has no proper data_offsets"),
        ({"__metadata__": {"a": 1}, "a": F32}, bytes(8), "__metadata__"),
        ({"__metadata__": {"a": "\ud800"}, "a": F32}, bytes(8), r"holds \ud800, half of a surrogate pair"),
        ({"__metadata__": {"\udc00": ""}, "a": F32}, bytes(8), r"holds \udc00, half of a surrogate pair"),
        ({"\ud800": F32}, bytes(8), r"holds \ud800, half of a surrogate pair"),
        (b'{"a": 1, "a": 2}', b"", "a key stands twice"),
        (b"  {}", b"", "does not begin with {"),
    ],
)
def test_headers_that_are_refused(model: Path, tiny: Any, header: Any, data: bytes, part: str) -> None:
    write_header(model / "model.safetensors", header, data)
    assert part in refused(model, tiny)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors.index.json", "adapter_config.json"])
def test_half_characters_are_refused_in_every_file_of_json(tmp_path: Path, name: str) -> None:
    problems: list[str] = []
    (tmp_path / name).write_bytes(rb'{"a": {"b": ["\ud800"]}}')
    assert reading.read_object(name, tmp_path / name, 1 << 16, problems) is None
    assert problems == [
        rf"{name}: not acceptable JSON: a text or key holds \ud800, half of a surrogate pair: no character"
    ]


def test_whole_pairs_and_escaped_backslashes_are_read() -> None:
    assert reading.read_json(rb'["\ud83d\ude00", "\\ud800"]') == ["\U0001f600", r"\ud800"]


@pytest.mark.parametrize(
    "header",
    [
        {"n" * 100_000: {**F32, "data_offsets": [4, 12]}},
        {"n" * 100_000: F32, "b": {**F32, "data_offsets": [4, 12]}},
        {"n" * 100_000: 1},
        {"n" * 100_000: {**F32, "dtype": "d" * 100_000}},
        {"n" * 100_000: F32},
    ],
)
def test_what_a_stranger_wrote_is_shown_in_part(model: Path, tiny: Any, header: Any) -> None:
    write_header(model / "model.safetensors", header, bytes(8))
    with pytest.raises(Refusal) as caught:
        models.inspect(model, tiny.limits)
    assert len(json.dumps(caught.value.document())) < 20_000 and max(map(len, caught.value.problems)) < 400


def test_what_would_take_far_more_memory_than_its_file_is_not_read(model: Path, tiny: Any) -> None:
    import tracemalloc

    bomb = b'{"a":[' + b"{}," * 4_000_000 + b"{}]}"
    few = b'{"added_tokens":[],"model":{"type":"WordLevel","vocab":{' + b",".join(
        b'"%x":%d' % (n, n % 9) for n in range(500_000)
    )
    (model / "tokenizer.json").write_bytes(bomb)
    (model / "model.safetensors").write_bytes((4_000_000).to_bytes(8, "little") + bomb[:4_000_000])
    tracemalloc.start()
    try:
        found = refused(model, tiny, max_bytes=1 << 30)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(bomb)
    finally:
        tracemalloc.stop()
    assert "tokenizer.json: not acceptable JSON: it may hold" in found
    assert "model.safetensors: it may hold" in found
    # As many tokens as any tokenizer has are read.
    (model / "tokenizer.json").write_bytes(few + b"}}}")
    assert "tokenizer.json" not in refused(model, tiny, max_bytes=1 << 30)


def test_the_largest_public_tokenizers_are_read_as_the_library_saves_them(model: Path, tiny: Any) -> None:
    """Gemma 2's: 256,000 tokens and 580,604 merges, each of four lines since tokenizers 0.20."""
    tokens, merges = 256_000, 580_604
    words = [f"\u2581{number:x}" for number in range(tokens)]
    vocabulary = ",\n".join(f'      "{word}": {number}' for number, word in enumerate(words))
    pairs = ",\n".join(
        f'      [\n        "\u2581{number % 4096:x}",\n        "{number // 4096:x}"\n      ]'
        for number in range(merges)
    )
    text = '{\n  "added_tokens": [],\n  "model": {\n    "type": "BPE",\n    "vocab": {\n%s\n    },\n    "merges": [\n%s\n    ]\n  }\n}'
    (model / "tokenizer.json").write_text(text % (vocabulary, pairs), "utf-8")
    assert (model / "tokenizer.json").stat().st_size > 32 << 20
    found = refused(model, tiny, max_bytes=1 << 30).splitlines()
    assert found == [f"tokenizer.json: token {tokens - 1} is outside the model's vocabulary of {len(tiny.words)}"]


def test_headers_longer_than_their_file_are_refused(model: Path, tiny: Any) -> None:
    write_header(model / "model.safetensors", b"{}", length=2**63)
    assert f"a header of {2**63} bytes in a file of 10" in refused(model, tiny)
    (model / "model.safetensors").write_bytes(b"\x02")
    assert "not safetensors" in refused(model, tiny)


def test_sizes_and_tokenizers_are_held_to_the_rules(model: Path, tiny: Any) -> None:
    total = sum(path.stat().st_size for path in model.iterdir())
    assert models.inspect(model, replace(tiny.limits, max_bytes=total)).bytes == total
    assert f"the files have {total} bytes, at most {total - 1}" in refused(model, tiny, max_bytes=total - 1)
    with pytest.raises(Refusal, match="differs from the competition's"):
        models.inspect(model, tiny.limits, tokenizer="sha256:" + "0" * 64)
    (model / "tokenizer.json").write_text('{"model": {"type": "Unknown"}}')
    assert "model.type is not one of" in refused(model, tiny)
    (model / "tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {"a": -1}}}')
    assert "missing, negative, not whole" in refused(model, tiny)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(name=st.sampled_from(reading.NAMES), where=st.integers(0, 2000), byte=st.integers(0, 255), cut=st.booleans())
def test_damage_is_refused_or_harmless(model: Path, tiny: Any, name: str, where: int, byte: int, cut: bool) -> None:
    path = model / name
    whole = path.read_bytes()
    try:
        at = where % len(whole)
        path.write_bytes(whole[:at] if cut else whole[:at] + bytes([byte]) + whole[at + 1 :])
        try:
            models.inspect(model, tiny.limits)
        except Refusal as refusal:
            assert refusal.code == "model_invalid"
    finally:
        path.write_bytes(whole)


def test_weights_must_be_finite_and_ties_kept(model: Path, tiny: Any) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from acclimate_runners import network

    path = model / "model.safetensors"
    files = {file.name: file for file in model.iterdir()}
    weights = load_file(path)
    tied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(tied, path)
    network.load(files, tiny.limits, max_length=16)
    save_file({**tied, "lm_head.weight": tied["lm_head.weight"] + 1}, path)
    with pytest.raises(Refusal, match="is tied to .* but differs"):
        network.load(files, tiny.limits, max_length=16)
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, path)
    with pytest.raises(Refusal, match=r"'model.norm.weight' holds NaN or infinity"):
        network.load(files, tiny.limits, max_length=16)


def test_half_precision_is_read_as_float32(model: Path, tiny: Any) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from acclimate_runners import network

    path = model / "model.safetensors"
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(weights, path)
    loaded = network.load({file.name: file for file in model.iterdir()}, tiny.limits, max_length=16)
    assert all(tensor.dtype == torch.float32 for tensor in loaded.weights.values())
    assert torch.equal(loaded.weights["model.norm.weight"], weights["model.norm.weight"].float())
