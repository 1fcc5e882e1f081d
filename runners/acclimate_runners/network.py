"""A model in memory: built without remote code, its answers' log-likelihoods, its weights as bytes. Needs torch and transformers.

The forward pass is transformers' own. Only what it is asked for is chosen here: no cache, a causal mask made once, and the output
embedding applied at the answers' positions alone, which changes nothing but the time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_runners import (
    adapter_files,
    architectures,
    checkpoints,
    computing,
    merging,
    packing,
    reading,
    shards,
    tensors,
)
from acclimate_runners.building import build, by_file_name
from acclimate_runners.holding import Held, Whole
from acclimate_runners.kinds import RELU, Architecture
from acclimate_runners.layouts import Answers, Laid
from acclimate_runners.packing import Packed
from acclimate_runners.reading import ModelFacts, Rules

LOGITS = 1 << 22
"""How many logits are held at once where nothing is learned; in the code's digest, as it can change the last bits of a number."""

_LAYERS = ("AlbertLayer", "ConvNextLayer", "ConvNextV2Layer", "ResNetBasicLayer", "ResNetBottleNeckLayer")
"""Classes of layers that the library itself can't compute again."""


@dataclass
class Network:
    """A loaded model.

    Attributes:
        model: transformers' causal language model or sequence classifier, float32, on its device.
        facts: of its files.
        weights: its parameters by name, a tied head left out, or what this process holds of them; changing them in place changes the model.
        on_batch: called after each batch that it has read.
        held: whether this process holds all of each weight.
        image: height, width and channels of what a model of images is asked, once it is known for which task.
        submitted_labels: those of a sequence classifier as it was submitted, whatever task its head was made for since.
    """

    model: Any
    facts: ModelFacts
    weights: dict[str, Tensor]
    on_batch: Callable[[], object] = lambda: None
    submitted_labels: tuple[str, ...] = ()
    image: tuple[int, int, int] | None = None
    held: Held = field(default_factory=Whole)
    _masks: dict[int, Tensor | None] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the weights lie; what the model is asked may lie elsewhere."""
        return next(iter(self.weights.values())).device

    @property
    def batch_tokens(self) -> int:
        """How many tokens, or numbers of images, it reads at once where nothing is learned."""
        if self.sees:
            return packing.IMAGE_NUMBERS
        return packing.CACHED_TOKENS if self.device.type == "cpu" else packing.BATCH_TOKENS

    @property
    def positions(self) -> int:
        """How many tokens a sequence may have."""
        return architectures.positions(self.facts.config)

    @property
    def labels(self) -> tuple[str, ...] | None:
        """What a sequence classifier tells apart; None for a language model."""
        return architectures.labels(self.facts.config)

    def logits(self, inputs: Tensor, at: Tensor) -> Tensor:
        """Next-token logits [positions, vocabulary] at the flat positions `at`, each once and ascending, of inputs [rows, length]."""
        return self.held.ask(lambda: self.head(self.hidden(inputs, at)))

    def hidden(self, inputs: Tensor, at: Tensor) -> Tensor:
        """What the head makes logits of [positions, width]; as logits.

        An encoder's is that of the first token of each row; at says where each row ends.
        """
        length = inputs.shape[1]
        if self.encodes:
            return self._first(inputs, ends=at % length)
        if length not in self._masks:
            self._masks[length] = _mask(length).to(self.device) if self._is_plain(length) else None
        return self._hidden(inputs, at, positions=torch.arange(length)[None], mask=self._masks[length])

    def laid_logits(self, rows: Laid, at: Tensor) -> Tensor:
        """As logits, of rows that hold several sequences each; only of those that `can_lay`."""
        return self.held.ask(lambda: self.head(self.laid_hidden(rows, at)))

    def laid_hidden(self, rows: Laid, at: Tensor) -> Tensor:
        """As hidden, of rows that hold several sequences each; only of those that `can_lay`."""
        seen = torch.from_numpy(rows.sees())[:, None]
        if self.model.config._attn_implementation == "eager":
            seen = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
        return self._hidden(torch.from_numpy(rows.inputs), at, positions=torch.from_numpy(rows.positions), mask=seen)

    def continued(self, inputs: Tensor, *, seen: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Next-token logits [rows, vocabulary] behind inputs [rows, length], which stand behind what the cache holds.

        Args:
            inputs: token numbers.
            seen: [rows, tokens of the cache and of inputs] 1, or 0 where padded.
            positions: of inputs, [rows, length].
            cache: of `new_cache`; the inputs are added to it.
        """
        model, device = self.model.base_model, self.device
        # Versions of transformers differ in what they call it.
        kept = {"cache" if "cache" in signature(model.forward).parameters else "past_key_values": cache}

        def read() -> Tensor:
            hidden = model(
                input_ids=inputs.to(device),
                attention_mask=seen.to(device),
                position_ids=positions.to(device),
                use_cache=True,
                **kept,
            ).last_hidden_state
            self.on_batch()
            return self.head(hidden[:, -1])

        return self.held.ask(read)

    def new_cache(self) -> Any:
        """Room for keys and values."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    @property
    def sees(self) -> bool:
        """Whether it reads images."""
        return architectures.ARCHITECTURES[self.facts.architecture].sees

    @property
    def vocabulary(self) -> int:
        """How many different numbers a model reads: of tokens, or of an image's bytes."""
        return 256 if self.sees else int(self.facts.config["vocab_size"])

    @property
    def encodes(self) -> bool:
        """Whether each token sees all others of its text."""
        return architectures.ARCHITECTURES[self.facts.architecture].encodes

    def can_lay(self, length: int) -> bool:
        """Whether sequences of so many tokens may stand beside others in a row: each token sees all before it in its own."""
        window = getattr(self.model.config, "sliding_window", None)
        attends = architectures.ARCHITECTURES[self.facts.architecture].attends
        return attends and not self.encodes and (window is None or length <= window)

    def _hidden(self, inputs: Tensor, at: Tensor, *, positions: Tensor, mask: Tensor | None) -> Tensor:
        device = self.device
        hidden: Tensor = self.model.base_model(
            input_ids=inputs.to(device),
            position_ids=positions.to(device),
            attention_mask=None if mask is None else mask.to(device),
            use_cache=False,
        ).last_hidden_state
        self.on_batch()
        every = hidden.flatten(0, 1)
        return every if len(at) == len(every) else every.index_select(0, at.to(device))

    def _first(self, inputs: Tensor, *, ends: Tensor) -> Tensor:
        """What an encoder's head reads of each row, [rows, width]: its first token's, or the mean of all; ends: [rows] the place of its last one, behind which it is padded."""
        if self.sees:
            return self._seen(inputs)
        places = torch.arange(inputs.shape[1])[None]
        positions = places + architectures.ARCHITECTURES[self.facts.architecture].first
        seen = (places <= ends[:, None]).long()
        hidden: Tensor = self.model.base_model(
            input_ids=inputs.to(self.device),
            position_ids=positions.to(self.device),
            attention_mask=seen.to(self.device),
        ).last_hidden_state
        self.on_batch()
        if getattr(self.model.config, "classifier_pooling", "cls") == "mean":
            read = seen.to(hidden)
            return (hidden * read[:, :, None]).sum(dim=1) / read.sum(dim=1, keepdim=True)
        return hidden[:, 0]

    def _seen(self, inputs: Tensor) -> Tensor:
        """What a model of images makes of each, [rows, width]; inputs: [rows, height * width * channels] numbers from 0 to 255."""
        config = self.facts.config
        side, channels = config.get("image_size"), config["num_channels"]
        height, width, channels = self.image or (side, side, channels)
        pixels = inputs.view(-1, height, width, channels).permute(0, 3, 1, 2).float()
        mean, deviation = (
            torch.tensor(config.get(name, [0.5] * channels)).view(1, -1, 1, 1) for name in ("image_mean", "image_std")
        )
        given = ((pixels / 255 - mean) / deviation).to(self.device)
        found = self.model.base_model(pixel_values=given)
        self.on_batch()
        hidden: Tensor = found.last_hidden_state
        return hidden[:, 0] if self._is_of_one_size else found.pooler_output.flatten(1)

    @property
    def _is_of_one_size(self) -> bool:
        """Whether it reads images of one size alone, as their first token."""
        return architectures.ARCHITECTURES[self.facts.architecture].least is None

    def head(self, hidden: Tensor) -> Tensor:
        """Next-token logits [positions, vocabulary] of what `hidden` gives, float32; a classifier's of its labels [positions, labels]."""
        if self.labels is not None:
            return _scores(self.model, architectures.ARCHITECTURES[self.facts.architecture], hidden).float()
        result: Tensor = self.model.get_output_embeddings()(hidden).float()
        if (bound := getattr(self.model.config, "final_logit_softcapping", None)) is not None:
            result = torch.tanh(result / bound) * bound
        return result

    def _is_plain(self, length: int) -> bool:
        """Whether the attention is the plain one, and each token sees all before it; else the library makes its own mask."""
        return self.model.config._attn_implementation == "eager" and self.can_lay(length)

    def recompute(self) -> None:
        """From now on a layer keeps only its inputs for the backward pass and is computed again in it: less memory, the same bytes."""
        for layer in self.model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.gradient_checkpointing = True
                layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
            elif type(layer).__name__ in _LAYERS:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def copy_weights(self) -> dict[str, Tensor]:
        """The weights as they are now, in main memory of their own."""
        return {name: computing.in_main_memory(tensor) for name, tensor in self.weights.items()}

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all weights in place."""
        with torch.no_grad():
            for name, tensor in self.weights.items():
                tensor.copy_(weights[name])


def _scores(model: Any, kind: Architecture, hidden: Tensor) -> Tensor:
    """A classifier's numbers [rows, labels], as transformers' own forward has them; dropout is off."""
    scores = hidden[:, None] if kind.of_tokens else hidden
    for name in kind.answering:
        scores = functional.relu(scores) if name == RELU else model.get_submodule(name)(scores)
    return scores


def _mask(length: int) -> Tensor:
    """Causal mask [1, 1, length, length], to be added to the attention's scores."""
    return torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]


def load(
    files: Mapping[str, Path],
    rules: Rules,
    *,
    max_length: int,
    tokenizer: str | None = None,
    base: Mapping[str, Path] | None = None,
    device: torch.device | None = None,
    in_shards: bool = False,
) -> Network:
    """Read a submission strictly, then load it; an adapter is merged into its base, and from there on it is a model as any other.

    Args:
        files: name -> path of the submission's files.
        rules: the competition's limits.
        max_length: tokens of a sequence in the recipe.
        tokenizer: digest of the competition's tokenizer, where it fixes one.
        base: name -> path of the files of the model that an adapter stands on; none for a whole model.
        device: where it is to compute; None for the processor.
        in_shards: whether each of several processes is to hold a part of each weight; these load it together.

    Raises:
        Refusal: model_invalid.
    """
    whole = base or files
    # The competition's own base may be as large as it likes.
    facts, adapter = (
        reading.inspect(whole, adapter_files.unlimited(rules) if base else rules, tokenizer=tokenizer),
        None,
    )
    if base:
        adapter = adapter_files.inspect(files, rules, config=base["config.json"])
        facts = adapter.facts
    try:
        if in_shards:
            from acclimate_runners import sharding

            with sharding.unfilled():
                model = build(facts.config, max_length=max_length)
        else:
            model = build(facts.config, max_length=max_length)
            model = model if device is None else model.to(device)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise Refusal("model_invalid", f"config.json describes no {facts.architecture}: {str(error)[:200]}") from error
    names = architectures.shapes(facts.config)
    # A sequence's last token is predicted only, so the model reads one less.
    reads, needed = architectures.positions(facts.config), max_length - 1
    if reads < needed:
        # The holdout's sequences may be as long as the recipe allows, whatever the longest public one is.
        raise Refusal("model_invalid", f"the model reads at most {reads} tokens, the recipe has sequences of {needed}")
    parameters = by_file_name(model, facts.architecture)
    if {name: tuple(tensor.shape) for name, tensor in parameters.items()} != names:
        raise Refusal("model_invalid", "the tensors of config.json differ from those of transformers' model")
    found = {name: parameters[name] for name in sorted(names)}
    held: Held = Whole()
    if in_shards:
        held, found = _sharded(model, facts, device or torch.device(computing.CPU))
    network = Network(model, facts, found, submitted_labels=architectures.labels(facts.config) or (), held=held)
    weights = read_weights([whole[name] for name in shards.weights_of(whole)], facts, held)
    if adapter is not None:
        merging.merge(weights, files[adapter_files.WEIGHTS], adapter, held)
    network.set_weights(weights)
    return network


def _sharded(model: Any, facts: ModelFacts, device: torch.device) -> tuple[Held, dict[str, Tensor]]:
    from acclimate_runners import sharding

    kind = architectures.ARCHITECTURES[facts.architecture]
    named = partial(by_file_name, model, facts.architecture)
    whole = [] if architectures.labels(facts.config) is None else [kind.score, kind.score_bias]
    whole += [name for name in architectures.shapes(facts.config) if tensors.stands_still(name)]
    like = {} if kind.head in architectures.shapes(facts.config) else {kind.head: kind.embedding}
    held = sharding.Shards(model, named, device=device, whole=[name for name in whole if name], like=like)
    return held, held.weights


def read_weights(paths: Sequence[Path], facts: ModelFacts, held: Held | None = None) -> dict[str, Tensor]:
    """The weights of safetensors files as float32, for a model of these facts; where a process holds parts of them, its parts.

    Raises:
        Refusal: model_invalid, where a tensor is missing, has another shape or holds NaN or infinity.
    """
    try:
        header = {name: tensor for path in paths for name, tensor in reading.read_header(path).items()}
    except ValueError as error:
        raise Refusal("model_invalid", f"model.safetensors: {error}") from error
    expected = architectures.shapes(facts.config)
    problems = reading.compare(header, expected, facts.config)
    if problems:
        raise Refusal("model_invalid", problems[0], problems=problems)
    # One file after the other, so that only one is there twice.
    held = held or Whole()
    stored = {name: tensor.to(torch.float32) for path in paths for name, tensor in held.stored(path).items()}
    problems = [f"tensor {name!r} holds NaN or infinity" for name, tensor in stored.items() if not is_finite(tensor)]
    problems += [
        f"tensor {name!r} holds a variance below 0"
        for name, tensor in stored.items()
        if name.endswith(".running_var") and bool((tensor < 0).any())
    ]
    kind = architectures.ARCHITECTURES[facts.architecture]
    tied = architectures.labels(facts.config) is None and kind.head not in expected
    if tied and kind.head in stored and not torch.equal(stored[kind.head], stored[kind.embedding]):
        problems.append(f"tensor {kind.head!r} is tied to {kind.embedding!r} by config.json, but differs from it")
    if problems := held.agreed(problems):
        raise Refusal("model_invalid", f"model.safetensors: {problems[0]}", problems=problems)
    return {name: stored[name] for name in expected}


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity."""
    return bool(torch.isfinite(tensor).all())


def write_weights(weights: Mapping[str, Tensor], path: Path, held: Held | None = None) -> str:
    """Write weights as safetensors, the same bytes for the same numbers, and return the file's digest.

    Of processes that hold parts of them the first writes all; the others write nothing, and the digest is empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if held is not None and not held.everything:
        gathering = held.gathered(weights)
        if held.first:
            checkpoints.stream(gathering, path, metadata={"format": "pt"})
        for _ in gathering.each:
            pass
        return digests.of_file(path) if held.first else ""
    save_file(
        {name: weights[name].detach().cpu().contiguous() for name in sorted(weights)}, path, metadata={"format": "pt"}
    )
    return digests.of_file(path)


def answer_loglikelihoods(network: Network, packed: Packed) -> Tensor:
    """Sum of the log-probabilities of each sequence's answer tokens [rows], natural log, float64 sums of float32 terms."""
    network.model.eval()
    result = torch.zeros(len(packed), dtype=torch.float64)
    for rows in packing.batches(packed.lengths, budget=network.batch_tokens):
        longest = int(packed.lengths[rows].max())
        inputs = torch.from_numpy(packed.inputs[rows, :longest])
        labels = torch.from_numpy(packed.labels[rows, :longest])
        at = (labels != packing.NOT_SCORED).flatten().nonzero()[:, 0]
        with torch.no_grad():
            picked = _picked(network, partial(network.hidden, inputs, at), torch.arange(len(at)), labels.flatten()[at])
        sums = torch.zeros(len(rows), dtype=torch.float64).index_add_(0, at // longest, picked)
        result[torch.from_numpy(rows)] = sums
    return result


def shared_loglikelihoods(network: Network, answers: Answers) -> Tensor:
    """As answer_loglikelihoods, [answers], of prompts that are read once for all of their answers."""
    network.model.eval()
    needed, place = np.unique(answers.at[answers.real], return_inverse=True)
    tokens = torch.from_numpy(answers.tokens[answers.real])
    with torch.no_grad():
        read = partial(network.laid_hidden, answers.laid, torch.from_numpy(needed))
        picked = _picked(network, read, torch.from_numpy(place), tokens)
    of = torch.from_numpy(answers.real.nonzero()[0])
    return torch.zeros(len(answers.at), dtype=torch.float64).index_add_(0, of, picked)


def last_logprobs(network: Network, packed: Packed, choices: packing.Integers) -> Tensor:
    """Log-probabilities of the next tokens `choices`, [rows, choices] as the result, after each sequence, in one pass for all of them."""
    network.model.eval()
    result = torch.zeros(choices.shape, dtype=torch.float64)
    for rows in packing.batches(packed.lengths, budget=network.batch_tokens):
        longest = int(packed.lengths[rows].max())
        inputs = torch.from_numpy(packed.inputs[rows, :longest])
        at = torch.arange(len(rows)) * longest + torch.from_numpy(packed.lengths[rows]) - 1
        wanted = torch.from_numpy(choices[rows])
        place = torch.arange(len(rows))[:, None].expand_as(wanted)
        with torch.no_grad():
            picked = _picked(network, partial(network.hidden, inputs, at), place.flatten(), wanted.flatten())
        result[torch.from_numpy(rows)] = picked.view(wanted.shape)
    return result


def _picked(network: Network, read: Callable[[], Tensor], place: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [tokens], float64, of `tokens`, each by the row `place` of what is read; few rows' logits are held at once."""
    return network.held.ask(lambda: _chances(network, read(), place, tokens))


def _chances(network: Network, hidden: Tensor, place: Tensor, tokens: Tensor) -> Tensor:
    result = torch.zeros(len(tokens), dtype=torch.float64)
    size = max(1, LOGITS // network.vocabulary)
    for begin in range(0, len(hidden), size):
        chances = functional.log_softmax(network.head(hidden[begin : begin + size]), dim=-1)
        mine = ((place >= begin) & (place < begin + size)).nonzero()[:, 0]
        rows, columns = ((place[mine] - begin).to(chances.device), tokens[mine].to(chances.device))
        result[mine] = chances[rows, columns].cpu().double()
    return result
