"""A backup of an installation in a folder: its tables at one moment, its blobs, its keys if asked for; taken while everything runs.

    BACKUP.json     what the backup holds, with the digest of each file, and last its own; written last
    tables-…/       a file a table (table_files.py), and blobs.txt, the list of blobs
    blobs/          the blobs, as in a folder of blobs; kept from one backup to the next, so that only new ones are copied
    keys/           the server's keys

1. The newest signed checkpoint is read, then the tables in one transaction, then the blobs are listed: so the tables name no blob that came
   later than the list, and the checkpoint holds no entry that the tables lack.
2. What was written is read again and compared.
3. BACKUP.json replaces that of the backup before, in one step; only then are that one's tables removed. Killed at any moment, the backup
   before is still whole, and the next one copies only what is missing.

Blobs that the store has lost stay in the backup for as long as the tables name them. Nothing in blobs/ is ever removed.
"""

import base64
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from sqlalchemy import select

from acclimate import __version__, database, garbage, locks, log, migrations, overlaps, postgres, table_files
from acclimate.config import Settings
from acclimate.files import sync_folder, told
from acclimate.installation import Installation
from acclimate.service import release
from acclimate.store import Store, Tx, log_entries, openings, results, rounds, stages, uploads
from acclimate.store import metadata as expected
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import Blobs, FolderBlobs, space

FORMAT, MANIFEST, LIST = 1, "BACKUP.json", "blobs.txt"
Progress = Callable[[int, int, str], None]
_TABLES, _AT_ONCE = "tables-", 4
# Fields that name blobs, of records and of what stages came to; a prepared model has its record and its result in one transaction.
_LOGGED = {"HoldoutSealed": "ciphertext", "ModelEvaluated": "predictions", "RankingPublished": "ranking"}
_RESULTS = {"prepare": ("prepared",), "evaluate": ("predictions", "scores")}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


@dataclass(frozen=True)
class Wanted:
    """What a backup should hold beside the tables.

    Attributes:
        blobs, keys: whether these are copied.
        recheck: whether blobs that an earlier backup copied are hashed again.
    """

    blobs: bool = True
    keys: bool = False
    recheck: bool = False


def write(
    store: Store, settings: Settings, found: Installation, to: Path, *, wanted: Wanted, progress: Progress
) -> dict[str, Any]:
    """Write a backup, or bring the one in the folder up to date.

    Returns:
        What BACKUP.json holds, with `copied` (blobs that were new) and `lost` (blobs that are named, and neither stored nor in the backup).

    Raises:
        Refusal: backup_invalid, where the folder holds something else; other_installation, busy, no_space, file_unreadable,
            blobs_unreachable, database_unreachable.
    """
    overlaps.refuse_backup(to, settings)
    with told(to), _held(to, found) as before:
        # 1
        notes = _notes(store.blobs) if wanted.blobs else {}
        made, manifest, required = _tables(store, found, to, progress)
        folder = to / made
        if wanted.blobs:
            manifest["blobs"], copied, lost = _blobs(
                store.blobs, to, folder, notes=notes, required=required, recheck=wanted.recheck, progress=progress
            )
        else:
            manifest["blobs"], copied, lost = None, 0, []
        if wanted.keys:
            manifest["keys"] = _keys(settings.keys, to / "keys")
        else:
            manifest["keys"] = (before or {}).get("keys")
        # 2
        manifest["digest"] = digests.of_json(manifest)
        if problems := damage(to, manifest, blobs=False, progress=progress):
            raise Refusal(
                "backup_invalid",
                f"what was written to {to} reads otherwise: {problems[0]}",
                hint="that disk can't be relied on; the backup before is as it was",
                problems=problems,
            )
        # 3
        with _file(to / MANIFEST) as stream:
            stream.write(json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n")
        for old in to.glob(f"{_TABLES}*"):
            if old.name != made:
                shutil.rmtree(old, ignore_errors=True)
    return {**manifest, "copied": copied, "lost": lost}


def read(folder: Path) -> dict[str, Any]:
    """A backup's BACKUP.json, compared with its own digest.

    Raises:
        Refusal: backup_invalid.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        told = manifest.pop("digest")
        if manifest["acclimate"] != "backup" or digests.of_json(manifest) != told:
            raise ValueError("it was changed since it was written")
    except FileNotFoundError as error:
        raise Refusal(
            "backup_invalid",
            f"there is no {MANIFEST} in {folder}: it is no backup, or one that never came to its end",
            hint="name the folder that `acclimate backup` was given",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(
            "backup_invalid", f"{folder / MANIFEST} can't be read: {error}", hint="take another copy of the backup"
        ) from error
    if manifest.get("format") != FORMAT:
        raise Refusal(
            "backup_invalid",
            f"the backup in {folder} has format {manifest.get('format')}, this version reads {FORMAT}",
            hint=f"use Acclimate {manifest.get('version')}, which wrote it",
        )
    _check_form(folder, manifest)
    return {**manifest, "digest": told}


def _check_form(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse what no backup of this format says; above all a name that leads out of its folder."""
    try:
        Installation(**manifest["installation"])
        names = [row["file"] for row in manifest["tables"].values()] + list(manifest["keys"] or {})
        names += [manifest["blobs"]["file"]] if manifest["blobs"] is not None else []
        found = [*manifest["tables"].values(), manifest["log"], *([manifest["blobs"]] if manifest["blobs"] else [])]
        whole = all(isinstance(each["size"], int) for each in found)
        whole &= all(isinstance(manifest[name], str) for name in ("schema", "made", "version", "engine"))
        inside = all(_NAME.fullmatch(name) and ".." not in name for name in names)
    except (KeyError, TypeError, AttributeError):
        whole = inside = False
    if not (whole and inside):
        raise Refusal(
            "backup_invalid",
            f"{folder / MANIFEST} does not say what a backup holds, or names files outside of it",
            hint="take another copy of the backup",
        )


def damage(folder: Path, manifest: Mapping[str, Any], *, blobs: bool, progress: Progress) -> list[str]:
    """What of a backup is not as BACKUP.json says, a line each that names file and table; `blobs` has their presence and sizes looked at, too."""
    files = {f"table {name}": (row["file"], row["digest"]) for name, row in manifest["tables"].items()}
    files |= {f"key {name}": (f"keys/{name}", digest) for name, digest in (manifest["keys"] or {}).items()}
    if manifest["blobs"] is not None:
        files["list of blobs"] = manifest["blobs"]["file"], manifest["blobs"]["digest"]
    found = []
    for done, (what, (name, digest)) in enumerate(files.items()):
        progress(done, len(files), "verifying")
        try:
            if digests.of_file(folder / name) != digest:
                found.append(f"{name} ({what}) is damaged")
        except OSError as error:
            found.append(f"{name} ({what}) can't be read: {error.strerror or error}")
    if blobs and not found and manifest["blobs"] is not None:
        here = FolderBlobs(folder / "blobs")
        for digest, size in listed(folder, manifest):
            path = here.path(digest)
            there = path.stat().st_size if path.is_file() else None
            if there != size:
                found.append(f"blobs/{path.relative_to(here.root)} " + ("is missing" if there is None else "is torn"))
    return found


def listed(folder: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(digest, size) of each blob of a backup; none where it was made without."""
    if manifest["blobs"] is not None:
        with (folder / manifest["blobs"]["file"]).open() as stream:
            for line in stream:
                digest, _, size = line.partition(" ")
                yield digest, int(size)


@contextmanager
def _held(to: Path, found: Installation) -> Iterator[dict[str, Any] | None]:
    """The folder for this process alone, and the backup that is in it; refuses one that holds something else."""
    there = sorted(path.name for path in to.iterdir()) if to.is_dir() else []
    known = {MANIFEST, "LOCK", "blobs", "keys", *(name for name in there if name.startswith(_TABLES))}
    if others := [name for name in there if name not in known and not name.startswith(".")]:
        raise Refusal(
            "backup_invalid",
            f"{to} is not empty, and no backup: it holds {', '.join(others[:3])}",
            hint="name an empty folder, or that of an earlier backup",
        )
    with space(to / "LOCK"):
        to.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = locks.take(to / "LOCK")
    if held is None:
        raise Refusal(
            "busy",
            f"another process makes a backup in {to}, or restores it",
            hint="wait for it, or name another folder",
        )
    with held:
        before = read(to) if (to / MANIFEST).exists() else None
        here = before["installation"]["id"] if before is not None else FolderBlobs(to / "blobs").marker()
        if here not in (None, found.id):
            raise Refusal(
                "other_installation",
                f"the backup in {to} is of installation {here}, the database is of {found.id}",
                hint="name another folder for this installation's backup",
            )
        yield before


def _tables(store: Store, found: Installation, to: Path, progress: Progress) -> tuple[str, dict[str, Any], set[str]]:
    """The tables' files of one moment; name of their folder, the manifest so far, the blobs that must be there."""
    with store.snapshot() as tx:
        if not (sqlite := tx.connection.dialect.name == "sqlite"):
            postgres.unhurried(tx.connection)
        metadata = table_files.tables(tx.connection)
        schema = migrations.version(tx.connection)
        if schema == migrations.HEAD and (lacking := migrations.missing(metadata, expected)):
            raise Refusal(
                "data_version",
                f"the database lacks {', '.join(lacking[:5])}, which schema {schema} has: its backup would be without, too",
                hint="`acclimate db check` tells all that is wrong; the backup before is as it was",
                problems=lacking,
            )
        made = database.now(tx.connection)
        folder = to / f"{_TABLES}{re.sub(r'[^0-9TZ]', '', made)}-{uuid.uuid4().hex[:8]}"
        with space(folder):
            folder.mkdir(mode=0o700)
        tree, files = log.Tree(), {}
        for done, table in enumerate(metadata.sorted_tables):
            progress(done, len(metadata.sorted_tables), table.name)
            path, tally = folder / f"{table.name}.jsonl", table_files.Tally()
            with _file(path) as stream:
                for line in table_files.lines(tx.connection, table, tree=tree):
                    stream.write(tally.add(line))
            files[table.name] = {"file": f"{folder.name}/{path.name}", **asdict(tally.result())}
        manifest = {
            "acclimate": "backup",
            "format": FORMAT,
            "version": __version__,
            "made": made,
            "engine": "sqlite" if sqlite else "postgresql",
            "schema": schema,
            "installation": asdict(found),
            "log": {"size": len(tree), "root": base64.b64encode(tree.root()).decode()},
            "tables": files,
        }
        required = named(tx)
    return folder.name, manifest, required


def named(tx: Tx) -> set[str]:
    """Digests that are certainly of blobs: definitions, what was uploaded, sealed and opened, and what it all came to."""
    found = set(tx.execute(rounds.select().with_only_columns(rounds.c.definition)).scalars())
    found |= set(tx.execute(uploads.select().with_only_columns(uploads.c.digest)).scalars())
    for round_id in tx.execute(openings.select().with_only_columns(openings.c.round)).scalars().all():
        found |= set(release.holdout_files(tx, round_id).values())
    logged = select(log_entries.c.type, log_entries.c.data).where(log_entries.c.type.in_(_LOGGED))
    for row in tx.execute(logged):
        found |= {str(digest) for digest in [json.loads(bytes(row.data)).get(_LOGGED[row.type])] if digest}
    ended = select(stages.c.kind, results.c.document).join(stages, stages.c.key == results.c.stage)
    for row in tx.execute(ended.where(stages.c.kind.in_(_RESULTS))):
        # What failed has none.
        found |= {str(row.document[name]) for name in _RESULTS[row.kind] if row.document.get(name)}
    return found


def _notes(blobs: Blobs) -> dict[str, bytes]:
    names = ["CHECKPOINT", "CHECKPOINT-ROTATED", *blobs.notes(garbage.ATTEMPTS)]
    return {name: data for name in names if (data := blobs.note(name)) is not None}


def _blobs(
    source: Blobs,
    to: Path,
    folder: Path,
    *,
    notes: Mapping[str, bytes],
    required: set[str],
    recheck: bool,
    progress: Progress,
) -> tuple[dict[str, Any], int, list[str]]:
    """Copy what is new; what BACKUP.json says of the blobs, how many were new, which are lost."""
    target = FolderBlobs(to / "blobs")
    with space(target.root):
        target.root.mkdir(mode=0o700, exist_ok=True)
    target.sweep(older_than=-1.0)
    stored = {each.digest: each.size for each in source.listing()}
    total, done, copied = sum(stored.values()), 0, 0
    new: dict[str, int] = {}
    for digest, size in stored.items():
        path = target.path(digest)
        here = path.is_file() and path.stat().st_size == size
        if here and recheck:
            progress(len(new), 0, "hashing again")
            here = digests.of_file(path) == digest
        if not here:
            new[digest] = size
    total, done, copied = sum(new.values()), 0, 0
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        came = threads.map(lambda each: _copied(source, target, *each), new.items())
        for size, one in zip(new.values(), came, strict=True):
            done, copied = done + size, copied + one
            progress(done, total, "blobs")
    kept = {digest for digest in required - stored.keys() if target.has(digest)}
    found = {digest: target.size(digest) for digest in {*stored, *kept} if target.has(digest)}
    lost = sorted(required - found.keys())
    for name, data in notes.items():
        target.put_note(name, data)
    for name in set(target.notes(garbage.ATTEMPTS)) - notes.keys():
        target.drop_note(name)
    if marked := source.marker():
        target.mark(marked)
    with _file(folder / LIST) as stream:
        for digest, size in sorted(found.items()):
            stream.write(f"{digest} {size}\n".encode())
    listing = {"file": f"{folder.name}/{LIST}", "digest": digests.of_file(folder / LIST)}
    return {**listing, "count": len(found), "size": sum(found.values()), "notes": len(notes)}, copied, lost


def _copied(source: Blobs, target: FolderBlobs, digest: str, size: int) -> bool:
    """Copy a blob, its bytes hashed on the way and read again; False where it went away since it was listed, or is damaged."""
    try:
        stream, _ = source.sized(digest)
        with stream:
            target.put_stream(stream, digest=digest, size=size)
    except Refusal as refusal:
        if refusal.code not in ("blob_unknown", "upload_mismatch"):
            raise
        # The store sets aside what is damaged, so that whoever needs it is told.
        with suppress(Refusal):
            source.check(digest)
        return False
    target.check(digest)
    return True


def _keys(source: Path, target: Path) -> dict[str, str]:
    """Copy the key folder, for its owner alone; name -> digest."""
    found = {}
    for path in sorted(source.rglob("*")):
        if path.is_file() and not path.is_symlink():
            name = path.relative_to(source).as_posix()
            for folder in reversed((target / name).parents):
                if folder.is_relative_to(target) and not folder.is_dir():
                    folder.mkdir(mode=0o700)
            try:
                data = path.read_bytes()
            except OSError as error:
                raise Refusal(
                    "file_unreadable", f"{path}: {error.strerror or error}", hint="run this as the server's own user"
                ) from error
            with _file(target / name) as stream:
                stream.write(data)
            found[name] = digests.of_bytes(data)
    return found


@contextmanager
def _file(path: Path) -> Iterator[IO[bytes]]:
    """A file for its owner alone, whole and on the disk when the block ends, in the place of what it was before."""
    temporary = path.with_name(f".{path.name}.new")
    with space(path):
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
