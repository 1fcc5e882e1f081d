"""What the tests of infra/ share: whether a command line is one of ours, and what a place of our settings may be called."""

import re
from collections.abc import Callable

import pytest
import typer

from acclimate import config
from acclimate.cli.main import app

# Settings, and what names the folder and the file of settings.
NAMES = {config.PREFIX + name.upper() for name in (*config.SETTINGS, "data", "config")}


@pytest.fixture(scope="session")
def parses() -> Callable[[list[str]], None]:
    """Fails where `acclimate ARGUMENTS` names a command or option that isn't there, or gives it a value that it refuses."""
    root = typer.main.get_command(app)

    def check(arguments: list[str]) -> None:
        command, rest, context = root, list(arguments), None
        name = "acclimate"
        while hasattr(command, "resolve_command"):
            context = command.make_context(name, rest, parent=context)
            name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
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
