"""The measuring part of gpu-smoke.sh: one preparation twice, in a process each, on a GPU a small training twice, and one in shards twice; as JSON.

The preparation is the real one, of a model with drawn weights on the shipped competition. Where it ran is measured, not assumed: by
what it allocated on the GPU. With a GPU the job is for it, as a round's whose definition says `hardware = "cuda"`. With two GPUs, or none, the same
preparation is also made with its weights in shards over two processes, as a round's whose definition says `weights = "shards"`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TASK, SEED, WIDTH, LAYERS = "parity", 11, 64, 2


def make_job(folder: Path, *, device: str) -> Any:
    """A preparation of one task with one seed, its inputs where a child looks for them."""
    import numpy as np
    from safetensors.numpy import save_file

    from acclimate_competitions import definition, digests
    from acclimate_runners import architectures, jobs, preparation

    built = folder / "competition"
    command = [sys.executable, "-m", "acclimate", "competition", "build", "digits", "--out", str(built)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    competition = definition.load(built)
    vocabulary = json.loads((built / "tokenizer.json").read_text("utf-8"))
    words = [*vocabulary["model"]["vocab"].values(), *(word["id"] for word in vocabulary["added_tokens"])]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": max(words) + 1,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    draw = np.random.default_rng(SEED)
    weights = {n: draw.normal(0, 0.02, shape).astype(np.float32) for n, shape in architectures.shapes(config).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    def put(path: Path) -> str:
        digest = digests.of_file(path)
        target = preparation.input_path(folder, digest)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
        return digest

    task = next((task for task in competition.tasks if task.name == TASK), competition.tasks[0])
    files = {name: put(folder / name) for name in ("config.json", "model.safetensors")}
    files["tokenizer.json"] = put(built / "tokenizer.json")
    splits = {name: put(built / "splits" / task.name / f"{name}.parquet") for name in ("preparation", "validation")}
    return jobs.PrepareJob(
        kind="prepare",
        model=jobs.ModelFiles(files),
        tasks=(jobs.TaskData(task, **splits),),
        recipe=competition.preparation,
        limits=jobs.Limits(("llama",), 10**8, 10**9, memory=8 << 30, wall_seconds=3600.0),
        tokenizer=files["tokenizer.json"],
        stages=((task.name, SEED),),
        device=device,
    )


def prepare(folder: Path) -> dict[str, Any]:
    """Carry the job of a folder out in this process; what came out, how long it took and where it ran."""
    import torch

    from acclimate_runners import jobs, preparation

    job = jobs.from_json((folder / "job.json").read_text("utf-8"))
    (folder / "out").mkdir(exist_ok=True)
    began = time.perf_counter()
    outcome = preparation.prepare(job, folder, lambda *words: None)
    seconds = time.perf_counter() - began
    on_gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        "files": dict(outcome.files),
        "results_digest": _digest(outcome.results),
        "losses": outcome.results["prepared"][0]["losses"],
        "hardware_class": outcome.hardware,
        "seconds": round(seconds, 2),
        "gpu_bytes": on_gpu,
    }


def in_shards(folder: Path, job: Any) -> dict[str, Any]:
    """The same preparation twice with weights in shards over two processes: whether the bytes are equal, the losses, and how long it took."""
    import dataclasses
    import os

    from acclimate_runners import jobs

    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    found, seconds = [], []
    for name in ("one", "two"):
        own = folder / name
        own.mkdir()
        (own / "inputs").symlink_to(folder / "inputs")
        shards = dataclasses.replace(job, processes=2, weights="shards")
        (own / "job.json").write_text(jobs.to_json(shards), "utf-8")
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "acclimate_runners", str(own)], check=True, env=environment)
        seconds.append(round(time.perf_counter() - began, 2))
        outcome = jobs.read_outcome(own)
        if outcome is None or outcome.status != "done":
            raise RuntimeError(f"the preparation in shards came to {outcome}")
        found.append(outcome)
    losses = [entry["losses"] for entry in found[0].results["prepared"]]
    return {
        "same_bytes_twice": found[0].files == found[1].files,
        "hardware_class": found[0].hardware,
        "losses": losses[0],
        "seconds": seconds,
    }


def _digest(results: Any) -> str:
    """Of the results without their seconds, which differ from run to run."""
    from acclimate_competitions import digests

    def without(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: without(value) for key, value in part.items() if key != "seconds"}
        return [without(item) for item in part] if isinstance(part, list | tuple) else part

    return digests.of_bytes(json.dumps(without(results), sort_keys=True).encode())


def train() -> dict[str, Any]:
    """Forty steps of a small network on the GPU with deterministic kernels; the digest of its weights, and how long it took."""
    import torch

    from acclimate_competitions import digests

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    device = torch.device("cuda")
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True).to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    inputs = torch.randn(16, 128, 512, device=device)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(40):
        optimizer.zero_grad()
        layer(inputs).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in layer.parameters())
    return {"weights": digests.of_bytes(weights), "seconds": round(seconds, 2)}


def twice(*arguments: str) -> list[dict[str, Any]]:
    """Two fresh processes of this script, one after the other."""
    import os

    found = []
    for _ in range(2):
        # Without this setting cuBLAS is not deterministic, and torch refuses it.
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        command = [sys.executable, __file__, *arguments]
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        found.append(json.loads(ran.stdout))
    return found


def main() -> int:
    """Measure, print, and say with the exit status whether everything came out equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gpu", help="what nvidia-smi says of the GPUs")
    parser.add_argument("--prepare", type=Path)
    parser.add_argument("--train", action="store_true")
    given = parser.parse_args()
    if given.prepare is not None or given.train:
        sys.stdout.write(json.dumps(train() if given.train else prepare(given.prepare)))
        return 0
    import torch

    from acclimate_runners import jobs

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = make_job(folder, device="cuda" if given.gpu else "cpu")
        (folder / "job.json").write_text(jobs.to_json(job), "utf-8")
        runs = twice("--prepare", name)
        shards = None if given.gpu and torch.cuda.device_count() < 2 else in_shards(folder, job)
    trained = twice("--train") if given.gpu else []
    same = all(runs[0][key] == runs[1][key] for key in ("files", "results_digest"))
    where = "cuda" if any(run["gpu_bytes"] for run in runs) else "cpu"
    document = {
        "gpus": given.gpu.strip().splitlines() if given.gpu else [],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "preparation": {
            "ran_on": where,
            "said": f"the preparation ran on {where}",
            "same_bytes_twice": same,
            "hardware_class": runs[0]["hardware_class"],
            "files": runs[0]["files"],
            "seconds": [run["seconds"] for run in runs],
        },
        "in_shards": shards
        and {
            **{name: value for name, value in shards.items() if name != "losses"},
            "largest_difference_of_a_loss": max(
                abs(one - other) for one, other in zip(runs[0]["losses"], shards["losses"], strict=True)
            ),
        },
        "training_on_gpu": {
            "same_bytes_twice": trained[0]["weights"] == trained[1]["weights"],
            "seconds": [run["seconds"] for run in trained],
        }
        if trained
        else None,
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
    equal = same and all(part is None or part["same_bytes_twice"] for part in (document["training_on_gpu"], shards))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
