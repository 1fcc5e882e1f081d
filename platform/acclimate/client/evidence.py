"""What a custodian's own machine checks before a share leaves it, whether the evidence comes from a server or in a mailed file.

A custodian trusts its own machine and its pin, and of the rest only what follows from signatures: the log's, the witnesses', the
actors'. The checks are the same functions on both ways (history.py reads the log).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from acclimate import log
from acclimate.client.folder import PINS_FILE
from acclimate.client.history import LATE, History, Known, Source, also, behind, definition_digest, read, vouched
from acclimate.client.pins import Pin, other_rounds_seal
from acclimate.keys import Keys
from acclimate.quorum import Quorum
from acclimate_competitions import rounds
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_competitions.records import Record, format_time

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
    2. The checkpoint is signed by the pinned log key, and not behind the pinned one; only then so many entries are read. They hash to its root,
       and RoundDefined is among them.
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
    known = pin_of(keys, pin)
    with checking("log"):
        note = source.checkpoint(defined)
        shown = vouched(source, defined, note, known=known)
    with checking("consistency"):
        known.require_grown(shown)
    with checking("log"):
        history = read(source, defined, note)
    count = len(history.hashes)
    yield Check("log", "ok", f"{count} entries hash to the checkpoint that the pinned log key signed"), state
    # 3
    with checking("consistency"):
        before = known.require_growth(history)
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


def pin_of(keys: Keys, pin: Pin) -> Known:
    """What a custodian's folder knows of the log, by the pin of a round."""
    return Known.of(keys, seen=pin.checkpoint, where=str(keys.folder / PINS_FILE))


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
                    f"the log has no {kind} of {pin.round} yet; the round is {state.phase}" + also(late),
                    hint=LATE if late else f"acclimate status {pin.round} --keys DIR --watch shows when it has",
                )
        index, record = at[kind]
        yield Check(kind, "ok", f"log entry {index}, {format_time(record.at)}, count {record['count']}")
    if state.audits_due:
        with checking("audits"):
            _require_audits(state)
        yield _audited(state)
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


def _audited(state: Round) -> Check:
    """What the drawn re-runs show, all of which keep no share: of what the organizer gave up, nothing."""
    count, lost = len(state.drawn or ()), len(state.drawn_given_up)
    made = count - lost
    if not lost:
        said = "preparation was made again, and agrees" if count == 1 else "preparations were made again, and agree"
        return Check("audits", "ok", f"{count} drawn {said}")
    again = f"{made} of {count} drawn preparations were made again{', and agree' if made else ''}"
    gone = "was" if lost == 1 else "were"
    return Check(
        "audits",
        "NOT CHECKED",
        f"{again}; {lost} {gone} given up by the organizer, as the evaluator says, and not made again",
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
    index, last = _latest(history)
    what = f"log entry {index}, {last.type}, is dated {format_time(last.at)}"
    if last.at > now + AHEAD_OF_CLOCK:
        raise Refusal(
            "too_early",
            f"{what}, this machine's clock says {format_time(now)}",
            hint="check this machine's clock; if it is right, the server dates records ahead: release nothing, and phone the"
            " other custodians and the organizer",
        )
    require_seen(history, signed, defined)
    whose = "this machine's clock or the witnesses'" if Quorum.of(defined.fields).needed else "this machine's clock"
    return Check("dates", "ok", f"none of the {len(history.numbered)} records is dated ahead of {whose}")


def _latest(history: History) -> tuple[int, Record]:
    """The record of the round with the latest date: not the last one, wherever a log's times might run back."""
    return max(history.numbered, key=lambda entry: entry[1].at)


def require_seen(history: History, signed: log.SignedCheckpoint, defined: Record) -> None:
    """Refuse a record of the round that is dated after the quorum of witnesses saw it.

    Raises:
        Refusal: log_inconsistent.
    """
    (index, last), by = _latest(history), Quorum.of(defined.fields).by(signed)
    if by is not None and last.at > by + AHEAD_OF_WITNESSES:
        raise Refusal(
            "log_inconsistent",
            f"log entry {index}, {last.type}, is dated {format_time(last.at)}, and the witnesses saw it by {format_time(by)}",
            hint="the server dates records ahead, or the witnesses' clocks are behind: release and sign nothing, and phone the"
            " custodians and the organizer",
        )


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
