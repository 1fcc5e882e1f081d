"""What the platform itself takes from the last release to the published ranking: opening, handing out, scoring, signing, ranking, verifying.

The models are imagined (tests/simulation/worlds.py): what a child would take is not in it, nor is what it takes to make up their predictions.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import crowds
import worlds
from worlds import World

from acclimate.service import publish
from acclimate_competitions.phases import Phase

ENTRIES = 1000


def measure(folder: Path, entries: int = ENTRIES) -> list[tuple[str, float]]:
    """Wall seconds of the parts, and of all together; processor seconds of all; without those of making up predictions."""
    beginning = worlds.begin(folder / "beginning", entrants=1)
    world = World(beginning, folder / "world", fates=lambda name, job: (None, 0.0), slots=64)
    with closing(world):
        process = world.process()
        while world.checking():
            process.step()
            world.clock.forward(seconds=1)
        crowds.fill(world, entries - 1)
        until(world, lambda: world.state().phase is Phase.PREPARED, process.step)
        # 1. The release, and with it the opening.
        imagined, computed = world.cluster.imagining, world.cluster.computing
        began, before = time.perf_counter(), time.process_time()
        world.others()
        while world.state().phase is Phase.RELEASED:
            process.step()
        opened = time.perf_counter()
        # 2. All evaluations, committed.
        until(world, lambda: world.state().phase is Phase.EVALUATED, process.step)
        evaluated = time.perf_counter() - (world.cluster.imagining - imagined)
        stages = len(world.state().evaluated)
        # 3. The ranking.
        publish.ranking(world.store, beginning.round)
        ranked = time.perf_counter() - (world.cluster.imagining - imagined)
        spent = time.process_time() - before - (world.cluster.computing - computed)
    return [
        ("release → opened", opened - began),
        (f"opened → evaluated, {stages} evaluations", evaluated - opened),
        ("evaluated → ranking", ranked - evaluated),
        (f"release → ranking, {entries} entries", ranked - began),
        ("… of the processor", spent),
    ]


def until(world: World, condition: Callable[[], bool], step: Callable[[], None]) -> None:
    """Step and let time go on until it is so; then nobody else has done anything yet."""
    while True:
        step()
        if condition():
            return
        world.others()
        world.clock.forward(seconds=1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for name, value in measure(Path(temporary), *map(int, sys.argv[1:])):
            sys.stdout.write(f"{name}: {value:.2f} s\n")
