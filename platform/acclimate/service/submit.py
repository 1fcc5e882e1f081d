"""What an entrant does: register for a round, submit, withdraw.

A submission's life: uploading (its commitment is logged) → checking (all files are there) → accepted (loaded, run, logged) or refused, with the
reason; withdrawn by its entrant before the close; forfeited where the close came first.
"""

import logging
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from sqlalchemy import Row, delete, insert, select, update

from acclimate import round_jobs
from acclimate.service import finding, manifests, names, pools, quota, standing
from acclimate.service.accounts import Account, decode, require_signer
from acclimate.service.identity import Identity
from acclimate.store import Store, Tx, submissions, timestamp, uploads
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_competitions.records import format_time

LOST = frozenset({"blob_unknown", "blob_corrupt"})
"""What is said of a blob that this server has lost."""
_log = logging.getLogger(__name__)
STATES = ("uploading", "checking", "accepted", "refused", "forfeited", "withdrawn")


def register(store: Store, account: Account, given: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Register an entrant for a round; the organizer registers the baselines that the definition names.

    Raises:
        Refusal: round_unknown, role_missing, signature_invalid, round_closed, phase_wrong, conflict, …
    """
    with store.transaction() as tx:
        state = finding.find(tx, given)
        finding.require_kind(request, "EntrantRegistered", state)
        require_signer(dict(request), account)
        fields = request["fields"]
        for conflict in fields["conflicts"]:
            names.check(conflict, what="a declared conflict")
        if account.role == "organizer":
            finding.require_owner(tx, state.id, account)
        elif fields["entrant"] != account.id:
            raise Refusal("signature_invalid", f"account {account.id} can't register entrant {fields['entrant']!r}")
        return answer(*tx.append_once(request))


def answer(index: int, record: records.Record, new: bool) -> dict[str, Any]:
    """What the API says of a logged record."""
    return {"index": index, "record": record.document(), "new": new}


def create(
    store: Store,
    account: Account,
    given: str,
    *,
    committed: Mapping[str, Any],
    accepted: Mapping[str, Any],
    opening: tuple[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Log a submission's commitment and say which files are missing.

    In one transaction:
    1. both requests are of this round, say the same, and the caller signed them (or is the organizer, for a baseline);
    2. a submission that is there already is answered as it stands, if nonce and manifest are those that it came with (decision 0019);
    3. the commitment opens with the nonce and the manifest;
    4. the manifest is one that the round takes, and if it stands for an earlier submission, its files are that one's;
    5. the quota is debited, and the commitment logged before the round closes, by the database's clock.

    Args:
        store: the store.
        account: who sends it.
        given: the round.
        committed: the signed SubmissionCommitted.
        accepted: the signed SubmissionAccepted, logged when the check has passed.
        opening: the nonce (base64 of 32 bytes) and the manifest.

    Returns:
        {submission, state, index, missing, new}.

    Raises:
        Refusal: round_unknown, round_closed, quota_exceeded, manifest_invalid, conflict, signature_invalid, …
    """
    nonce, manifest = opening
    with store.transaction() as tx:
        state = finding.find(tx, given)
        # 1
        fields = _committed(tx, state, account, (committed, accepted))
        # 2
        query = select(submissions).where(
            submissions.c.round == state.id, submissions.c.commitment == fields["commitment"]
        )
        known = tx.execute(query).one_or_none()
        if known is not None:
            if known.entrant != fields["entrant"]:
                raise Refusal("conflict", "another entrant committed to the same before")
            _require_same(known, nonce, manifest)
            return {**_created(tx, known), "new": False}
        # 3
        _require_opening(fields["commitment"], nonce, manifest)
        # 4
        manifests.check(manifest, state=state, entrant=fields["entrant"])
        standing.check(tx, manifest, state=state, entrant=fields["entrant"])
        # 5
        index, record = tx.append(committed)
        row = {
            "id": str(uuid.uuid4()),
            "round": state.id,
            "entrant": fields["entrant"],
            "owner": account.id,
            "commitment": fields["commitment"],
            "nonce": nonce,
            "manifest": dict(manifest),
            "acceptance": dict(accepted),
            "state": "uploading",
            "reason": "",
            "committed_index": index,
            "created": format_time(record.at),
        }
        tx.execute(insert(submissions), row)
        allowed = state.competition.submission.per_entrant
        quota.debit(tx, state.id, fields["entrant"], submission=row["id"], quota=allowed, at=record.at)
        return {**_created(tx, _row(tx, row["id"])), "new": True}


def _committed(
    tx: Tx,
    state: Round,
    account: Account,
    requests: tuple[Mapping[str, Any], Mapping[str, Any]],
) -> Mapping[str, Any]:
    """The fields that both requests sign, once step 1 of `create` has passed."""
    committed, accepted = requests
    finding.require_kind(committed, "SubmissionCommitted", state)
    finding.require_kind(accepted, "SubmissionAccepted", state)
    fields: Mapping[str, Any] = committed["fields"]
    if accepted["fields"] != fields or accepted["by"] != committed["by"]:
        raise Refusal("record_invalid", "SubmissionCommitted and SubmissionAccepted say different things")
    _require_entrant(tx, state, account, committed)
    covered = records.statement("SubmissionAccepted", state.id, fields, by=accepted["by"])
    records.check_signature(accepted["by"], accepted["sig"], covered, what="SubmissionAccepted")
    return fields


def _require_same(known: Row[Any], nonce: str, manifest: Mapping[str, Any]) -> None:
    """Refuse (conflict) another body for a commitment that is in the log."""
    # Python takes true for 1 and 1.0; JSON does not.
    if known.nonce != nonce or digests.canonical(dict(known.manifest)) != digests.canonical(dict(manifest)):
        raise Refusal(
            "conflict",
            f"commitment {known.commitment} came before, with another nonce or manifest, as submission {known.id}",
            hint="another manifest is another submission, with a commitment of its own",
        )


def _require_opening(commitment: str, nonce: str, manifest: Mapping[str, Any]) -> None:
    """Refuse (manifest_invalid) a nonce and a manifest that are not what was committed to."""
    found = digests.of_bytes(decode(nonce, what="nonce", length=32) + digests.canonical(dict(manifest)))
    if found != commitment:
        raise Refusal(
            "manifest_invalid",
            f"nonce and manifest give {found}, committed was {commitment}",
            hint="the commitment is sha256(nonce ‖ canonical JSON of the manifest)",
        )


def _require_entrant(tx: Tx, state: Round, account: Account, request: Mapping[str, Any]) -> None:
    name = request["fields"]["entrant"]
    if name not in state.entrants:
        raise Refusal(
            "entrant_unknown",
            f"entrant {name!r} is not registered for round {state.id}",
            hint="`acclimate enter ROUND` registers for a round",
        )
    if request["by"] != state.entrants[name]:
        raise Refusal("signature_invalid", f"the submission is signed by another key than that of entrant {name!r}")
    if name in state.baselines:
        finding.require_owner(tx, state.id, account)
    elif account.id != name:
        raise Refusal("signature_invalid", f"account {account.id} can't submit for entrant {name!r}")


def _created(tx: Tx, row: Row[Any]) -> dict[str, Any]:
    return {"submission": row.id, "state": row.state, "index": row.committed_index, "missing": _missing(tx, row)}


def _missing(tx: Tx, row: Row[Any]) -> list[str]:
    """Digests that still have to come, in the order of the manifest.

    What counts is what this account has sent: whether others sent the same bytes is nobody's business, and a digest alone
    must not stand for bytes that the entrant may not have.
    """
    mine = select(submissions.c.id).where(submissions.c.owner == row.owner)
    have = set(tx.execute(select(uploads.c.digest).where(uploads.c.submission.in_(mine))).scalars())
    return [digest for digest in dict.fromkeys(manifests.sizes_of(row.manifest)) if digest not in have]


def expected_size(store: Store, account: Account, submission: str, digest: str) -> int:
    """The declared size of a file that the submission waits for; asked before its first byte is read.

    Raises:
        Refusal: submission_unknown, upload_mismatch, round_closed, phase_wrong.
    """
    with store.snapshot() as tx:
        row = _own(tx, account, submission)
        _require_uploading(tx, row)
        sizes = manifests.sizes_of(row.manifest)
    if digest not in sizes:
        raise Refusal(
            "upload_mismatch",
            f"the manifest of submission {submission} has no file with digest {digest}",
            hint="the manifest was committed to; other files need another submission",
        )
    return sizes[digest]


def received(store: Store, account: Account, submission: str, digest: str) -> dict[str, Any]:
    """Note that a file has come and is stored; {submission, state, missing}.

    Raises:
        Refusal: submission_unknown, round_closed, phase_wrong.
    """
    with store.transaction() as tx:
        row = _own(tx, account, submission)
        _require_uploading(tx, row)
        known = select(uploads).where(uploads.c.submission == row.id, uploads.c.digest == digest)
        if tx.execute(known).first() is None:
            size = manifests.sizes_of(row.manifest)[digest]
            tx.execute(insert(uploads), {"submission": row.id, "digest": digest, "size": size, "at": timestamp(tx)})
        return {"submission": row.id, "state": row.state, "missing": _missing(tx, row)}


def complete(store: Store, account: Account, submission: str, *, identity: Identity) -> dict[str, Any]:
    """All files are there: read them strictly, without running anything; then they wait for the check, or are refused.

    Args:
        store: the store.
        account: its entrant.
        submission: its id.
        identity: whose evaluator key signs a refusal.

    Returns:
        {submission, state, reason}; state is `checking`, or `refused` with the reason.

    Raises:
        Refusal: submission_unknown, upload_mismatch where files are missing, or were lost here and are missing again; round_closed.
    """
    with store.snapshot() as tx:
        row = _own(tx, account, submission)
        if row.state != "uploading":
            return {"submission": row.id, "state": row.state, "reason": row.reason}
        state = _require_uploading(tx, row)
        missing = _missing(tx, row)
    if missing:
        raise Refusal(
            "upload_mismatch",
            f"{len(missing)} of {len(row.manifest['files'])} files have not come yet",
            hint="PUT them to /v1/submissions/{id}/files/{digest} first",
            problems=[
                f"{name} ({digest})" for name, digest in manifests.digests_of(row.manifest).items() if digest in missing
            ],
        )
    # Reading takes time, so it is done outside any transaction; the files can't change, they are named by their digests.
    if lost := _lost(store, row.manifest):
        raise _forgotten(store, lost)
    reason = _inspect(store, state, row.manifest)
    # A model is refused for its own bytes only: for those that came, not for what a disk made of them since.
    if reason is not None and (lost := _lost(store, row.manifest, again=True)):
        raise _forgotten(store, lost)
    with store.transaction() as tx:
        row = _own(tx, account, submission)
        if row.state == "uploading":
            _require_uploading(tx, row)
            if reason is None:
                _set(tx, row.id, state="checking")
            else:
                _refuse(tx, row, reason, identity=identity)
        row = _row(tx, row.id)
        return {"submission": row.id, "state": row.state, "reason": row.reason}


def _lost(store: Store, manifest: Mapping[str, Any], *, again: bool = False) -> list[str]:
    """Digests of files that came and are no longer stored; with `again` all are hashed again.

    Raises:
        Refusal: blobs_unreachable.
    """
    found = []
    for digest in manifests.sizes_of(manifest):
        try:
            if again:
                store.blobs.check(digest)
            elif not store.blobs.has(digest):
                found.append(digest)
        except Refusal as refusal:
            if refusal.code not in LOST:
                raise
            found.append(digest)
    return found


def _forgotten(store: Store, lost: list[str]) -> Refusal:
    """Forget that these files came, so that they are missing again; what to tell the entrant, whose fault it is not."""
    _log.error("uploaded files were lost here and must be sent again: %s", ", ".join(lost))
    with store.transaction() as tx:
        tx.execute(delete(uploads).where(uploads.c.digest.in_(lost)))
    return Refusal(
        "upload_mismatch",
        f"{len(lost)} of the submission's files were lost on this server after they had come",
        hint="send them again, and then say again that all are there; `acclimate submit` does so by itself",
        problems=lost,
    )


def _inspect(store: Store, state: Round, manifest: Mapping[str, Any]) -> str | None:
    """Why the model is not acceptable, or None."""
    from acclimate_runners import adapter_files, reading

    model = round_jobs.model(state, manifest)
    try:
        with ExitStack() as stack:
            # Weights may be large and elsewhere; what is looked at here is their beginning and their size.
            files, base = (
                {
                    name: stack.enter_context(store.blobs.local(d, first=reading.READ_AT_MOST))
                    for name, d in given.items()
                }
                for given in (model.files, model.base)
            )
            on = (manifest["base"], base["config.json"]) if base else None
            adapter_files.inspect_submitted(files, round_jobs.limits(state), on=on, kind=manifest["kind"])
    except Refusal as refusal:
        if refusal.status >= 500 or refusal.code in LOST:
            raise
        return " · ".join((refusal.sentence, *(p for p in refusal.problems if p not in refusal.sentence)))
    return None


def accept(store: Store, submission: str) -> dict[str, Any]:
    """For the dispatcher: the check has passed, so log the entrant's SubmissionAccepted; forfeited where close or voiding came first.

    Returns:
        {submission, state, accepted_index}.
    """
    with store.transaction() as tx:
        row = _row(tx, submission)
        if row.state == "checking" and tx.round(row.round).phase is Phase.VOIDED:
            forfeit(tx, row, reason="the round was voided")
        elif row.state == "checking":
            try:
                index, _, _ = tx.append_once(row.acceptance)
                _set(tx, row.id, state="accepted", accepted_index=index)
            except Refusal as refusal:
                if refusal.code != "round_closed":
                    raise
                forfeit(tx, row, reason=f"the check ended after the close: {refusal.sentence}")
        row = _row(tx, submission)
        return {"submission": row.id, "state": row.state, "accepted_index": row.accepted_index}


def refuse(store: Store, submission: str, reason: str, *, identity: Identity, ours: bool = False) -> None:
    """For the dispatcher: the check has refused the model, so log SubmissionRefused with the reason; the debit is refunded.

    Where close or voiding came first the log takes it no more, and only the entrant reads the reason. With `ours` it doesn't count as a try
    of its day either.
    """
    with store.transaction() as tx:
        row = _row(tx, submission)
        if row.state == "checking":
            _refuse(tx, row, reason, identity=identity, kind="platform" if ours else "refused")


def forfeit(tx: Tx, row: Row[Any], *, reason: str, ours: bool = False) -> None:
    """Mark a submission that the close, or the round's voiding, came before.

    Args:
        tx: the transaction.
        row: the submission's row.
        reason: for its entrant.
        ours: refund the debit as our fault in any case, not only where our check alone was outstanding.
    """
    if ours or row.state == "checking":
        quota.refund(tx, row.id, kind="platform", reason=reason)
    _set(tx, row.id, state="forfeited", reason=reason)


def _refuse(tx: Tx, row: Row[Any], reason: str, *, identity: Identity, kind: str = "refused") -> None:
    # A reason holds what a model's file says, which may be no Unicode text, nothing, or without end.
    reason = reason.encode("utf-8", "replace").decode().strip()[: records.LONGEST_REASON] or "the check gave no reason"
    if tx.round(row.round).phase is Phase.OPEN:
        fields = {"entrant": row.entrant, "commitment": row.commitment, "reason": reason}
        try:
            tx.append(records.sign("SubmissionRefused", row.round, fields, key=identity.evaluator_key))
        except Refusal as refusal:
            if refusal.code != "round_closed":
                raise
    quota.refund(tx, row.id, kind=kind, reason=reason)
    _set(tx, row.id, state="refused", reason=reason)


def withdraw(store: Store, account: Account, given: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Withdraw a submission before the close.

    Raises:
        Refusal: round_unknown, submission_unknown, round_closed, conflict, …
    """
    with store.transaction() as tx:
        state = finding.find(tx, given)
        finding.require_kind(request, "SubmissionWithdrawn", state)
        _require_entrant(tx, state, account, request)
        index, record, new = tx.append_once(request)
        commitment = request["fields"]["commitment"]
        if new:
            query = select(submissions).where(submissions.c.round == state.id, submissions.c.commitment == commitment)
            row = tx.execute(query).one()
            if row.state == "uploading":
                quota.refund(tx, row.id, kind="cancelled", reason="withdrawn before it was checked")
            _set(tx, row.id, state="withdrawn", reason="withdrawn by its entrant")
        return answer(index, record, new)


def status(store: Store, account: Account, submission: str) -> dict[str, Any]:
    """How a submission stands, for its entrant and the round's organizer.

    Raises:
        Refusal: submission_unknown.
    """
    with store.snapshot() as tx:
        row = tx.execute(select(submissions).where(submissions.c.id == submission)).one_or_none()
        if row is None or (row.owner != account.id and not finding.is_owner(tx, row.round, account)):
            raise _unknown(submission)
        total, today = quota.used(tx, row.round, row.entrant, zone=_quota(tx, row).day, at=tx.now())
        return {
            "submission": row.id,
            "round": row.round,
            "entrant": row.entrant,
            "state": row.state,
            "reason": row.reason or (pools.idle(tx) if row.state == "checking" else ""),
            "commitment": row.commitment,
            "committed_index": row.committed_index,
            "accepted_index": row.accepted_index,
            "missing": _missing(tx, row) if row.state == "uploading" else [],
            "quota": {
                "used": total,
                "total": _quota(tx, row).total,
                "used_today": today,
                "per_day": _quota(tx, row).per_day,
            },
        }


def _quota(tx: Tx, row: Row[Any]) -> Any:
    return tx.round(row.round).competition.submission.per_entrant


def _row(tx: Tx, submission: str) -> Row[Any]:
    row: Row[Any] | None = tx.execute(select(submissions).where(submissions.c.id == submission)).one_or_none()
    if row is None:
        raise _unknown(submission)
    return row


def _own(tx: Tx, account: Account, submission: str) -> Row[Any]:
    row: Row[Any] | None = tx.execute(
        select(submissions).where(submissions.c.id == submission, submissions.c.owner == account.id)
    ).one_or_none()
    if row is None:
        raise _unknown(submission)
    return row


def _unknown(submission: str) -> Refusal:
    # Another entrant's submission is as unknown as one that does not exist.
    return Refusal("submission_unknown", f"there is no submission {submission!r} that this account may see")


def _require_uploading(tx: Tx, row: Row[Any]) -> Round:
    """The round, where the submission waits for files and they would not come too late."""
    state, now = tx.round(row.round), tx.now()
    if state.phase is Phase.VOIDED:
        raise Refusal("round_closed", f"round {state.id} was voided: it takes no files")
    if state.phase is not Phase.OPEN or now >= state.last_acceptance:
        raise Refusal(
            "round_closed",
            f"the round closed {format_time(state.closes)} (grace {int(state.grace.total_seconds())} s),"
            f" the file was received {format_time(now)}",
            hint="what was accepted before counts; the next round: acclimate round list --server URL",
        )
    if row.state != "uploading":
        raise Refusal("phase_wrong", f"submission {row.id} is {row.state}: it takes no files")
    return state


def _set(tx: Tx, submission: str, **values: Any) -> None:
    tx.execute(update(submissions).where(submissions.c.id == submission).values(**values))
