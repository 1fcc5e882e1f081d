"""A process's log: it goes on where a file can't begin anew, has one writer, and shows nothing where a line is cut or can't be made."""

import json
import logging
import sys
from pathlib import Path

import live
import pytest

from acclimate import console
from acclimate_competitions.errors import Refusal

SECRET = "geheim"


def test_a_log_file_that_could_not_begin_anew_goes_on_and_tries_again(tmp_path: Path) -> None:
    for name in ("x.log.1", "x.log.2"):
        (tmp_path / name / "in the way").mkdir(parents=True)
    file = console.RotatingFile(tmp_path / "x.log", size=200, keep=2)
    for number in range(20):
        file.write(f"{number:030d}")
    assert len((tmp_path / "x.log").read_text().splitlines()) == 20
    for name in ("x.log.1", "x.log.2"):
        (tmp_path / name / "in the way").rmdir()
        (tmp_path / name).rmdir()
    file.write("last")
    file.close()
    assert (tmp_path / "x.log").read_text() == "last\n" and (tmp_path / "x.log.1").is_file()


def test_two_processes_with_one_log_file_are_refused(tmp_path: Path) -> None:
    first = console.RotatingFile(tmp_path / "x.log", alone=True)
    with pytest.raises(Refusal) as caught:
        console.RotatingFile(tmp_path / "x.log", alone=True)
    assert caught.value.code == "busy" and "ACCLIMATE_LOG_FILE" in caught.value.hint
    first.close()
    console.RotatingFile(tmp_path / "x.log", alone=True).close()


def test_what_is_cut_or_cannot_be_written_shows_no_secret() -> None:
    url = f"postgresql://u:very{SECRET}password@h/d "
    for more in range(19_930, 20_080):
        try:
            raise RuntimeError(url + "p" * more)
        except RuntimeError:
            record = logging.LogRecord("x", logging.ERROR, "f", 1, "m", (), sys.exc_info())
        assert SECRET not in console.formatted(record)
    written: list[str] = []
    handler = console.Handler()
    handler.write = written.append  # type: ignore[method-assign]
    handler.emit(logging.LogRecord("some.library", logging.WARNING, "f", 1, "to %d", (url,), None))
    (one,) = [json.loads(line) for line in written]
    assert one["logger"] == "some.library" and SECRET not in written[0]


def test_what_a_caller_sends_makes_no_long_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with live.serve(tmp_path) as server:
        for path in ("/v1/rounds/" + "A" * 30_000, "/v1/rounds/" + "a" * 119, "/" + "B" * 30_000):
            server.anyone().get(path)
    lines = [console.formatted(record) for record in caplog.records if record.name == "acclimate.requests"]
    assert len(lines) >= 3 and max(map(len, lines)) < 1000
