"""The parsers under a coverage-guided fuzzer: nothing but refusals, and what is taken is written again as the same bytes.

300 inputs each in `make test` (100 where each is a model that is built), ten minutes each in `make test-all`; as many at once as there are cores. An input that breaks one is
printed, and is to be added to the seeds of its target.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import building_models
import parsers
import pytest
import submitting

HERE = Path(__file__).parent
NAMES = (
    "notes", "keys", "receipts", "proofs", "json", "records", "rules", "shares", "envelopes", "definitions", "archives", "bundles",
    "requests", "answers", "corrections", "models", "adapters", "prompts", "configs",
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this Python or machine"
)


def fuzz(name: str, how: str, folder: Path) -> str:
    """What broke the target, or nothing."""
    # A process counts as its own what the one that started it holds, and here that is pytest: a shell between them holds little.
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, str(HERE / "drive.py"), name, str(folder / name), how]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=900)
    runs = next((line for line in done.stderr.splitlines() if line.startswith("stat::number_of_executed_units")), "")
    if done.returncode == 0 and int(runs.split()[-1]) >= parsers.TARGETS[name].runs:
        return ""
    shown = [line for line in done.stderr.splitlines() if not line.startswith(("INFO:", "WARNING:", "#"))]
    return f"{name}:\n{done.stdout[-3000:]}\n" + "\n".join(shown[-40:])[-3000:]


def broken(how: Callable[[str], str], folder: Path) -> list[str]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [said for said in pool.map(lambda name: fuzz(name, how(name), folder), NAMES) if said]


def test_three_hundred_inputs_each_find_nothing_but_refusals(tmp_path: Path) -> None:
    assert broken(lambda name: f"-runs={parsers.TARGETS[name].runs}", tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(len(NAMES) * 900)
def test_ten_minutes_of_fuzzing_each_find_nothing_but_refusals(tmp_path: Path) -> None:
    assert broken(lambda name: "-max_total_time=600", tmp_path) == []


def test_a_fault_is_found_and_told(tmp_path: Path) -> None:
    """The fuzzer would see one: a target that breaks on what it takes."""
    program = (
        f"import sys; sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent / 'journeys')!r}]\n"
        "import drive, parsers\n"
        "def broken(data):\n"
        "    parsers.same(data[:2], b'ab') if data[:1] == b'a' else None\n"
        "parsers.TARGETS['broken'] = parsers.Target(broken, lambda: [b'b'])\n"
        f"drive.main('broken', {str(tmp_path)!r}, '-runs=1000000')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, errors="replace", timeout=120
    )
    assert done.returncode != 0
    assert "became b'ab'" in done.stdout


def test_every_target_is_fuzzed() -> None:
    assert sorted(NAMES) == sorted(parsers.TARGETS)


def test_the_submissions_that_are_edited_are_taken_as_they_are() -> None:
    submitting.unchanged()
    building_models.unchanged()
