"""What a child says of where it stands, and that it goes on.

Whoever waits for it takes silence for a hang (watch.py). So it speaks as often as something is done, whatever that is: a step, or a batch
of it, or a batch of a validation or of an evaluation; but not more often than once a second, as each word costs a line in a pipe.
"""

import time
from collections.abc import Callable

_EVERY = 1.0


class Words:
    """The words of one child.

    Args:
        progress: takes (step, total, what).
        clock: seconds that never go back.
    """

    def __init__(
        self, progress: Callable[[int, int, str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress, self._clock = progress, clock
        self._word, self._said = (0, 0, ""), clock()

    def say(self, step: int, total: int, what: str) -> None:
        """Say it at once."""
        self._word, self._said = (step, total, what), self._clock()
        self._progress(*self._word)

    def now(self, step: int, total: int, what: str) -> None:
        """Say it at once where `what` is new, else when a second has passed since the last word."""
        if what != self._word[2]:
            self.say(step, total, what)
            return
        self._word = (step, total, what)
        self.again()

    def again(self) -> None:
        """Something is done, though no whole step: the last word once more, when a second has passed since."""
        if self._clock() - self._said >= _EVERY:
            self.say(*self._word)
