"""Whatever the auditor's own machine lacks, an honest bundle is not said to have FAILED: nothing is said of it at all."""

import errno
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import made_bundles
import pytest
import rounds_made

from acclimate import verify
from acclimate_competitions import reading
from acclimate_competitions.errors import Refusal

# A process of its own: limits are for all that a process does.
LIMITED = """
import json, os, resource, sys, tempfile
from pathlib import Path
from acclimate import verify
from acclimate_competitions.errors import Refusal

kind, path = getattr(resource, sys.argv[1]), Path(sys.argv[2])
limits = json.loads(sys.argv[3])
verify.verify(path)  # every module is loaded, and what is opened once is open
soft, hard = resource.getrlimit(kind)
said = []
for limit in limits:
    if sys.argv[1] == "RLIMIT_NOFILE":
        limit += len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(kind, (limit, hard))
    try:
        report = verify.verify(path)
        one = ["report", [f"{c.name}: {c.where}: {c.meaning}" for c in report.failed]]
    except Refusal as refusal:
        one = [refusal.code, refusal.sentence]
    finally:
        resource.setrlimit(kind, (soft, hard))
    said.append(one)
print(json.dumps({"said": said, "left": os.listdir(tempfile.gettempdir())}))
"""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rounds_made.make(tmp_path_factory.mktemp("round")).write(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def zipped(honest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zip") / "bundle.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(p for p in honest.rglob("*") if p.is_file()):
            archive.write(file, file.relative_to(honest).as_posix())
    return path


def limited(kind: str, path: Path, limits: list[int], tmp_path: Path) -> list[list]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", LIMITED, kind, str(path), json.dumps(limits)],
        env={"TMPDIR": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Without a free descriptor no folder can be emptied.
    assert found["left"] == [] or kind == "RLIMIT_NOFILE"
    return list(found["said"])


@pytest.mark.parametrize("form", ["honest", "zipped"])
def test_a_disk_that_is_full_at_any_step_accuses_nobody(
    form: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path: Path = request.getfixturevalue(form)
    sizes = sorted({p.stat().st_size for p in request.getfixturevalue("honest").rglob("*") if p.is_file()})
    # Just too small for one file after the other, and with room for the largest.
    limits = [0, *(size - 1 for size in sizes[:: max(1, len(sizes) // 12)]), sizes[-1] - 1, 2 * sizes[-1]]
    said = limited("RLIMIT_FSIZE", path, limits, tmp_path)
    assert said[-1] == ["report", []]
    assert [failed for code, failed in said if code == "report"] == [[]] * sum(code == "report" for code, _ in said)
    refused = [one for one in said if one[0] != "report"]
    assert len(refused) >= 2
    assert {code for code, _ in refused} == {"no_space"}
    assert all("the bundle" in sentence or "temporary files" in sentence for _, sentence in refused)


@pytest.mark.parametrize("form", ["honest", "zipped"])
def test_too_few_open_files_accuse_nobody(form: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    said = limited("RLIMIT_NOFILE", request.getfixturevalue(form), [*range(1, 9), 64], tmp_path)
    assert said[-1] == ["report", []]
    assert {code for code, _ in said} == {"report", "file_unreadable"} | {code for code, _ in said} & {"no_space"}
    assert [failed for code, failed in said if code == "report" and failed] == []


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no_space"),
        (MemoryError(), "no_space"),
        (OSError(errno.EMFILE, "Too many open files"), "file_unreadable"),
        (OSError(errno.EIO, "Input/output error"), "file_unreadable"),
        (Refusal("no_space", "no space for it"), "no_space"),
    ],
)
@pytest.mark.parametrize("deep", [False, True])
def test_a_fault_of_the_machine_in_a_re_run_is_a_refusal(
    honest: Path, fault: Exception, code: str, *, deep: bool
) -> None:
    def again(audit: object) -> str:
        if not deep:
            raise fault
        try:
            raise fault
        except Exception as error:
            raise verify.Failed("somewhere", "it is damaged") from error

    with pytest.raises(Refusal) as refused:
        verify.verify(honest, levels=["rerun"], rerun=again)
    assert (refused.value.code, bool(refused.value.hint)) == (code, True)
    assert "nothing about the bundle" in refused.value.sentence


def test_what_a_strangers_bytes_set_off_has_failed_as_before(honest: Path) -> None:
    def again(audit: object) -> str:
        raise OSError(errno.ENAMETOOLONG, "File name too long")

    report = verify.verify(honest, levels=["rerun"], rerun=again)
    assert [(check.name, check.meaning[:9]) for check in report.failed] == [("re-run", "malformed")]
    assert reading.of_the_machine(ValueError("broken")) is None


@pytest.mark.parametrize("line", [b"\n", b"{}\n"])
def test_a_small_zip_of_a_billion_short_lines_is_no_billion_objects(line: bytes, honest: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(honest, tmp_path / "bundle"))
    (folder / "entries.jsonl").write_bytes(line * ((64 << 20) // len(line)))
    made_bundles.mend(folder)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(p for p in folder.rglob("*") if p.is_file()):
            archive.write(file, file.relative_to(folder).as_posix())
    code = (
        "import sys; from pathlib import Path; from acclimate import verify\n"
        "report = verify.verify(Path(sys.argv[1])); print([c.meaning for c in report.failed])\n"
        "status = Path('/proc/self/status').read_text()\n"
        "print(int(status.partition('VmHWM:')[2].split()[0]) >> 10)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path / "bomb.zip")], capture_output=True, text=True, timeout=120
    )
    failed, peak = done.stdout.splitlines()
    assert "too short for what a line of it says" in failed
    # The file itself is held, twice at most, and pyarrow beside it; its lines as objects took gigabytes.
    assert int(peak) < 600
