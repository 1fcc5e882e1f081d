"""The practice board: a parameter-free Ladder for each entrant, which tells of an improvement only where it is one. numpy only.

Whoever sends many guesses to a board of full precision, and lets those vote that scored above average, climbs without having learnt anything. The
Ladder answers with a new loss only if it is lower than the best so far by more than the standard error of the difference, and rounds it.

Source: Blum & Hardt, The Ladder: A Reliable Leaderboard for Machine Learning Competitions (the parameter-free version).
"""

import math
from dataclasses import dataclass

import numpy as np

from acclimate_competitions.scores import Floats


@dataclass(frozen=True)
class Ladder:
    """An entrant's place on the board.

    Attributes:
        released: the loss that the entrant was told last, a multiple of 1/n; infinite before the first submission.
        best: [n], the losses by example of the submission that it is of; None before the first.
        submissions: how many there were.
    """

    released: float = math.inf
    best: Floats | None = None
    submissions: int = 0

    def submit(self, losses: Floats) -> "Ladder":
        """The board after a submission with these losses by example, [n ≥ 1], always of the same examples.

        Accepted if the mean loss is below released − s/√n, with s the sample deviation of the differences to the best so far, at first of the losses.

        Raises:
            ValueError: losses that are not n finite numbers.
        """
        n = len(losses)
        if n == 0 or not np.isfinite(losses).all() or (self.best is not None and len(self.best) != n):
            raise ValueError(f"losses of the same {n if self.best is None else len(self.best)} examples, all finite")
        mean = math.fsum(losses.tolist()) / n
        differences = losses if self.best is None else losses - self.best
        s = float(differences.std(ddof=1)) if n > 1 else 0.0
        if mean < self.released - s / math.sqrt(n):
            return Ladder(round(mean * n) / n, losses.copy(), self.submissions + 1)
        return Ladder(self.released, self.best, self.submissions + 1)
