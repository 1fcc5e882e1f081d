"""The ten questions of docs/analysts.md: every query runs on tracked rounds, and the page shows what it prints."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import questions
from chosen_ports import free_port
from waiting import WITHIN

from acclimate import tracking

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
QUERIES = questions.queries(questions.PAGE.read_text("utf-8"))


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return questions.publish(tmp_path_factory.mktemp("questions"))


def test_there_are_ten_questions_each_with_a_query_and_its_output() -> None:
    asked = list(dict.fromkeys(query.question for query in QUERIES))
    assert [question.partition(". ")[0] for question in asked] == [str(number) for number in range(1, 11)]
    assert {query.language for query in QUERIES} == {"python", "console", "sql"}
    for query in QUERIES:
        assert query.output.strip(), query.question


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_shows_what_each_query_prints(uri: str) -> None:
    page = questions.PAGE.read_text("utf-8")
    # Where this fails, `python tests/journeys/questions.py` writes the page anew: look at what changed.
    assert questions.with_outputs(page, uri) == page


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
def test_the_address_of_the_leaderboard_shows_it_in_mlflows_own_page(uri: str, tmp_path: Path) -> None:
    (query,) = [query for query in QUERIES if "searchFilter" in query.text]
    path = questions.output(query, uri).strip()
    ranking = tracking.ranking(uri, "digits", questions.ROUNDS[0])
    ranked = ranking[~ranking["baseline"]]["entrant"].tolist()
    port = free_port()
    settings = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    log = tmp_path / "mlflow.log"
    with log.open("w") as stream:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"],
            cwd=tmp_path, env={**os.environ, **settings}, stdout=stream, stderr=stream, start_new_session=True,
        )  # fmt: skip
    try:
        address, until = f"http://127.0.0.1:{port}", time.monotonic() + WITHIN
        while not _answers(address):
            assert server.poll() is None and time.monotonic() < until, log.read_text("utf-8")
            time.sleep(0.2)
        assert _shown(address + path, tmp_path) == ranked
        assert _shown(address + path.replace("orderByAsc=true", "orderByAsc=false"), tmp_path) == ranked[::-1]
    finally:
        os.killpg(server.pid, 15)
        server.wait(WITHIN)


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _shown(address: str, folder: Path) -> list[str]:
    """The runs that the page names, from above."""
    line = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--window-size=1600,1400",
        "--virtual-time-budget=60000", "--dump-dom", address,
    ]  # fmt: skip
    page = subprocess.run(line, check=True, capture_output=True, text=True, timeout=300).stdout
    return re.findall(rf">({'|'.join(questions.TREES)})<", page)
