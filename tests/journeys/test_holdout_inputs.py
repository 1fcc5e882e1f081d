"""What evaluations are given of an opened holdout, and the opened holdout itself: kept, and what happens where they are lost."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import dispatching
import live as staging
import pytest
from dispatching import rows, states, step_until
from live import Live, Staged
from sqlalchemy import select

from acclimate import backups, garbage, holdout_inputs, log
from acclimate.dispatch import Dispatcher
from acclimate.service import identity, release
from acclimate.store import events, openings
from acclimate_runners.local import LocalRunner
from acclimate_runners.runner import Runner


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Live]:
    with staging.serve(tmp_path) as running:
        yield running


def collect(server: Live) -> None:
    """`acclimate blobs gc` long after everything that lies there was stored."""
    for each in server.store.blobs.listing():
        os.utime(server.store.blobs.path(each.digest), (0, 0))  # type: ignore[attr-defined]
    verifier = log.parse_vkey(identity.load(server.settings, server.store).installation.log)
    garbage.collect(server.store, server.settings, verifier, older_than=3600.0, dry=False, progress=lambda *_: None)


def later(server: Live, may: threading.Event) -> Dispatcher:
    """A dispatcher that finds no runner before it may."""

    def factory() -> Runner:
        assert may.wait(60)
        return LocalRunner(server.settings.work, slots=2)

    return Dispatcher(server.store, server.store.blobs, server.settings, factory)


def to_opened(server: Live, folder: Path) -> Staged:
    staged = staging.open_round(server, folder)
    staging.submit_model(staged, staging.enter(staged, server.actor("ada")), seed=1)
    server.clock.set(staged.fields["closes"], seconds=61)
    with dispatching.dispatcher(server) as running:
        step_until(running, lambda: server.phase(staged.round) == "prepared")
    dispatching.give_shares(staged)
    return staged


def opening(server: Live) -> dict[str, str]:
    with server.store.snapshot() as tx:
        return dict(tx.execute(select(openings.c.files)).scalar_one())


def spoil(server: Live, digest: str, *, how: str) -> bytes:
    path = server.store.blobs.path(digest)  # type: ignore[attr-defined]
    whole = bytes(path.read_bytes())
    path.unlink()
    if how == "corrupt":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    return whole


def test_garbage_may_be_collected_in_each_phase_of_a_round_and_the_round_goes_on(server: Live, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    _, submission = dispatching.send(staged, "ada", seed=1)
    # 1. While its check waits; 2. before it is prepared.
    for kind, done in (("check", "open"), ("prepare", "prepared")):
        may = threading.Event()
        with later(server, may) as running:
            step_until(running, lambda kind=kind: states(server, kind) == {"pending"})  # type: ignore[misc]
            collect(server)
            may.set()
            step_until(running, lambda: dispatching.state_of(server, submission)[0] == "accepted")
            server.clock.set(staged.fields["closes"], seconds=61)
            step_until(running, lambda done=done: server.phase(staged.round) in (done, "closed"))  # type: ignore[misc]
            if kind == "prepare":
                step_until(running, lambda: server.phase(staged.round) == "prepared")
    collect(server)
    dispatching.give_shares(staged)
    may = threading.Event()
    with later(server, may) as running:
        # 3. While evaluations wait: what they will be given is named, and stays.
        step_until(running, lambda: states(server, "evaluate") == {"pending"})
        files = opening(server)
        made = {name: digest for name, digest in files.items() if name.startswith(release.INPUTS)}
        assert set(made) == {"inputs/tint", "inputs/size"} and not set(made.values()) & {
            files["tint.parquet"],
            files["size.parquet"],
        }
        with server.store.snapshot() as tx:
            assert release.holdout_files(tx, staged.round).keys() == files.keys() - made.keys()
            assert not set(made.values()) & backups.named(tx)
        collect(server)
        assert all(server.store.blobs.has(digest) for digest in files.values())
        # 4. Lost and spoilt all the same, it is made again, and costs nobody a try.
        spoil(server, made["inputs/tint"], how="gone")
        may.set()
        step_until(
            running, lambda: "running" in states(server, "evaluate") or "committed" in states(server, "evaluate")
        )
        step_until(running, lambda: server.phase(staged.round) == "evaluated")
    collect(server)
    assert opening(server) == files and all(server.store.blobs.has(digest) for digest in files.values())


def test_spoilt_inputs_are_made_again_and_cost_no_try(server: Live, tmp_path: Path) -> None:
    staged, may = to_opened(server, tmp_path), threading.Event()
    with later(server, may) as running:
        step_until(running, lambda: states(server, "evaluate") == {"pending"})
        digest = opening(server)["inputs/tint"]
        spoil(server, digest, how="corrupt")
        may.set()
        step_until(running, lambda: server.phase(staged.round) == "evaluated")
    with server.store.snapshot() as tx:
        told = tx.execute(select(events.c.event, events.c.code).where(events.c.kind == "evaluate")).all()
    assert ("given_back", "blob_corrupt") in told and not {event for event, _ in told} & {"again", "blocked"}
    assert {row.attempts for row in rows(server, "evaluate")} == {1}
    server.store.blobs.check(digest)


@pytest.mark.parametrize("how", ["corrupt", "gone"])
def test_a_lost_opened_holdout_is_told_and_the_round_goes_on_once_it_is_back(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(holdout_inputs, "AGAIN_AFTER", (0.1, 0.5))
    staged = to_opened(server, tmp_path)
    with dispatching.dispatcher(server) as running:
        step_until(running, lambda: server.phase(staged.round) == "opened")
    digest = opening(server)["tint.parquet"]
    whole = spoil(server, digest, how=how)
    with dispatching.dispatcher(server) as running:
        step_until(running, lambda: bool(server.organizer().get(staged.path).json()["problem"]))
        # 1. Its organizer is told which blob and what to do, everybody else that it is so.
        problem = server.organizer().get(staged.path).json()["problem"]
        assert problem["code"] in ("blob_unknown", "blob_corrupt")
        assert problem["sentence"].startswith("tint.parquet of the opened holdout can't be used on this server: ")
        assert digest in problem["sentence"] and "put that blob back, from a backup" in problem["sentence"]
        told = server.anyone().get(staged.path).json()["problem"]["sentence"]
        assert told == "tint.parquet of the opened holdout can't be used on this server"
        # 2. It goes on by itself.
        assert server.store.blobs.put_bytes(whole) == digest
        step_until(running, lambda: server.phase(staged.round) == "evaluated")
    assert server.organizer().get(staged.path).json()["problem"] is None
