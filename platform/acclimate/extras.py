"""The extras of the distribution, and what a core install says where one is needed."""

from importlib.util import find_spec

from acclimate_competitions.errors import Refusal, installing

MODULES = {
    "server": (
        "fastapi", "uvicorn", "sqlalchemy", "alembic", "psycopg", "s3fs", "prometheus_client", "boto3", "mlflow",
    ),
    "runner": ("s3fs", "torch", "transformers", "tokenizers", "yaml", "ray", "datasets"),
    "analysis": ("mlflow", "scipy", "matplotlib", "pandas", "sklearn"),
    "witness": ("uvicorn",),
}  # fmt: skip
"""What the packages of each extra of pyproject.toml are called in Python."""


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


def of_the_install(error: ModuleNotFoundError) -> Refusal | None:
    """The refusal of a command that came upon a package which is not installed; None where no extra has it, which is a fault of ours."""
    name = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in MODULES.items() if name in modules), None)
    if extra is None or _there(name):
        return None
    return Refusal(
        "extra_missing", f"this command needs {name}, which a core install does not have", hint=installing(extra)
    )


def _there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:
        return False
