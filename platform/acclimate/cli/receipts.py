"""`acclimate receipt`: what a receipt shows, and whether it is true."""

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acclimate.cli.options import AsJson, LogKey, named, read_key, read_log_keys
from acclimate.cli.output import emit
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from acclimate.client import Client
    from acclimate.client.receipts import Bundle
    from acclimate.log import Receipt
    from acclimate.log_keys import LogKeys

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Check receipts, offline.")


@app.callback()
def receipts() -> None:
    """Check receipts, offline."""


@app.command()
def verify(
    file: Annotated[
        Path, typer.Argument(help="A receipt, as `acclimate submit` keeps it: *.tlog-proof.", metavar="FILE")
    ],
    log_key: LogKey = None,
    witness: Annotated[
        list[str] | None,
        typer.Option(
            "--witness", help="A witness's key, got elsewhere: has it cosigned? May be repeated.", metavar="KEY"
        ),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle", help="The round's bundle, or a mirror's folder: is the entry there, too?", metavar="FILE"
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="A saved checkpoint, or somebody's receipt: the same log?", metavar="FILE"),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--log", help="The log's server: does the log of today go on from the receipt?", metavar="URL"),
    ] = None,
    round_id: Annotated[
        str | None,
        typer.Option(
            "--round", help="The round that it must be of, or its beginning.", metavar="ROUND", callback=named
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify a receipt against the log's key, offline.

    And, where one is given, against a published bundle, a saved checkpoint, or (the only one that needs a network) the log itself.

    Example: acclimate receipt verify ada/receipts/digits-2027-1-8f3a52c01b7e4d06a1c95e3b7720d4f8-1c9d03aa.tlog-proof --bundle digits-2027-1.zip
    """
    from acclimate.client import Client
    from acclimate.client import receipts as found
    from acclimate.client.evidence import Check
    from acclimate.quorum import parse_witness

    if sum(given is not None for given in (bundle, checkpoint, url)) > 1:
        raise typer.BadParameter("give one of --bundle, --checkpoint and --log")
    if log_key is None and bundle is None and url is None:
        raise Refusal(
            "proof_invalid",
            "a receipt alone shows nothing: whose log is it?",
            hint="--log-key KEY, got from somebody you trust, or DIR, your key folder; or --bundle FILE, whose keys.json names one",
        )
    witnesses = [parse_witness(read_key(text)) for text in witness or []]
    receipt = found.read(file)
    with ExitStack() as stack:
        client = stack.enter_context(Client(url)) if url is not None else None
        other = found.read_bundle(bundle) if bundle is not None else None
        keys = read_log_keys(log_key, of=found.origin(receipt)) if log_key is not None else None
        key = _key(keys, receipt, other, client) if keys is not None else None
        chain = found.chain_of(key, bundle=other, client=client)
        record, signed, checks = found.alone(receipt, chain, witnesses)
        if keys is not None:
            checks += found.whose(keys, chain, signed, bundle=other, client=client)
        if round_id is not None:
            found.require_round(record, round_id)
        if key is None and not signed.cosigned:
            whose = f"no --log-key given; the key is the {'bundle' if bundle else 'server'}'s own"
            checks.append(Check("whose log", "NOT CHECKED", whose))
        if other is not None:
            checks += found.against_bundle(receipt, record, signed, other)
        if checkpoint is not None:
            checks += found.against_checkpoint(signed, found.read_checkpoint(checkpoint), chain)
        if client is not None:
            checks += found.against_log(client, signed, chain)
    said = [dataclasses.asdict(check) for check in checks]
    value: dict[str, Any] = {"index": receipt.index, "record": record.document(), "checks": said}
    text = [f"{check.status:<11}  {check.name}: {check.detail}" for check in checks]
    text.append(f"{record.type} of {record.round}, received {record.document()['at']}")
    text += [f"  {name} {item}" for name, item in record.fields.items() if isinstance(item, str | int)]
    emit(value, as_json=as_json, text=text)


def _key(keys: "LogKeys", receipt: "Receipt", bundle: "Bundle | None", client: "Client | None") -> str:
    """The log's key that was given; of those that a key folder keeps, the one that fits what the receipt is held against."""
    from acclimate.client import receipts as found

    if bundle is not None and bundle.key in keys.texts:
        return str(bundle.key)
    if bundle is None and client is None and (signer := found.signing(receipt, keys.texts)):
        return signer
    return keys.texts[0]
