"""Results through MLflow's own server: what is published over HTTP, or into PostgreSQL and S3, reads the same as from SQLite and a folder."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import buckets
import engines
import httpx
import projected
import pytest
from waiting import WITHIN

from acclimate import tracking
from acclimate.tracking import RoundData
from acclimate_competitions.errors import Refusal

pytest.importorskip("mlflow")
pytest.importorskip("pandas")

PATIENCE = WITHIN
READERS: dict[str, Callable[..., Any]] = {
    "ranking": tracking.ranking,
    "scores": tracking.scores,
    "preparations": tracking.preparations,
    "examples": tracking.examples,
}


@contextmanager
def serving(data: Path, **settings: str) -> Iterator[str]:
    """`acclimate mlflow` with these settings; its address."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ACCLIMATE_", "MLFLOW_"))}
    log = data.with_suffix(".err")
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "acclimate", "mlflow", "--data", str(data), "--port", "0", "--stop-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=stderr,
            stderr=stderr,
            env={**clean, **{f"ACCLIMATE_{name.upper()}": value for name, value in settings.items()}},
        )
    assert process.stdin is not None
    with process.stdin:
        deadline = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None, log.read_text("utf-8")
            assert time.monotonic() < deadline, log.read_text("utf-8")
            found = re.search(r"MLflow on (\S+)", log.read_text("utf-8"))
            try:
                if found and httpx.get(f"{found[1]}/health", trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        yield found[1]
    assert process.wait(PATIENCE) == 0, log.read_text("utf-8")


@pytest.fixture(scope="module")
def data() -> RoundData:
    return projected.made(entrants={"amber-fox": 0.8, "untrained": 0.1}, examples=12, losses=5)


@pytest.fixture(scope="module")
def directly(data: RoundData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an analyst reads where everything lies in SQLite and a folder."""
    folder = tmp_path_factory.mktemp("directly")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    tracking.publish_round(uri, folder / "artifacts", data)
    return {name: read(uri, "digits", data.name) for name, read in READERS.items()}


def same(uri: str, data: RoundData, expected: dict[str, Any]) -> None:
    for name, read in READERS.items():
        assert read(uri, "digits", data.name).equals(expected[name]), name
    assert list(tracking.rounds(uri)["round"]) == [data.round]


@pytest.mark.slow
def test_over_http_it_is_the_same(data: RoundData, directly: dict[str, Any], tmp_path: Path) -> None:
    results = f"sqlite:///{tmp_path / 'results.db'}"
    with serving(tmp_path / "data", tracking=results, artifacts=str(tmp_path / "kept")) as url:
        tracking.publish_preparations(url, None, data)
        tracking.publish_round(url, None, data)
        same(url, data, directly)
        # The server keeps the artifacts, in the place of its settings.
        assert len(list((tmp_path / "kept").rglob("examples.parquet"))) > 4
        tracking.publish_round(url, None, data)
        same(url, data, directly)
    # The same database without the server: all but what only the server can fetch.
    assert tracking.scores(results, "digits", data.name).equals(directly["scores"])


def test_a_server_that_does_not_answer_is_named_at_once(data: RoundData) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://somebody:s3cret@127.0.0.1:{nobody.getsockname()[1]}"
        for call in (lambda: tracking.rounds(url), lambda: tracking.publish_round(url, None, data)):
            with pytest.raises(Refusal) as caught:
                call()
            assert caught.value.code == "server_unreachable"
            assert "127.0.0.1" in caught.value.sentence
            assert "s3cret" not in caught.value.sentence


@pytest.mark.slow
def test_in_postgresql_and_s3_it_is_the_same(
    data: RoundData,
    directly: dict[str, Any],
    tmp_path: Path,
    postgresql: engines.Server,
    s3_place: buckets.Place,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Published through a server that has them, and by a dispatcher that has them itself."""
    places = {"artifacts": f"{s3_place.blobs}/served", "blobs_endpoint": s3_place.server.endpoint}
    url = postgresql.fresh()
    with serving(tmp_path / "data", tracking=url, **places) as server:
        tracking.publish_round(server, None, data)
        same(server, data, directly)
    served = [key for key in s3_place.keys() if key.endswith("examples.parquet")]
    assert len(served) > 4
    assert tracking.scores(url, "digits", data.name).equals(directly["scores"])
    postgresql.drop(url)

    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", s3_place.server.endpoint)
    url = postgresql.fresh()
    tracking.publish_round(url, f"{s3_place.blobs}/direct", data)
    same(url, data, directly)
    assert len([key for key in s3_place.keys() if key.startswith("direct/")]) > len(served)
