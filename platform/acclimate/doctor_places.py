"""The doctor's checks of what the settings name: data folder, database, blobs, keys, ports, MLflow."""

import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from acclimate import config, locks, ports, sqlite_urls
from acclimate.config import Settings
from acclimate.doctor_machine import Finding, State, is_there, version_of
from acclimate.redaction import holds_login, place

_PARTS = ("up", "api", "dispatcher")


# ---- what the settings name ----------------------------------------------------------------------------------------


def folder(settings: Settings) -> Iterator[Finding]:
    """The data folder, who works on it, and whether others may read a login."""
    version = settings.data / "VERSION"
    if not version.exists():
        yield Finding("data folder", "ok", f"{settings.data} is not there yet; `acclimate up` makes it")
    elif (found := version.read_text("utf-8", "replace").strip()) != config.DATA_VERSION:
        hint = "use the version that wrote it, or another data folder"
        yield Finding(
            "data folder", "missing", f"{settings.data} has format {found[:20]!r}, not {config.DATA_VERSION}", hint
        )
    else:
        running = [f"{part} ({who})" for part in _PARTS if (who := locks.holder(settings.data / f"{part}.lock"))]
        yield Finding("data folder", "ok", f"{settings.data}; running: {', '.join(running) or 'nothing'}")
    if settings.file is not None:
        secret = any(holds_login(str(settings.value(name))) for name in ("database", "tracking", "artifacts"))
        if secret and settings.file.stat().st_mode & 0o077:
            hint = f"chmod 600 {settings.file}, or leave the password to the environment"
            yield Finding("config file", "warning", f"{settings.file} names a login, and others may read it", hint)


def database_(settings: Settings) -> Iterator[Finding]:
    """Whether the database answers, its schema, its clock, and whether it belongs with the blobs."""
    if not (is_there("sqlalchemy") and is_there("alembic")):
        return
    from acclimate import database, facts, installation, log, migrations, writability
    from acclimate.checkpoints import LOST, Copies, lacking
    from acclimate.clocks import Clocks
    from acclimate.store import Store
    from acclimate_runners.blobs import blobs_at

    shown = place(settings.database)
    if sqlite_urls.is_one(settings.database) and not sqlite_urls.file(settings.database).exists():
        yield Finding("database", "ok", f"{shown} is not there yet; the first `acclimate api` makes it")
        return
    engine = database.connect(settings.database)
    try:
        with database.refusing(), database.reading(engine) as connection:
            version = migrations.version(connection)
        writability.look(engine)
        if version is None:
            yield Finding("database", "ok", f"{shown} answers and is empty; the first `acclimate api` fills it")
            return
        if version != migrations.HEAD:
            found = f"{shown} has schema {version}, this version reads {migrations.HEAD}"
            yield Finding(
                "database",
                "missing",
                found,
                "back it up with the version that wrote it, stop what uses it, then `acclimate db upgrade`",
            )
            return
        blobs = blobs_at(settings.blobs, endpoint=settings.blobs_endpoint, scratch=settings.work / "blobs")
        store = Store(engine, blobs, clocks=Clocks(behind=settings.clock_behind))
        yield from _clock_offset(settings, store)
        if why := facts.unloggable(store):
            yield Finding(
                "log",
                "warning",
                why,
                "until then whatever would be logged is refused with busy; see docs/operators.md, The clock",
            )
        yield Finding("database", "ok", f"{shown}, schema {version}")
        found_ = installation.check(store, settings)
        yield Finding("installation", "ok", f"{found_.id}, log {found_.origin}; database and blobs belong together")
        copies = Copies.asking(settings, blobs, log.parse_vkey(found_.log))
        with store.snapshot() as tx:
            yield from (Finding("log", "missing", lacking(*each, size=tx.size()), LOST) for each in copies.lost(tx))
    finally:
        engine.dispose()


def _clock_offset(settings: Settings, store: Any) -> Iterator[Finding]:
    if settings.database.startswith("sqlite"):
        return
    from acclimate import facts

    offset = facts.clock_offset(store)
    state: State = "warning" if facts.clock_warning(offset) else "ok"
    hint = "keep both machines in step with NTP; decisions are by the database's clock" if state == "warning" else ""
    yield Finding("database clock", state, f"{offset * 1000:+.0f} ms against this machine's", hint)


def blobs_(settings: Settings) -> Iterator[Finding]:
    """Whether the blobs can be written and read."""
    from acclimate_runners.blobs import blobs_at

    if "://" not in settings.blobs and not Path(settings.blobs).exists():
        yield Finding("blobs", "ok", f"{settings.blobs} is not there yet; the first `acclimate api` makes it")
        return
    blobs = blobs_at(settings.blobs, endpoint=settings.blobs_endpoint, scratch=settings.work / "blobs")
    began = time.monotonic()
    blobs.probe()
    yield Finding(
        "blobs", "ok", f"{settings.blobs}: written, read and removed in {(time.monotonic() - began) * 1000:.0f} ms"
    )


def keys(settings: Settings) -> Iterator[Finding]:
    """The server's keys, and who else may read them."""
    for name, need in (("log.pem", "the API"), ("evaluator.pem", "the dispatcher")):
        path = settings.keys / name
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except OSError:
            if (settings.data / "VERSION").exists() and settings.database.startswith("sqlite"):
                hint = "put it back from the backup: a log keeps its key for good"
                yield Finding(f"key {name}", "warning", f"{path} is not there, and {need} needs it", hint)
            else:
                yield Finding(f"key {name}", "ok", f"{path} is not there; a new installation makes it, {need} needs it")
            continue
        if mode & 0o077:
            hint = f"chmod 600 {path}, and ask yourself who may have read it"
            yield Finding(f"key {name}", "missing", f"{path} has mode {mode:04o}, others may read it", hint)
        else:
            yield Finding(f"key {name}", "ok", f"{path}, mode {mode:04o}")


def ports_(settings: Settings) -> Iterator[Finding]:
    """Ports that are free, or who has them."""
    wanted = {"port": settings.port, "dispatch_port": settings.dispatch_port}
    if not settings.tracking.startswith("http"):
        wanted["mlflow_port"] = settings.mlflow_port
    running = any(locks.holder(settings.data / f"{part}.lock") for part in _PARTS)
    for name, port in wanted.items():
        if port == 0:
            continue
        # `up` shows MLflow's pages to this machine only.
        host = "127.0.0.1" if name == "mlflow_port" else settings.host
        try:
            taken = ports.is_taken(host, port)
        except OSError as error:
            found = f"can't listen on {ports.name(host, port)}: {error.strerror or error}"
            yield Finding(f"port {port}", "missing", found, f"correct `host` or `{name}`")
            continue
        who = ports.who_answers(host, port) if taken else ""
        if not taken:
            yield Finding(f"port {port}", "ok", f"free ({name})")
        elif running:
            yield Finding(f"port {port}", "ok", f"taken, while this data folder's server is running: {who or name}")
        else:
            hint = f"stop it, or choose another port with ACCLIMATE_{name.upper()}"
            # Nobody asked for a default: `up` takes it only where it is free, so another is easily named.
            state: State = "warning" if settings.origins[name] == "default" else "missing"
            yield Finding(f"port {port}", state, f"taken by {who or 'another program'} ({name})", hint)


def mlflow(settings: Settings) -> Iterator[Finding]:
    """Whether MLflow answers where the settings name a server."""
    shown = place(settings.tracking)
    if not settings.tracking.startswith(("http://", "https://")):
        yield Finding("mlflow", "ok", f"{version_of('mlflow') or 'not installed'}, tracking in {shown}")
        return
    try:
        answer = httpx.get(settings.tracking.rstrip("/") + "/health", timeout=3.0, trust_env=False)
        status = "" if answer.status_code == 200 else f"answers {answer.status_code}"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        status = f"does not answer: {type(error).__name__}"
    hint = (
        "`acclimate mlflow` runs one; rounds go on without it, and are written there once it answers" if status else ""
    )
    yield Finding("mlflow", "warning" if status else "ok", f"{shown} {status or 'answers'}", hint)
