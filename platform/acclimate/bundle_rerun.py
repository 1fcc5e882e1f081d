"""`acclimate verify --rerun`: one entrant's preparations and evaluations made again from a bundle and the entrant's own files.

Equal bytes on one hardware class, else within the tolerance that the round declares. A bundle does not say which library
versions its numbers came from, so other bytes on one hardware class are no proof of a lie while the numbers are close: then the
line is NOT CHECKED and says so. Numbers that are far apart FAIL.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from acclimate import rerun, round_jobs
from acclimate.rerun import Progress, Remade, RerunFolder
from acclimate.verify.audit import Audit
from acclimate.verify.names import predictions_name
from acclimate.verify.report import Failed, NotChecked
from acclimate_competitions import tables
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Entry, EvaluationKey
from acclimate_competitions.records import Record
from acclimate_runners import adapter_files
from acclimate_runners.code import code_digest
from acclimate_runners.jobs import ModelFiles

CLOSE = 0.01
"""How far, relative to 1 or to the value, two means may be apart that only other library versions set apart."""


@dataclass(frozen=True)
class EntrantRerun:
    """Makes an entrant's work again; give it to acclimate.verify.verify as `rerun`.

    Attributes:
        name: the entrant.
        models: the folder with the files that it submitted.
        progress: told of the steps.
    """

    name: str
    models: Path
    progress: Progress = rerun.SILENT

    def __call__(self, audit: Audit) -> str:
        """How much agrees.

        1. The files are those of the manifest; this machine's code is the round's.
        2. Every preparation is made again and held against its ModelPrepared.
        3. Where the bundle's predictions are verified, every evaluation is made again with the models prepared here, and held
           against them.

        Raises:
            Failed: what came out here is far from what the log or the bundle says.
            NotChecked: the files, the code or this machine can't show it.
        """
        # 1
        entry, files = self._entry(audit)
        shop = RerunFolder(audit.work / "rerun", progress=self.progress)
        try:
            base = self._manifest(audit, entry)["base"] if adapter_files.are(files) else None
            model = round_jobs.with_base(audit.round, _taken(shop, self.models, files), base)
            return _Work(audit, entry, model, shop).done()
        except Refusal as refusal:
            # What the entry can be blamed for is an outcome; all else is this machine's.
            raise NotChecked(f"this machine could not make it again: {refusal.sentence}") from refusal

    def _entry(self, audit: Audit) -> tuple[Entry, dict[str, str]]:
        entries = {entry.entrant: entry for entry in audit.round.entries}
        if self.name not in entries:
            raise NotChecked(
                f"{self.name!r} has no entry in this round; entries are of {', '.join(sorted(entries)) or 'nobody'}"
            )
        if audit.round.defined["code"] != code_digest():
            raise NotChecked(
                f"the round's code is {audit.round.defined['code']}, this machine's {code_digest()}: install that version"
            )
        files = self._manifest(audit, entries[self.name])["files"]
        return entries[self.name], {item["name"]: item["sha256"] for item in files}

    def _manifest(self, audit: Audit, entry: Entry) -> Mapping[str, Any]:
        found: Mapping[str, Any] = audit.manifests[entry.commitment]
        return found


def _taken(shop: RerunFolder, folder: Path, files: Mapping[str, str]) -> dict[str, str]:
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            raise NotChecked(f"{folder} has no {name}, which the entrant submitted as {digest}")
        if (found := shop.blobs.put(path)) != digest:
            raise NotChecked(f"{path} is {found}, the entrant submitted {digest}")
    return dict(files)


@dataclass
class _Work:
    """One entry that is made again, and what came of it so far."""

    audit: Audit
    entry: Entry
    model: ModelFiles
    shop: RerunFolder
    equal: int = 0
    within: int = 0
    unsure: list[str] = field(default_factory=list)
    versions: Mapping[str, str] = field(default_factory=dict)
    alike: dict[tuple[str, int | None], bool] = field(default_factory=dict)

    def done(self) -> str:
        state = self.audit.round
        stages = [key[1:] for key in state.preparations if key[0] == self.entry.submission]
        tasks = [task.name for task in state.competition.tasks]
        for name in round_jobs.public_files(state, tasks, self.model):
            self.shop.blobs.put(self.audit.bundle.path(f"public/{name}"))
        # 2
        first = state.prepared[self.entry.submission, *stages[0]]
        size = first.fields.get("micro_batch")
        again = rerun.prepare(self.shop, state, self.model, stages, micro_batch=size)
        for key, made in again.items():
            self._preparation(state.prepared[self.entry.submission, *key], made, where=self._where(*key))
        said = f"{self.entry.entrant}: {len(again)} preparations"
        # 3
        if hasattr(self.audit, "plan"):
            said += f" and {self._evaluations(again)} evaluations"
        else:
            said += "; its evaluations were not made again, as this report has no verified predictions"
        if self.unsure:
            here = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
            raise NotChecked(
                f"{self.unsure[0]} ({len(self.unsure)} such of {self.equal + self.within + len(self.unsure)}); the bundle does not"
                f" say which library versions it was made with, here they are {here}"
            )
        return f"{said}: {self.equal} equal" + (f", {self.within} within the tolerance" if self.within else "")

    def _where(self, task: str, seed: int | None, protocol: str = "prepared") -> str:
        return f"{self.entry.entrant}, {task}, " + (protocol if seed is None else f"seed {seed}")

    def _preparation(self, first: Record, made: Remade, *, where: str) -> None:
        alike = self.alike[first["task"], first["seed"]] = first["hardware"] == made.hardware
        self.versions = made.versions
        if "failed" in first.fields or made.failed:
            self._failures(first, made, where=where, alike=alike)
        elif first["prepared"] == made.prepared:
            self.equal += 1
        else:
            pairs = zip(made.selection["candidates"], first["candidates"], strict=True)
            numbers = [(here["validation"], there["validation"]) for here, there in pairs]
            what = (
                f"{where}: prepared {first['prepared']} on {first['hardware']}, here {made.prepared} on {made.hardware}"
            )
            self._judge(numbers, f"ModelPrepared of {where}", f"{what}; validation nll of a candidate", alike=alike)

    def _failures(self, first: Record, made: Remade, *, where: str, alike: bool) -> None:
        there = f"failed ({first['failed']['reason']})" if "failed" in first.fields else "gave a model"
        here = f"failed ({made.failed})" if made.failed else "gives one"
        if "failed" in first.fields and made.failed:
            self.equal += 1
        elif alike and not made.limited:
            raise Failed(f"ModelPrepared of {where}", f"it {there}, here it {here}")
        else:
            self.unsure.append(f"{where}: it {there} on {first['hardware']}, here it {here} on {made.hardware}")

    def _judge(
        self, numbers: Sequence[tuple[float | None, float | None]], place: str, what: str, *, alike: bool
    ) -> None:
        """Other bytes: agreement within the tolerance on other hardware, doubt where numbers are close, else a failure."""
        tolerance = self.audit.competition.round.audit_tolerance
        if not alike and tolerance and all(rerun.near(*pair, within=tolerance) for pair in numbers):
            self.within += 1
            return
        # Without a declared tolerance other hardware may differ by any amount, and nobody said how much is too much.
        bounded = alike or tolerance > 0
        for here, there in numbers:
            close = max(tolerance, CLOSE * max(1.0, abs(there or 0.0)))
            if bounded and not rerun.near(here, there, within=close):
                raise Failed(place, f"{what} {there}, here {here}")
        self.unsure.append(f"{what} {'is close' if bounded else 'can not be told apart without a declared tolerance'}")

    def _evaluations(self, again: Mapping[tuple[str, int], Remade]) -> int:
        audit, state = self.audit, self.audit.round
        keys = [key for found in audit.plan[self.entry.entrant].values() for key in found]
        prepared = {
            f"{task}/{seed}": made.prepared for (task, seed), made in again.items() if made.prepared is not None
        }
        todo = [key for key in keys if key[3] == "direct" or f"{key[1]}/{key[2]}" in prepared]
        inputs = {task: self._inputs(task) for task in dict.fromkeys(key[1] for key in todo)}
        job = round_jobs.evaluate(
            state,
            self.model,
            [key[1:] for key in todo],
            inputs=inputs,
            prepared=prepared,
            entrant=self.entry.entrant,
        )
        outcome = self.shop.carry_out(job).outcome
        if outcome is None or outcome.status == "refused":
            reason = outcome.reason if outcome is not None else "it took too long or too much memory"
            raise NotChecked(f"{self.entry.entrant} can't be evaluated here: {reason}")
        given = {(p["task"], p["seed"], p["protocol"]): p["file"] for p in outcome.results["predictions"]}
        for key in todo:
            with self.shop.blobs.local(outcome.files[given[key[1:]]]) as path:
                self._evaluation(key, tables.read(path).to_pylist())
        return len(todo)

    def _inputs(self, task: str) -> str:
        """The holdout's rows as the evaluator gave them to the model: without targets."""
        path = self.audit.work / f"{task}.inputs.parquet"
        columns = [name for name in self.audit.holdout[task].column_names if name != "target"]
        tables.write(self.audit.holdout[task].select(columns), path)
        return self.shop.blobs.put(path)

    def _evaluation(self, key: EvaluationKey, here: list[dict[str, Any]]) -> None:
        name, task = predictions_name(self.entry.entrant, key), self.audit.competition.task(key[1])
        there = tables.read(self.audit.bundle.path(name)).to_pylist()
        column = "text" if task.kind == "generate" else "loglikelihoods"
        if {r["example"]: r[column] for r in here} == {r["example"]: r[column] for r in there}:
            self.equal += 1
            return
        rows = self.audit.holdout[key[1]].to_pylist()
        pair = rerun.loss(here, rows, task), rerun.loss(there, rows, task)
        of = "share of wrong answers" if task.kind == "generate" else "nll"
        what = f"{self._where(key[1], key[2], key[3])}: the model made here predicts otherwise than {name} says; {of} of the holdout"
        # No record says on which hardware a direct evaluation ran; most likely where the preparations did.
        alike = all(self.alike.values()) if key[2] is None else self.alike[key[1], key[2]]
        self._judge([pair], name, what, alike=alike)
