"""Rows to tokens to batches: everything that is the same for all entrants with the same tokenizer, and free of any model.

A sequence is the beginning-of-text token where the tokenizer has one, the prompt's tokens, and the answer's tokens. Prompt and answer
are tokenized apart, so that an answer has the same tokens after every prompt; or together, where the task says so, by the rules of
lm-evaluation-harness (`_together`). A sequence that is longer than allowed loses tokens
at its left. A model reads a sequence without its last token, padded on the right; padding needs no mask, as a causal model never
looks to the right of an answer.
"""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from acclimate_competitions.errors import Refusal
from acclimate_competitions.tasks import Task
from acclimate_runners import prompts

BEGINNINGS = ("<bos>", "<s>", "<|begin_of_text|>", "<|endoftext|>")
"""Spellings of the beginning-of-text token; the first that the tokenizer knows is used."""

NOT_SCORED = -100
"""Label of a position that is not part of an answer."""

BATCH_TOKENS = 8192
"""Tokens of one batch where nothing is learned; part of the code's digest, as it can change the last bits of a number."""
CACHED_TOKENS = 2048
"""Those that a processor reads at once: what a layer makes of so many is still in its cache when the next operation asks for it."""
IMAGE_NUMBERS = 1 << 16
"""Those of images: one has thousands, of which a layer makes far fewer, so that alone it would take several times as long."""

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packed:
    """Sequences ready for a model.

    Attributes:
        inputs: [rows, longest] token numbers, 0 where padded.
        labels: [rows, longest] the next token where it belongs to the answer, else NOT_SCORED.
        lengths: [rows] tokens of each row of inputs.
    """

    inputs: Integers
    labels: Integers
    lengths: Integers

    def __len__(self) -> int:
        """How many sequences."""
        return len(self.lengths)


def load_tokenizer(path: Path, *, vocabulary: int | None = None) -> Any:
    """The tokenizer of a tokenizer.json: a tokenizers.Tokenizer that neither pads nor truncates.

    Args:
        path: of the file.
        vocabulary: how many tokens the model has; tokens that the file adds beyond these are left out, so that what spells one is read as any text.

    Raises:
        Refusal: model_invalid.
    """
    tokenizer = _parsed(path, beyond=())
    added = tokenizer.get_added_tokens_decoder() if vocabulary is not None else {}
    if beyond := [token.content for number, token in added.items() if number >= (vocabulary or 0)]:
        tokenizer = _parsed(path, beyond=beyond)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _parsed(path: Path, *, beyond: Collection[str]) -> Any:
    """The tokenizer of a file, without some of the tokens that it adds."""
    from tokenizers import Tokenizer

    try:
        text = path.read_text("utf-8")
        if beyond:
            value = json.loads(text)
            value["added_tokens"] = [token for token in value["added_tokens"] if token["content"] not in beyond]
            text = json.dumps(value)
        return Tokenizer.from_str(text)
    # The library raises bare Exception for anything it can't parse.
    except Exception as error:
        raise Refusal("model_invalid", f"tokenizer.json: {str(error)[:200]}", hint="save it again") from error


def tokens(tokenizer: Any, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
    """Token numbers of each text; special: with what the tokenizer's own post-processor puts around it.

    Raises:
        Refusal: model_invalid, where the tokenizer fails on a text.
    """
    try:
        return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=special)]
    except Exception as error:
        raise Refusal("model_invalid", f"the tokenizer fails on the competition's texts: {str(error)[:200]}") from error


def framed(tokenizer: Any, texts: Sequence[str], *, most: int) -> list[list[int]]:
    """Tokens of each text with what the tokenizer's own post-processor puts around it, such as [CLS] and [SEP].

    A longer text than `most` tokens with its frame loses tokens at its left, as all others do, and keeps its frame.

    Raises:
        Refusal: model_invalid, where the tokenizer fails on a text, or no text has room.
    """
    room = most - tokenizer.num_special_tokens_to_add(False)
    if room < 1:
        raise Refusal(
            "model_invalid", f"sequences of {most} tokens have no room beside what the tokenizer puts around a text"
        )
    try:
        encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        for encoding in encodings:
            encoding.truncate(room, direction="left")
        return [tokenizer.post_process(encoding).ids for encoding in encodings]
    except Exception as error:
        raise Refusal("model_invalid", f"the tokenizer fails on the competition's texts: {str(error)[:200]}") from error


def prompt_tokens(tokenizer: Any, task: Task, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Tokens of each row's prompt, behind the beginning-of-text token where the tokenizer has one."""
    _, beginning = _beginning(tokenizer)
    return [beginning + ids for ids in tokens(tokenizer, prompts.filled(task, rows))]


def _beginning(tokenizer: Any) -> tuple[str, list[int]]:
    """The beginning-of-text token's spelling and number; "" and none where the tokenizer has none."""
    known = ((text, tokenizer.token_to_id(text)) for text in BEGINNINGS)
    return next(((text, [number]) for text, number in known if number is not None), ("", []))


def answer_tokens(tokenizer: Any, task: Task) -> dict[str, list[int]]:
    """Tokens of each of the task's choices.

    Raises:
        Refusal: model_invalid, where the tokenizer leaves nothing of a choice.
    """
    found = dict(zip(task.choices, tokens(tokenizer, task.choices), strict=True))
    for choice, ids in found.items():
        if not ids:
            raise Refusal(
                "model_invalid", f"the tokenizer gives no token for the answer {choice!r} of task {task.name}"
            )
    return found


def taught(
    tokenizer: Any, task: Task, rows: Sequence[Mapping[str, Any]], *, max_length: int = sys.maxsize
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of each row's prompt, and of its target; of a text that is read as a whole, of each window and what stands before it.

    Args:
        tokenizer: of the model.
        task: a target of kind generate is taught with the first stop string behind it.
        rows: of a split.
        max_length: tokens of a window.

    Raises:
        Refusal: model_invalid, definition_invalid.
    """
    if task.kind == "perplexity":
        texts = whole_texts(tokenizer, task, rows)
        parts = [window for text in texts for window in windows(text, max_length=max_length)]
        return [before for before, _ in parts], [read for _, read in parts]
    if task.kind == "generate":
        return _taught_to_end(tokenizer, task, rows)
    if task.tokenize == "apart":
        answers = answer_tokens(tokenizer, task)
        return prompt_tokens(tokenizer, task, rows), [answers[row["target"]] for row in rows]
    contexts, found = _together(tokenizer, task, prompts.filled(task, rows), [(row["target"],) for row in rows])
    return contexts, [answer for (answer,) in found]


def _taught_to_end(
    tokenizer: Any, task: Task, rows: Sequence[Mapping[str, Any]]
) -> tuple[list[list[int]], list[list[int]]]:
    stop, ended = task.stop[0], [row["target"] + task.stop[0] for row in rows]
    if tokens(tokenizer, [stop]) == [[]]:
        sentence = f"the tokenizer gives no token for {stop!r}, where a text of task {task.name} ends"
        raise Refusal("model_invalid", sentence, hint="use a tokenizer that keeps it; one of bytes keeps all text")
    if task.tokenize == "apart":
        return prompt_tokens(tokenizer, task, rows), tokens(tokenizer, ended)
    contexts, found = _together(tokenizer, task, prompts.filled(task, rows), [(text,) for text in ended])
    return contexts, [answer for (answer,) in found]


def begun(tokenizer: Any, task: Task, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Tokens of each row's prompt, for a model to write on from.

    Where prompts and answers are tokenized together, they have what the tokenizer's own post-processor puts around them, as
    lm-evaluation-harness has it.

    Raises:
        Refusal: model_invalid, definition_invalid.
    """
    if task.tokenize == "apart":
        found = prompt_tokens(tokenizer, task, rows)
    else:
        spelled, beginning = _beginning(tokenizer)
        texts = prompts.filled(task, rows)
        bare = [spelled != "" and text.startswith(spelled) for text in texts]
        found = [ids or beginning for ids in _each(tokenizer, texts, bare)]
    if not all(found):
        sentence = f"a prompt of task {task.name} has no token, and the tokenizer no beginning-of-text token"
        raise Refusal("model_invalid", sentence, hint=f"it may be {' or '.join(BEGINNINGS)}")
    return found


def whole_texts(tokenizer: Any, task: Task, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The beginning-of-text token, and behind it the tokens of each row's text.

    Raises:
        Refusal: model_invalid, where there is no such token: nothing would stand before a text's first one.
    """
    spelled, beginning = _beginning(tokenizer)
    if not beginning:
        sentence = (
            f"task {task.name} reads texts from their first token, and the tokenizer has no beginning-of-text token"
        )
        raise Refusal("model_invalid", sentence, hint=f"it may be {' or '.join(BEGINNINGS)}")
    texts = [row["input"] for row in rows]
    bare = [task.tokenize == "apart" or text.startswith(spelled) for text in texts]
    found = _each(tokenizer, texts, bare)
    if not all(found):
        raise Refusal("model_invalid", f"the tokenizer gives no token for a text of task {task.name}")
    return [beginning + ids for ids in found]


def windows(text: Sequence[int], *, max_length: int) -> list[tuple[list[int], list[int]]]:
    """A text in windows, each token but the first read once: what stands before, and what is read.

    A window is as long as it may be; the last one begins earlier, so that its tokens have as much before them as there is. So does
    lm-evaluation-harness (loglikelihood_rolling with a context of 1), of which a model reads one token less.

    Args:
        text: tokens, at least two.
        max_length: tokens of a window, at least two.
    """
    room, found = max_length - 1, []
    for start in range(1, len(text), room):
        end = min(start + room, len(text))
        found.append((list(text[max(0, end - room - 1) : start]), list(text[start:end])))
    return found


def asked(
    tokenizer: Any, task: Task, rows: Sequence[Mapping[str, Any]]
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Tokens of each row's prompt, and for each row of each choice.

    Raises:
        Refusal: model_invalid, definition_invalid.
    """
    if task.tokenize == "apart":
        answers = list(answer_tokens(tokenizer, task).values())
        return prompt_tokens(tokenizer, task, rows), [answers] * len(rows)
    return _together(tokenizer, task, prompts.filled(task, rows), [task.choices] * len(rows))


def _together(
    tokenizer: Any, task: Task, texts: Sequence[str], choices: Sequence[Sequence[str]]
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Tokens of prompts and their answers as lm-evaluation-harness 0.4 has them (TemplateLM._encode_pair, HFLM.tok_encode).

    1. Blanks at a prompt's end belong to the answer. 2. Prompt and answer are tokenized as one text, with what the tokenizer's own
    post-processor puts around it, unless the text begins with the beginning-of-text token; the answer is what is left behind the
    prompt's tokens. 3. An empty prompt is the beginning-of-text token, and its answer is tokenized by itself.
    """
    spelled, beginning = _beginning(tokenizer)
    heads = [text.rstrip() for text in texts]
    bare = [not head or (spelled != "" and head.startswith(spelled)) for head in heads]
    contexts = _each(tokenizer, heads, bare)
    whole = [text + choice for text, row in zip(texts, choices, strict=True) for choice in row]
    wholes = iter(_each(tokenizer, whole, [is_bare for is_bare, row in zip(bare, choices, strict=True) for _ in row]))
    answers = [[next(wholes)[len(context) :] for _ in row] for context, row in zip(contexts, choices, strict=True)]
    if not all(answer for row in answers for answer in row):
        sentence = f"the tokenizer leaves nothing of an answer of task {task.name} behind its prompt"
        raise Refusal("model_invalid", sentence)
    return [context if head else beginning for context, head in zip(contexts, heads, strict=True)], answers


def _each(tokenizer: Any, texts: Sequence[str], bare: Sequence[bool]) -> list[list[int]]:
    """Tokens of each text, without special tokens where it is bare."""
    ways = {
        way: iter(tokens(tokenizer, [t for t, b in zip(texts, bare, strict=True) if b is way], special=not way))
        for way in (True, False)
    }
    return [next(ways[way]) for way in bare]


def pack(prompts_: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, max_length: int) -> Packed:
    """Sequences of prompt and answer tokens as one padded table.

    Args:
        prompts_: tokens of each prompt.
        answers: tokens of each answer, at least one.
        max_length: tokens of prompt and answer; what is longer loses tokens at its left.

    Raises:
        Refusal: model_invalid, where an answer has no room, or no token stands before it.
    """
    whole = [[*prompt, *answer][-max_length:] for prompt, answer in zip(prompts_, answers, strict=True)]
    for sequence, answer in zip(whole, answers, strict=True):
        if len(sequence) <= len(answer):
            raise Refusal(
                "model_invalid",
                f"an answer of {len(answer)} tokens with a token before it does not fit into {max_length} tokens",
                hint="use a tokenizer with longer tokens",
            )
    lengths = np.array([len(sequence) - 1 for sequence in whole], dtype=np.int64)
    inputs = np.zeros((len(whole), int(lengths.max(initial=0))), dtype=np.int64)
    labels = np.full(inputs.shape, NOT_SCORED, dtype=np.int64)
    for row, (sequence, answer) in enumerate(zip(whole, answers, strict=True)):
        inputs[row, : len(sequence) - 1] = sequence[:-1]
        labels[row, len(sequence) - 1 - len(answer) : len(sequence) - 1] = answer
    return Packed(inputs, labels, lengths)


@lru_cache(maxsize=64)
def order(rows: int, *, seed: int, epoch: int) -> Integers:
    """The order in which an epoch visits its rows: a pure function of (rows, seed, epoch).

    Sorting raw draws of PCG64, whose stream numpy promises to keep, stays the same over versions of numpy; its shuffles don't.
    """
    draws = np.random.PCG64([seed, epoch]).random_raw(rows)
    found = np.argsort(draws, kind="stable").astype(np.int64)
    # Kept for the epoch's other steps, so nobody may change it.
    found.flags.writeable = False
    return found


def steps(rows: int, *, epochs: int, global_batch: int) -> int:
    """Optimizer steps of a whole preparation; the last batch of an epoch may be smaller."""
    return epochs * -(-rows // global_batch)


def batch_of_step(step: int, *, rows: int, global_batch: int, seed: int) -> Integers:
    """Row numbers of the batch of a step, counted from 0: the step's number is the whole position."""
    epoch, part = divmod(step, -(-rows // global_batch))
    return order(rows, seed=seed, epoch=epoch)[part * global_batch : (part + 1) * global_batch].copy()


def micro_batches(batch: Integers, *, size: int | None) -> list[Integers]:
    """A batch in parts of so many rows, the last perhaps smaller; None for one part."""
    if size is None or size >= len(batch):
        return [batch]
    return [batch[start : start + size] for start in range(0, len(batch), size)]


def batches(lengths: Integers, *, budget: int = BATCH_TOKENS) -> list[Integers]:
    """Row numbers of batches where nothing is learned: sorted by length, as many rows as fit into a budget of padded tokens."""
    ordered = np.argsort(lengths, kind="stable")
    found, start = [], 0
    while start < len(ordered):
        stop = start + 1
        while stop < len(ordered) and int(lengths[ordered[stop]]) * (stop + 1 - start) <= budget:
            stop += 1
        found.append(ordered[start:stop])
        start = stop
    return found
