"""Scoring: what evaluations gave back becomes scores here, where the targets are; no child sees them.

A metric takes as long as it takes, so it is done in threads: meanwhile their leader renews its lease, hands out work and commits what is scored.
Nothing but blobs is written here, whose names follow from their bytes: where a term ends in between, the next leader scores again.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from acclimate import commits, table_blobs
from acclimate.assignments import Assignment, Held, Stage
from acclimate_competitions import tables
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import Blobs
from acclimate_runners.runner import Status

if TYPE_CHECKING:
    import pyarrow as pa

THREADS = 4
"""Attempts that are scored at once. While one waits for the disk another is at work; more would crowd out their leader."""
KEPT = 256 << 20
"""Bytes of opened tables that are kept for the evaluations to come."""
FRESH = 600.0
"""Seconds after which scores that could not be committed are looked for again: nothing names them yet."""
_UNUSABLE = frozenset({"file_unreadable", "scores_invalid"})
"""Codes of predictions that can't be read or scored, however often it is tried: their bytes are the ones that came back."""
_LONGEST_REASON = 500
_Made = Sequence[dict[str, Any]] | Exception
"""A result of each stage, or what came in between."""


@dataclass(frozen=True)
class Asked:
    """What is to be scored.

    Attributes:
        held: the attempt, under its fence.
        status: of it, done.
        competition: whose.
        holdout: name -> digest of the opened holdout's files.
    """

    held: Held
    status: Status
    competition: Competition
    holdout: Mapping[str, str]


class Scorer:
    """Scores attempts for one term, in threads that do not outlive the process.

    Args:
        blobs: hold predictions, holdout and scores.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs, self._closed = blobs, False
        self._asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._under_way: set[tuple[str, int]] = set()
        self._made: dict[tuple[str, int], tuple[float, _Made]] = {}
        self._threads: list[threading.Thread] = []
        self._truth: dict[str, pa.Table] = {}

    @property
    def idle(self) -> bool:
        """Whether all that was asked for is made, taken or not."""
        return not self._under_way

    def knows(self, held: Held) -> bool:
        """Whether an attempt was asked for, and not yet taken."""
        key = _key(held)
        return key in self._under_way or key in self._made

    def ask(self, asked: Asked) -> None:
        """Have an attempt scored."""
        self._under_way.add(_key(asked.held))
        self._asked.put(asked)
        if len(self._threads) < min(THREADS, len(self._under_way)):
            # Daemons: concurrent.futures would keep a process that is stopped until a metric has come to its end.
            self._threads.append(threading.Thread(target=self._run, name="scoring", daemon=True))
            self._threads[-1].start()

    def made(self, held: Held) -> Sequence[dict[str, Any]] | None:
        """A result of each of an attempt's stages; None as long as they are being made, or must be made again.

        Raises:
            Exception: whatever came in between; asked for again, it is tried again.
        """
        at, made = self._made.get(_key(held), (0.0, ()))
        if not made:
            return None
        if isinstance(made, Exception):
            self.forget(held)
            raise made
        if time.monotonic() - at > FRESH:
            # What no row names may be collected as garbage after an hour.
            if not all(self._blobs.keep(digest) for digest in {entry["scores"] for entry in made}):
                self.forget(held)
                return None
            self._made[_key(held)] = (time.monotonic(), made)
        return made

    def forget(self, held: Held) -> None:
        """An attempt's results are committed, or of no use."""
        self._made.pop(_key(held), None)

    def close(self) -> None:
        """Begin nothing more. What is under way writes blobs at most; nobody waits for it."""
        self._closed = True
        for _ in self._threads:
            self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            made: _Made
            try:
                made = evaluations(self._blobs, asked, truth=partial(self._table, asked), alive=self._alive)
            except Exception as error:
                made = error
            self._made[_key(asked.held)] = (time.monotonic(), made)
            self._under_way.discard(_key(asked.held))

    def _alive(self) -> None:
        if self._closed:
            raise Refusal("lease_lost", "the term is over", hint="whoever leads next scores it")

    def _table(self, asked: Asked, task: str) -> "pa.Table":
        digest = asked.holdout[f"{task}.parquet"]
        table = self._truth.get(digest)
        if table is None:
            table = table_blobs.read(self._blobs, digest)
            kept = dict(self._truth)
            if sum(one.nbytes for one in kept.values()) + table.nbytes > KEPT:
                kept = {}
            # Another thread may have read it, too; whichever comes last stays.
            self._truth = {**kept, digest: table} if table.nbytes <= KEPT else kept
        return table


def evaluations(
    blobs: Blobs, asked: Asked, *, truth: "Callable[[str], pa.Table]", alive: Callable[[], None]
) -> list[dict[str, Any]]:
    """The results of an attempt's evaluations: their predictions, and one table that holds the scores of all of them.

    Args:
        blobs: hold the predictions, and take the scores.
        asked: what is to be scored.
        truth: a task's opened holdout.
        alive: called before each stage; may refuse.

    Raises:
        Refusal: job_failed for an outcome that does not answer the assignment; blob_unknown, no_space, …
    """
    import pyarrow as pa

    assignment, outcome = asked.held.assignment, commits.outcome_of(asked.status)
    given = {(p["task"], p["seed"], p["protocol"]): p for p in outcome.results.get("predictions", [])}
    made: list[dict[str, Any]] = []
    scored: list[pa.Table] = []
    for stage in assignment.stages:
        alive()
        assert stage.task is not None
        holdout = truth(stage.task)
        entry, predictions = _predictions(blobs, assignment, stage, status=asked.status, given=given, holdout=holdout)
        judged = partial(score, assignment, stage, holdout=holdout, competition=asked.competition)
        try:
            scored.append(judged(table_blobs.read(blobs, predictions, tables.PREDICTIONS)))
        except Refusal as refusal:
            if refusal.code not in _UNUSABLE or outcome.status == "refused":
                raise
            # What a model makes of its own inputs must hold up nobody else: its examples stay unscored, as those of a refused one.
            reason = f"its predictions can't be used: {refusal.sentence}"[:_LONGEST_REASON]
            nothing = unpredicted(assignment.entrant, stage, holdout)
            entry, predictions = _failed({"reason": reason}, holdout), table_blobs.keep(blobs, nothing)
            scored.append(judged(nothing))
        made.append({**entry, "predictions": predictions})
    # What takes the time is the disk's answer that it has a table: one for all of them.
    scores = table_blobs.keep(blobs, pa.concat_tables(scored).combine_chunks())
    circumstances = commits.circumstances(asked.status)
    return [{**entry, "scores": scores, **circumstances} for entry in made]


def _predictions(
    blobs: Blobs,
    assignment: Assignment,
    stage: Stage,
    *,
    status: Status,
    given: Mapping[tuple[str, int | None, str], Mapping[str, Any]],
    holdout: "pa.Table",
) -> tuple[dict[str, Any], str]:
    """What a stage's outcome says of it, and the digest of its predictions."""
    outcome = commits.outcome_of(status)
    if outcome.status == "refused":
        # The model was fit to be prepared and is not to be evaluated: unknown is not zero, its examples stay unscored.
        predictions = table_blobs.keep(blobs, unpredicted(assignment.entrant, stage, holdout))
        return _failed(commits.failure(status), holdout), predictions
    found = given.get((stage.task or "", stage.seed, stage.protocol or ""))
    if found is None:
        raise Refusal("job_failed", f"the outcome has no predictions for {stage.task}, {stage.protocol}")
    entry = commits.finite(found)
    return entry, outcome.files[entry["file"]]


def _failed(failure: Mapping[str, Any], holdout: "pa.Table") -> dict[str, Any]:
    """What a result says of a stage that came to nothing, with the public reason."""
    return {"count": holdout.num_rows, "failed": failure}


def score(
    assignment: Assignment, stage: Stage, predictions: "pa.Table", *, holdout: "pa.Table", competition: Competition
) -> "pa.Table":
    """The scores of one stage's predictions.

    Raises:
        Refusal: scores_invalid, where they are another entrant's or stage's than asked for, or not of each example.
    """
    from acclimate_competitions import metrics

    wanted = {"entrant": assignment.entrant, "protocol": stage.protocol, "task": stage.task, "seed": stage.seed}
    found = {name: predictions.column(name).unique().to_pylist() for name in wanted}
    if found != {name: [value] for name, value in wanted.items()}:
        raise Refusal("scores_invalid", f"predictions are of {str(found)[:200]}, asked for was {wanted}")
    if predictions.num_rows != holdout.num_rows:
        raise Refusal("scores_invalid", f"{predictions.num_rows} predictions, asked for were {holdout.num_rows}")
    (task,) = (task for task in competition.tasks if task.name == stage.task)
    return metrics.score_predictions(predictions, holdout, task, cluster=competition.ranking.cluster)


def unpredicted(entrant: str, stage: Stage, holdout: "pa.Table") -> "pa.Table":
    """Predictions that say of each example that there is none."""
    import pyarrow as pa

    rows = [
        {"entrant": entrant, "protocol": stage.protocol, "task": stage.task, "seed": stage.seed, "example": example}
        for example in holdout.column("example").to_pylist()
    ]
    return pa.Table.from_pylist(rows, schema=tables.PREDICTIONS)


def _key(held: Held) -> tuple[str, int]:
    return held.assignment.attempt, held.fence
