"""What a custodian does: acknowledge a share, look at the evidence, release the share, agree to a voiding.

A custodian trusts its own machine only. The one document that leaves it before a release says of itself, inside its envelope, that
it is a rehearsal's. What it once saw of the log is pinned in `pins.json` of its key folder; before a release it reads the whole
log again, and its own fold of the records decides, not the server's word. The share is decrypted for the release after every check has
passed, is sent, and is kept nowhere.
"""

import base64
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from acclimate import custody, log
from acclimate.client import folder as files
from acclimate.client.connection import Client
from acclimate.client.entrant import definition_of
from acclimate.client.folder import DOCUMENT_FILE, PINS_FILE
from acclimate.keys import Keys
from acclimate_competitions import digests, records, rounds
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_competitions.records import Record

CHECKPOINT_PATIENCE = 5.0
AWAITED = ("RoundClosed", "PreparationFinished")
"""Records that must be in the log before a release."""


@dataclass(frozen=True)
class Pin:
    """What a custodian holds a server to, since it acknowledged.

    Attributes:
        round: the round's id; it binds all of RoundDefined.
        log: the log's key.
        organizer: the organizer's public key.
        checkpoint: the signed note of the checkpoint seen.
        seal: the seal's id.
        index: the custodian's share.
        commitment: digest of the share document that was decrypted.
    """

    round: str
    log: str
    organizer: str
    checkpoint: str
    seal: str
    index: int
    commitment: str


@dataclass(frozen=True)
class Check:
    """One thing that a custodian checked, in words."""

    name: str
    status: Literal["ok", "NOT YET", "FAILED", "NOT CHECKED"]
    detail: str


@dataclass(frozen=True)
class History:
    """The log up to a checkpoint, read and hashed by the client itself.

    Attributes:
        note: the signed checkpoint.
        hashes: the leaf hash of each entry.
        numbered: the round's records with their log indices.
    """

    note: str
    hashes: list[bytes]
    numbered: list[tuple[int, Record]]


@dataclass(frozen=True)
class Released:
    """A released share: its round and index, the log index of ShareReleased, and what was checked before."""

    round: str
    share: int
    index: int
    checks: tuple[Check, ...]


Show = Callable[[Check], None]


class _Failed(Exception):
    """A check before a release that does not hold: its name, and the refusal that says why."""

    def __init__(self, name: str, refusal: Refusal) -> None:
        super().__init__(f"{name}: {refusal.sentence}")
        self.name, self.refusal = name, refusal


def acknowledge(
    client: Client, keys: Keys, round_id: str, *, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Show that the custodian can decrypt its share, of the real seal and of the rehearsal; {index, record, …}.

    1. RoundDefined and the definition agree with the round's id.
    2. The log up to a signed checkpoint holds HoldoutSealed; the round's records fold. These keys are a custodian's, with the
       recipients that its own custodian.json names.
    3. The real envelope opens, and its document is the committed one. It is not sent.
    4. The rehearsal's envelope opens likewise; its document is sent only because it says that it is a rehearsal's. What the
       server says of the rehearsal's seal proves nothing: nobody signed it.
    5. Log key, organizer key, checkpoint and seal are pinned.
    6. ShareAcknowledged is signed and sent.

    Args:
        client: a connection for the custodian's account.
        keys: the custodian's keys, with its age identity.
        round_id: the round, or a prefix of its id.
        say: told, before anything is signed or sent, what the acknowledgement is of.

    Raises:
        Refusal: signature_invalid, phase_wrong, rehearsal_missing, share_false, share_unreadable, log_inconsistent, …
    """
    # 1
    defined, competition = definition_of(client, round_id)
    round_id = defined.round
    # 2
    history = read_history(client, defined["log"], round_id=round_id, holding="HoldoutSealed")
    state = rounds.fold(history.numbered, competition)
    index = _own_index(state, keys)
    _require_own_entry(state, keys, index=index)
    for line in _described(state):
        say(line)
    assert state.seal is not None
    _agrees_with_pin(keys, round_id, seal=state.seal["seal"])
    # 3
    identity = _identity(keys)
    given = client.envelopes(round_id)
    document = _open(given["real"], state.seal.fields, index=index, identity=identity)
    # 4
    if not given.get("rehearsal"):
        raise Refusal(
            "rehearsal_missing",
            f"the organizer of {round_id} has not handed in the rehearsal's seal yet",
            hint="acknowledge again once they have",
        )
    rehearsal = given["rehearsal"]
    dummy = _open(rehearsal, rehearsal["fields"], index=index, identity=identity, rehearsal=True)
    client.rehearsal_share(round_id, index=index, document=base64.b64encode(dummy).decode())
    # 5
    pin = Pin(
        round=round_id,
        log=defined["log"],
        organizer=defined["organizer"]["ed25519"],
        checkpoint=history.note,
        seal=state.seal["seal"],
        index=index,
        commitment=custody.document_digest(document),
    )
    _keep(keys, pin)
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
    pin = pinned(keys, round_id)
    passed: list[Check] = []
    sealed: Record | None = None
    try:
        for check, state in _examine(client, keys, pin, now=now):
            passed.append(check)
            show(check)
            sealed = state.seal
    except _Failed as failed:
        raise failed.refusal from failed
    assert sealed is not None
    given = client.envelopes(pin.round)
    document = _open(given["real"], sealed.fields, index=pin.index, identity=_identity(keys))
    fields = {"seal": pin.seal, "index": pin.index, "document": custody.document_digest(document)}
    request = records.sign("ShareReleased", pin.round, fields, key=keys.ed25519)
    answer = client.release(pin.round, request, document=base64.b64encode(document).decode())
    return Released(pin.round, pin.index, int(answer["index"]), tuple(passed))


def inspect(client: Client, keys: Keys, round_id: str, *, now: datetime) -> list[Check]:
    """What a release would check now, up to the first check that does not hold; nothing is decrypted or sent."""
    pin = pinned(keys, round_id)
    result: list[Check] = []
    try:
        result.extend(check for check, _ in _examine(client, keys, pin, now=now))
    except _Failed as failed:
        # Nothing is wrong with a round that is still running; a clock that disagrees is another matter.
        waits = failed.name in AWAITED and failed.refusal.code == "too_early"
        result.append(Check(failed.name, "NOT YET" if waits else "FAILED", failed.refusal.sentence))
    return result


def approve_void(client: Client, keys: Keys, round_id: str, *, reason: str, predecessor: str = "") -> dict[str, str]:
    """A custodian's approval {by, sig} of a voiding with exactly this reason; the organizer adds it to RoundVoided.

    It is for a round that the custodian has pinned, and for no other that a server may name.

    Raises:
        Refusal: round_unknown, where it acknowledged none; log_inconsistent, signature_invalid.
    """
    defined, _ = _pinned_definition(client, pinned(keys, round_id))
    if keys.public not in [custodian["ed25519"] for custodian in defined["custodians"]]:
        raise _not_a_custodian(defined.round, keys)
    fields = {"reason": reason, **({"predecessor": predecessor} if predecessor else {})}
    return records.approve("RoundVoided", defined.round, fields, by=defined["organizer"]["ed25519"], key=keys.ed25519)


def pinned(keys: Keys, round_id: str) -> Pin:
    """The pin of a round, or of the only one whose id begins with round_id.

    Raises:
        Refusal: round_unknown, where the custodian acknowledged none.
    """
    path = keys.folder / PINS_FILE
    stored = files.read_json(path) if path.exists() else {}
    found = [name for name in stored if name == round_id] or [name for name in stored if name.startswith(round_id)]
    if len(found) != 1:
        raise Refusal(
            "round_unknown",
            f"{path} pins {'several rounds that begin' if found else 'no round that begins'} with {round_id!r}",
            hint="a custodian acknowledges first: acclimate custodian ack ROUND",
        )
    return Pin(**stored[found[0]])


def read_history(client: Client, vkey: str, *, round_id: str, holding: str = "") -> History:
    """Read the log up to its newest checkpoint, whose signature and root are checked here.

    Args:
        client: a connection to the log's server.
        vkey: the log's key, as text.
        round_id: whose records to parse.
        holding: a record type of the round that the checkpoint must cover; waited for during CHECKPOINT_PATIENCE seconds.

    Raises:
        Refusal: proof_invalid; log_inconsistent; phase_wrong, where the log has no such record.
    """
    until = time.monotonic() + CHECKPOINT_PATIENCE
    while True:
        history = _read_history(client, vkey, round_id)
        if not holding or any(record.type == holding for _, record in history.numbered):
            return history
        if time.monotonic() > until:
            raise Refusal(
                "phase_wrong", f"the log has no {holding} of {round_id} yet", hint=f"acclimate status {round_id}"
            )
        time.sleep(0.2)


def _read_history(client: Client, vkey: str, round_id: str) -> History:
    note = client.checkpoint()
    checkpoint = log.open_checkpoint(note, log.parse_vkey(vkey)).checkpoint
    hashes: list[bytes] = []
    numbered: list[tuple[int, Record]] = []
    for index, data in enumerate(client.entries(start=0, end=checkpoint.size)):
        hashes.append(digests.leaf_hash(data))
        record = records.parse(data)
        if record.round == round_id:
            numbered.append((index, record))
    if digests.root_of_hashes(hashes) != checkpoint.root:
        raise Refusal(
            "log_inconsistent", f"the log's {checkpoint.size} entries do not hash to the root of its checkpoint"
        )
    return History(note, hashes, numbered)


def _examine(client: Client, keys: Keys, pin: Pin, *, now: datetime) -> Iterator[tuple[Check, Round]]:
    """Each check before a release, in order, with the round folded so far as it is known.

    1. RoundDefined is the pinned one: the round's id is made from its content.
    2. The checkpoint is signed by the pinned log key, and the entries hash to its root.
    3. The log only grew since the pinned checkpoint.
    4. The round's records fold on this machine; organizer and seal are the pinned ones.
    5. Witnesses.
    6. RoundClosed is included. 7. PreparationFinished is included, and no k shares were released yet.
    8. This machine's clock is past the close.
    9. The seal commits to the share that this custodian decrypted when it acknowledged.

    Raises:
        _Failed: of the first check that does not hold.
    """
    # 1
    with _checking("round"):
        defined, competition = _pinned_definition(client, pin)
        state = rounds.begin(defined, competition)
    yield Check("round", "ok", f"{pin.round} is the one acknowledged, by the organizer and log key pinned then"), state
    # 2
    with _checking("log"):
        history = _read_history(client, pin.log, pin.round)
    count = len(history.hashes)
    yield Check("log", "ok", f"{count} entries hash to the checkpoint that the pinned log key signed"), state
    # 3
    with _checking("consistency"):
        before = _require_growth(history, pin)
    yield Check("consistency", "ok", f"the log only grew since the pinned checkpoint of {before} entries"), state
    # 4
    with _checking("records"):
        state = _fold(history, competition)
        if state.seal is None or state.seal["seal"] != pin.seal:
            raise Refusal("seal_mismatch", f"the log has another seal for {pin.round} than the acknowledged {pin.seal}")
    yield Check("records", "ok", f"{len(history.numbered)} records fold to phase {state.phase} on this machine"), state
    # 5
    with _checking("witnesses"):
        _require_no_quorum(defined)
    yield Check("witnesses", "NOT CHECKED", "the round declares no witnesses: times are the server's word"), state
    # 6, 7
    for check in _included(history, state, pin):
        yield check, state
    # 8
    with _checking("clock"):
        if now < state.closes:
            raise Refusal(
                "too_early",
                f"the round closes {records.format_time(state.closes)}, this machine's clock says {records.format_time(now)}",
                hint="check this machine's clock; if it is right, the server closed the round too early",
            )
    yield Check("clock", "ok", f"this machine's clock is past the close, {records.format_time(state.closes)}"), state
    # 9
    with _checking("share"):
        share = state.seal["shares"][pin.index - 1]
        if share["commitment"] != pin.commitment or state.custodian_index(keys.public) != pin.index:
            raise Refusal("share_false", f"the seal commits to another share {pin.index} than the one acknowledged")
    yield Check("share", "ok", f"share {pin.index} is the one acknowledged, {pin.commitment}"), state


@contextlib.contextmanager
def _checking(name: str) -> Iterator[None]:
    try:
        yield
    except Refusal as refusal:
        raise _Failed(name, refusal) from refusal


def _pinned_definition(client: Client, pin: Pin) -> tuple[Record, Competition]:
    """RoundDefined and definition of the pinned round.

    Raises:
        Refusal: log_inconsistent, where the server has another round, log or organizer; as definition_of.
    """
    defined, competition = definition_of(client, pin.round)
    if defined.round != pin.round:
        raise Refusal("log_inconsistent", f"the server answers with {defined.round}, pinned is {pin.round}")
    if (defined["log"], defined["organizer"]["ed25519"]) != (pin.log, pin.organizer):
        raise Refusal("log_inconsistent", f"{pin.round} names another log or organizer than the pinned ones")
    return defined, competition


def _require_growth(history: History, pin: Pin) -> int:
    """The size of the pinned checkpoint, which the log must extend."""
    before = log.open_checkpoint(pin.checkpoint, log.parse_vkey(pin.log)).checkpoint
    if before.size > len(history.hashes) or digests.root_of_hashes(history.hashes[: before.size]) != before.root:
        raise Refusal(
            "log_inconsistent",
            f"the log of {len(history.hashes)} entries does not extend the pinned checkpoint of {before.size}",
            hint="the server shows another history than before: keep pins.json, and tell the other custodians",
        )
    return before.size


def _require_no_quorum(defined: Record) -> None:
    """Refuse a round that promises witnesses: this version can't verify their cosignatures, and silence is no evidence."""
    if defined["quorum"] > 0:
        raise Refusal(
            "guard_failed",
            f"the round asks for the cosignatures of {defined['quorum']} witnesses, which this version can't verify",
            hint="release with a version that verifies them",
        )


def _included(history: History, state: Round, pin: Pin) -> Iterator[Check]:
    at = {record.type: (index, record) for index, record in history.numbered}
    for kind in AWAITED:
        with _checking(kind):
            if kind not in at:
                raise Refusal(
                    "too_early",
                    f"the log has no {kind} of {pin.round} yet; the round is {state.phase}",
                    hint=f"acclimate status {pin.round} --keys DIR --watch shows when it has",
                )
        index, record = at[kind]
        yield Check(kind, "ok", f"log entry {index}, {records.format_time(record.at)}, count {record['count']}")
    with _checking("phase"):
        if state.phase == Phase.VOIDED:
            raise Refusal("phase_wrong", f"{pin.round} was voided; a share of it must not be released")
        if state.phase != Phase.PREPARED and pin.index not in state.released:
            raise Refusal(
                "phase_wrong", f"{pin.round} is {state.phase}: others' shares have opened it, yours is not needed"
            )
    yield Check(
        "phase", "ok", f"the round is {state.phase}: {len(state.released)} of {state.threshold} shares are released"
    )


def _fold(history: History, competition: Competition) -> Round:
    return rounds.fold(history.numbered, competition)


def _open(given: dict[str, Any], seal: Any, *, index: int, identity: str, rehearsal: bool = False) -> bytes:
    found = [envelope for envelope in given["envelopes"] if envelope["index"] == index]
    if len(found) != 1:
        raise Refusal("share_false", f"the server has {len(found)} envelopes for share {index}, expected 1")
    share = seal["shares"][index - 1]
    return custody.open_envelope(found[0], identity, share=share, seal=seal["seal"], rehearsal=rehearsal)


def _own_index(state: Round, keys: Keys) -> int:
    index = state.custodian_index(keys.public)
    if index is None:
        raise _not_a_custodian(state.id, keys)
    return index


def _require_own_entry(state: Round, keys: Keys, *, index: int) -> None:
    """Refuse a round that deals this custodian's share to other recipients than its own.

    Raises:
        Refusal: key_refused.
    """
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


def _agrees_with_pin(keys: Keys, round_id: str, *, seal: str) -> None:
    """Refuse another seal than the one that was acknowledged before."""
    path = keys.folder / PINS_FILE
    before = files.read_json(path).get(round_id) if path.exists() else None
    if before is not None and before["seal"] != seal:
        raise Refusal(
            "seal_mismatch", f"the log has seal {seal} for {round_id}, acknowledged before was {before['seal']}"
        )


def _keep(keys: Keys, pin: Pin) -> None:
    path = keys.folder / PINS_FILE
    stored = files.read_json(path) if path.exists() else {}
    # What was pinned first stays: a second acknowledgement must not move a custodian to another history.
    if pin.round not in stored:
        files.write_json(path, {**stored, pin.round: dataclasses.asdict(pin)})
