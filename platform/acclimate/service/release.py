"""What custodians do, and what follows from it: acknowledge, rehearse, release, open the holdout.

The server holds no share before its custodian releases it, and none at all before PreparationFinished: a share that comes earlier
is refused and not stored.
"""

import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Row, delete, insert, select, update

from acclimate import custody, sealing
from acclimate.config import Settings
from acclimate.custody import Split
from acclimate.service import finding
from acclimate.service.accounts import Account, require_signer
from acclimate.service.submit import answer
from acclimate.store import Store, Tx, openings, seals, share_documents, timestamp, unsigned
from acclimate_competitions import digests
from acclimate_competitions.definition import Task
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_runners import failpoints

if TYPE_CHECKING:
    import pyarrow as pa

# Faults of the machine: the opening is tried again.
_PASSING = frozenset({"no_space", "busy", "blobs_unreachable", "file_unreadable"})
_OPENING = "opening-"
PUBLISHING = "publishing-"
INPUTS = "inputs/"
"""Before the names of what is made of an opened holdout for children, beside the names of its own files."""
UNREAD = " of the opened holdout can't be used on this server"
"""After the name of an opened file, where evaluations wait for it."""
DAMAGED = frozenset({"blob_corrupt", "blob_unknown"})
"""This server's copy of the ciphertext is not what was sealed: tried again once it is uploaded again. Any other refusal stands."""


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

    A share that does not say of itself that it is a rehearsal's is refused and not kept, whatever seal it is of.

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
        _check_document(document, row.header, index=index, of=Split.of(state.defined, row.seal, rehearsal=True))
        _keep_document(tx, row.seal, index, document)
        documents = released_documents(tx, row.seal)
    succeeded = row.succeeded
    if succeeded is None and len(documents) >= state.threshold:
        with tempfile.TemporaryDirectory(dir=_work(settings), prefix="rehearsal-") as folder:
            _open(store, state, row.header, documents, Path(folder) / "dummy", rehearsal=True)
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
        split = Split.of(state.defined, state.seal["seal"])
        _check_document(document, state.seal.fields, index=record["index"], of=split)
        if new:
            _keep_document(tx, record["seal"], record["index"], document)
        return {**answer(index, record, new), "released": len(tx.round(state.id).released), "needed": state.threshold}


def _check_document(document: bytes, fields: Mapping[str, Any], *, index: int, of: Split) -> None:
    named = fields["shares"][index - 1]
    if digests.of_bytes(document) != named["commitment"]:
        raise Refusal(
            "share_false",
            f"the share of {named['to']} has {digests.of_bytes(document)}, committed was {named['commitment']}",
            hint="open the envelope again; if it stays so, the organizer dealt a wrong share",
        )
    content = of.read(document)
    if content.index != index:
        raise Refusal("share_false", f"the document of {named['to']} is share {content.index}, not {index}")


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
    files = row.files if row is not None else {}
    return {name: digest for name, digest in files.items() if not name.startswith(INPUTS)}


def opening_problem(tx: Tx, round_id: str) -> tuple[str, str] | None:
    """Why the holdout did not open, can't be evaluated on, or why the ranking does not publish itself: (code, sentence), or None."""
    row = tx.execute(select(openings).where(openings.c.round == round_id, openings.c.problem != "")).one_or_none()
    return None if row is None else (row.code, row.problem)


def open_holdout(store: Store, settings: Settings, round_id: str) -> bool:
    """Open the holdout of a round in phase `released` and log HoldoutOpened; whether it was opened now.

    1. All n share commitments follow from the released documents.
    2. The ciphertext decrypts to its last chunk, and its rows have the sealed root.
    3. There is one file a task, and each can be evaluated and scored.
    4. The files are kept as blobs; record and file list are written in one transaction.
    A failure is kept for the status, and is tried again only where this server was at fault.
    """
    with store.snapshot() as tx:
        state, problem = tx.round(round_id), opening_problem(tx, round_id)
        if state.phase is not Phase.RELEASED:
            return False
        assert state.seal is not None
        fields = state.seal.fields
        if problem is not None and (problem[0] not in DAMAGED or not store.blobs.has(fields["ciphertext"])):
            return False
        documents = released_documents(tx, fields["seal"])
    try:
        with tempfile.TemporaryDirectory(dir=_work(settings), prefix=_OPENING) as folder:
            found = Path(folder) / "holdout"
            # 1, 2
            opened = _open(store, state, fields, documents, found, rehearsal=False)
            # 3
            _check_usable(store, state, {name: found / name for name in sorted(opened.files)})
            # 4
            files = {name: store.blobs.put(found / name) for name in sorted(opened.files)}
    except Refusal as refusal:
        if refusal.code in _PASSING:
            raise
        _note_failure(store, round_id, refusal)
        return False
    failpoints.reach("opened")
    with store.transaction() as tx:
        if tx.round(round_id).phase is not Phase.RELEASED:
            return False
        tx.append(unsigned("HoldoutOpened", round_id, opened.fields))
        tx.execute(delete(openings).where(openings.c.round == round_id))
        tx.execute(
            insert(openings), {"round": round_id, "files": files, "code": "", "problem": "", "at": timestamp(tx)}
        )
        failpoints.reach("opening")
    return True


def _open(
    store: Store,
    state: Round,
    fields: Mapping[str, Any],
    documents: list[tuple[int, bytes]],
    out: Path,
    *,
    rehearsal: bool,
) -> sealing.Opened:
    commitments = [share["commitment"] for share in fields["shares"]]
    contents = [document for _, document in documents]
    split = Split.of(state.defined, fields["seal"], rehearsal=rehearsal)
    custody.consistent(contents, commitments, of=split)
    secret = custody.recover([custody.parse_document(document, rehearsal=rehearsal) for document in contents])
    try:
        with store.blobs.local(fields["ciphertext"]) as ciphertext:
            return sealing.open_(ciphertext, secret, out, round_id=state.id, fields=fields)
    except Refusal:
        # Whose fault? A blob that no longer has its digest is put aside here, and that is what is told.
        store.blobs.check(fields["ciphertext"])
        raise


def row_key(store: Store, state: Round, documents: list[tuple[int, bytes]]) -> bytes:
    """What salts the rows of an opened round's seal.

    Raises:
        Refusal: seal_mismatch, blob_unknown, blob_corrupt.
    """
    assert state.seal is not None
    secret = custody.recover([custody.parse_document(document, rehearsal=False) for _, document in documents])
    with store.blobs.local(state.seal["ciphertext"]) as ciphertext:
        return sealing.row_key(ciphertext, secret, round_id=state.id, fields=state.seal.fields)


def _check_usable(store: Store, state: Round, files: Mapping[str, Path]) -> None:
    """Refuse an opened holdout that no evaluation could be made or scored with.

    Raises:
        Refusal: seal_mismatch, with all problems.
    """
    from acclimate import rows, table_blobs
    from acclimate_competitions import splits, tables

    tasks = {f"{task.name}.parquet": task for task in state.competition.tasks}
    problems = [f"{name} is missing" for name in tasks if name not in files]
    problems += [
        f"{name!r} belongs to no task" for name in files if name not in tasks and not name.startswith(rows.BLOBS)
    ]
    for name, task in tasks.items():
        if name not in files:
            continue
        preparation = state.defined["files"][f"splits/{task.name}/preparation.parquet"]
        needed = splits.columns_of(task) & set(table_blobs.read(store.blobs, preparation).column_names)
        needed |= set(splits.columns_needed(task, cluster=state.competition.ranking.cluster))
        table = tables.read(files[name])
        problems += [f"{name}: {problem}" for problem in _unusable(table, task, needed)]
    if problems:
        sentence = f"what was sealed is no holdout of this competition: {'; '.join(problems[:5])}"
        raise Refusal("seal_mismatch", sentence, problems=problems)


def _unusable(table: "pa.Table", task: Task, needed: Collection[str]) -> list[str]:
    import pyarrow as pa

    from acclimate_competitions import splits

    names = table.column_names
    problems = [
        f"column {name!r} stands {names.count(name)} times" for name in sorted(needed) if names.count(name) != 1
    ]
    if problems:
        return problems
    for name in sorted(needed):
        column = table.column(name)
        if column.type not in (pa.string(), pa.large_string()):
            problems.append(f"column {name!r} is {column.type}, it must be string")
        elif column.null_count:
            problems.append(f"column {name!r} has {column.null_count} nulls")
    if problems:
        return problems
    examples, truths = table.column("example").to_pylist(), table.column(task.truth).to_pylist()
    if not examples:
        problems.append("there are no rows")
    if len(examples) != len(set(examples)):
        problems.append("an example id stands twice")
    # By its place: everybody reads this, also where the holdout stays private.
    problems += [f"{what}, first in row {rows[0]}" for what, rows in splits.wrong_truths(task, truths).items()]
    return problems


def _note_failure(store: Store, round_id: str, refusal: Refusal) -> None:
    with store.transaction() as tx:
        row = {"round": round_id, "files": {}, "code": refusal.code, "problem": refusal.sentence, "at": timestamp(tx)}
        tx.execute(delete(openings).where(openings.c.round == round_id))
        tx.execute(insert(openings), row)


def _work(settings: Settings) -> Path:
    settings.work.mkdir(parents=True, exist_ok=True, mode=0o700)
    return settings.work


def clear(settings: Settings) -> None:
    """Remove what a killed process left of an opening or a publication; for the only process that opens and publishes."""
    for prefix in (_OPENING, PUBLISHING):
        for path in settings.work.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)
