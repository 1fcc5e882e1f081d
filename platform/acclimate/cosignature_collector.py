"""Has the log's newest checkpoint cosigned by the witnesses of the settings, beside all that signs and serves.

Each API process has a collector; by a lease one of them asks at a time, so that all witnesses are asked for the same checkpoints: a quorum
counts only under one. Correctness does not rest on the lease: a cosignature is kept once, whoever got it. When the log grows, the newest
checkpoint is put to all witnesses at once, and the next one follows when a quorum has signed, nobody is left who might, or the time for
it is over. A witness that fails is asked again after a growing pause, whatever the others do; one that is slow, or never ends its answer,
keeps nobody waiting who isn't needed, and for no longer than ROUND_SECONDS who is. Nothing here refuses anything:
without cosignatures the rounds go on, and what needs a quorum says that it is missing.
"""

import logging
import re
import threading
import time
import uuid
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from acclimate import cosignatures, witness_client
from acclimate.lease import Lease
from acclimate.quorum import Quorum
from acclimate.sequencer import Sequencer
from acclimate.store import Store
from acclimate.witness_client import Endpoint
from acclimate_competitions.errors import Refusal

EVERY_SECONDS = 0.25
SPACING_SECONDS = 0.5
LEASE = "cosigning"
ANSWER_SECONDS = 10.0
"""How long a witness may be silent."""
ROUND_SECONDS = 10.0
"""How long one checkpoint is waited for, where its quorum does not come."""
HOPE_SECONDS = 5.0
"""For how long after the last progress of the quorum a cosignature is worth waiting for."""
_LEASE_SECONDS = 15.0
_PAUSES = (1.0, 60.0)
_DIGITS = re.compile(r"[0-9]+")
_log = logging.getLogger(__name__)


@dataclass
class Witness:
    """One of the settings' witnesses, as this process sees it.

    Attributes:
        endpoint: where it listens.
        size: entries of the newest checkpoint that it is known to have cosigned.
        problem: what it did last, as anybody may read it, beginning with a code; empty where all is well.
        told: what was logged of it last.
        again: when it may be asked again, by the monotonic clock.
        asked: the last time that it was asked; done, once it has answered.
    """

    endpoint: Endpoint
    size: int = 0
    problem: str = ""
    told: str = ""
    again: float = 0.0
    asked: "Future[None] | None" = None
    pause: float = field(default=_PAUSES[0], repr=False)

    @property
    def key(self) -> str:
        """Its verifier key."""
        return self.endpoint.verifier.text()


class CosignatureCollector:
    """Collects cosignatures; without witnesses it does nothing and has no thread.

    Args:
        store: where they are kept.
        sequencer: signs the log.
        endpoints: the witnesses.
        quorum: how many of them a checkpoint needs.

    Attributes:
        reached: entries of the newest checkpoint that is known to have the quorum.
    """

    def __init__(self, store: Store, sequencer: Sequencer, endpoints: tuple[Endpoint, ...], *, quorum: int) -> None:
        self._store, self._sequencer = store, sequencer
        self.witnesses = tuple(Witness(endpoint) for endpoint in endpoints)
        self.quorum = Quorum(tuple(endpoint.verifier for endpoint in endpoints), quorum)
        self.reached, self._done = 0, 0
        self._moved = time.monotonic()
        self._lease: Lease | None = None
        self._holder = f"api-{uuid.uuid4().hex[:12]}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cosignatures", daemon=True)
        self._client = httpx.Client(timeout=httpx.Timeout(ANSWER_SECONDS, connect=5.0))
        self._asking = ThreadPoolExecutor(max(1, len(endpoints)), thread_name_prefix="witness")

    def start(self) -> None:
        """Begin."""
        if self.witnesses:
            self._thread.start()

    def close(self) -> None:
        """Stop; whom a witness keeps waiting is not waited for."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._asking.shutdown(wait=False, cancel_futures=True)
        self._client.close()
        if self._lease is not None:
            with suppress(Refusal):
                self._lease.release()

    def hopeful(self, index: int) -> bool:
        """Whether it is worth waiting a moment for a checkpoint of the quorum that holds a log entry."""
        if self.quorum.needed == 0 or self.reached > index:
            return False
        return time.monotonic() - self._moved < HOPE_SECONDS

    def _run(self) -> None:
        complained = False
        while not self._stop.wait(EVERY_SECONDS):
            try:
                # Not more often, whatever comes: witnesses bound how often they let themselves be asked.
                if self.step():
                    self._stop.wait(SPACING_SECONDS)
                complained = False
            except Exception as error:
                # Whatever it is: without this thread nothing would be cosigned until the next start.
                if not complained:
                    trace = None if isinstance(error, Refusal) else error
                    _log.warning("cosignatures can't be collected, trying again: %s", error, exc_info=trace)
                complained = True

    def step(self) -> bool:
        """Look at what was cosigned, and put the newest checkpoint to the witnesses that have not signed it; whether any was asked.

        1. Nothing is asked of the database while there is nothing to do: all have signed the newest checkpoint, or the quorum has and
           the others' pauses are not over.
        2. What other processes got counts.
        3. One process asks: who has the lease.
        4. All that can be asked are asked at once, for the same checkpoint until the quorum has signed it, all that were asked are done, or
           ROUND_SECONDS have passed: whoever does not end an answer is then left to it, and the others are asked for a newer one.

        Raises:
            Refusal: busy, database_unreachable, no_space.
        """
        # 1
        size, note = self._sequencer.newest()
        if self.reached >= size:
            self._moved = time.monotonic()
        if size <= self._done or (self.reached >= size and not self._due(size)):
            return False
        # 2
        self._look()
        if all(witness.size >= size for witness in self.witnesses):
            self._done = size
            return False
        # 3
        if not self._due(size) or not self._leads():
            return False
        # 4
        self._collect(size, note)
        return True

    def _due(self, size: int) -> list[Witness]:
        """Who can be asked now to cosign a size."""
        now = time.monotonic()
        free = [one for one in self.witnesses if one.asked is None or one.asked.done()]
        return [one for one in free if one.size < size and one.again <= now]

    def _collect(self, size: int, note: str) -> None:
        """Ask for one checkpoint, whoever is due, until it has what it needs or its time is over."""
        end = time.monotonic() + ROUND_SECONDS
        while time.monotonic() < end and self._leads():
            for witness in self._due(size):
                witness.asked = self._asking.submit(self._ask, witness, size, note)
            asked = [one.asked for one in self.witnesses if one.asked is not None and not one.asked.done()]
            wait(asked, timeout=EVERY_SECONDS, return_when=FIRST_COMPLETED)
            signed = sum(witness.size >= size for witness in self.witnesses)
            if not asked or self._stop.is_set() or signed >= max(1, self.quorum.needed):
                break
        self._look()

    def _look(self) -> None:
        with self._store.snapshot() as tx:
            sizes, reached = cosignatures.sizes(tx, self.quorum.keys), cosignatures.newest(tx, self.quorum)
        for witness in self.witnesses:
            witness.size = max(witness.size, sizes[witness.key])
        if reached > self.reached:
            self.reached, self._moved = reached, time.monotonic()

    def _leads(self) -> bool:
        try:
            if self._lease is None:
                fresh = Lease(self._store, name=LEASE, holder=self._holder, seconds=_LEASE_SECONDS)
                self._lease = fresh if fresh.take() else None
            elif self._lease.left < _LEASE_SECONDS / 2:
                self._lease.renew()
        except Refusal as refusal:
            if refusal.code != "lease_lost":
                raise
            self._lease = None
        return self._lease is not None

    def _ask(self, witness: Witness, size: int, note: str) -> None:
        """One witness, one checkpoint; in a thread of its own."""
        try:
            signature = witness_client.ask(
                witness.endpoint,
                note,
                old=witness.size,
                proof_of=lambda old: self._sequencer.growth(old, size),
                client=self._client,
            )
            if self._stop.is_set():
                return
            with self._store.transaction() as tx:
                cosignatures.keep(tx, size, witness.endpoint.verifier, signature)
        except Exception as error:
            self._failed(witness, error)
        else:
            witness.size, witness.pause = max(witness.size, size), _PAUSES[0]
            if witness.problem:
                _log.info("witness %s cosigns again", witness.endpoint.verifier.name)
            witness.problem = witness.told = ""

    def _failed(self, witness: Witness, error: Exception) -> None:
        code, told = (error.code, error.sentence) if isinstance(error, Refusal) else ("internal_error", str(error))
        # What a busy database kept from being stored is asked for again; the witness has done its part.
        again = code in ("busy", "witness_ahead")
        witness.again = time.monotonic() + (_PAUSES[0] if again else witness.pause)
        witness.pause = witness.pause if again else min(witness.pause * 2, _PAUSES[1])
        # Each reason is told when it begins: one that was down and now lies is another matter. Sizes and times make no other reason.
        reason = f"{code}: {_DIGITS.sub('0', told)}"
        if witness.told != reason and not self._stop.is_set():
            level = logging.ERROR if code == "witness_disagrees" else logging.WARNING
            trace = None if isinstance(error, Refusal) else error
            _log.log(level, "witness %s: %s", witness.endpoint.verifier.name, told, exc_info=trace)
        shown = witness_client.for_anybody(witness.endpoint, error) if isinstance(error, Refusal) else code
        witness.problem, witness.told = shown, reason
