"""Models that count as submitted: the prepared evaluation of one must say what the direct evaluation of the same model said.

The bundle has no weights, and an evaluator names what it likes as a prepared model's digest; but the same weights give the same predictions,
and the direct ones are of the model in the manifest. On one class of hardware, with the same libraries, they are equal to the bit: determinism class
D1 promises it. On two classes, or with other libraries, no more than this is let through:

- a log-likelihood may be off by 0.0001 nats for each byte of the choice, or of the text, that it is of, and by 0.001 in any case;
- of generated texts one in 10,000 bytes may be another, where two tokens are as good as equal, and never more than one in a hundred.

How many rows needed it, and what it does to the score, is said. Where a model gave nothing in either evaluation there is nothing to compare; that
switches off no other row, and nothing in one evaluation beside something in the other is a difference. Only where the organizer gave up one of
the two, which the log says of it, does it contradict nothing: whether it is the submitted model is then the evaluator's word.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from acclimate.verify import parquet
from acclimate.verify.audit import Audit
from acclimate.verify.hardware import apart, declared, undeclared
from acclimate.verify.names import predictions_name
from acclimate.verify.report import Failed, NotChecked
from acclimate_competitions import metrics, records, tables
from acclimate_competitions.phases import PreparationKey
from acclimate_competitions.records import Record
from acclimate_competitions.tasks import Task

A_BYTE, AT_LEAST = 1e-4, 1e-3
"""Nats by which a log-likelihood may be off on another class of hardware or with other libraries: for each byte, and in any case."""
BYTES_A_TEXT, TEXTS = 10_000, 100
"""There one text may be another in so many bytes, and not more than one in so many texts."""


@dataclass(frozen=True)
class _Tied:
    """What came of comparing one prepared evaluation with the direct one.

    Attributes:
        where: which preparation it is.
        rows: how many.
        silent: rows of which neither evaluation has a prediction.
        loose: rows that are equal only within what two classes of hardware, or two sets of libraries, may differ by.
        classes: the classes of hardware that the two ran on.
        libraries: those of which the two had other versions, in words; where there are none and the class is one, they had to be equal to the bit.
        off: by how much the mean score of the task would be another with the direct evaluation's predictions in their place.
    """

    where: str
    rows: int
    silent: int
    loose: int
    classes: tuple[str, ...]
    libraries: tuple[str, ...]
    off: float


def counts_as_submitted(record: Record) -> bool:
    """Whether a preparation's outcome is the submitted model: selected, or put in the place of one that diverged."""
    return "diverged" in record.fields or record["selected"] is None or record["selected"]["lr"] is None


def as_submitted(audit: Audit) -> str:
    """Where a preparation left the model as submitted, it predicts what the direct evaluation of that model predicted."""
    ready = {key: record for key, record in audit.round.prepared.items() if "failed" not in record.fields}
    counting = [key for key, record in ready.items() if counts_as_submitted(record)]
    lost = [key for key in counting if any(map(records.was_given_up, _pair(audit, key)))]
    found = [_tied(audit, key) for key in counting if key not in lost]
    said = f"{len(counting)} of {len(ready)} preparations count the model as submitted"
    said += f"; {_slack(found)}" if found else ""
    open_ = [_lost(audit, lost)] if lost else []
    open_ += [_silence(found)] if any(tied.silent for tied in found) else []
    strange = [tied for tied in found if tied.loose and undeclared(audit.competition, tied.classes)]
    if strange:
        named = ", ".join(undeclared(audit.competition, strange[0].classes))
        open_.append(
            f"of {strange[0].where} rows differ because the evaluator says that they ran on {named}; the definition declares"
            f" {declared(audit.competition)!r}"
        )
    if open_:
        raise NotChecked(
            f"{said}; {'; '.join(open_)}; that the model is the submitted one is the evaluator's word there"
        )
    return said


def _slack(found: Sequence[_Tied]) -> str:
    rows, loose = sum(tied.rows for tied in found), [tied for tied in found if tied.loose]
    if not loose:
        return f"of {rows} rows 0 needed slack"
    worst = max(loose, key=lambda tied: tied.off)
    classes = " and ".join(sorted({name for tied in loose for name in tied.classes}))
    libraries = ", ".join(sorted({name for tied in loose for name in tied.libraries}))
    ran = f"{classes} with {libraries}" if libraries else classes
    return (
        f"of {rows} rows {sum(tied.loose for tied in loose)} needed slack, as the two evaluations ran on {ran}; without it a task's mean score"
        f" would be at most {worst.off:.3g} off ({worst.where})"
    )


def _silence(found: Sequence[_Tied]) -> str:
    silent = [tied for tied in found if tied.silent]
    return (
        f"in {len(silent)} of them neither evaluation has a prediction for {sum(tied.silent for tied in silent)} rows, the first of"
        f" {silent[0].where}, and all other rows were compared"
    )


def _lost(audit: Audit, lost: Sequence[PreparationKey]) -> str:
    """Of what was given up there is nothing to compare, and no prediction beside it is a contradiction."""
    return (
        f"of {len(lost)} of them the organizer gave up an evaluation, as the evaluator says, so that nothing was compared, the first of"
        f" {_named(audit, lost[0])}"
    )


def _named(audit: Audit, key: PreparationKey) -> str:
    submission, task, seed = key
    entrant = next(entry.entrant for entry in audit.round.entries if entry.submission == submission)
    return f"{entrant}, {task}, seed {seed}"


def _pair(audit: Audit, key: PreparationKey) -> list[Record]:
    """The records of a preparation's evaluation and of the direct one that it stands beside."""
    submission, task, _ = key
    return [audit.round.evaluated[one] for one in ((*key, "prepared"), (submission, task, None, "direct"))]


def _tied(audit: Audit, key: PreparationKey) -> _Tied:
    """Compare all rows of a preparation; Failed where one differs by more than it may."""
    submission, task_name, seed = key
    entrant = next(entry.entrant for entry in audit.round.entries if entry.submission == submission)
    keys = ((submission, task_name, seed, "prepared"), (submission, task_name, None, "direct"))
    prepared, direct = (predictions_name(entrant, evaluation) for evaluation in keys)
    task, classes, libraries = audit.competition.task(task_name), _classes(audit, key), _libraries(audit, key)
    exact = len(classes) < 2 and not libraries
    here, there = (parquet.read(audit.bundle.path(name), name, tables.PREDICTIONS) for name in (prepared, direct))
    column = column_of(task)
    mine, yours = given(here, column), given(there, column)
    silent = sum(mine[example] is None and found is None for example, found in yours.items())
    loose, beyond = unlike(audit, task, here, there)
    wrong = loose if exact else beyond
    if wrong:
        promise = f", and both ran on {classes[0]}, where D1 promises equal ones" if exact and classes else ""
        count = f"{len(loose)} of {len(yours)} texts differ, " if column == "text" else ""
        raise Failed(
            f"{prepared} ({wrong[0]})",
            f"{count}it says {mine[wrong[0]]!r}, the model as submitted gave {yours[wrong[0]]!r} in {direct}{promise}",
        )
    off = score_off(audit, task, here, there) if loose else 0.0
    return _Tied(_named(audit, key), len(yours), silent, len(loose), classes, libraries, off)


def column_of(task: Task) -> str:
    """The column of tables.PREDICTIONS that has a task's predictions."""
    return "text" if task.kind == "generate" else "loglikelihoods"


def unlike(audit: Audit, task: Task, here: pa.Table, there: pa.Table) -> tuple[list[str], list[str]]:
    """Hold two evaluations of one model against each other.

    Returns:
        The examples whose predictions are not equal to the bit; those of them that are further apart than two machines may put them,
        which of generated texts are all, where they are too many.
    """
    column = column_of(task)
    mine, pairs = given(here, column), list(given(there, column).items())
    loose, beyond = [], []
    for (example, values), most in zip(pairs, _most(audit, task, [example for example, _ in pairs]), strict=True):
        found = mine.get(example)
        if not _equal(found, values):
            loose.append(example)
            beyond += [] if _near(found, values, most) else [example]
    if task.kind == "generate" and len(loose) > _texts(there):
        beyond = loose
    return loose, beyond


def _classes(audit: Audit, key: PreparationKey) -> tuple[str, ...]:
    """The classes of hardware of a prepared evaluation and the direct one beside it, sorted.

    Where a ModelEvaluated names none, as before records did, it may be any of those that the round's preparations ran on.
    """
    named = {record.fields.get("hardware") for record in _pair(audit, key)}
    pool = {record["hardware"] for record in audit.round.prepared.values()} if None in named else set[str]()
    return tuple(sorted({name for name in named if name is not None} | pool))


def _libraries(audit: Audit, key: PreparationKey) -> tuple[str, ...]:
    """The libraries of which a prepared evaluation and the direct one beside it name other versions, in words; none where one of them names none."""
    one, other = (record.fields.get("libraries") for record in _pair(audit, key))
    if one is None or other is None:
        return ()
    return tuple(f"{name} {' and '.join(pair)}" for name, pair in apart(one, other).items())


def given(table: pa.Table, column: str) -> dict[str, Any]:
    """Example -> what a column of predictions has for it."""
    return dict(zip(table.column("example").to_pylist(), table.column(column).to_pylist(), strict=True))


def _most(audit: Audit, task: Task, examples: Sequence[str]) -> Iterator[list[float]]:
    """For each example, by how much each of its log-likelihoods may be off on another class of hardware, in nats."""
    choices = [_nats(choice) for choice in task.choices]
    inputs = {}
    if task.kind == "perplexity":
        holdout = audit.holdout[task.name]
        inputs = dict(zip(holdout.column("example").to_pylist(), holdout.column("input").to_pylist(), strict=True))
    for example in examples:
        yield [_nats(inputs[example])] if inputs else choices


def _nats(text: str) -> float:
    return max(AT_LEAST, A_BYTE * len(text.encode()))


def _equal(here: Any, there: Any) -> bool:
    if isinstance(here, list) and isinstance(there, list):
        return len(here) == len(there) and all(a == b or (a != a and b != b) for a, b in zip(here, there, strict=True))
    return bool(here == there)


def _near(here: Any, there: Any, most: Sequence[float]) -> bool:
    """Whether two predictions that are not equal may be those of one model on two classes of hardware."""
    if here is None or there is None:
        return False
    if isinstance(here, str):
        return True  # how many may be others is counted
    if not len(here) == len(there) == len(most):
        return False
    pairs = zip(here, there, most, strict=True)
    return all(a == b or (None not in (a, b) and abs(a - b) <= slack) for a, b, slack in pairs)


def _texts(direct: pa.Table) -> int:
    texts = [text for text in direct.column("text").to_pylist() if text is not None]
    size = sum(len(text.encode()) for text in texts)
    return int(min(size // BYTES_A_TEXT, direct.num_rows // TEXTS))


def score_off(audit: Audit, task: Task, here: pa.Table, there: pa.Table) -> float:
    """How far the mean scores of two tables of predictions are apart; what has no score is in neither mean."""
    means = []
    for table in (here, there):
        scored = metrics.score_predictions(table, audit.holdout[task.name], task, cluster=None)
        values = [score for score in scored.column("score").to_pylist() if score is not None]
        means.append(sum(values) / len(values) if values else 0.0)
    return float(abs(means[0] - means[1]))
