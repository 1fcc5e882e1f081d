"""What a custodian's own machine checks before a share leaves it, whether the evidence comes from a server or in a mailed file.

A custodian trusts its own machine and its pin, and of the rest only what follows from signatures: the log's, the witnesses', the
actors'. The checks are the same functions on both ways; a Source only says where bytes come from.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol

from acclimate import hand_overs, log
from acclimate.client.connection import Client, Progress
from acclimate.client.definitions import definition_of
from acclimate.client.folder import kept_log_keys
from acclimate.client.pins import Pin, other_rounds_seal
from acclimate.hand_overs import Chain
from acclimate.keys import Keys
from acclimate.quorum import Quorum
from acclimate_competitions import digests, records, rounds
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_competitions.records import Record, format_time

CHECKPOINT_PATIENCE = 5.0
AHEAD_OF_CLOCK = timedelta(minutes=10)
"""How far a record's time may be ahead of this machine's clock: people's clocks are off by minutes."""
AHEAD_OF_WITNESSES = timedelta(minutes=5)
"""How far a record's time may be ahead of the time by which the quorum saw it; as an audit has it (verify/witnesses.py)."""
AWAITED = ("RoundClosed", "PreparationFinished")
"""Records that must be in the log before a release."""
WAITS = frozenset({*AWAITED, "audits"})
"""Checks that wait for something, and say nothing against anybody while it has not come."""
_CONTRADICTIONS = frozenset(
    "log_inconsistent seal_mismatch share_false proof_invalid signature_invalid record_invalid not_canonical guard_failed".split()
)
_LATE = "a witness is late or down: repeat it in some minutes; if it stays so, tell the server's operator which one"
_COMES = {
    "HoldoutSealed": "the organizer has not sealed the holdout yet, or the log is not cosigned yet: wait for the organizer's mail, and repeat it"
}
_ALARM = "don't release: keep the key folder as it is, and phone the other custodians and the organizer"


Status = Literal["ok", "NOT YET", "NOT NEEDED", "FAILED", "NOT CHECKED"]


@dataclass(frozen=True)
class Check:
    """One thing that was checked, in words."""

    name: str
    status: Status
    detail: str


class Failed(Exception):
    """A check that does not hold: its name, and the refusal that says why."""

    def __init__(self, name: str, refusal: Refusal) -> None:
        super().__init__(f"{name}: {refusal.sentence}")
        self.name, self.refusal = name, refusal


class Source(Protocol):
    """Where the evidence comes from."""

    def definition(self, round_id: str) -> tuple[Record, Competition]:
        """RoundDefined and definition of a round, checked against each other and the round's id."""

    def checkpoint(self, defined: Record) -> str:
        """The newest checkpoint, with the cosignatures of the quorum that the round asks for; unverified."""

    def newest(self) -> str | None:
        """The newest checkpoint, whoever cosigned it; unverified. None where the source has no other."""

    def entries(self, size: int) -> Iterator[bytes]:
        """The first entries of the log, so many of them."""

    def envelope(self, round_id: str, index: int) -> dict[str, Any] | None:
        """The envelope of a share, unverified; None where the source has none."""


@dataclass(frozen=True)
class Online:
    """A server as the source.

    Attributes:
        client: a connection to it.
        progress: told (entries read, of how many).
    """

    client: Client
    progress: Progress | None = None

    def definition(self, round_id: str) -> tuple[Record, Competition]:
        """See Source."""
        return definition_of(self.client, round_id)

    def checkpoint(self, defined: Record) -> str:
        """See Source."""
        if defined["quorum"] == 0:
            return self.client.checkpoint()
        return self.client.checkpoint(cosigned=True, round_id=defined.round)

    def newest(self) -> str | None:
        """See Source."""
        return self.client.checkpoint()

    def entries(self, size: int) -> Iterator[bytes]:
        """See Source."""
        for number, entry in enumerate(self.client.entries(start=0, end=size), start=1):
            if self.progress is not None:
                self.progress(number, size)
            yield entry

    def envelope(self, round_id: str, index: int) -> dict[str, Any] | None:
        """See Source."""
        return of_index(self.client.envelopes(round_id)["real"]["envelopes"], index)


@dataclass(frozen=True)
class History:
    """The log up to a checkpoint, read and hashed by the client itself.

    Attributes:
        note: the signed checkpoint.
        entries: the log's entries up to it, as they were hashed.
        hashes: the leaf hash of each entry.
        numbered: the round's records with their log indices.
        chain: the log's keys, by the hand-overs among the entries.
        seals: seal id -> round, of each seal's first HoldoutSealed.
    """

    note: str
    entries: list[bytes]
    hashes: list[bytes]
    numbered: list[tuple[int, Record]]
    chain: Chain
    seals: dict[str, str]


def of_index(envelopes: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """The one envelope of a share.

    Raises:
        Refusal: share_false.
    """
    found = [envelope for envelope in envelopes if envelope["index"] == index]
    if len(found) != 1:
        raise Refusal("share_false", f"there are {len(found)} envelopes for share {index}, expected 1")
    return found[0]


def read_history(source: Source, defined: Record, *, holding: str = "", size: int = 0) -> History:
    """Read the log up to its newest checkpoint, whose signature and root are checked here.

    Args:
        source: where it is read from.
        defined: the round's RoundDefined, which names the log's key.
        holding: a record type of the round that the checkpoint must cover; waited for during CHECKPOINT_PATIENCE seconds.
        size: how many entries it must cover at least; waited for likewise.

    Raises:
        Refusal: proof_invalid; log_inconsistent; phase_wrong, where the log has no such record, or not so many entries.
    """
    until, history = time.monotonic() + CHECKPOINT_PATIENCE, None
    while True:
        note = source.checkpoint(defined)
        # What was read once is read again only where the log has grown.
        if history is None or _size(note) != len(history.entries):
            history = _read(source, defined, note)
        there = not holding or any(record.type == holding for _, record in history.numbered)
        if there and len(history.entries) >= size:
            return history
        if time.monotonic() > until:
            seen = f"the newest checkpoint{' that the quorum cosigned' if defined['quorum'] else ''}"
            late = behind(source, defined, history)
            lacks = f"not log entry {size - 1}" if there else f"no {holding} of {defined.round}"
            raise Refusal(
                "phase_wrong",
                f"{seen} has {len(history.hashes)} entries, and {lacks} yet" + _also(late),
                hint=_LATE if late else _COMES.get(holding, f"acclimate status {defined.round} --keys DIR shows when"),
            )
        time.sleep(0.2)


def behind(source: Source, defined: Record, history: History) -> str:
    """What the server shows beyond the history that the round's quorum has seen, in words; empty where that is all.

    It explains why the round stands further back here than on the server's own pages. Nothing in it is verified, and nothing is decided by it.
    """
    note = source.newest() if defined["quorum"] else None
    if note is None or (size := _size(note)) <= len(history.hashes):
        return ""
    quorum = Quorum.of(defined.fields)
    at = quorum.at(history.chain.open(history.note, quorum.witnesses))
    signed = {(signature.name, signature.key_id) for signature in log.parse_note(note).signatures}
    late = [witness.name for witness in quorum.witnesses if (witness.name, witness.key_id) not in signed]
    when = f", {format_time(at)} or later" if at is not None else ""
    return (
        f"{quorum.needed} of {len(quorum.witnesses)} witnesses must have seen a record, and they have seen {len(history.hashes)} of the"
        f" {size} log entries that the server shows{when}; not yet the newest: {', '.join(late) or 'none of them'}"
    )


def _also(late: str) -> str:
    return f"; {late}" if late else ""


def _size(note: str) -> int:
    return log.parse_checkpoint(log.parse_note(note).text).size


def _read(source: Source, defined: Record, note: str) -> History:
    entries = list(source.entries(_size(note)))
    # The round's own key, or one to which it was handed over once the round was done.
    chain = hand_overs.chain(entries, log.parse_vkey(defined["log"]))
    checkpoint = chain.open(note).checkpoint
    hashes = [digests.leaf_hash(data) for data in entries]
    parsed = [(index, records.parse_entry(data, index)) for index, data in enumerate(entries)]
    numbered = [(index, record) for index, record in parsed if record.round == defined.round]
    seals = {record["seal"]: record.round for _, record in reversed(parsed) if record.type == "HoldoutSealed"}
    if len(hashes) != checkpoint.size or digests.root_of_hashes(hashes) != checkpoint.root:
        raise Refusal(
            "log_inconsistent",
            f"the log's {len(hashes)} entries do not hash to the root of its checkpoint of {checkpoint.size}",
        )
    # Quorum, custodians and dates are read from the RoundDefined that was shown: it must be the log's own.
    if numbered and numbered[0][1].encode() != defined.encode():
        raise Refusal(
            "log_inconsistent",
            f"the RoundDefined of {defined.round} that was shown is {definition_digest(defined)}, log entry {numbered[0][0]}"
            f" is {definition_digest(numbered[0][1])}",
            hint="somebody shows you other terms than everybody else: sign nothing, and phone the others",
        )
    return History(note, entries, hashes, numbered, chain, seals)


def definition_digest(defined: Record) -> str:
    """The digest of RoundDefined as it stands in the log: more than the round's id says of it."""
    return digests.of_bytes(defined.encode())


def require_kept_log(keys: Keys, history: History, defined: Record) -> None:
    """Refuse another log than the one whose key the folder keeps since it registered; a hand-over of the key is followed.

    Raises:
        Refusal: log_inconsistent.
    """
    kept = kept_log_keys(keys.folder)
    if kept and not {key.text() for key in history.chain.keys} & set(kept):
        raise Refusal(
            "log_inconsistent",
            f"round {defined.round} is of the log {defined['log']}, {keys.folder} keeps {', '.join(kept)}",
            hint="ask the operator, and the others, before you go on",
        )


def require_own_seal(history: History, state: Round) -> None:
    """Refuse a seal that another round of the log showed before.

    Whoever copies it afterwards holds up nothing: a share says for which round it is.

    Raises:
        Refusal: seal_mismatch.
    """
    assert state.seal is not None
    first = history.seals[state.seal["seal"]]
    if first != state.id:
        raise other_rounds_seal(state.id, seal=state.seal["seal"], other=first)


def require_quorum(history: History, defined: Record) -> log.SignedCheckpoint:
    """The history's checkpoint, which the quorum of the round's witnesses cosigned.

    Raises:
        Refusal: proof_invalid, naming the witness whose line does not verify; quorum_missing, naming those that did not sign.
    """
    quorum = Quorum.of(defined.fields)
    signed = history.chain.open(history.note, quorum.witnesses)
    if not quorum.reached(signed):
        raise Refusal(
            "quorum_missing",
            f"{len(signed.cosigned)} of {len(quorum.witnesses)} witnesses cosigned the checkpoint of {signed.checkpoint.size}"
            f" entries, {defined.round} asks for {quorum.needed}; missing: {', '.join(quorum.missing(signed))}",
            hint="a witness is down, or was shown another history: repeat it in an hour; if it stays so, phone the other custodians",
        )
    return signed


def examine(source: Source, keys: Keys, pin: Pin, *, now: datetime) -> Iterator[tuple[Check, Round]]:
    """Each check before a release, in order, with the round folded so far as it is known.

    1. RoundDefined is the pinned one, to the byte.
    2. The checkpoint is signed by the pinned log key, the entries hash to its root, and RoundDefined is among them.
    3. The log only grew since the pinned checkpoint.
    4. The round's records fold on this machine; organizer and seal are the pinned ones.
    5. The quorum of witnesses that the round asks for cosigned this checkpoint.
    6. RoundClosed is included. 7. PreparationFinished is included. 8. The drawn re-runs, if any, agree. No k shares were released yet.
    9. This machine's clock is past the close, and so were those of the quorum when they saw this history.
    10. No record is dated later than this machine's clock, nor than the quorum's when it saw the record.
    11. The seal commits to the share that this custodian decrypted when it acknowledged.

    Raises:
        Failed: of the first check that does not hold.
    """
    # 1
    with checking("round"):
        defined, competition = pinned_definition(source, pin)
        state = rounds.begin(defined, competition)
    yield Check("round", "ok", f"{pin.round} is the one acknowledged, by the organizer and log key pinned then"), state
    # 2
    with checking("log"):
        history = _read(source, defined, source.checkpoint(defined))
    count = len(history.hashes)
    yield Check("log", "ok", f"{count} entries hash to the checkpoint that the pinned log key signed"), state
    # 3
    with checking("consistency"):
        before = require_growth(history, pin)
    yield Check("consistency", "ok", f"the log only grew since the pinned checkpoint of {before} entries"), state
    # 4
    with checking("records"):
        state = rounds.fold(history.numbered, competition)
        if state.seal is None or state.seal["seal"] != pin.seal:
            raise Refusal("seal_mismatch", f"the log has another seal for {pin.round} than the acknowledged {pin.seal}")
        _require_one_key(history, state)
    yield Check("records", "ok", f"{len(history.numbered)} records fold to phase {state.phase} on this machine"), state
    # 5
    with checking("witnesses"):
        cosigned = require_quorum(history, defined)
    yield _witnessed(defined, cosigned), state
    # 6, 7, 8
    for check in _included(source, history, state, pin):
        yield check, state
    # 9
    with checking("clock"):
        yield _clock(state, cosigned, now=now), state
    # 10
    with checking("dates"):
        yield _dated(history, cosigned, defined, now=now), state
    # 11
    with checking("share"):
        share = state.seal["shares"][pin.index - 1]
        if share["commitment"] != pin.commitment or state.custodian_index(keys.public) != pin.index:
            raise Refusal("share_false", f"the seal commits to another share {pin.index} than the one acknowledged")
    yield Check("share", "ok", f"share {pin.index} is the one acknowledged, {pin.commitment}"), state


@contextlib.contextmanager
def checking(name: str) -> Iterator[None]:
    """What is refused inside fails this check; where evidence contradicts, with a hint that says not to release.

    Raises:
        Failed: of whatever was refused.
    """
    try:
        yield
    except Refusal as refusal:
        hint = refusal.hint or (_ALARM if refusal.code in _CONTRADICTIONS else "")
        raise Failed(name, Refusal(refusal.code, refusal.sentence, hint=hint, problems=refusal.problems)) from refusal


def pinned_definition(source: Source, pin: Pin) -> tuple[Record, Competition]:
    """RoundDefined and definition of the pinned round.

    Raises:
        Refusal: log_inconsistent, where the source has another round, log or organizer; as definition_of.
    """
    defined, competition = source.definition(pin.round)
    if defined.round != pin.round:
        raise Refusal("log_inconsistent", f"the server answers with {defined.round}, pinned is {pin.round}")
    if (defined["log"], defined["organizer"]["ed25519"]) != (pin.log, pin.organizer):
        raise Refusal("log_inconsistent", f"{pin.round} names another log or organizer than the pinned ones")
    if definition_digest(defined) != pin.defined:
        raise Refusal(
            "log_inconsistent",
            f"the RoundDefined of {pin.round} is {definition_digest(defined)}, pinned is {pin.defined}",
        )
    return defined, competition


def require_growth(history: History, pin: Pin) -> int:
    """The size of the pinned checkpoint, which the log must extend."""
    before = history.chain.open(pin.checkpoint).checkpoint
    if before.size > len(history.hashes) or digests.root_of_hashes(history.hashes[: before.size]) != before.root:
        raise Refusal(
            "log_inconsistent",
            f"the log of {len(history.hashes)} entries does not extend the pinned checkpoint of {before.size}",
            hint="the server shows another history than before: keep pins.json, and tell the other custodians",
        )
    return before.size


def _require_one_key(history: History, state: Round) -> None:
    """Refuse a hand-over of the log's key while the round is under way: an honest operator can't make one."""
    begun = history.numbered[0][0]
    for hand_over in history.chain.hand_overs:
        if hand_over.index > begun and state.phase not in (Phase.PUBLISHED, Phase.VOIDED):
            raise Refusal(
                "rotation_invalid",
                f"log entry {hand_over.index} hands the log over to {hand_over.new.text()} while {state.id} is {state.phase}",
                hint="the log's key changes between rounds only: don't release, and phone the organizer and the other custodians",
            )


def _witnessed(defined: Record, signed: log.SignedCheckpoint) -> Check:
    if defined["quorum"] == 0:
        return Check("witnesses", "NOT CHECKED", "the round declares no witnesses: times are the server's word")
    at = Quorum.of(defined.fields).at(signed)
    assert at is not None
    names = ", ".join(sorted(vkey.partition("+")[0] for vkey in signed.cosigned))
    return Check("witnesses", "ok", f"{names} saw the same history, {format_time(at)} or later")


def _included(source: Source, history: History, state: Round, pin: Pin) -> Iterator[Check]:
    at = {record.type: (index, record) for index, record in history.numbered}
    for kind in AWAITED:
        with checking(kind):
            if kind not in at:
                late = behind(source, state.defined, history)
                raise Refusal(
                    "too_early",
                    f"the log has no {kind} of {pin.round} yet; the round is {state.phase}" + _also(late),
                    hint=_LATE if late else f"acclimate status {pin.round} --keys DIR --watch shows when it has",
                )
        index, record = at[kind]
        yield Check(kind, "ok", f"log entry {index}, {format_time(record.at)}, count {record['count']}")
    if state.audits_due:
        with checking("audits"):
            _require_audits(state)
        yield Check("audits", "ok", f"{len(state.audited)} drawn preparations were made again, and agree")
    with checking("phase"):
        if state.phase == Phase.VOIDED:
            sentence = f"{pin.round} was voided; a share of it must not be released"
            raise Refusal("phase_wrong", sentence, hint="nothing is left to do; keep the share secret")
        if state.phase != Phase.PREPARED and pin.index not in state.released:
            raise Refusal(
                "phase_wrong",
                f"{pin.round} is {state.phase}: others' shares have opened it, yours is not needed",
                hint="nothing is left to do",
            )
    yield Check(
        "phase", "ok", f"the round is {state.phase}: {len(state.released)} of {state.threshold} shares are released"
    )


def _require_audits(state: Round) -> None:
    missing = rounds.audits_missing(state)
    if not missing:
        return
    if all(record["agrees"] for record in state.audited.values()):
        raise Refusal("too_early", f"{missing}; the second operator must finish first", hint="nothing is wrong; wait")
    raise Refusal(
        "guard_failed",
        f"{missing} with what the evaluator logged: the models may not have been prepared as declared",
        hint="don't release; phone the organizer and the other custodians",
    )


def _dated(history: History, signed: log.SignedCheckpoint, defined: Record, *, now: datetime) -> Check:
    """No record is of the future: neither of this machine's, nor of that of the quorum who had seen all of them."""
    index, last = history.numbered[-1]  # times only rise
    what = f"log entry {index}, {last.type}, is dated {format_time(last.at)}"
    if last.at > now + AHEAD_OF_CLOCK:
        raise Refusal(
            "too_early",
            f"{what}, this machine's clock says {format_time(now)}",
            hint="check this machine's clock; if it is right, the server dates records ahead: release nothing, and phone the"
            " other custodians and the organizer",
        )
    by = Quorum.of(defined.fields).by(signed)
    if by is not None and last.at > by + AHEAD_OF_WITNESSES:
        raise Refusal(
            "log_inconsistent",
            f"{what}, and the witnesses saw it by {format_time(by)}",
            hint="the server dates records ahead, or the witnesses' clocks are behind: release nothing, and phone the other"
            " custodians and the organizer",
        )
    whose = "this machine's clock or the witnesses'" if by is not None else "this machine's clock"
    return Check("dates", "ok", f"none of the {len(history.numbered)} records is dated ahead of {whose}")


def _clock(state: Round, signed: log.SignedCheckpoint, *, now: datetime) -> Check:
    closes, seen = format_time(state.closes), Quorum.of(state.defined.fields).at(signed)
    witnesses = f", the witnesses' clocks said {format_time(seen)} when they saw this history" if seen else ""
    said = f"the round closes {closes}, this machine's clock says {format_time(now)}{witnesses}"
    if now < state.closes:
        hint = "check this machine's clock; if it is right, the server closed the round too early"
        raise Refusal("too_early", said, hint=hint)
    if seen is not None and seen < state.closes:
        raise Refusal(
            "too_early", said, hint="wait, and repeat it: a later checkpoint must be cosigned after the close"
        )
    both = f", and so were the witnesses' when they saw this history, {format_time(seen)}" if seen else ""
    return Check("clock", "ok", f"this machine's clock is past the close, {closes}{both}")
