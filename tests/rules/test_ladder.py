"""The practice board: what it tells, and that guessing does not climb it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acclimate_competitions.ladder import Ladder


def test_only_an_improvement_beyond_its_error_is_told():
    n = 400
    losses = np.r_[np.ones(200), np.zeros(200)]
    board = Ladder().submit(losses)
    assert (board.released, board.submissions) == (0.5, 1)
    little = losses.copy()
    little[:1] = 0  # 1/400 better, its error is 1/400
    again = board.submit(little)
    assert (again.released, again.submissions) == (0.5, 2)
    assert again.best is board.best
    much = losses.copy()
    much[:40] = 0
    assert board.submit(much).released == pytest.approx(0.4)
    assert board.submit(np.ones(n)).released == 0.5


def test_a_released_loss_is_a_multiple_of_one_in_n():
    board = Ladder().submit(np.array([0.3, 0.31, 0.9]))
    assert board.released * 3 == pytest.approx(round(board.released * 3))


@given(st.lists(st.lists(st.integers(0, 1), min_size=6, max_size=6), max_size=8))
def test_it_never_rises_and_the_best_is_what_it_is_of(submissions):
    board, before = Ladder(), math.inf
    for losses in submissions:
        board = board.submit(np.array(losses, dtype=float))
        assert board.released <= before
        before = board.released
    if submissions:
        assert board.best.mean() == pytest.approx(board.released)
        assert board.submissions == len(submissions)


@pytest.mark.parametrize("losses", [[], [math.nan, 1.0], [1.0, 0.0, 0.0]])
def test_losses_must_be_of_the_same_examples(losses):
    with pytest.raises(ValueError, match="examples"):
        Ladder().submit(np.array([1.0, 0.0])).submit(np.array(losses))


def attack(seed, n=4000, k=400):
    """Loss of the majority of random guesses that a board seems to praise: of full precision, and of the Ladder."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, size=n)
    guesses = random.integers(0, 2, size=(k, n))
    board, lowered = Ladder(), []
    for guess in guesses:
        before, board = board.released, board.submit((guess != labels).astype(float))
        lowered.append(board.released < before)

    losses = (guesses != labels).mean(axis=1)

    def majority(chosen):
        # An attacker breaks ties by the best of those that vote.
        votes, best = guesses[chosen].mean(axis=0), guesses[np.where(chosen, losses, 1.0).argmin()]
        vote = np.where(votes == 0.5, best, votes > 0.5)
        return float((vote != labels).mean())

    return majority(losses < 0.5), majority(np.array(lowered))


def test_a_board_of_full_precision_is_climbed_by_guessing_and_the_ladder_is_not():
    found = np.array([attack(seed) for seed in range(12)])
    full, ladder = found.mean(axis=0)
    assert full == pytest.approx(0.43, abs=0.01)
    assert ladder == pytest.approx(0.484, abs=0.006)
