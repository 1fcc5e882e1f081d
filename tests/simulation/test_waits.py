"""What waits between tries: long outages, leaders that change in between, and what goes on meanwhile."""

from contextlib import closing
from pathlib import Path

import pytest
import worlds
from sqlalchemy import func, select
from worlds import Beginning, World

from acclimate.service import attempts as told
from acclimate.store import attempts, events, stages
from acclimate_competitions.phases import Phase
from acclimate_competitions.records import format_time, parse_time
from acclimate_runners.jobs import Job
from acclimate_runners.runner import Status

OUT = Status("failed", reason="the store of blobs does not answer", code="blobs_unreachable")
BROKEN = Status("failed", reason="its actor died", code="runner_failed", machine="node-0")


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Beginning:
    return worlds.begin(tmp_path_factory.mktemp("beginning"), entrants=1)


@pytest.mark.parametrize(
    ("hours", "tries"), [(1, 40), pytest.param(72, 2000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_an_outage_fills_no_database_and_the_round_ends_soon_after(
    beginning: Beginning, tmp_path: Path, hours: int, tries: int
) -> None:
    def fate(name: str, job: Job) -> tuple[Status | None, float]:
        return (OUT, 1.0) if world.now() < ends else (None, worlds.seconds(job))

    with closing(World(beginning, tmp_path, fates=fate)) as world:
        process, ends = world.process(), world.now() + hours * 3600
        while world.now() < ends:
            process.step()
            world.others()
            world.clock.forward(seconds=30)
        with world.store.snapshot() as tx:
            (count,) = tx.execute(select(func.count()).select_from(attempts).group_by(attempts.c.attempt)).scalars()
            noted = tx.execute(select(func.count()).select_from(events)).scalar_one()
        # At every step it would be 120 an hour.
        assert hours * 5 < count < tries and noted <= 3 * count
        for _ in range(240):
            process.step()
            world.others()
            if world.state().phase is Phase.EVALUATED:
                break
            world.clock.forward(seconds=5)
        else:
            raise AssertionError(f"twenty minutes later the round is {world.state().phase}: {world.told()}")
        world.check()


def test_what_goes_on_is_adopted_at_once_however_long_its_next_try_would_wait(
    beginning: Beginning, tmp_path: Path
) -> None:
    ends = [OUT] * 6

    def fate(name: str, job: Job) -> tuple[Status | None, float]:
        return (ends.pop(0), 1.0) if ends else (None, 1000.0)

    with closing(World(beginning, tmp_path, fates=fate)) as world:
        process = world.process()
        while len(world.cluster.started) < 7:
            process.step()
            world.clock.forward(seconds=5)
        process.die()
        world.processes.remove(process)
        process = world.process()
        process.step()
        world.clock.forward(seconds=1)
        process.step()
        with world.store.snapshot() as tx:
            newest = tx.execute(select(events).order_by(events.c.id.desc()).limit(1)).one()
        assert (newest.event, newest.fence) == ("adopted", 7) and len(world.cluster.started) == 7


def test_a_new_leader_keeps_to_what_the_last_one_had_waiting_and_away_from_a_bad_machine(
    beginning: Beginning, tmp_path: Path
) -> None:
    ends = [BROKEN, BROKEN]

    def fate(name: str, job: Job) -> tuple[Status | None, float]:
        return (ends.pop(0), 1.0) if ends else (None, 10.0)

    with closing(World(beginning, tmp_path, fates=fate)) as world:
        process, failed = world.process(), 0
        while failed < 2:
            process.step()
            world.clock.forward(seconds=2)
            with world.store.snapshot() as tx:
                failed = len(tx.execute(select(events.c.id).where(events.c.event == "again")).all())
        process.die()
        world.processes.remove(process)
        with world.store.snapshot() as tx:
            row = tx.execute(select(stages)).one()
            left = (parse_time(row.not_before) - tx.now()).total_seconds()
        assert left > 1 and row.state == "pending"
        (stage,) = told.stage_list(world.store, None, row.round)
        assert (stage["not_before"], stage["attempts"], stage["tries"]) == (row.not_before, 2, 10)
        process = world.process()
        for share in (0.0, 0.5, 0.4):
            world.clock.forward(seconds=left * share)
            process.step()
            process.step()
            assert len(world.cluster.started) == 2, share
        world.clock.forward(seconds=left * 0.1 + 1)
        process.step()
        assert len(world.cluster.started) == 3
        assert world.cluster.asked[1].avoid == frozenset() and world.cluster.asked[2].avoid == {"node-0"}
        with world.store.snapshot() as tx:
            again = tx.execute(select(attempts).where(attempts.c.fence == 3)).one()
            assert again.claimed >= row.not_before and format_time(tx.now()) >= row.not_before
        (stage,) = told.stage_list(world.store, None, row.round)
        assert (stage["attempts"], stage["tries"]) == (3, 10)


def test_what_is_open_is_found_by_an_index(beginning: Beginning, tmp_path: Path) -> None:
    """Asked for twice a second, over all tries that there ever were."""
    with closing(World(beginning, tmp_path)) as world, world.store.snapshot() as tx:
        for states in ("'lost'", "'starting', 'running', 'verifying'"):
            query = f"EXPLAIN QUERY PLAN SELECT * FROM attempts WHERE state IN ({states}) AND attempt NOT IN ('a')"
            plan = tx.connection.exec_driver_sql(query).all()
            assert "USING INDEX ix_attempts_state" in plan[0][3], plan
        # And what each heartbeat and each end of a try writes down, over all stages.
        query = "UPDATE stages SET progress = 0 WHERE attempt = 'a' AND fence = 1 AND state IN ('running', 'verifying')"
        plan = tx.connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}").all()
        assert "USING INDEX ix_stages_attempt" in plan[0][3], plan
