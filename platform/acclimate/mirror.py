"""A mirror of a log: all of its entries, and the newest checkpoint over them, kept and checked by somebody who does not run it.

    DIR/entries.jsonl           a line an entry: its bytes without the newline are the leaf's data
    DIR/checkpoint              the newest signed checkpoint, cosignatures included
    DIR/checkpoints/<size>      of each hand-over of the log's key, signed by both keys
    DIR/log.vkey                the key that the mirror was begun with; kept with the first checkpoint that it signed
    DIR/forks/<size>-<root>     checkpoints that contradict each other; never removed

Lines after the checkpoint's size are fetched and not vouched for yet: the next call goes on from them, and drops them where the
checkpoint that it comes to says otherwise. The checkpoint is written last. So whatever moment a call is killed in, what is there verifies.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from acclimate import files, hand_overs, locks, log, notes
from acclimate.client import key_chain
from acclimate.client.connection import Client
from acclimate.client.history import opened as opened_checkpoint
from acclimate.hand_overs import Chain
from acclimate.log_keys import LogKeys
from acclimate_competitions import reading
from acclimate_competitions.errors import Refusal

ENTRIES, CHECKPOINT, CHECKPOINTS, KEY, FORKS = "entries.jsonl", "checkpoint", "checkpoints", "log.vkey", "forks"
_AGAIN = "keep its checkpoint; mirror the log again into another folder, and compare"
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Followed:
    """What a mirror holds.

    Attributes:
        chain: the log's keys, from the first one on.
        checkpoint: what was signed last.
        new: how many entries this call added.
    """

    chain: Chain
    checkpoint: log.Checkpoint
    new: int


@dataclass
class Kept:
    """A mirror's folder, held by this process.

    Attributes:
        folder: the folder.
        known: the key that it was begun with.
        tree: over all lines, those not vouched for included.
        note: the newest checkpoint; empty before the first.
        signed: what it says.
    """

    folder: Path
    known: log.Verifier
    tree: log.Tree
    note: str = ""
    signed: log.Checkpoint | None = None

    @property
    def size(self) -> int:
        """How many entries are vouched for."""
        return self.signed.size if self.signed is not None else 0


@contextmanager
def opened(folder: Path, known: str | None) -> Iterator[Kept]:
    """The mirror in a folder, made where there is none, for this process alone.

    Args:
        folder: where it is.
        known: the log's key, got elsewhere; may be left out where the folder has one.

    Raises:
        Refusal: config_invalid, where the folder has no key and none is given; conflict, where it has another; busy; log_inconsistent,
            where what it holds is not what was signed; file_unreadable, no_space.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = locks.take(folder / ".lock")
    except OSError as error:
        raise files.failed(folder, error) from error
    if held is None:
        raise Refusal(
            "busy", f"another process follows the log into {folder}", hint="wait for it, or name another folder"
        )
    with held:
        key = _known(folder, known)
        _whole_lines(folder / ENTRIES)
        yield _load(folder, key)


def begun_with(folder: Path) -> str | None:
    """The key that a mirror was begun with; None where there is no mirror yet."""
    return _read(folder / KEY).strip() if (folder / KEY).is_file() else None


def check(folder: Path, known: str | None = None, *, keys: LogKeys | None = None) -> Followed:
    """Check what a mirror holds, offline.

    Args:
        folder: the mirror's.
        known: a key that must be among the log's; None for whatever the mirror was begun with.
        keys: the log's keys, where it is known which were given up, and where.

    Raises:
        Refusal: file_unreadable, log_inconsistent, proof_invalid, rotation_invalid.
    """
    if not (folder / KEY).exists() or not (folder / CHECKPOINT).exists():
        missing = CHECKPOINT if (folder / KEY).exists() else KEY
        raise Refusal(
            "file_unreadable",
            f"{folder} is no mirror of a log: it has no file {missing}",
            hint=f"acclimate log mirror --server URL --log-key KEY --out {folder} makes one, or finishes one",
        )
    kept = _load(folder, log.parse_vkey(_read(folder / KEY).strip()))
    assert kept.signed is not None
    chain = _chain(kept, kept.size)
    if known is not None and log.parse_vkey(known) not in chain.keys:
        raise Refusal(
            "proof_invalid",
            f"{folder} mirrors the log {', then '.join(key.text() for key in chain.keys)}, the key given is {known}",
            hint="ask whom you have the key from: this is another log, or the mirror was made of a false one",
        )
    if keys is not None:
        keys.doubt(chain, kept.size)
    for hand_over in chain.hand_overs:
        _check_hand_over(kept, chain, hand_over, _read(folder / CHECKPOINTS / str(hand_over.index + 1)))
    return Followed(chain, kept.signed, 0)


def follow(
    client: Client,
    kept: Kept,
    *,
    keys: LogKeys | None = None,
    progress: Progress = lambda done, total: None,
) -> Followed:
    """Fetch what is new.

    1. The server's newest checkpoint is signed by the known key, or by one that it handed over to; never by one that `keys` say was given up.
    2. It is over a log that begins with what the mirror holds; else both checkpoints are kept, and the server is refused.
    3. The entries up to it are fetched, and give its root.
    4. The hand-overs among the entries are those that led to the key, each in a checkpoint that both keys signed.
    5. Only then is the checkpoint taken; with the first one, the key.

    Raises:
        Refusal: log_inconsistent, proof_invalid, rotation_invalid, server_unreachable, no_space, file_unreadable.
    """
    # 1
    note = client.checkpoint()
    receipts = key_chain.receipts(client)
    led = hand_overs.follow(receipts, kept.known)
    shown = opened_checkpoint(led, note)
    if keys is not None:
        keys.require_now(led, shown.size)
    # 2
    _check_growth(client, kept, note, shown)
    # 3
    before, resumed = kept.size, len(kept.tree) > kept.size
    _fetch(client, kept, shown, progress)
    if kept.tree.root() != shown.root and resumed:
        # What an earlier call left may be of a checkpoint that never came to be.
        _cut(kept, before)
        _fetch(client, kept, shown, progress)
    if kept.tree.root() != shown.root:
        _cut(kept, before)
        raise Refusal(
            "proof_invalid",
            f"{client.url} gave entries {before} to {shown.size - 1} that its checkpoint of {shown.size} entries does not sign; none was kept",
            hint="try again; if it stays so, the server or somebody between changes what it sends",
        )
    # 4
    chain = _chain(kept, shown.size)
    chain.open(note)
    for receipt in map(log.Receipt.parse, receipts):
        hand_over = next((hand_over for hand_over in chain.hand_overs if hand_over.index == receipt.index), None)
        if hand_over is not None:
            _check_hand_over(kept, chain, hand_over, receipt.checkpoint)
            _write(kept.folder / CHECKPOINTS / str(hand_over.index + 1), receipt.checkpoint)
    # 5
    if kept.signed is None:
        _write(kept.folder / KEY, f"{kept.known.text()}\n")
    _write(kept.folder / CHECKPOINT, note)
    kept.note, kept.signed = note, shown
    return Followed(chain, shown, shown.size - before)


def _check_growth(client: Client, kept: Kept, note: str, shown: log.Checkpoint) -> None:
    if kept.signed is None:
        return
    try:
        if shown.size < kept.size:
            raise Refusal(
                "log_inconsistent",
                f"{client.url} shows a log of {shown.size} entries, it signed one of {kept.size} before: an old checkpoint was put back",
                hint="a log never gets shorter: the server was restored from a backup, or shows different logs to different people",
            )
        proof = client.consistency(kept.size, shown.size) if 0 < kept.size < shown.size else []
        log.verify_consistency(
            proof, first=kept.size, first_root=kept.signed.root, second=shown.size, second_root=shown.root
        )
    except Refusal as refusal:
        if refusal.code not in ("log_inconsistent", "proof_invalid", "entry_unknown"):
            raise
        paths = [_fork(kept.folder, kept.note, kept.signed), _fork(kept.folder, note, shown)]
        raise Refusal(
            "log_inconsistent",
            f"{refusal.sentence}; both checkpoints are kept: {' and '.join(map(str, paths))}",
            hint=refusal.hint
            or "ask it once more; if it can't show that the one begins with the other, make both public: each is signed",
        ) from refusal


def _fork(folder: Path, note: str, signed: log.Checkpoint) -> Path:
    path = folder / FORKS / f"{signed.size}-{signed.root.hex()[:16]}"
    _write(path, note)
    return path


def _check_hand_over(kept: Kept, chain: Chain, hand_over: hand_overs.HandOver, note: str) -> None:
    """The checkpoint of a hand-over is of index + 1 of these entries, signed by both keys."""
    signed = chain.open(note).checkpoint
    if signed.size != hand_over.index + 1 or kept.tree.root(signed.size) != signed.root:
        raise Refusal(
            "log_inconsistent",
            f"the checkpoint of the hand-over at log entry {hand_over.index} is of {signed.size} entries, and not of this history",
        )


def _fetch(client: Client, kept: Kept, shown: log.Checkpoint, progress: Progress) -> None:
    """Add the entries up to a checkpoint's size; more of them, left by an earlier call, are dropped."""
    if len(kept.tree) > shown.size:
        _cut(kept, shown.size)
    path, total = kept.folder / ENTRIES, shown.size
    progress(len(kept.tree), total)
    try:
        with path.open("ab") as stream:
            for entry in client.entries(start=len(kept.tree), end=total):
                stream.write(entry + b"\n")
                kept.tree.append(log.leaf_hash(entry))
                progress(len(kept.tree), total)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise files.failed(path, error) from error


def _cut(kept: Kept, size: int) -> None:
    """Drop the entries from `size` on."""
    path = kept.folder / ENTRIES
    try:
        with path.open("r+b") as stream:
            for _ in range(size):
                stream.readline()
            stream.truncate(stream.tell())
    except OSError as error:
        raise files.failed(path, error) from error
    kept.tree = log.Tree(map(log.leaf_hash, _lines(path)))


def _load(folder: Path, known: log.Verifier) -> Kept:
    """What a folder holds, compared with its own checkpoint.

    Raises:
        Refusal: log_inconsistent, proof_invalid, rotation_invalid, file_unreadable.
    """
    kept = Kept(folder, known, log.Tree(map(log.leaf_hash, _lines(folder / ENTRIES))))
    if not (folder / CHECKPOINT).exists():
        return kept
    kept.note = _read(folder / CHECKPOINT)
    try:
        size = log.parse_checkpoint(log.parse_note(kept.note).text).size
    except Refusal as refusal:
        raise refusal.of(str(folder / CHECKPOINT), hint=_AGAIN) from refusal
    if size > len(kept.tree):
        raise _changed(folder, f"it holds {len(kept.tree)} whole entries, its checkpoint {size}")
    signed = _chain(kept, size).open(kept.note).checkpoint
    if kept.tree.root(size) != signed.root:
        raise _changed(folder, f"its first {size} entries have another root than its checkpoint signs")
    kept.signed = signed
    return kept


def _chain(kept: Kept, size: int) -> Chain:
    """The keys by the first `size` entries."""
    lines = (line for index, line in enumerate(_lines(kept.folder / ENTRIES)) if index < size)
    return hand_overs.chain(lines, kept.known)


def _known(folder: Path, known: str | None) -> log.Verifier:
    """The key that the mirror was begun with, or is begun with now; which one that is, is settled by its first checkpoint.

    Raises:
        Refusal: config_invalid, conflict; key_refused, where a key is given that signs no checkpoints.
    """
    path = folder / KEY
    if path.exists() and (known is None or (folder / CHECKPOINT).exists()):
        kept = _read(path).strip()
        if known not in (None, kept):
            raise Refusal(
                "conflict",
                f"{folder} mirrors the log {kept}, the key given is {known}",
                hint="leave --log-key out, or name another folder: a mirror is of one log",
            )
        return log.parse_vkey(kept)
    if known is None:
        raise Refusal(
            "config_invalid",
            "whose log? a mirror is begun with the log's key",
            hint="--log-key KEY, got from somebody whom you trust: a custodian, an entrant, the organizer's page",
        )
    found = log.parse_vkey(known)
    if found.kind != notes.ED25519:
        raise Refusal(
            "key_refused",
            f"{known} is a witness's key (kind 0x{found.kind:02x}), a log signs with one of kind 0x{notes.ED25519:02x}",
            hint="ask for the log's own key: `acclimate log keys` and every key folder's log.vkey show it",
        )
    return found


def _whole_lines(path: Path) -> None:
    """Cut off what a killed call left of a line."""
    try:
        with path.open("r+b") as stream:
            whole = 0
            for line in stream:
                whole += len(line) if line.endswith(b"\n") else 0
            stream.truncate(whole)
    except FileNotFoundError:
        return
    except OSError as error:
        raise files.failed(path, error) from error


def _lines(path: Path) -> Iterable[bytes]:
    """Whole lines without their newlines; none where there is no file."""
    try:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:
            for line in stream:
                if line.endswith(b"\n"):
                    yield line[:-1]
    except OSError as error:
        raise files.failed(path, error) from error


def _read(path: Path) -> str:
    return reading.text(path, notes.LARGEST_NOTE)


def _write(path: Path, text: str) -> None:
    files.write(path, text.encode(), mode=0o644)


def _changed(folder: Path, why: str) -> Refusal:
    return Refusal(
        "log_inconsistent",
        f"{folder} was changed: {why}",
        hint=_AGAIN,
    )
