"""What a second operator's machine does with the drawn preparations: fetch, prepare again, compare, sign, send, forget."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from acclimate import locks, rerun, round_jobs
from acclimate.client import auditor
from acclimate.client.connection import Client
from acclimate.client.entrant import Say
from acclimate.keys import Keys
from acclimate.rerun import Progress, Remade, RerunFolder, Verdict
from acclimate_competitions import records, rounds
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, PreparationKey, Round
from acclimate_runners.jobs import ModelFiles

_UNDECIDED = frozenset({"code_other", "rerun_undecided"})
"""What the two machines' difference leaves open, of one drawn preparation."""

GIVEN_UP = "given up by the organizer, not made again"
"""Reason of a PreparationAudited of what the evaluator's record says was given up."""


@dataclass(frozen=True)
class Drawn:
    """A drawn preparation that this machine makes again.

    Attributes:
        state: the round.
        key: its submission, task and seed.
        told: what the server says of it: {entrant, files, versions, …}.
        model: the entry's files, which lie in the folder's blobs.
        made: what it came to here.
    """

    state: Round
    key: PreparationKey
    told: Mapping[str, Any]
    model: ModelFiles
    made: Remade


def run(
    client: Client, keys: Keys, round_id: str, *, say: Say = lambda line: None, progress: Progress = rerun.SILENT
) -> Iterator[dict[str, Any]]:
    """Make every drawn preparation again, and log what came of each; yields {entrant, task, seed, agrees, reason, hint, index}.

    Of one that this machine can't decide, agrees and index are None, reason and hint say why and what to do; nothing of it is logged, and the
    others go on.

    1. The draw is made, if it was not; this machine's code is the round's.
    2. What the organizer gave up, by the evaluator's record, is not made again, and so it is logged: it says nothing for the evaluator, and a
       machine that can make it says nothing against.
    3. The submitted files of each other drawn entry are downloaded; together they are the model that its preparations began with.
    4. It is prepared again in a confined child, by the code that the evaluator ran, and compared (rerun.py).
    5. Where the two do not agree, it is made once more: a machine that contradicts itself says nothing of another's work.
    6. PreparationAudited is signed and sent.
    7. Once every drawn job is in the log, the entrants' weights are removed from this machine.

    Killed at any moment and called again, it goes on: what is in the log is not made again, nor what was finished here; what was undecided is.

    Args:
        client: a connection for the auditor's account.
        keys: the auditor's keys.
        round_id: the round, or a prefix of its id.
        say: called with a sentence at each step.
        progress: called with (steps or bytes done, of how many, what is done).

    Raises:
        Refusal: as draw; code_other, where the program is another; busy, where another process audits from this folder; this machine's faults.
    """
    # 1
    state = auditor.draw(client, keys, round_id, progress=lambda done, total: progress(done, total, "reading the log"))
    work = keys.folder / "audits" / state.id
    if not rounds.audits_missing(state) or state.phase is not Phase.PREPARED:
        shutil.rmtree(work, ignore_errors=True)
        return
    rerun.require_same_code(state)
    work.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = locks.take(work / "lock")
    if lock is None:
        raise Refusal("busy", f"{locks.holder(work / 'lock')} audits from {work}", hint="wait until it has ended")
    with lock:
        shop, undecided = RerunFolder(work, progress=progress), False
        told = _told_jobs(client, state)
        # 2
        for key, job in told.items():
            if records.was_given_up(state.prepared[key]) and key not in state.audited:
                none = Drawn(state, key, job, ModelFiles({}), Remade(None, hardware="none"))
                yield _send(client, keys, none, Verdict(agrees=True, tolerance=0, reason=GIVEN_UP))
        for group, jobs in _grouped(state, told).items():
            if all(key in state.audited for key in jobs):
                continue
            # 3
            model = _fetched(client, state, shop, group, jobs=jobs, say=say)
            # 4
            say(f"preparing again: {_name(jobs)}")
            size = state.prepared[next(iter(jobs))].fields.get("micro_batch")
            again = rerun.prepare(shop, state, model, [key[1:] for key in jobs], micro_batch=size)
            for key, job in jobs.items():
                if key in state.audited:
                    continue
                drawn = Drawn(state, key, job, model, again[key[1:]])
                try:
                    verdict = _verdict(client, shop, drawn, say=say)
                except Refusal as refusal:
                    if refusal.code not in _UNDECIDED:
                        raise
                    undecided = True
                    shop.forget()
                    yield _told(drawn, None, refusal.sentence, hint=refusal.hint)
                else:
                    # 6
                    yield _send(client, keys, drawn, verdict)
    # 7
    if undecided:
        shop.forget()
    else:
        shutil.rmtree(work, ignore_errors=True)


def _told_jobs(client: Client, state: Round) -> dict[PreparationKey, dict[str, Any]]:
    """The drawn jobs in the order drawn: what the server says of them, held against the own draw."""
    told = {(job["submission"], job["task"], job["seed"]): job for job in client.audits(state.id)}
    drawn = state.drawn or ()
    if set(told) != set(drawn):
        raise Refusal(
            "log_inconsistent", f"the server names {len(told)} drawn jobs, the log's draw has {len(drawn)} others"
        )
    return {key: told[key] for key in drawn}


def _grouped(
    state: Round, told: Mapping[PreparationKey, dict[str, Any]]
) -> dict[tuple[int, str], dict[PreparationKey, dict[str, Any]]]:
    """The drawn jobs that are made again by entry and task, whose seeds share a selection.

    The groups are those of the draw, whatever is in the log already: so what was begun before is found again.
    """
    found: dict[tuple[int, str], dict[PreparationKey, dict[str, Any]]] = {}
    for key, job in told.items():
        if not records.was_given_up(state.prepared[key]):
            found.setdefault(key[:2], {})[key] = job
    return found


def _name(jobs: Mapping[PreparationKey, Mapping[str, Any]]) -> str:
    (_, task, _), job = next(iter(jobs.items()))
    return f"{job['entrant']}, {task}, seed {', '.join(str(seed) for _, _, seed in jobs)}"


def _fetched(
    client: Client,
    state: Round,
    shop: RerunFolder,
    group: tuple[int, str],
    *,
    jobs: Mapping[PreparationKey, Mapping[str, Any]],
    say: Say,
) -> ModelFiles:
    """The entry's model, with all that preparing it reads in the workshop's blobs."""
    submission, task = group
    job = next(iter(jobs.values()))
    model = round_jobs.with_base(state, dict(job["files"]), job.get("base"))
    if model.digest != state.bases[submission]:
        raise Refusal(
            "log_inconsistent",
            f"the files of {job['entrant']} that the server offers are the model {model.digest},"
            f" its preparations began with {state.bases[submission]}",
            hint="nothing was sent; keep this message and tell the custodians",
        )
    for name, digest in model.files.items():
        if not shop.blobs.has(digest):
            what = f"downloading {name} of {job['entrant']}"
            say(what)
            _fetch(shop, digest, partial(client.audit_file, state.id, digest, progress=shop.telling(what)))
    for name in round_jobs.public_files(state, [task], model):
        digest = state.defined["files"][name]
        if not shop.blobs.has(digest):
            _fetch(shop, digest, partial(client.file, state.id, name))
    return model


def _fetch(shop: RerunFolder, digest: str, download: Callable[[Path], object]) -> None:
    path = shop.folder / "download"
    try:
        download(path)
        found = shop.blobs.put(path)
    finally:
        path.unlink(missing_ok=True)
    if found != digest:
        raise Refusal("log_inconsistent", f"asked for was the file {digest}, the server sent {found}")


def _verdict(client: Client, shop: RerunFolder, drawn: Drawn, *, say: Say) -> Verdict:
    """Whether what was made here agrees with the log; where it does not, twice.

    Raises:
        Refusal: code_other, rerun_undecided, this machine's faults.
    """
    state, (_, task, seed), made = drawn.state, drawn.key, drawn.made
    first = state.prepared[drawn.key]
    there = first.fields.get("prepared")
    other = rerun.other_versions(first.fields.get("libraries", drawn.told["versions"]))
    if first["hardware"] == made.hardware and there != made.prepared and other:
        raise Refusal(
            "code_other",
            f"{task}, seed {seed} came out otherwise, and so did the libraries: {'; '.join(other)}",
            hint="nothing was sent; install those versions and repeat the command, or use another class of hardware",
        )

    def measure() -> tuple[float | None, float | None]:
        assert made.prepared is not None
        telling = shop.telling(f"downloading the first model prepared for {task}, seed {seed}")
        _fetch(shop, str(there), partial(client.audit_file, state.id, str(there), progress=telling))
        theirs, mine = (
            rerun.validation_nll(shop, state, drawn.model, (task, seed), prepared=digest)
            for digest in (str(there), made.prepared)
        )
        return theirs, mine

    verdict = rerun.compare(first, made, tolerance=state.competition.round.audit_tolerance, measure=measure)
    # 5
    if not verdict.agrees:
        say(f"it does not agree, so it is made once more: {_name({drawn.key: drawn.told})}")
        rerun.confirm(shop, state, drawn.model, drawn.key[1:], again=made)
    return verdict


def _send(client: Client, keys: Keys, drawn: Drawn, verdict: Verdict) -> dict[str, Any]:
    state, (submission, task, seed), made = drawn.state, drawn.key, drawn.made
    fields = {
        "submission": submission,
        "task": task,
        "seed": seed,
        "prepared": made.prepared,
        "agrees": verdict.agrees,
        "tolerance": verdict.tolerance,
        "hardware": made.hardware,
        "reason": verdict.reason[: records.LONGEST_REASON],
    }
    answer = client.post(state.id, "audits", records.sign("PreparationAudited", state.id, fields, key=keys.ed25519))
    return _told(drawn, verdict.agrees, str(fields["reason"]), index=int(answer["index"]))


def _told(
    drawn: Drawn, agrees: bool | None, reason: str, *, hint: str = "", index: int | None = None
) -> dict[str, Any]:
    _, task, seed = drawn.key
    said = {"agrees": agrees, "reason": reason, "hint": hint, "index": index}
    return {"entrant": drawn.told["entrant"], "task": task, "seed": seed, **said}
