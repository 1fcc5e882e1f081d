"""What the tests of infra/ share: whether a command line is one of ours, and what a place of our settings may be called."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from acclimate import config
from acclimate.cli.main import app

# Settings, and what names the folder and the file of settings.
NAMES = {config.PREFIX + name.upper() for name in (*config.SETTINGS, "data", "config")}


COMPOSE = Path(__file__).parents[2] / "infra" / "compose"


def interpolate(text: str, values: dict[str, str]) -> str:
    """What compose does with ${NAME}, ${NAME:-default}, ${NAME:?message} and $$."""

    def replace(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        name, kind, rest = found[1], found[2], found[3]
        if values.get(name):
            return values[name]
        assert kind != "?", f"{name}: {rest}"
        return rest if kind == "-" else ""

    return re.sub(r"\$\$|\$\{(\w+)(?::([-?])([^}]*))?\}", replace, text)


def _read(name: str, **given: str) -> dict[str, Any]:
    lines = (COMPOSE / ".env.example").read_text("utf-8").splitlines()
    values = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    # Comments aren't interpolated by compose either.
    text = "\n".join(
        line for line in (COMPOSE / name).read_text("utf-8").splitlines() if not line.lstrip().startswith("#")
    )
    return yaml.safe_load(interpolate(text, values | given))


@pytest.fixture(scope="session")
def read() -> Callable[..., dict[str, Any]]:
    """A compose file, given its name, with the variables of .env.example and those that are given."""
    return _read


@pytest.fixture(scope="session")
def parses() -> Callable[[list[str]], None]:
    """Fails where `acclimate ARGUMENTS` names a command or option that isn't there, or gives it a value that it refuses."""
    root = typer.main.get_command(app)

    def check(arguments: list[str]) -> None:
        command, rest, context = root, list(arguments), None
        name = "acclimate"
        while hasattr(command, "resolve_command"):
            context = command.make_context(name, rest, parent=context)
            left = [*context._protected_args, *context.args]
            if command.invoke_without_command and not left:
                return  # `acclimate mlflow` runs the pages, and has commands besides
            name, command, rest = command.resolve_command(context, left)
        command.make_context(name, rest, parent=context)

    return check


@pytest.fixture(scope="session")
def variables_are_ours() -> Callable[[dict[str, str]], None]:
    """Fails where a variable ACCLIMATE_* is no setting, is refused as a setting, or holds a password."""

    def check(environment: dict[str, str]) -> None:
        ours = {name: value for name, value in environment.items() if name.startswith(config.PREFIX)}
        assert ours.keys() <= NAMES, ours.keys() - NAMES
        config.load(environ=ours)
        for name, value in environment.items():
            assert not re.search(r"://[^/@\s]*:[^/@\s]+@", str(value)), f"{name} holds a password"

    return check
