from pathlib import Path

import pytest

from acclimate_runners import fitness
from acclimate_runners.code import code_digest
from acclimate_runners.fitness import SetAside


def test_a_machine_is_left_alone_after_the_second_time_and_after_each_time_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aside = SetAside()
    aside.note("bad")
    aside.note("unlucky")
    assert aside.now() == ()
    aside.note("bad")
    assert aside.now() == ("bad",)
    monkeypatch.setattr(fitness, "_ASIDE", 0.0)
    aside.note("bad")
    assert aside.now() == ()
    monkeypatch.undo()
    aside.note("bad")
    assert aside.now() == ("bad",)


def test_what_makes_a_machine_unfit(tmp_path: Path) -> None:
    assert fitness.unfit(tmp_path / "work", code_digest(), machine="m") is None
    other = fitness.unfit(tmp_path / "work", "sha256:ab", machine="m")
    assert other is not None and (other.code, other.unfit) == ("runner_failed", "m") and "other code" in other.reason
    (tmp_path / "file").write_text("in the way")
    nowhere = fitness.unfit(tmp_path / "file" / "work", code_digest(), machine="m")
    assert nowhere is not None and nowhere.unfit == "m" and "node_work" in nowhere.reason
