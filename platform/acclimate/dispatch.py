"""The dispatcher: of any number of processes over one database one leads (leader.py), the others stand by.

Who leads is said by a lease (lease.py). A dispatcher that finds it taken stands by and looks again every second; one that loses it, as
it was paused or cut off, stands by too, and whatever it still tries to write is refused. So a killed leader is replaced within the
lease's time and a second, one that is stopped in order at once, and one that starts again in the same data folder need not wait: the
folder's lock proves that the process before it is gone.

Two versions over one database: checks and transitions are made by any, but a round is prepared and evaluated by the code that it is pinned
to. A leader of other code blocks that work and says so in the round's status; it does not step aside by itself. Stop it, and the standby
of the right version leads at once and takes up what was blocked. So while rounds are under way, keep their version running and
start no other beside it.
"""

import contextlib
import hashlib
import json
import os
import secrets
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from acclimate import config, console, facts
from acclimate import lease as leases
from acclimate.config import Settings
from acclimate.console import say
from acclimate.dispatch_health import HealthServer, Vitals
from acclimate.hosting import Host, outlives, runner_of
from acclimate.leader import Leader
from acclimate.lease import Lease, Renewal
from acclimate.service import identity
from acclimate.store import Store
from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import Blobs
from acclimate_runners.runner import Runner

_EVERY, _LOOK_EVERY, _AGAIN_AFTER = 0.2, 1.0, 1.0
_HUNG = 900.0
"""Seconds after which a step that hasn't ended counts as hung; opening a large holdout may take minutes."""


class Dispatcher:
    """The dispatcher of a data folder; a context manager, as it holds the folder's lock, and a runner while it leads.

    Args:
        store: the store.
        blobs: the store's blobs, as runners see them.
        settings: of the installation.
        runner_factory: makes the runner; called in a thread that lives as long as it leads.
        finish_round: called with a round's id, in a thread, once it is prepared and again once it is published; until it has
            succeeded it is called again, also by the next dispatcher.
        lease_seconds: for how long others leave it alone when it is silent.

    Attributes:
        vitals: what it notes of itself.
    """

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        settings: Settings,
        runner_factory: Callable[[], Runner],
        *,
        finish_round: Callable[[str], None] | None = None,
        lease_seconds: float = leases.SECONDS,
    ) -> None:
        self._store, self._blobs, self._settings = store, blobs, settings
        self._identity = identity.load(settings, store, evaluator=True)
        self._factory, self._finish_round = runner_factory, finish_round
        self._seconds = lease_seconds
        self.vitals = Vitals(patience=_HUNG)
        self._lock: IO[str] | None = None
        self._health: HealthServer | None = None
        self._holder = ""
        self._asked: Lease | None = None
        self._term: _Term | None = None
        self._led_by, self._complaints = "", set[str]()

    @property
    def leading(self) -> bool:
        """Whether it leads, as far as it knows."""
        return self._term is not None

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set; then hand over: what runs here is killed, what runs on a cluster goes on for the next leader.

        Raises:
            Refusal: busy, where another dispatcher has this data folder; config_invalid.
        """
        with self:
            while not stop.is_set():
                try:
                    self.step()
                except Refusal as refusal:
                    self._complain(refusal.code, refusal.sentence)
                    stop.wait(_AGAIN_AFTER)
                except Exception as error:
                    # One round's fault must not stop the others; the operator reads it here, once.
                    if self._is_new(type(error).__name__):
                        say("error", traceback=traceback.format_exc())
                    stop.wait(_AGAIN_AFTER)
                else:
                    self._recovered()
                stop.wait(_EVERY if self.leading else _LOOK_EVERY)

    def __enter__(self) -> "Dispatcher":
        self._lock = config.lock(self._settings, "dispatcher")
        try:
            self._holder = holder_of(self._settings.data)
            if self._settings.dispatch_port:
                address = (self._settings.host, self._settings.dispatch_port)
                self._health = HealthServer(self.vitals, self._store, address)
            facts = {"evaluator": self._identity.evaluator, "code": self._identity.code, "holder": self._holder}
            say("started", data=str(self._settings.data), **facts)
            self._look()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._term is not None:
                self._term.end(keep=outlives(self._settings))
        finally:
            self._term = None
            if self._health is not None:
                self._health.close()
            if self._lock is not None:
                self._lock.close()
            say("stopped")

    def step(self) -> None:
        """Do all that can be done now: as a standby look whether the lease is free, as the leader work.

        Raises:
            Refusal: busy, no_space, database_unreachable, blobs_unreachable; what was not done is done in a later step.
        """
        began = self.vitals.stepped = time.monotonic()
        try:
            if self._term is None:
                self._look()
            if self._term is not None:
                self._term.step()
        except Refusal as refusal:
            if refusal.code != "lease_lost":
                raise
            self._step_down(refusal)
        finally:
            self._note()
            self.vitals.step_seconds = time.monotonic() - began

    # ---- standing by and leading -----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Lead if the lease can be had; else say once who leads."""
        if self._asked is None:
            self._asked = Lease(self._store, holder=self._holder, seconds=self._seconds)
        lease = self._asked
        if not lease.take():
            holder, until = lease.seen
            if holder != self._led_by:
                self._led_by = holder
                say("standby", leader=holder, until=until)
            return
        self._asked, self._led_by = None, ""
        term = _Term(self._store, lease=lease, host=Host(self._factory))
        try:
            term.begin(partial(self._leader, host=term.host))
        except BaseException:
            # Another may have more luck.
            term.abandon(keep=False)
            with contextlib.suppress(Exception):
                lease.release()
            raise
        self._term = term
        say("leading", epoch=lease.epoch, holder=self._holder)

    def _leader(self, fenced: Store, *, host: Host) -> Leader:
        return Leader(
            fenced,
            self._blobs,
            settings=self._settings,
            identity=self._identity,
            host=host,
            vitals=self.vitals,
            finish_round=self._finish_round,
        )

    def _step_down(self, refusal: Refusal) -> None:
        term, self._term = self._term, None
        say("stepped down", reason=refusal.sentence)
        if term is not None:
            term.abandon(keep=outlives(self._settings))

    # ---- what is said ----------------------------------------------------------------------------------------------

    def _note(self) -> None:
        vitals, term = self.vitals, self._term
        vitals.leading = term is not None
        vitals.lease_left = (lambda: 0.0) if term is None else (lambda: term.lease.left)
        host = None if term is None else term.host
        vitals.slots = 0 if host is None or host.runner is None else host.runner.slots
        vitals.machines = 0 if host is None else len(host.machines)
        vitals.no_runner = None
        if host is not None and host.runner is None:
            vitals.no_runner = (host.since, host.problem or "it is being started")
        if term is None:
            vitals.running = 0

    def _complain(self, code: str, sentence: str) -> None:
        """Say what a step stumbled over, once for each kind until a step reaches its end."""
        self.vitals.trouble = (code, sentence)
        if self._is_new(code):
            say("refused", code=code, reason=sentence)

    def _is_new(self, kind: str) -> bool:
        new = kind not in self._complaints
        self._complaints.add(kind)
        return new

    def _recovered(self) -> None:
        if self._complaints:
            say("recovered", after=sorted(self._complaints))
        self._complaints.clear()
        self.vitals.trouble = ("", "")


class _Term:
    """A time of leading: its lease, what renews it, the runner, and the work."""

    def __init__(self, store: Store, *, lease: Lease, host: Host) -> None:
        self._store, self.lease, self.host = store, lease, host
        self._renewal = Renewal(lease, patience=_HUNG)
        self._leader: Leader | None = None

    def begin(self, make: Callable[[Store], Leader]) -> None:
        self._renewal.start()
        # Everything that the leader writes is refused once the lease is another's.
        self._leader = make(self._store.fenced(self.lease.check))
        self._leader.begin()
        self.host.start()

    def step(self) -> None:
        assert self._leader is not None
        self._renewal.alive()
        if self._renewal.lost is not None:
            raise self._renewal.lost
        if not self.lease.left:
            # It was not renewed in time: paused, or cut off. Ask before anything is touched that is another's by now.
            self.lease.renew()
        self._leader.step()

    def end(self, *, keep: bool) -> None:
        """Hand over in order."""
        try:
            self._renewal.alive()
            self.host.close(keep=keep)
            with contextlib.suppress(Refusal):
                if self._leader is not None:
                    self._leader.end()
        finally:
            self._renewal.stop()
            with contextlib.suppress(Refusal):
                self.lease.release()

    def abandon(self, *, keep: bool) -> None:
        """Let go of everything and write nothing."""
        self._renewal.stop()
        if self._leader is not None:
            self._leader.abandon()
        self.host.close(keep=keep)


def run(settings: Settings, *, finish: Callable[[Store, Settings, str], None] | None = None) -> None:
    """Run the dispatcher of a data folder in this process, until SIGTERM or SIGINT; for the main thread.

    Args:
        settings: of the installation.
        finish: called with a round's id as Dispatcher's finish_round is.

    Raises:
        Refusal: busy, data_version, config_invalid, database_unreachable, …
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    console.configure(settings, part="dispatch")
    store = Store.open(settings)
    finish_round = partial(finish, store, settings) if finish is not None else None
    try:
        dispatcher = Dispatcher(store, store.blobs, settings, lambda: runner_of(settings), finish_round=finish_round)
        if warning := facts.clock_warning(facts.clock_offset(store)):
            say(warning, level="warning")
        dispatcher.run(stop)
    finally:
        store.close()


def holder_of(data: Path) -> str:
    """A data folder's name as a holder of leases: the host's, and a part that no other folder has, nor a copy of this one.

    Raises:
        Refusal: no_space.
    """
    path = data / "dispatcher.id"
    try:
        token = path.read_text("utf-8").strip() if path.exists() else ""
        if not token:
            token = secrets.token_hex(16)
            temporary = path.with_name(f".dispatcher.id.{os.getpid()}")
            temporary.write_text(token + "\n", "utf-8")
            temporary.replace(path)
    except OSError as error:
        raise Refusal("no_space", f"{path} can't be written: {error.strerror or error}") from error
    host = socket.gethostname()[:40]
    own = hashlib.sha256(json.dumps([host, str(data.resolve()), token]).encode()).hexdigest()
    return f"{host}-{own[:12]}"
