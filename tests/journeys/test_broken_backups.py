"""Backups and restores that end in the middle: killed, on a full disk, beside one another; the same command goes on."""

import contextlib
import os
import signal
import subprocess
import sys

import kept
import pytest
from backed_up import back_up, contents, quiet, refused, restore, target
from waiting import WITHIN

from acclimate import backups, locks, log
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
    if at == 0:
        restoring.gap = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
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


def test_killed_before_it_told_what_is_lost_the_same_command_tells_it(tmp_path):
    whole = kept.installation(tmp_path)
    checkpoint = log.sign_checkpoint(whole.made.signer, len(whole.made.entries), whole.made.tree.root())
    whole.store.blobs.put_note("CHECKPOINT", checkpoint.encode())
    back_up(whole, tmp_path / "backup", keys=True)
    whole.store.close()
    before = contents(whole.settings)
    new = tmp_path / "new"
    assert not killed("restore", 0, tmp_path / "backup", whole.settings.origin, new)
    assert contents(target(whole, new)) == before
    made = restore(tmp_path / "backup", target(whole, new))
    assert made["gap"].lost == [] and made["missing"] == []
    # The checkpoint that is there by now came from the backup.
    assert made["made"] in made["gap"].unknown
    assert not (new / "RESTORING").exists() and contents(target(whole, new)) == before
    with pytest.raises(Refusal) as caught:
        restore(tmp_path / "backup", target(whole, new))
    assert caught.value.code == "backup_invalid" and "acclimate db check" in caught.value.hint


@contextlib.contextmanager
def mounted(place, *options):
    place.mkdir()
    if os.geteuid() or subprocess.run(["mount", *options, str(place)], capture_output=True).returncode:
        pytest.skip("this process may not mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_on_a_full_disk_the_same_command_goes_on_once_there_is_room(tmp_path):
    whole = kept.installation(tmp_path)
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=100k", "tmpfs") as disk:
        assert "no space" in refused("no_space", back_up, whole, disk / "backup", keys=True)
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        assert back_up(whole, disk / "backup", keys=True)["lost"] == []
        settings = target(whole, disk / "new")
        # Not even a word of what is under way fits.
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(4096))
        refused("no_space", restore, disk / "backup", settings)
        filler.unlink()
        restore(disk / "backup", settings)
        assert contents(settings) == contents(whole.settings)
    whole.store.close()


def test_a_backup_on_a_disk_for_reading_only_is_restored_and_not_written(tmp_path):
    whole = kept.installation(tmp_path)
    back_up(whole, tmp_path / "backup", keys=True)
    with mounted(tmp_path / "disk", "--bind", str(tmp_path / "backup")) as disk:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(disk)], check=True)
        assert "Read-only" in refused("file_unreadable", back_up, whole, disk)
        restore(disk, target(whole, tmp_path / "new"))
    assert contents(target(whole, tmp_path / "new")) == contents(whole.settings)
    whole.store.close()


def test_a_place_that_can_not_be_is_a_refusal_that_names_it(tmp_path):
    whole = kept.installation(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for to in (tmp_path / "file", tmp_path / "file" / "x", tmp_path / "circle" / "x"):
        assert str(to) in refused("file_unreadable", back_up, whole, to)
    back_up(whole, tmp_path / "backup")
    for data in (tmp_path / "file" / "new", tmp_path / "circle" / "new"):
        assert str(data) in refused("file_unreadable", restore, tmp_path / "backup", target(whole, data))
    whole.store.close()


def test_a_backup_is_for_one_writer_at_a_time_and_for_any_number_of_readers(tmp_path):
    whole = kept.installation(tmp_path)
    backup = tmp_path / "backup"
    back_up(whole, backup)
    with locks.take(backup / "LOCK"):
        refused("busy", back_up, whole, backup)
        refused("busy", restore, backup, target(whole, tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    with locks.share(backup / "LOCK"):
        refused("busy", back_up, whole, backup)
        restore(backup, target(whole, tmp_path / "new"))
    assert back_up(whole, backup)["copied"] == 0
    whole.store.close()


def test_paths_of_all_scripts_and_with_what_a_url_means_otherwise(tmp_path):
    odd = tmp_path / "\u00fcn\u00ef %41 ? # \u65e5\u672c"
    whole = kept.installation(odd)
    back_up(whole, odd / "backup", keys=True)
    settings = target(whole, odd / "new")
    restore(odd / "backup", settings)
    assert contents(settings) == contents(whole.settings)
    whole.store.close()
    # Moved by hand, by its default settings alone.
    (odd / "new").rename(odd / "moved %42")
    assert contents(target(whole, odd / "moved %42")) == contents(whole.settings)
