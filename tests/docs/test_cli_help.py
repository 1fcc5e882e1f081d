"""Every command explains itself, with an example that the command line takes; help is quick and needs no extra."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from acclimate.cli.main import app

ROOT = Path(__file__).parent.parent.parent
SLOWEST_HELP = 0.5


def commands() -> Iterator[tuple[str, Any]]:
    """(path, command) of every command that does something, such as ("round create", …)."""

    def walk(path: tuple[str, ...], command: Any) -> Iterator[tuple[str, Any]]:
        if hasattr(command, "commands"):
            for name, inner in command.commands.items():
                yield from walk((*path, name), inner)
        if not hasattr(command, "commands") or (path and command.invoke_without_command):
            yield " ".join(path), command

    yield from walk((), typer.main.get_command(app))


COMMANDS = dict(commands())


@cache
def acclimate(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "acclimate", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_all_that_the_readme_and_the_roles_need_is_there() -> None:
    wanted = {
        "register", "status", "enter", "submit", "ranking", "invite", "api", "dispatch", "mlflow", "demo", "verify",
        "up", "doctor", "config", "plan", "db upgrade", "db check",
        "submission status", "submission withdraw", "receipt verify", "custodian keygen", "custodian ack",
        "audit keygen", "audit draw", "audit run", "audit status", "audit report", "custodian release", "custodian inspect", "custodian approve-void", "custodian void", "round create", "round seal", "round status",
        "round list", "round extend", "round publish", "round void", "round bundle", "round records", "round report",
        "competition build", "competition check", "competition show",
        "log mirror", "log check", "log keys", "log rotate",
    }  # fmt: skip
    assert wanted <= set(COMMANDS)


@pytest.mark.parametrize("path", sorted(COMMANDS))
def test_a_command_has_help_and_an_example_of_itself(path: str) -> None:
    command = COMMANDS[path]
    text = f"{command.help or ''}\n\n{command.epilog or ''}"
    assert command.help and len(command.help) > 20
    found = re.search(r"Examples?: (.+)", text, re.DOTALL)
    assert found, f"{path} has no example"
    assert f"acclimate {path}" in found[1]


@pytest.mark.parametrize("path", sorted(COMMANDS))
def test_an_example_is_a_command_line_that_parses(path: str) -> None:
    command = COMMANDS[path]
    text = re.sub(r"\s+", " ", f"{command.help or ''} {command.epilog or ''}").replace("`", "")
    line = text[text.index(f"acclimate {path}") :].split(" > ")[0].split(", or ")[0]
    words = shlex.split(line)[1 + len(path.split()) :]
    # Parsing alone runs nothing; a wrong option or a missing one raises.
    command.make_context(path, words, resilient_parsing=False)


@pytest.mark.parametrize("path", sorted(COMMANDS))
def test_every_option_is_explained(path: str) -> None:
    unexplained = [p.name for p in COMMANDS[path].params if p.param_type_name == "option" and not p.help]
    assert unexplained == []


def test_what_prints_a_result_also_prints_json() -> None:
    silent = {"api", "dispatch", "mlflow", "witness run", "custodian approve-void"}
    without = [
        path for path, command in COMMANDS.items() if "--json" not in [o for p in command.params for o in p.opts]
    ]
    assert set(without) <= silent


def test_no_hint_and_no_page_names_a_command_that_does_not_exist() -> None:
    names = {tuple(path.split()) for path in COMMANDS}
    groups = {name[0] for name in names if len(name) > 1}
    files = [path for root in ("platform", "runners", "competitions", "docs") for path in (ROOT / root).rglob("*")]
    wrong = []
    for path in [ROOT / "README.md", *(path for path in files if path.suffix in (".py", ".md"))]:
        found = re.finditer(r"(?:[`\"$] ?|: |bin/)acclimate ([a-z]+)(?: ([a-z][a-z-]*))?", path.read_text("utf-8"))
        for name, inner in (match.groups() for match in found):
            known = (name,) in names or (name in groups and (inner is None or (name, inner) in names))
            if not known:
                wrong.append(f"{path.relative_to(ROOT)}: acclimate {name} {inner or ''}")
    assert wrong == []


def test_help_names_every_command() -> None:
    done = acclimate("--help")
    assert done.returncode == 0
    for name in {path.split()[0] for path in COMMANDS}:
        assert re.search(rf"^  {name} ", done.stdout, re.MULTILINE), name


def test_help_is_quick() -> None:
    # Processor time of the child, the least of three: what the machine does besides must not decide.
    import resource

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "acclimate", "--help"], capture_output=True, timeout=60, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)

    assert min(once() for _ in range(3)) < SLOWEST_HELP


def test_a_wrong_command_line_exits_with_2_and_says_what_is_wrong() -> None:
    for arguments in (("nonsense",), ("status",), ("round", "create", "--nonsense"), ("submit", "x")):
        done = acclimate(*arguments)
        assert done.returncode == 2, arguments
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        assert "Error:" in done.stderr


def test_the_version_is_the_packages() -> None:
    from acclimate import __version__

    assert acclimate("--version").stdout == f"acclimate {__version__}\n"


def test_a_count_beyond_all_sense_is_refused_before_anything_is_made_of_it() -> None:
    done = acclimate("plan", "digits", "--entries", "99999999999999")
    assert done.returncode == 2 and "--entries" in done.stderr
