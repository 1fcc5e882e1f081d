"""What several threads of a server's process import lazily is there before the first of them starts: two importers at once saw half of it."""

import subprocess
import sys

import pytest

TOLD = """
import os, sys, threading

def start(thread):
    needed = ("sqlalchemy.orm", "sqlalchemy.orm.exc", "pyarrow.parquet", "pyarrow.compute")
    print("missing:", *(name for name in needed if name not in sys.modules), flush=True)
    os._exit(0)

threading.Thread.start = start
from acclimate.cli.main import run
run()
"""


@pytest.mark.parametrize("part", [("api", "--port", "0"), ("dispatch", "--runner", "local")], ids=lambda part: part[0])
def test_nothing_that_threads_share_is_imported_by_them_first(part, tmp_path):
    if part[0] == "dispatch":
        # It works on what an API has made.
        subprocess.run(
            [sys.executable, "-c", TOLD, "api", "--port", "0", "--data", tmp_path / "data"], check=True, timeout=300
        )
    done = subprocess.run(
        [sys.executable, "-c", TOLD, *part, "--data", tmp_path / "data"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.splitlines()[-1:] == ["missing:"], done.stderr[-2000:]
