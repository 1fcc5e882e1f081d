"""The extras of the distribution, and what a core install says where one is needed."""

from importlib.util import find_spec

from acclimate_competitions.errors import Refusal, installing


def need(extra: str, *modules: str) -> None:
    """Refuse what needs an extra that is not installed.

    Args:
        extra: its name in pyproject.toml.
        modules: of the extra, which are looked for and not imported.

    Raises:
        Refusal: extra_missing.
    """
    missing = [name for name in modules if not _there(name)]
    if missing:
        raise Refusal(
            "extra_missing",
            f"this command needs {', '.join(missing)}, which a core install does not have",
            hint=installing(extra),
        )


def _there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:
        return False
