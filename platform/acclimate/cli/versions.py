"""`acclimate round revise` and `acclimate round versions`: results that are judged again, beside those before."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acclimate.cli.options import AsJson, KeysFolder, ReaderKeys, RoundId, Server, connect, reader
from acclimate.cli.output import emit, say, table
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from acclimate.client import Client

_HEAD = ("entrant", "rank before", "rank", "prepared before", "prepared", "direct before", "direct")


def revise(
    round_id: RoundId,
    correction: Annotated[
        Path,
        typer.Option("--correction", help="JSON with some of targets, void and metrics; see above.", metavar="FILE"),
    ],
    reason: Annotated[str, typer.Option("--reason", help="Why; everybody will read it.")],
    keys: KeysFolder,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compute and show; sign nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Publish a new version of a ranking, judged again from the same predictions; the version before stays.

    The file says all that is judged otherwise than definition and opened holdout have it: {"targets": {TASK: {EXAMPLE: TARGET}}, "void": {TASK:
    [EXAMPLE]}, "metrics": {TASK: NAME}}, each only where it is needed. Your machine downloads the bundle, audits it, and recomputes the ranking; the server
    must find the same. Whose rank or score changed is shown.

    Example: acclimate round revise digits-2027-1 --correction wrong-labels.json --reason "e17 shows a 4" --keys ./me
    """
    from acclimate.client import revising
    from acclimate_competitions import reading

    document = reading.document(correction)
    client, opened = connect(keys)
    with client:
        found = revising.revise(client, opened, round_id, document, reason=reason, send=not dry_run)
    done = (
        f"revised {found.round}: {found.digest}, log entry {found.index}"
        if found.index is not None
        else "nothing signed"
    )
    emit(
        {
            "round": found.round,
            "index": found.index,
            "ranking": found.digest,
            "correction": found.correction.digest,
            "changes": found.changes,
        },
        as_json=as_json,
        text=[*changed(found.changes), done],
    )


def versions(round_id: RoundId, server: Server = None, keys: ReaderKeys = None, as_json: AsJson = False) -> None:
    """Show every version of a round's ranking: when, why, and whose rank or score it changed.

    `acclimate ranking ROUND --version N` prints one of them.

    Example: acclimate round versions digits-2027-1 --server https://rounds.example.org
    """
    with reader(keys, server) as client:
        found = client.versions(round_id)
    text: list[str] = []
    for one in found:
        newest = ", in force" if one is found[-1] else ""
        text.append(f"version {one['version']}{newest}: {one['at']}, {one['ranking']}" + _why(one))
        if one["version"] > 1:
            text += changed(one["changes"])
    emit(found, as_json=as_json, text=text or ["nothing is published yet"])


def changed(changes: list[dict[str, Any]]) -> list[str]:
    """Whose rank or score changed, as a table."""
    if not changes:
        return ["no rank and no score changed"]
    rows = [
        (
            row["entrant"],
            *(
                _number(row.get(f"{name}{end}"))
                for name in ("rank", "score", "direct_score")
                for end in ("_before", "")
            ),
        )
        for row in changes
    ]
    return table(_HEAD, rows, right=_HEAD[1:])


def told(client: "Client", round_id: str) -> None:
    """Say of a ranking that there are several versions of it."""
    found: list[dict[str, Any]] = []
    # A server of an older version knows of none.
    with contextlib.suppress(Refusal):
        found = client.versions(round_id)
    if len(found) > 1:
        say(
            f"version {len(found)} of {len(found)}, {found[-1]['at']}{_why(found[-1])}; acclimate round versions shows them all"
        )


def _why(one: dict[str, Any]) -> str:
    return f": {one['reason']}" if one["reason"] else ""


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4f}"
