"""A dispatcher killed at every point at which something is half done: whoever comes next finishes it, once."""

from pathlib import Path
from typing import Any

import chaos
import pytest
import tiny
from chaos import Play, killed

from acclimate import config
from acclimate_competitions.errors import Refusal

ENTRANTS = 3


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return chaos.undisturbed(tmp_path_factory.mktemp("undisturbed"), entrants=ENTRANTS)


def test_nobody_can_meet_a_failpoint_by_accident(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="ACCLIMATE_FAILPOINT: there is no such setting"):
        config.load(tmp_path, environ={"ACCLIMATE_FAILPOINT": "claimed"})
    with pytest.raises(Refusal, match="ACCLIMATE_FAILPOINT_KILLS: there is no such setting"):
        config.load(tmp_path, environ={"ACCLIMATE_FAILPOINT_KILLS": "this-process"})


def chained(play: Play, points: list[str], *, machines: bool, tracked: bool = False, to: str = "evaluated") -> None:
    """One dispatcher after the other is killed at its point; the last one ends the round.

    Args:
        play: an open round.
        points: in the order in which they are met.
        machines: whether each is on a machine of its own, so that it must wait for the lease of the one before.
        tracked: whether they project the round into MLflow.
        to: the phase in which the last one leaves it.
    """
    for number, point in enumerate(points):
        one = play.start(f"machine-{number}" if machines else "one", at=point, tracked=tracked)
        play.until(lambda one=one: one.process.poll() is not None)  # type: ignore[misc]
        assert killed(one), (point, play.phase, one.said)
    play.start("one", tracked=tracked)
    play.until(lambda: play.phase == to)


def test_killed_three_times_the_smallest_round_comes_out_whole(tmp_path: Path) -> None:
    """With an outcome noted, in a commit, and in an opening; what comes out is compared by the slow ones, too."""
    with Play.begun(tmp_path, entrants=2) as play:
        chained(play, ["noted", "committing", "opening"], machines=False)
        assert play.wrong() == []
        # Four led, one after the other, and nothing was committed twice.
        done = [row.attempt for row in play.events("committed")]
        assert len(done) == len(set(done)) and {row.epoch for row in play.rows()} == {1, 2, 3, 4}


FEW = ["settled", "committing", "moving", "ended", "noted", "committed", "opening", "committing:2"]


@pytest.mark.slow
def test_killed_where_it_hurts_most_the_round_comes_out_the_same(tmp_path: Path, expected: dict[str, Any]) -> None:
    with Play.begun(tmp_path, entrants=ENTRANTS) as play:
        chained(play, FEW, machines=False)
        assert play.wrong() == []
        assert play.outcome() == expected


CHECKS = ["claimed", "started", "ended", "stored", "noted", "done", "settled", "committing", "committed"]
PREPARATIONS = ["claimed", "started:2", "ended", "stored", "noted:2", "done", "committing", "committed"]
ALL = [
    *CHECKS,
    "moving",
    "moved",
    *PREPARATIONS,
    "moving",
    "moved",
    "opened",
    "opening",
    *PREPARATIONS,
    "moving",
    "moved",
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machines", [False, True], ids=["one-machine", "a-machine-each"])
def test_killed_at_every_point_of_every_phase_the_round_comes_out_the_same(
    tmp_path: Path, expected: dict[str, Any], machines: bool
) -> None:
    with Play.begun(tmp_path, entrants=ENTRANTS) as play:
        chained(play, ALL, machines=machines)
        assert play.wrong() == []
        assert play.outcome() == expected


@pytest.mark.slow
def test_a_standby_goes_on_where_a_killed_leader_was_and_makes_nothing_again_that_is_with_the_blobs(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    with Play.begun(tmp_path, entrants=0) as play:
        # The fourth outcome is a preparation's. The lease is longer than a busy machine may hold up whoever renews it.
        first = play.start("first", at="noted:4", lease=60.0)
        first.await_("leading")
        play.close(ENTRANTS, lambda: killed(first))
        second = play.start("second", lease=60.0)
        play.until(lambda: killed(first))
        play.live.clock.forward(seconds=61)
        noted = {name.split("/")[1] for name in play.live.store.blobs.notes("attempts/") if "manifest" in name}
        play.until(lambda: play.phase == "evaluated")
        assert second.events("leading")[0]["epoch"] == 2
        assert play.wrong() == []
        assert play.outcome() == expected
        # 1. What the first one has left with the blobs was taken as it is: no child was given that job again.
        begun = {path.parent.parent.name for path in (tmp_path / "second" / "work" / "attempts").glob("*/*/job.json")}
        assert len(noted) >= 4 and begun and not {name for name in begun if name.removeprefix("sha256-") in noted}
        # 2. The first thing that the second one wrote is that the first one's tries are lost; nothing of the first came after it.
        order = [(row.epoch, row.event) for row in play.rows()]
        began = next(number for number, (epoch, _) in enumerate(order) if epoch == 2)
        assert {epoch for epoch, _ in order[:began]} == {1} and {epoch for epoch, _ in order[began:]} == {2}
        assert order[began] == (2, "given_back")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_while_it_publishes_and_tells_mlflow_there_is_one_ranking_and_each_run_once(
    tmp_path: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setattr(tiny, "DEFINITION", tiny.DEFINITION.replace('publish = "manual"', 'publish = "auto"'))
    with Play.begun(tmp_path, entrants=ENTRANTS) as play:
        points = ["ranked", "publishing", "finishing", "marking"]
        chained(play, points, machines=False, tracked=True, to="published")
        play.until(lambda: "published" in play.marks())
        assert play.wrong() == []
        assert play.outcome() == expected
        runs = play.tracked()
        assert runs and set(runs.values()) == {1}
