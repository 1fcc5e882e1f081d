"""Threads for work on blobs, apart from those that serve everything else.

A blob store on S3 may be silent for minutes. Whoever waits for it must not hold a thread that a request needs which asks for no blob: so
there are few places for such work, far fewer than the threads of the pool, and who finds none is told to come again instead of waiting.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread

from acclimate_competitions.errors import Refusal

T = TypeVar("T")
PLACES = 16
"""How many may be at work at once; the shared pool has 40 threads."""


class Lane:
    """At most so many pieces of work at once; one that comes when all places are taken is refused.

    Args:
        places: how many.
    """

    def __init__(self, places: int = PLACES) -> None:
        self._threads = anyio.CapacityLimiter(places)
        self._places, self._taken = places, 0

    async def run(self, work: Callable[..., T], *arguments: object, wait: bool = False, **named: object) -> T:
        """Call a function in one of the lane's own threads.

        Args:
            work: what may hang.
            arguments: its own.
            wait: until a place is free, as for the next piece of something that was begun; else it is refused.
            named: its own, too.

        Raises:
            Refusal: busy, where no place is free; whatever `work` raises.
        """
        if not wait and self._threads.available_tokens < 1:
            raise _full()
        return await anyio.to_thread.run_sync(partial(work, *arguments, **named), limiter=self._threads)

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of as many places for work that runs in the shared pool; to be taken on the event loop.

        Raises:
            Refusal: busy, where none is free.
        """
        if self._taken >= self._places:
            raise _full()
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


def _full() -> Refusal:
    return Refusal("busy", "the store of blobs has all it can do", hint="the same request again in a moment will do")
