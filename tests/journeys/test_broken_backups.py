"""Backups and restores that end in the middle: killed, on a full disk, beside one another; the same command goes on."""

import signal
import subprocess
import sys

import kept
import pytest
from backed_up import contents, quiet, target
from waiting import WITHIN

from acclimate import backups
from acclimate.service import identity
from acclimate.store import Store
from acclimate_competitions.errors import Refusal

KILLED = """
import os, signal, sys
from pathlib import Path
from acclimate import backups, config, installation, restoring, table_files, migrations
from acclimate.store import Store
from acclimate_runners.blobs import FolderBlobs
what, at, backup, origin, place = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
count = 0
def progress(*_):
    global count
    count += 1
    if count == at:
        os.kill(os.getpid(), signal.SIGKILL)
settings = config.load(place, environ={}, given={"origin": origin})
if what == "backup":
    store = Store.open(settings)
    row = installation.check(store, settings)
    backups.write(store, settings, row, backup, wanted=backups.Wanted(keys=True), progress=progress)
else:
    restoring.restore(backup, settings, progress=progress)
print(count)
"""


def killed(what, at, backup, origin, place):
    command = [sys.executable, "-c", KILLED, what, str(at), str(backup), origin, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode == 0


def test_killed_anywhere_it_goes_on(tmp_path):
    whole = kept.installation(tmp_path)
    whole.store.close()
    before = contents(whole.settings)
    backup, new, origin = tmp_path / "backup", tmp_path / "new", whole.settings.origin
    ended, at = False, 1
    while not ended:
        ended = killed("backup", at, backup, origin, whole.settings.data)
        if (backup / "BACKUP.json").exists():
            assert ended and backups.damage(backup, backups.read(backup), blobs=True, progress=quiet) == []
        at = at * 2 + 1
    ended, at = False, 2
    while not ended:
        ended = killed("restore", at, backup, origin, new)
        if (new / "RESTORING").exists():
            # What was broken off is of no use to anybody else.
            with pytest.raises(Refusal):
                store = Store.open(target(whole, new))
                try:
                    identity.begin(target(whole, new), store)
                finally:
                    store.close()
            for path in new.glob("acclimate.db*"):
                path.unlink()
        at = at * 2 + 1
    assert contents(target(whole, new)) == before
    assert not (new / "RESTORING").exists() and at > 15
