"""One pass of admission over ten thousand queued stages: what is left, its order, its rows, and what is handed out."""

import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import crowds
import worlds
from worlds import World

from acclimate_competitions.phases import Phase

ENTRIES = 1667
"""Of six preparations each."""
PASSES = 10


def measure(folder: Path, entries: int = ENTRIES) -> list[tuple[str, float]]:
    """Wall and processor seconds of the first pass, which plans all and writes it down, and the median of those after."""
    beginning = worlds.begin(folder / "beginning", entrants=1)
    with closing(World(beginning, folder / "world")) as world:
        process = world.process()
        while world.state().phase is Phase.OPEN and world.checking():
            process.step()
            world.clock.forward(seconds=1)
        crowds.fill(world, entries)
        world.others()
        term = process.dispatcher._term
        assert term is not None and term._leader is not None
        passes = term._leader._admission.plan
        process.step()
        world.others()
        # What is handed out is not the pass's own time, and on this pool it is four attempts.
        world.cluster.machines = ()
        term.host.machines = ()
        seconds, spent = [], []
        for _ in range(1 + PASSES):
            began, before = time.perf_counter(), time.process_time()
            passes()
            seconds.append(time.perf_counter() - began)
            spent.append(time.process_time() - before)
        state = world.state()
        stages = len(state.preparations) - len(state.prepared)
    return [
        (f"admission, first pass over {stages} stages", seconds[0]),
        ("… of the processor", spent[0]),
        (f"admission, each later pass over {stages} stages", statistics.median(seconds[1:])),
        ("… of the processor", statistics.median(spent[1:])),
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for name, value in measure(Path(temporary), *map(int, sys.argv[1:])):
            sys.stdout.write(f"{name}: {value:.3f} s\n")
