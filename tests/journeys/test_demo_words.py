"""What the demo says while the models are made, which takes minutes where the machine is busy."""

import io

from rich.console import Console
from rich.progress import Progress

from acclimate import demo


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
