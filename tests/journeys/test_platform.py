"""The platform as others use it: `acclimate up` and its parts as real processes, whole rounds against them, and what kills them.

An undisturbed round is the measure: whatever is killed, wherever it runs, the ranking has the same digest.
"""

import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from buckets import Place
from sites import again, beside, busy, leading, shared, site, up

from acclimate import verify
from acclimate_competitions.phases import Phase

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The ranking's digest of a round that nothing disturbs."""
    with up(tmp_path_factory.mktemp("undisturbed"), "--runner", "local") as made, made.players() as players:
        return players.play()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_up_ended_in_every_phase_and_started_again_gives_the_same_ranking(
    tmp_path: Path, undisturbed: str, number: int
) -> None:
    with up(tmp_path, "--runner", "local") as made, made.players() as players:
        disturb = lambda: again(made, number)  # noqa: E731
        players.gather()
        players.create(window=timedelta(seconds=90))
        disturb()  # draft
        players.seal()
        disturb()  # sealed
        players.acknowledge()
        players.wait(Phase.OPEN)
        sending = threading.Thread(target=players.submit)
        sending.start()
        disturb()  # open, while submissions arrive
        sending.join()
        assert len(players.submitted) == len(players.people)
        players.wait(Phase.CLOSED)
        busy(players, "prepare")
        disturb()  # closed, in the midst of a preparation
        players.wait(Phase.PREPARED)
        disturb()
        players.release()
        disturb()  # released or opened
        players.wait(Phase.OPENED)
        busy(players, "evaluate")
        disturb()  # in the midst of an evaluation
        players.wait(Phase.EVALUATED)
        disturb()
        players.publish()
        disturb()  # published, MLflow perhaps not told yet
        assert players.ranking() == undisturbed
        assert verify.verify(players.bundle()).failed == ()


def test_up_on_postgresql_and_s3_killed_in_the_midst_of_a_preparation_gives_the_same_ranking(
    tmp_path: Path, undisturbed: str, postgresql_url: str, s3_place: Place
) -> None:
    environment = shared(tmp_path, postgresql_url, s3_place.blobs, s3_place.server.endpoint)
    # These two as an operator may give them: the parts hear of them from `up`.
    words = [f"--{name}={environment.pop(f'ACCLIMATE_{name.upper()}')}" for name in ("database", "blobs")]
    with up(tmp_path, "--runner", "local", *words, **environment) as made:
        # What asks for invitations is not told by `up`.
        made.environment |= {"ACCLIMATE_DATABASE": postgresql_url, "ACCLIMATE_BLOBS": s3_place.blobs}
        with made.players() as players:
            players.send(window=timedelta(seconds=30))
            busy(players, "prepare")
            again(made, signal.SIGKILL)
            assert players.finish() == undisturbed
            assert verify.verify(players.bundle()).failed == ()
        # Nothing of it lies in the data folder.
        assert not (made.data / "acclimate.db").exists() and not (made.data / "blobs").exists()


def test_two_apis_and_two_dispatchers_on_postgresql_and_s3_give_the_same_ranking(
    tmp_path: Path, undisturbed: str, postgresql_url: str, s3_place: Place
) -> None:
    environment = shared(tmp_path, postgresql_url, s3_place.blobs, s3_place.server.endpoint)
    with site(tmp_path, urls=2, **environment) as made:
        beside(made, apis=2, dispatchers=2, runner="local")
        with made.players() as players:
            players.send(window=timedelta(seconds=30))
            busy(players, "prepare")
            name = leading(made)
            made.parts.pop(name).end(signal.SIGKILL)  # the other takes over
            made.parts["api-1"].end(signal.SIGKILL)
            made.parts["api-1"].start()
            made.ready()
            assert players.finish() == undisturbed
            assert verify.verify(players.bundle()).failed == ()
