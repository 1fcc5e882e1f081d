"""All checks in their order, and how an audit goes through them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from acclimate.log import parse_vkey
from acclimate.log_keys import LogKeys
from acclimate.verify import (
    audits,
    earlier,
    files,
    history,
    order,
    private,
    scores,
    seal,
    standing,
    strangers,
    submitted,
    versions,
    witnesses,
)
from acclimate.verify.audit import Audit, Rerun
from acclimate.verify.report import Beside, Check, Failed, NotChecked, Report, lacking
from acclimate_competitions import corrections, tables
from acclimate_competitions.corrections import Correction
from acclimate_competitions.errors import Refusal
from acclimate_competitions.ranking import Ranking

LEVELS = ("log", "seal", "scores", "rerun")
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Rule:
    """One check.

    Attributes:
        name: short and stable.
        level: one of LEVELS.
        claim: what ok means, in plain words.
        needs: names of the checks that must be ok before this one can be made.
        run: does it; returns how much was looked at.
        rests: names of further checks that must be ok before this one can be. It is made without them, because it may name
            the bad place that they only know the neighbourhood of.
        secret: whether it reads what the public bundle of a private holdout withholds.
    """

    name: str
    level: str
    claim: str
    needs: tuple[str, ...]
    run: Callable[[Audit], str]
    rests: tuple[str, ...] = ()
    secret: bool = False


_LOG = (
    Rule(
        "manifest",
        "log",
        "MANIFEST names every file of the bundle and no other, each with its digest",
        (),
        lambda audit: files.manifest(audit.bundle),
    ),
    Rule(
        "nothing else",
        "log",
        "each file is of a kind that a check below reads, and each signature under a checkpoint is the log's or a known witness's: nothing"
        " stands in the bundle unverified",
        (),
        strangers.nothing_else,
    ),
    Rule("checkpoint", "log", "the log that keys.json names has signed its last checkpoint", (), history.checkpoint),
    Rule(
        "entries",
        "log",
        "the entries are those that the checkpoint signs: none changed, added, dropped or moved",
        ("checkpoint",),
        history.entries,
    ),
    Rule(
        "earlier checkpoints",
        "log",
        "each is the beginning of the same entries: the log was only ever added to",
        ("checkpoint",),
        history.earlier,
    ),
    Rule("records", "log", "each entry is a record in its one form, and times follow the order", (), history.parsed),
    Rule("round", "log", "the log has the round that this bundle is about", ("records",), order.find),
    # By the log's key it can be told of a log whose records are broken, too; by a witness's it needs to know the round.
    Rule(
        "whose log",
        "log",
        "it is the log whose key you gave, or all of the round is cosigned by a witness whose key you gave",
        ("checkpoint",),
        history.whose,
    ),
    Rule(
        "split view",
        "log",
        "a quorum of witnesses cosigned this history, so everybody is shown the same",
        ("round", "entries"),
        witnesses.split_view,
    ),
    Rule(
        "whose witnesses",
        "log",
        "witnesses whose keys you gave are the round's, and cosigned its last record",
        ("round", "entries"),
        witnesses.whose,
    ),
    Rule("keys", "log", "keys.json says what the organizer signed before the round opened", ("round",), order.keys),
    Rule(
        "definition",
        "log",
        "definition.toml is the one committed to before the round opened",
        ("round",),
        order.read_definition,
    ),
    Rule(
        "public files",
        "log",
        "public/ holds exactly the files committed to before the round opened",
        ("round",),
        order.public,
    ),
    Rule(
        "rules",
        "log",
        "recipe, scorer and ranking policy are those committed to before the round opened, and every record was allowed when"
        " it came: holdout sealed before the opening, entries frozen and models prepared before the release, each signed by"
        " whoever had to",
        ("definition",),
        order.fold,
        rests=("entries", "keys"),
    ),
    Rule(
        "time",
        "log",
        "a quorum of witnesses saw the commitment of every entry by the close and the last preparation before the objection window, and no record says that it came after they saw it",
        ("rules",),
        witnesses.time,
    ),
    Rule(
        "receipts",
        "log",
        "each accepted submission has a receipt, and each receipt leads into this log",
        ("checkpoint", "rules"),
        history.receipts,
    ),
    Rule(
        "submissions",
        "log",
        "the manifests are those that entrants committed to and signed for this round, and the definition allows each",
        ("rules",),
        order.submissions,
    ),
)
_SEAL = (
    Rule(
        "ciphertext",
        "seal",
        "the sealed holdout is, byte for byte, the one committed to before the round opened",
        ("rules",),
        seal.ciphertext,
    ),
    Rule(
        "shares",
        "seal",
        "the released shares are those that custodians acknowledged before the round opened",
        ("rules",),
        seal.shares,
        secret=True,
    ),
    Rule(
        "key", "seal", "any other custodians in the required number would have opened the same", ("shares",), seal.key
    ),
    Rule("opening", "seal", "what was opened is what was sealed, to the last chunk and row", ("key",), seal.opening),
    Rule(
        "holdout",
        "seal",
        "the published holdout is, byte for byte, what was opened, one file a task and no other",
        ("opening",),
        seal.holdout,
    ),
    Rule(
        "opened rows",
        "seal",
        "the rows that a draw chose are, each with its salt and path, rows of the sealed holdout",
        ("rules", "entries"),
        private.rows,
    ),
    Rule(
        "unseen",
        "seal",
        "no example, input or cluster of the holdout stands in a public split, and each target is one that its task can have",
        ("holdout", "public files"),
        seal.unseen,
    ),
)
_SCORES = (
    Rule(
        "prepared",
        "scores",
        "each entry was prepared from the model it submitted, for every task and seed, as the log says",
        ("submissions",),
        scores.prepared,
    ),
    Rule(
        "selection",
        "scores",
        "each learning rate was chosen by the recipe's rule from the validation scores in the log; where the model counts as"
        " submitted, it is one model for every task and seed (a classifier's head is made for each task)",
        ("rules", "submissions"),
        scores.selection,
    ),
    Rule(
        "predictions",
        "scores",
        "they are those logged, one for every example of the holdout",
        ("rules", "holdout"),
        scores.predictions,
    ),
    Rule(
        "as submitted",
        "scores",
        "where the model counts as submitted, it predicts what the submitted model predicted unprepared",
        ("selection", "predictions"),
        submitted.as_submitted,
    ),
    Rule(
        "scores",
        "scores",
        "scoring the predictions again gives the published scores, and their files hold nothing beside them",
        ("predictions",),
        scores.scores,
    ),
    Rule(
        "majority",
        "scores",
        "the null baseline's scores follow from the public preparation splits",
        ("scores", "public files"),
        scores.majority,
    ),
    Rule(
        "ranking",
        "scores",
        "ranking the recomputed scores by the committed policy gives ranking.json, digit for digit",
        ("scores", "majority"),
        versions.rank,
    ),
    Rule(
        "published",
        "scores",
        "this ranking is signed by the organizer, or, where the definition lets the round publish itself, by its evaluator",
        ("rules",),
        scores.published,
    ),
    Rule(
        "auditor's report",
        "scores",
        "the auditor whom the round names verified the whole bundle, and nothing FAILED",
        ("rules",),
        private.reported,
    ),
    Rule("honest preparation", "scores", "a second operator's drawn re-runs agree", ("rules",), audits.honest),
    Rule(
        "standing",
        "scores",
        "each entry that stands from an earlier round has the model that the log names for it there, and each anchor that of the definition",
        ("prepared", "records"),
        standing.standing,
        rests=("entries",),
    ),
    Rule(
        "versions",
        "scores",
        "each older version of the ranking is the one that the log names, and follows from the predictions, the holdout and its own correction",
        ("rules",),
        versions.older,
    ),
    Rule(
        "earlier rounds",
        "scores",
        "the round that this one follows is an earlier one of its competition in this log, and no other holdout of it was open when this one was sealed",
        ("round",),
        earlier.follows,
        rests=("entries",),
    ),
)
_RERUN = (
    Rule(
        "re-run",
        "rerun",
        "preparing and evaluating an entry again, on the machine that verifies, gives the same",
        ("submissions", "public files"),
        audits.rerun,
    ),
)
CHECKS: tuple[Rule, ...] = (*_LOG, *_SEAL, *_SCORES, *_RERUN)


def verify(
    path: Path | files.Bundle,
    *,
    log_key: str | LogKeys | None = None,
    witnesses: Sequence[str] = (),
    levels: Collection[str] = LEVELS,
    rerun: Rerun | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Report:
    """Audit a bundle.

    Args:
        path: its folder or ZIP; or what was opened of it, where the same bytes are to be used again.
        log_key: the log's vkey, got elsewhere than from the bundle; with those that were given up, where they are known.
        witnesses: vkeys of witnesses, got elsewhere.
        levels: which of LEVELS to check; checks that those need are made and reported too, and always whose log it is.
        rerun: makes an entry again, for the check of this name; such as acclimate.bundle_rerun.EntrantRerun.
        progress: told (checks made, of how many, the name of the next).

    Raises:
        Refusal: key_refused, for a malformed log_key or witness; request_invalid, for an unknown level; no_space, file_unreadable,
            where this machine lacks what it takes. A bad bundle raises nothing: it FAILED.
    """
    log_key = LogKeys(log_key) if isinstance(log_key, str) else log_key
    for vkey in [*(log_key.texts if log_key is not None else []), *witnesses]:
        parse_vkey(vkey)
    unknown = sorted(set(levels) - set(LEVELS))
    if unknown:
        raise Refusal("request_invalid", f"unknown level {unknown[0]!r}", hint=f"levels are {', '.join(LEVELS)}")
    rules = _wanted(levels)
    try:
        with _audit(path, log_key=log_key, witnesses=tuple(witnesses), rerun=rerun) as audit:
            checks = _go_through(audit, rules, progress)
            name = audit.records[audit.first].round if _ok(checks, "round") else ""
    except Failed as failed:
        return unopened(path, failed)
    return Report(_named(path), name, tuple(checks))


def unopened(path: Path | files.Bundle, failed: Failed) -> Report:
    """The report on what could not even be opened as a bundle."""
    return Report(_named(path), "", (Check(1, "manifest", "FAILED", failed.why, failed.where),))


def _named(path: Path | files.Bundle) -> str:
    return str(path if isinstance(path, Path) else path.source)


def recompute_scores(path: Path) -> pa.Table:
    """All scores of a bundle (tables.SCORES), recomputed from predictions and holdout as `verify` does.

    Raises:
        Refusal: bundle_invalid, naming the check that FAILED on the way; holdout_private, for what a public bundle withholds.
    """
    with _recomputed(path, "majority") as audit:
        return pa.concat_tables(audit.scores[entrant] for entrant in sorted(audit.scores)).cast(tables.SCORES)


def recompute_ranking(path: Path | files.Bundle, *, correction: Correction | None = None) -> Ranking:
    """The ranking of a bundle, recomputed from its predictions; for the organizer before the ranking is published, or revised with a correction.

    Raises:
        Refusal: bundle_invalid, naming the check that FAILED on the way; holdout_private, for what a public bundle withholds.
    """
    with _recomputed(path, "ranking") as audit:
        if correction is None:
            return audit.ranking
        corrections.check(correction, audit.competition, audit.holdout)
        return versions.revised(audit, correction)


@contextmanager
def _recomputed(path: Path | files.Bundle, last: str) -> Iterator[Audit]:
    until = [rule for rule in CHECKS if rule.name in {"manifest"} | _closure({last})]
    try:
        with _audit(path, log_key=None, witnesses=()) as audit:
            checks = _go_through(audit, until)
            for check in checks:
                if check.status == "FAILED":
                    raise Failed(check.where, f"check {check.name}: {check.meaning}")
            if not _ok(checks, last):
                if private.withheld(audit):
                    raise Refusal(
                        "holdout_private",
                        f"{_named(path)} is the public bundle of round {audit.round.id}, whose holdout stays private: nothing to compute from",
                        hint="the round's organizer and its auditor get more: acclimate round bundle ROUND --out FILE --whole",
                    )
                missing = next(check for check in checks if check.status == "NOT CHECKED" and check.name != "whose log")
                raise Failed(missing.name, f"NOT CHECKED: {missing.meaning}")
            yield audit
    except Failed as failed:
        raise Refusal(
            "bundle_invalid", f"{failed.where}: {failed.why}", hint="`acclimate verify` on it says all that is wrong"
        ) from failed


@contextmanager
def _audit(
    path: Path | files.Bundle, *, log_key: LogKeys | None, witnesses: tuple[str, ...], rerun: Rerun | None = None
) -> Iterator[Audit]:
    with files.opened(path) if isinstance(path, Path) else nullcontext(path) as bundle, files.aside() as work:
        yield Audit(bundle, log_key, witnesses, work, rerun)


def _wanted(levels: Collection[str]) -> list[Rule]:
    names = _closure({rule.name for rule in CHECKS if rule.level in levels})
    return [rule for rule in CHECKS if rule.name in names | {"manifest", "whose log"}]


def _closure(names: set[str]) -> set[str]:
    needs = {rule.name: rule.needs + rule.rests for rule in CHECKS}
    found = set[str]()
    left = list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += needs[name]
    return found


def _go_through(
    audit: Audit, rules: Sequence[Rule], progress: Progress = lambda done, total, what: None
) -> list[Check]:
    numbers = {rule.name: number for number, rule in enumerate(CHECKS, start=1)}
    checks: list[Check] = []
    for done, rule in enumerate(rules):
        progress(done, len(rules), rule.name)
        broken = [need for need in rule.needs if not _ok(checks, need)]
        try:
            check = None if broken else _carry_out(rule, numbers[rule.name], audit)
        except Beside:
            continue
        if check is not None and check.status == "ok":
            broken = [ground for ground in rule.rests if not _ok(checks, ground)]
        if check is None or broken:
            reason = f"it builds on check {numbers[broken[0]]}, {broken[0]}, which is not ok"
            check = Check(numbers[rule.name], rule.name, "NOT CHECKED", reason)
        checks.append(check)
    return checks


def _carry_out(rule: Rule, number: int, audit: Audit) -> Check:
    try:
        if rule.secret and private.withheld(audit):
            raise NotChecked("the holdout stays private, so this bundle has nothing to check it with")
        return Check(number, rule.name, "ok", rule.claim, rule.run(audit))
    except Beside:
        raise
    except NotChecked as unknown:
        return Check(number, rule.name, "NOT CHECKED", unknown.reason)
    except Exception as error:
        # A full disk or too few open files are the auditor's own: nobody is accused of them, and nothing is ok for them.
        if (refusal := lacking(error)) is not None:
            raise refusal from error
        if isinstance(error, Failed):
            return Check(number, rule.name, "FAILED", error.why, error.where)
        if isinstance(error, Refusal):
            return Check(number, rule.name, "FAILED", error.sentence, f"check {rule.name}")
        # Whatever else a stranger's bytes set off, it is evidence against them and no reason to stop.
        return Check(number, rule.name, "FAILED", f"malformed: {type(error).__name__}: {error}", f"check {rule.name}")


def _ok(checks: Sequence[Check], name: str) -> bool:
    return any(check.name == name and check.status == "ok" for check in checks)
