"""`acclimate doctor`: what this machine has and lacks."""

import typer

from acclimate.cli.options import AsJson, Blobs, ConfigFile, Database, DataFolder
from acclimate.cli.output import counted, emit, plain, say

_COLOURS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "missing": typer.colors.RED}


def doctor(
    data: DataFolder = None,
    file: ConfigFile = None,
    database: Database = None,
    blobs: Blobs = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine has and lacks for running a server with these settings, and what to do.

    Nothing is changed: a small blob is written and removed again. Takes up to 15 s; exit code 1 if something is missing that is needed.

    Example: acclimate doctor --data /srv/acclimate
    """
    from acclimate import doctor as examination
    from acclimate.config import load

    settings = load(data, file=file, given={"database": database, "blobs": blobs})
    findings = examination.examine(settings)
    missing = [finding for finding in findings if finding.state == "missing"]
    value = {"ok": not missing, "findings": [finding.document() for finding in findings]}
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        state = typer.style(f"{finding.state:<7}", fg=_COLOURS[finding.state])
        lines.append(f"{state}  {plain(finding.name):<{width}}  {plain(finding.found)}")
        if finding.hint:
            lines.append(f"{'':7}  {'':<{width}}  hint: {plain(finding.hint)}")
    emit(value, as_json=as_json, text=lines, styled=True)
    if missing:
        say(f"{counted(len(missing), 'thing')} needed for running a server here: {', '.join(m.name for m in missing)}")
        raise typer.Exit(1)
