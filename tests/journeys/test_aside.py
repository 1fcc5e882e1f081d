"""What takes long of a round, beside the work of its leader: one round's does not hold up another's."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import live as staging
import pytest
import tiny
from dispatching import give_shares
from waiting import WITHIN

from acclimate import aside, recomputing
from acclimate.service import clockwork


def test_a_publication_holds_up_no_opening_and_what_it_refused_waits_longer_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "DEFINITION", tiny.DEFINITION.replace('publish = "manual"', 'publish = "auto"'))
    may, calls, now = threading.Event(), list[str](), [0.0]

    def second_process(bundle: Path, **_: Any) -> dict[str, Any]:
        calls.append(bundle.parent.name)
        assert may.wait(60)
        return {"round": "", "ranking": None, "summary": "another", "failed": []}

    monkeypatch.setattr(recomputing, "ranking", second_process)
    with staging.serve(tmp_path) as server:
        one, two = (staging.open_round(server, tmp_path, name=name) for name in ("one", "two"))
        server.clock.set(one.fields["closes"], seconds=61)
        server.tick()
        beside = aside.Aside(server.store, server.settings, monotonic=lambda: now[0])

        def until(condition: Callable[[], bool]) -> None:
            end = time.monotonic() + WITHIN
            while not condition():
                assert time.monotonic() < end
                clockwork.tick(server.store, server.settings, aside=beside.begin)
                beside.made()
                time.sleep(0.02)
            # What has ended since is noted at this time.
            beside.made()

        # 1. One ranking is computed again, and goes on for long; the other round's shares come.
        give_shares(one)
        until(lambda: len(calls) == 1)
        give_shares(two)
        until(lambda: server.phase(two.round) == "evaluated")
        assert len(calls) == 1 and not beside.idle
        # 2. The second process gave another ranking, of both: it runs again after a minute, then after two.
        may.set()
        until(lambda: len(calls) == 2 and beside.idle)
        for after, count in ((59.0, 2), (1.0, 4), (119.0, 4), (1.0, 6)):
            now[0] += after
            until(lambda count=count: len(calls) == count and beside.idle)  # type: ignore[misc]
            clockwork.tick(server.store, server.settings, aside=beside.begin)
            assert beside.idle and len(calls) == count
        problem = server.anyone().get(one.path).json()["problem"]
        assert problem["code"] == "guard_failed" and server.phase(one.round) == "evaluated"
        beside.close()
        assert not any(thread.name == "aside" for thread in threading.enumerate())
