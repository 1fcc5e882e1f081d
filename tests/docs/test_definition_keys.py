"""docs/organizers.md lists every key of a definition, with the default that is in force where it is absent."""

import re
from pathlib import Path

import pytest

from acclimate_competitions import definition
from acclimate_competitions.errors import Refusal

PAGE = Path(__file__).parent.parent.parent / "docs" / "organizers.md"
REQUIRED = {
    "schema": "1",
    "slug": '"x"',
    "title": '"X"',
    "licence": '"L"',
    "contact": '"c"',
    "round.name": '"1"',
    "custody.threshold": "2",
    "custody.custodians": '["a", "b", "c"]',
    "submission.architectures": '["llama"]',
    "submission.max_parameters": "1",
    "submission.max_bytes": "1",
    "tasks.name": '"t"',
    "tasks.kind": '"choice"',
    "tasks.choices": '["a", "b"]',
    "tasks.metric": '"accuracy"',
    "preparation.epochs": "1",
    "preparation.global_batch": "1",
    "preparation.max_length": "2",
    "preparation.lr_grid": "[0.1]",
    "preparation.seeds": "[1, 2, 3]",
}


def rows() -> dict[str, str]:
    """Key -> default, as the page has them."""
    section = PAGE.read_text("utf-8").split("## The keys of the definition\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `([a-z0-9_.]+)` \| (required|none|`[^|]+`) \| [^|]*\|$", section, re.MULTILINE)
    assert len(found) == len([line for line in section.splitlines() if line.startswith("| `")])
    assert len(dict(found)) == len(found)
    return dict(found)


def written(values: dict[str, str]) -> bytes:
    """A definition with these values, by dotted key."""
    tables: dict[str, list[str]] = {"": []}
    for key, value in values.items():
        table, _, name = key.rpartition(".")
        tables.setdefault(table, []).append(f"{name} = {value}")
    text = "\n".join(tables.pop(""))
    for table, lines in tables.items():
        head = "[[tasks]]" if table == "tasks" else f"[{table}]"
        text += f"\n{head}\n" + "\n".join(lines)
    return (text + "\n").encode()


def test_every_key_is_on_the_page_and_no_other() -> None:
    minimal = definition.parse(written(REQUIRED))
    keys = [key.replace("tasks[0]", "tasks") for key in minimal.effective()]
    assert sorted(rows()) == sorted(keys)


def test_a_key_is_required_where_the_page_says_so() -> None:
    assert {key for key, default in rows().items() if default == "required"} == set(REQUIRED)
    for key in REQUIRED:
        with pytest.raises(Refusal) as caught:
            definition.parse(written({name: value for name, value in REQUIRED.items() if name != key}))
        assert caught.value.code == "definition_invalid", key


KINDS = {
    "generate": {"tasks.stop": '["e"]', "tasks.max_tokens": "1", "tasks.metric": '"exact_match"'},
    "perplexity": {"tasks.metric": '"bits_per_byte"'},
}


def test_keys_of_other_kinds_of_task_are_on_the_page() -> None:
    section = PAGE.read_text("utf-8").split("## Tasks to write, and whole texts\n")[1].split("\n## ")[0]
    table = re.findall(r"^\| `tasks\.([a-z_]+)` \| (\w+) \| (required|none|`[^|]+`) \| [^|]*\|$", section, re.MULTILINE)
    choice = {name: value for name, value in REQUIRED.items() if name != "tasks.choices"}
    for kind, own in KINDS.items():
        values = choice | {"tasks.kind": f'"{kind}"', "preparation.max_length": "9"} | own
        (task,) = definition.parse(written(values)).tasks
        assert {name for name, of, _ in table if of == kind} == set(task.document()) - {
            *("name", "kind", "metric", "chance", "tokenize", "prompt")
        }
        for name, of, default in table:
            if of == kind and default == "required":
                with pytest.raises(Refusal, match="1 problem"):
                    definition.parse(written({key: value for key, value in values.items() if key != f"tasks.{name}"}))
            elif of == kind and default != "none":
                given = definition.parse(written(values | {f"tasks.{name}": default.strip("`")}))
                assert given.tasks == (task,) and given.origins[f"tasks[0].{name}"] != "default"


def test_the_defaults_on_the_page_are_those_in_force() -> None:
    minimal = definition.parse(written(REQUIRED)).effective()
    said = {key: default for key, default in rows().items() if default not in ("required", "none")}
    given = {key: default.strip("`") for key, default in said.items()}
    whole = definition.parse(written(REQUIRED | given))
    assert whole.effective() == minimal
    # Each of them was read from the text, not left out.
    assert all(whole.origins[key.replace("tasks.", "tasks[0].")] != "default" for key in given)
    none = [key.replace("tasks.", "tasks[0].") for key, default in rows().items() if default == "none"]
    assert {key for key in none if minimal[key] is not None} == {"tasks[0].chance"}
    assert minimal["tasks[0].chance"] == 0.5
