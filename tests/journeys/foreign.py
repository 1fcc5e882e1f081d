"""Folders as lm-evaluation-harness 0.4.13 leaves them with --output_path and --log_samples: names, keys and nesting are its own."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOMENT = "2026-11-30T10-11-12.131415"


def lm_eval(
    folder: Path, model: str, answers: Mapping[str, Sequence[int]], *, samples: bool = True, moment: str = MOMENT
) -> Path:
    """Write one model's results.

    Args:
        folder: of --output_path.
        model: its name.
        answers: of each task, whether each document was answered rightly.
        samples: as with --log_samples.
        moment: when.

    Returns:
        The folder of the model's files.
    """
    own = folder / model.replace("/", "__")
    own.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"all_tasks": {"alias": "all_tasks", "acc,none": 0.5}}
    for task, right in answers.items():
        mean = sum(right) / len(right)
        results[task] = {"name": task, "alias": task, "sample_len": len(right), "acc,none": mean}
        results[task] |= {"acc_stderr,none": 0.1, "acc_norm,none": 1 - mean, "acc_norm_stderr,none": "N/A"}
    document = {
        "results": results,
        "groups": {"all_tasks": {"alias": "all_tasks", "acc,none": 0.5}},
        "group_subtasks": {"all_tasks": list(answers)},
        "configs": {task: {"task": task, "output_type": "multiple_choice"} for task in answers},
        "versions": dict.fromkeys(answers, 1.0),
        "n-shot": dict.fromkeys(answers, 0),
        "higher_is_better": {task: {"acc": True, "acc_norm": True} for task in answers},
        "n-samples": {task: {"original": len(right), "effective": len(right)} for task, right in answers.items()},
        "config": {"model": "hf", "model_args": f"pretrained={model}", "limit": None},
        "lm_eval_version": "0.4.13",
        "model_source": "hf",
        "model_name": model,
        "model_name_sanitized": own.name,
        "task_hashes": {},
        "total_evaluation_time_seconds": "1.0",
    }
    (own / f"results_{moment}.json").write_text(json.dumps(document, indent=2))
    if samples:
        for task, right in answers.items():
            lines = []
            for number, one in enumerate(right):
                line = {"doc_id": number, "doc": {"question": f"{task} {number}"}, "target": "0"}
                line |= {"arguments": {"gen_args_0": {"arg_0": "Q", "arg_1": "A"}}, "resps": [[["-1.0", "False"]]]}
                line |= {"filtered_resps": [["-1.0", "False"]], "filter": "none", "metrics": ["acc", "acc_norm"]}
                line |= {"doc_hash": f"{task}-{number}", "prompt_hash": "p", "target_hash": "t"}
                lines.append(json.dumps(line | {"acc": float(one), "acc_norm": float(1 - one)}))
            (own / f"samples_{task}_{moment}.jsonl").write_text("\n".join(lines) + "\n")
    return own
