"""Coming from a log's key that somebody keeps to the one that its server has now."""

from acclimate import hand_overs, log
from acclimate.client.connection import Client
from acclimate.hand_overs import Chain
from acclimate_competitions.errors import Refusal


def receipts(client: Client) -> list[str]:
    """Receipts of the hand-overs of the log's key; none from a server of before there were any."""
    try:
        return client.hand_overs()
    except Refusal as refusal:
        if refusal.code != "not_found":
            raise
        return []


def chain_to(client: Client, known: str | None) -> Chain:
    """The keys of a server's log from a known one to its newest.

    Args:
        client: a connection to the server.
        known: the vkey to begin with; None for the first that the server names.

    Raises:
        Refusal: log_inconsistent, where the hand-overs don't lead to the server's key; rotation_invalid, proof_invalid, key_refused.
    """
    newest = log.parse_vkey(str(client.server().get("log")))
    found = receipts(client)
    if known is None:
        first = log.Receipt.parse(found[0]) if found else None
        known = hand_overs.check_entry(first.entry, index=first.index).old.text() if first else newest.text()
    chain = hand_overs.follow(found, log.parse_vkey(known))
    if chain.last != newest:
        raise Refusal(
            "log_inconsistent",
            f"{client.url} has the log {newest.text()}, known is {known}, and no hand-over leads there",
            hint="a log's key changes by a record that the old key signed, and in no other way: ask the operator, and the others, before you go on",
        )
    return chain
