"""Several sequences in one row, each seeing its own tokens only: a prompt with all of its answers, or documents side by side.

A model reads a row in one pass. Who sees whom is said by a group for each token, and a token's position is that of its own sequence, so
that the numbers are those of sequences read apart, but for the last bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from acclimate_runners import packing
from acclimate_runners.packing import Integers, Packed

SHARED = 0
"""Group of the tokens that all later ones of the row see: a prompt."""


@dataclass(frozen=True)
class Laid:
    """Rows that hold several sequences each.

    Attributes:
        inputs: [rows, longest] token numbers, 0 where padded.
        positions: [rows, longest] of each token in its own sequence.
        groups: [rows, longest] SHARED, or the sequence that it is part of; -1 where padded.
    """

    inputs: Integers
    positions: Integers
    groups: Integers

    def sees(self) -> "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]":
        """[rows, longest, longest] whether a token, of the second index, sees another: itself at least."""
        mine, theirs = self.groups[:, :, None], self.groups[:, None, :]
        causal = np.tri(self.inputs.shape[1], dtype=np.bool_)[None]
        seen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = causal & ((mine == theirs) | (theirs == SHARED))
        return seen


@dataclass(frozen=True)
class Answers:
    """Prompts with their answers, one prompt a row.

    Attributes:
        laid: what is read: the prompt, then each answer without its last token.
        at: [answers, longest answer] flat position in `laid` that predicts each token of an answer; 0 where there is none.
        tokens: [answers, longest answer] the token that is predicted there.
        real: [answers, longest answer] whether there is one.
    """

    laid: Laid
    at: Integers
    tokens: Integers
    real: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]"


def laid(rows: Sequence[Sequence[tuple[Sequence[int], int, int]]]) -> Laid:
    """Rows of (tokens, position of the first of them, group)."""
    longest = max((sum(len(ids) for ids, _, _ in row) for row in rows), default=0)
    inputs, positions = (np.zeros((len(rows), longest), dtype=np.int64) for _ in range(2))
    groups = np.full((len(rows), longest), -1, dtype=np.int64)
    for number, row in enumerate(rows):
        start = 0
        for ids, first, group in row:
            place = slice(start, start + len(ids))
            inputs[number, place], groups[number, place] = ids, group
            positions[number, place] = np.arange(first, first + len(ids))
            start += len(ids)
    return Laid(inputs, positions, groups)


def read_tokens(prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> int:
    """How many tokens a model reads of a prompt with its answers."""
    return len(prompt) + sum(len(answer) - 1 for answer in answers)


def answered(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Sequence[int]]]) -> Answers:
    """Each prompt in a row of its own, read once for all of its answers.

    Args:
        prompts: tokens of each prompt, at least one.
        answers: for each prompt the tokens of its answers, at least one an answer.
    """
    rows = [
        [(prompt, 0, SHARED), *((answer[:-1], len(prompt), number) for number, answer in enumerate(own, 1))]
        for prompt, own in zip(prompts, answers, strict=True)
    ]
    made = laid(rows)
    longest, width = made.inputs.shape[1], max((len(answer) for own in answers for answer in own), default=0)
    count = sum(len(own) for own in answers)
    at, tokens = (np.zeros((count, width), dtype=np.int64) for _ in range(2))
    real = np.zeros((count, width), dtype=np.bool_)
    number = 0
    for row, (prompt, own) in enumerate(zip(prompts, answers, strict=True)):
        end = row * longest + len(prompt)
        for answer in own:
            # The first token of an answer is predicted by the prompt's last; the others by those before them.
            at[number, 0], at[number, 1 : len(answer)] = (
                row * longest + len(prompt) - 1,
                np.arange(len(answer) - 1) + end,
            )
            tokens[number, : len(answer)], real[number, : len(answer)] = answer, True
            end += len(answer) - 1
            number += 1
    return Answers(made, at, tokens, real)


def side_by_side(rows: Packed) -> tuple[Laid, Integers]:
    """Sequences in as few rows as a simple rule finds, each no longer than the longest of them; and the labels, laid out alike.

    Longest first, each into the first row that has room: a pure function of the lengths and their order.
    """
    capacity = int(rows.lengths.max(initial=0))
    bins: list[list[int]] = []
    room: list[int] = []
    for row in np.argsort(-rows.lengths, kind="stable").tolist():
        length = int(rows.lengths[row])
        place = next((number for number, left in enumerate(room) if left >= length), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(capacity)
        bins[place].append(row)
        room[place] -= length
    made = laid(
        [
            [(rows.inputs[row, : rows.lengths[row]].tolist(), 0, group) for group, row in enumerate(bin_, 1)]
            for bin_ in bins
        ]
    )
    labels = np.full(made.inputs.shape, packing.NOT_SCORED, dtype=np.int64)
    for number, bin_ in enumerate(bins):
        start = 0
        for row in bin_:
            length = int(rows.lengths[row])
            labels[number, start : start + length] = rows.labels[row, :length]
            start += length
    return made, labels
