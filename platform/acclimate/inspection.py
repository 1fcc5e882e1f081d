"""What anybody can tell of a sealed holdout without its key: whether a file is the ciphertext that a record commits to, and if not, where.

1. seal: the file has a size that a ciphertext of this format can have.
2. record: one of the records named is of this file; else the only one there is, and the file is compared with it.
3. format, size, digest, block root: as HoldoutSealed says; the organizer's signature, where there is one, is over exactly these fields.
4. blocks: by another copy, which is the ciphertext, the blocks of 1 MiB in which the file differs.
Whether the record is in the log, and before the round opened, is for `acclimate verify`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acclimate import sealing
from acclimate.blocks import BLOCK, Measured, bad_blocks, measure
from acclimate_competitions import digests, reading, records
from acclimate_competitions.errors import Refusal

_SHOWN = 20  # bad blocks that are named


@dataclass(frozen=True)
class Known:
    """A seal as it was recorded.

    Attributes:
        where: what holds the record, for people.
        round: id; "" where that isn't told.
        fields: of HoldoutSealed.
        record: the signed record, or None where only its fields are known.
    """

    where: str
    round: str
    fields: dict[str, Any]
    record: records.Record | None = None


@dataclass(frozen=True)
class Finding:
    """One line: ok, FAILED or NOT CHECKED, and what was found."""

    name: str
    status: str
    detail: str


@dataclass(frozen=True)
class Inspection:
    """What a file measures, the record it was compared with, and the findings."""

    measured: Measured
    known: Known | None
    findings: list[Finding]

    @property
    def failed(self) -> bool:
        """Whether something is not as committed to."""
        return any(finding.status == "FAILED" for finding in self.findings)


def inspect(
    path: Path,
    known: Sequence[Known],
    *,
    copy: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Inspection:
    """Measure a file, and compare it with what was recorded.

    Args:
        path: the file.
        known: what it may be; none to measure only.
        copy: another copy of the ciphertext, to name blocks by.
        progress: told (bytes of the file that were hashed, of how many).

    Raises:
        Refusal: file_unreadable; seal_mismatch, where it can't be a seal, is of none of several records, or the copy is no better.
    """
    # 1
    measured = measure(path, progress=progress)
    if not sealing.is_size(measured.size):
        raise Refusal(
            "seal_mismatch",
            f"{path} is not a sealed holdout, or is one cut off: no ciphertext of {sealing.FORMAT} has {measured.size} bytes"
            + _sizes(known),
            hint="fetch it again; a seal is the file holdout.sealed of a bundle",
        )
    if not known:
        return Inspection(measured, None, [Finding("record", "NOT CHECKED", "no record was given to compare with")])
    # 2
    one = _chosen(path, measured, known)
    # 3
    findings = _compared(measured, one)
    # 4
    if copy is not None:
        findings.append(_blocks(path, copy, one))
    return Inspection(measured, one, findings)


def from_file(path: Path) -> list[Known]:
    """The seals of a file: a HoldoutSealed record, or what `acclimate round seal` keeps as `sealed.json`.

    Raises:
        Refusal: file_unreadable, record_invalid.
    """
    data = reading.read(path, reading.LONGEST_DOCUMENT, hint="name the file with the record")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _no_record(path, f"it is no JSON: {error}") from error
    try:
        if isinstance(value, dict) and "real" in value:
            return [_kept(f"{path}, {kind}", value[kind]) for kind in ("real", "rehearsal") if kind in value]
        record = records.parse(digests.canonical(value))
    except Refusal as refusal:
        raise _no_record(path, refusal.sentence) from refusal
    if record.type != "HoldoutSealed":
        raise _no_record(path, f"it is a record {record.type}")
    return [_of(str(path), record)]


def from_entries(entries: Sequence[bytes], where: str, *, round_id: str = "") -> list[Known]:
    """The seals in a log's entries, of all its rounds or of one.

    Raises:
        Refusal: record_invalid; round_unknown, where there is none of the round.
    """
    parsed = [records.parse(entry) for entry in entries if b'"HoldoutSealed"' in entry]
    found = [_of(where, record) for record in parsed if record.type == "HoldoutSealed"]
    kept = [known for known in found if known.round.startswith(round_id)]
    if not kept:
        of = f" of a round that begins with {round_id!r}" if round_id else ""
        raise Refusal("round_unknown", f"{where} has no HoldoutSealed{of}", hint="has the organizer sealed it yet?")
    return kept


def _of(where: str, record: records.Record) -> Known:
    return Known(where, record.round, dict(record.fields), record)


def _kept(where: str, value: object) -> Known:
    fields = value.get("fields") if isinstance(value, dict) else None
    if not isinstance(fields, dict):
        raise Refusal("record_invalid", "it has no fields of a seal")
    records.check_fields("HoldoutSealed", fields, signed=True)
    return Known(where, "", fields)


def _no_record(path: Path, why: str) -> Refusal:
    return Refusal(
        "record_invalid",
        f"{path}: {why}",
        hint="give a HoldoutSealed record of the log, or the sealed.json that `acclimate round seal` keeps in the key folder",
    )


def _sizes(known: Sequence[Known]) -> str:
    sizes = ", ".join(str(item.fields["size"]) for item in known)
    return f"; recorded: {sizes}" if sizes else ""


def _chosen(path: Path, measured: Measured, known: Sequence[Known]) -> Known:
    same = [item for item in known if item.fields["ciphertext"] == measured.digest]
    if same or len(known) == 1:
        return (same or list(known))[0]
    raise Refusal(
        "seal_mismatch",
        f"{path} has digest {measured.digest}; the {len(known)} seals known are "
        + ", ".join(f"{item.fields['ciphertext']} ({item.round or item.where})" for item in known),
        hint="name the round, to compare with its seal",
    )


def _compared(measured: Measured, known: Known) -> list[Finding]:
    fields, findings = known.fields, []
    for name, found, recorded in (
        ("format", sealing.FORMAT, fields["format"]),
        ("size", measured.size, fields["size"]),
        ("digest", measured.digest, fields["ciphertext"]),
        ("block root", measured.block_root, fields["block_root"]),
    ):
        equal = found == recorded
        verb = "this version knows" if name == "format" else "the file has"
        findings.append(
            Finding(name, "ok", str(found))
            if equal
            else Finding(name, "FAILED", f"{verb} {found}, the record says {recorded}" + _end(name, measured, fields))
        )
    if known.record is None:
        findings.append(Finding("signature", "NOT CHECKED", f"{known.where} holds the fields, not the signed record"))
    else:
        try:
            records.verify(known.record)
            findings.append(Finding("signature", "ok", f"the record was signed by {known.record.by}"))
        except Refusal as refusal:
            findings.append(Finding("signature", "FAILED", refusal.sentence))
    return findings


def _end(name: str, measured: Measured, fields: dict[str, Any]) -> str:
    if name != "size":
        return ""
    if measured.size < fields["size"]:
        return f": it ends in block {measured.size // BLOCK} of {-(-fields['size'] // BLOCK)}"
    return f": {measured.size - fields['size']} bytes follow its end"


def _blocks(path: Path, copy: Path, known: Known) -> Finding:
    root = known.fields["block_root"]
    good = measure(copy)
    if good.block_root != root:
        raise Refusal(
            "seal_mismatch",
            f"the copy {copy} has block root {good.block_root}, the record says {root}: it tells nothing of the blocks",
            hint="another copy, such as holdout.sealed of a bundle that verifies",
        )
    bad = bad_blocks(path, good.block_hashes, block_root=root)
    if not bad:
        return Finding("blocks", "ok", f"all {len(good.block_hashes)} blocks of 1 MiB are those of the copy")
    named = ", ".join(map(str, bad[:_SHOWN])) + (f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else "")
    first = f"the first begins at byte {bad[0] * BLOCK}"
    return Finding(
        "blocks", "FAILED", f"{len(bad)} of {len(good.block_hashes)} blocks of 1 MiB differ: {named}; {first}"
    )
