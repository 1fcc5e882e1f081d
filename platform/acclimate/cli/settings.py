"""`acclimate config`: the settings in force, and where each came from."""

import dataclasses
from typing import TYPE_CHECKING, Any

from acclimate.cli.options import AsJson, Blobs, ConfigFile, Database, DataFolder
from acclimate.cli.output import emit, table

if TYPE_CHECKING:
    from acclimate.config import Settings


def config(
    data: DataFolder = None,
    file: ConfigFile = None,
    database: Database = None,
    blobs: Blobs = None,
    as_json: AsJson = False,
) -> None:
    """Print the settings in force and where each came from.

    From an argument, a variable of the environment, a line of the file, or the default; passwords are hidden. All that is wrong is told at
    once, and what is hardly meant is a warning. What each setting means: docs/settings.md.

    Example: acclimate config --data /srv/acclimate --config /etc/acclimate.toml
    """
    from acclimate.config import doubts, load

    settings = load(data, file=file, given={"database": database, "blobs": blobs})
    rows = effective(settings)
    odd = doubts(settings)
    value = {
        "file": str(settings.file) if settings.file is not None else None,
        "settings": rows,
        "warnings": [dataclasses.asdict(doubt) for doubt in odd],
    }
    lines = table(
        ["setting", "value", "from"], [(name, row["value"], _short(row["from"])) for name, row in rows.items()]
    )
    read = f"file: {settings.file}" if settings.file is not None else "no file was read"
    told = [line for doubt in odd for line in (f"warning: {doubt.sentence}", f"hint: {doubt.hint}")]
    emit(value, as_json=as_json, text=[*lines, "", read, *told])


def effective(settings: "Settings") -> dict[str, dict[str, Any]]:
    """Setting -> its value as it may be shown, and its origin."""
    from acclimate.config import SETTINGS, shown

    found: dict[str, dict[str, Any]] = {}
    for name in ("data", *SETTINGS):
        value = settings.data if name == "data" else settings.value(name)
        found[name] = {"value": shown(name, value), "from": settings.origins[name]}
    return found


def _short(origin: str) -> str:
    # The file is named once, below the table.
    kind, _, rest = origin.partition(" ")
    return f"file, {rest.rpartition(', ')[2]}" if kind == "file" and ", line " in rest else origin
