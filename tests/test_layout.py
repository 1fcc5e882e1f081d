"""The house: source roots, imports, sizes, what a core install may import."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE_ROOTS = ("platform", "competitions", "runners")
PACKAGES = ("platform/acclimate", "runners/acclimate_runners", "competitions/acclimate_competitions")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
HEAVY = (
    "torch",
    "transformers",
    "ray",
    "mlflow",
    "sqlalchemy",
    "fastapi",
    "uvicorn",
    "datasets",
    "scipy",
    "pandas",
    "matplotlib",
)


def _python(code: str, *, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_the_standard_library_platform_is_not_hidden_in_the_repository_root() -> None:
    done = _python("import platform; print(platform.python_version(), platform.__file__)")
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout


@pytest.mark.parametrize("name", SOURCE_ROOTS)
def test_a_source_root_holds_no_module_of_its_own(name: str) -> None:
    assert [path.name for path in (ROOT / name).glob("*.py")] == []


def test_tests_are_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
    assert not (ROOT / "tests" / "platform").exists()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_over_500_lines_and_no_function_over_80(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= 500
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [node.name for node in functions if (node.end_lineno or 0) - node.lineno + 1 > 80]
    assert long == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_a_noun_and_never_a_drawer(path: Path) -> None:
    assert path.stem not in {"utils", "util", "helpers", "common", "core", "manager", "base", "misc"}


TESTS = sorted((ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_tests_share_is_in_modules_that_hold_no_tests(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    assert [name for name in imported if name.rpartition(".")[2].startswith("test_")] == []


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_memory_is_measured_by_what_a_child_has_from_its_parent(path: Path) -> None:
    """A process begins with its parent's maxrss, so that a child of a large test grows by nothing; VmHWM is its own."""
    assert "ru_" + "maxrss" not in path.read_text("utf-8")


@pytest.mark.parametrize(
    "module",
    [
        "acclimate.client",
        "acclimate.keys",
        "acclimate.custody",
        "acclimate.sealing",
        "acclimate.log",
        "acclimate.verify",
        "acclimate.trials",
    ],
)
def test_client_custodian_and_auditor_import_no_extra(module: str) -> None:
    blocker = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {HEAVY!r}:\n"
        "            raise ModuleNotFoundError(f'not in a core install: {name}')\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    done = _python(blocker + f"import {module}")
    assert done.returncode == 0, done.stderr


def test_the_command_line_answers_without_heavy_imports() -> None:
    heavy = (*HEAVY, "pyarrow", "numpy", "httpx")
    done = _python(f"import sys, acclimate.cli.main; print([name for name in {heavy!r} if name in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_api_imports_neither_ray_nor_torch_nor_mlflow() -> None:
    names = ("ray", "torch", "transformers", "mlflow")
    done = _python(f"import sys, acclimate.api.server; print([name for name in {names!r} if name in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_no_machine_path_or_private_address_is_in_the_project() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    odd = re.compile(r"(?<![\w.])/(?:work|root|home/[a-z]+|Users/[A-Za-z]+|opt/(?:wheels|pypi))/")
    found = []
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if name and path.is_file() and path != Path(__file__):
            text = path.read_bytes().decode("utf-8", "replace")
            found += [f"{name}: {match.group()}" for match in odd.finditer(text)]
    assert found == []
