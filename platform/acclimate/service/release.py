"""What custodians do, and what follows from it: acknowledge, rehearse, release, open the holdout.

The server holds no share before its custodian releases it, and none at all before PreparationFinished: a share that comes earlier
is refused and not stored.
"""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Row, delete, insert, select, update

from acclimate import custody, sealing
from acclimate.config import Settings
from acclimate.service import finding
from acclimate.service.accounts import Account, require_signer
from acclimate.service.submit import answer
from acclimate.store import Store, Tx, openings, seals, share_documents, timestamp, unsigned
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round

# Faults of the machine: the opening is tried again; any other refusal stands until the round is voided.
_PASSING = frozenset({"no_space", "busy", "file_unreadable"})


def acknowledge(store: Store, account: Account, given: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Log that a custodian could decrypt its share.

    Raises:
        Refusal: role_missing, signature_invalid, share_false, phase_wrong, …
    """
    with store.transaction() as tx:
        state = finding.find(tx, given)
        finding.custodian_index(state, account)
        finding.require_kind(request, "ShareAcknowledged", state)
        require_signer(dict(request), account)
        return answer(*tx.append_once(request))


def rehearsal_share(
    store: Store, settings: Settings, account: Account, given: str, *, index: int, document: bytes
) -> dict[str, Any]:
    """Take a custodian's share of the dummy seal; with the k-th the server opens the dummy.

    Returns:
        {seal, received, needed, succeeded}.

    Raises:
        Refusal: role_missing, rehearsal_missing where there is no dummy, share_false, conflict, seal_mismatch where the
            dummy does not open.
    """
    with store.transaction() as tx:
        state = finding.find(tx, given)
        if finding.custodian_index(state, account) != index:
            raise Refusal("role_missing", f"share {index} is not the share of {account.id}")
        row = newest_rehearsal(tx, state.id)
        if row is None:
            raise Refusal("rehearsal_missing", f"round {state.id} has no dummy seal to rehearse with")
        _check_document(document, row.header, index=index)
        _keep_document(tx, row.seal, index, document)
        documents = released_documents(tx, row.seal)
    succeeded = row.succeeded
    if succeeded is None and len(documents) >= state.threshold:
        with tempfile.TemporaryDirectory(dir=_work(settings)) as folder:
            _open(store, state, row.header, documents, Path(folder) / "dummy")
        with store.transaction() as tx:
            succeeded = timestamp(tx)
            tx.execute(update(seals).where(seals.c.seal == row.seal).values(succeeded=succeeded))
    return {
        "seal": row.seal,
        "received": len(documents),
        "needed": state.threshold,
        "succeeded": succeeded is not None,
    }


def newest_rehearsal(tx: Tx, round_id: str) -> Row[Any] | None:
    """The newest dummy seal of a round."""
    query = select(seals).where(seals.c.round == round_id, seals.c.kind == "rehearsal")
    row: Row[Any] | None = tx.execute(query.order_by(seals.c.number.desc())).first()
    return row


def share(store: Store, account: Account, given: str, request: Mapping[str, Any], *, document: bytes) -> dict[str, Any]:
    """Log a custodian's release and keep the share document, in one transaction.

    1. The caller is a custodian of the round and signed ShareReleased.
    2. The rules allow it now: after PreparationFinished, not before (rounds.py).
    3. The document is the one that was committed to.

    Raises:
        Refusal: role_missing, signature_invalid, phase_wrong, share_false, …
    """
    with store.transaction() as tx:
        # 1
        state = finding.find(tx, given)
        finding.custodian_index(state, account)
        finding.require_kind(request, "ShareReleased", state)
        require_signer(dict(request), account)
        # 2: what comes early is refused before anybody looks at the document, and the transaction keeps nothing of it.
        index, record, new = tx.append_once(request)
        # 3
        if digests.of_bytes(document) != record["document"]:
            raise Refusal(
                "share_false", f"the document has {digests.of_bytes(document)}, ShareReleased says {record['document']}"
            )
        assert state.seal is not None
        _check_document(document, state.seal.fields, index=record["index"])
        if new:
            _keep_document(tx, record["seal"], record["index"], document)
        return {**answer(index, record, new), "released": len(tx.round(state.id).released), "needed": state.threshold}


def _check_document(document: bytes, fields: Mapping[str, Any], *, index: int) -> None:
    named = fields["shares"][index - 1]
    if digests.of_bytes(document) != named["commitment"]:
        raise Refusal(
            "share_false",
            f"the share of {named['to']} has {digests.of_bytes(document)}, committed was {named['commitment']}",
            hint="open the envelope again; if it stays so, the organizer dealt a wrong share",
        )
    content = custody.parse_document(document)
    if (content.seal, content.index) != (fields["seal"], index):
        raise Refusal("share_false", f"the document of {named['to']} is share {content.index} of seal {content.seal}")


def _keep_document(tx: Tx, seal: str, index: int, document: bytes) -> None:
    known = tx.execute(
        select(share_documents.c.document).where(share_documents.c.seal == seal, share_documents.c.index == index)
    ).scalar()
    # The commitment fixes the document, so a second one is the same.
    if known is None:
        tx.execute(insert(share_documents), {"seal": seal, "index": index, "document": document})


def released_documents(tx: Tx, seal: str) -> list[tuple[int, bytes]]:
    """(index, share document) as released, by index."""
    query = select(share_documents.c.index, share_documents.c.document).where(share_documents.c.seal == seal)
    return [(row.index, bytes(row.document)) for row in tx.execute(query.order_by(share_documents.c.index))]


def holdout_files(tx: Tx, round_id: str) -> dict[str, str]:
    """The opened holdout: name -> digest of the blob; {} before HoldoutOpened."""
    row = tx.execute(select(openings).where(openings.c.round == round_id)).one_or_none()
    return dict(row.files) if row is not None else {}


def opening_problem(tx: Tx, round_id: str) -> tuple[str, str] | None:
    """Why the holdout did not open with k released shares: (code, sentence), or None."""
    row = tx.execute(select(openings).where(openings.c.round == round_id, openings.c.problem != "")).one_or_none()
    return None if row is None else (row.code, row.problem)


def open_holdout(store: Store, settings: Settings, round_id: str) -> bool:
    """Open the holdout of a round in phase `released` and log HoldoutOpened; whether it was opened now.

    1. All n share commitments follow from the released documents.
    2. The ciphertext decrypts to its last chunk, and its rows have the sealed root.
    3. The files are kept as blobs; record and file list are written in one transaction.
    A failure is kept for the status, and is tried again only where the machine was at fault.
    """
    with store.snapshot() as tx:
        state = tx.round(round_id)
        if state.phase is not Phase.RELEASED or opening_problem(tx, round_id) is not None:
            return False
        assert state.seal is not None
        fields = state.seal.fields
        documents = released_documents(tx, fields["seal"])
    try:
        with tempfile.TemporaryDirectory(dir=_work(settings)) as folder:
            # 1, 2
            opened = _open(store, state, fields, documents, Path(folder) / "holdout")
            # 3
            files = {name: store.blobs.put(Path(folder) / "holdout" / name) for name in sorted(opened.files)}
    except Refusal as refusal:
        if refusal.code in _PASSING:
            raise
        _note_failure(store, round_id, refusal)
        return False
    with store.transaction() as tx:
        if tx.round(round_id).phase is not Phase.RELEASED:
            return False
        tx.append(unsigned("HoldoutOpened", round_id, opened.fields))
        tx.execute(delete(openings).where(openings.c.round == round_id))
        tx.execute(
            insert(openings), {"round": round_id, "files": files, "code": "", "problem": "", "at": timestamp(tx)}
        )
    return True


def _open(
    store: Store, state: Round, fields: Mapping[str, Any], documents: list[tuple[int, bytes]], out: Path
) -> sealing.Opened:
    commitments = [share["commitment"] for share in fields["shares"]]
    contents = [document for _, document in documents]
    custody.consistent(contents, commitments, k=state.threshold, n=len(commitments))
    secret = custody.recover([custody.parse_document(document) for document in contents])
    return sealing.open_(store.blobs.path(fields["ciphertext"]), secret, out, round_id=state.id, fields=fields)


def _note_failure(store: Store, round_id: str, refusal: Refusal) -> None:
    with store.transaction() as tx:
        row = {"round": round_id, "files": {}, "code": refusal.code, "problem": refusal.sentence, "at": timestamp(tx)}
        tx.execute(delete(openings).where(openings.c.round == round_id))
        tx.execute(insert(openings), row)


def _work(settings: Settings) -> Path:
    settings.work.mkdir(parents=True, exist_ok=True, mode=0o700)
    return settings.work


def clear(settings: Settings) -> None:
    """Remove what a killed process left of an opening."""
    for path in settings.work.glob("tmp*"):
        shutil.rmtree(path, ignore_errors=True)
