"""`acclimate audit`: what a round's second operator does."""

from typing import Annotated

import typer

from acclimate.cli.options import AsJson, KeysFolder
from acclimate.cli.output import emit, say

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make drawn preparations of a round again, as its second operator.",
)


@app.command()
def keygen(
    name: Annotated[str, typer.Option("--name", help="The auditor's name in the definition.")],
    keys: KeysFolder,
    again: Annotated[
        bool, typer.Option("--again", help="Make a new secret for another round, with the same signing key.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make an auditor's keys and the secret of a draw, and auditor.json for the organizer.

    auditor.json holds the secret's digest only. A secret serves one round; keep the folder until that round is published.

    Example: acclimate audit keygen --name lab --keys ./lab
    """
    from acclimate.client import auditor

    made = auditor.keygen(auditor.open_keys(keys), name=name, again=again)
    say(f"send {keys / auditor.AUDITOR_FILE} to the organizer; the other files in {keys} are secret")
    say(
        "next: get an auditor's invitation from the server's operator, then: acclimate register --role auditor"
        f" --name {name} --invitation CODE --server URL --keys {keys}"
    )
    emit(made, as_json=as_json, text=[f"{label} {value}" for label, value in made.items()])
