"""`acclimate api`, `dispatch`, `mlflow`, `invite`: what runs on the server's own machine."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acclimate.cli.options import AsJson, Blobs, ConfigFile, Database, DataFolder, need
from acclimate.cli.output import emit, say
from acclimate.redaction import place
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from acclimate.config import Settings

Host = Annotated[
    str | None, typer.Option("--host", help="The address to listen on; else ACCLIMATE_HOST, else 127.0.0.1.")
]
Runner = Annotated[
    str | None,
    typer.Option("--runner", help="ray, or local without Ray; else ACCLIMATE_RUNNER, else ray.", metavar="RUNNER"),
]
Slots = Annotated[
    int | None,
    typer.Option("--slots", help="Jobs at once; 0 lets the runner decide; else ACCLIMATE_SLOTS, else 0."),
]
StopWithStdin = Annotated[
    bool, typer.Option("--stop-with-stdin", help="Stop once standard input ends, so as not to outlive who started it.")
]


def invite(
    role: Annotated[
        str, typer.Option("--role", help="organizer, custodian, auditor, analyst or entrant; entrants need none.")
    ],
    data: DataFolder = None,
    file: ConfigFile = None,
    database: Database = None,
    blobs: Blobs = None,
    as_json: AsJson = False,
) -> None:
    """Make an invitation for one account.

    Runs on the server's own machine; the invitation works once. It is printed here and kept nowhere: the database holds its hash.

    Example: acclimate invite --data /srv/acclimate --role organizer
    """
    need("server", "sqlalchemy")
    from acclimate import installation
    from acclimate.service import accounts
    from acclimate.store import Store

    settings = _made(_settings(data, file, {"database": database, "blobs": blobs}))
    store = Store.open(settings)
    try:
        installation.check(store, settings)
        code = accounts.invite(store, role)
    finally:
        store.close()
    say(f"for one account: acclimate register --role {role} --invitation CODE --server URL --name NAME --keys DIR")
    emit({"role": role, "invitation": code}, as_json=as_json, text=code)


def api(
    data: DataFolder = None,
    file: ConfigFile = None,
    database: Database = None,
    blobs: Blobs = None,
    host: Host = None,
    port: Annotated[
        int | None, typer.Option("--port", help="The port; 0 takes a free one; else ACCLIMATE_PORT, else 8470.")
    ] = None,
    stop_with_stdin: StopWithStdin = False,
) -> None:
    """Run the HTTP API of an installation.

    The data folder is made on first use, and so are database and keys. A dispatcher of the same installation does the work;
    `acclimate up` runs both. Several APIs share an installation by its database, blobs and keys, each with a data folder of its own.

    Examples: acclimate api --data /srv/acclimate --port 8470, or with a database for several:
    ACCLIMATE_DATABASE=postgresql://acclimate:PASSWORD@db/acclimate acclimate api --data /srv/api-1 --blobs s3://acclimate/blobs
    """
    need("server", "sqlalchemy", "fastapi", "uvicorn")
    settings = _settings(data, file, {"database": database, "blobs": blobs, "host": host, "port": port})
    if stop_with_stdin:
        _stop_with_stdin(drain=settings.drain)
    from acclimate.api import server

    server.serve(settings)


def dispatch(
    data: DataFolder = None,
    file: ConfigFile = None,
    database: Database = None,
    blobs: Blobs = None,
    runner: Runner = None,
    slots: Slots = None,
    stop_with_stdin: StopWithStdin = False,
) -> None:
    """Run a dispatcher of an installation.

    It makes the scheduled transitions, and checks, prepares and evaluates models. Several may run, each with a data folder of its own, sharing
    database, blobs and keys: one leads, the others stand by. All settings: docs/settings.md.

    Examples: acclimate dispatch --data /srv/acclimate --runner local --slots 2, or on a Ray cluster with a database for several:
    ACCLIMATE_RAY_ADDRESS=ray:6379 acclimate dispatch --data /srv/dispatch-1 --config /etc/acclimate.toml
    """
    need("all", "sqlalchemy", "torch", "transformers", "mlflow")
    if stop_with_stdin:
        _stop_with_stdin()
    settings = _made(_settings(data, file, {"database": database, "blobs": blobs, "runner": runner, "slots": slots}))
    if settings.runner == "ray":
        need("all", "ray")
    from acclimate import dispatch as dispatcher
    from acclimate import publisher

    os.environ.update(_endpoint(settings))
    dispatcher.run(settings, finish=publisher.finish)


def mlflow(
    context: typer.Context,
    data: DataFolder = None,
    file: ConfigFile = None,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on. MLflow asks nobody for a password.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option("--port", help="The port; 0 takes a free one; else ACCLIMATE_MLFLOW_PORT, else 5000."),
    ] = None,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(
            "--allowed-hosts",
            help="Names under which browsers and clients may call it, such as mlflow.example.org,mlflow:5000; "
            "else MLFLOW_SERVER_ALLOWED_HOSTS, else localhost and private addresses.",
            metavar="LIST",
        ),
    ] = None,
    stop_with_stdin: StopWithStdin = False,
) -> None:
    """Run MLflow's own pages on an installation's results, and its HTTP tracking server.

    A round appears there with its preparations once all are done, and with its results once its ranking is published. Where the results lie is
    said by the settings tracking and artifacts: SQLite and a folder in the data folder, or a PostgreSQL database of MLflow's own and s3://.

    Examples: acclimate mlflow --data /srv/acclimate --port 5000, or for a whole network:
    ACCLIMATE_TRACKING=postgresql://mlflow:PASSWORD@db/mlflow acclimate mlflow --data /srv/mlflow --host 0.0.0.0 --allowed-hosts mlflow:5000
    """
    if context.invoked_subcommand is not None:
        if (data, file, port, allowed_hosts) != (None,) * 4:
            raise typer.BadParameter(f"options stand after `acclimate mlflow {context.invoked_subcommand}`")
        return
    need("server", "mlflow")
    if stop_with_stdin:
        _stop_with_stdin()
    from acclimate import config, ports, supervision, tracking_places, tracking_tables

    settings = _settings(data, file, {"mlflow_port": port})
    if tracking_places.is_server(settings.tracking):
        raise Refusal(
            "config_invalid",
            f"the results are at another MLflow server, {place(settings.tracking)}",
            hint="open that one; or set tracking to the database that this one is to serve",
        )
    _made(settings, shared="tracking")
    with config.lock(settings, "mlflow"):
        tracking_tables.begin(settings.tracking, settings.artifacts)
        chosen = ports.free(host, settings.mlflow_port, option="--port or ACCLIMATE_MLFLOW_PORT")
        # Whatever may hold a login goes through the environment: everybody on the machine may read a command line.
        environment = {
            "MLFLOW_BACKEND_STORE_URI": tracking_places.driver(settings.tracking),
            "MLFLOW_ARTIFACTS_DESTINATION": settings.artifacts,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            **_endpoint(settings),
        }
        if allowed_hosts is not None:
            environment["MLFLOW_SERVER_ALLOWED_HOSTS"] = allowed_hosts
        command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(chosen), "--workers", "1"]
        say(f"MLflow on http://{ports.name(host, chosen)}")
        try:
            status = supervision.run_foreign(command, environment=environment)
        except OSError as error:
            raise Refusal("server_unreachable", f"MLflow can't be started: {error.strerror or error}") from error
    if status != 0:
        raise Refusal(
            "server_unreachable",
            f"MLflow ended with status {status}",
            hint="what it said stands above; does the database of the setting tracking answer?",
        )


def made(data: Path | None, file: Path | None, given: Mapping[str, Any]) -> "Settings":
    """The settings of an installation that is there, with what MLflow must know in the environment.

    Raises:
        Refusal: config_invalid, data_version, no_space.
    """
    settings = _made(_settings(data, file, given))
    os.environ.update(_endpoint(settings))
    return settings


def _settings(data: Path | None, file: Path | None, given: Mapping[str, Any]) -> "Settings":
    from acclimate import config

    return config.load(data, file=file, given=given)


def _made(settings: "Settings", *, shared: str = "database") -> "Settings":
    """The settings, where their data folder is there, or what makes the installation lies elsewhere and the folder can be made.

    Only `acclimate api` and `acclimate up` begin an installation, so that a wrong folder's name is noticed.

    Raises:
        Refusal: config_invalid, data_version, no_space.
    """
    from acclimate import config

    there = any(os.path.lexists(settings.data / name) for name in ("VERSION", "acclimate.db"))
    if not there and settings.origins[shared] == "default":
        raise Refusal(
            "config_invalid",
            f"no data folder here: {settings.data}",
            hint="name it with --data or ACCLIMATE_DATA; `acclimate up --data DIR` makes one on first use, "
            f"and so does this command where the setting {shared} names one for several",
        )
    own = settings.data / "acclimate.db"
    if there and shared == "database" and settings.origins[shared] == "default" and not own.exists():
        # Opening it would make an empty one, of no installation.
        raise Refusal(
            "config_invalid",
            f"the data folder {settings.data} has no database of its own",
            hint="give --database (or ACCLIMATE_DATABASE), and --blobs, as `acclimate up` or `acclimate api` was given them",
        )
    config.claim(settings)
    return settings


def _endpoint(settings: "Settings") -> dict[str, str]:
    """What MLflow must know of an S3 server that is not Amazon's."""
    if not settings.artifacts.startswith("s3://") or not settings.blobs_endpoint:
        return {}
    return {"MLFLOW_S3_ENDPOINT_URL": os.environ.get("MLFLOW_S3_ENDPOINT_URL") or settings.blobs_endpoint}


def _stop_with_stdin(*, drain: int = 0) -> None:
    from acclimate import supervision

    supervision.stop_with_stdin(grace=supervision.GRACE + drain)
