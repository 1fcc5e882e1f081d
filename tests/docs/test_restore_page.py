"""The operators' example of a restore into PostgreSQL and S3 together, typed as it stands there, with names of this machine."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import kept
from backed_up import back_up, contents
from buckets import s3_place
from engines import postgresql, postgresql_url
from pages_read import blocks
from waiting import WITHIN, until

from acclimate import config

__all__ = ["postgresql", "postgresql_url", "s3_place"]


def example() -> list[str]:
    """Its lines, without the prompts."""
    (block,) = [one for one in blocks("operators") if one.heading == "Backup" and "--blobs s3://" in one.text]
    return [line.removeprefix("$ ") for line in block.text.splitlines()]


def test_a_restore_into_postgresql_and_s3_goes_as_the_page_says(tmp_path, postgresql_url, s3_place):
    whole = kept.installation(tmp_path)
    back_up(whole, tmp_path / "backup", keys=True)
    whole.store.close()
    lines = example()
    assert [line.split()[1] for line in lines if line.startswith("acclimate ")] == ["restore", "db", "up"]
    ours = {
        "postgresql://acclimate@db.example.org/acclimate_new": postgresql_url,
        "http://s3.example.org:8333": s3_place.settings["blobs_endpoint"],
        "s3://acclimate/rounds": s3_place.settings["blobs"],
        "/backup/acclimate": str(tmp_path / "backup"),
        "/var/lib/acclimate-new": str(tmp_path / "new"),
    }
    text = "\n".join(lines)
    for theirs, own in ours.items():
        assert theirs in text, theirs
        text = text.replace(theirs, own)
    text, _, up = text.partition("\nacclimate up")
    given = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "ACCLIMATE_ORIGIN": whole.settings.origin,
    }
    environment = {**os.environ, **given, "ACCLIMATE_CLOCK_BEHIND": str(10**9), "ACCLIMATE_RUNNER": "local"}
    told = subprocess.run(["bash", "-euc", text], env=environment, capture_output=True, text=True, timeout=WITHIN)
    assert told.returncode == 0, told.stderr
    assert re.search(rf"blobs: [1-9]\d* copied to {re.escape(ours['s3://acclimate/rounds'])}", told.stdout), told.stdout
    assert told.stdout.count("not known: whether entries were signed after this backup") == 2
    new = {"origin": whole.settings.origin, "database": postgresql_url, **s3_place.settings}
    restored, before = contents(config.load(tmp_path / "new", environ={}, given=new)), contents(whole.settings)
    assert restored == before
    assert not list((tmp_path / "new").glob("*.db"))
    # It starts there.
    exports = "\n".join(line for line in text.splitlines() if line.startswith("export "))
    command = f"{exports}\nexec acclimate up{up} --no-mlflow --port 0 --json"
    log = tmp_path / "up.out"
    with log.open("w") as out, (tmp_path / "up.err").open("w") as err:
        process = subprocess.Popen(["bash", "-euc", command], env=environment, stdout=out, stderr=err)
    try:
        until(lambda: process.poll() is not None or log.read_text().endswith("\n"))
        assert whole.made.signer.vkey in log.read_text(), (tmp_path / "up.err").read_text()
        process.send_signal(signal.SIGTERM)
        # With 1 where the dispatcher was killed: it makes MLflow's runs, bundle and report anew just now, which takes a busy machine longer than its grace.
        assert process.wait(WITHIN) in (0, 1)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
