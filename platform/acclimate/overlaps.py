"""Whether a backup and an installation lie in one another: a backup that shares folders with what it is a copy of is none.

Paths are compared as the system resolves them, so a link, `..`, a relative name or another spelling of the same folder is seen through.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from acclimate import config, locks, sqlite_urls
from acclimate.config import Settings
from acclimate_competitions.errors import Refusal

_PARTS = ("up", "api", "dispatcher")


def refuse_backup(to: Path, settings: Settings) -> None:
    """Refuse a folder for a backup that lies in the installation, or in which a part of it lies.

    Raises:
        Refusal: backup_invalid.
    """
    _apart(to, settings, hint="name a folder outside of the installation, best on another disk")


def refuse_restore(folder: Path, settings: Settings) -> None:
    """Refuse to make an installation in its backup, around it, in another installation's data folder, or on blobs that another one writes.

    Raises:
        Refusal: backup_invalid, busy.
    """
    _apart(folder, settings, hint="name places outside of the backup: --data, --database and --blobs")
    for above in _resolved(settings.data).parents:
        if _is_data(above):
            raise Refusal(
                "backup_invalid",
                f"the data folder {settings.data} lies in {above}, the data folder of an installation that is there",
                hint="name one outside of it with --data; nothing is restored over anything",
            )
    if (store := places(settings).get("the folder of blobs")) is not None:
        around = _resolved(store).parent
        held = [who for part in _PARTS if (who := locks.holder(around / f"{part}.lock"))] if _is_data(around) else []
        if held and not _same(around, settings.data):
            raise Refusal(
                "busy",
                f"the blobs at {store} are in use: {held[0]} runs on {around}",
                hint=f"stop {held[0]} first: of two databases with the same blobs one would be wrong",
            )


def places(settings: Settings) -> Mapping[str, Path]:
    """What of an installation lies in folders of this machine: what it is -> folder or file."""
    found = {"the data folder": settings.data, "the folder of keys": settings.keys}
    for what, place in (("the folder of blobs", settings.blobs), ("the folder of artifacts", settings.artifacts)):
        if "://" not in place:
            found[what] = Path(place)
    for what, url in (("the database", settings.database), ("MLflow's database", settings.tracking)):
        if sqlite_urls.is_one(url):
            found[what] = sqlite_urls.file(url)
    return found


def _apart(backup: Path, settings: Settings, *, hint: str) -> None:
    for what, place in places(settings).items():
        if lies_in(place, backup):
            raise Refusal("backup_invalid", f"{what}, {place}, lies in the backup's folder {backup}", hint=hint)
        if lies_in(backup, place):
            raise Refusal("backup_invalid", f"the backup's folder {backup} lies in {what}, {place}", hint=hint)


def lies_in(inner: Path, outer: Path) -> bool:
    """Whether one path is the other, or below it; neither need be there."""
    whole = _resolved(inner)
    return any(_same(each, outer) for each in (whole, *whole.parents))


def _same(one: Path, other: Path) -> bool:
    # A folder that is mounted twice, or spelled in two ways, has one identity.
    try:
        return one.samefile(other)
    except OSError:
        return _resolved(one) == _resolved(other)


def _resolved(path: Path) -> Path:
    # Not Path.resolve, which raises where links go in a circle.
    return Path(os.path.realpath(path.expanduser()))


def _is_data(folder: Path) -> bool:
    try:
        return (folder / "VERSION").read_text("utf-8", "replace").strip() == config.DATA_VERSION
    except OSError:
        return False
