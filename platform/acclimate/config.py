"""Settings of an installation: from the environment (ACCLIMATE_*), one optional TOML file, defaults under the data folder.

The environment wins over the file, the file over the default; `origins` remembers which it was. An unknown name or an impossible
value is refused, all of them at once, and no refusal prints a password. Relative paths are meant from the file's own folder where
the file names them, else from the current one. The data folder holds VERSION (the format of what lies in it): a folder written by
another version is refused, never converted in passing. Folders that are made here are their owner's alone; those that exist keep
their modes.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from acclimate import locks, setting_values, sqlite_urls
from acclimate.files import is_full
from acclimate.redaction import hidden, place
from acclimate_competitions import reading
from acclimate_competitions.errors import Refusal
from acclimate_runners import failpoints

DATA_VERSION = "1"
DEMO_LOCK = "demo.lock"
"""Held in a demo's folder, which is no server's: its server has one inside."""
PREFIX = "ACCLIMATE_"
_LARGEST_FILE = 1 << 20
LEVELS = ("debug", "info", "warning", "error")
_PLACES = frozenset({"database", "tracking", "artifacts", "blobs", "blobs_endpoint", "ray_address"})


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
        tracking: MLflow tracking URI; may hold a password.
        artifacts: where MLflow keeps artifacts: a folder, or a URI.
        mlflow_port: port of MLflow's pages.
        runner: what prepares and evaluates.
        ray_address: "local" or a cluster's address.
        node_work: folder for attempts under way on each machine of the cluster.
        hang_after: seconds without any progress after which an attempt is ended.
        dispatch_port: port of the dispatcher's own health and metrics; 0 for none.
        slots: jobs at once; 0 lets the runner decide.
        upload_limit: largest upload in bytes.
        witnesses: who cosigns the log's checkpoints: `ADDRESS KEY` each, as witness_client.parse_endpoint reads it.
        quorum: how many of them a checkpoint needs.
        entrants: whether entrants register freely, or need an invitation.
        metrics: whether the API has /metrics, for whoever reaches it.
        clock_behind: seconds by which the database's clock may be behind the log's newest record.
        drain: seconds in which a stopping API still answers, so that whoever sends it callers notices.
        log_level: the least that is logged.
        log_file: file of a process's log lines, with rotation; None for standard error.
        file: the TOML file that was read; None for none.
        origins: name -> "environment VARIABLE", "file FILE, line N", "argument" or "default".
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
    hang_after: int
    dispatch_port: int
    upload_limit: int
    witnesses: tuple[str, ...]
    quorum: int
    entrants: Literal["open", "invited"]
    metrics: Literal["on", "off"]
    clock_behind: int
    drain: int
    log_level: str
    log_file: Path | None
    file: Path | None = None
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def work(self) -> Path:
        """Folder for work in progress."""
        return self.data / "work"

    @property
    def reports(self) -> Path:
        """Folder of the rounds' reports."""
        return self.data / "reports"

    def value(self, name: str) -> Any:
        """A setting by its name, as SETTINGS and the documentation have it."""
        return getattr(self, "keys" if name == "server_keys" else name)


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        read: reads its text or TOML value; the second argument is the folder from which relative paths are meant.
        default: under a data folder.
        meaning: for the docs.
    """

    read: Callable[[Any, Path], Any]
    default: Callable[[Path], Any]
    meaning: str


_port = setting_values.integer(0, 65535)

SETTINGS: dict[str, Setting] = {
    "host": Setting(
        setting_values.host,
        lambda data: "127.0.0.1",
        "address on which the API listens, and the dispatcher with its health",
    ),
    "port": Setting(_port, lambda data: 8470, "port of the API; 0 takes a free one"),
    "origin": Setting(
        setting_values.origin, lambda data: "acclimate.localhost/log", "the log's name in checkpoints and receipts"
    ),
    "database": Setting(
        setting_values.database, lambda data: sqlite_urls.of(data / "acclimate.db"), "SQLAlchemy URL of the database"
    ),
    "blobs": Setting(
        setting_values.blobs, lambda data: str(data / "blobs"), "uploads and results: a folder, or `s3://BUCKET/PREFIX`"
    ),
    "blobs_endpoint": Setting(setting_values.endpoint, lambda data: "", "address of an S3 server that is not Amazon's"),
    # ACCLIMATE_KEYS is the client's.
    "server_keys": Setting(setting_values.path, lambda data: data / "keys", "folder of the server's own keys"),
    "tracking": Setting(
        setting_values.tracking, lambda data: sqlite_urls.of(data / "mlflow.db"), "MLflow tracking URI"
    ),
    "artifacts": Setting(
        setting_values.folder_or_uri, lambda data: str(data / "mlartifacts"), "MLflow's artifacts: a folder, or a URI"
    ),
    "mlflow_port": Setting(_port, lambda data: 5000, "port of MLflow's pages"),
    "runner": Setting(
        setting_values.one_of("ray", "local"), lambda data: "ray", "what prepares and evaluates: ray or local"
    ),
    "ray_address": Setting(setting_values.ray_address, lambda data: "local", "Ray cluster's address, or local"),
    "node_work": Setting(
        setting_values.path, lambda data: data / "work", "folder for attempts on each machine of the cluster"
    ),
    "slots": Setting(setting_values.integer(0, 10_000), lambda data: 0, "jobs at once; 0 lets the runner decide"),
    "hang_after": Setting(
        setting_values.integer(600, 10**6),
        lambda data: 600,
        "seconds without any progress after which an attempt hangs and is ended",
    ),
    "dispatch_port": Setting(_port, lambda data: 0, "port of the dispatcher's own health and metrics; 0 for none"),
    "upload_limit": Setting(setting_values.integer(1, 2**50), lambda data: 2**36, "largest upload in bytes"),
    "witnesses": Setting(
        setting_values.witnesses,
        lambda data: (),
        "who cosigns the log's checkpoints: a list of `ADDRESS KEY`; empty for nobody",
    ),
    "quorum": Setting(
        setting_values.integer(0, setting_values.MOST_WITNESSES),
        lambda data: 0,
        "how many of them a checkpoint needs; 0 for none",
    ),
    "entrants": Setting(
        setting_values.one_of("open", "invited"),
        lambda data: "open",
        "who may register as entrant: open for everybody, or invited",
    ),
    "metrics": Setting(
        setting_values.one_of("on", "off"),
        lambda data: "off",
        "whether the API has /metrics, for whoever reaches it: on or off",
    ),
    "clock_behind": Setting(
        setting_values.integer(0, 10**9),
        lambda data: 3600,
        "seconds by which the database's clock may be behind the log's newest record",
    ),
    "drain": Setting(setting_values.integer(0, 300), lambda data: 0, "seconds in which a stopping API still answers"),
    "log_level": Setting(setting_values.one_of(*LEVELS), lambda data: "info", "the least that is logged"),
    "log_file": Setting(
        setting_values.file_or_none, lambda data: None, "file of the process's log lines; empty for standard error"
    ),
}
"""Every setting but `data`, which says where the defaults lie."""

CLIENT_VARIABLES = frozenset({PREFIX + name for name in ("TOKEN", "SERVER", "KEYS", "INVITATION")})
"""The client's own variables, read by the command line."""


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
    file = file.expanduser().absolute() if file is not None else None
    layers = [
        _Layer({name: value for name, value in (given or {}).items() if value is not None}, lambda name: "argument"),
        _Layer(_from_environment(environ, problems), lambda name: f"environment {PREFIX}{name.upper()}"),
    ]
    if file is not None:
        layers.append(_from_file(file, problems))
    origins: dict[str, str] = {"data": "argument"}
    if data is None:
        data, origins["data"] = _folder(layers, problems)
    data = _data_folder(data, origins["data"], problems)
    values: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        layer = next((layer for layer in layers if name in layer.values), None)
        origins[name] = layer.where(name) if layer is not None else "default"
        try:
            values[name] = (
                setting.default(data) if layer is None else setting.read(layer.values[name], layer.folder.absolute())
            )
        except ValueError as error:
            assert layer is not None
            problems.append(f"{name} ({origins[name]}): {_refused(name, layer.values[name])} {error}")
    if "quorum" in values and "witnesses" in values and values["quorum"] > len(values["witnesses"]):
        problems.append(
            f"quorum ({origins['quorum']}): {values['quorum']} of {len(values['witnesses'])} witnesses can't be reached;"
            f" set it to at most {len(values['witnesses'])}, or name more in `witnesses`"
        )
    if problems:
        raise Refusal(
            "config_invalid",
            f"{len(problems)} problem(s) in the settings: {problems[0]}",
            hint="docs/settings.md lists every setting with its meaning",
            problems=problems,
        )
    values["keys"] = values.pop("server_keys")
    return Settings(data=data, file=file, origins=origins, **values)


@dataclass(frozen=True)
class Doubt:
    """A setting that is possible, and hardly meant: its name, what is odd about it, what to do."""

    name: str
    sentence: str
    hint: str


def doubts(settings: Settings) -> list[Doubt]:
    """What `acclimate config`, `acclimate doctor` and a start of the API warn of; what can't be meant `load` refuses."""
    if not settings.witnesses or settings.quorum:
        return []
    sentence = f"`witnesses` names {len(settings.witnesses)}, and `quorum` is 0: rounds are created without witnesses, for good"
    return [
        Doubt(
            "quorum",
            sentence,
            "set `quorum`: how many of them must have cosigned what custodians rely on; then restart",
        )
    ]


@dataclass(frozen=True)
class _Layer:
    """Values of one source: where each stands, and the folder from which its relative paths are meant."""

    values: Mapping[str, Any]
    where: Callable[[str], str]
    folder: Path = Path()


def shown(name: str, value: Any) -> Any:
    """A setting's value as it may be printed: numbers as they stand, places without logins, nothing for None."""
    if isinstance(value, int):
        return value
    if isinstance(value, tuple):
        return "; ".join(value)
    return "" if value is None else place(str(value)) if name in _PLACES else hidden(str(value))


def _refused(name: str, value: Any) -> str:
    """A value that can't be read. Of what may be a URL with a password nothing is shown: it can't be taken apart."""
    if name in _PLACES or not isinstance(value, int | float) and not re.fullmatch(r"[\w.+/ -]{0,60}", str(value)):
        return "its value"
    return repr(value)


def _folder(layers: list[_Layer], problems: list[str]) -> tuple[Path, str]:
    layer = next((layer for layer in layers if "data" in layer.values), None)
    if layer is None:
        return Path("acclimate-data"), "default"
    try:
        return setting_values.path(layer.values["data"], layer.folder.absolute()), layer.where("data")
    except ValueError as error:
        problems.append(f"data ({layer.where('data')}): {_refused('data', layer.values['data'])} {error}")
        return Path("acclimate-data"), "default"


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in CLIENT_VARIABLES or variable == PREFIX + "CONFIG":
            continue
        if variable in failpoints.VARIABLES and failpoints.armed(environ):
            continue
        name = variable[len(PREFIX) :].lower()
        if name != "data" and name not in SETTINGS:
            near = _nearest(variable, [PREFIX + known.upper() for known in (*SETTINGS, "data", "config")])
            problems.append(f"{variable}: there is no such setting{near}")
        else:
            found[name] = value
    return found


def _data_folder(data: Path, origin: str, problems: list[str]) -> Path:
    """The data folder's whole path."""
    try:
        found = data.expanduser().absolute()
    except RuntimeError as error:
        problems.append(f"data ({origin}): {str(data)!r}: {error}")
        return data.absolute()
    if "\0" in str(found):
        problems.append(f"data ({origin}): {str(data)!r} must not hold a NUL")
    return setting_values.plainly(found)


def _from_file(file: Path, problems: list[str]) -> _Layer:
    try:
        with reading.regular(file).open("rb") as stream:
            data = stream.read(_LARGEST_FILE + 1)
        if len(data) > _LARGEST_FILE:
            raise ValueError(f"is longer than {_LARGEST_FILE} bytes, too long for a file of settings")
        text = reading.decoded(data)
        values = tomllib.loads(text)
    except Refusal as refusal:
        problems.append(refusal.sentence)
        return _Layer({}, str)
    except OSError as error:
        problems.append(f"{file}: {error.strerror or error}")
        return _Layer({}, str)
    except (ValueError, RecursionError) as error:
        problems.append(f"{file}: {hidden(str(error))}")
        return _Layer({}, str)
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if found := re.match(r"""\s*["']?(\w+)["']?\s*=""", line):
            lines.setdefault(found[1], number)

    def where(name: str) -> str:
        return f"file {file}" + (f", line {lines[name]}" if name in lines else "")

    unknown = [name for name in values if name != "data" and name not in SETTINGS]
    for name in unknown:
        why = "there are no tables, only settings" if isinstance(values[name], dict) else "there is no such setting"
        problems.append(f"{where(name)}: {name}: {why}{_nearest(name, [*SETTINGS, 'data'])}")
    return _Layer({name: value for name, value in values.items() if name not in unknown}, where, file.parent)


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


# ---- the data folder -----------------------------------------------------------------------------------------------


def claim(settings: Settings) -> None:
    """Make the data folder and that of the blobs on first use, or check that this version wrote it.

    Raises:
        Refusal: data_version; config_invalid where the folder can't be made, no_space where there is no room for it.
    """
    version = settings.data / "VERSION"
    try:
        settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not version.exists():
            if (settings.data / DEMO_LOCK).exists():
                raise Refusal(
                    "config_invalid",
                    f"{settings.data} is the folder of a demo, whose server has its data in {settings.data / 'server'}",
                    hint="name another folder with --data",
                )
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
        raise unusable(settings.data, error) from error
    if found != DATA_VERSION:
        raise Refusal(
            "data_version",
            f"{settings.data} has data of format {found!r}, this version of Acclimate reads {DATA_VERSION!r}",
            hint="use the version that wrote it, or another data folder",
        )


def lock(settings: Settings, part: str) -> IO[str]:
    """Hold the data folder for one part of the server, for as long as the file that comes back is open.

    Args:
        settings: say which folder.
        part: api, dispatcher, mlflow or up.

    Raises:
        Refusal: busy, where another process has it; config_invalid, no_space.
    """
    path = settings.data / f"{part}.lock"
    try:
        held = locks.take(path)
    except OSError as error:
        raise unusable(settings.data, error) from error
    if held is None:
        raise _taken(settings, part, locks.holder(path) or "another process")
    return held


def _taken(settings: Settings, part: str, who: str) -> Refusal:
    return Refusal(
        "busy",
        f"data folder in use by another process: {who} runs the {part} of {settings.data}",
        hint=f"stop {who}, or give this one a data folder of its own with --data; "
        "several share an installation by the settings database, blobs and server_keys",
    )


def unusable(data: Path, error: OSError) -> Refusal:
    """The refusal of a data folder in which something can't be written."""
    if is_full(error):
        return Refusal(
            "no_space", f"no space is left for the data folder {data}", hint="free some space, or choose another folder"
        )
    return Refusal(
        "config_invalid",
        f"the data folder {data} can't be used: {error.strerror} ({error.filename})",
        hint="choose another with --data or ACCLIMATE_DATA",
    )
