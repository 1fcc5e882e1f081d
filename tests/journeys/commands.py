"""`acclimate …` in a test's own process, exactly as the installed script runs it."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from acclimate.cli import main


class Ran(NamedTuple):
    """What a command did: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def acclimate(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command, with no setting of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith("ACCLIMATE_"):
            monkeypatch.delenv(name)

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["acclimate", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main.run()
        out, err = capfd.readouterr()
        return Ran(end.value.code if isinstance(end.value.code, int) else 0, out, err)

    return run


def done(ran: Ran) -> Ran:
    assert ran.code == 0, ran.err
    return ran


def refused(ran: Ran, code: str) -> str:
    """A refusal for people on stderr, and for programs on stdout; its sentence."""
    assert ran.code == 1, ran
    assert "Traceback" not in ran.err
    document = ran.json["error"]
    assert document["code"] == code, document
    assert f"error: {document['sentence']}\n" in ran.err
    return str(document["sentence"])
