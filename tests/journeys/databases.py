"""Databases for tests of what stands upon them: settings and a store of each engine, and what is asked of a refusal or a command."""

import subprocess
import sys

import pytest
from sqlalchemy import insert
from typer.testing import CliRunner

from acclimate import config
from acclimate.cli.main import app
from acclimate.service import identity
from acclimate.store import (
    Store,
)
from acclimate_competitions.errors import Refusal


@pytest.fixture
def settings(tmp_path, database_url):
    return config.load(tmp_path / "data", environ={}, given={"database": database_url})


@pytest.fixture
def store(settings):
    opened = Store.open(settings)
    yield opened
    opened.close()


@pytest.fixture
def on_postgresql(tmp_path, postgresql_url):
    return config.load(tmp_path / "data", environ={}, given={"database": postgresql_url})


def refused(code, call, *arguments, **named):
    with pytest.raises(Refusal) as caught:
        call(*arguments, **named)
    assert caught.value.code == code, caught.value
    assert caught.value.hint or code in ("request_invalid", "busy"), caught.value
    return caught.value


def acclimate(*arguments):
    """The command line, not waited for."""
    return subprocess.Popen(
        [sys.executable, "-m", "acclimate", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments):
    """The command line, in this process: exit code, stdout, stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    refusal = result.exception
    if isinstance(refusal, Refusal):
        return 1, result.stdout, f"{result.stderr}{refusal.sentence}\n{refusal.hint}"
    assert refusal is None or isinstance(refusal, SystemExit), refusal
    return result.exit_code, result.stdout, result.stderr


def add(store, table, row):
    with store.transaction() as tx:
        tx.execute(insert(table), row)


def another(tmp_path, name="another"):
    """The settings of another installation."""
    found = config.load(tmp_path / name, environ={})
    store = Store.open(found)
    identity.begin(found, store)
    store.close()
    return found
