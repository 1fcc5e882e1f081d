from collections import deque
from pathlib import Path

import pytest

from acclimate_competitions.errors import Refusal
from acclimate_runners.runner import Status
from acclimate_runners.watch import Patience, Transfers, Watched


class Told:
    """An attempt that says what it was told to, and that it was cancelled once it was."""

    def __init__(self) -> None:
        self.status, self.cancelled, self.obeys = Status("running", what="fetching inputs"), 0, True

    def poll(self) -> Status:
        if self.cancelled and self.obeys:
            return Status("failed", code="cancelled", reason="cancelled", log="sha256:ab")
        return self.status

    def cancel(self) -> None:
        self.cancelled += 1


class World:
    def __init__(self, **patience: float) -> None:
        self.now, self.told = 0.0, Told()
        self.transfers = Transfers(self)  # type: ignore[arg-type]
        self.during = deque[Path]()
        self.watched = Watched(
            self.told,  # type: ignore[arg-type]
            self.transfers,
            machine="m",
            patience=Patience(**patience),
            clock=lambda: self.now,
        )

    def after(self, seconds: float, **status: int | str) -> Status:
        """What is said so many seconds later, looked at each ten."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 10.0)
            last = self.watched.poll()
            if last.state != "running":
                return last
        self.told.status = Status("running", **status) if status else self.told.status  # type: ignore[arg-type]
        return self.watched.poll()

    def get(self, digest: str, to: Path) -> None:
        raise Refusal("no_space", "full")

    def has(self, digest: str) -> bool:
        assert self.after(590.0).state == "running"
        return self.after(30.0).code == "hung"

    def size(self, digest: str) -> int:
        return 2000 << 20

    def check(self, digest: str) -> None:
        assert self.after(1990.0).state == "running"
        assert self.after(60.0).code == "hung"

    def put(self, path: Path) -> str:
        self.during.append(path)
        # Nothing is heard of it while it is on its way.
        assert self.after(900.0).state == "running"
        raise Refusal("no_space", "full")


def test_ten_minutes_without_progress_are_a_hang_from_the_start_on() -> None:
    world = World()
    assert world.after(590.0).state == "running" and not world.told.cancelled
    status = world.after(30.0)
    assert (status.state, status.code, status.log, status.machine) == ("failed", "hung", "sha256:ab", "m")
    assert "no progress for 6" in status.reason and "fetching inputs" in status.reason


def test_slow_steps_are_no_hang_until_five_times_the_median() -> None:
    world = World()
    for step in range(1, 8):
        world.after(300.0, step=step, total=100, what="digit")
    said = world.after(1400.0)
    assert said.state == "running" and said.silent == 1400.0
    assert world.after(200.0).code == "hung"


def test_steps_of_many_words_have_the_time_of_five_steps_and_work_without_steps_that_of_five_words() -> None:
    world = World()
    for word in range(1, 20):
        # As an evaluation: batch by batch, all of them one step.
        assert world.after(400.0, step=0, total=3, what="digit", words=word).state == "running"
    assert world.after(1900.0).state == "running"
    assert world.after(200.0).code == "hung"
    world = World()
    for word in range(1, 60):
        assert world.after(100.0, step=word // 10, total=100, what="digit", words=word).state == "running"
    assert world.after(4500.0).state == "running"
    assert world.after(700.0).code == "hung"


def test_time_in_which_nobody_looked_counts_at_most_a_minute() -> None:
    world = World()
    for _ in range(9):
        # Whoever watches was stopped, and perhaps so was what it watches.
        world.now += 3600.0
        assert world.watched.poll().state == "running"


def test_what_cannot_be_ended_is_given_up() -> None:
    world = World(end=15.0)
    world.told.obeys = False
    world.after(620.0)
    assert world.told.cancelled == 1
    status = world.after(20.0)
    assert (status.state, status.code) == ("failed", "hung") and world.told.cancelled == 1


def test_a_large_file_on_its_way_has_the_time_it_needs_and_the_full_store_is_told_from_the_full_machine(
    tmp_path: Path,
) -> None:
    world, large = World(), tmp_path / "large"
    with large.open("wb") as stream:
        stream.truncate(2000 << 20)
    with pytest.raises(Refusal):
        world.transfers.get("sha256:ab", tmp_path / "to")
    assert not world.transfers.store_full
    with pytest.raises(Refusal):
        world.transfers.put(large)
    assert world.transfers.store_full and world.during == deque([large])


def test_a_large_blob_that_is_re_hashed_has_the_time_it_needs_and_a_question_has_not() -> None:
    World().transfers.check("sha256:ab")
    assert World().transfers.has("sha256:ab")
