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
_OF_MACROS = frozenset({"caller", "varargs", "kwargs"})
_OF_BLOCKS = frozenset({"self", "super"})
"""What a template's own parts are given without naming it."""
_NAMED = 20
"""Columns that a refusal names."""
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

    A name that the template itself asks for, by `is defined` or with a default, may be missing. One that it sets anywhere counts as set: whether
    that is so where it is read, filling it tells.

    Args:
        task: whose template.
        columns: of a split; the target's among them can't be named.

    Raises:
        Refusal: definition_invalid.
    """
    from jinja2 import nodes

    named: set[str] = set()
    known = set(columns) - {_HIDDEN} | set(_environment().globals)
    for node in _parsed(task):
        match node:
            case nodes.Name(name=name, ctx="load"):
                named.add(name)
            case nodes.Name(name=name):
                known.add(name)
            case nodes.Macro(name=name):
                known |= {name, *_OF_MACROS}
            case nodes.CallBlock():
                known |= _OF_MACROS
            case nodes.Block():
                known |= _OF_BLOCKS
            case nodes.For():
                known.add("loop")
            case nodes.Test(name="defined" | "undefined", node=nodes.Name(name=name)):
                known.add(name)
            case nodes.Filter(name="default" | "d", node=nodes.Name(name=name)):
                known.add(name)
    if lacking := sorted(named - known):
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


def _parsed(task: Task) -> "list[jinja2.nodes.Node]":
    """All of the template's parts, not compiled: a compiler does sums of constants, and one of them could hold up a server.

    Raises:
        Refusal: definition_invalid.
    """
    from jinja2 import nodes

    with _read(task) as environment:
        parts = list(_walked(environment.parse(task.prompt)))
    for node in parts:
        if isinstance(node, nodes.Filter) and node.name not in environment.filters:
            raise _misfit(task, f"no filter is named {node.name!r}", {})
        if isinstance(node, nodes.Test) and node.name not in environment.tests:
            raise _misfit(task, f"no test is named {node.name!r}", {})
    return parts


def _walked(tree: "jinja2.nodes.Node") -> "Iterator[jinja2.nodes.Node]":
    """A template and all its parts, however deeply they are nested."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        todo.extend(node.iter_child_nodes())


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
    for node in _walked(environment.parse(task.prompt)):
        if not isinstance(node, others):
            continue
        word = {"FromImport": "from"}.get(type(node).__name__, type(node).__name__.lower())
        raise _misfit(task, f"it takes in another template ({word}), and there is none beside it", {})


def _misfit(task: Task, why: str, row: Mapping[str, Any]) -> Refusal:
    names = [name for name in row if name != _HIDDEN]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    there = (
        f"; the columns that it may name here: {', '.join(name[:200] for name in names[:_NAMED])}{more}"
        if names
        else ""
    )
    prompt = task.prompt if len(task.prompt) <= 200 else f"{task.prompt[:200]}…"
    sentence = f"task {task.name}: the prompt {prompt!r} does not fit the rows: {why}{there}"
    return Refusal("definition_invalid", sentence, hint=HINT)
