import contextlib
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from acclimate.cli.main import app
from acclimate_competitions import definition, splits, tables
from acclimate_competitions.errors import Refusal
from acclimate_runners import prompts

TASK = definition.load(definition.shipped("digits")).tasks[0]
ROW = {"example": "e1", "input": "a b", "target": "d1"}
WRONG = [
    ("{{ nope }}", "'nope' is undefined"),
    ("{{ target }}", "'target' is undefined"),
    ("{{ input.__class__.__mro__ }}", "unsafe"),
    ('{% include "/etc/passwd" %}', "it takes in another template (include)"),
    ('{% from "x" import y %}{{ y }}', "it takes in another template (from)"),
    ("{{ 1 // 0 }}{{ input }}", "division"),
    ("{{ input() }}", "not callable"),
    ("{{ input", "unexpected end of template"),
    ("{{ input | nofilter }}", "nofilter"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A built competition of one task."""
    text = (definition.shipped("digits") / "competition.toml").read_text("utf-8")
    first, last = text.index('[[tasks]]\nname = "parity"'), text.index("[preparation]")
    (tmp_path / "competition.toml").write_text(text[:first] + text[last:], "utf-8")
    for number, split in enumerate(splits.REQUIRED):
        path = tmp_path / "splits" / "digit" / f"{split}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        names = [f"{4 * number + row}" for row in range(4)]
        columns = {
            "example": names,
            "input": [f"<digit> p{name}" for name in names],
            "target": ["d1", "d2"] * 2,
            "cluster": [f"image-{name}" for name in names],
        }
        tables.write(pa.table(columns), path)
    return tmp_path


def prompted(folder: Path, prompt: str) -> None:
    path = folder / "competition.toml"
    text = path.read_text("utf-8")
    assert text.count('prompt = "{{ input }}"') == 1
    path.write_text(text.replace('prompt = "{{ input }}"', f"prompt = '''{prompt}'''"), "utf-8")


@pytest.mark.parametrize(("prompt", "why"), WRONG)
def test_a_prompt_that_does_not_fit_says_why_and_which_columns_there_are(prompt: str, why: str):
    with pytest.raises(Refusal) as caught:
        prompts.filled(replace(TASK, prompt=prompt), [ROW])
    assert caught.value.code == "definition_invalid"
    assert why in caught.value.sentence
    assert "repeat" not in caught.value.hint
    if "undefined" in why:
        assert caught.value.sentence.endswith("the columns that it may name here: example, input")


@pytest.mark.parametrize("prompt", [prompt for prompt, why in WRONG if "another template" in why or "end of" in why])
def test_what_fits_no_rows_whatever_is_refused_without_rows(prompt: str):
    with pytest.raises(Refusal, match="does not fit"):
        prompts.require_template(replace(TASK, prompt=prompt))
    prompts.require_template(replace(TASK, prompt="{% for word in input.split() %}{{ word }}{% endfor %}"))


@pytest.mark.parametrize(
    "sums",
    ["'a' * 20000000", "('a' ~ {})" + "|urlencode|list|string" * 7, "-" * 150 + "1"],
    ids=["product", "filters", "signs"],
)
def test_a_template_is_read_without_doing_its_sums(sums: str):
    """A server reads it; whoever fills it needs the memory."""
    heavy = replace(TASK, prompt=f"{{{{ input }}}}{{{{ {sums} }}}}")
    tracemalloc.start()
    try:
        prompts.require_template(heavy)
        prompts.require_columns(heavy, ["example", "input", "target"])
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "prompt",
    [
        "{% if 'a' in input %}{% set kind = 'one' %}{% else %}{% set kind = 'other' %}{% endif %}{{ kind }}: {{ input }}",
        "{% if passage is defined %}{% set text = passage %}{% else %}{% set text = input %}{% endif %}{{ text }}",
        "{% for word in input.split() %}{{ loop.index }} {{ word }} {% endfor %}",
        "{% macro of(text) %}{{ text }}{{ varargs | length }}{% endmacro %}{{ of(input, 1) }}",
        "{% macro of() %}{{ caller() }}{% endmacro %}{% call of() %}{{ input }}{% endcall %}",
        "{% with text = input %}{{ text }}{% endwith %}{% set block %}{{ input }}{% endset %}{{ block }}",
        "{% set all = namespace(text='') %}{% for word in input %}{% set all.text = word %}{% endfor %}{{ all.text }}",
        "{% block text %}{{ input }}{% endblock %}{{ self.text() }}{% filter upper %}{{ input }}{% endfilter %}",
        "{{ passage | default(input) }}{{ range(3) | join }}{{ dict(a=input).a }}",
    ],
)
def test_what_can_be_filled_is_let_through_by_who_looks_at_names_alone(prompt: str):
    task = replace(TASK, prompt=prompt)
    assert prompts.filled(task, [ROW])
    prompts.require_columns(task, list(ROW))


@pytest.mark.parametrize(
    "prompt",
    [
        "{% for loop in input %}{% endfor %}",
        "{% block a %}{% endblock %}{% block a %}{% endblock %}",
        "{% macro of(caller) %}{{ caller }}{% endmacro %}",
        "{{ " + "input + " * 700 + "input }}",
        "{{ input" + " | trim" * 1000 + " }}",
        "{{ " + "(" * 3000 + "input" + ")" * 3000 + " }}",
    ],
    ids=["loop", "blocks", "caller", "sums", "filters", "brackets"],
)
def test_what_no_compiler_takes_ends_in_words(prompt: str):
    """By whoever fills it; who only reads it may let it through."""
    task = replace(TASK, prompt=prompt)
    with pytest.raises(Refusal, match="does not fit"):
        prompts.filled(task, [ROW])
    with contextlib.suppress(Refusal):
        prompts.require_columns(task, list(ROW))


# Where the answers stand in the prompt, the splits share them, which is said first.
@pytest.mark.parametrize(("prompt", "why"), [wrong for wrong in WRONG if "'target'" not in wrong[1]])
def test_an_organizer_sees_a_prompt_that_does_not_fit_before_a_round(folder: Path, prompt: str, why: str):
    assert CliRunner().invoke(app, ["competition", "check", str(folder)]).exit_code == 0
    prompted(folder, prompt)
    ended = CliRunner().invoke(app, ["competition", "check", str(folder)])
    assert isinstance(ended.exception, Refusal), ended.output
    assert why in ended.exception.sentence
    assert "acclimate competition check" in ended.exception.hint
    assert len(ended.exception.problems) in (0, 3)


def test_a_column_that_no_row_asks_for_is_asked_of_all_as_the_server_does(folder: Path):
    """The server runs no template of others, so it looks at the names of every branch."""
    prompted(folder, "{{ input }}{% if 'never' in input %}{{ passage }}{% endif %}")
    with pytest.raises(Refusal, match="'passage' is undefined"):
        prompts.check(folder, definition.load(folder))
    columns = tables.read(folder / "splits/digit/holdout.parquet").column_names
    prompts.require_columns(
        replace(TASK, prompt="{{ passage | default('') }}{% if x is defined %}{{ x }}{% endif %}"), columns
    )


def test_every_row_of_the_holdout_is_filled(folder: Path):
    """One row of 4, in the holdout alone, has a text that the prompt can't take."""
    path = folder / "splits/digit/holdout.parquet"
    columns = tables.read(path).to_pydict()
    columns["input"][-1] = "<digit> 0"
    tables.write(pa.table(columns), path)
    prompted(folder, "{{ input }}{{ 1 // (input | length - 9) }}")
    with pytest.raises(Refusal, match="division"):
        prompts.check(folder, definition.load(folder))
    prompts.check(folder, definition.load(folder), only=splits.PUBLIC)


def test_nothing_heavy_is_needed_for_it():
    """An organizer's machine has no runner: only the core install."""
    code = "import sys, acclimate_runners.prompts as p; sys.exit(any(n in sys.modules for n in ('torch', 'transformers', 'ray')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_of_very_many_columns_a_refusal_names_the_first():
    with pytest.raises(Refusal) as caught:
        prompts.require_columns(replace(TASK, prompt="{{ nope }}"), [f"c{i}" for i in range(900)] + ["x" * 100_000])
    assert caught.value.sentence.endswith("c18, c19 and 881 more") and len(caught.value.sentence) < 1000
