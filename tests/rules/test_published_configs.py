"""The config.json files that published models have, and what transformers writes when it saves them again, are accepted and read as transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest

from acclimate_runners import architectures

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "vectors" / "published-configs.json").read_text("utf-8")
)["models"]


def problems(config: dict[str, Any]) -> list[str]:
    return architectures.problems(config, (config["model_type"],))


def test_every_language_model_s_architecture_has_one() -> None:
    kinds = {name for name, kind in architectures.ARCHITECTURES.items() if not kind.encodes}
    assert {config["model_type"] for config in PUBLISHED.values()} >= kinds


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_accepted_as_it_was_published_and_as_it_is_saved_again(name: str) -> None:
    from acclimate_runners import building

    config = PUBLISHED[name]
    assert problems(config) == []
    config_class, _ = building.classes(config["model_type"])
    again = json.loads(config_class.from_dict(dict(config)).to_json_string())
    assert problems(again) == []


@pytest.mark.parametrize("kind", [name for name, kind in architectures.ARCHITECTURES.items() if kind.classifier])
def test_what_the_program_that_trained_a_classifier_left_in_it_is_accepted(tiny: Any, kind: str) -> None:
    labels = {"id2label": {"0": "more", "1": "less"}}
    config = {**tiny.every_config[kind], "architectures": [architectures.ARCHITECTURES[kind].classifier], **labels}
    left: dict[str, Any] = {"finetuning_task": "sst2", "_num_labels": 3}
    left |= {"tie_weights_": True} if kind == "distilbert" else {"layers_to_keep": []} if kind == "albert" else {}
    assert problems({**config, **left}) == problems({**config, "finetuning_task": None}) == []
    # What it was trained for, and how many labels it had, is not what it is prepared for.
    assert not {"finetuning_task", "_num_labels"} & set(architectures.with_labels({**config, **left}, ("a", "b")))
    assert "_num_labels is" in problems({**config, "_num_labels": "two"})[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_read_as_transformers_reads_it(name: str) -> None:
    from acclimate_runners import building

    config = PUBLISHED[name]
    config_class, _ = building.classes(config["model_type"])
    theirs = config_class.from_dict(dict(config)).to_dict()
    ours = config_class(**architectures.effective(config)).to_dict()
    told = {"architectures", "transformers_version", "torch_dtype", "dtype", "use_cache", *architectures._NUMBERED}
    told |= {*config} - {*architectures.ARCHITECTURES[config["model_type"]].fields}
    assert {key: value for key, value in ours.items() if key not in told} == {
        key: value for key, value in theirs.items() if key not in told
    }


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("HuggingFaceTB/SmolLM2-135M", {"rope_interleaved": True}, "rope_interleaved is True, expected one of False"),
        ("HuggingFaceTB/SmolLM2-135M", {"is_llama_config": False}, "is_llama_config is False, expected one of True"),
        ("Qwen/Qwen2.5-0.5B", {"use_mrope": True}, "use_mrope is True, expected one of False"),
        ("google/gemma-2b", {"hidden_activation": "relu"}, "expected one of None, gelu_pytorch_tanh"),
        ("tiiuae/falcon-7b", {"apply_residual_connection_post_layernorm": True}, "expected one of False"),
        ("openai-community/gpt2", {"task_specific_params": [1]}, "expected an object, or null"),
        (
            "deepseek-ai/deepseek-coder-1.3b-base",
            {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 4.0}},
            "with one rope_type, not default and linear",
        ),
        ("deepseek-ai/deepseek-coder-1.3b-base", {"rope_scaling": {"type": "linear"}}, "with factor"),
        ("deepseek-ai/deepseek-coder-1.3b-base", {"rope_scaling": {"type": "dynamic"}}, "with type one of"),
        ("tiiuae/falcon-7b", {"auto_map": {}}, "remote code is never run"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(name: str, changes: dict[str, Any], says: str) -> None:
    assert says in "\n".join(problems({**PUBLISHED[name], **changes}))
