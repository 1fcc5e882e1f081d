"""What a child does not import changes no number, and nothing of it is there."""

import json
import subprocess
import sys
from typing import Any

from acclimate_runners import importing

PROGRAM = """
import gc, json, sys
from hashlib import sha256
from acclimate_runners import importing
if sys.argv[1] == "lean":
    importing.lean()
    importing.transformers()
import torch
from acclimate_runners import architectures, building
torch.manual_seed(0)
found = {}
for name, config in json.load(sys.stdin).items():
    model = building.build(config, max_length=8)
    kind = architectures.ARCHITECTURES[name]
    asked = {"pixel_values": torch.rand(1, 3, 8, 8)} if kind.sees else {"input_ids": torch.tensor([[3, 4, 5, 6]])}
    if kind.encodes and not kind.sees:
        asked["position_ids"] = torch.arange(kind.first, kind.first + 4)[None]
    hidden = model.base_model(**asked)[0]
    hidden.square().sum().backward()
    made = [hidden, *model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    said = b"".join(each.detach().numpy().tobytes() for each in made)
    found[name] = [type(model).__name__, len(made), sha256(said).hexdigest()]
hidden = ("PIL", "accelerate", "boto3", "datasets", "kernels", "pandas", "peft", "scipy", "sklearn", "tabulate", "torchvision")
print(json.dumps([found, [name for name in hidden if sys.modules.get(name)], gc.isenabled()]))
"""


def test_models_of_every_architecture_are_the_same_without_what_is_left_out(tiny: Any) -> None:
    named = {"id2label": {"0": "more", "1": "less"}}
    configs = {
        name: {**named, **config} if "architectures" in config else config for name, config in tiny.every_config.items()
    }
    said = {}
    for way in ("lean", "plain"):
        command = [sys.executable, "-P", "-c", PROGRAM, way]
        done = subprocess.run(command, input=json.dumps(configs), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said[way] = json.loads(done.stdout)
    (lean, left, collects), (plain, usual, _) = said["lean"], said["plain"]
    assert lean == plain and len(lean) == len(configs)
    # Where a machine has them, they are what is left out.
    assert not left and "scipy" in usual
    # By it transformers 5.12 fetched code for Mamba, which a child can't and nobody should; it is left out wherever a model is built.
    assert "kernels" not in usual
    assert collects


def test_the_rest_of_transformers_is_still_found() -> None:
    code = (
        "from acclimate_runners import importing; importing.lean(); importing.transformers()\n"
        "import pyarrow as pa, transformers; from transformers import models\n"
        "assert pa.table({'a': ['x']}).to_pylist() == [{'a': 'x'}]\n"
        "assert transformers.AutoConfig.for_model('olmoe').model_type == 'olmoe'\n"
        "print(transformers.Qwen3ForCausalLM.__module__, models.__name__)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["transformers.models.qwen3.modeling_qwen3", "transformers.models"], done.stderr


def test_the_collector_is_as_it_was_afterwards() -> None:
    import gc

    for before in (True, False):
        (gc.enable if before else gc.disable)()
        try:
            with importing.quickly():
                assert not gc.isenabled()
            assert gc.isenabled() == before
        finally:
            gc.enable()
