"""The questions of docs/analysts.md: their queries, and what they print of two drawn rounds in a real MLflow.

`PYTHONPATH=tests/journeys python tests/journeys/questions.py` writes the outputs into the page anew.
"""

import contextlib
import io
import re
import shlex
import sqlite3
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from projected import made
from typer.testing import CliRunner

from acclimate import tracking
from acclimate.cli.main import app

PAGE = Path(__file__).parents[2] / "docs/analysts.md"
ADDRESS = "http://127.0.0.1:5000"
ROUNDS = ("2027-1", "2027-2")
TREES = ("alder", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine", "rowan", "willow")
EXAMPLES = 120
SHOWN = 14
"""Lines of an output that the page shows at most; longer ones end with …"""
_BLOCK = re.compile(r"^```(python|console|sql)\n(.*?)^```\n(\n```text\n(.*?)^```\n)?", re.M | re.S)


@dataclass(frozen=True)
class Query:
    """A query of the page: under which question it stands, in what language, its text, and the output shown after it."""

    question: str
    language: str
    text: str
    output: str


def section(page: str) -> tuple[int, int]:
    """Where the questions stand on the page."""
    start = page.index("\n## Ten questions\n")
    return start, page.index("\n## ", start + 1)


def queries(page: str) -> list[Query]:
    """The queries, in the page's order."""
    start, end = section(page)
    found = []
    for part in re.split(r"^### ", page[start:end], flags=re.M)[1:]:
        for block in _BLOCK.finditer(part):
            language, text, _, output = block.groups()
            found.append(Query(part.partition("\n")[0], language, text, output or ""))
    return found


def publish(folder: Path) -> str:
    """The two rounds in an MLflow of their own; its tracking URI."""
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    for seed, name in enumerate(ROUNDS, start=1):
        skill = {tree: 0.9 - 0.05 * place for place, tree in enumerate(TREES)} | {"untrained": 0.05}
        data = made(entrants=skill, examples=EXAMPLES, losses=3, failed="willow", seed=seed)
        round_ = replace(data, name=name, round=f"digits-{name}-0123456789ab")
        tracking.publish_round(uri, folder / "artifacts", round_)
    return uri


def output(query: Query, uri: str, round_name: str = ROUNDS[0]) -> str:
    """What a query prints."""
    if query.language == "sql":
        with contextlib.closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as connection:
            cursor = connection.execute(query.text)
            rows = [[column[0] for column in cursor.description], *cursor.fetchall()]
        return "".join("|".join("" if cell is None else str(cell) for cell in row) + "\n" for row in rows)
    if query.language == "console":
        line = query.text.removeprefix("$ acclimate ").replace("\\\n", " ").replace(ADDRESS, uri)
        done = CliRunner().invoke(app, shlex.split(line), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(
            compile(query.text, str(PAGE), "exec"),
            {"tracking_uri": uri, "competition": "digits", "round_name": round_name},
        )
    return printed.getvalue()


def shown(printed: str) -> str:
    """An output as the page has it."""
    lines = [line.rstrip() for line in printed.splitlines()]
    if len(lines) > SHOWN:
        lines = [*lines[:SHOWN], "…"]
    return "".join(f"{line}\n" for line in lines)


def with_outputs(page: str, uri: str) -> str:
    """The page as it must be."""
    start, end = section(page)
    outputs = iter([shown(output(query, uri)) for query in queries(page)])

    def written(block: re.Match[str]) -> str:
        return f"```{block[1]}\n{block[2]}```\n\n```text\n{next(outputs)}```\n"

    parts = re.split(r"(?=^### )", page[start:end], flags=re.M)
    return page[:start] + "".join(_BLOCK.sub(written, part) for part in parts) + page[end:]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(with_outputs(PAGE.read_text("utf-8"), publish(Path(folder))), "utf-8")
