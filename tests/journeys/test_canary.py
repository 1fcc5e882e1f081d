"""Nothing of a holdout lies in clear anywhere in a server's data folder before the custodians release it.

A round whose holdout holds words that stand nowhere else is driven to `prepared`, by real children; then every file is searched: the
database and its journal, blobs, work folders, keys, reports, MLflow. After the release the same search finds them, so it can.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import live as staging
import pyarrow as pa
import pytest
import tiny
from dispatching import give_shares, send, state_of, step_until
from live import Live, Staged
from unpacked import dump, parquet

from acclimate import publisher
from acclimate.dispatch import Dispatcher
from acclimate_competitions import digests, tables
from acclimate_runners.local import LocalRunner

WORDS = ("zanzibar-example", "quetzalcoatl", "xylophagous-cluster")
"""In example, input and cluster of each holdout row, and nowhere else."""
ANSWER = "okapi"
"""A choice, so the definition names it; only the holdout has it as a target."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    choices = 'choices = ["red", "green", "blue"]'
    monkeypatch.setattr(tiny, "DEFINITION", tiny.DEFINITION.replace(choices, choices.replace("]", f', "{ANSWER}"]')))
    monkeypatch.setattr(tiny, "WORDS", [*tiny.WORDS, ANSWER])
    with staging.serve(tmp_path) as running:
        yield running


def marked(staged: Staged) -> None:
    """Put the words into the holdout, before it is sealed."""
    example, word, cluster = WORDS
    for task in tiny.TASKS:
        path = staged.folder / f"splits/{task}/holdout.parquet"
        rows = tables.read(path).to_pydict()
        count = len(rows["example"])
        rows["example"] = [f"{example}-{task}-{number}" for number in range(count)]
        rows["input"] = [f"{text} {word}" for text in rows["input"]]
        rows["cluster"] = [f"{cluster}-{number // 2}" for number in range(count)]
        if task == "tint":
            rows["target"][0] = ANSWER
        tables.write(pa.table(rows), path)


def traces(data: Path) -> dict[str, set[str]]:
    """File in the data folder -> which of the words it holds, in clear, as Parquet values or in a database's rows."""
    found: dict[str, set[str]] = {}
    for path in sorted(path for path in data.rglob("*") if path.is_file() and not path.is_symlink()):
        raw = path.read_bytes()
        values = [row for table in parquet(raw) for row in map(str, table.to_pylist())]
        text = "\n".join([raw.decode("latin-1"), *values, *dump(path, raw)]).lower()
        words = {word for word in WORDS if word in text}
        words |= {ANSWER for row in values if f"'target': '{ANSWER}'" in row}
        if words:
            found[path.relative_to(data).as_posix()] = words
    return found


def words_in(found: dict[str, set[str]], *folders: str) -> set[str]:
    return {word for name, words in found.items() for word in words if name.startswith(folders)}


def test_no_word_of_the_holdout_is_in_clear_before_the_release(
    server: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, said = server.settings.data, list[str]()

    def told(event: str) -> bool:
        said.extend(capsys.readouterr())
        return f'"{event}"' in "".join(said)

    staged = staging.create(server, tmp_path)
    marked(staged)
    staging.rehearse(staging.seal(staged))
    server.clock.set(staged.fields["opens"])
    assert server.tick() == ["RoundOpened"]
    submitted = [send(staged, name, seed=seed)[1] for name, seed in {"ada": 1, "bea": 2}.items()]
    runner = partial(LocalRunner, server.settings.work, slots=2)
    finish = partial(publisher.finish, server.store, server.settings)
    with Dispatcher(server.store, server.store.blobs, server.settings, runner, finish_round=finish) as running:
        step_until(running, lambda: {state_of(server, s)[0] for s in submitted} == {"accepted"})
        server.clock.set(staged.fields["closes"])
        step_until(running, lambda: server.phase(staged.round) == "prepared")
        # 1. Prepared, and the preparations are in MLflow: not a word anywhere, though every kind of place has files.
        step_until(running, lambda: told("finished"))
        places = {path.relative_to(data).parts[0] for path in data.rglob("*") if path.is_file()}
        assert {"acclimate.db", "acclimate.db-wal", "blobs", "work", "keys", "mlflow.db", "mlartifacts"} <= places
        assert traces(data) == {}
        assert not any(word in "".join(said).lower() for word in WORDS)
        assert tracked_runs(server, "prepare") == 2 * 2 * 3 and tracked_runs(server, "evaluate") == 0
        assert not status(staged)["tracked"]
        # 2. Opened and evaluated: the search finds them, and MLflow still has none of it.
        give_shares(staged)
        step_until(running, lambda: server.phase(staged.round) == "evaluated")
        for _ in range(5):
            running.step()
        opened = traces(data)
        assert words_in(opened, "blobs/") == {*WORDS, ANSWER}
        assert words_in(opened, "mlflow.db", "mlartifacts", "keys", "reports") == set()
        assert tracked_runs(server, "evaluate") == 0 and not status(staged)["tracked"]
        # 3. Published: now MLflow has the results, and says so.
        publish(staged)
        step_until(running, lambda: status(staged)["tracked"])
        assert tracked_runs(server, "evaluate") > 0
        assert WORDS[0] in words_in(traces(data), "mlartifacts")


def status(staged: Staged) -> dict:
    return staged.live.anyone().get(staged.path).json()


def tracked_runs(server: Live, role: str) -> int:
    with contextlib.closing(sqlite3.connect(server.settings.data / "mlflow.db")) as connection:
        query = "SELECT count(*) FROM tags WHERE key = 'acclimate.role' AND value = ?"
        return int(connection.execute(query, [role]).fetchone()[0])


def publish(staged: Staged) -> None:
    organizer = staged.live.organizer()
    document = organizer.get(f"{staged.path}/ranking").json()
    fields = {"ranking": digests.of_json(document), "policy": staged.fields["policy"], "reason": ""}
    body = {"record": organizer.sign("RankingPublished", staged.round, **fields), "ranking": document}
    assert organizer.post(f"{staged.path}/ranking", body).status_code == 200
