"""What is known of an accepted architecture, in plain Python: architectures.py, encoders.py and image_classifiers.py say it of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from acclimate_runners.config_rules import Check
from acclimate_runners.tensors import Shapes

RELU = "relu"


@dataclass(frozen=True)
class Architecture:
    """One accepted architecture.

    Attributes:
        model_class: the name of transformers' class, for `architectures` in config.json.
        fields: allowed fields with their rules, without the descriptive ones.
        required: fields that have no default here, because the size of the model follows from them.
        shapes: tensor name -> shape, of a checked config.
        head: the output embedding's name in files.
        embedding: the input embedding's name, to which the head may be tied.
        tied: whether `tie_word_embeddings` is true where the config is silent.
        positions: name of the field that bounds a sequence's length, and its default; None where nothing bounds it.
        heads: names of the fields of width and heads; None where there is no attention.
        told: further fields that say nothing about the computation, with their rules.
        score: the last layer of a sequence classifier's head, [labels, width], in files and in transformers.
        score_bias: its bias; None where it has none.
        answering: the layers that make a classifier's scores of what the model makes of a row, one after the other; RELU is none with weights.
        of_tokens: whether the first of these is given all tokens, of which it takes the first.
        encodes: whether each token sees all others, and a classifier reads the first one; there are no language models of the kind then.
        sees: whether it reads an image, and has no tokenizer.
        width: of what the last layer of a classifier's head reads; None where it is that of heads or of the embedding.
        least: of a model that reads images of any size, how many pixels a side has at least; None where `image_size` says the size.
        conflicts: what is wrong with fields that are each for itself fine, of a config without another problem.
        times: how often each number of a weight is multiplied for a token, or for an image of a height, width and channels, by the weight's name; None where it is once.
        first: the position of a text's first token, before which there are others that no text uses.
    """

    model_class: str
    fields: Mapping[str, Check]
    required: tuple[str, ...]
    shapes: Callable[[Mapping[str, Any]], Shapes]
    head: str
    embedding: str
    tied: bool
    positions: tuple[str, int] | None
    heads: tuple[str, str] | None
    told: Mapping[str, Check] = field(default_factory=dict)
    score: str = "score.weight"
    score_bias: str | None = None
    answering: tuple[str, ...] = ("score",)
    of_tokens: bool = False
    encodes: bool = False
    first: int = 0
    times: Callable[[Mapping[str, Any], tuple[int, int, int]], Callable[[str], int]] | None = None
    sees: bool = False
    width: Callable[[Mapping[str, Any]], int] | None = None
    least: Callable[[Mapping[str, Any]], int] | None = None
    conflicts: Callable[[Mapping[str, Any]], list[str]] = lambda config: []

    @property
    def scoring(self) -> tuple[str, ...]:
        """What the names of all weights begin with that stand between the last layer and a classifier's answer."""
        return tuple(f"{name}." for name in self.answering)

    @property
    def attends(self) -> bool:
        """Whether tokens see each other by attention alone, so that a mask and positions say all about it."""
        return self.heads is not None

    @property
    def classifier(self) -> str | None:
        """The name of transformers' class of sequence classifiers, for `architectures` in config.json; None where it has none."""
        if self.encodes:
            return self.model_class
        stem = self.model_class.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        # Gemma 3's without a prefix reads images, too.
        stem = "Gemma3Text" if stem == "Gemma3" else stem
        return f"{stem}ForSequenceClassification" if self.attends else None
