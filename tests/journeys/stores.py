"""The two stores of blobs for tests: a folder, and a place of its own on a real S3 server."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from buckets import Place

from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import Blobs, blobs_at

MB = 1 << 20
LARGE = b"".join(number.to_bytes(4, "big") * 1024 for number in range(5 * 1024)) + b"end"
"""20 MB and a little: three parts."""


def at(found: Place, folder: Path, *, place: str = "", endpoint: str = "") -> Blobs:
    scratch = folder / "work" / "blobs"
    return blobs_at(place or found.blobs, endpoint=endpoint or found.server.endpoint, scratch=scratch)


@pytest.fixture
def s3(s3_place: Place, tmp_path: Path) -> Blobs:
    return at(s3_place, tmp_path)


@pytest.fixture(params=["folder", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "folder":
        return blobs_at(str(tmp_path / "blobs"), scratch=tmp_path / "unused")
    return request.getfixturevalue("s3")


def refused(code: str, call: Callable[[], object]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call()
    assert caught.value.code == code, caught.value
    return caught.value


WRITE = """
import os, sys
from pathlib import Path
from acclimate_runners.blobs import blobs_at
blobs, source = blobs_at(sys.argv[1], endpoint=sys.argv[2], scratch=Path(sys.argv[3])), Path(sys.argv[4])
print("ready", flush=True)
sys.stdin.readline()
print(blobs.put(source))
"""


def writer(place: str, endpoint: str, scratch: Path, source: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITE, place, endpoint, str(scratch), str(source)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
