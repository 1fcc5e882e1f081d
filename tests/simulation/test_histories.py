"""Whatever happens, in whichever order: attempts end in every way, machines go, dispatchers die, stand by, are cut off and come back late."""

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import worlds
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from worlds import LEASE, Beginning, Process, World

from acclimate_competitions.phases import Phase as RoundPhase
from acclimate_runners.jobs import Job
from acclimate_runners.runner import Status

FAILURES = (
    "preempted", "runner_failed", "runner_lost", "hung", "job_failed", "limit_exceeded", "out_of_memory", "no_space", "cancelled",
)  # fmt: skip
KINDLY = frozenset({"preempted", "runner_failed", "runner_lost", "no_space", "cancelled"})
"""Ends that change nothing of what comes out, however often; the others do once their budget is spent."""
BEGINNING: list[Beginning] = []
RANKING: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def beginning(tmp_path_factory: pytest.TempPathFactory) -> None:
    BEGINNING[:] = [worlds.begin(tmp_path_factory.mktemp("beginning"), entrants=2)]
    world = World(BEGINNING[0], tmp_path_factory.mktemp("undisturbed"))
    try:
        world.finish()
        RANKING[:] = [world.ranking()]
    finally:
        world.close()


class Histories(RuleBasedStateMachine):
    """Two dispatchers of folders of their own, at most, and whoever came before them."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.world = World(BEGINNING[0], Path(self._folder.name), fates=self._fate)
        self.fates: list[tuple[str, float]] = []
        self.tries: dict[tuple[str, str], int] = {}
        self.living: dict[str, Process] = {}
        # Stopped processes, which may come back at any time.
        self.paused: list[Process] = []
        self.number = 0

    def _fate(self, name: str, job: Job) -> tuple[Status | None, float]:
        if not self.fates:
            return None, worlds.seconds(job)
        code, seconds = self.fates.pop(0)
        attempt = name.partition("/")[0]
        count = self.tries[attempt, code] = self.tries.get((attempt, code), 0) + 1
        # Once more and its class would be spent: that is an end of its own, which the rules of retries.py are tested for.
        if code not in KINDLY and count > 1:
            return None, worlds.seconds(job)
        if code == "runner_failed" and count > 8:
            return None, worlds.seconds(job)
        return Status("failed", reason=f"it was to be {code}", code=code), seconds

    @initialize()
    def one_leads(self) -> None:
        self.living["data"] = self.world.process("data")

    @rule(code=st.sampled_from(FAILURES), seconds=st.floats(0, 10))
    def the_next_attempt_fails(self, code: str, seconds: float) -> None:
        self.fates.append((code, seconds))

    @rule(seconds=st.sampled_from([0.5, 2, 10, 60]), steps=st.integers(1, 3))
    def time_goes_on(self, seconds: float, steps: int) -> None:
        for _ in range(steps):
            for process in list(self.living.values()):
                process.step()
            self.world.others()
            self.world.clock.forward(seconds=seconds)

    @precondition(lambda self: "data" in self.living)
    @rule(after=st.integers(1, 12))
    def the_dispatcher_dies_in_the_middle_and_is_started_again(self, after: int) -> None:
        process = self.living.pop("data")
        process.gate.dies_at = len(process.gate.passed) + after
        for _ in range(4):
            process.step()
            self.world.others()
            self.world.clock.forward(seconds=1)
        process.die()
        self.living["data"] = self.world.process("data")

    @precondition(lambda self: len(self.living) < 2)
    @rule()
    def another_stands_by(self) -> None:
        self.number += 1
        self.living[f"standby-{self.number}"] = self.world.process(f"standby-{self.number}")

    @precondition(lambda self: len(self.living) == 2)
    @rule(forget=st.booleans())
    def a_process_is_paused_for_longer_than_its_lease(self, forget: bool) -> None:
        name = next(iter(self.living))
        paused = self.living.pop(name)
        (paused.die if forget else lambda: self.paused.append(paused))()
        self.world.clock.forward(seconds=LEASE + 1)
        # Its folder is taken; the next one in its place is another's.
        for process in self.living.values():
            process.step()

    @precondition(lambda self: self.paused)
    @rule(steps=st.integers(1, 3), index=st.integers(0, 5))
    def a_paused_process_wakes_up_and_goes_on(self, steps: int, index: int) -> None:
        process = self.paused[index % len(self.paused)]
        for _ in range(steps):
            process.step()

    @precondition(lambda self: self.world.cluster.attempts)
    @rule(index=st.integers(0, 50))
    def a_machine_goes_and_takes_an_attempt_with_it(self, index: int) -> None:
        names = sorted(self.world.cluster.attempts)
        self.world.cluster.lose(names[index % len(names)])

    @invariant()
    def the_history_is_as_it_must_be(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """Left alone, the round comes to its end, and to the same ranking."""
        try:
            self.fates.clear()
            if not self.living:
                self.number += 1
                self.living["last"] = self.world.process(f"standby-{self.number}")
            for _ in range(600):
                if self.world.state().phase is RoundPhase.EVALUATED:
                    break
                self.time_goes_on(30, 1)
            assert self.world.state().phase is RoundPhase.EVALUATED, self.world.told()
            # A zombie that comes back now finds that all is done.
            for process in self.paused:
                process.step()
            self.world.check()
            assert self.world.ranking() == RANKING[0]
        finally:
            self.world.close()
            with suppress(OSError):
                self._folder.cleanup()


def run(examples: int, steps: int) -> None:
    given = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    machine: Callable[[], RuleBasedStateMachine] = Histories
    run_state_machine_as_test(machine, settings=given)


def test_some_histories() -> None:
    run(4, 12)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_histories() -> None:
    """Forty, of thirty moves each: two seconds of a processor's time each, so under ten minutes also where five times as much is to be done."""
    run(40, 30)
