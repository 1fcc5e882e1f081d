"""The dispatcher dies before each of its writes and of its calls of the cluster, one run a place: the round comes to the same end."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import worlds
from worlds import Beginning, World


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Beginning:
    return worlds.begin(tmp_path_factory.mktemp("beginning"), entrants=2)


@pytest.fixture(scope="module")
def undisturbed(beginning: Beginning, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """The ranking's digest, and what the dispatcher did."""
    with closing(World(beginning, tmp_path_factory.mktemp("undisturbed"))) as world:
        done = world.finish()
        world.check()
        # Each was started once: two checks, two preparations, two evaluations.
        assert len(world.cluster.started) == 6 and all(name.endswith("/1") for name in world.cluster.started)
        yield world.ranking(), list(done.gate.passed)


def test_dead_at_some_points(beginning: Beginning, undisturbed: tuple[str, list[str]], tmp_path: Path) -> None:
    ranking, did = undisturbed
    for place in range(3, len(did) + 1, max(1, len(did) // 6)):
        dies(beginning, tmp_path / str(place), ranking, place)


@pytest.mark.slow
def test_dead_at_every_point(beginning: Beginning, undisturbed: tuple[str, list[str]], tmp_path: Path) -> None:
    ranking, did = undisturbed
    for place in range(1, len(did) + 1):
        dies(beginning, tmp_path / str(place), ranking, place)


def dies(beginning: Beginning, folder: Path, ranking: str, place: int) -> None:
    with closing(World(beginning, folder)) as world:
        first = world.finish(dies_at=place)
        assert first.gate.dead, place
        world.check()
        assert world.ranking() == ranking, place
        # What was under way when it died went on, and was adopted: nothing was done again.
        assert len(world.cluster.started) == 6, (place, world.cluster.started)
