"""What this machine has and lacks for running a server with these settings, and what to do.

Every check is asked in a thread of its own and has until a common deadline, so that one that hangs costs its own line only. Nothing is made
or changed, except for a small blob that is removed again. It works on a core install, and then says what is missing.
"""

import threading
import time
from collections.abc import Callable, Iterable

from acclimate import doctor_machine, doctor_places, doctor_witnesses
from acclimate.config import Settings
from acclimate.doctor_machine import WITHIN, Finding, State
from acclimate.redaction import hidden
from acclimate_competitions.errors import Refusal

Check = Callable[[Settings], Iterable[Finding]]

CHECKS: dict[str, Check] = {
    "python": doctor_machine.python,
    "extras": doctor_machine.extras,
    "devices": doctor_machine.devices,
    "ray": doctor_machine.ray,
    "machine": doctor_machine.machine,
    "space": doctor_machine.space,
    "clock": doctor_machine.clock,
    "proxies": doctor_machine.proxies,
    "data folder": doctor_places.folder,
    "database": doctor_places.database_,
    "blobs": doctor_places.blobs_,
    "keys": doctor_places.keys,
    "witnesses": doctor_witnesses.witnesses,
    "ports": doctor_places.ports_,
    "mlflow": doctor_places.mlflow,
}
_NEEDED = frozenset({"database", "blobs", "ray"})


def examine(settings: Settings, *, within: float = WITHIN) -> list[Finding]:
    """All findings, in the order of CHECKS.

    Args:
        settings: what would run here.
        within: seconds for all of them.
    """
    found: dict[str, list[Finding]] = {name: [] for name in CHECKS}
    threads = {
        name: threading.Thread(target=_ask, args=(name, check, settings, found[name]), daemon=True)
        for name, check in CHECKS.items()
    }
    until = time.monotonic() + within
    for thread in threads.values():
        thread.start()
    for name, thread in threads.items():
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            state: State = "missing" if name in _NEEDED else "warning"
            hint = "ask again when less runs here: acclimate doctor; if it stays so, what is asked there hangs"
            found[name] = [*found[name], Finding(name, state, f"no answer within {within:.0f} s", hint)]
    return [finding for findings in found.values() for finding in findings]


def _ask(name: str, check: Check, settings: Settings, into: list[Finding]) -> None:
    try:
        for finding in check(settings):
            into.append(finding)
    except Refusal as refusal:
        into.append(Finding(name, "missing", hidden(refusal.sentence), refusal.hint))
    except Exception as error:
        # A check that fails is a finding, never the end of the others.
        into.append(Finding(name, "warning", hidden(f"can't be told: {type(error).__name__}: {error}")))
