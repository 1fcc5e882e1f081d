"""A round whose children, dispatchers and database are killed by a drawn plan: the ranking is the bytes of an undisturbed one's."""

import os
import random
import signal
import time
from pathlib import Path

import chaos
import pytest
from blows import planned, play_out
from buckets import Place
from chaos import Play
from engines import Server


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


SEEDS = [int(seed) for seed in os.environ.get("CHAOS_SEED", "4020,4021,4022").split(",")]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_round_of_forty_through_everything_comes_out_the_same(
    tmp_path: Path, postgresql: Server, postgresql_url: str, s3_place: Place, seed: int
) -> None:
    entrants = 40
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
