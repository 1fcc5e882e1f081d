"""What the API needs in order to serve, looked at: the database and writing there, its installation, the log's signatures, blobs, space, clocks."""

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acclimate import facts as numbers
from acclimate import migrations, sqlite_urls, writability
from acclimate.config import Settings
from acclimate.cosignature_collector import CosignatureCollector
from acclimate.log_key import LOG_KEY
from acclimate.metrics import Seen
from acclimate.sequencer import Sequencer
from acclimate.service import pools
from acclimate.store import Store, installation
from acclimate_competitions.errors import Refusal

CHECKS = (
    "database",
    "writes",
    "schema",
    "installation",
    "log",
    "blobs",
    "space",
    "clock",
    "keys",
    "witnesses",
    "machines",
)
SIGNED_WITHIN = 10.0
"""Seconds after which an entry must be in a checkpoint."""
SPARE_BYTES = 64 << 20
PATIENCE = 1.0
"""Seconds that a caller waits for a look that has begun; after it the check that hangs is named."""
COSIGNED_WITHIN = 60.0
"""Seconds after which an entry should be in a checkpoint that a quorum cosigned."""
_TOLD = frozenset({"keys", "witnesses", "machines"})
"""Checks that are no reason not to serve."""
_WORKING = ("open", "closed", "opened")
"""Phases in which there is work for a dispatcher."""
_KEYS = "the log's key is not where it was: this process signs on, the next start is refused"
_KEPT, _BLOBS_KEPT, _STALE = 1.0, 10.0, 8.0
_SILENT = "no answer yet"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class State:
    """What was found at one moment.

    Attributes:
        reasons: check -> why it fails; only those that fail.
        warnings: check -> what to look at though the API serves.
        facts, offset, free: as in metrics.Seen.
        at: monotonic seconds.
    """

    reasons: dict[str, str] = field(default_factory=dict)
    warnings: dict[str, str] = field(default_factory=dict)
    facts: numbers.Facts | None = None
    offset: float | None = None
    free: int | None = None
    at: float = 0.0


class _Look:
    """One look in a thread of its own, so that what hangs holds nobody who asks.

    Args:
        look: what is called.
        name: of the thread.
    """

    def __init__(self, look: Callable[[], None], *, name: str) -> None:
        self.began, self._done = time.monotonic(), threading.Event()

        def run() -> None:
            try:
                look()
            finally:
                self._done.set()

        threading.Thread(target=run, name=name, daemon=True).start()

    def wait(self, until: float) -> bool:
        """Whether it is over; waits for that until a monotonic moment."""
        return self._done.wait(max(0.0, until - time.monotonic()))


class _Probe:
    """Something that takes time or work: looked at every ten seconds, every second while it fails, in a thread of its own.

    Args:
        what: is looked at; refuses, or returns what was found.
        code: of the refusal that any other exception of it becomes.
        name: of the thread.
    """

    def __init__(self, what: Callable[[], int | None], *, code: str, name: str) -> None:
        self._what, self._code, self._name = what, code, name
        self._found: tuple[Refusal | None, int | None, float] = (None, None, -math.inf)
        self._look: _Look | None = None

    @property
    def found(self) -> int | None:
        """What was found last; None where it failed."""
        return self._found[1]

    def ask(self) -> str:
        """What the last look found: nothing, or that there is no answer; nobody waits for one that takes long.

        Raises:
            Refusal: what was refused.
        """
        refusal, _, at = self._found
        if time.monotonic() - at >= (_KEPT if refusal is not None else _BLOBS_KEPT):
            if self._look is None or self._look.wait(0.0):
                self._look = _Look(self._now, name=self._name)
            look = self._look
            if not look.wait(look.began + PATIENCE / 4) and time.monotonic() - at >= _BLOBS_KEPT + _STALE:
                return _SILENT
        refusal = self._found[0]
        if refusal is not None:
            raise refusal
        return ""

    def _now(self) -> None:
        refusal, found = None, None
        try:
            found = self._what()
        except Refusal as said:
            refusal = said
        except Exception as error:
            refusal = Refusal(self._code, f"{type(error).__name__}: {error}")
        self._found = (refusal, found, time.monotonic())


class Health:
    """Looks at what the API needs, at most once a second, and at blobs and writing every ten; callers in between get the last state.

    Each looks in a thread of its own, one at a time: nobody waits longer than PATIENCE for what hangs, and is told its name then.

    Args:
        store: what it serves from.
        settings: where its folders are.
        sequencer: signs the log.
        collector: has it cosigned.

    Attributes:
        stopping: set once the process was asked to end.
    """

    def __init__(self, store: Store, settings: Settings, sequencer: Sequencer, collector: CosignatureCollector) -> None:
        self.stopping = threading.Event()
        self._store, self._settings, self._sequencer, self._collector = store, settings, sequencer, collector
        self._phases = numbers.Phases()
        self._state = State(at=-math.inf)
        self._asking = ""
        self._blobs = _Probe(self._probe_blobs, code="blobs_unreachable", name="blobs probe")
        self._writes = _Probe(self._probe_writes, code="database_unreachable", name="writes probe")
        self._lock = threading.Lock()
        self._looking: _Look | None = None
        self._installation: str | None = None
        self._said: dict[str, str] = {}

    def state(self) -> State:
        """The state of now, or of what was found last while that is young."""
        with self._lock:
            if time.monotonic() - self._state.at < _KEPT:
                return self._state
            if self._looking is None or self._looking.wait(0.0):
                self._looking = _Look(self._look, name="health")
            look = self._looking
        if look.wait(look.began + PATIENCE) or time.monotonic() - self._state.at < _STALE:
            return self._state
        hangs = self._asking or "database"
        self._say(hangs, _SILENT, f"{_SILENT}, since {time.monotonic() - look.began:.0f} s")
        return State(self._state.reasons | {hangs: _SILENT})

    def seen(self) -> Seen:
        """The state as metrics show it."""
        state = self.state()
        # What is no reason not to serve has metrics of its own.
        checks = {name: name not in state.reasons for name in CHECKS if name not in _TOLD} | {
            "stopping": not self.stopping.is_set()
        }
        return Seen(state.facts, state.offset, state.free, checks)

    def _look(self) -> None:
        reasons: dict[str, str] = {}
        told: dict[str, str] = {}
        found: dict[str, Any] = {"facts": None, "offset": None, "free": None}

        def check(name: str, look: Callable[[], str]) -> None:
            self._asking = name
            try:
                code = reason = look()
            except Refusal as refusal:
                # Its sentence may name hosts and folders, which callers needn't know; the log has it.
                code, reason = refusal.code, refusal.sentence
            except Exception as error:
                code, reason = "internal_error", f"{type(error).__name__}: {error}"
            self._say(name, code, reason)
            if code:
                reasons[name] = code

        def log() -> str:
            with suppress(Refusal):
                self._sequencer.advance()
            found["facts"] = numbers.read(self._store, phases=self._phases, quorum=self._collector.quorum)
            told["machines"] = self._machines(found["facts"].rounds)
            late = found["facts"].log.unsigned_age > SIGNED_WITHIN
            told["witnesses"] = self._witnesses(found["facts"].cosigned)
            return f"an entry is without a checkpoint for more than {SIGNED_WITHIN:.0f} s" if late else ""

        def offset() -> str:
            found["offset"] = numbers.clock_offset(self._store)
            return ""

        def space() -> str:
            found["free"] = self._blobs.found
            free = [*(shutil.disk_usage(place).free for place in self._places()), found["free"]]
            return "less than 64 MiB are free" if any(left is not None and left < SPARE_BYTES for left in free) else ""

        check("database", offset)
        if not reasons:
            check("writes", self._writes.ask)
            check("schema", self._same_schema)
            check("installation", self._same_installation)
            check("log", log)
            check("clock", self._loggable)
        check("blobs", self._blobs.ask)
        check("space", space)
        told["keys"] = self._keys()
        told["clock"] = numbers.clock_warning(found["offset"] or 0.0)
        warnings = {name: warning for name, warning in told.items() if warning}
        self._state = State(reasons, warnings, **found, at=time.monotonic())

    def _witnesses(self, found: numbers.CosignedFacts | None) -> str:
        """What to say of cosignatures that are missing; the rounds go on without them."""
        if found is None:
            return ""
        late = found.age > COSIGNED_WITHIN
        problems = [f"{one.endpoint.verifier.name}: {one.problem}" for one in self._collector.witnesses if one.problem]
        behind = [f"{found.missing} entries are without a quorum's cosignatures for {found.age:.0f} s"] if late else []
        self._say("witnesses", "quorum_missing" if late else "", "; ".join([*behind, *problems]))
        return "; ".join([*behind, *problems])

    def _machines(self, rounds: Mapping[str, int]) -> str:
        """Why the work of rounds is not begun; a submission that is not checked in time is forfeited, whoever is at fault."""
        with self._store.snapshot() as tx:
            reason = pools.idle(tx) if any(rounds.get(phase) for phase in _WORKING) else ""
        self._say("machines", "infeasible" if reason else "", reason)
        return reason

    def _loggable(self) -> str:
        """That a record could be logged now, by the rule of Tx.append."""
        with self._store.snapshot() as tx:
            tx.next_record()
        return ""

    def _places(self) -> list[Path]:
        """Folders in which this process, or its database, writes."""
        url = self._settings.database
        return [self._settings.data, *([sqlite_urls.file(url).parent] if sqlite_urls.is_one(url) else [])]

    def _same_schema(self) -> str:
        """That nobody has upgraded the database under this process."""
        with self._store.snapshot() as tx:
            found = migrations.stated(tx.connection)
        said = " and ".join(found) or "none"
        return "" if found == [migrations.HEAD] else f"the database has schema {said}, this process {migrations.HEAD}"

    def _same_installation(self) -> str:
        """That the database under this process is still the one it began with."""
        with self._store.snapshot() as tx:
            found = " and ".join(
                sorted(tx.execute(installation.select().with_only_columns(installation.c.id)).scalars())
            )
        if self._installation is None:
            self._installation = found
        return "" if found == self._installation else "the database belongs to another installation now"

    def _keys(self) -> str:
        """Why the next start would be refused, where a key was lost under this process."""
        lost = "" if (self._settings.keys / LOG_KEY).is_file() else _KEYS
        self._say("keys", "other_installation" if lost else "", lost)
        return lost

    def _probe_blobs(self) -> int | None:
        self._store.blobs.probe()
        return self._store.blobs.free()

    def _probe_writes(self) -> None:
        writability.look(self._store.engine)

    def _say(self, name: str, code: str, reason: str) -> None:
        """Log what changed, once."""
        if self._said.get(name, "") != code:
            self._said[name] = code
            level, event = (logging.WARNING, "not ready") if code else (logging.INFO, "ready again")
            if name in _TOLD:
                event = "needs a look" if code else "well again"
            _log.log(level, "%s: %s", event, reason or name, extra={"facts": {"check": name, "reason": reason or None}})
