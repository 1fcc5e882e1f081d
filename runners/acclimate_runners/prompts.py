"""A task's prompt template filled with rows, and whether it can be: before a round is fixed, not when an entrant first tries it."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate_competitions import holdouts, splits
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.tasks import Task

if TYPE_CHECKING:
    import jinja2
    import pyarrow as pa

_HIDDEN = "target"
"""The column that no prompt may name."""
_ROWS = 1024
"""Rows that are filled at once."""
HINT = "mend the prompt, or write the splits with the column that it names; then: acclimate competition check FOLDER"


def filled(task: Task, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The task's template filled with each row's columns; the target can't be named in it.

    Raises:
        Refusal: definition_invalid, where the template names a column that a row lacks, or can't be filled for another reason.
    """
    fill = _filler(task)
    try:
        return [fill(row) for row in rows]
    # A template is a small program: it divides by zero, or calls what can't be called.
    except Exception as error:
        raise _misfit(task, str(error), rows[0] if rows else {}) from error


def require_template(task: Task) -> None:
    """Refuse a template that fits no rows whatever: it does not parse, or takes in other templates. It is parsed, not filled.

    Raises:
        Refusal: definition_invalid.
    """
    _parsed(task)


def require_columns(task: Task, columns: Collection[str]) -> None:
    """Refuse a template that names none of these columns, without filling it: a server runs no template of others.

    A name that the template itself asks for, by `is defined` or with a default, may be missing.

    Args:
        task: whose template.
        columns: of a split; the target's among them can't be named.

    Raises:
        Refusal: definition_invalid.
    """
    from jinja2 import meta, nodes

    environment, tree = _environment(), _parsed(task)
    asked = [test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    asked += [found.node for found in tree.find_all(nodes.Filter) if found.name in ("default", "d") and found.node]
    may_lack = {node.name for node in asked if isinstance(node, nodes.Name)} | set(environment.globals)
    there = set(columns) - {_HIDDEN}
    # What looks for the names is a compiler, too: without constants there are no sums to do.
    for constant in tree.find_all(nodes.Const):
        constant.value = None
    if lacking := sorted(meta.find_undeclared_variables(tree) - may_lack - there):
        raise _misfit(task, f"{lacking[0]!r} is undefined", dict.fromkeys(columns))


def check(folder: Path, competition: Competition, *, only: Sequence[str] = splits.ALL) -> None:
    """Fill the prompts of all tasks with all rows of a built competition, whose splits are sound; each split's first misfit is told.

    Args:
        folder: of the competition.
        competition: its definition.
        only: the splits to look at; one that is not there is left out.

    Raises:
        Refusal: definition_invalid, with a line for each split in `problems`.
    """
    found: dict[str, Refusal] = {}
    for split in only:
        for name, table in holdouts.tables_of(folder, competition, split).items():
            task = competition.task(name)
            try:
                for rows in _batches(table):
                    filled(task, rows)
                # Of a branch that no row takes, too: the server looks at names only.
                require_columns(task, table.column_names)
            except Refusal as refusal:
                found[f"{name}/{split}.parquet"] = refusal
    if not found:
        return
    first = next(iter(found.values()))
    problems = [f"{name}: {refusal.sentence}" for name, refusal in found.items()]
    raise Refusal("definition_invalid", first.sentence, hint=HINT, problems=problems if len(problems) > 1 else ())


def _batches(table: "pa.Table") -> "Sequence[list[dict[str, Any]]]":
    plain = [field.name for field in table.schema if not splits.is_blob(field.type)]
    return [batch.to_pylist() for batch in table.select(plain).to_batches(max_chunksize=_ROWS)]


def _filler(task: Task) -> Callable[[Mapping[str, Any]], str]:
    """What fills the template with a row.

    Raises:
        Refusal: definition_invalid.
    """
    with _read(task) as environment:
        template = environment.from_string(task.prompt)
    return lambda row: template.render({name: value for name, value in row.items() if name != _HIDDEN})


def _parsed(task: Task) -> "jinja2.nodes.Template":
    """The template's parts, not compiled: a compiler does sums of constants, and one of them could hold up a server.

    Raises:
        Refusal: definition_invalid.
    """
    from jinja2 import nodes

    with _read(task) as environment:
        tree = environment.parse(task.prompt)
    for node in tree.find_all((nodes.Filter, nodes.Test)):
        what, known = ("filter", environment.filters) if isinstance(node, nodes.Filter) else ("test", environment.tests)
        if node.name not in known:
            raise _misfit(task, f"no {what} is named {node.name!r}", {})
    return tree


@contextlib.contextmanager
def _read(task: Task) -> "Iterator[jinja2.Environment]":
    """An environment to read a task's template in, which needs no other one; what goes wrong there is told as a misfit."""
    from jinja2 import TemplateError

    environment = _environment()
    try:
        _require_alone(task, environment)
        yield environment
    # RecursionError: it is nested too deeply. OverflowError, MemoryError: a compiler does the sums of constants.
    except (TemplateError, RecursionError, ArithmeticError, ValueError, TypeError, MemoryError) as error:
        raise _misfit(task, str(error) or type(error).__name__, {}) from error


def _environment() -> "jinja2.Environment":
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


def _require_alone(task: Task, environment: "jinja2.Environment") -> None:
    from jinja2 import nodes

    others = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
    for node in environment.parse(task.prompt).find_all(others):
        word = {"FromImport": "from"}.get(type(node).__name__, type(node).__name__.lower())
        raise _misfit(task, f"it takes in another template ({word}), and there is none beside it", {})


def _misfit(task: Task, why: str, row: Mapping[str, Any]) -> Refusal:
    names = [name for name in row if name != _HIDDEN]
    there = f"; the columns that it may name here: {', '.join(names)}" if names else ""
    prompt = task.prompt if len(task.prompt) <= 200 else f"{task.prompt[:200]}…"
    sentence = f"task {task.name}: the prompt {prompt!r} does not fit the rows: {why}{there}"
    return Refusal("definition_invalid", sentence, hint=HINT)
