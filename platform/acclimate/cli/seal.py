"""`acclimate seal`: what anybody can tell of a sealed holdout without its key."""

import dataclasses
import zipfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acclimate.cli.options import AsJson, ReaderKeys, Server, named, reader
from acclimate.cli.output import bar, emit
from acclimate_competitions import reading
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from acclimate.inspection import Known
    from acclimate.verify.files import Bundle

_FILE = "name the ciphertext, holdout.sealed, or the bundle that holds it"
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at sealed holdouts, without any key.")


@app.callback()
def seals() -> None:
    """Look at sealed holdouts, without any key."""


@app.command()
def inspect(
    file: Annotated[
        Path, typer.Argument(help="The ciphertext, holdout.sealed, or a bundle that has it.", metavar="FILE")
    ],
    round_id: Annotated[
        str | None,
        typer.Argument(help="The round's id, or any beginning of it that is unique.", metavar="ROUND", callback=named),
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="Compare with the seal in this bundle's log.", metavar="BUNDLE")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", help="Compare with this HoldoutSealed record, or sealed.json.", metavar="FILE"),
    ] = None,
    copy: Annotated[
        Path | None,
        typer.Option("--copy", help="A good copy of the ciphertext, to name the blocks that differ.", metavar="FILE"),
    ] = None,
    server: Server = None,
    keys: ReaderKeys = None,
    as_json: AsJson = False,
) -> None:
    """Measure a sealed holdout, and compare it with what its organizer committed to.

    The record comes from a bundle, a file or, for a ROUND, the server; a bundle's ciphertext is compared with its own log. Exits 1 where something FAILED. No key is needed and
    nothing is decrypted.

    Example: acclimate seal inspect digits-2027-1.zip
    """
    from acclimate import inspection

    if bundle is not None and record is not None:
        raise typer.BadParameter("give one of --bundle and --record")
    with ExitStack() as stack:
        ciphertext = file
        if _is_bundle(file):
            opened = stack.enter_context(_opened(file))
            ciphertext = opened.path("holdout.sealed")
            if bundle is None and record is None and round_id is None:
                bundle = file
        if bundle is not None:
            known = _of_bundle(bundle, round_id)
        elif record is not None:
            known = _of_file(record, round_id)
        elif round_id is not None:
            known = _of_server(keys, server, round_id)
        else:
            known = []
        progress = stack.enter_context(bar("hashing"))
        found = inspection.inspect(ciphertext, known, copy=copy, progress=progress)
    fields = found.known.fields if found.known is not None else {}
    value: dict[str, Any] = {
        "file": str(file),
        "size": found.measured.size,
        "digest": found.measured.digest,
        "block_root": found.measured.block_root,
        "blocks": len(found.measured.block_hashes),
        "record": fields | {"round": found.known.round} if found.known is not None else None,
        "findings": [dataclasses.asdict(finding) for finding in found.findings],
    }
    text = [
        f"{file}: {found.measured.size} bytes, {len(found.measured.block_hashes)} blocks of 1 MiB",
        f"  digest     {found.measured.digest}",
        f"  block root {found.measured.block_root}",
    ]
    if fields:
        shares = fields["shares"]
        text += [
            f"seal {fields['seal']}" + (f" of {found.known.round}" if found.known and found.known.round else ""),
            f"  {fields['rows']} rows with root {fields['row_root']}",
            f"  shares for {', '.join(share['to'] for share in shares)}",
        ]
    text += [f"{finding.status:<11}  {finding.name}: {finding.detail}" for finding in found.findings]
    emit(value, as_json=as_json, text=text)
    raise typer.Exit(1 if found.failed else 0)


def _is_bundle(path: Path) -> bool:
    if path.is_dir():
        return True
    with reading.regular(path, hint=_FILE).open("rb") as stream:
        return stream.read(4) == b"PK\x03\x04" and zipfile.is_zipfile(path)


@contextmanager
def _opened(path: Path) -> "Iterator[Bundle]":
    from acclimate.verify import files
    from acclimate.verify.report import Failed

    try:
        with files.opened(path) as opened:
            yield opened
    except Failed as failed:
        raise Refusal("bundle_invalid", str(failed), hint="see: acclimate verify BUNDLE") from failed


def _of_bundle(path: Path, round_id: str | None) -> "list[Known]":
    from acclimate import inspection

    with _opened(path) as opened:
        return inspection.from_entries(opened.lines("entries.jsonl"), str(path), round_id=round_id or "")


def _of_file(path: Path, round_id: str | None) -> "list[Known]":
    from acclimate import inspection

    known = inspection.from_file(path)
    if round_id is not None and not (known[0].round or round_id).startswith(round_id):
        raise Refusal(
            "round_unknown",
            f"{path} is of {known[0].round}, not of {round_id!r}",
            hint="give the record of that round",
        )
    return known


def _of_server(keys: Path | None, server: str | None, round_id: str) -> "list[Known]":
    from acclimate import inspection

    with reader(keys, server) as client:
        whole = str(client.round(round_id)["round"])
        entries = [found.encode() for _, found in client.records(whole) if found.type == "HoldoutSealed"]
    return inspection.from_entries(entries, client.url, round_id=whole)
