"""The seal: the ciphertext is the one committed to before the round opened, and what came out of it is the holdout published.

1. ciphertext: size, digest and block root are those of HoldoutSealed.
2. shares: each released document is the one that its custodian acknowledged and logged.
3. key: the documents recover the secret, and imply all n commitments, so that any k custodians would have opened the same.
4. opening: the ciphertext decrypts to its last chunk (the cipher commits to its key: no second key opens it), count and root of
   the rows are recomputed, and key and plaintext are those that HoldoutOpened logged.
5. holdout: the published files are, byte for byte, those that were opened, one table a task.
6. unseen: nobody could have learnt them from the public files.
"""

from pathlib import Path

from acclimate import custody, sealing
from acclimate.verify import parquet
from acclimate.verify.audit import Audit
from acclimate.verify.report import Failed, NotChecked
from acclimate_competitions import bases, digests, splits
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record


def _sealed(audit: Audit) -> Record:
    assert audit.round.seal is not None, "a round past `sealed` has a seal"
    return audit.round.seal


def ciphertext(audit: Audit) -> str:
    """holdout.sealed is, byte for byte, what was committed to before the round opened."""
    try:
        found = sealing.check_ciphertext(audit.bundle.path("holdout.sealed"), _sealed(audit).fields)
    except Refusal as refusal:
        # A root alone does not tell which block is bad; check `opening`, which has the key, does.
        raise Failed("holdout.sealed", refusal.sentence) from refusal
    return f"{found.size} bytes"


def shares(audit: Audit) -> str:
    """shares.json has exactly the released documents, each with the digest that its custodian acknowledged and logged."""
    rows, released = audit.bundle.json("shares.json"), audit.round.released
    if not isinstance(rows, list):
        raise Failed("shares.json", "it must be a list")
    audit.documents = {}
    for position, row in enumerate(rows):
        where = f"shares.json, row {position}"
        if not isinstance(row, dict) or set(row) != {"index", "document"} or type(row["index"]) is not int:
            raise Failed(where, "it must have exactly index, a whole number, and document")
        if row["index"] not in released or row["index"] <= max(audit.documents, default=0):
            raise Failed(where, f"the log has no ShareReleased of index {row['index']}, or the rows are out of order")
        found = digests.of_json(row["document"])
        if found != released[row["index"]]:
            raise Failed(
                f"{where}, share {row['index']}",
                f"the document's digest is {found}, seal and ShareReleased say {released[row['index']]}",
            )
        audit.documents[row["index"]] = digests.canonical(row["document"])
    missing = sorted(set(released) - set(audit.documents))
    if missing:
        raise Failed("shares.json", f"share {missing[0]} was released and is missing")
    return f"{len(rows)} of {len(_sealed(audit)['shares'])} shares, {audit.round.threshold} open the seal"


def key(audit: Audit) -> str:
    """Any k custodians would have opened the same: all n commitments follow from the released shares."""
    seal = _sealed(audit)
    committed = [share["commitment"] for share in seal["shares"]]
    documents = list(audit.documents.values())
    try:
        parsed = [custody.parse_document(document) for document in documents]
        for share, index in zip(parsed, audit.documents, strict=True):
            if (share.seal, share.index) != (seal["seal"], index):
                raise Failed(f"shares.json, share {index}", f"its document is share {share.index} of seal {share.seal}")
        custody.consistent(documents, committed, of=custody.Split.of(audit.round.defined, seal["seal"]))
        audit.secret = custody.recover(parsed)
    except Refusal as refusal:
        raise Failed("shares.json", refusal.sentence) from refusal
    return f"{len(committed)} commitments re-derived from {len(documents)} shares"


def opening(audit: Audit) -> str:
    """The ciphertext decrypts with that key to its last chunk, and gives the rows committed to before the round opened."""
    seal, logged, folder = _sealed(audit), audit.round.opened, audit.work / "opened"
    assert logged is not None, "a round past `opened` has HoldoutOpened"
    try:
        path = audit.bundle.path("holdout.sealed")
        found = sealing.open_(path, audit.secret, folder, round_id=audit.round.id, fields=seal.fields)
    except Refusal as refusal:
        raise Failed("holdout.sealed", refusal.sentence) from refusal
    for name, value in found.fields.items():
        if value != logged[name]:
            raise Failed(f"HoldoutOpened, {name}", f"it says {logged[name]}, the opening gives {value}")
    audit.opened = {name: folder / name for name in sorted(found.files)}
    return f"{seal['rows']} rows in {len(audit.opened)} files"


def holdout(audit: Audit) -> str:
    """holdout/ has exactly the files that were opened, byte for byte, and one table for each task."""
    audit.holdout = {}
    tasks = {f"holdout/{task.name}.parquet": task.name for task in audit.competition.tasks}
    opened = {f"holdout/{name}": path for name, path in audit.opened.items()}
    for name in sorted({*opened, *audit.bundle.under("holdout")}):
        if name not in opened:
            raise Failed(name, "no such file was in the seal")
        equal = audit.bundle.digest(name) == digests.of_file(opened[name])
        if name.endswith(".parquet"):
            if name not in tasks:
                raise Failed(name, "it was sealed, and the definition has no task of this name")
            sealed = parquet.read(opened[name], f"{name} as sealed")
            if not equal:
                parquet.same(parquet.read(audit.bundle.path(name), name), sealed, name, was="sealed")
                raise Failed(name, "its rows are those that were sealed, its bytes are not")
            audit.holdout[tasks[name]] = sealed
        elif not equal:
            raise Failed(name, "its bytes are not those that were sealed")
    for name in tasks:
        if name not in opened:
            raise Failed(name, "no such file was in the seal: the task has no holdout")
    return f"{sum(table.num_rows for table in audit.holdout.values())} rows"


def unseen(audit: Audit) -> str:
    """Public splits and holdout, laid out as the organizer's folder was, obey what sealing obliges them to (splits.py)."""
    folder, other = audit.work / "unseen", []
    public = {f"splits/{task.name}/{split}.parquet" for task in audit.competition.tasks for split in splits.PUBLIC}
    for name in audit.bundle.under("public"):
        short = name.removeprefix("public/")
        # Of a base, check() below holds the digest against the definition's.
        if short in public or short == "tokenizer.json" or short.startswith(f"{bases.FOLDER}/"):
            _link(folder / short, audit.bundle.path(name))
        else:
            other.append(name)
    for task in audit.competition.tasks:
        _link(folder / "splits" / task.name / "holdout.parquet", audit.opened[f"{task.name}.parquet"])
    for name, path in audit.opened.items():
        if not name.endswith(".parquet"):
            _link(folder / name, path)
    try:
        splits.check(folder, audit.competition)
    except Refusal as refusal:
        where, _, why = refusal.problems[0].partition(": ")
        more = f" (and {len(refusal.problems) - 1} more problems)" if len(refusal.problems) > 1 else ""
        raise Failed(_place(where), why + more) from refusal
    if other:
        raise NotChecked(f"{other[0]} is no split and no tokenizer: whether it shows rows of the holdout can't be told")
    return f"{sum(table.num_rows for table in audit.holdout.values())} rows"


def _link(name: Path, to: Path) -> None:
    name.parent.mkdir(parents=True, exist_ok=True)
    name.symlink_to(to.absolute())


def _place(where: str) -> str:
    """The bundle's name of a file that splits.check calls <task>/<split>.parquet."""
    task, _, split = where.partition("/")
    if task == splits.BLOBS:
        return f"holdout/{where}"
    return f"holdout/{task}.parquet" if split == "holdout.parquet" else f"public/splits/{where}" if split else where
