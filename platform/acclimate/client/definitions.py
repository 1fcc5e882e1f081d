"""What a client believes of a round: the definition to which its id binds, whatever the server says."""

from acclimate.client.connection import Client
from acclimate_competitions import definition, digests, rounds
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record


def full_id(client: Client, round_id: str) -> str:
    """The id of the only round that begins with round_id; the server may complete what was asked for, not replace it.

    Raises:
        Refusal: round_unknown; log_inconsistent, where the server answers with another round.
    """
    found = client.round(round_id).get("round")
    if not isinstance(found, str) or not round_id or not found.startswith(round_id):
        raise Refusal(
            "log_inconsistent",
            f"asked for round {round_id!r}, the server answers with {found!r}",
            hint="nothing was signed; the server is broken or cheats",
        )
    return found


def definition_of(client: Client, round_id: str) -> tuple[Record, Competition]:
    """RoundDefined and the definition it names: both checked against the round's id, so that no server can swap them.

    RoundDefined is signed by the organizer whom it names, and has passed the rules by which a round begins.

    Raises:
        Refusal: round_unknown, record_invalid, signature_invalid, guard_failed, log_inconsistent.
    """
    round_id = full_id(client, round_id)
    logged = client.records(round_id, limit=1)
    if not logged:
        raise Refusal("log_inconsistent", f"the server has no records of {round_id}")
    defined = logged[0][1]
    if defined.type != "RoundDefined" or defined.round != round_id:
        raise Refusal("log_inconsistent", f"the first record of {round_id} is {defined.type} of {defined.round}")
    return defined, check_definition(defined, client.definition(round_id), where="the server")


def check_definition(defined: Record, raw: bytes, *, where: str) -> Competition:
    """The definition that RoundDefined names, of these bytes.

    RoundDefined is signed by the organizer whom it names, and has passed the rules by which a round begins.

    Args:
        defined: RoundDefined.
        raw: the definition's bytes.
        where: whose they are, for what is said.

    Raises:
        Refusal: signature_invalid, guard_failed, definition_invalid, log_inconsistent.
    """
    round_id = defined.round
    if defined.by is None or defined.by != defined["organizer"].get("ed25519"):
        raise Refusal("signature_invalid", f"{round_id} is not defined by the organizer whom it names")
    if digests.of_bytes(raw) != defined["definition"]:
        raise Refusal(
            "log_inconsistent", f"the definition of {round_id} at {where} is not the one that RoundDefined names"
        )
    competition = definition.parse(raw)
    rounds.begin(defined, competition)
    return competition
