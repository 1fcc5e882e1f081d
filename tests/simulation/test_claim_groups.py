"""Attempts that are claimed together: what one of them meets is no other's business."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import crowds
import pytest
import worlds
from sqlalchemy import select, text
from worlds import Beginning, ImaginedRunner, World

from acclimate import event_history
from acclimate.lead import TOGETHER
from acclimate.store import attempts, stages, submissions
from acclimate_competitions.phases import Phase

ENTRIES = TOGETHER + 4


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Beginning:
    return worlds.begin(tmp_path_factory.mktemp("beginning"), entrants=1)


@pytest.fixture
def world(beginning: Beginning, tmp_path: Path) -> Iterator[World]:
    """A closed round whose entries wait for their preparation, all of which have room."""
    with closing(World(beginning, tmp_path / "world", slots=64)) as made:
        process = made.process()
        while made.checking():
            process.step()
            made.clock.forward(seconds=1)
        process.stop()
        made.processes.clear()
        crowds.fill(made, ENTRIES - 1)
        made.others()
        yield made


def driven(world: World, phase: Phase, *, limit: int = 60) -> worlds.Process:
    process = world.process()
    for _ in range(limit):
        process.step()
        if world.state().phase is phase:
            return process
        world.others()
        world.clock.forward(seconds=1)
    raise AssertionError(f"the round is {world.state().phase}: {world.told()}")


def tries(world: World) -> list[Any]:
    with world.store.snapshot() as tx:
        return list(tx.execute(select(attempts).where(attempts.c.kind == "prepare")).all())


def test_all_that_has_room_is_claimed_in_few_transactions_and_each_before_its_runner_hears_of_it(world: World) -> None:
    process = driven(world, Phase.PREPARED)
    passed = process.gate.passed
    first, last = passed.index("start"), len(passed) - passed[::-1].index("start")
    # Sixteen starts follow one write, and four another.
    assert passed[first - 1] == "write" and passed[first:last] == ["start"] * TOGETHER + ["write"] + ["start"] * 4
    rows = tries(world)
    assert len(rows) == ENTRIES and {(row.fence, row.state) for row in rows} == {(1, "committed")}
    assert len({row.claimed for row in rows}) <= 2
    world.check()


def test_what_was_claimed_with_one_that_its_runner_refuses_waits_uncharged_and_no_longer_than_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, asked = ImaginedRunner.start, list[str]()

    def refusing(self: ImaginedRunner, name: str, *given: Any, **more: Any) -> Any:
        asked.append(name)
        if len(asked) == 3:
            raise OSError("the cluster takes nothing")
        return start(self, name, *given, **more)

    monkeypatch.setattr(ImaginedRunner, "start", refusing)
    process = world.process()
    for _ in range(20):
        process.step()
        if len(asked) == 3:
            break
        world.others()
        world.clock.forward(seconds=1)
    rows = tries(world)
    # Two run, one was refused, thirteen were claimed with them and asked of nobody, four were not claimed.
    assert sorted(row.state for row in rows) == ["given_back"] * (TOGETHER - 2) + ["running"] * 2
    codes = sorted(row.code for row in rows if row.state == "given_back")
    assert codes == ["let_go"] * (TOGETHER - 3) + ["runner_lost"] and len(asked) == 3
    with world.store.snapshot() as tx:
        waiting = tx.execute(select(stages).where(stages.c.kind == "prepare", stages.c.state == "pending")).all()
    assert {(row.attempts, row.not_before) for row in waiting} == {(0, None)}
    process.stop()
    world.processes.clear()
    driven(world, Phase.PREPARED)
    world.check()


def test_one_that_can_not_be_claimed_leaves_those_claimed_with_it_alone(world: World) -> None:
    with world.store.snapshot() as tx:
        name = tx.execute(select(submissions.c.id).where(submissions.c.entrant == "crowd-00007")).scalar_one()
    refusing = (
        "CREATE TRIGGER refusing BEFORE INSERT ON attempts"
        f" WHEN NEW.submission = '{name}' BEGIN SELECT RAISE(ABORT, 'not this one'); END"
    )
    with world.store.transaction() as tx:
        tx.execute(text(refusing))
    process = world.process()
    for _ in range(20):
        process.step()
        world.others()
        world.clock.forward(seconds=1)
        if len(world.state().prepared) == len(world.state().preparations) * (ENTRIES - 1) // ENTRIES:
            break
    rows = tries(world)
    assert {row.state for row in rows} == {"committed"} and len(rows) == ENTRIES - 1
    assert name not in {row.submission for row in rows}
    process.stop()
    world.processes.clear()
    with world.store.transaction() as tx:
        tx.execute(text("DROP TRIGGER refusing"))
    driven(world, Phase.PREPARED)
    world.check()


def test_a_process_that_dies_with_all_of_a_group_claimed_leaves_each_for_a_later_fence(world: World) -> None:
    # What it does is the same each time: it dies before the third start of its first group.
    first = world.process()
    seen = starts_before_death(world, first)
    world.processes.remove(first)
    first.die()
    assert seen == 2
    second = driven(world, Phase.PREPARED)
    rows = tries(world)
    assert {row.state for row in rows if row.fence > 1} <= {"committed"} and not second.gate.dead
    with world.store.snapshot() as tx:
        found = [
            event_history.Event(row.attempt, row.fence, row.epoch, row.event)
            for row in tx.execute(select(worlds.events).order_by(worlds.events.c.id))
        ]
    assert event_history.problems(found) == []
    world.check()


def starts_before_death(world: World, process: worlds.Process) -> int:
    """Let it die before its third start; how many it had made."""
    go = process.gate.go

    def dying(what: str) -> None:
        if what == "start" and process.gate.passed.count("start") == 2:
            process.gate.dead = True
        go(what)

    process.gate.go = dying  # type: ignore[method-assign]
    for _ in range(20):
        if process.gate.dead:
            break
        process.step()
        world.others()
        world.clock.forward(seconds=1)
    return process.gate.passed.count("start")
