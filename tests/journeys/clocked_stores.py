"""A store of each engine, with a clock that a test sets, and what is asked of its refusals."""

import engines
import pytest
import rounds_made
from live import Clock

from acclimate import config
from acclimate.service import identity
from acclimate.store import Store
from acclimate_competitions.errors import Refusal


@pytest.fixture
def embedded(tmp_path):
    """The settings of a data folder with its own SQLite database."""
    return config.load(tmp_path / "data", environ={})


@pytest.fixture(params=engines.ENGINES)
def settings(request, tmp_path):
    """The settings of a data folder, with a database of each engine."""
    given = {"database": request.getfixturevalue("postgresql_url")} if request.param == "postgresql" else {}
    return config.load(tmp_path / "data", environ={}, given=given)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(settings, clock):
    opened = Store.open(settings, clock=clock)
    yield opened
    opened.close()


@pytest.fixture
def signer(settings, store):
    return identity.begin(settings, store).signer


@pytest.fixture
def request_(store, tmp_path):
    """A signed RoundDefined, its definition in the blobs."""
    return rounds_made.request(store.blobs, tmp_path / "made")


def refused(code, call, *arguments, **named):
    with pytest.raises(Refusal) as caught:
        call(*arguments, **named)
    assert caught.value.code == code, caught.value
    return caught.value
