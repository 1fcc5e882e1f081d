"""What the demo says while the models are made, which takes minutes where the machine is busy."""

import io
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from acclimate import config, demo, demo_servers, demo_talk
from acclimate_competitions.errors import Refusal


def told(*, terminal: bool) -> tuple[list[str], float]:
    said: list[str] = []
    console = Console(file=io.StringIO(), force_terminal=terminal)
    with Progress(console=console, disable=True) as bar:
        task = bar.add_task("models made", total=None)
        tell = demo._counting(bar, task, say=said.append, console=console)
        tell(1, 3, "")
        tell(2, 3, "alder")
        tell(3, 3, "birch")
        return said, bar.tasks[0].completed


def test_where_no_bar_is_seen_each_model_is_a_line() -> None:
    assert told(terminal=False) == (["  alder is made (2 of 3)", "  birch is made (3 of 3)"], 3)


def test_where_the_bar_is_seen_it_is_enough() -> None:
    assert told(terminal=True) == ([], 3)


def test_a_demo_builds_its_competition_wherever_it_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside a folder that has the competition's name, such as the one that the organizers' page has people build."""
    (tmp_path / demo.COMPETITION).mkdir()
    (tmp_path / demo.COMPETITION / "build.py").write_text("raise SystemExit('of somebody else')\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    demo._build(tmp_path / "data" / "competition", said.append)
    assert (tmp_path / "data" / "competition" / "competition.toml").is_file() and len(said) == 1


def test_what_a_command_of_the_demo_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as caught:
        demo_servers.answered("competition", "build", str(tmp_path), "--out", str(tmp_path / "out"))
    refusal = caught.value
    assert refusal.code == "file_unreadable" and "\n" not in refusal.sentence and str(tmp_path) in refusal.sentence
    with pytest.raises(Refusal) as caught:
        demo_servers.answered("competition", "nonsense")
    assert caught.value.code == "job_failed" and "acclimate competition nonsense ended with 2" in caught.value.sentence


def test_a_demo_and_a_server_share_no_folder(tmp_path: Path) -> None:
    config.claim(config.load(tmp_path / "server", environ={}))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(Refusal) as caught:
        demo._lock(tmp_path / "server")
    assert caught.value.code == "config_invalid" and "a server's data folder" in caught.value.sentence
    assert sorted(tmp_path.rglob("*")) == before
    demo._lock(tmp_path / "demo").close()
    with pytest.raises(Refusal) as caught:
        config.claim(config.load(tmp_path / "demo", environ={}))
    assert caught.value.code == "config_invalid" and "the folder of a demo" in caught.value.sentence
    config.claim(config.load(tmp_path / "demo" / "server", environ={}))


@pytest.mark.parametrize("terminal", [False, True])
def test_where_no_bar_is_seen_long_work_is_told_by_tenths(terminal: bool) -> None:
    said: list[str] = []
    play = object.__new__(demo.Play)
    play.console, play.say = Console(file=io.StringIO(), force_terminal=terminal), said.append
    play._said = defaultdict(set)
    half = {"state": "running", "progress": 0.5}
    for ada, bea in (
        (0.0, half),
        (0.2, half),
        (0.2, half),
        (1.0, half),
        (1.0, {"state": "committed", "progress": 1.0}),
    ):
        first = {"state": "committed" if ada == 1.0 else "running", "progress": ada}
        play._tell("prepared alike", [{"entrant": "ada", **first}, {"entrant": "bea", **bea}])
    wanted = ["20 % of the work", "30 % of the work", "70 % of the work", "ada", "bea"]
    assert said == ([] if terminal else [f"  {one} is prepared alike" for one in wanted])


def test_where_no_bar_is_seen_no_wait_is_silent_for_long() -> None:
    for terminal in (False, True):
        said: list[str] = []
        now = [0.0]
        console = Console(file=io.StringIO(), force_terminal=terminal)
        talk = demo_talk.Talk(said.append, console=console, clock=lambda now=now: now[0])
        talk.say("begun")
        for now[0] in range(60):
            talk.still("waiting")
        assert said == ["begun"] + ([] if terminal else ["waiting"] * int(59 // demo_talk.QUIET))
    assert demo_talk.QUIET <= 15


def test_an_open_round_says_until_when_and_that_its_close_is_due() -> None:
    closes = datetime(2027, 3, 1, 5, 11, 40, tzinfo=UTC)
    assert "stays open until 05:11:40 UTC" in demo_talk.open_still(closes, closes - timedelta(seconds=1))
    assert "the close was due 05:11:40 UTC" in demo_talk.open_still(closes, closes + timedelta(seconds=90))
