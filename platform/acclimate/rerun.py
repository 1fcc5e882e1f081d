"""Preparing and evaluating again, by the same code in the same confined child: what a second operator and a strict auditor do.

Two runs of a preparation are compared so:

- equal bytes agree, on whatever machine;
- on one hardware class with the same code and library versions, other bytes do not agree;
- on another hardware class bytes can't be expected to be equal. There both prepared models are scored on the validation split by one machine, and
  agree where their validation nll is no further apart than the tolerance that the definition declares;
- what the comparison can't decide is refused, and nothing is claimed.
"""

import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from acclimate import round_jobs
from acclimate_competitions import digests, metrics, tables
from acclimate_competitions.definition import Task
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Round
from acclimate_competitions.records import Record
from acclimate_runners import devices, jobs
from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.code import code_digest
from acclimate_runners.jobs import Job, ModelFiles
from acclimate_runners.local import LocalRunner
from acclimate_runners.runner import Status

_LOOK = 0.1
LIMITS = frozenset({"limit_exceeded", "out_of_memory"})
"""Ends that may be the model's or the machine's fault."""
_OF_WHAT_WAS_GIVEN = {
    "definition_invalid": "repeated, it ends the same: tell the competition's organizer; with a folder of your own: acclimate competition check FOLDER",
    "splits_invalid": "repeated, it ends the same: tell the competition's organizer; with a folder of your own: acclimate competition check FOLDER",
    "model_invalid": "repeated, it ends the same: mend the model's folder first",
}
"""What to do about an end that what was given is to blame for."""
Progress = Callable[[int, int, str], None]
"""Called with (steps or bytes done, of how many, what is done)."""
SILENT: Progress = lambda done, total, what: None  # noqa: E731


@dataclass(frozen=True)
class Remade:
    """What a preparation came to when it was made again.

    Attributes:
        prepared: the prepared model's digest; None where it failed.
        failed: why it failed; "" where it didn't.
        limited: whether it failed for time or memory, which may be this machine's fault.
        selection: {candidates, selected, diverged} as ModelPrepared has them; {} where it failed.
        hardware: the hardware class here.
        versions: of the libraries here.
        micro_batch: with which it was made; None for the whole batch.
    """

    prepared: str | None
    failed: str = ""
    limited: bool = False
    selection: Mapping[str, Any] = field(default_factory=dict)
    hardware: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    micro_batch: int | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether two runs of a preparation agree, and by what; tolerance 0 where nothing but equality was asked for."""

    agrees: bool
    tolerance: float
    reason: str


class RerunFolder:
    """A folder of this machine in which jobs are made again; what was finished in it is not made twice.

    Args:
        folder: made if it is not there; whoever made it removes it.
        progress: told of the steps.
        what: what a job is to whoever reads of its failure.
    """

    def __init__(self, folder: Path, *, progress: Progress = SILENT, what: str = "the re-run") -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self._progress, self._what = folder, progress, what
        self.blobs = FolderBlobs(folder / "blobs")

    def telling(self, what: str) -> Callable[[int, int], None]:
        """What a download is to tell of its bytes."""
        return lambda done, total: self._progress(done, total, what)

    def carry_out(self, job: Job, *, attempt: str = "") -> Status:
        """Do a job in a confined child, or take its outcome where it was done here before.

        A job for a GPU is done by the processor where this machine has none: the outcome's hardware class says so.

        Args:
            job: its inputs are blobs of this folder.
            attempt: another name for another attempt at the same job.

        Raises:
            Refusal: no_space, runner_failed, job_failed, …: this machine's faults; time and memory are the caller's to judge.
        """
        gpus = devices.visible_gpus()
        job = job if gpus else replace(job, device="cpu")
        # The code, too: an update in between makes another attempt of it.
        name = digests.of_json({"job": json.loads(jobs.to_json(job)), "code": code_digest(), "attempt": attempt})[7:39]
        runner = LocalRunner(self.folder, 1, devices=gpus)
        try:
            handle = runner.start(name, job, self.blobs)
            while (status := handle.poll()).state == "running":
                self._progress(status.step, status.total, status.what)
                time.sleep(_LOOK)
        finally:
            runner.close()
        if status.state == "failed" and status.code not in LIMITS:
            code = "runner_failed" if status.code == "machine_memory" else status.code
            hint = _OF_WHAT_WAS_GIVEN.get(code, "repeat the command")
            raise Refusal(code, f"{self._what} failed here: {status.reason}", hint=hint)
        return status

    def forget(self) -> None:
        """Drop what jobs came to here: with other libraries, limits or memory they may come to something else."""
        shutil.rmtree(self.folder / "attempts", ignore_errors=True)
        for name in self.blobs.notes("attempts/"):
            self.blobs.drop_note(name)


def require_same_code(state: Round) -> None:
    """Refuse to make again with other code what this code did not make.

    Raises:
        Refusal: code_other.
    """
    if state.defined["code"] != code_digest():
        raise Refusal(
            "code_other",
            f"the round's code is {state.defined['code']}, this machine's {code_digest()}",
            hint="install the version of acclimate that the round was defined with; `GET /v1/server` names its version",
        )


def prepare(
    shop: RerunFolder,
    state: Round,
    model: ModelFiles,
    stages: Sequence[tuple[str, int]],
    *,
    micro_batch: int | None = None,
    attempt: str = "",
) -> dict[tuple[str, int], Remade]:
    """Prepare a model again; (task, seed) -> what it came to.

    Args:
        shop: where.
        state: the round.
        model: as submitted.
        stages: (task, seed), in the plan's order.
        micro_batch: of the first preparation, on which the last bits depend; None where its record has none.
        attempt: another name for another attempt at the same.

    Raises:
        Refusal: this machine's faults.
    """
    status = shop.carry_out(round_jobs.prepare(state, model, stages, micro_batch=micro_batch), attempt=attempt)
    outcome = status.outcome
    if outcome is None:
        # No manifest says what it ran on; the class that the definition declares is what the record has then, too.
        hardware = state.competition.compute.hardware
        made = Remade(None, status.reason, limited=True, hardware=hardware, micro_batch=micro_batch)
        return dict.fromkeys(stages, made)
    plain = Remade(None, hardware=outcome.hardware, versions=dict(outcome.versions), micro_batch=micro_batch)
    if outcome.status == "refused":
        return dict.fromkeys(stages, replace(plain, failed=outcome.reason))
    selections = {entry["task"]: entry for entry in outcome.results["selections"]}
    found: dict[tuple[str, int], Remade] = {}
    for entry in outcome.results["prepared"]:
        if "failed" in entry:
            made = replace(plain, failed=str(entry["failed"]["reason"]))
        else:
            chosen = selections[entry["task"]]
            selection = {"candidates": chosen["candidates"], "selected": chosen["selected"]}
            selection |= {"diverged": bool(entry.get("diverged"))}
            made = replace(plain, prepared=entry["prepared"], selection=selection)
        found[entry["task"], entry["seed"]] = made
    return found


def selection_of(first: Record) -> dict[str, Any]:
    """What ModelPrepared says of the selection, as Remade has it."""
    return {
        "candidates": first["candidates"],
        "selected": first["selected"],
        "diverged": "diverged" in first.fields,
    }


def differing(first: Record, again: Remade, *, tolerance: float) -> str:
    """Where two selections differ by more than the tolerance, in words; "" where they don't."""
    here, there = again.selection, selection_of(first)
    # With no tolerance everything is equal or not; else two rates that do equally well may change places.
    if tolerance == 0:
        same = digests.canonical(_finite(here)) == digests.canonical(there)
        return "" if same else f"the record's selection is {json.dumps(there)}, here it is {json.dumps(dict(here))}"
    if [(c["lr"], c["epoch"]) for c in here["candidates"]] != [(c["lr"], c["epoch"]) for c in there["candidates"]]:
        return f"the record has the candidates {there['candidates']}, here they are {here['candidates']}"
    for mine, theirs in zip(here["candidates"], there["candidates"], strict=True):
        if not near(mine["validation"], theirs["validation"], within=tolerance):
            rate = "the model as submitted" if mine["lr"] is None else f"learning rate {mine['lr']:g}"
            return f"validation nll of {rate}: {theirs['validation']} in the record, {mine['validation']} here"
    return ""


def near(here: float | None, there: float | None, *, within: float) -> bool:
    """Whether two numbers are no further apart; what is no number is near its like only."""
    fine = [value is not None and math.isfinite(value) for value in (here, there)]
    if not all(fine):
        return fine == [False, False]
    assert here is not None and there is not None
    return abs(here - there) <= within


def compare(
    first: Record, again: Remade, *, tolerance: float, measure: Callable[[], tuple[float | None, float | None]]
) -> Verdict:
    """Whether a preparation made again agrees with the first one.

    Args:
        first: its ModelPrepared.
        again: what it came to here.
        tolerance: the definition's audit_tolerance, in nats.
        measure: gives the validation nll of the first prepared model and of the one made here, both by this machine.

    Raises:
        Refusal: rerun_undecided, where the two machines are not alike enough to tell.
    """
    there, alike = str(first["hardware"]), first["hardware"] == again.hardware
    if "failed" in first.fields or again.failed:
        return _compare_failures(first, again, alike=alike)
    equal = first["prepared"] == again.prepared
    if equal or alike:
        slack = 0.0 if alike else tolerance
        wrong = differing(first, again, tolerance=slack) if alike or slack else ""
        if not equal:
            other = f"prepared {first['prepared']} in the record, {again.prepared} here, both on {there}"
            return Verdict(agrees=False, tolerance=0, reason=f"other bytes on the same hardware class: {other}")
        return Verdict(not wrong, slack, wrong or "the same bytes")
    if tolerance == 0:
        raise _undecided(
            f"the first preparation ran on {there}, this one on {again.hardware}, and the round declares no tolerance",
            there,
        )
    if wrong := differing(first, again, tolerance=tolerance):
        return Verdict(agrees=False, tolerance=tolerance, reason=wrong)
    theirs, mine = measure()
    said = (
        f"validation nll {_number(theirs)} of the first, {_number(mine)} of this one, both scored on {again.hardware}"
    )
    return Verdict(near(mine, theirs, within=tolerance), tolerance, f"{said}; tolerance {tolerance:g}")


def _compare_failures(first: Record, again: Remade, *, alike: bool) -> Verdict:
    reason = str(first["failed"]["reason"]) if "failed" in first.fields else ""
    if reason and again.failed:
        return Verdict(agrees=True, tolerance=0, reason=f"it failed here, too: {again.failed}"[:2000])
    if not alike or again.limited:
        outcome = f"failed ({reason})" if reason else "was prepared"
        here = f"failed ({again.failed})" if again.failed else "was prepared"
        sentence = f"it {outcome} on {first['hardware']}, and {here} on {again.hardware}: that may be the machines'"
        raise _undecided(sentence, str(first["hardware"]))
    said = f"it failed first ({reason}), and was prepared here" if reason else f"it failed here: {again.failed}"
    return Verdict(agrees=False, tolerance=0, reason=said[:2000])


def _undecided(sentence: str, hardware: str) -> Refusal:
    hint = f"nothing was sent; run it on a machine of class {hardware}, with the time and memory that the definition allows"
    return Refusal("rerun_undecided", sentence, hint=hint)


def other_versions(first: Mapping[str, str]) -> list[str]:
    """Where this machine's libraries differ from those the first run had, one line each."""
    found = []
    for name, version in sorted(first.items()):
        try:
            own = sys.version.split()[0] if name == "python" else metadata.version(name)
        except metadata.PackageNotFoundError:
            own = "none"
        if own != version:
            found.append(f"{name} {version} there, {own} here")
    return found


def validation_nll(
    shop: RerunFolder, state: Round, model: ModelFiles, key: tuple[str, int], *, prepared: str
) -> float | None:
    """The validation nll of a prepared model, scored by this machine; of generated texts the share of wrong answers. None where it is no number.

    Raises:
        Refusal: this machine's faults; model_invalid, where the file is no weights of this model.
    """
    task = state.competition.task(key[0])
    split = state.defined["files"][f"splits/{task.name}/validation.parquet"]
    job = round_jobs.evaluate(
        state,
        model,
        [(task.name, key[1], "prepared")],
        inputs={task.name: split},
        prepared={f"{task.name}/{key[1]}": prepared},
        entrant="again",
    )
    outcome = shop.carry_out(job).outcome
    if outcome is None or outcome.status == "refused":
        reason = outcome.reason if outcome is not None else "it took too long or too much memory"
        raise Refusal("model_invalid", f"the prepared model {prepared} can't be scored here: {reason}")
    (file,) = outcome.files
    with shop.blobs.local(outcome.files[file]) as path:
        predictions = tables.read(path)
    with shop.blobs.local(split) as path:
        return loss(predictions.to_pylist(), tables.read(path).to_pylist(), task)


def loss(predictions: list[dict[str, Any]], rows: list[dict[str, Any]], task: Task) -> float | None:
    """Mean over the rows of −log-likelihood of the target, or of the whole text, in nats; of generated texts, 1 less the mean score.

    None where a prediction is missing or no number.
    """
    if task.kind == "generate":
        texts = {row["example"]: row["text"] for row in predictions}
        said, targets = [texts.get(row["example"]) for row in rows], [row["target"] for row in rows]
        scores = [score for score, _ in metrics.score_generate(task, targets=targets, texts=said) if score is not None]
        return 1 - math.fsum(scores) / len(rows) if len(scores) == len(rows) and rows else None
    place = {choice: number for number, choice in enumerate(task.choices)}
    given = {row["example"]: row["loglikelihoods"] for row in predictions}
    losses = []
    for row in rows:
        found = given.get(row["example"])
        value = None if found is None else found[0 if task.kind == "perplexity" else place[row["target"]]]
        if value is None or not math.isfinite(value):
            return None
        losses.append(-value)
    return math.fsum(losses) / len(losses) if losses else None


def confirm(shop: RerunFolder, state: Round, model: ModelFiles, key: tuple[str, int], *, again: Remade) -> None:
    """Make it a second time here: a machine that contradicts itself says nothing of another's work.

    Raises:
        Refusal: rerun_undecided.
    """
    second = prepare(shop, state, model, [key], micro_batch=again.micro_batch, attempt="second")[key]
    if replace(second, failed="", versions={}) != replace(again, failed="", versions={}):
        raise Refusal(
            "rerun_undecided",
            f"this machine prepared {key[0]}, seed {key[1]}, twice and got {again.prepared} and {second.prepared}",
            hint="nothing was sent; check this machine's memory and processor, or use another",
        )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _number(value: float | None) -> str:
    return "no number" if value is None else f"{value:.6g}"
