"""Settings and the data folder: where each value came from, and what a folder of something else, or without room, is refused for."""

import os
import resource
import sqlite3
import stat
from pathlib import Path

import pyarrow as pa
import pytest
from clocked_stores import embedded, refused
from sqlalchemy import insert, make_url

from acclimate import config, database, doctor_places, sqlite_urls
from acclimate.cli import database as cli_database
from acclimate.service import identity
from acclimate.store import Store, log_checkpoints
from acclimate_competitions import tables

__all__ = ["embedded"]


def test_every_setting_says_where_it_came_from(tmp_path):
    file = tmp_path / "acclimate.toml"
    file.write_text('port = 9000\nrunner = "local"\nhost = "0.0.0.0"\n', "utf-8")
    environ = {"ACCLIMATE_CONFIG": str(file), "ACCLIMATE_PORT": "9001", "ACCLIMATE_TOKEN": "acc_x", "HOME": "/"}
    found = config.load(tmp_path / "d", environ=environ, given={"host": "::1", "slots": None})
    assert (found.port, found.runner, found.host, found.slots) == (9001, "local", "::1", 0)
    assert found.database == f"sqlite:///{tmp_path / 'd' / 'acclimate.db'}"
    assert {name: found.origins[name].split()[0] for name in ("port", "runner", "host", "slots")} == {
        "port": "environment",
        "runner": "file",
        "host": "argument",
        "slots": "default",
    }


def test_all_problems_of_the_settings_are_told_at_once(tmp_path):
    file = tmp_path / "acclimate.toml"
    file.write_text('colour = "red"\nslots = -1\n', "utf-8")
    environ = {"ACCLIMATE_PORTT": "1", "ACCLIMATE_PORT": "eighty", "ACCLIMATE_ORIGIN": "two words"}
    refusal = refused("config_invalid", config.load, tmp_path, file=file, environ=environ)
    assert len(refusal.problems) == 5
    for word in ("ACCLIMATE_PORTT", "colour", "slots", "'eighty'", "'two words'"):
        assert any(word in problem for problem in refusal.problems), word


def test_the_environment_may_name_the_data_folder(tmp_path):
    assert config.load(environ={"ACCLIMATE_DATA": str(tmp_path / "x")}).data == tmp_path / "x"


def test_places_are_shown_without_turns(tmp_path, monkeypatch):
    """As somebody types them who restores beside the folder that is lost."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = config.load(Path("../new"), environ={"ACCLIMATE_BLOBS": "../new/../blobs"})
    assert (found.data, found.blobs) == (tmp_path / "new", str(tmp_path / "blobs"))
    assert found.database == f"sqlite:///{tmp_path / 'new' / 'acclimate.db'}"
    # Behind a link `..` is another folder than the name before it.
    (tmp_path / "there" / "inside").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "there" / "inside")
    assert config.load(tmp_path / "link" / ".." / "d", environ={}).data.resolve() == tmp_path / "there" / "d"


HOSTILE = [
    "p%41",
    "50%",
    "100%25",
    "a?b",
    "#1",
    "two words",
    "é ü 数",
    "it's",
    'a"b',
    "a+b",
    "a&b=c",
    ":memory:",
    "u:p@h",
    "[x]",
    "\udcff",
]
"""Names of folders in which a URL would read something else."""


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_a_data_folder_is_named_all_of_it_lies_there(tmp_path, name):
    (tmp_path / "pA").mkdir()
    folder = tmp_path / name
    settings = config.load(folder, environ={})
    Store.open(settings).close()
    assert sqlite_urls.file(settings.database) == folder / "acclimate.db" and (folder / "acclimate.db").is_file()
    assert [one for one in tmp_path.iterdir() if one != folder] == [tmp_path / "pA"] and not any(
        (tmp_path / "pA").iterdir()
    )
    if name != "\udcff":
        # As an operator writes it, from what `acclimate config` shows.
        given = {f"ACCLIMATE_{one.upper()}": settings.value(one) for one in ("database", "tracking")}
        again = config.load(folder, environ=given)
        assert (again.database, again.tracking) == (settings.database, settings.tracking)
    assert cli_database.existing(folder, file=None, database=None, blobs=None).database == settings.database
    assert "schema" in next(doctor_places.database_(settings)).found


@pytest.mark.parametrize("given", ["a b/x.db", "p%41/x.db", "~/x y.db", "/a b/é.db?timeout=3"])
def test_a_url_of_sqlite_is_read_by_one_rule(tmp_path, given):
    for name in ("database", "tracking"):
        read = config.load(tmp_path, environ={f"ACCLIMATE_{name.upper()}": f"sqlite:///{given}"}).value(name)
        assert sqlite_urls.file(read) == Path.cwd() / Path(given.partition("?")[0].replace("%41", "A")).expanduser()
        assert make_url(read).database == str(sqlite_urls.file(read)) and read.endswith(given[-3:])


@pytest.mark.parametrize("url", ["mysql://x/y", "sqlite:///:memory:", "sqlite://", "acclimate.db"])
def test_a_database_this_version_does_not_speak_is_refused(tmp_path, url):
    refused("config_invalid", config.load, tmp_path, environ={"ACCLIMATE_DATABASE": url})
    if url.startswith(("mysql", "sqlite:///")):
        refused("config_invalid", database.connect, url)


@pytest.mark.parametrize("other", [b"0\n", b"\xff\x00", b""])
def test_a_folder_of_another_version_is_refused_and_left_alone(embedded, other):
    Store.open(embedded).close()
    (embedded.data / "VERSION").write_bytes(other)
    refused("data_version", Store.open, embedded)
    assert (embedded.data / "VERSION").read_bytes() == other


def test_a_database_without_a_version_file_is_refused(embedded):
    embedded.data.mkdir()
    (embedded.data / "acclimate.db").touch()
    refused("data_version", Store.open, embedded)


def test_a_database_of_another_schema_is_refused(embedded):
    Store.open(embedded).close()
    with sqlite3.connect(embedded.data / "acclimate.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    refused("data_version", Store.open, embedded)


def test_a_data_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    refused("config_invalid", Store.open, config.load(tmp_path / "file", environ={}))


def test_server_keys_are_made_once_and_only_their_owner_reads_them(embedded):
    opened = Store.open(embedded)
    first, second = identity.begin(embedded, opened), identity.begin(embedded, opened)
    assert (first.vkey, first.evaluator) == (second.vkey, second.evaluator)
    for name in ("log.pem", "evaluator.pem"):
        assert stat.S_IMODE((embedded.keys / name).stat().st_mode) == 0o600
    (embedded.keys / "log.pem").chmod(0o644)
    refused("key_refused", identity.begin, embedded, opened)
    opened.close()


@pytest.mark.parametrize("apart", [False, True])
def test_only_the_owner_reads_what_a_server_keeps(tmp_path, apart):
    given = {"blobs": str(tmp_path / "elsewhere/blobs"), "database": f"sqlite:///{tmp_path}/a.db"} if apart else {}
    found = config.load(tmp_path / "new/data", environ={}, given=given)
    before = os.umask(0o022)
    try:
        opened = Store.open(found)
        opened.blobs.put_bytes(b"weights")
        with opened.transaction() as tx:
            tx.execute(insert(log_checkpoints), {"size": 1, "note": "", "at": ""})
        file = Path(found.database.removeprefix("sqlite:///"))
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in file.parent.glob(f"{file.name}*")}
        opened.close()
    finally:
        os.umask(before)
    assert len(modes) == 3 and set(modes.values()) == {0o600}
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (found.data, Path(found.blobs))] == [0o700, 0o700]


def test_a_folder_that_exists_keeps_its_mode(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o750)
    Store.open(config.load(shared, environ={})).close()
    assert stat.S_IMODE(shared.stat().st_mode) == 0o750


def test_a_table_for_which_there_is_no_room_is_a_refusal(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    table = pa.table({"example": [str(n) for n in range(10_000)]})
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        refused("no_space", tables.write, table, tmp_path / "table.parquet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    tables.write(table, tmp_path / "table.parquet")


def test_every_setting_is_documented_with_its_default():
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text("utf-8")
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert set(rows) == {"data", *config.SETTINGS}
    for name, setting in config.SETTINGS.items():
        default = setting.default(Path("DATA"))
        shown = "(empty)" if default in ("", None, ()) else f"`{default}`"
        assert f"| {shown} |" in rows[name] and setting.meaning.split(":")[0] in rows[name].replace("`", ""), name
