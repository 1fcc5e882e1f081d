"""Handing the log over to a new key: once no round is under way, by the operator, on the machine that has the key."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import insert, select, update

from acclimate import hand_overs, installation, log, log_key
from acclimate.checkpoints import Copies
from acclimate.config import Settings
from acclimate.sequencer import Sequencer
from acclimate.service import finding, identity, names
from acclimate.service.clockwork import TERMINAL
from acclimate.store import Store, Tx, log_checkpoints, log_entries, rounds, timestamp
from acclimate.store import installation as rows
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_competitions.records import Record, format_time

_PAGE = 2000
_SOON = timedelta(days=1)
_NAMED = 30_000
"""Characters of the ids that a record names."""
UNOPENED = "unopened"
"""In the place of a round's id: all rounds that have not opened yet."""


@dataclass(frozen=True)
class HandedOver:
    """A hand-over that is done.

    Attributes:
        hand_over: the hand-over itself.
        note: the checkpoint that holds it, signed by both keys.
        resumed: whether an earlier call had logged it, and was killed before the key's files were in place.
    """

    hand_over: hand_overs.HandOver
    note: str
    resumed: bool


def hand_over(
    store: Store, settings: Settings, *, reason: str, abandon: Sequence[str] = (), again: bool = False
) -> HandedOver:
    """Hand the log over to a new key. Killed at any moment and called again, it finishes, or begins anew where nothing was logged yet.

    1. A hand-over that was logged, but whose key or whose copies are not in place yet, is finished, and that is all.
    2. The log is what its checkpoints say, and every entry is signed by the old key.
    3. The successor's key is made.
    4. In one transaction: no round is under way but those that are abandoned; the record, the checkpoint over it by both keys, and the installation's key are written.
    5. The successor's file takes the old one's place.
    6. The checkpoint is copied to where restored databases are noticed.

    Args:
        store: the store.
        settings: say where the keys are.
        reason: public, for good.
        abandon: rounds under way that are given up with the old key, which the record then names: no custodian's client releases a share of
            such a round, and its audit fails. UNOPENED means every round that has not opened yet, however many somebody has defined.
        again: whether another hand-over is wanted less than a day after the last; else who was not sure that it had ended makes two.

    Raises:
        Refusal: conflict, where there was one within the last day; phase_wrong, round_unknown, record_invalid, name_invalid, other_installation, log_inconsistent, key_refused, no_space, busy, …
    """
    known = installation.check(store, settings)
    # 1
    if log_key.settle(settings.keys, known.origin, expected=known.log):
        with store.snapshot() as tx:
            done = _last(tx)
        return _copied(store, settings, done)
    old = identity.load(settings, store).signer
    copies = Copies.asking(settings, store.blobs, old.verifier)
    with store.snapshot() as tx:
        if tx.records(""):
            copies.check_signed(tx)
            # Of one long ago only its copies are put right: who hands over now wants another.
            if copies.complete(tx) and _is_recent(tx) and not again:
                return _last(tx)
        if not again:
            _require_long_ago(tx)
        given_up = _abandoned(tx, abandon)
        if UNOPENED in abandon:
            given_up += _unopened(tx, given_up)
        _check_rounds(tx, given_up)
    if given_up and reason.strip():
        reason = f"{reason} (abandoned: {_told(given_up)})"
    fields = {"old": old.vkey, "new": old.vkey, "reason": reason, "approvals": []}
    records.check_fields(hand_overs.TYPE, fields, signed=True)
    names.check(reason, what="the reason", longest=records.LONGEST_LIST)
    # 2
    sequencer = Sequencer(store, old, copies=copies)
    sequencer.start()
    sequencer.close()
    # 3
    new = log.Signer(old.origin, log_key.successor(settings.keys))
    # 4
    with store.transaction() as tx:
        _check_rounds(tx, given_up)
        done = _logged(tx, old, new, reason=reason)
    # 5
    log_key.settle(settings.keys, known.origin, expected=new.vkey)
    # 6
    return _copied(store, settings, done)


def logged(tx: Tx) -> list[tuple[int, str]]:
    """(log index, the checkpoint that both keys signed) of each hand-over, in the log's order."""
    return [(index, _note(tx, index + 1)) for index, _ in tx.records("")]


def _is_recent(tx: Tx) -> bool:
    found = tx.records("")
    return bool(found) and tx.now() - found[-1][1].at < _SOON


def _require_long_ago(tx: Tx) -> None:
    if _is_recent(tx):
        index, last = tx.records("")[-1]
        raise Refusal(
            "conflict",
            f"the log was handed over less than a day ago: log entry {index}, {format_time(last.at)}, to {last['new']} ({last['reason']})",
            hint="that one is done, and its key in place; for another one on the same day add --again",
        )


def _abandoned(tx: Tx, given: Sequence[str]) -> list[str]:
    """The ids of rounds that are given up: each is under way."""
    found = [finding.find(tx, name) for name in given if name != UNOPENED]
    over = [f"{state.id} is {state.phase}" for state in found if _is_over(state, tx.now())]
    if over:
        raise Refusal("phase_wrong", f"only a round under way is abandoned: {', '.join(over)}", hint="leave it out")
    return sorted({state.id for state in found})


def _unopened(tx: Tx, besides: Sequence[str]) -> list[str]:
    """The ids of all rounds, besides these, into which nobody could submit yet."""
    names = tx.execute(select(rounds.c.id)).scalars().all()
    now = tx.now()
    left = [tx.round(name) for name in names if name not in besides]
    return sorted(s.id for s in left if s.phase in (Phase.DRAFT, Phase.SEALED) and not _is_over(s, now))


def _told(given_up: Sequence[str]) -> str:
    """Their ids, as many as a record holds; of the rest how many there are, and a digest of them all."""
    shown = list(given_up)
    while sum(map(len, shown)) + 2 * len(shown) > _NAMED:
        shown.pop()
    left = len(given_up) - len(shown)
    rest = f", and {left} more; all {len(given_up)}: {digests.of_json(list(given_up))}" if left else ""
    return ", ".join(shown) + rest


def _check_rounds(tx: Tx, given_up: Sequence[str]) -> None:
    names = tx.execute(select(rounds.c.id).order_by(rounds.c.created, rounds.c.id)).scalars().all()
    now = tx.now()
    left = [tx.round(name) for name in names if name not in given_up]
    under_way = [f"{state.id} is {state.phase}" for state in left if not _is_over(state, now)]
    if under_way:
        raise Refusal(
            "phase_wrong",
            f"the log's key can't be handed over while a round is under way: {', '.join(under_way)}",
            hint="its custodians and entrants have pinned the key: wait until it is published, or have it voided by its organizer,"
            " or by its custodians (acclimate custodian void). Was the key stolen? --abandon ROUND gives the round up,"
            f" --abandon {UNOPENED} all that have not opened",
        )


def _is_over(state: Round, now: datetime) -> bool:
    """Whether nobody waits for anything of a round any more: ended, or never opened by its close, after which it can't be."""
    return state.phase in TERMINAL or (state.phase in (Phase.DRAFT, Phase.SEALED) and now >= state.closes)


def _logged(tx: Tx, old: log.Signer, new: log.Signer, *, reason: str) -> HandedOver:
    """Append the record, its checkpoint and the installation's new key."""
    if (found := tx.execute(select(rows.c.log)).scalar()) != old.vkey:
        raise Refusal("conflict", f"the log's key is {found} now, not {old.vkey}: another hand-over was first")
    tree = log.Tree()
    size = tx.size()
    for start in range(0, size, _PAGE):
        for entry in tx.entries(start, min(start + _PAGE, size)):
            tree.append(log.leaf_hash(entry))
    _check_signed(tx, tree, old)
    request = hand_overs.request(old, new, reason=reason)
    at = tx.now() if size == 0 else max(tx.now(), records.parse(tx.entry(size - 1)).at)
    record = Record(hand_overs.TYPE, "", at, request["fields"], by=request["by"], sig=request["sig"])
    made, data = hand_overs.check(record, index=size), record.encode()
    tx.execute(insert(log_entries), {"index": size, "round": "", "type": record.type, "data": data})
    tree.append(log.leaf_hash(data))
    note = log.sign_note(log.checkpoint(old.origin, size + 1, tree.root()), old, new)
    tx.execute(insert(log_checkpoints), {"size": size + 1, "note": note, "at": timestamp(tx)})
    tx.execute(update(rows).values(log=new.vkey))
    return HandedOver(made, note, resumed=False)


def _check_signed(tx: Tx, tree: log.Tree, old: log.Signer) -> None:
    query = select(log_checkpoints.c.note).order_by(log_checkpoints.c.size.desc()).limit(1)
    if (note := tx.execute(query).scalar()) is None:
        return
    signed = log.open_checkpoint(note, old.verifier).checkpoint
    if signed.size > len(tree) or tree.root(signed.size) != signed.root:
        raise Refusal(
            "log_inconsistent",
            f"the last checkpoint holds {signed.size} entries with root {base64.b64encode(signed.root).decode()}, the stored log of"
            f" {len(tree)} entries has another beginning",
            hint="the database was changed; nothing is handed over until it is put right",
        )


def _last(tx: Tx) -> HandedOver:
    index, record = tx.records("")[-1]
    return HandedOver(hand_overs.check(record, index=index), _note(tx, index + 1), resumed=True)


def _note(tx: Tx, size: int) -> str:
    return str(tx.execute(select(log_checkpoints.c.note).where(log_checkpoints.c.size == size)).scalar_one())


def _copied(store: Store, settings: Settings, done: HandedOver) -> HandedOver:
    copies = Copies(store.blobs, settings.data, done.hand_over.new)
    copies.keep_hand_over(done.note)
    copies.keep(done.note)
    return done
