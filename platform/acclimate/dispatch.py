"""The dispatcher: of any number of processes over one database one leads (leader.py), the others stand by.

Who leads is said by a lease (lease.py). A dispatcher that finds it taken stands by and looks again every second; one that loses it, as
it was paused or cut off, stands by too, and whatever it still tries to write is refused. So a killed leader is replaced within the
lease's time and a second, one that is stopped in order at once, and one that starts again in the same data folder need not wait: the
folder's lock proves that the processes before it are gone. Each process leads under a name of its own, so of two over copies of
one folder the one that led last leads, and the other stands by.

A leader that can't work, as it finds no runner or no step of its reaches the end, gives way where another stands by; one that is
alone goes on trying.

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

# Several threads would import it at once.
import pyarrow.compute  # noqa: F401

from acclimate import config, console, facts, hosting, installation
from acclimate import lease as leases
from acclimate.config import Settings
from acclimate.console import say
from acclimate.dispatch_health import STARTING, HealthServer, Vitals
from acclimate.finishing import Finish
from acclimate.hosting import Host, outlives, runner_of
from acclimate.lead import Lead, Moments, Watch
from acclimate.leader import Leader
from acclimate.lease import Lease, Presence, Renewal
from acclimate.service import identity, release
from acclimate.store import Store, Tx
from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import Blobs
from acclimate_runners.runner import Runner

_EVERY, _LOOK_EVERY, _AGAIN_AFTER = 0.2, 1.0, 1.0
_HUNG = 900.0
"""Seconds after which a step that shows no life counts as hung; holdouts are opened and rounds finished beside it, in threads."""
_USELESS, _STAND_BACK = 180.0, 10.0
"""Seconds after which a leader that can't work gives way to one that stands by, and for which it doesn't ask again."""
_NAMES = 20
_ENDS = frozenset({"data_version", "other_installation"})
"""Refusals after which a dispatcher has nothing to do here: started again, it says at once what is wrong."""


class Dispatcher:
    """The dispatcher of a data folder; a context manager, as it holds the folder's lock, and a runner while it leads.

    Args:
        store: the store.
        blobs: the store's blobs, as runners see them.
        settings: of the installation.
        runner_factory: makes the runner; called in a thread that lives as long as it leads.
        finish_round: called with a round's id, in a thread, once it is prepared and again once it is published; until it has
            succeeded it is called again, also by the next dispatcher. The function that it is called with refuses once
            another leads.
        lease_seconds: for how long others leave it alone when it is silent.
        moments: time and chance of its own; a simulation's.

    Attributes:
        vitals: what it notes of itself.
        holder: the name under which it leads; empty before it has its folder.
        left: whether a runner was still being made as it ended, and left alone.
    """

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        settings: Settings,
        runner_factory: Callable[[], Runner],
        *,
        finish_round: Finish | None = None,
        lease_seconds: float = leases.SECONDS,
        moments: Moments | None = None,
    ) -> None:
        self._blobs, self._settings = blobs, settings
        self._identity = identity.load(settings, store, evaluator=True)
        # Nothing is written into a database that was upgraded or exchanged under this process.
        self._stands = partial(installation.stands, found=self._identity.installation.id)
        self._store, self._stood = store.fenced(self._stands), time.monotonic()
        self._factory, self._finish_round = runner_factory, finish_round
        self._seconds, self._moments = lease_seconds, moments or Moments()
        self.vitals = Vitals(patience=_HUNG)
        self._lock: IO[str] | None = None
        self._health: HealthServer | None = None
        self.left, self._leaving = False, False
        self.holder, self._former = "", tuple[str, ...]()
        self._presence: Presence | None = None
        # By the monotonic clock: when a step last reached its end, and before when the lease is not asked for.
        self._worked, self._not_before = time.monotonic(), 0.0
        self._asked: Lease | None = None
        self._term: _Term | None = None
        self._led_by, self._complaints = "", set[str]()

    @property
    def leading(self) -> bool:
        """Whether it leads, as far as it knows."""
        return self._term is not None

    def run(self, stop: threading.Event, *, leaving: bool = False) -> None:
        """Work until `stop` is set; then hand over: what runs here is killed, what runs on a cluster goes on for the next leader.

        With `leaving` this process ends with it: a runner that is still being made is left alone, and `left` says so.

        Raises:
            Refusal: busy, where another dispatcher has this data folder; config_invalid; data_version, other_installation, where the
                database was upgraded or exchanged under this process.
        """
        self._leaving = leaving
        with self:
            while not stop.is_set():
                try:
                    self.step()
                except Refusal as refusal:
                    if refusal.code in _ENDS:
                        raise
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
            self.holder, self._former = names_of(self._settings.data)
            self._presence = Presence(self._store, holder=self.holder)
            release.clear(self._settings)
            if self._settings.dispatch_port:
                address = (self._settings.host, self._settings.dispatch_port)
                self._health = HealthServer(self.vitals, self._store, address)
            facts = {"evaluator": self._identity.evaluator, "code": self._identity.code, "holder": self.holder}
            say("started", data=str(self._settings.data), **facts)
            self._look()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._term is not None:
                self._term.end(keep=outlives(self._settings), leaving=self._leaving)
        finally:
            self.left = self._term is not None and self._term.host.left
            self._term = None
            if self._health is not None:
                self._health.close()
            if self._lock is not None:
                release.clear(self._settings)
                self._lock.close()
            say("stopped")

    def step(self) -> None:
        """Do all that can be done now: as a standby look whether the lease is free, as the leader work, or give way.

        Raises:
            Refusal: busy, no_space, database_unreachable, blobs_unreachable; what was not done is done in a later step. data_version,
                other_installation: no later one will do it.
        """
        began = self.vitals.stepped = time.monotonic()
        if began - self._stood > self._seconds / 5:
            with self._store.snapshot() as tx:
                self._stands(tx)
            self._stood = began
        try:
            if self._term is None:
                self._look()
            if self._term is not None and (reason := self._useless(self._term)):
                self._give_way(reason)
            elif self._term is not None:
                self._term.step()
            self._worked = time.monotonic()
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
        if time.monotonic() < self._not_before:
            self._show()
            return
        if self._asked is None:
            self._asked = Lease(self._store, holder=self.holder, seconds=self._seconds, former=self._former)
        lease = self._asked
        taken, self._former = lease.take(), ()
        if not taken:
            holder, until = lease.seen
            if holder != self._led_by:
                self._led_by = holder
                say("standby", leader=holder, until=until)
            self._show()
            return
        self._asked, self._led_by, self._worked = None, "", time.monotonic()
        host = Host(self._factory, pause=self._moments.pause)
        term = _Term(self._store, lease=lease, host=host, vitals=self.vitals)
        try:
            term.begin(partial(self._leader, host=term.host))
        except BaseException:
            # Another may have more luck.
            term.abandon(keep=False)
            with contextlib.suppress(Exception):
                lease.release()
            raise
        self._term = term
        say("leading", epoch=lease.epoch, holder=self.holder)

    def _show(self) -> None:
        assert self._presence is not None
        # A standby that can't write has nothing else to write; it shows itself later.
        with contextlib.suppress(Refusal):
            self._presence.show()

    def _leader(self, fenced: Store, watch: Watch, *, host: Host) -> Leader:
        lead = Lead(
            store=fenced,
            blobs=self._blobs,
            settings=self._settings,
            identity=self._identity,
            host=host,
            vitals=self.vitals,
            watch=watch,
            moments=self._moments,
        )
        return Leader(lead, finish_round=self._finish_round)

    def _step_down(self, refusal: Refusal) -> None:
        term, self._term = self._term, None
        say("stepped down", reason=refusal.sentence)
        if term is not None:
            term.abandon(keep=outlives(self._settings))
        # What an opening had opened is of no use to the one that leads now.
        release.clear(self._settings)

    def _useless(self, term: "_Term") -> str:
        """Why this leader should give way to one that stands by; empty where it works, or nobody is there."""
        assert self._presence is not None
        now, reason = time.monotonic(), ""
        if term.host.runner is None and now - term.host.since > _USELESS:
            reason = f"no runner for {now - term.host.since:.0f} s: {term.host.problem or STARTING}"
        elif now - self._worked > _USELESS and not term.busy:
            # What runs here would have to begin anew, so it may end first.
            reason = f"no step has reached its end for {now - self._worked:.0f} s: {': '.join(self.vitals.trouble)}"
        return reason if reason and self._presence.another() else ""

    def _give_way(self, reason: str) -> None:
        term, self._term = self._term, None
        say("gives way", reason=reason)
        self._not_before = time.monotonic() + _STAND_BACK
        if term is not None:
            term.end(keep=outlives(self._settings))
        release.clear(self._settings)

    # ---- what is said ----------------------------------------------------------------------------------------------

    def _note(self) -> None:
        vitals, term = self.vitals, self._term
        vitals.leading = term is not None
        vitals.lease_left = (lambda: 0.0) if term is None else (lambda: term.lease.left)
        host = None if term is None else term.host
        vitals.slots = 0 if host is None or host.runner is None else host.runner.slots
        vitals.machines = 0 if host is None else len(host.machines)
        vitals.no_runner = None
        if host is not None and (host.runner is None or host.problem):
            vitals.no_runner = (host.since, host.problem or STARTING)
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

    def __init__(self, store: Store, *, lease: Lease, host: Host, vitals: Vitals) -> None:
        self._store, self.lease, self.host, self._vitals = store, lease, host, vitals
        self._renewal = Renewal(lease, patience=_HUNG)
        self._leader: Leader | None = None
        self._over = False

    @property
    def busy(self) -> bool:
        return self._leader is not None and self._leader.busy

    def begin(self, make: Callable[[Store, Watch], Leader]) -> None:
        self._renewal.start()
        # Everything that the leader writes is refused once the lease is another's.
        self._leader = make(self._store.fenced(self._check), Watch(self._alive, self._still_leading, self.lease.epoch))
        self._leader.begin()
        self.host.start()

    def step(self) -> None:
        assert self._leader is not None
        self._alive()
        if self._renewal.lost is not None:
            raise self._renewal.lost
        if not self.lease.left:
            # It was not renewed in time: paused, or cut off. Ask before anything is touched that is another's by now.
            self.lease.renew()
        self._leader.step()

    def end(self, *, keep: bool, leaving: bool = False) -> None:
        """Hand over in order; `leaving`, as of Host.close."""
        try:
            self._renewal.alive()
            self.host.close(keep=keep, leaving=leaving)
            with contextlib.suppress(Refusal):
                if self._leader is not None:
                    self._leader.end()
        finally:
            self._over = True
            self._renewal.stop()
            with contextlib.suppress(Refusal):
                self.lease.release()

    def abandon(self, *, keep: bool) -> None:
        """Let go of everything and write nothing."""
        self._over = True
        self._renewal.stop()
        if self._leader is not None:
            self._leader.abandon()
        self.host.close(keep=keep)

    def _alive(self) -> None:
        self._renewal.alive()
        self._vitals.stepped = time.monotonic()

    def _check(self, tx: Tx) -> None:
        # Threads of this term may go on after it, with the lease released but nobody else's yet.
        if self._over:
            raise self._ended()
        self.lease.check(tx)

    def _still_leading(self) -> None:
        if self._over or self._renewal.lost is not None or not self.lease.left:
            raise self._ended()

    def _ended(self) -> Refusal:
        sentence = f"the term of {self.lease.holder} in epoch {self.lease.epoch} is over"
        return Refusal("lease_lost", sentence, hint="whoever leads next does what is left to do")


def run(
    settings: Settings, *, finish: Callable[[Store, Settings, str, Callable[[], None]], None] | None = None
) -> None:
    """Run the dispatcher of a data folder in this process, until SIGTERM or SIGINT; for the main thread.

    Args:
        settings: of the installation.
        finish: called as Dispatcher's finish_round is.

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
        dispatcher = Dispatcher(store, store.blobs, settings, factory_of(settings, store), finish_round=finish_round)
        if warning := facts.clock_warning(facts.clock_offset(store)):
            say(warning, level="warning")
        dispatcher.run(stop, leaving=True)
    finally:
        store.close()
    if dispatcher.left:
        hosting.leave()


def factory_of(settings: Settings, store: Store) -> Callable[[], Runner]:
    """What makes the runners of a store's installation, whose attempts no other installation takes for its own.

    Raises:
        Refusal: other_installation, blobs_unreachable, busy.
    """
    return partial(runner_of, settings, installation=identity.load(settings, store).installation.id)


def names_of(data: Path) -> tuple[str, tuple[str, ...]]:
    """A new name for a process as a holder of leases, and those of this folder's processes before it, which its lock proves gone.

    The name is the host's and a part that no other process has. A copy of the folder knows the old names, but none that came later.

    Raises:
        Refusal: no_space.
    """
    path = data / "dispatcher.id"
    try:
        tokens = path.read_text("ascii", "replace").split() if path.is_file() else []
        tokens = [*tokens[1 - _NAMES :], secrets.token_hex(16)]
        temporary = path.with_name(f".dispatcher.id.{os.getpid()}")
        temporary.write_text("\n".join(tokens) + "\n", "utf-8")
        temporary.replace(path)
    except OSError as error:
        raise Refusal("no_space", f"{path} can't be written: {error.strerror or error}") from error
    host = socket.gethostname()[:40]
    owns = [hashlib.sha256(json.dumps([host, str(data.resolve()), token]).encode()).hexdigest() for token in tokens]
    names = [f"{host}-{own[:12]}" for own in owns]
    return names[-1], tuple(names[:-1])
