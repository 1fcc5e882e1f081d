"""The wheel, installed without extras in an environment of its own: what an entrant, a custodian, an auditor need, and no more."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "ray", "mlflow", "fastapi", "sqlalchemy", "datasets", "scipy", "pandas")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel and its core dependencies."""
    folder = tmp_path_factory.mktemp("core")
    uv = Path(sys.executable).parent / "uv"
    environment = {**os.environ, "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
    subprocess.run([uv, "build", "--wheel", "--quiet", "--out-dir", folder / "dist", ROOT], check=True, env=environment)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    wheel = next((folder / "dist").glob("*.whl"))
    environment["VIRTUAL_ENV"] = str(folder / "venv")
    subprocess.run([uv, "pip", "install", "--quiet", wheel], check=True, env=environment)
    return folder / "venv" / "bin"


def run(core: Path, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([core / "acclimate", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", HEAVY)
def test_a_core_install_is_light(core: Path, name: str) -> None:
    done = subprocess.run([core / "python", "-c", f"import {name}"], capture_output=True, text=True)
    assert "ModuleNotFoundError" in done.stderr


def test_a_custodian_and_an_auditor_work_on_it(core: Path, tmp_path: Path) -> None:
    import rounds_made

    made = rounds_made.make(tmp_path / "round")
    bundle = made.write(tmp_path / "bundle")
    done = run(core, "verify", bundle, "--log-key", made.signer.vkey, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run(core, "custodian", "keygen", "--name", "custodian-a", "--keys", tmp_path / "keys", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "keys" / "age.txt").exists()


def test_the_wheel_carries_the_digits_and_shows_their_definition(core: Path, tmp_path: Path) -> None:
    done = run(core, "competition", "show", "digits", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "prime" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        ["api", "--data", "d"],
        ["dispatch", "--data", "d"],
        ["demo", "--data", "d"],
        ["evaluate", "m", "--competition", "c"],
        ["witness", "run", "--keys", "d", "--log-key", "k"],
        ["report", "items.csv", "-o", "report.html"],
        ["stability", "--items", "items.csv"],
        ["compare", "--items", "items.csv", "a", "b"],
        ["mlflow", "check", "--data", "d"],
        ["mlflow", "sync", "--data", "d"],
        ["db", "check", "--data", "d"],
        ["competition", "import-lm-eval", "task.yaml"],
    ],
)
def test_what_needs_an_extra_says_which(core: Path, tmp_path: Path, command: list[str]) -> None:
    rows = [f"{who},{task},{task}{number},{number % 2}" for who in "ab" for task in "tu" for number in range(4)]
    (tmp_path / "items.csv").write_text("\n".join(["entrant,task,example,score", *rows]) + "\n", "utf-8")
    done = run(core, *command, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_witness_needs_uvicorn_and_nothing_else(core: Path, tmp_path: Path) -> None:
    """The last test: it adds the extra to the environment."""
    import witnessed

    small = witnessed.SmallLog(size=3)
    uv = Path(sys.executable).parent / "uv"
    wheel = next((core.parent.parent / "dist").glob("*.whl"))
    environment = {**os.environ, "VIRTUAL_ENV": str(core.parent), "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
    subprocess.run([uv, "pip", "install", "--quiet", f"{wheel}[witness]"], check=True, env=environment)
    folder = tmp_path / "w1"
    made = run(core, "witness", "keygen", "--name", "w.example", "--keys", folder, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    command = [core / "acclimate", "witness", "run", "--keys", folder, "--log-key", small.vkey, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[2]
        answer = httpx.post(f"{url}/add-checkpoint", content=small.request(0), trust_env=False)
        process.terminate()
        assert answer.status_code == 200 and process.wait(60) == 0
    for name in HEAVY:
        test_a_core_install_is_light(core, name)
