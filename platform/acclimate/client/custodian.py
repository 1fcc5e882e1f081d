"""What a custodian does: acknowledge a share, look at the evidence, release the share. How it agrees to a voiding: voiding.py.

A custodian trusts its own machine only. The one document that leaves it before a release says of itself, inside its envelope, that
it is a rehearsal's. What it once saw of the log is pinned in `pins.json` of its key folder; before a release it reads the whole
log again, from a server or a mailed file, and its own fold of the records decides, not the server's word (evidence.py). The share is
decrypted for the release after every check has passed, and is kept nowhere but in the answer that was asked for.
"""

import base64
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from acclimate import custody, files
from acclimate.client import evidence
from acclimate.client.connection import Client, Progress
from acclimate.client.evidence import Check, Failed, Status
from acclimate.client.folder import DOCUMENT_FILE
from acclimate.client.history import Known, Online, Source, definition_digest, of_index, read_history
from acclimate.client.pins import Pin, keep, kept_envelope, pinned, require_same_seal
from acclimate.client.requests import Answer
from acclimate.keys import Keys
from acclimate.quorum import Quorum
from acclimate_competitions import records, rounds
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Round
from acclimate_competitions.records import Record

__all__ = ["Check", "Released", "acknowledge", "answer", "inspect", "pinned", "release", "send"]

Show = Callable[[Check], None]
_UNANSWERED = frozenset({"server_unreachable", "busy", "database_unreachable", "token_invalid", "role_missing"})


@dataclass(frozen=True)
class Released:
    """A released share: its round and index, the log index of ShareReleased, and what was checked before."""

    round: str
    share: int
    index: int
    checks: tuple[Check, ...]


def acknowledge(
    client: Client,
    keys: Keys,
    round_id: str,
    *,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Show that the custodian can decrypt its share, of the real seal and of the rehearsal; {index, record, …}.

    1. RoundDefined and the definition agree with the round's id, which has the digits that bind it.
    2. The log up to a signed checkpoint, cosigned by the quorum that the round asks for, holds this RoundDefined and HoldoutSealed; the log
       is the one that the folder keeps the key of; the round's records fold. These keys are a custodian's, with the recipients that its own
       custodian.json names. No other round showed the seal before, in this log or to this custodian.
    3. The real envelope opens, and its document is the committed one, a share of this round and this seal. It is not sent.
    4. The rehearsal's envelope opens likewise; its document is sent only because it says that it is a rehearsal's. What the
       server says of the rehearsal's seal proves nothing: nobody signed it.
    5. RoundDefined, log key, organizer key, checkpoint and seal are pinned, and the envelope is kept.
    6. ShareAcknowledged is signed and sent.

    Args:
        client: a connection for the custodian's account.
        keys: the custodian's keys, with its age identity.
        round_id: the round, or a prefix of its id.
        say: told, before anything is signed or sent, what the acknowledgement is of.
        progress: told (log entries read, of how many).

    Raises:
        Refusal: signature_invalid, phase_wrong, rehearsal_missing, share_false, share_unreadable, log_inconsistent, quorum_missing, …
    """
    # 1
    source = Online(client, progress)
    defined, competition = source.definition(round_id)
    round_id = defined.round
    _require_binding_id(defined)
    # 2
    history = read_history(source, defined, known=Known.of(keys), holding="HoldoutSealed")
    evidence.require_quorum(history, defined)
    state = rounds.fold(history.numbered, competition)
    index = _own_index(state, keys)
    _require_own_entry(state, keys, index=index)
    for line in _described(state):
        say(line)
    assert state.seal is not None
    require_same_seal(keys, round_id, seal=state.seal["seal"])
    evidence.require_own_seal(history, state)
    # 3
    identity = _identity(keys)
    given = client.envelopes(round_id)
    real = of_index(given["real"]["envelopes"], index)
    document = _open(real, state.seal.fields, defined, index=index, identity=identity)
    # 4
    if not given.get("rehearsal"):
        raise Refusal(
            "rehearsal_missing",
            f"the organizer of {round_id} has not handed in the rehearsal's seal yet",
            hint="acknowledge again once they have",
        )
    shown = of_index(given["rehearsal"]["envelopes"], index)
    dummy = _open(shown, given["rehearsal"]["fields"], defined, index=index, identity=identity, rehearsal=True)
    client.rehearsal_share(round_id, index=index, document=base64.b64encode(dummy).decode())
    # 5
    pin = Pin(
        round=round_id,
        defined=definition_digest(defined),
        log=defined["log"],
        organizer=defined["organizer"]["ed25519"],
        checkpoint=history.note,
        seal=state.seal["seal"],
        index=index,
        commitment=custody.document_digest(document),
    )
    keep(keys, pin, envelope=real)
    # 6
    fields = {"seal": pin.seal, "index": index, "commitment": pin.commitment}
    return client.post(
        round_id, "acknowledgements", records.sign("ShareAcknowledged", round_id, fields, key=keys.ed25519)
    )


def release(client: Client, keys: Keys, round_id: str, *, now: datetime, show: Show = lambda check: None) -> Released:
    """Release the custodian's share, if everything that its own machine can check allows it.

    Args:
        client: a connection for the custodian's account.
        keys: the custodian's keys, with its age identity.
        round_id: the round, or a prefix of its id.
        now: the time by this machine's clock.
        show: told of each check as it passes.

    Raises:
        Refusal: of the first check that does not hold; nothing was decrypted or sent then.
    """
    made, checks = answer(Online(client), keys, round_id, now=now, show=show)
    return send(client, made, checks=checks)


def answer(
    source: Source, keys: Keys, round_id: str, *, now: datetime, show: Show = lambda check: None
) -> tuple[Answer, tuple[Check, ...]]:
    """A custodian's release, made and not sent, and what was checked before; as `release`, from any source of evidence.

    Raises:
        Refusal: of the first check that does not hold; nothing was decrypted then. share_unreadable, share_false, share_missing, where
            neither the source nor the key folder has the envelope.
    """
    pin = pinned(keys, round_id)
    passed: list[Check] = []
    state: Round | None = None
    try:
        for check, folded in evidence.examine(source, keys, pin, now=now):
            passed.append(check)
            show(check)
            state = folded
        assert state is not None
        with evidence.checking("envelope"):
            document = _own_document(source, keys, pin, state)
    except Failed as failed:
        raise failed.refusal from failed
    fields = {"seal": pin.seal, "index": pin.index, "document": custody.document_digest(document)}
    record = records.sign("ShareReleased", pin.round, fields, key=keys.ed25519)
    return Answer(pin.round, pin.index, record, document), tuple(passed)


def _own_document(source: Source, keys: Keys, pin: Pin, state: Round) -> bytes:
    assert state.seal is not None
    named = state.seal["shares"][pin.index - 1]["envelope"]
    # What was opened at the acknowledgement is good, whatever a server or a mail has in its place.
    envelope = None
    with contextlib.suppress(Refusal):
        envelope = _good(kept_envelope(keys, pin.round), named)
    envelope = envelope or source.envelope(pin.round, pin.index) or kept_envelope(keys, pin.round)
    if envelope is None:
        raise Refusal(
            "share_missing",
            f"the envelope of share {pin.index} of {pin.round} is neither in what you were sent nor in {keys.folder}",
            hint="the organizer can make a request that holds it: acclimate round request ROUND --out FILE",
        )
    return _open(envelope, state.seal.fields, state.defined, index=pin.index, identity=_identity(keys))


def _good(envelope: dict[str, Any] | None, digest: str) -> dict[str, Any] | None:
    """The envelope, where it is the one that the seal names."""
    whole = envelope is not None and set(envelope) == {"index", "to", "main", "backup"}
    return envelope if whole and envelope is not None and custody.envelope_digest(envelope) == digest else None


def send(client: Client, made: Answer, *, checks: tuple[Check, ...] = ()) -> Released:
    """Hand in a release; sent twice it is the same release.

    Raises:
        Refusal: role_missing, signature_invalid, phase_wrong, share_false, server_unreachable.
    """
    try:
        told = client.release(made.round, made.record, document=base64.b64encode(made.document).decode())
    except Refusal as refusal:
        if refusal.code != "server_unreachable":
            raise
        raise Refusal(
            refusal.code,
            f"{refusal.sentence}; the share was sent, and may have been received: take it for released",
            hint="repeat the command until it is answered, since sent twice it is the same release; or see whether the log has it:"
            f" acclimate round records {made.round}",
        ) from refusal
    return Released(made.round, made.share, told["index"], checks)


def inspect(source: Source, keys: Keys, round_id: str, *, now: datetime) -> list[Check]:
    """What a release would check now, up to the first check that does not hold; nothing is decrypted or sent.

    Raises:
        Refusal: round_unknown; server_unreachable, busy, token_invalid: a server that does not answer says nothing about the round.
    """
    pin = pinned(keys, round_id)
    result: list[Check] = []
    try:
        released = False
        for check, state in evidence.examine(source, keys, pin, now=now):
            result.append(check)
            released = pin.index in state.released
        if released:
            told = f"share {pin.index} is released: the same release again changes nothing"
            result.append(Check("release", "NOT NEEDED", told))
    except Failed as failed:
        # Nothing is wrong with a round that is still running, or a witness that is down; a clock that disagrees is another matter.
        code = failed.refusal.code
        if code in _UNANSWERED:
            raise failed.refusal from failed
        waits = code == "quorum_missing" or (failed.name in evidence.WAITS and code == "too_early")
        over = failed.name == "phase" and code == "phase_wrong"
        status: Status = "NOT YET" if waits else "NOT NEEDED" if over else "FAILED"
        result.append(Check(failed.name, status, failed.refusal.sentence))
    return result


def _open(
    envelope: Mapping[str, Any],
    seal: Mapping[str, Any],
    defined: Record,
    *,
    index: int,
    identity: str,
    rehearsal: bool = False,
) -> bytes:
    of = custody.Split.of(defined, seal["seal"], rehearsal=rehearsal)
    if len(seal["shares"]) < index:
        raise Refusal("share_false", f"the seal has {len(seal['shares'])} shares, yours is share {index}")
    return custody.open_envelope(envelope, identity, share=seal["shares"][index - 1], of=of)


def _require_binding_id(defined: Record) -> None:
    """Refuse a round whose id is so short that its organizer may have made a second RoundDefined of the same id.

    Raises:
        Refusal: record_invalid.
    """
    if "id_digits" not in defined.fields:
        raise Refusal(
            "record_invalid",
            f"the id {defined.round} has 12 digits of its content's digest, {records.ID_DIGITS} are asked for",
            hint="sign nothing; ask the organizer to create the round with this version of acclimate",
        )


def _own_index(state: Round, keys: Keys) -> int:
    index = state.custodian_index(keys.public)
    if index is None:
        raise _not_a_custodian(state.id, keys)
    return index


def _require_own_entry(state: Round, keys: Keys, *, index: int) -> None:
    """Refuse a round that takes no acknowledgement any more, or deals this custodian's share to other recipients than its own.

    Raises:
        Refusal: phase_wrong, key_refused.
    """
    if index not in state.acknowledged:
        # Nobody reads terms of what can't be signed any more; what was acknowledged may be sent once more.
        rounds.require_allowed(state, "ShareAcknowledged")
    entry = state.defined["custodians"][index - 1]
    path = keys.folder / DOCUMENT_FILE
    if path.exists():
        own = files.read_json(path)
        wrong = [name for name in ("name", "age", "ed25519", "backup") if own.get(name) != entry[name]]
        said = ", ".join(f"{name} {entry[name]!r} for {own.get(name)!r}" for name in wrong)
    else:
        # The backup's identity may be the one at hand.
        mine = keys.age_recipient in (entry["age"], entry["backup"])
        said = "" if mine else f"age {entry['age']!r} for {keys.age_recipient!r}"
    if said:
        raise Refusal(
            "key_refused",
            f"{state.id} deals share {index} to other keys than yours: {said}",
            hint=f"nothing was signed; ask the organizer, and send {path} again",
        )


def _described(state: Round) -> Iterator[str]:
    """What an acknowledgement is of: round, dates, threshold, and who can open what."""
    defined = state.defined
    custodians = defined["custodians"]
    yield f"round {state.id}, defined by {defined['organizer']['ed25519']}"
    yield f"closes {defined['closes']}, at the latest {defined['closes_latest']}; shares by {defined['release_by']}"
    quorum = Quorum.of(defined.fields)
    names = ", ".join(witness.name for witness in quorum.witnesses)
    yield f"witnesses: {f'{quorum.needed} of {names} must see the log before you release' if quorum.needed else 'none'}"
    yield f"any {state.threshold} of {len(custodians)} shares open the holdout; they go to:"
    for custodian in custodians:
        yield f"  {custodian['name']}: {custodian['age']}, backup {custodian['backup'] or 'none'}"


def _not_a_custodian(round_id: str, keys: Keys) -> Refusal:
    return Refusal(
        "signature_invalid",
        f"the keys in {keys.folder} are none of the custodians of {round_id}",
        hint="name the custodian's key folder: --keys DIR",
    )


def _identity(keys: Keys) -> str:
    _ = keys.age_recipient  # refuses where there is no identity
    assert keys.age_identity is not None
    return keys.age_identity
