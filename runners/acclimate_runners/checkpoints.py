"""Where a preparation stands: written below its job's folder while it goes on, and read there by the next try.

The child writes `checkpoint/whole/` {state.json, fit.safetensors}, which appears whole or not at all; whoever supervises it takes it away
(attempt_notes.py) and lays it into the next try's `resume/`. What is in it is data: JSON, and tensors in the layout of safetensors.

A fit goes on to the same bytes because all that it depends on is the weights, AdamW's two moments, the number of the step (batch and
learning rate follow from it) and what earlier fits gave. A checkpoint of another job, other libraries or another hardware class would
go on to other bytes, so it is no checkpoint here.

Where several processes hold a model in shards, all write one together: the first says when, and writes whole tensors, one after the other, so that
a checkpoint looks as that of one process. Each reads its own rows of it.
"""

import json
import math
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate_runners import reading
from acclimate_runners.holding import Gathering, Held, Whole

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import AdamW

RESUME, WRITTEN, ASKED = "resume", "checkpoint", "checkpoint.asked"
"""Names in a job's folder: what the next try begins with, what a try leaves, and the file whose text asks for one now."""
STATE, TENSORS = "state.json", "fit.safetensors"
_LOOK = 0.05
_SHARE = 20
"""Writing checkpoints takes at most a twentieth of the time."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Standing:
    """A fit after one of its steps: losses of all steps so far, tokens read, seconds of wall clock over all tries."""

    losses: tuple[float, ...] = ()
    tokens: int = 0
    seconds: float = 0.0


class Checkpoints:
    """Those of one preparation: what is done of it, and when and where that is written.

    Args:
        folder: the job's.
        identity: what must be equal for a checkpoint to lead to the same bytes: job, hardware, versions.
        seconds: between two of them.
        network: of this process, as Outcome has it.
        held: what this process holds of the model.

    Attributes:
        position: (steps done, of how many) over all fits, as progress counts them.
        network: of this process and of those that led to the checkpoint it goes on from.
    """

    def __init__(
        self,
        folder: Path,
        *,
        identity: Mapping[str, Any],
        seconds: float,
        network: str = "",
        held: Held | None = None,
    ) -> None:
        self._folder, self._identity, self._seconds = folder, dict(identity), seconds
        self._held = held or Whole()
        self.position, self.network = (0, 0), network
        self._done: dict[str, Any] = {}
        self._half: dict[str, Any] | None = None
        self._before = 0.0
        self._read()
        self._began = self._last = self._looked = time.monotonic()
        self._took, self._asked = 0.0, ""

    def part(self, name: str, make: Callable[[], Any]) -> Any:
        """What a part of the preparation gives, a JSON value: known from an earlier try, or made now."""
        if name not in self._done:
            self._done[name] = make()
            self._half = None
            if self._due():
                self._write(None, {})
        return self._done[name]

    def fitting(self, name: str) -> "Fitting":
        """The fit that the part of this name consists of."""
        return Fitting(self, name)

    def half_done(self, name: str, weights: Mapping[str, "Tensor"], optimizer: "AdamW") -> Standing:
        """Put weights and optimizer to where the earlier try's fit of this name was; the beginning where there was none."""
        half, self._half = self._half, None
        if half is None or half["part"] != name:
            return Standing()
        path = self._folder / RESUME / TENSORS
        try:
            begun = Standing(tuple(half["losses"]), half["tokens"], half["seconds"])
            moments = _moments(weights, optimizer, step=len(begun.losses))
            fill = tensors_of(path, _named(weights, moments), self._held)
        except (OSError, ValueError) as error:
            _say(f"the fit begins anew: {error}")
            return Standing()
        fill()
        optimizer.state.update({weights[name]: state for name, state in moments.items()})
        return begun

    def look(self, name: str, standing: Callable[[], Standing], tensors: Callable[[], Mapping[str, "Tensor"]]) -> None:
        """After a step: write a checkpoint if one is due or asked for."""
        if self._due():
            now = standing()
            half = {"part": name, "losses": now.losses, "tokens": now.tokens, "seconds": now.seconds}
            self._write(half, tensors())

    def _due(self) -> bool:
        return self._held.decided(self._is_due())

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now - self._looked < min(_LOOK, self._seconds):
            return False
        self._looked = now
        asking = self._folder / ASKED
        if asking.exists():
            # Taken first: what asks again from now on asks for another one. Every later one answers it, too, as it may take this one's place.
            self._asked = asking.read_text("utf-8")
            asking.unlink(missing_ok=True)
            return True
        return now - self._last >= max(self._seconds, _SHARE * self._took)

    def _write(self, half: Mapping[str, Any] | None, tensors: Mapping[str, "Tensor"]) -> None:
        began = time.monotonic()
        gathering = self._held.gathered(tensors)
        if self._held.first:
            self._write_whole(half, gathering, began=began)
        # Those that write nothing give their rows; so does one that could not write, or the others would wait for it.
        for _ in gathering.each:
            pass
        self._last = time.monotonic()
        self._took = self._last - began

    def _write_whole(self, half: Mapping[str, Any] | None, tensors: Gathering, *, began: float) -> None:
        whole, new, old = (self._folder / WRITTEN / name for name in ("whole", "new", "old"))
        state = {
            **self._identity,
            "done": self._done,
            "half": half,
            "step": self.position[0],
            "total": self.position[1],
            "seconds": self._before + began - self._began,
            "asked": self._asked,
            "network": self.network,
            # Two attempts never name the same blob, so that each may remove its own.
            "nonce": uuid.uuid4().hex,
        }
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            if tensors.shapes:
                write_tensors(tensors, new / TENSORS, nonce=state["nonce"])
            (new / STATE).write_text(json.dumps(state, allow_nan=False), "utf-8")
            # Renamed, as the supervisor's taking it is: one of the two gets it, and gets all of it.
            shutil.rmtree(old, ignore_errors=True)
            if whole.exists():
                _renamed(whole, old)
            new.rename(whole)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            # A checkpoint that finds no room must not end what it is there to save.
            shutil.rmtree(new, ignore_errors=True)
            _say(f"no checkpoint: {error}")

    def _read(self) -> None:
        path = self._folder / RESUME / STATE
        if not path.exists():
            return
        try:
            state = json.loads(path.read_text("utf-8"))
            for name, value in self._identity.items():
                if state[name] != value:
                    raise ValueError(f"its {name} is {state[name]!r}, not {value!r}")
            done, half, before = dict(state["done"]), state["half"], float(state["seconds"])
            position = (int(state["step"]), int(state["total"]))
            network = str(state.get("network", ""))
            if half is not None:
                half = {"part": half["part"], **_checked(half)}
        except (OSError, ValueError, TypeError, KeyError) as error:
            _say(f"the checkpoint is ignored: {type(error).__name__}: {str(error)[:300]}")
            return
        self._done, self._half, self._before, self.position = done, half, before, position
        # Once open is open: part of the result was made so.
        self.network = network if network == "open" else self.network


class Fitting:
    """One fit of a preparation, as its loop sees the checkpoints."""

    def __init__(self, checkpoints: Checkpoints, name: str) -> None:
        self._checkpoints, self._name = checkpoints, name

    def begin(self, weights: Mapping[str, "Tensor"], optimizer: "AdamW") -> Standing:
        """Go on from where an earlier try was; on the weights as they are where there was none."""
        self._weights, self._optimizer = weights, optimizer
        return self._checkpoints.half_done(self._name, weights, optimizer)

    def after_step(self, standing: Callable[[], Standing]) -> None:
        """Write a checkpoint if one is due."""
        self._checkpoints.look(self._name, standing, self._tensors)

    def _tensors(self) -> dict[str, "Tensor"]:
        states = self._optimizer.state
        return _named(self._weights, {name: states[weight] for name, weight in self._weights.items()})


def _moments(weights: Mapping[str, "Tensor"], optimizer: "AdamW", *, step: int) -> dict[str, dict[str, "Tensor"]]:
    """AdamW's own state after so many steps, its moments still to be filled, laid out as it does itself at its first step."""
    import torch

    return {
        name: {
            "step": torch.tensor(float(step), dtype=torch.float32, device=weight.device),
            **{each: torch.zeros_like(weight, memory_format=torch.preserve_format) for each in _MOMENTS},
        }
        for name, weight in weights.items()
    }


def _named(weights: Mapping[str, "Tensor"], moments: Mapping[str, Mapping[str, "Tensor"]]) -> dict[str, "Tensor"]:
    found = {f"weight/{name}": tensor.detach() for name, tensor in weights.items()}
    return found | {f"{each}/{name}": state[each].detach() for name, state in moments.items() for each in _MOMENTS}


def write_tensors(tensors: Gathering, path: Path, *, nonce: str) -> None:
    """Those of a checkpoint."""
    stream(tensors, path, metadata={"nonce": nonce})


def stream(tensors: Gathering, path: Path, *, metadata: Mapping[str, str]) -> None:
    """Float32 tensors as the library safetensors writes them, straight out of their memory: a copy might exceed what the child may use."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, shape in tensors.shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors.each:
            # One after the other, so that of a GPU's only one is there twice.
            file.write(_memory(tensor.detach().cpu().contiguous()))


def tensors_of(path: Path, into: Mapping[str, "Tensor"], held: Held) -> Callable[[], None]:
    """What fills tensors with those of a file, straight into their memory; where parts of them are held, with these.

    Raises:
        ValueError: it does not hold just these.
        OSError: it can't be read.
    """
    header = reading.read_header(path)
    said = {name: (entry.dtype, tuple(entry.shape)) for name, entry in header.items()}
    if said != {name: ("F32", held.shape(name, tensor)) for name, tensor in into.items()}:
        raise ValueError(f"{path.name} holds other tensors than this fit has")

    def fill() -> None:
        with path.open("rb", buffering=0) as stream:
            first = 8 + int.from_bytes(stream.read(8), "little")
            for name, tensor in into.items():
                # Rows lie one behind the other.
                skipped = held.begins(name) * 4 * math.prod(tensor.shape[1:])
                stream.seek(first + header[name].begin + skipped)
                here = tensor.cpu()
                rest = _memory(here)
                while rest:
                    if not (count := stream.readinto(rest)):
                        raise OSError(f"{path} has become shorter")
                    rest = rest[count:]
                if here is not tensor:
                    tensor.copy_(here)

    return fill


def _memory(tensor: "Tensor") -> memoryview:
    return memoryview(tensor.numpy().reshape(-1)).cast("B")


def _checked(half: Mapping[str, Any]) -> dict[str, Any]:
    losses = [float(loss) for loss in half["losses"]]
    return {"losses": losses, "tokens": int(half["tokens"]), "seconds": float(half["seconds"])}


def _renamed(path: Path, to: Path) -> None:
    try:
        path.rename(to)
    except FileNotFoundError:
        # The supervisor has just taken it.
        return


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)  # noqa: T201
