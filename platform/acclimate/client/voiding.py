"""How custodians agree to the end of a round: for the organizer, who signs it, or for one of them, who signs it for k.

An approval covers the bytes that one signer signs: round, reason, and the phase that the round is in. So it is of use to nobody else, and not for
long: what was agreed to because a machine burnt does not void a ranking that somebody dislikes later. Which phase that is, each custodian's own
fold of the log says, not the server's word. Cosignatures are not asked for: a voiding opens nothing, and must be possible while witnesses are down.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from acclimate import log
from acclimate.client import evidence
from acclimate.client.connection import Client
from acclimate.client.history import History, Known, Online, read_history
from acclimate.client.pins import Pin, pinned
from acclimate.hand_overs import Chain
from acclimate.keys import Keys
from acclimate_competitions import records, rounds
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Round
from acclimate_competitions.records import Record

Say = Callable[[str], None]


@dataclass(frozen=True)
class Newest:
    """A server as the source of evidence, by its newest checkpoint, whoever cosigned it."""

    online: Online

    def definition(self, round_id: str) -> tuple[Record, Competition]:
        """See Source."""
        return self.online.definition(round_id)

    def chain(self, known: log.Verifier) -> Chain:
        """See Source."""
        return self.online.chain(known)

    def checkpoint(self, defined: Record) -> str:
        """The newest checkpoint; unverified."""
        return self.online.client.checkpoint()

    def newest(self) -> str | None:
        """See Source."""
        return self.online.newest()

    def entries(self, size: int) -> Iterator[bytes]:
        """See Source."""
        return self.online.entries(size)

    def envelope(self, round_id: str, index: int) -> dict[str, Any] | None:
        """See Source."""
        return self.online.envelope(round_id, index)


def newest_history(client: Client, keys: Keys, defined: Record, *, size: int = 0) -> History:
    """The log as this machine reads it, of so many entries at least; cosignatures are not asked for: witnesses that are down stop no phase."""
    return read_history(Newest(Online(client)), defined, known=Known.of(keys), size=size)


def approve_void(
    client: Client,
    keys: Keys,
    round_id: str,
    *,
    reason: str,
    predecessor: str = "",
    signer: str = "",
    say: Say = lambda line: None,
) -> dict[str, str]:
    """A custodian's approval of a voiding with exactly this reason, in the phase that the round is in now.

    It is for a round that the custodian has pinned, and for no other that a server may name.

    Args:
        client: a connection for the custodian's account.
        keys: the custodian's keys.
        round_id: the round, or a prefix of its id.
        reason: exactly as the signer will give it.
        predecessor: likewise.
        signer: the custodian who signs the record; empty: the organizer does.
        say: told what is agreed to, before it is signed.

    Returns:
        {by, sig}, which go into the record, and what they cover: {round, reason, phase, signer}, predecessor where given.

    Raises:
        Refusal: round_unknown, where it acknowledged none; log_inconsistent, signature_invalid, phase_wrong.
    """
    state = _standing(client, keys, pinned(keys, round_id))
    _require_custodian(state, keys)
    by = _signer(state, signer)
    fields = _fields(state, reason=reason, predecessor=predecessor)
    say(f"{state.id} is {state.phase}: this approval is good in that phase only, under a record that {by} signs")
    signed = records.approve("RoundVoided", state.id, fields, by=by, key=keys.ed25519)
    return {**signed, **fields, "round": state.id, "signer": by}


def void_together(
    client: Client,
    keys: Keys,
    round_id: str,
    *,
    reason: str,
    predecessor: str = "",
    approvals: Sequence[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """Void a round for its custodians, without the organizer: these keys sign, and with them k have agreed; {index, record, …}.

    Args:
        client: a connection for the custodian's account.
        keys: the custodian's keys.
        round_id: the round, or a prefix of its id.
        reason: public, for good.
        predecessor: the round that this one followed, if any.
        approvals: what `approve_void` gave the others, with this custodian as the signer.

    Raises:
        Refusal: round_unknown, log_inconsistent, signature_invalid, guard_failed, phase_wrong.
    """
    state = _standing(client, keys, pinned(keys, round_id))
    _require_custodian(state, keys)
    fields = _fields(state, reason=reason, predecessor=predecessor)
    given = approvals_of(approvals, state.id, fields, signer=keys.public)
    if given:
        fields = {**fields, "approvals": given}
    return client.post(state.id, "void", records.sign("RoundVoided", state.id, fields, key=keys.ed25519))


def approvals_of(
    given: Sequence[Mapping[str, str]], round_id: str, fields: Mapping[str, Any], *, signer: str
) -> list[dict[str, str]]:
    """The approvals as a record holds them.

    Raises:
        Refusal: signature_invalid, naming what one of them covers otherwise; file_unreadable.
    """
    covers = {"round": round_id, "predecessor": "", **fields, "signer": signer}
    result = []
    for approval in given:
        if not isinstance(approval, Mapping) or not {"by", "sig"} <= set(approval):
            raise Refusal("file_unreadable", "an approval is an object with by and sig; this is something else")
        for name, value in covers.items():
            if name in approval and approval[name] != value:
                raise Refusal(
                    "signature_invalid",
                    f"the approval by {approval['by']} is for the {name} {approval[name]!r}, the voiding has {value!r}",
                    hint="ask that custodian for a new one: acclimate custodian approve-void ROUND --reason …",
                )
        result.append({"by": approval["by"], "sig": approval["sig"]})
    return result


def _standing(client: Client, keys: Keys, pin: Pin) -> Round:
    """Where the pinned round stands, by this machine's fold of the whole log."""
    source = Newest(Online(client))
    defined, competition = evidence.pinned_definition(source, pin)
    known = evidence.pin_of(keys, pin)
    history = read_history(source, defined, known=known)
    known.require_growth(history)
    return rounds.fold(history.numbered, competition)


def _fields(state: Round, *, reason: str, predecessor: str) -> dict[str, Any]:
    if "RoundVoided" not in rounds.allowed(state.phase):
        raise Refusal("phase_wrong", f"{state.id} is {state.phase}: nothing is left to void", hint="nothing was signed")
    return {"reason": reason, "phase": str(state.phase), **({"predecessor": predecessor} if predecessor else {})}


def _signer(state: Round, name: str) -> str:
    if not name:
        return str(state.defined["organizer"]["ed25519"])
    keys = {custodian["name"]: str(custodian["ed25519"]) for custodian in state.defined["custodians"]}
    if name not in keys:
        raise Refusal(
            "signature_invalid", f"{name!r} is no custodian of {state.id}; they are {', '.join(keys)}", hint="name one"
        )
    return keys[name]


def _require_custodian(state: Round, keys: Keys) -> None:
    if state.custodian_index(keys.public) is None:
        raise Refusal(
            "signature_invalid",
            f"the keys in {keys.folder} are none of the custodians of {state.id}",
            hint="name the custodian's key folder: --keys DIR",
        )
