"""One round's fault keeps no other from being finished, and what a step stumbles over is said once."""

import contextlib
import json
from pathlib import Path
from typing import Any

import live as staging
import pytest
import tiny
from live import Live
from sqlalchemy import select
from terms import Placed, driven, server, written

from acclimate import (
    admission,
    config,
    database,
    dispatch,
    leader,
)
from acclimate.store import rounds
from acclimate_competitions.errors import Refusal

__all__ = ["server"]


def test_a_round_that_cannot_be_read_keeps_no_other_from_being_finished(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = staging.open_round(server, tmp_path, name="good")
    server.clock.now = staging.START
    monkeypatch.setattr(tiny, "DEFINITION", tiny.DEFINITION.replace('title = "', 'title = "Other '))
    bad = staging.create(server, tmp_path, name="bad")
    server.clock.set(good.fields["closes"], seconds=61)
    with server.store.snapshot() as tx:
        definition = tx.execute(select(rounds.c.definition).where(rounds.c.id == bad.round)).scalar_one()
    server.store.blobs.path(definition).unlink()
    finished: list[str] = []
    with Placed(server, tmp_path / "own", finish_round=lambda name, _: finished.append(name)) as running:
        assert driven(running, lambda: finished == [good.round] and written(server)[2] == 1) == set()
        for _ in range(5):
            running.step()
        # What has nothing to finish is not looked at again before it has a new record.
        finisher = running._term._leader._finisher  # type: ignore[union-attr]
        assert finisher is not None and finisher._due == {} and finisher._changed == {bad.round}
    assert finished == [good.round]
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["round"] for line in said if line["event"] == "not finished"] == [bad.round]


def test_a_database_that_is_busy_is_waited_for_once_and_not_for_each_round(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = staging.open_round(server, tmp_path)
    server.clock.set(staged.fields["closes"], seconds=61)
    with server.store._writer, monkeypatch.context() as patch, pytest.raises(Refusal) as refused:
        patch.setattr(database, "WAIT_SECONDS", 0.1)
        server.tick()
    assert refused.value.code == "busy"
    assert server.tick() == ["RoundClosed", "PreparationFinished"]


def test_what_is_said_of_each_step_is_said_once_for_each_wording_and_not_kept_for_ever(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    staged = staging.open_round(server, tmp_path)
    staging.submit_model(staged, staging.enter(staged, server.actor("ada")), seed=1)
    server.clock.set(staged.fields["closes"], seconds=61)
    monkeypatch.setattr(admission, "_closing_checkpoint", lambda *_: None)
    monkeypatch.setattr(leader, "_PLAN_EVERY", 0.0)

    def events(name: str) -> list[dict[str, Any]]:
        said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        return [line for line in said if line["event"] == name]

    with Placed(server, tmp_path / "own") as running:
        for _ in range(3):
            running.step()
        # 1. A checkpoint takes a moment, which is not worth a word.
        assert events("waiting") == []
        monkeypatch.setattr(admission, "_SOON", 0.0)
        for _ in range(3):
            running.step()
        assert [line["round"] for line in events("waiting")] == [staged.round]
        # 2. A problem that names something else each time.
        assert running._term is not None and running._term._leader is not None
        for number in range(100):
            for _ in range(2):
                running._term._leader._lead.say_once("no runner", reason=f"connection {number} was refused")
        assert len(events("no runner")) == 100 and len(running._term._leader._lead.said) == 2


def test_each_installation_has_a_namespace_of_its_own_on_a_shared_cluster(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acclimate_runners import cluster

    asked: list[dict[str, Any]] = []

    def noted(*_: Any, **given: Any) -> None:
        asked.append(given)
        raise ImportError

    monkeypatch.setattr(cluster, "RayRunner", noted)
    with staging.serve(tmp_path / "other") as other:
        for live in (server, other):
            given = {"database": live.settings.database, "blobs": live.settings.blobs, "runner": "ray"}
            given["server_keys"] = str(live.settings.keys)
            settings = config.load(live.settings.data, environ={}, given=given)
            with contextlib.suppress(Refusal):
                dispatch.factory_of(settings, live.store)()
    first, second = (given["namespace"] for given in asked)
    assert first != second and all(name.startswith("acclimate-") and len(name) > 30 for name in (first, second))
