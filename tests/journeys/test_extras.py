"""What a core install says where a command needs an extra: in a process that can't find the extras' packages."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from waiting import WITHIN

from acclimate import extras

ROOT = Path(__file__).parent.parent.parent
WITHOUT = """
import importlib.abc, sys
class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {lacking!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Nothing())
sys.argv = {words!r}
{first}
from acclimate.cli import main
main.run()
"""


def core(*words: str, cwd: Path, first: str = "", but: str = "") -> subprocess.CompletedProcess[str]:
    lacking = {name for names in extras.MODULES.values() for name in names} - {but}
    program = WITHOUT.format(lacking=lacking, words=["acclimate", *words], first=first)
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=WITHIN)


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("report", "items.csv", "-o", "report.html"), "analysis"),
        (("report", "items.csv", "--notebook", "report.ipynb"), "analysis"),
        (("stability", "--items", "items.csv"), "analysis"),
        (("mlflow", "check", "--data", "d"), "server"),
        (("mlflow", "sync", "--data", "d"), "server"),
    ],
)
def test_what_needs_an_extra_says_which(words: tuple[str, ...], extra: str, tmp_path: Path) -> None:
    rows = [f"{who},{task},{task}{number},{number % 2}" for who in "ab" for task in "tu" for number in range(4)]
    (tmp_path / "items.csv").write_text("\n".join(["entrant,task,example,score", *rows]) + "\n", "utf-8")
    ran = core(*words, cwd=tmp_path)
    assert ran.returncode == 1 and "Traceback" not in ran.stderr, ran.stderr
    assert "code: extra_missing" in ran.stderr and f"[{extra}]" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["items.csv"]


def test_a_command_that_forgot_to_look_refuses_all_the_same(tmp_path: Path) -> None:
    forgets = "from acclimate import extras\nextras.need = lambda *names: None\nimport acclimate.cli.results as r\nr.need = extras.need"
    ran = core("mlflow", "check", "--data", "d", cwd=tmp_path, first=forgets)
    assert ran.returncode == 1 and "code: extra_missing" in ran.stderr and "Traceback" not in ran.stderr, ran.stderr
    # A module that no extra has is missing by a fault of ours.
    ran = core(
        "mlflow",
        "check",
        cwd=tmp_path,
        first=forgets + "\nr.server.made = lambda *a: __import__('nowhere_at_all')",
        but="sqlalchemy",
    )
    assert "Traceback" in ran.stderr and "nowhere_at_all" in ran.stderr


def test_each_package_of_an_extra_is_known_by_its_name_in_python() -> None:
    given = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    names = metadata.packages_distributions()
    for extra, modules in extras.MODULES.items():
        wanted = {line.split(">")[0].split("<")[0].split("=")[0].split("[")[0].lower() for line in given[extra]}
        held = {dist.lower().replace("_", "-") for module in modules for dist in names[module]}
        assert wanted <= held, (extra, wanted - held)
