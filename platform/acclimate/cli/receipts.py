"""`acclimate receipt`: what a receipt shows, and whether it is true."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acclimate.cli.options import AsJson, LogKey, read_log_key
from acclimate.cli.output import emit
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from acclimate.log import Checkpoint, Receipt

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Check receipts, offline.")


@app.callback()
def receipts() -> None:
    """Check receipts, offline."""


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="A receipt, as `acclimate submit` keeps it: *.tlog-proof.")],
    log_key: LogKey = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="The round's bundle: is the entry in its log, too?", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify a receipt against the log's key, offline.

    And against a published bundle, where one is given.

    Example: acclimate receipt verify ada/receipts/digits-2027-1-8f3a52c01b7e-1c9d03aa.tlog-proof --bundle digits-2027-1.zip
    """
    from acclimate import log

    if log_key is None and bundle is None:
        raise Refusal(
            "proof_invalid",
            "a receipt alone shows nothing: whose log is it?",
            hint="--log-key KEY, got from somebody you trust, or DIR, your key folder; or --bundle FILE, whose keys.json names one",
        )
    try:
        receipt = log.Receipt.parse(file.read_bytes())
    except OSError as error:
        raise Refusal("file_unreadable", f"{file}: {error.strerror}") from error
    checks: list[dict[str, str]] = []
    log_key = read_log_key(log_key) if log_key is not None else None
    key, entries = (log_key, None) if bundle is None else _from_bundle(bundle, log_key)
    assert key is not None
    record, signed = receipt.open(log.parse_vkey(key))
    size = signed.checkpoint.size
    _note(checks, "signature", f"the checkpoint of {size} entries is signed by {key}")
    _note(checks, "inclusion", f"entry {receipt.index} leads to the checkpoint's root")
    if log_key is None:
        _note(checks, "whose log", "no --log-key given; the key is the bundle's own", status="NOT CHECKED")
    if entries is not None:
        _compare(checks, receipt, signed.checkpoint, entries)
    value: dict[str, Any] = {"index": receipt.index, "record": record.document(), "checks": checks}
    text = [f"{check['status']:<11}  {check['name']}: {check['detail']}" for check in checks]
    text.append(f"{record.type} of {record.round}, received {record.document()['at']}")
    text += [f"  {name} {item}" for name, item in record.fields.items() if isinstance(item, str | int)]
    emit(value, as_json=as_json, text=text)


def _note(checks: list[dict[str, str]], name: str, detail: str, *, status: str = "ok") -> None:
    checks.append({"name": name, "status": status, "detail": detail})


def _compare(
    checks: list[dict[str, str]], receipt: "Receipt", checkpoint: "Checkpoint", entries: Sequence[bytes]
) -> None:
    """Compare a receipt and its checkpoint with the entries of a bundle.

    Raises:
        Refusal: proof_invalid, log_inconsistent.
    """
    from acclimate import log

    size = checkpoint.size
    if receipt.index >= len(entries):
        reason = f"the bundle's log ends at {len(entries)} entries, before entry {receipt.index}"
        _note(checks, "bundle", reason, status="NOT CHECKED")
    elif entries[receipt.index] != receipt.entry:
        raise Refusal(
            "proof_invalid",
            f"the bundle's log has something else as entry {receipt.index} of {len(entries)}",
            hint="keep both: the log has signed two histories",
        )
    else:
        _note(checks, "bundle", f"entry {receipt.index} of the bundle has the same bytes")
    if size > len(entries):
        reason = f"the receipt's checkpoint is of {size} entries, the bundle's log ends at {len(entries)}: whether"
        _note(checks, "same history", f"{reason} it goes on to that checkpoint is not shown", status="NOT CHECKED")
    elif log.root([log.leaf_hash(entry) for entry in entries[:size]]) != checkpoint.root:
        raise Refusal(
            "log_inconsistent", f"the bundle's first {size} entries have another root than the receipt's checkpoint"
        )
    else:
        _note(checks, "same history", f"the bundle's first {size} entries have the root of the receipt's checkpoint")


def _from_bundle(path: Path, log_key: str | None) -> tuple[str, list[bytes]]:
    """The log's key (the one given, else the bundle's) and the log entries of a bundle."""
    from acclimate.verify import files
    from acclimate.verify.report import Failed

    try:
        with files.opened(path) as bundle:
            found, entries = bundle.json("keys.json")["log"], bundle.lines("entries.jsonl")
    except Failed as failed:
        raise Refusal("bundle_invalid", str(failed)) from failed
    except (KeyError, TypeError) as error:
        raise Refusal("bundle_invalid", f"{path}: keys.json names no log") from error
    if log_key is not None and found != log_key:
        raise Refusal("proof_invalid", f"the bundle is of the log {found}, the key given is {log_key}")
    return str(found), entries
