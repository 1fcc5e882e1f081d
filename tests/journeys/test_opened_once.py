"""A bundle is opened once: what is verified is what was looked at first, whatever lies at its name by then."""

import shutil
import sys
from pathlib import Path

import pytest
import rounds_made
from databases import run

from acclimate import verify
from acclimate.verify import files

OPENED: list[str] = []
"""Paths that were opened, while a test listens."""
LISTENING: list[bool] = []


def heard(event: str, arguments: tuple[object, ...]) -> None:
    if LISTENING and event == "open":
        OPENED.append(str(arguments[0]))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A bundle in a ZIP, and its log's key."""
    place = tmp_path_factory.mktemp("made")
    made = rounds_made.make(place / "round")
    folder = made.write(place / "bundle")
    return Path(shutil.make_archive(str(place / "whole"), "zip", folder)), made.signer.vkey


def test_what_was_opened_is_verified_though_another_file_is_at_its_name(
    packed: tuple[Path, str], tmp_path: Path
) -> None:
    path = Path(shutil.copy(packed[0], tmp_path / "bundle.zip"))
    with files.opened(path) as found:
        path.write_bytes(b"another file")
        report = verify.verify(found, log_key=packed[1])
        again = verify.recompute_ranking(found)
    assert report.failed == () and report.document()["bundle"] == str(path)
    assert again.document()["ranking"]
    assert [check.name for check in verify.verify(path, log_key=packed[1]).failed] == ["manifest"]


def test_the_command_reads_a_bundle_once_beside_the_look_at_what_it_is(
    packed: tuple[Path, str], tmp_path: Path
) -> None:
    """The look opens it three times: its first bytes, whether it is a ZIP, the names in it."""
    path, key = packed
    sys.addaudithook(heard)
    LISTENING.append(True)
    try:
        code, out, errors = run("verify", path, "--log-key", key)
    finally:
        LISTENING.clear()
    assert code == 0, (out, errors)
    assert OPENED.count(str(path)) == 4
    # What can't be opened at all is reported as before.
    odd = tmp_path / "odd.zip"
    odd.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    code, out, _ = run("verify", odd, "--log-key", key)
    assert code == 1 and "FAILED" in out and "manifest" in out
