"""Greedy generation: what a model writes on from each prompt, up to a stop string.

The prompts of a batch are padded on the left, keys and values are kept, and the largest logit is the next token, the first of equal ones. In which batch
a prompt is read follows from the prompts' tokens alone, not from their order, and equal prompts are read once. A text ends before the first stop
string in what its tokens decode to, wherever tokens begin and end, or at the model's own end-of-text token; and at the latest where it has the bytes
that a text may have (`most_bytes`): how long a token's text is, is the entrant's to say, and a table of predictions must stay one that can be read.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from acclimate_competitions.tasks import Task
from acclimate_runners import packing
from acclimate_runners.network import Network

_TOKENS_MORE = 4
"""Tokens looked at behind as many as a stop string has bytes: special ones decode to nothing."""
BYTES_A_TOKEN, LEAST_BYTES = 64, 1024
"""Bytes that a text may have for each token that it may have, and bytes that any text may have: real texts have about four a token."""
TABLE_BYTES = 256 << 20
"""Bytes that all texts of a table may have: with its other columns that is less than what any reader takes (bounds.LEAST)."""


def most_bytes(task: Task, rows: int) -> int:
    """Bytes of UTF-8 that the text of each of so many rows may have. It follows from the task and the holdout alone."""
    return min(max(LEAST_BYTES, BYTES_A_TOKEN * task.max_tokens), TABLE_BYTES // max(1, rows))


def shortened(text: str, most: int) -> str:
    """A text's longest beginning of at most so many bytes of UTF-8 that splits no character."""
    raw = text.encode()
    return text if len(raw) <= most else raw[:most].decode("utf-8", "ignore")


def cut(text: str, stops: Sequence[str]) -> str:
    """A text up to the first stop string in it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def generate(model: Network, tokenizer: Any, task: Task, prompts: Sequence[Sequence[int]]) -> list[str | None]:
    """What the model writes behind each prompt; None where its numbers are none.

    Args:
        model: its weights as they are now.
        tokenizer: decodes.
        task: its stop and max_tokens.
        prompts: tokens, at least one a prompt.
    """
    model.model.eval()
    distinct = sorted({tuple(prompt) for prompt in prompts}, key=lambda prompt: (len(prompt), prompt))
    lengths = np.array([len(prompt) + task.max_tokens for prompt in distinct], dtype=np.int64)
    most = most_bytes(task, len(prompts))
    found: dict[tuple[int, ...], str | None] = {}
    for part in packing.batches(lengths):
        batch = [distinct[place] for place in part.tolist()]
        with torch.no_grad():
            written = _Batch(model, batch).write(tokenizer, task)
        for prompt, ids in zip(batch, written, strict=True):
            text = None if ids is None else tokenizer.decode(ids, skip_special_tokens=True)
            found[prompt] = None if text is None else shortened(cut(text, task.stop), most)
    return [found[tuple(prompt)] for prompt in prompts]


class _Batch:
    """Prompts that are written on from at once."""

    def __init__(self, model: Network, prompts: Sequence[Sequence[int]]) -> None:
        longest, rows = max(map(len, prompts)), len(prompts)
        self._model, self._cache = model, model.new_cache()
        inputs, seen = np.zeros((rows, longest), dtype=np.int64), np.zeros((rows, longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            inputs[row, longest - len(prompt) :], seen[row, longest - len(prompt) :] = prompt, 1
        self._inputs, self._seen = torch.from_numpy(inputs), torch.from_numpy(seen)
        self._positions = (self._seen.cumsum(dim=1) - 1).clamp(min=0)
        # The prompts that the rows are of: a row is left out some time after its text has ended.
        self._of = list(range(rows))
        self._written: list[list[int] | None] = [[] for _ in prompts]

    def write(self, tokenizer: Any, task: Task) -> list[list[int] | None]:
        """The tokens behind each prompt; None where a logit is no number."""
        ends, ended = _ends(self._model), set[int]()
        tail = _TOKENS_MORE + max(len(stop.encode()) for stop in task.stop)
        for step in range(task.max_tokens):
            logits = self._model.continued(self._inputs, seen=self._seen, positions=self._positions, cache=self._cache)
            usable, chosen = torch.isfinite(logits).all(dim=1).cpu().tolist(), logits.argmax(dim=1).cpu()
            for row, (prompt, token) in enumerate(zip(self._of, chosen.tolist(), strict=True)):
                written = self._written[prompt]
                if prompt in ended or written is None:
                    continue
                if not usable[row]:
                    self._written[prompt] = None
                elif token not in ends:
                    written.append(token)
                if not usable[row] or token in ends:
                    ended.add(prompt)
            ended |= self._stopped(tokenizer, task, ended, tail=tail)
            if len(ended) == len(self._written):
                break
            if step + 1 < task.max_tokens:
                self._go_on(chosen, ended)
        return self._written

    def _stopped(self, tokenizer: Any, task: Task, ended: set[int], *, tail: int) -> set[int]:
        going = [(prompt, ids) for prompt in self._of if prompt not in ended and (ids := self._written[prompt])]
        texts = tokenizer.decode_batch([ids[-tail:] for _, ids in going], skip_special_tokens=True)
        return {
            prompt for (prompt, _), text in zip(going, texts, strict=True) if any(stop in text for stop in task.stop)
        }

    def _go_on(self, chosen: torch.Tensor, ended: set[int]) -> None:
        """The chosen tokens are what is read next; rows whose text has ended go once they are half of all."""
        going = [row for row, prompt in enumerate(self._of) if prompt not in ended]
        self._inputs, self._positions = chosen[:, None], self._positions[:, -1:] + 1
        self._seen = torch.cat([self._seen, torch.ones_like(self._inputs)], dim=1)
        if 2 * len(going) <= len(self._of):
            rows = torch.tensor(going)
            self._cache.batch_select_indices(rows.to(self._model.device))
            self._inputs, self._positions, self._seen = self._inputs[rows], self._positions[rows], self._seen[rows]
            self._of = [self._of[row] for row in going]


def _ends(model: Network) -> set[int]:
    """The model's own end-of-text tokens, as its config.json names them."""
    named = model.facts.config.get("eos_token_id")
    return set(named) if isinstance(named, list) else set() if named is None else {named}
