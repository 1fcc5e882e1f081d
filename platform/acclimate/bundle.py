"""Writes the bundle of a round: all that a stranger needs to verify it, in the layout that the auditor reads (verify/).

The content follows from the round's records and blobs alone: the log is cut at the first checkpoint that holds the round's last record,
names are sorted, tables and JSON are written in one way. Written twice, a bundle is the same bytes; the log's other
rounds may have gone on meanwhile. Where the round has witnesses, "the first checkpoint" is the first that its quorum cosigned, with the
quorum's lines; one that no quorum has cosigned yet stands in for it without them, and the bundle is another once one has.

Where the holdout stays private there are two: the whole bundle, for organizer and auditor, and the public one, which has neither shares
nor holdout, predictions and scores. Both open the drawn rows (drawn_rows.py).
"""

import bisect
import secrets
import shutil
import time
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select

from acclimate import cosignatures, drawn_rows, log, rows
from acclimate.cosignatures import Reached
from acclimate.quorum import Quorum
from acclimate.service import publish, release
from acclimate.store import Store, Tx, log_checkpoints, submissions
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_competitions.metrics import MAJORITY
from acclimate_competitions.phases import Phase, Round
from acclimate_competitions.records import Record
from acclimate_runners.blobs import Blobs

if TYPE_CHECKING:
    import pyarrow as pa

WAIT_SECONDS = 3.0
_EPOCH = (1980, 1, 1, 0, 0, 0)
_SUBMITTING = frozenset({"SubmissionCommitted", "SubmissionAccepted"})


def write(store: Store, blobs: Blobs, round_id: str, out: Path, *, whole: bool = False) -> Path:
    """Write the bundle of an evaluated or published round as a folder, which is complete or not there.

    Args:
        store: the log and what it does not hold: nonces, manifests, share documents.
        blobs: the files that records name.
        round_id: the round.
        out: the folder; an older bundle there is replaced.
        whole: also what of a private holdout is for organizer and auditor only; of other rounds every bundle is whole.

    Returns:
        out.

    Raises:
        Refusal: phase_wrong; busy, where the log's last records get no checkpoint in time; blob_unknown, blob_corrupt;
            seal_mismatch, where a private holdout is not what was sealed.
    """
    _await_checkpoint(store, round_id)
    draft = out.with_name(f".{out.name}.{secrets.token_hex(8)}.draft")
    try:
        with store.snapshot() as tx:
            state = tx.round(round_id)
            if state.phase not in (Phase.EVALUATED, Phase.PUBLISHED):
                sentence = f"round {state.id} is {state.phase}: a bundle is made once it is evaluated"
                raise Refusal("phase_wrong", sentence)
            withhold = state.private and not whole
            writer = _Writer(draft, blobs)
            _write_log(writer, tx, state)
            _write_round(writer, tx, state)
            assert state.seal is not None
            writer.blob("holdout.sealed", state.seal["ciphertext"])
            holdout, documents = release.holdout_files(tx, state.id), release.released_documents(tx, state.seal["seal"])
            scores, root = publish.score_digests(tx, state), _opening_root(tx, state) if state.private else b""
        # The database need not wait for the blobs: what they are named by is known, and can't change.
        writer.fetch()
        if state.private:
            _write_rows(writer, store, state, (root, documents), holdout=holdout)
        if not withhold:
            _write_opened(writer, state, documents, holdout)
            _write_scores(writer, store, state, scores, holdout=holdout)
        _write_outcome(writer, store, state, withhold=withhold)
        writer.finish()
        _put(draft, out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return out


def is_cosigned(tx: Tx, state: Round) -> bool:
    """Whether a bundle of now ends with a checkpoint that the round's quorum cosigned; always where it asks for none."""
    quorum, last = Quorum.of(state.defined.fields), tx.last(state.id)
    return quorum.needed == 0 or cosignatures.newest(tx, quorum) > last


def _await_checkpoint(store: Store, round_id: str) -> None:
    """Wait, not for long, until the sequencer has signed the round's last record, and its witnesses have."""
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        with store.snapshot() as tx:
            signed = tx.execute(select(func.max(log_checkpoints.c.size))).scalar() or 0
            if signed > tx.last(round_id) and is_cosigned(tx, tx.round(round_id)):
                return
        time.sleep(0.05)


class _Writer:
    """Puts files into a folder and lists them."""

    def __init__(self, folder: Path, blobs: Blobs) -> None:
        self._folder, self._blobs = folder, blobs
        self._wanted: list[tuple[str, str]] = []
        folder.mkdir(parents=True, mode=0o700)

    def _path(self, name: str) -> Path:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def data(self, name: str, data: bytes) -> None:
        self._path(name).write_bytes(data)

    def json(self, name: str, value: Any) -> None:
        self.data(name, digests.canonical(value))

    def lines(self, name: str, lines: Iterable[bytes]) -> None:
        self.data(name, b"".join(line + b"\n" for line in lines))

    def blob(self, name: str, digest: str) -> None:
        """Note a blob that belongs in; fetch() gets it."""
        self._wanted.append((name, digest))

    def fetch(self) -> None:
        while self._wanted:
            name, digest = self._wanted.pop()
            self._blobs.get(digest, self._path(name))

    def table(self, name: str, parts: "Iterable[pa.Table]") -> None:
        import pyarrow as pa

        from acclimate_competitions import tables

        tables.write(pa.concat_tables(parts).combine_chunks(), self._path(name))

    def finish(self) -> None:
        """Write MANIFEST: what `sha256sum -c MANIFEST` takes."""
        names = sorted(path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*") if path.is_file())
        lines = [f"{digests.of_file(self._folder / name).removeprefix('sha256:')}  {name}".encode() for name in names]
        self.lines("MANIFEST", lines)


# ---- the log -------------------------------------------------------------------------------------------------------


def _write_log(writer: _Writer, tx: Tx, state: Round) -> None:
    own = tx.records(state.id)
    checkpoints = _Checkpoints(tx, state, first=own[0][0], last=own[-1][0])
    size = checkpoints.covering(own[-1][0])
    entries, note = tx.entries(0, size), checkpoints.note(size)
    writer.lines("entries.jsonl", entries)
    writer.data("checkpoint", note.encode())
    # Of a hand-over of the log's key the one that both keys signed, whoever asked for it.
    handed_over = {index + 1 for index, _ in tx.records("") if index < size}
    for kept in sorted({checkpoints.covering(index) for index in _milestones(own, state)} | handed_over):
        writer.data(f"checkpoints/{kept}", checkpoints.note(kept).encode())
    tree = log.Tree(log.leaf_hash(entry) for entry in entries)
    for index, record in own:
        if record.type == "SubmissionAccepted":
            proof = tuple(tree.inclusion_proof(index))
            receipt = log.Receipt(index, entries[index], proof, note)
            writer.data(f"receipts/{index}.tlog-proof", receipt.text().encode())


class _Checkpoints:
    """The log's checkpoints, and which of them a bundle shows.

    Args:
        tx: a transaction.
        state: the round.
        first, last: indices of its first and last record.
    """

    def __init__(self, tx: Tx, state: Round, *, first: int, last: int) -> None:
        rows = tx.execute(select(log_checkpoints.c.size, log_checkpoints.c.note).order_by(log_checkpoints.c.size)).all()
        self._notes = {int(row.size): str(row.note) for row in rows}
        self._sizes, self._round = list(self._notes), state.id
        quorum = Quorum.of(state.defined.fields)
        self._reached = Reached(tx, quorum, first=first, last=last) if quorum.needed else None

    def covering(self, index: int) -> int:
        """The size of the first checkpoint that holds a log entry: of those that the quorum cosigned, if one of them does.

        Raises:
            Refusal: busy.
        """
        cosigned = self._reached.covering(index) if self._reached is not None else None
        if cosigned is not None:
            return cosigned
        at = bisect.bisect_right(self._sizes, index)
        if at == len(self._sizes):
            sentence = f"no checkpoint holds log entry {index} of round {self._round} yet"
            raise Refusal("busy", sentence, hint="try again in a second")
        return self._sizes[at]

    def note(self, size: int) -> str:
        """The checkpoint of a size, with the lines of its quorum."""
        return self._notes[size] + (self._reached.lines(size) if self._reached is not None else "")


def _milestones(own: list[tuple[int, Record]], state: Round) -> list[int]:
    """Log indices of what gets a checkpoint of its own: the record that began each phase, each submission's, and the last preparation's.

    That one says when the objection window could begin, where there are both a window and witnesses.
    """
    begun = {at for _, at in state.phases}
    found = [index for index, record in own if record.type in _SUBMITTING or record.at in begun]
    if state.defined["quorum"] and state.competition.round.objection_window:
        found += [index for index, record in own if record.type == "ModelPrepared"][-1:]
    return found


# ---- the round -----------------------------------------------------------------------------------------------------


def _write_round(writer: _Writer, tx: Tx, state: Round) -> None:
    from acclimate.verify import order

    writer.blob("definition.toml", state.defined["definition"])
    for name, digest in state.defined["files"].items():
        writer.blob(f"public/{name}", digest)
    writer.json("keys.json", order.keys_document(state.defined))
    query = select(submissions).where(submissions.c.round == state.id, submissions.c.accepted_index.is_not(None))
    lines = [
        {"entrant": row.entrant, "index": row.accepted_index, "manifest": row.manifest, "nonce": row.nonce}
        for row in tx.execute(query.order_by(submissions.c.accepted_index))
        # What was taken back before the close stays its entrant's secret.
        if not state.submissions[row.commitment].withdrawn
    ]
    writer.lines("submissions.jsonl", [digests.canonical(line) for line in lines])


def _write_opened(
    writer: _Writer, state: Round, documents: list[tuple[int, bytes]], holdout: Mapping[str, str]
) -> None:
    released = [pair for pair in documents if pair[0] in state.released]
    shares = [{"index": index, "document": digests.parse_canonical(document)} for index, document in released]
    writer.json("shares.json", shares)
    for name, digest in holdout.items():
        writer.blob(f"holdout/{name}", digest)


# ---- a private holdout ---------------------------------------------------------------------------------------------


def _opening_root(tx: Tx, state: Round) -> bytes:
    """Root of the log up to and with HoldoutOpened."""
    opened = next(index for index, record in tx.records(state.id) if record.type == "HoldoutOpened")
    return log.Tree(map(log.leaf_hash, tx.entries(0, opened + 1))).root()


def _write_rows(
    writer: _Writer,
    store: Store,
    state: Round,
    opening: tuple[bytes, list[tuple[int, bytes]]],
    *,
    holdout: Mapping[str, str],
) -> None:
    """Open the drawn rows; opening: the root that draws them, and the released share documents."""
    assert state.seal is not None
    root, documents = opening
    row_key = release.row_key(store, state, documents)
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(store.blobs.local(digest))
            for name, digest in holdout.items()
            if name.endswith(rows.SUFFIX)
        }
        writer.lines("rows.jsonl", drawn_rows.lines(files, row_key, fields=state.seal.fields, root=root))


# ---- the numbers ---------------------------------------------------------------------------------------------------


def _write_scores(
    writer: _Writer,
    store: Store,
    state: Round,
    found: Mapping[tuple[str, str, str, int | None], str],
    *,
    holdout: Mapping[str, str],
) -> None:
    from acclimate.verify import scores
    from acclimate.verify.names import predictions_name

    for entrant, tasks in scores.plan(state).items():
        keys = [key for task in tasks.values() for key in task]
        for key in keys:
            writer.blob(predictions_name(entrant, key), state.evaluated[key]["predictions"])
        own = {
            (entrant, protocol, task, seed): found[entrant, protocol, task, seed] for _, task, seed, protocol in keys
        }
        stored = publish.tables_of(store, own)
        writer.table(f"scores/{entrant}.parquet", [_rows_of(stored, key) for key in own])
    majority = publish.majority(store, state, holdout)
    if majority:
        writer.table(f"scores/{MAJORITY}.parquet", majority)
    writer.fetch()


def _rows_of(scores: "list[pa.Table]", key: tuple[str, str, str, int | None]) -> "pa.Table":
    """The rows of one evaluation, in their order."""
    import pyarrow as pa
    import pyarrow.compute as pc

    entrant, protocol, task, seed = key
    mine = (pc.field("entrant") == entrant) & (pc.field("protocol") == protocol) & (pc.field("task") == task)
    mine &= pc.field("seed").is_null() if seed is None else pc.field("seed") == seed
    return pa.concat_tables([table.filter(mine) for table in scores])


def _write_outcome(writer: _Writer, store: Store, state: Round, *, withhold: bool) -> None:
    from acclimate.verify import scores

    writer.json("prepared.json", scores.prepared_document(state))
    for number, ((ranking, _), correction) in enumerate(zip(state.rankings, state.corrections, strict=True), start=1):
        newest = number == len(state.rankings)
        writer.blob("ranking.json" if newest else f"versions/{number}/ranking.json", ranking)
        # It tells examples and their targets, which are nobody's to know where the holdout stays private.
        if correction and not withhold:
            writer.blob(f"versions/{number}/correction.json", correction)
    if not state.rankings:
        writer.json("ranking.json", publish.ranking(store, state.id).document())
    writer.fetch()


# ---- folder and ZIP ------------------------------------------------------------------------------------------------


def _put(draft: Path, out: Path) -> None:
    if not out.exists():
        draft.rename(out)
        return
    old = out.with_name(f".{out.name}.{secrets.token_hex(8)}.old")
    out.rename(old)
    draft.rename(out)
    shutil.rmtree(old)


def zip_(folder: Path, file: Path) -> Path:
    """Put a bundle into a ZIP: the same bytes for the same folder, on every machine.

    Members are stored, not compressed, since compressors differ in their bytes and most of a bundle is compressed already.

    Returns:
        file.
    """
    draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}.draft")
    try:
        with zipfile.ZipFile(draft, "x", zipfile.ZIP_STORED) as archive:
            files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
            for name, path in sorted(files.items()):
                member = zipfile.ZipInfo(name, _EPOCH)
                member.create_system, member.external_attr = 3, 0o100644 << 16
                member.file_size = path.stat().st_size
                with path.open("rb") as source, archive.open(member, "w") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
    return file
