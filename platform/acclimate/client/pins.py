"""What a custodian keeps of the rounds that it acknowledged: pins in `pins.json` of its key folder, envelopes in `envelopes/`.

A pin holds the server to what it showed first. An envelope is the custodian's own share as it lies on the server, still encrypted; with it a
release needs no server.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from acclimate import files
from acclimate.client.addresses import require_round
from acclimate.client.folder import PINS_FILE
from acclimate.client.folder_lock import alone
from acclimate.keys import Keys
from acclimate_competitions.errors import Refusal

ENVELOPES = "envelopes"


@dataclass(frozen=True)
class Pin:
    """What a custodian holds a server to, since it acknowledged.

    Attributes:
        round: the round's id.
        defined: digest of RoundDefined as it stands in the log.
        log: the log's key.
        organizer: the organizer's public key.
        checkpoint: the signed note of the checkpoint seen.
        seal: the seal's id.
        index: the custodian's share.
        commitment: digest of the share document that was decrypted.
    """

    round: str
    defined: str
    log: str
    organizer: str
    checkpoint: str
    seal: str
    index: int
    commitment: str


def pinned(keys: Keys, round_id: str) -> Pin:
    """The pin of a round, or of the only one whose id begins with round_id.

    Raises:
        Refusal: round_unknown, where the custodian acknowledged none; file_unreadable; phase_wrong, where it was acknowledged with a
            version whose pins held the server to less.
    """
    require_round(round_id)
    stored = _stored(keys)
    path = keys.folder / PINS_FILE
    found = [name for name in stored if name == round_id] or [name for name in stored if name.startswith(round_id)]
    if len(found) != 1:
        raise Refusal(
            "round_unknown",
            f"{path} pins {'several rounds that begin' if found else 'no round that begins'} with {round_id!r}",
            hint="a custodian acknowledges first: acclimate custodian ack ROUND --keys DIR",
        )
    pin = stored[found[0]]
    if "defined" not in pin:
        raise Refusal(
            "phase_wrong",
            f"{found[0]} was acknowledged with an older version of acclimate, and its share names no round",
            hint="finish this round with that version; shares of rounds made since are released for their own round only",
        )
    try:
        return Pin(**pin)
    except TypeError as error:
        raise _damaged(keys) from error


def keep(keys: Keys, pin: Pin, *, envelope: Mapping[str, Any]) -> None:
    """Pin a round, and keep the custodian's envelope.

    What was pinned first stays: a second acknowledgement must not move a custodian to another history.
    """
    with alone(keys.folder / ".pins.lock", doing=f"writing {keys.folder / PINS_FILE}"):
        files.write_json(keys.folder / ENVELOPES / f"{pin.round}.json", dict(envelope))
        stored = _stored(keys)
        if pin.round not in stored:
            files.write_json(keys.folder / PINS_FILE, {**stored, pin.round: dataclasses.asdict(pin)})


def require_same_seal(keys: Keys, round_id: str, *, seal: str) -> None:
    """Refuse another seal than the one that was acknowledged before for this round, and one that was for another round.

    Raises:
        Refusal: seal_mismatch.
    """
    stored = _stored(keys)
    before = stored.get(round_id)
    if before is not None and before.get("seal") != seal:
        raise Refusal(
            "seal_mismatch", f"the log has seal {seal} for {round_id}, acknowledged before was {before.get('seal')}"
        )
    for other, pin in stored.items():
        if other != round_id and pin.get("seal") == seal:
            raise other_rounds_seal(round_id, seal=seal, other=other)


def other_rounds_seal(round_id: str, *, seal: str, other: str) -> Refusal:
    """What is said where two rounds show one seal."""
    return Refusal(
        "seal_mismatch",
        f"{round_id} shows the seal {seal}, which is the seal of {other}",
        hint="whoever released a share for the one round would open the other: sign nothing, and tell both organizers",
    )


def kept_envelope(keys: Keys, round_id: str) -> dict[str, Any] | None:
    """The envelope that was kept at the acknowledgement; None where there is none."""
    path = keys.folder / ENVELOPES / f"{round_id}.json"
    if not path.exists():
        return None
    found = files.read_json(path)
    if not isinstance(found, dict):
        raise Refusal("file_unreadable", f"{path} is no envelope", hint="delete it: the server has it, too")
    return found


def _stored(keys: Keys) -> dict[str, Any]:
    path = keys.folder / PINS_FILE
    stored = files.read_json(path) if path.exists() else {}
    if not isinstance(stored, dict) or not all(isinstance(pin, dict) for pin in stored.values()):
        raise _damaged(keys)
    return stored


def _damaged(keys: Keys) -> Refusal:
    return Refusal(
        "file_unreadable",
        f"{keys.folder / PINS_FILE} does not hold pins",
        hint="put it back from your copy of the key folder; without it nothing holds the server to its word",
    )
