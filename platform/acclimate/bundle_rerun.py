"""`acclimate verify --rerun`: one entrant's preparations and evaluations made again from a bundle and the entrant's own files.

Equal bytes on one hardware class with the libraries that the record names, else within the tolerance that the round declares. With other libraries,
or where a record of before names none, other bytes on one hardware class are no proof of a lie while the numbers are close: then the
line is NOT CHECKED and says so. Numbers that are far apart FAIL; so does a prediction of the very model that was made or submitted here, where it
is further off than two machines may put it (verify/submitted.py). Which hardware and libraries the first run had, the evaluator says: by a class that the
definition does not declare nothing is within a tolerance.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from acclimate import rerun, round_jobs
from acclimate.rerun import Progress, Remade, RerunFolder
from acclimate.verify import parquet, submitted
from acclimate.verify.audit import Audit
from acclimate.verify.hardware import apart, declared, undeclared
from acclimate.verify.names import predictions_name
from acclimate.verify.report import Failed, NotChecked
from acclimate_competitions import records, tables
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
        2. Every preparation is made again and held against its ModelPrepared; of what the organizer gave up nothing is made again.
        3. Where the bundle's predictions are verified, every evaluation is made again with the models prepared here, and held
           against them; so are none that were given up.

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
    """One entry that is made again, and what came of it so far.

    Attributes:
        equal, within: how many preparations and evaluations came out so.
        most: how far apart the numbers of those within the tolerance are at most.
        rows: predictions of one model that differ as two machines may have it.
        elsewhere: the hardware that records name where equal bytes were not asked for.
        unsure: what can't be decided, a sentence each.
        given_up: preparations and evaluations that the organizer gave up, in words.
        versions: of the libraries here.
        libraries: those that a record names in another version than this machine has -> (there, here).
        unnamed: whether a record names none.
    """

    audit: Audit
    entry: Entry
    model: ModelFiles
    shop: RerunFolder
    equal: int = 0
    within: int = 0
    most: float = 0.0
    rows: int = 0
    elsewhere: set[str] = field(default_factory=set)
    unsure: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    versions: Mapping[str, str] = field(default_factory=dict)
    libraries: dict[str, tuple[str, str]] = field(default_factory=dict)
    unnamed: bool = False

    def done(self) -> str:
        state, stages = self.audit.round, self.left()
        tasks = [task.name for task in state.competition.tasks]
        for name in round_jobs.public_files(state, tasks, self.model):
            self.shop.blobs.put(self.audit.bundle.path(f"public/{name}"))
        # 2
        again: dict[tuple[str, int], Remade] = {}
        if stages:
            size = state.prepared[self.entry.submission, *stages[0]].fields.get("micro_batch")
            again = rerun.prepare(self.shop, state, self.model, stages, micro_batch=size)
        for key, made in again.items():
            self._preparation(state.prepared[self.entry.submission, *key], made, where=self._where(*key))
        said = f"{self.entry.entrant}: {len(again)} preparations"
        # 3
        if hasattr(self.audit, "plan"):
            said += f" and {self._evaluations(again)} evaluations"
        else:
            said += "; its evaluations were not made again, as this report has no verified predictions"
        return self.verdict(said)

    def left(self) -> list[tuple[str, int]]:
        """(task, seed) of the entry's preparations that are to be made again: all but those that were given up, which are noted."""
        state = self.audit.round
        own = [key for key in state.preparations if key[0] == self.entry.submission]
        return [key[1:] for key in own if not self._gave_up(state.prepared[key], self._where(*key[1:]))]

    def verdict(self, said: str) -> str:
        """How much agrees, after what was done.

        Raises:
            NotChecked: some of it can't be decided, or was given up; or hardware was named that the definition does not declare.
        """
        if not self.given_up:
            return self._of_what_was_made(said)
        lost = f"{self.given_up[0]}{f' and {len(self.given_up) - 1} others' if len(self.given_up) > 1 else ''}: given up by the round's"
        lost += " organizer, as the evaluator says, and not made again here"
        try:
            told = self._of_what_was_made(said)
        except NotChecked as doubt:
            told = doubt.reason
        raise NotChecked(f"{lost}; {told}")

    def _of_what_was_made(self, said: str) -> str:
        if self.unsure:
            told = f"{self.unsure[0]} ({len(self.unsure)} such of {self.equal + self.within + len(self.unsure)})"
            raise NotChecked("; ".join([told, *self._ran_with()]))
        if not self.within:
            return f"{said}: {self.equal} equal"
        named = ", ".join(sorted(self.elsewhere))
        told = f"{said}: {self.equal} equal, {self.within} within the tolerance, at most {self.most:.3g} apart, as the evaluator names {named}"
        told += f"; {self.rows} predictions of equal models differ within what two machines may" if self.rows else ""
        if strange := undeclared(self.audit.competition, self.elsewhere):
            raise NotChecked(
                f"{told}; the definition declares {declared(self.audit.competition)!r} and not {', '.join(strange)}, so that it was made as"
                " the log says is the evaluator's word"
            )
        return told

    def _ran_with(self) -> Iterator[str]:
        """What of the libraries may have set this machine's bytes apart, in words."""
        if self.libraries:
            named = ", ".join(f"{name} {there} (here {here})" for name, (there, here) in sorted(self.libraries.items()))
            yield f"the evaluator names {named}: with these versions bytes must be equal on its class of hardware"
        if self.unnamed:
            here = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
            yield f"the bundle does not say which library versions it was made with, here they are {here}"

    def _promised(self, first: Record, *, on: str, versions: Mapping[str, str]) -> bool:
        """Whether D1 promises this machine the bytes that a record names: its class of hardware and all the libraries are the same. What is other is noted."""
        named = first.fields.get("libraries")
        if named is None:
            self.unnamed = True
            return False
        others = apart(named, versions)
        self.libraries |= others
        return not others and first.fields.get("hardware") == on

    def _gave_up(self, record: Record, where: str) -> bool:
        """Whether what a record says was given up, which is noted."""
        if records.was_given_up(record):
            self.given_up.append(f"{'preparation' if record.type == 'ModelPrepared' else 'evaluation'} of {where}")
            return True
        return False

    def _where(self, task: str, seed: int | None, protocol: str = "prepared") -> str:
        return f"{self.entry.entrant}, {task}, " + (protocol if seed is None else f"seed {seed}")

    def _preparation(self, first: Record, made: Remade, *, where: str) -> None:
        alike = first["hardware"] == made.hardware
        self.versions = made.versions
        promised = self._promised(first, on=made.hardware, versions=made.versions)
        if "failed" in first.fields or made.failed:
            self._failures(first, made, where=where, alike=promised or (alike and "libraries" not in first.fields))
        elif first["prepared"] == made.prepared:
            self.equal += 1
        else:
            pairs = zip(made.selection["candidates"], first["candidates"], strict=True)
            numbers = [(here["validation"], there["validation"]) for here, there in pairs]
            place, what = (
                f"ModelPrepared of {where}",
                f"{where}: prepared {first['prepared']} on {first['hardware']}, here {made.prepared} on {made.hardware}",
            )
            if promised:
                raise Failed(place, f"{what}, with the same libraries, where D1 promises equal bytes")
            what += "; validation nll of a candidate"
            self._judge(numbers, place, what, hardware=None if alike else first["hardware"])

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
        self, numbers: Sequence[tuple[float | None, float | None]], place: str, what: str, *, hardware: str | None
    ) -> None:
        """Other bytes: agreement within the tolerance on other hardware, doubt where numbers are close, else a failure.

        Args:
            numbers: pairs of here and there.
            place: where it fails.
            what: which numbers they are.
            hardware: the class that the record names; None where it is this machine's.
        """
        tolerance, alike = self.audit.competition.round.audit_tolerance, hardware is None
        if hardware is not None and tolerance and all(rerun.near(*pair, within=tolerance) for pair in numbers):
            self.within += 1
            self.elsewhere.add(hardware)
            apart = [abs(a - b) for a, b in numbers if a is not None and b is not None]
            self.most = max([self.most, *(each for each in apart if each == each)])
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
        kept = [key for key in keys if not self._gave_up(state.evaluated[key], self._where(key[1], key[2], key[3]))]
        todo = [key for key in kept if key[3] == "direct" or f"{key[1]}/{key[2]}" in prepared]
        if not todo:
            return 0
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
                same = key[3] == "direct" or state.models[key] == prepared[f"{key[1]}/{key[2]}"]
                self._evaluation(
                    key,
                    tables.read(path, tables.PREDICTIONS),
                    same=same,
                    on=outcome.hardware,
                    versions=outcome.versions,
                )
        return len(todo)

    def _inputs(self, task: str) -> str:
        """The holdout's rows as the evaluator gave them to the model: without targets."""
        path = self.audit.work / f"{task}.inputs.parquet"
        columns = [name for name in self.audit.holdout[task].column_names if name != "target"]
        tables.write(self.audit.holdout[task].select(columns), path)
        return self.shop.blobs.put(path)

    def _evaluation(
        self, key: EvaluationKey, here: pa.Table, *, same: bool, on: str, versions: Mapping[str, str]
    ) -> None:
        """Hold an evaluation made here against the bundle's.

        Args:
            key: which one.
            here: its predictions.
            same: whether it is of the very model that the log names.
            on: this machine's class of hardware.
            versions: of the libraries here.
        """
        name, task = predictions_name(self.entry.entrant, key), self.audit.competition.task(key[1])
        there = parquet.read(self.audit.bundle.path(name), name, tables.PREDICTIONS)
        loose, beyond = submitted.unlike(self.audit, task, here, there)
        if not loose:
            self.equal += 1
            return
        hardware = self._elsewhere(key, on, same=same)
        promised = self._promised(self.audit.round.evaluated[key], on=on, versions=versions)
        if same:
            if wrong := loose if promised else beyond:
                column = submitted.column_of(task)
                mine, yours = (submitted.given(table, column)[wrong[0]] for table in (here, there))
                said = f"{self._where(key[1], key[2], key[3])}: the very same model predicts {mine!r} here, it says {yours!r}"
                raise Failed(f"{name} ({wrong[0]})", f"{said} ({len(wrong)} of {there.num_rows} such)")
            self.rows += len(loose)
        rows = self.audit.holdout[key[1]].to_pylist()
        pair = rerun.loss(here.to_pylist(), rows, task), rerun.loss(there.to_pylist(), rows, task)
        of = "share of wrong answers" if task.kind == "generate" else "nll"
        off = submitted.score_off(self.audit, task, here, there)
        what = f"{self._where(key[1], key[2], key[3])}: the model made here predicts otherwise than {name} says"
        what += (
            f", in {len(loose)} of {there.num_rows} rows, by which the mean score is {off:.3g} off; {of} of the holdout"
        )
        self._judge([pair], name, what, hardware=hardware)

    def _elsewhere(self, key: EvaluationKey, on: str, *, same: bool) -> str | None:
        """The class of hardware that another outcome is laid to; None where all of it ran on this machine's.

        Where it is another model, that may be the preparation's; else it is the evaluation's, of which older records name none, so that it
        most likely ran where the preparations did.
        """
        state = self.audit.round
        keys = [one for one in state.preparations if one[0] == key[0] and one[1] == key[1] and key[2] in (None, one[2])]
        prepared = [str(state.prepared[one]["hardware"]) for one in keys]
        named = state.evaluated[key].fields.get("hardware")
        runs = [*([] if named is None else [str(named)]), *(prepared if named is None or not same else [])]
        return next((run for run in runs if run != on), None)
