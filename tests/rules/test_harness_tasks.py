"""Tasks of lm-evaluation-harness as tasks of ours: what is carried, what is lost, and that nothing of a file is run or left out in silence."""

import importlib.util
import json
import os
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from acclimate import harness_files, harness_tasks
from acclimate.cli.main import app
from acclimate_competitions import definition
from acclimate_competitions.errors import Refusal

CHOICE = """
task: Sky_Colours
dataset_path: acme/sky
dataset_name: null
test_split: test
output_type: multiple_choice
description: "Say the colour.\\n\\n"
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: label
doc_to_choice: ["blue", "grey"]
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
metadata:
  version: 1.0
"""
GENERATE = """
include: _base_yaml
task: sums
doc_to_text: question
generation_kwargs:
  until: ["Question:", "\\n\\n"]
  max_gen_toks: 40
  do_sample: false
  temperature: 0.0
num_fewshot: 0
"""
BASE = """
output_type: generate_until
doc_to_target: "{{answer}}"
doc_to_text: "none of this"
filter_list:
  - name: strict
    filter:
      - function: regex
        regex_pattern: "#### (\\\\-?[0-9.,]+)"
      - function: take_first
  - name: flexible
    filter:
      - function: regex
        group_select: -1
        regex_pattern: "(-?[$0-9.,]{2,})|(-?[0-9]+)"
      - function: take_first
metric_list:
  - metric: exact_match
    ignore_case: true
"""
ROLLING = """
task: prose
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""


def imported(folder: Path, text: str, **beside: str):
    for name, content in beside.items():
        (folder / name).write_text(content, "utf-8")
    (folder / "task.yaml").write_text(text, "utf-8")
    return harness_tasks.imported(folder / "task.yaml")


def test_fixed_choices_are_carried_with_the_harness_s_own_prompt(tmp_path):
    found = imported(tmp_path, CHOICE)
    assert found["whole"] and found["lost"] == {}
    (task,) = definition.parse(found["definition"].encode()).tasks
    assert task.prompt == "Say the colour.\n\nQuestion: {{question}}\nAnswer: "
    assert (task.name, task.choices, task.metric, task.tokenize) == (
        "sky-colours",
        ("blue", "grey"),
        "accuracy",
        "together",
    )
    assert found["data"] == {
        "dataset_path": "acme/sky",
        "test_split": "test",
        "target": {"from": "label", "how": "the choice itself, or its number counted from 0"},
    }
    assert "metric_list.acc_norm" in found["needless"]
    case = imported(tmp_path, CHOICE.replace("higher_is_better: true", "ignore_case: true"))
    assert case["whole"] and "metric_list.acc.ignore_case" in case["needless"]


def test_a_text_s_stops_and_extraction_are_carried_and_includes_come_first(tmp_path):
    found = imported(tmp_path, GENERATE, _base_yaml=BASE)
    assert found["whole"], found["lost"]
    (task,) = definition.parse(found["definition"].encode()).tasks
    assert (task.prompt, task.stop, task.max_tokens) == ("{{ question }}", ("Question:", "\n\n"), 40)
    assert (task.extract, task.take, task.normalize) == (r"#### (\-?[0-9.,]+)", "first", ("strip", "lower"))
    other = imported(
        tmp_path,
        GENERATE,
        _base_yaml=BASE.replace('function: regex\n        regex_pattern: "####', 'function: odd\n        x: "####'),
    )
    assert list(other["lost"]) == ["filter_list.strict"]
    assert (other["task"]["extract"], other["task"]["take"]) == ("((?:-?[$0-9.,]{2,})|(?:-?[0-9]+))", "last")


def test_whole_texts_are_carried(tmp_path):
    found = imported(tmp_path, ROLLING)
    assert found["whole"] and found["task"]["kind"] == "perplexity" and found["data"]["input"] == {"from": "{{page}}"}
    assert definition.parse(found["definition"].encode()).tasks[0].metric == "bits_per_byte"


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        ('doc_to_choice: ["blue", "grey"]', 'doc_to_choice: "{{choices.text}}"', "doc_to_choice"),
        ("doc_to_target: label", "doc_to_target: !function utils.target", "doc_to_target"),
        ("dataset_name: null", "process_docs: !function utils.docs", "process_docs"),
        ("dataset_name: null", "num_fewshot: 5", "num_fewshot"),
        ("dataset_name: null", "surprise: 5", "surprise"),
        ("  - metric: acc_norm", "  - metric: f1", "metric_list.'f1'"),
        ("{{question}}", "{{question|odd}}", "doc_to_text"),
        ("{{question}}", "{{question.text}}", "doc_to_text"),
        ("{{question}}", "{% for x in question %}{{x}}{% endfor %}", "doc_to_text"),
        ("output_type: multiple_choice", "output_type: loglikelihood", "output_type"),
        ("task: Sky_Colours", "task: [a, b]", "task"),
    ],
)
def test_what_can_not_be_carried_is_named(tmp_path, old, new, lost):
    assert old in CHOICE
    found = imported(tmp_path, CHOICE.replace(old, new))
    assert lost in found["lost"] and not found["whole"]


def test_nothing_is_run_and_no_file_is_trusted(tmp_path):
    mark = tmp_path / "ran"
    for text, says in (
        (f"task: !!python/object/apply:os.system ['touch {mark}']", "no YAML"),
        (
            "a: &a [x,x,x,x,x,x,x,x,x]\n"
            + "".join(f"{c}: &{c} [{','.join(['*' + b] * 9)}]\n" for b, c in zip("abcdefg", "bcdefgh", strict=True)),
            "more than 100000",
        ),
        ("- a list", "no mapping"),
        ("include: task.yaml", "in a circle"),
        ("include: /etc/passwd", "only files relative to it"),
        ("include: missing.yaml", "missing.yaml"),
        ("task: [", "no YAML"),
        ("task: " + "[" * 5000 + "]" * 5000, "no YAML"),
    ):
        with pytest.raises(Refusal, match=says) as caught:
            imported(tmp_path, text)
        assert caught.value.code == "file_unreadable"
    found = imported(
        tmp_path,
        CHOICE.replace(
            "{{question}}",
            "{{ cycler.__init__.__globals__.os.popen('touch ran') }}{% for _ in range(10**12) %}x{% endfor %}",
        ),
    )
    assert not mark.exists() and "task" in found


def test_the_command_writes_a_folder_and_tells_what_is_lost(tmp_path):
    (tmp_path / "task.yaml").write_text(CHOICE, "utf-8")
    run = CliRunner().invoke
    done = run(
        app, ["competition", "import-lm-eval", str(tmp_path / "task.yaml"), "-o", str(tmp_path / "new"), "--json"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["task"]["name"] == "sky-colours"
    assert definition.load(tmp_path / "new").slug == "sky-colours"
    assert json.loads((tmp_path / "new" / "imported.json").read_text("utf-8"))["whole"] is True
    again = run(app, ["competition", "import-lm-eval", str(tmp_path / "task.yaml"), "-o", str(tmp_path / "new")])
    # The same way on, whatever is asked next.
    wanted = "write splits/sky-colours/preparation.parquet, validation.parquet and holdout.parquet with the columns example, input, target"
    for line in (["check", str(tmp_path / "new")], ["build", str(tmp_path / "new"), "--out", str(tmp_path / "built")]):
        assert wanted in (run(app, ["competition", *line]).exception.hint or "")
    assert (
        wanted
        in run(app, ["competition", "import-lm-eval", str(tmp_path / "task.yaml"), "-o", str(tmp_path / "more")]).stderr
    )
    assert isinstance(again.exception, Refusal) and again.exception.code == "conflict"
    (tmp_path / "task.yaml").write_text(CHOICE.replace("dataset_name: null", "repeats: 3"), "utf-8")
    done = run(app, ["competition", "import-lm-eval", str(tmp_path / "task.yaml")])
    # What is printed can be sent into a file; the report stands beside.
    assert done.exit_code == 1 and len(tomllib.loads(done.stdout)["tasks"]) == 1
    assert "lost: 1" in done.stderr


def _installed() -> Path | None:
    """The harness's own task files, where it is installed, or where LM_EVAL_PACKAGE names the package's folder."""
    if named := os.environ.get("LM_EVAL_PACKAGE"):
        return Path(named) / "tasks"
    found = importlib.util.find_spec("lm_eval")
    return Path(found.submodule_search_locations[0]) / "tasks" if found and found.submodule_search_locations else None


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_task_file_of_the_harness_is_carried_or_told_of():
    tasks = _installed()
    if tasks is None:
        pytest.skip("lm_eval is not installed")
    counts = dict.fromkeys(("files", "whole", "tasks"), 0)
    for path in sorted(tasks.rglob("*.yaml")):
        found = harness_tasks.imported(path)
        config = harness_files.load(path)
        told = {key.partition(".")[0] for part in ("carried", "needless", "lost") for key in found[part]}
        assert set(config) <= told, (path, set(config) - told)
        assert found["whole"] is (not found["lost"]) and (found["task"] is not None or found["lost"])
        counts["files"] += 1
        counts["whole"] += found["whole"]
        counts["tasks"] += found["task"] is not None
    print(counts)  # noqa: T201
    assert counts["whole"] > 100 and counts["tasks"] > counts["files"] // 3
