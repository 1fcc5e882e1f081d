"""Signs a checkpoint whenever the log has grown; gives proofs and receipts.

One sequencer runs in each API process; any number of them sign the same log. Each keeps the tree in memory and holds it against the
newest checkpoint, whoever signed it, before it signs: at the start, so that a log that was changed or cut is found
before anything new is signed, and inside each transaction that adds a checkpoint, where no other can come between. Of one size there
is one checkpoint, the first; the others take it up. A crash between an entry's commit and its checkpoint leaves entries
without a checkpoint; the next advance, of any process, signs one that holds them.
"""

import base64
import logging
import threading
import time
from typing import Any

from sqlalchemy import Row, insert, select

from acclimate import log
from acclimate.checkpoints import EVERY_SECONDS as EVERY_COPY
from acclimate.checkpoints import Copies
from acclimate.store import Store, Tx, log_checkpoints, timestamp
from acclimate_competitions.errors import Refusal

EVERY_SECONDS = 0.1
_PAGE = 2000
_log = logging.getLogger(__name__)


class Sequencer:
    """The log's signer; call start() before anything else, and close() at the end.

    Args:
        store: the store.
        signer: the log's key.
        copies: of the newest checkpoint, to compare with at the start and to keep.
    """

    def __init__(self, store: Store, signer: log.Signer, *, copies: Copies | None = None) -> None:
        self._store, self._signer, self._copies = store, signer, copies
        self._tree = log.Tree()
        self._note, self._signed = "", -1
        self._shown: tuple[int, str] = (0, "")
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="sequencer", daemon=True)
        self._copying = threading.Thread(target=self._copy, name="checkpoints", daemon=True)

    def start(self) -> None:
        """Check the log against its last checkpoint, sign what is not signed yet, and go on doing so.

        Raises:
            Refusal: log_inconsistent, busy, no_space, database_unreachable, blobs_unreachable.
        """
        if self._copies is not None:
            with self._lock:
                self._read()
                self._copies.check(self._tree)
            with self._store.snapshot() as tx:
                self._copies.complete(tx)
        self.advance()
        self._thread.start()
        self._copying.start()

    def close(self) -> None:
        """Stop."""
        self._stop.set()
        for thread in (self._thread, self._copying):
            if thread.is_alive():
                thread.join()

    def advance(self) -> int:
        """Sign a checkpoint where the log has grown since the newest one; the size of what is signed.

        Raises:
            Refusal: log_inconsistent, busy, no_space, database_unreachable.
        """
        with self._lock:
            newest = self._read()
            if newest is None or newest.size < len(self._tree):
                with self._store.transaction() as tx:
                    newest = self._sign(tx)
            self._note, self._signed = newest.note, newest.size
            self._shown = (newest.size, newest.note)
            return self._signed

    def _sign(self, tx: Tx) -> Row[Any]:
        """The newest checkpoint, made now where there is none over the log as it is; nothing is appended before it is written."""
        for entry in tx.entries(len(self._tree), tx.size()):
            self._tree.append(log.leaf_hash(entry))
        newest = self._newest(tx)
        if newest is None or newest.size < len(self._tree):
            size = len(self._tree)
            note = log.sign_checkpoint(self._signer, size, self._tree.root())
            tx.execute(insert(log_checkpoints), {"size": size, "note": note, "at": timestamp(tx)})
            newest = self._newest(tx)
        assert newest is not None
        return newest

    def _newest(self, tx: Tx) -> Row[Any] | None:
        """The newest checkpoint, if the tree agrees with it.

        Raises:
            Refusal: log_inconsistent.
        """
        query = select(log_checkpoints.c.size, log_checkpoints.c.note).order_by(log_checkpoints.c.size.desc()).limit(1)
        found: Row[Any] | None = tx.execute(query).one_or_none()
        if found is None and self._signed < 0:
            return None
        if found is None or found.size < self._signed:
            raise _inconsistent(
                f"this process signed {self._signed} entries, the database's newest checkpoint holds"
                f" {found.size if found is not None else 0}"
            )
        if found.note != self._note:
            signed = self._own(found.note)
            if signed.size > len(self._tree) or self._tree.root(signed.size) != signed.root:
                raise _inconsistent(
                    f"the last checkpoint holds {signed.size} entries with root {base64.b64encode(signed.root).decode()},"
                    f" the stored log of {len(self._tree)} entries has another beginning"
                )
        return found

    def checkpoint(self) -> str:
        """The newest signed checkpoint, over the log as it is now."""
        self.advance()
        return self._note

    def newest(self) -> tuple[int, str]:
        """Size and note of the newest checkpoint that this process knows, at once; (0, "") before the first."""
        return self._shown

    def receipt_by(self, index: int, note: str) -> str:
        """The receipt of a log entry, by a given checkpoint of this log that holds it.

        Raises:
            Refusal: entry_unknown.
        """
        size = log.parse_checkpoint(log.parse_note(note).text).size
        if self._signed < size:
            self.advance()
        with self._store.snapshot() as tx:
            entry = tx.entry(index)
        with self._lock:
            return log.Receipt(index, entry, tuple(self._tree.inclusion_proof(index, size)), note).text()

    def receipt(self, index: int, *, wait: float = 2.0) -> str:
        """The receipt of a log entry, by the newest checkpoint; without cosignatures.

        Args:
            index: the entry's index.
            wait: seconds to wait where the checkpoint can't be signed at once.

        Raises:
            Refusal: entry_unknown; busy, where it took too long.
        """
        with self._store.snapshot() as tx:
            entry = tx.entry(index)
        until = time.monotonic() + wait
        while self._signed <= index:
            try:
                self.advance()
            except Refusal:
                if time.monotonic() > until:
                    raise
                time.sleep(EVERY_SECONDS / 2)
        with self._lock:
            proof = tuple(self._tree.inclusion_proof(index, self._signed))
            return log.Receipt(index, entry, proof, self._note).text()

    def consistency(self, first: int, second: int) -> list[str]:
        """The proof (base64) that the log of `first` entries is the beginning of that of `second`.

        Raises:
            Refusal: entry_unknown.
        """
        self.advance()
        with self._lock:
            return [base64.b64encode(node).decode() for node in self._tree.consistency_proof(first, second)]

    def growth(self, first: int, second: int) -> list[bytes]:
        """The hashes that show the log of `first` entries to be the beginning of that of `second`, as they were signed.

        Raises:
            Refusal: entry_unknown.
        """
        with self._lock:
            return self._tree.consistency_proof(first, second)

    def hashes(self, height: int, start: int, end: int) -> list[bytes]:
        """The hashes of complete subtrees of the signed log, as Tree.hashes.

        Raises:
            Refusal: entry_unknown.
        """
        if end << height > self._signed:
            self.advance()
        with self._lock:
            if end << height > self._signed:
                raise Refusal("entry_unknown", f"{self._signed} entries are signed, asked for were {end << height}")
            return self._tree.hashes(height, start, end)

    def _own(self, note: str) -> log.Checkpoint:
        try:
            return log.open_checkpoint(note, self._signer.verifier).checkpoint
        except Refusal as refusal:
            raise Refusal(
                "log_inconsistent",
                f"the stored log was signed by another key or under another origin than {self._signer.vkey}: {refusal}",
                hint="put keys/log.pem and the setting `origin` back: a log keeps both for good",
            ) from refusal

    def _read(self) -> Row[Any] | None:
        """Take new entries into the tree; the newest checkpoint."""
        while True:
            size = len(self._tree)
            with self._store.snapshot() as tx:
                page = tx.entries(size, size + _PAGE)
                for entry in page:
                    self._tree.append(log.leaf_hash(entry))
                if len(page) < _PAGE:
                    return self._newest(tx)

    def _copy(self) -> None:
        """Keep copies, now and then and at the end; beside the signing, which must not wait for a bucket."""
        if self._copies is not None:
            while not self._stop.wait(EVERY_COPY):
                self._copies.keep(self._note)
            self._thread.join()
            self._copies.keep(self._note)

    def _run(self) -> None:
        complained = False
        while not self._stop.wait(EVERY_SECONDS):
            try:
                self.advance()
                complained = False
            except Exception as error:
                # Whatever it is: without this thread no checkpoint would be signed until the next start.
                if not complained:
                    trace = None if isinstance(error, Refusal) else error
                    _log.warning("no checkpoint could be signed, trying again: %s", error, exc_info=trace)
                complained = True


def _inconsistent(sentence: str) -> Refusal:
    hint = "the database was changed or restored from an older backup; nothing is signed until it is put right"
    return Refusal("log_inconsistent", sentence, hint=hint)
