"""Settings of an installation: from the environment (ACCLIMATE_*), one optional TOML file, defaults under the data folder.

The environment wins over the file, the file over the default; `origins` remembers which it was. An unknown name or an impossible
value is refused, all of them at once. The data folder holds VERSION (the format of what lies in it): a folder written by
another version is refused, never converted in passing. Folders that are made here are their owner's alone; those that exist keep
their modes.
"""

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from acclimate_competitions.errors import Refusal

DATA_VERSION = "1"
PREFIX = "ACCLIMATE_"
_ORIGIN = re.compile(r"[A-Za-z0-9.:-]+(/[A-Za-z0-9._-]+)*")


@dataclass(frozen=True)
class Settings:
    """The settings in force.

    Attributes:
        data: the data folder.
        host, port: where the API listens; port 0 takes a free one.
        origin: the log's name in checkpoints and receipts; fixed with the first entry.
        database: SQLAlchemy URL: sqlite:///FILE or postgresql://…; never printed with its password.
        blobs: where the content-addressed bytes lie: a folder, or s3://BUCKET/PREFIX.
        blobs_endpoint: address of an S3 server that is not Amazon's; else empty.
        keys: folder of the server's own keys.
        tracking: MLflow tracking URI.
        artifacts: where MLflow keeps artifacts: a folder, or a URI.
        mlflow_port: port of MLflow's pages.
        runner: what prepares and evaluates.
        ray_address: "local" or a cluster's address.
        node_work: folder for attempts under way on each machine of the cluster.
        dispatch_port: port of the dispatcher's own health and metrics; 0 for none.
        slots: jobs at once; 0 lets the runner decide.
        upload_limit: largest upload in bytes.
        origins: name -> "environment", "file …", "argument" or "default".
    """

    data: Path
    host: str
    port: int
    origin: str
    database: str
    blobs: str
    blobs_endpoint: str
    keys: Path
    tracking: str
    artifacts: str
    mlflow_port: int
    runner: Literal["ray", "local"]
    ray_address: str
    node_work: Path
    slots: int
    dispatch_port: int
    upload_limit: int
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def work(self) -> Path:
        """Folder for work in progress."""
        return self.data / "work"

    @property
    def reports(self) -> Path:
        """Folder of the rounds' reports."""
        return self.data / "reports"


@dataclass(frozen=True)
class Setting:
    """One setting: how its text or TOML value is read, its default under a data folder, and its meaning for the docs."""

    read: Callable[[Any], Any]
    default: Callable[[Path], Any]
    meaning: str


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be text that is not empty")
    return value


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return read


def _one_of(*choices: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return str(value)

    return read


def _origin(value: Any) -> str:
    if not isinstance(value, str) or not _ORIGIN.fullmatch(value) or len(value) > 200:
        raise ValueError("must look like a host with an optional path, such as acclimate.example.org/log")
    return value


def _path(value: Any) -> Path:
    return Path(_text(value)).expanduser().absolute()


def _place(value: Any) -> str:
    """A folder, made absolute, or a URI as it stands."""
    text = _text(value)
    return text if "://" in text else str(_path(text))


def _blobs(value: Any) -> str:
    place = _place(value)
    if "://" in place and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._-]+)*", place):
        raise ValueError("must be a folder, or s3://BUCKET or s3://BUCKET/PREFIX")
    return place


def _database(value: Any) -> str:
    text = _text(value)
    for scheme in ("postgresql://", "postgres://"):
        if text.startswith(scheme):
            text = "postgresql+psycopg://" + text.removeprefix(scheme)
    if not text.startswith(("sqlite:///", "postgresql+psycopg://")) or ":memory:" in text:
        raise ValueError("must be sqlite:///FILE or postgresql://USER:PASSWORD@HOST:PORT/DATABASE")
    return text


def _endpoint(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"(https?://[^\s/@?#]+/?)?", value):
        raise ValueError("must be an address such as http://s3.example.org:8333, or empty")
    return value


SETTINGS: dict[str, Setting] = {
    "host": Setting(_text, lambda data: "127.0.0.1", "address on which the API listens"),
    "port": Setting(_integer(0, 65535), lambda data: 8470, "port of the API; 0 takes a free one"),
    "origin": Setting(_origin, lambda data: "acclimate.localhost/log", "the log's name in checkpoints and receipts"),
    "database": Setting(_database, lambda data: f"sqlite:///{data / 'acclimate.db'}", "SQLAlchemy URL of the database"),
    "blobs": Setting(
        _blobs, lambda data: str(data / "blobs"), "uploads and results: a folder, or `s3://BUCKET/PREFIX`"
    ),
    "blobs_endpoint": Setting(_endpoint, lambda data: "", "address of an S3 server that is not Amazon's"),
    # ACCLIMATE_KEYS is the client's.
    "server_keys": Setting(_path, lambda data: data / "keys", "folder of the server's own keys"),
    "tracking": Setting(_text, lambda data: f"sqlite:///{data / 'mlflow.db'}", "MLflow tracking URI"),
    "artifacts": Setting(_place, lambda data: str(data / "mlartifacts"), "MLflow's artifacts: a folder, or a URI"),
    "mlflow_port": Setting(_integer(0, 65535), lambda data: 5000, "port of MLflow's pages"),
    "runner": Setting(_one_of("ray", "local"), lambda data: "ray", "what prepares and evaluates: ray or local"),
    "ray_address": Setting(_text, lambda data: "local", "Ray cluster's address, or local"),
    "node_work": Setting(_path, lambda data: data / "work", "folder for attempts on each machine of the cluster"),
    "slots": Setting(_integer(0, 10_000), lambda data: 0, "jobs at once; 0 lets the runner decide"),
    "dispatch_port": Setting(
        _integer(0, 65535), lambda data: 0, "port of the dispatcher's own health and metrics; 0 for none"
    ),
    "upload_limit": Setting(_integer(1, 2**50), lambda data: 2**36, "largest upload in bytes"),
}


def load(
    data: Path | None = None,
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    given: Mapping[str, Any] | None = None,
) -> Settings:
    """The settings in force.

    Args:
        data: the data folder; else ACCLIMATE_DATA, else `data` of the file, else ./acclimate-data.
        file: a TOML file; else ACCLIMATE_CONFIG, else none.
        environ: the environment; os.environ where None.
        given: values from the command line; they win over everything; None values are left out.

    Raises:
        Refusal: config_invalid, with every problem.
    """
    environ = os.environ if environ is None else environ
    problems: list[str] = []
    file = file or (Path(environ[PREFIX + "CONFIG"]) if environ.get(PREFIX + "CONFIG") else None)
    layers: list[tuple[str, dict[str, Any]]] = [
        ("argument", {name: value for name, value in (given or {}).items() if value is not None}),
        ("environment", _from_environment(environ, problems)),
        (f"file {file}", _from_file(file, problems) if file else {}),
    ]
    origins: dict[str, str] = {}
    if data is None:
        data = _folder(layers, problems)
    data = data.expanduser().absolute()
    values: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        origin, raw = next(((label, layer[name]) for label, layer in layers if name in layer), ("default", None))
        origins[name] = origin
        try:
            values[name] = setting.default(data) if origin == "default" else setting.read(raw)
        except ValueError as error:
            problems.append(f"{name} ({origin}): {raw!r} {error}")
    if problems:
        raise Refusal(
            "config_invalid",
            f"{len(problems)} problem(s) in the settings: {problems[0]}",
            hint="docs/settings.md lists every setting with its meaning",
            problems=problems,
        )
    values["keys"] = values.pop("server_keys")
    return Settings(data=data, origins=origins, **values)


def _folder(layers: list[tuple[str, dict[str, Any]]], problems: list[str]) -> Path:
    origin, raw = next(((label, layer["data"]) for label, layer in layers if "data" in layer), ("default", None))
    if origin == "default":
        return Path("acclimate-data")
    try:
        return Path(_text(raw))
    except ValueError as error:
        problems.append(f"data ({origin}): {raw!r} {error}")
        return Path("acclimate-data")


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, value in environ.items():
        # TOKEN, SERVER and KEYS are the client's own variables, read by the command line.
        if not variable.startswith(PREFIX) or variable in CLIENT_VARIABLES or variable == PREFIX + "CONFIG":
            continue
        name = variable[len(PREFIX) :].lower()
        if name != "data" and name not in SETTINGS:
            problems.append(f"{variable}: there is no such setting")
        else:
            found[name] = value
    return found


CLIENT_VARIABLES = frozenset({PREFIX + "TOKEN", PREFIX + "SERVER", PREFIX + "KEYS"})


def _from_file(file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{file}: {error}")
        return {}
    unknown = [name for name in values if name != "data" and name not in SETTINGS]
    problems += [f"{file}: {name}: there is no such setting" for name in unknown]
    return {name: value for name, value in values.items() if name not in unknown}


def claim(settings: Settings) -> None:
    """Make the data folder and that of the blobs on first use, or check that this version wrote it.

    Raises:
        Refusal: data_version, or config_invalid where the folder can't be made.
    """
    version = settings.data / "VERSION"
    try:
        for folder in (settings.data,):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not version.exists():
            if (settings.data / "acclimate.db").exists():
                raise Refusal(
                    "data_version",
                    f"{settings.data} holds a database but no VERSION file, this version writes format {DATA_VERSION}",
                    hint="choose another folder, or restore this one from a backup",
                )
            temporary = settings.data / f".VERSION.{os.getpid()}"
            temporary.write_text(DATA_VERSION + "\n", "utf-8")
            temporary.replace(version)
        found = version.read_text("utf-8", "replace").strip()[:100]
    except OSError as error:
        raise Refusal(
            "config_invalid",
            f"the data folder {settings.data} can't be used: {error.strerror} ({error.filename})",
            hint="choose another with --data or ACCLIMATE_DATA",
        ) from error
    if found != DATA_VERSION:
        raise Refusal(
            "data_version",
            f"{settings.data} has data of format {found!r}, this version of Acclimate reads {DATA_VERSION!r}",
            hint="use the version that wrote it, or another data folder",
        )
