"""A round whose children, dispatchers and database are killed by a drawn plan: the ranking is the bytes of an undisturbed one's."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import chaos
import dispatching
import pytest
from buckets import Place
from chaos import Play
from dispatching import Process
from engines import Server


@dataclass(frozen=True)
class Blow:
    """What is done to a round, once its history has so many events."""

    after: int
    what: str


def planned(seed: int, *, events: int, kinds: dict[str, int]) -> list[Blow]:
    """Blows of these kinds, so many of each, drawn over a history of about so many events."""
    draw = random.Random(seed)
    kinds_drawn = [kind for kind, count in kinds.items() for _ in range(count)]
    draw.shuffle(kinds_drawn)
    moments = sorted(draw.randrange(2, events) for _ in kinds_drawn)
    return [Blow(moment, kind) for moment, kind in zip(moments, kinds_drawn, strict=True)]


class Disturbed:
    """A leader and a standby, started again wherever one was killed, and what can be done to them."""

    def __init__(self, play: Play, seed: int, **outages: Callable[[], None]) -> None:
        self._play, self._draw, self._outages = play, random.Random(seed), outages
        self._here: dict[str, Process] = {}
        self.done: list[str] = []

    def tend(self) -> None:
        """Start what is not there."""
        for name in ("one", "two"):
            if name not in self._here or self._here[name].process.poll() is not None:
                self._here[name] = self._play.start(name)

    def strike(self, blow: Blow) -> bool:
        """Do it; False where there is nobody to do it to yet."""
        if blow.what in self._outages:
            self._outages[blow.what]()
        else:
            found = self._victims(blow.what)
            if not found:
                return False
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._draw.choice(sorted(found)), signal.SIGKILL)
        self.done.append(blow.what)
        return True

    def _victims(self, what: str) -> list[int]:
        if what == "child":
            return dispatching.children(str(self._play.folder))
        leads = self._play.leader()
        here = [process for process in self._here.values() if process.process.poll() is None]
        # Who says of itself that it leads is the one whose name the lease has.
        names = {process.process.pid: {line["holder"] for line in process.events("started")} for process in here}
        return [pid for pid, holders in names.items() if (leads in holders) == (what == "leader")]


def play_out(play: Play, plan: list[Blow], *, seed: int, **outages: Callable[[], None]) -> Disturbed:
    """The round to its evaluation, through all that is planned."""
    left, disturbed = list(plan), Disturbed(play, seed, **outages)

    def over() -> bool:
        disturbed.tend()
        if left and len(play.rows()) >= left[0].after and disturbed.strike(left[0]):
            left.pop(0)
        return play.phase == "evaluated"

    play.until(over, within=1500)
    return disturbed


@pytest.mark.timeout(600)
def test_a_round_whose_children_and_dispatchers_are_killed_comes_out_the_same(tmp_path: Path) -> None:
    seed, entrants = 20261, 6
    expected = chaos.undisturbed(tmp_path / "undisturbed", entrants=entrants)
    plan = planned(seed, events=30, kinds={"child": 2, "leader": 2, "standby": 1})
    with Play.begun(tmp_path / "disturbed", entrants=entrants) as play:
        disturbed = play_out(play, plan, seed=seed)
        words = f"plan of seed {seed}: {plan}; done: {disturbed.done}"
        assert play.wrong() == [], words
        assert play.outcome() == expected, words
        assert len(disturbed.done) >= 3 and "leader" in disturbed.done, words


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_round_of_forty_through_everything_comes_out_the_same(
    tmp_path: Path, postgresql: Server, postgresql_url: str, s3_place: Place
) -> None:
    seed, entrants = int(os.environ.get("CHAOS_SEED", "4020")), 40
    expected = chaos.undisturbed(tmp_path / "undisturbed", entrants=entrants)
    kinds = {"child": 12, "leader": 6, "standby": 3, "database": 3, "blobs": 3, "pause": 3}
    plan = planned(seed, events=230, kinds=kinds)
    draw = random.Random(seed)

    def database() -> None:
        postgresql.stop("immediate")
        time.sleep(draw.uniform(0.0, 2 * chaos.LEASE))
        postgresql.start()

    def blobs() -> None:
        weed = s3_place.server.process
        assert weed is not None
        os.kill(weed.pid, signal.SIGSTOP)
        time.sleep(draw.uniform(0.0, 2 * chaos.LEASE))
        os.kill(weed.pid, signal.SIGCONT)

    given = {"database": postgresql_url, **s3_place.settings}
    with Play.begun(tmp_path / "disturbed", entrants=entrants, **given) as play:

        def pause() -> None:
            paused = [process for process in play.processes if process.process.poll() is None]
            one = draw.choice(paused)
            one.signal(signal.SIGSTOP)
            time.sleep(1.5 * chaos.LEASE)
            one.signal(signal.SIGCONT)

        disturbed = play_out(play, plan, seed=seed, database=database, blobs=blobs, pause=pause)
        words = f"plan of seed {seed}: {plan}; done: {disturbed.done}"
        assert play.wrong() == [], words
        assert play.outcome() == expected, words
        assert set(disturbed.done) == set(kinds), words
