"""What lies between an evaluation's end and its record: scoring beside the leader's step, and a commit together with others."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import worlds
from sqlalchemy import select
from worlds import Beginning, World

from acclimate import commits, scoring
from acclimate import stages as lifecycle
from acclimate.store import stages, submissions
from acclimate_competitions import bounds
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase
from acclimate_runners.blobs import FolderBlobs

ENTRANTS = 3


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Beginning:
    return worlds.begin(tmp_path_factory.mktemp("beginning"), entrants=ENTRANTS)


@pytest.fixture(scope="module")
def undisturbed(beginning: Beginning, tmp_path_factory: pytest.TempPathFactory) -> str:
    with closing(World(beginning, tmp_path_factory.mktemp("undisturbed"))) as world:
        world.finish()
        return world.ranking()


@pytest.fixture
def world(beginning: Beginning, tmp_path: Path) -> Iterator[World]:
    with closing(World(beginning, tmp_path / "world")) as made:
        yield made


def evaluations(world: World) -> dict[str, set[str]]:
    """Entrant -> states of its evaluations."""
    query = select(submissions.c.entrant, stages.c.state).join(stages, stages.c.submission == submissions.c.id)
    found: dict[str, set[str]] = {}
    with world.store.snapshot() as tx:
        for row in tx.execute(query.where(stages.c.kind == "evaluate")):
            found.setdefault(row.entrant, set()).add(row.state)
    return found


def test_blobs_that_do_not_answer_while_an_evaluation_is_scored_cost_no_try(
    world: World, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, refused = scoring.score, list[str]()

    def hindered(assignment: Any, *given: Any, **more: Any) -> Any:
        if assignment.entrant == "team-1" and len(refused) < 3:
            refused.append(assignment.entrant)
            raise Refusal("blobs_unreachable", "the store of blobs does not answer")
        return score(assignment, *given, **more)

    monkeypatch.setattr(scoring, "score", hindered)
    world.finish()
    world.check()
    assert len(refused) == 3 and world.ranking() == undisturbed
    assert all(name.endswith("/1") for name in world.cluster.started)


def test_what_can_not_be_committed_keeps_nothing_back_that_was_to_be_committed_with_it(
    world: World, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated, groups = commits._evaluated, list[int]()
    commit = commits.commit

    def counted(store: Any, identity: Any, done: Any) -> None:
        groups.append(len(done))
        commit(store, identity, done)

    def refusing(tx: Any, identity: Any, done: Any) -> Any:
        if done.held.assignment.entrant == "team-1":
            raise Refusal("guard_failed", "it was to be refused")
        return evaluated(tx, identity, done)

    monkeypatch.setattr(commits, "commit", counted)
    monkeypatch.setattr(commits, "_evaluated", refusing)
    process = world.process()
    for _ in range(100):
        process.step()
        world.others()
        world.clock.forward(seconds=1)
        if evaluations(world) == {"team-0": {"committed"}, "team-1": {"blocked"}, "team-2": {"committed"}}:
            break
    else:
        raise AssertionError(world.told())
    assert max(groups) > 1
    world.check()
    # An operator has it tried again: what comes out is the same.
    monkeypatch.setattr(commits, "_evaluated", evaluated)
    process.stop()
    with world.store.transaction() as tx:
        for key in tx.execute(select(stages.c.key).where(stages.c.state == "blocked")).scalars().all():
            lifecycle.release(tx, key, epoch=1)
    world.processes.clear()
    world.finish()
    assert world.ranking() == undisturbed


def test_scores_that_were_collected_as_garbage_before_their_commit_are_made_again(
    world: World, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = world.process()
    while "verifying" not in {state for states in evaluations(world).values() for state in states}:
        process.step()
        world.others()
        world.clock.forward(seconds=1)
    term = process.dispatcher._term
    assert term is not None and term._leader is not None
    scorer, blobs = term._leader._settling.scorer, world.store.blobs
    assert isinstance(blobs, FolderBlobs) and scorer.idle and scorer._made
    for _, made in scorer._made.values():
        assert not isinstance(made, Exception)
        for digest in {entry["scores"] for entry in made}:
            blobs.path(digest).unlink()
    # As if they had been waiting for longer than that.
    monkeypatch.setattr(scoring, "FRESH", -1.0)
    while world.state().phase is not Phase.EVALUATED:
        process.step()
        world.others()
        world.clock.forward(seconds=1)
    world.check()
    assert world.ranking() == undisturbed


def enlarged(table: pa.Table) -> pa.Table:
    """Texts as a tokenizer with one very long token makes them: they compress well, and no reader takes them."""
    text = "x" * ((bounds.LEAST // table.num_rows) + 1)
    return table.set_column(table.schema.names.index("text"), "text", pa.array([text] * table.num_rows))


SPOILT: dict[str, Callable[[pa.Table], pa.Table | None]] = {
    "its rows take": enlarged,
    "columns": lambda table: table.drop_columns(["text"]),
    "predictions, asked for were": lambda table: table.slice(1),
    "predictions are of": lambda table: table.set_column(0, "entrant", pa.array(["team-0"] * table.num_rows)),
    "has two predictions": lambda table: table.take([0, *range(table.num_rows - 1)]),
    "Parquet magic bytes": lambda table: None,
}


@pytest.mark.parametrize("said", SPOILT)
def test_predictions_that_nobody_can_read_are_their_entrants_outcome_and_the_round_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    predicted = worlds._predicted

    def spoiling(job: Any, blobs: Any, files: dict[str, str]) -> dict[str, Any]:
        found = predicted(job, blobs, files)
        if job.entrant == "team-1":
            for name in files:
                sink, table = pa.BufferOutputStream(), SPOILT[said](worlds.table_of(blobs, files[name]))
                if table is not None:
                    pq.write_table(table, sink, compression="zstd")
                files[name] = blobs.put_bytes(sink.getvalue().to_pybytes() if table is not None else b"no table at all")
        return found

    monkeypatch.setattr(worlds, "_predicted", spoiling)
    world.finish()
    world.check()
    assert evaluations(world) == {"team-0": {"committed"}, "team-1": {"failed"}, "team-2": {"committed"}}
    with world.store.snapshot() as tx:
        query = select(stages.c.reason).where(stages.c.state == "failed")
        reasons = set(tx.execute(query).scalars())
    assert reasons and all(r.startswith("its predictions can't be used: ") and said in r for r in reasons), reasons
