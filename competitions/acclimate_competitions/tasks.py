"""A competition's tasks: `[[tasks]]` of its definition, typed.

What a task has besides its name, kind, metric and chance follows from its kind:

    choice: prompt, choices, tokenize; the answer with the largest log-likelihood counts.
    classify: as choice, of labels: a sequence classifier answers with a number for each, a language model by their words.
    generate: prompt, stop, max_tokens, extract, take, normalize, tokenize; the model writes on, greedily.
    perplexity: tokenize; the text in `input` is read as a whole, and there is no target.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from acclimate_competitions import answers
from acclimate_competitions.fields import NAME, NAME_MEANING, Table

METRICS: Mapping[str, tuple[str, ...]] = {
    "choice": ("accuracy", "acc_norm", "nll", "log_loss", "brier"),
    "classify": ("accuracy", "nll", "log_loss", "brier"),
    "generate": ("exact_match", "token_f1"),
    "perplexity": ("bits_per_byte",),
}
"""Kind of task -> names of metrics.METRICS that fit it."""

MOST_TOKENS = 4096
"""Of a generated text."""
LONGEST_PROMPT = 20_000
"""Characters of a prompt's template."""
_STOPS, _LONGEST_STOP = 8, 64
_IMAGE = re.compile(r"|[1-9][0-9]{0,3}x[1-9][0-9]{0,3}x[1-9]")
_IMAGE_MEANING = 'height x width x channels, such as "32x32x3"'

_KEYS: Mapping[str, tuple[str, ...]] = {
    "choice": ("prompt", "choices", "tokenize"),
    "classify": ("prompt", "choices", "tokenize", "image"),
    "generate": ("prompt", "stop", "max_tokens", "extract", "take", "normalize", "tokenize"),
    "perplexity": ("tokenize",),
}


@dataclass(frozen=True)
class Task:
    """One question of the competition.

    Attributes:
        prompt: Jinja2 template over a row's columns.
        choices: the allowed answers, for kind choice, the labels, for kind classify; the target is one of them.
        metric: a name of metrics.METRICS.
        chance: the score of a blind guess.
        tokenize: apart: prompt and answer each by itself, so that an answer has the same tokens after every prompt. together: as one text,
            the answer being what the prompt's own tokens leave, blanks at the prompt's end included; so does lm-evaluation-harness.
        stop: for kind generate: a text ends before the first of these; the preparation teaches the target and the first of them.
        max_tokens: for kind generate: a text ends after so many.
        extract: for kind generate: regular expression with one group; what that finds is the answer. "" for the whole text.
        take: which of several finds counts.
        normalize: for kind generate: names of answers.NORMALIZATIONS.
        image: for kind classify: height x width x channels, such as "32x32x3", where the input is an image; "" where it is a text.
    """

    name: str
    kind: Literal["choice", "generate", "perplexity", "classify"]
    prompt: str
    choices: tuple[str, ...]
    metric: str
    chance: float
    tokenize: Literal["apart", "together"] = "apart"
    stop: tuple[str, ...] = ()
    max_tokens: int = 0
    extract: str = ""
    take: Literal["first", "last"] = "first"
    normalize: tuple[str, ...] = ()
    image: str = ""

    @property
    def pixels(self) -> tuple[int, int, int] | None:
        """Height, width and channels of an image; None where the input is a text."""
        if not self.image:
            return None
        height, width, channels = map(int, self.image.split("x"))
        return height, width, channels

    @property
    def truth(self) -> str:
        """The column that a prediction is scored by: the target, or the text whose bytes are counted."""
        return "input" if self.kind == "perplexity" else "target"

    def document(self) -> dict[str, Any]:
        """The task as JSON-ready data: what its kind has."""
        kept = {"name", "kind", "metric", "chance", *_KEYS.get(self.kind, ())}
        # The documents of tasks of texts are those from before there were images.
        kept -= {"image"} if not self.image else set()
        return {name: value for name, value in dataclasses.asdict(self).items() if name in kept}


def from_values(values: Mapping[str, Any]) -> Task:
    """The task of `dataclasses.asdict`, read from JSON."""
    read_: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Task(**read_)


def read(root: Table) -> tuple[Task, ...]:
    """The tasks of a definition; problems are noted in its document."""
    tasks: list[Task] = []
    for table in root.tables("tasks"):
        kind = table.word("kind", tuple(METRICS))
        task = _READ[kind](table)
        if table.good("name") and task.name in [other.name for other in tasks]:
            table.problem("name", f'= "{task.name}" is the name of another task')
        tasks.append(task)
        table.finish()
    return tuple(tasks)


def _name(table: Table) -> str:
    return table.text("name", pattern=NAME, form=NAME_MEANING)


def _prompt(table: Table) -> str:
    return table.text("prompt", "{{ input }}", most=LONGEST_PROMPT, lines=True)


def _tokenize(table: Table) -> Any:
    return table.word("tokenize", ("apart", "together"), default="apart")


def _choice(table: Table, *, kind: Literal["choice", "classify"] = "choice") -> Task:
    choices = table.list_("choices", str)
    if table.good("choices") and len(choices) < 2:
        table.problem("choices", f"are {len(choices)}: must be at least 2")
    for index, choice in enumerate(choices):
        if not choice.strip():
            table.problem("choices", "must not be blank", index=index)
    metric = table.word("metric", METRICS[kind])
    share, count = metric in ("accuracy", "acc_norm"), max(2, len(choices))
    # Of a loss, that of equal probabilities.
    blind = {"nll": math.log(count), "log_loss": math.log(count), "brier": 1 - 1 / count}.get(metric, 1 / count)
    return Task(
        name=_name(table),
        kind=kind,
        prompt=_prompt(table),
        choices=choices,
        metric=metric,
        chance=_share(table, blind) if share else table.number("chance", blind),
        tokenize=_tokenize(table),
        image=table.text("image", "", pattern=_IMAGE, form=_IMAGE_MEANING) if kind == "classify" else "",
    )


def _share(table: Table, default: float) -> float:
    chance = table.number("chance", default)
    if table.good("chance") and chance > 1:
        table.problem("chance", f"= {chance}: must be at most 1")
    return chance


def _generate(table: Table) -> Task:
    stop = table.list_("stop", str)
    if table.good("stop") and not 1 <= len(stop) <= _STOPS:
        table.problem("stop", f"are {len(stop)}: must be 1 to {_STOPS}, or nothing teaches a model where to end")
    for index, each in enumerate(stop):
        if not 1 <= len(each) <= _LONGEST_STOP or "\ufffd" in each:
            table.problem("stop", f"must have 1 to {_LONGEST_STOP} characters, and no U+FFFD", index=index)
    extract = table.text("extract", "")
    if extract and table.good("extract") and (problem := answers.pattern_problem(extract)):
        table.problem("extract", problem)
    take = table.word("take", ("first", "last"), default="first")
    if not extract and take == "last" and table.good("extract"):
        table.problem("take", "is for `extract`: without it there is one answer, the whole text")
    return Task(
        name=_name(table),
        kind="generate",
        prompt=_prompt(table),
        choices=(),
        metric=table.word("metric", METRICS["generate"]),
        chance=_share(table, 0.0),
        tokenize=_tokenize(table),
        stop=stop,
        max_tokens=table.integer("max_tokens", least=1, most=MOST_TOKENS),
        extract=extract,
        take=take,
        normalize=table.words("normalize", tuple(answers.NORMALIZATIONS), default=("strip",)),
    )


def _perplexity(table: Table) -> Task:
    return Task(
        name=_name(table),
        kind="perplexity",
        prompt="{{ input }}",
        choices=(),
        metric=table.word("metric", METRICS["perplexity"]),
        # Each byte as likely as any other.
        chance=table.number("chance", 8.0, above=0),
        tokenize=_tokenize(table),
    )


_READ: Mapping[str, Callable[[Table], Task]] = {
    "choice": _choice,
    "classify": partial(_choice, kind="classify"),
    "generate": _generate,
    "perplexity": _perplexity,
}
