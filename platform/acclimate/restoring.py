"""An installation made anew from its backup (backups.py), on the same or the other engine; and what an older backup lacks.

1. The backup lies apart from what is made. It is verified, all but the bytes of its blobs: each file's digest, each blob's presence and size.
2. Nothing is restored over anything: data folder and database must be empty, the blobs' place empty or this installation's own.
3. The blobs come first, each hashed on its way; a damaged one ends the restore before there is a database that names it.
4. The database is made in one transaction: schema, rows; every table is read again and must give the file's own digest, the log its root,
   the newest checkpoint its signature. Does anything differ, then there is no database. Then the outbox is emptied: MLflow, bundles and
   reports are in no backup, and the next dispatcher makes them again (finishing.py), to the same end where they are still there.
5. Keys, if the backup has them. RESTORING, which lies in the data folder all the while, goes last, once it is known what is lost: until then
   the same command goes on. RESTORED stays where nobody here knows of entries after the backup, until the operator has asked elsewhere.
"""

import base64
import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, select, text
from sqlalchemy.exc import IntegrityError

from acclimate import (
    backups,
    config,
    database,
    facts,
    files,
    garbage,
    installation,
    locks,
    log,
    migrations,
    overlaps,
    sqlite_urls,
    table_files,
)
from acclimate.backups import Progress
from acclimate.checkpoints import COPY, Copies, lacking
from acclimate.config import Settings
from acclimate.store import Store, attempts, results, stages
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import Blobs, FolderBlobs, blobs_at, space

UNDER_WAY, BLIND = "RESTORING", "RESTORED"
"""Files of the data folder: while a restore is under way, and after one that found no checkpoint of the living log."""
_AT_ONCE = 4
_OVER = ("committed", "failed", "cancelled")


@dataclass(frozen=True)
class Gap:
    """What is known beside a database, and not in it.

    Attributes:
        entries: how many entries of the log were signed beyond what the database has, at least.
        lost: a sentence for each signed checkpoint that the log does not hold.
        adopted: {attempt, fence, kind, stages} of each outcome with the blobs that has no result: it is taken as it is, not made again.
        unknown: what nothing here could tell of a restored log, and who could; empty where that is known or was accepted.
    """

    entries: int
    lost: list[str]
    adopted: list[dict[str, Any]]
    unknown: str = ""

    def lines(self) -> list[str]:
        """For people."""
        stages = sum(each["stages"] for each in self.adopted)
        found = [f"lost: {line}" for line in self.lost]
        if self.lost:
            found.append(
                "tell everybody which entries; then `acclimate db accept-loss`, once for each API's data folder"
            )
        elif self.unknown:
            found.append(f"not known: {self.unknown}")
        if self.adopted:
            found.append(
                f"with the blobs: outcomes of {len(self.adopted)} attempts ({stages} stages), taken as they are"
            )
        return found


def restore(folder: Path, settings: Settings, *, progress: Progress) -> dict[str, Any]:
    """Restore a backup.

    Returns:
        What BACKUP.json holds, with `restored` (blobs that were copied), `upgraded` (steps), `gap`, `clock` (why nothing can be logged now;
        empty where it can), and `missing`: digests of the blobs that the database names and that are not there; None where the backup is
        without blobs and none are at their place.

    Raises:
        Refusal: backup_invalid, data_version, other_installation, config_invalid, busy, no_space, file_unreadable, blobs_unreachable,
            database_unreachable.
    """
    overlaps.refuse_restore(folder, settings)
    with files.told(settings.data), _steady(folder):
        return _restored(folder, settings, progress)


@contextlib.contextmanager
def _steady(folder: Path) -> Iterator[None]:
    """No backup is brought up to date while it is read; where nobody can write, nothing needs to be held."""
    held = None
    with contextlib.suppress(OSError):
        if (held := locks.share(folder / "LOCK")) is None:
            raise Refusal("busy", f"another process makes a backup in {folder}", hint="wait for it, then again")
    try:
        yield
    finally:
        if held is not None:
            held.close()


def _restored(folder: Path, settings: Settings, progress: Progress) -> dict[str, Any]:
    # 1
    manifest = _verified(folder, settings, progress)
    # 2
    begun = _check_folder(settings, manifest)
    _check_database(settings, manifest, begun=begun)
    place = blobs_at(settings.blobs, endpoint=settings.blobs_endpoint, scratch=settings.work / "blobs")
    _check_blobs(place, settings, manifest)
    with space(settings.data / UNDER_WAY):
        settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Whole or not at all: half of it on a full disk would be nobody's, and the same command would not go on.
        files.write(settings.data / UNDER_WAY, manifest["digest"].encode())
        if place.note(COPY) is None:
            # Asked before the backup's own copy comes there.
            blind = {"made": manifest["made"], "size": manifest["log"]["size"], "blobs": manifest["blobs"] is not None}
            files.write(settings.data / BLIND, digests.canonical(blind))
    config.claim(settings)
    with config.lock(settings, "upgrade"):
        # 3
        restored = 0
        if manifest["blobs"] is not None:
            # Marked first of all: while the database is still empty, no API may begin another installation with these blobs.
            place.mark(manifest["installation"]["id"])
            restored = _blobs(folder, manifest, place, progress)
        # 4
        engine = database.connect(settings.database)
        try:
            if _revision(engine) is None:
                migrations.fill(engine, manifest["schema"], lambda tx: _filled(tx, folder, manifest, progress))
            upgraded = migrations.upgrade(engine) if _revision(engine) != migrations.HEAD else []
        finally:
            engine.dispose()
        # 5
        _keys(folder, manifest, settings)
    store = Store.open(settings)
    try:
        found, missing, clock = Gap(0, [], [], unknown(store.blobs, settings)), None, facts.unloggable(store)
        if place.marker() is not None:
            found = gap(store, settings, log.parse_vkey(installation.check(store, settings).log))
            with store.snapshot() as tx:
                named = backups.named(tx)
            missing = sorted(named - {each.digest for each in place.listing()})
    finally:
        store.close()
    (settings.data / UNDER_WAY).unlink()
    return {**manifest, "restored": restored, "upgraded": upgraded, "gap": found, "clock": clock, "missing": missing}


def gap(store: Store, settings: Settings, verifier: log.Verifier) -> Gap:
    """What the newest checkpoints, witnesses and the outcomes beside the blobs tell that the database does not.

    Raises:
        Refusal: blobs_unreachable, busy, database_unreachable, config_invalid.
    """
    copies = Copies.asking(settings, store.blobs, verifier)
    with store.snapshot() as tx:
        size = tx.size()
        behind = copies.lost(tx)
        over = set(tx.execute(select(results.c.stage)).scalars())
        over |= set(tx.execute(select(stages.c.key).where(stages.c.state.in_(_OVER))).scalars())
        known = {
            row.attempt: [key for key in row.stages if key not in over]
            for row in tx.execute(select(attempts.c.attempt, attempts.c.stages))
        }
    lost = [lacking(where, signed, size=size) for where, signed in behind]
    adopted: dict[str, dict[str, Any]] = {}
    for name in store.blobs.notes(garbage.ATTEMPTS):
        _, attempt, fence, *rest = name.split("/")
        digest = f"sha256:{attempt}"
        if rest != ["manifest.json"] or not fence.isdecimal() or known.get(digest) == []:
            continue
        told = _told(store.blobs, name)
        if digest in known:
            told["stages"] = len(known[digest])
        adopted[digest] = {"attempt": digest, "fence": int(fence), **told}
    entries = max((signed.size - size for _, signed in behind), default=0)
    return Gap(entries, lost, list(adopted.values()), unknown(store.blobs, settings))


def unknown(blobs: Blobs, settings: Settings) -> str:
    """What nothing here can tell of a log that was restored where no checkpoint of the living one was; empty elsewhere.

    Raises:
        Refusal: blobs_unreachable.
    """
    try:
        blind = json.loads((settings.data / BLIND).read_bytes())
        made, size, brought = str(blind["made"]), int(blind["size"]), bool(blind["blobs"])
    except (OSError, ValueError, TypeError, KeyError):
        return ""
    if not brought and blobs.note(COPY) is not None:
        # The living ones came to their place after the restore, and say it.
        return ""
    return (
        f"whether entries were signed after this backup, which is of {made} and has {size}. Nothing here would tell, but people may hold "
        f"more: a witness that does not answer now (`acclimate doctor` asks each), a mirror (`acclimate log check DIR`), an entrant or organizer (`acclimate receipt "
        "verify`), a custodian (pins.json); who follows the log is refused with log_inconsistent once other entries came in their place. Ask "
        "them before you start. If nobody has more, or it is lost for good: `acclimate db accept-loss`"
    )


def accept(settings: Settings) -> list[str]:
    """The operator asked whoever might know, and goes on: what is not known of a restored log is told no more. What was done, a line each.

    Raises:
        Refusal: no_space.
    """
    path = settings.data / BLIND
    if not path.exists():
        return []
    with space(path):
        path.unlink()
    return ["what was signed after the backup, if anything was, which nothing here tells"]


def _told(blobs: Blobs, name: str) -> dict[str, Any]:
    """Kind and number of stages of an attempt that the database does not know, by its job."""
    with contextlib.suppress(Refusal, ValueError, TypeError, KeyError):
        job = json.loads(blobs.read(json.loads(blobs.note(name) or b"")["job"]))
        return {"kind": str(job["kind"]), "stages": len(job.get("stages", [None]))}
    return {"kind": "", "stages": 1}


def _verified(folder: Path, settings: Settings, progress: Progress) -> dict[str, Any]:
    manifest = backups.read(folder)
    if manifest["schema"] not in migrations.REVISIONS:
        raise Refusal(
            "data_version",
            f"the backup has schema {manifest['schema']}, this version of Acclimate reads {migrations.HEAD}: a newer one wrote it",
            hint=f"use Acclimate {manifest['version']}, which wrote the backup, or a newer one",
        )
    if manifest["schema"] == migrations.REVISIONS[0]:
        raise Refusal(
            "backup_invalid",
            f"the backup says that it has schema {manifest['schema']}, which had no installations yet, and no version made backups of",
            hint="somebody altered it: take another copy. A data folder of that version is copied as it is, and brought up by `acclimate db upgrade`",
        )
    origin = manifest["installation"]["log"].partition("+")[0]
    if settings.origin != origin:
        raise Refusal(
            "other_installation",
            f"the log of this backup is named {origin!r}, the setting `origin` says {settings.origin!r}",
            hint=f"set origin to {origin}: a log keeps its name for good",
        )
    if problems := backups.damage(folder, manifest, blobs=True, progress=progress):
        raise _damaged(folder, problems)
    return manifest


def _damaged(folder: Path, problems: list[str]) -> Refusal:
    return Refusal(
        "backup_invalid",
        f"the backup in {folder} is damaged: {problems[0]}"
        + (f", and {len(problems) - 1} more" if problems[1:] else ""),
        hint="take another copy of the backup; nothing was put into the database",
        problems=problems,
    )


def _check_folder(settings: Settings, manifest: Mapping[str, Any]) -> bool:
    """Whether a restore of this very backup was broken off in the data folder; else it must be empty."""
    with contextlib.suppress(OSError):
        if (settings.data / UNDER_WAY).read_text() == manifest["digest"]:
            return True
    there = sorted(path.name for path in settings.data.iterdir()) if settings.data.is_dir() else []
    if [name for name in there if name != "keys"]:
        raise Refusal(
            "backup_invalid",
            f"the data folder {settings.data} is not empty: it holds {', '.join(there[:3])}",
            hint="name a new one with --data; nothing is restored over anything. If a restore ended here, `acclimate db check`"
            " says whether it is whole, and what is lost",
        )
    return False


def _check_database(settings: Settings, manifest: Mapping[str, Any], *, begun: bool) -> None:
    """Empty, or filled by this very restore before it was broken off."""
    if sqlite_urls.is_one(settings.database) and not sqlite_urls.file(settings.database).exists():
        return
    engine = database.connect(settings.database)
    try:
        if (found := _revision(engine)) is None:
            return
        with database.refusing(), database.reading(engine) as connection:
            size = connection.execute(text('SELECT COALESCE(MAX("index") + 1, 0) FROM log_entries')).scalar()
            here = connection.execute(text("SELECT id FROM installation")).scalar() if found != "0001" else None
    finally:
        engine.dispose()
    if not begun or here != manifest["installation"]["id"] or size != manifest["log"]["size"]:
        own = "it is this installation's own, of which `acclimate db check` tells what it holds; else "
        raise Refusal(
            "backup_invalid",
            f"the database to restore into is not empty: its log has {size} entries",
            hint=(own if here == manifest["installation"]["id"] else "")
            + "name an empty one with --database or in the setting `database`; nothing is restored over anything",
        )


def _revision(engine: Engine) -> str | None:
    with database.refusing(), database.reading(engine) as connection:
        return migrations.version(connection)


def _check_blobs(place: Blobs, settings: Settings, manifest: Mapping[str, Any]) -> None:
    marked, identity = place.marker(), manifest["installation"]["id"]
    if marked not in (None, identity):
        raise Refusal(
            "other_installation",
            f"the blobs at {settings.blobs} are of installation {marked}, the backup is of {identity}",
            hint="name an empty place with --blobs, or that of this installation",
        )
    if marked is None and manifest["blobs"] is not None and next(iter(place.listing()), None) is not None:
        raise Refusal(
            "backup_invalid",
            f"there are blobs at {settings.blobs}, of nobody knows which installation",
            hint="name an empty place with --blobs, or that of this installation",
        )


def _blobs(folder: Path, manifest: Mapping[str, Any], place: Blobs, progress: Progress) -> int:
    """Copy the blobs that are not there, and the notes; how many blobs were copied."""
    source = FolderBlobs(folder / "blobs")
    total, done, copied, problems = manifest["blobs"]["size"], 0, 0, []

    def copy(each: tuple[str, int]) -> str | None:
        digest, size = each
        if place.keep(digest) and place.size(digest) == size:
            return None
        try:
            with source.open(digest) as stream:
                place.put_stream(stream, digest=digest, size=size)
        except Refusal as refusal:
            if refusal.code not in ("upload_mismatch", "blob_unknown"):
                raise
            return f"blobs/{source.path(digest).relative_to(source.root)} is damaged"
        return ""

    every = list(backups.listed(folder, manifest))
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for (_, size), came in zip(every, threads.map(copy, every), strict=True):
            done, copied = done + size, copied + (came == "")
            problems += [came] if came else []
            progress(done, total, "blobs")
    if problems:
        raise _damaged(folder, problems)
    for name in ("CHECKPOINT", "CHECKPOINT-ROTATED", *source.notes(garbage.ATTEMPTS)):
        # What lies there already is newer: that of the installation itself.
        if (data := source.note(name)) is not None and place.note(name) is None:
            place.put_note(name, data)
    return copied


def _filled(connection: Connection, folder: Path, manifest: Mapping[str, Any], progress: Progress) -> None:
    metadata, told, tree = table_files.tables(connection), manifest["tables"], log.Tree()
    if set(metadata.tables) != set(told):
        odd = ", ".join(sorted(set(metadata.tables) ^ set(told)))
        raise _damaged(folder, [f"schema {manifest['schema']} and the backup differ in the tables {odd}"])
    for done, table in enumerate(metadata.sorted_tables):
        progress(done, len(told), table.name)
        try:
            columns = table_files.fill(connection, table, folder / told[table.name]["file"])
        except (ValueError, KeyError, TypeError, IntegrityError) as error:
            raise _damaged(folder, [f"table {table.name} can't be put into the database: {error}"]) from error
        tally = table_files.Tally()
        for line in table_files.lines(connection, table, columns=columns, tree=tree):
            tally.add(line)
        if tally.result().digest != told[table.name]["digest"]:
            raise _damaged(folder, [f"table {table.name} reads otherwise in the database than it was written"])
    if len(tree) != manifest["log"]["size"] or base64.b64encode(tree.root()).decode() != manifest["log"]["root"]:
        raise _damaged(folder, ["the log's root is not that of its entries"])
    query = "SELECT note FROM log_checkpoints ORDER BY size DESC LIMIT 1"
    if note := connection.execute(text(query)).scalar():
        signed = log.open_checkpoint(note, log.parse_vkey(manifest["installation"]["log"])).checkpoint
        if signed.size > len(tree) or tree.root(signed.size) != signed.root:
            raise _damaged(folder, [f"the checkpoint over {signed.size} entries is not of this log"])
    connection.execute(metadata.tables["outbox"].delete())
    # Whoever led then leads over the database that was backed up, not over this one; its epoch stays.
    leases = metadata.tables["leases"]
    ended = {"expires": manifest["made"]}
    connection.execute(leases.update().where(leases.c.expires > manifest["made"]).values(ended))


def _keys(folder: Path, manifest: Mapping[str, Any], settings: Settings) -> None:
    for name, digest in (manifest["keys"] or {}).items():
        path = settings.keys / name
        if path.exists() and digests.of_file(path) != digest:
            raise Refusal(
                "backup_invalid",
                f"there is another key at {path} than in the backup",
                hint="move it away; nothing is restored over anything",
            )
        with space(path):
            settings.keys.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not path.exists():
                temporary = path.with_name(f".{path.name}.new")
                temporary.unlink(missing_ok=True)
                with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                    stream.write((folder / "keys" / name).read_bytes())
                    stream.flush()
                    os.fsync(stream.fileno())
                temporary.replace(path)
