"""`acclimate api`, `dispatch`, `mlflow`, `invite`: what runs on the server's own machine."""

import os
import sys
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from acclimate.cli.options import AsJson, DataFolder, need
from acclimate.cli.output import emit, say
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from acclimate.config import Settings

Host = Annotated[
    str | None, typer.Option("--host", help="The address to listen on; else ACCLIMATE_HOST, else 127.0.0.1.")
]
StopWithStdin = Annotated[
    bool, typer.Option("--stop-with-stdin", help="Stop once standard input ends, so as not to outlive who started it.")
]


def invite(
    role: Annotated[str, typer.Option("--role", help="organizer, custodian, analyst or entrant; entrants need none.")],
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Make an invitation for one account.

    Runs on the server's own machine; the invitation works once.

    Example: acclimate invite --data /srv/acclimate --role organizer
    """
    need("server", "sqlalchemy")
    from acclimate import config
    from acclimate.service import accounts
    from acclimate.store import Store

    store = Store.open(_made(config.load(data)))
    try:
        code = accounts.invite(store, role)
    finally:
        store.close()
    say(f"for one account: acclimate register --role {role} --invitation CODE --server URL --name NAME --keys DIR")
    emit({"role": role, "invitation": code}, as_json=as_json, text=code)


def api(
    data: DataFolder = None,
    host: Host = None,
    port: Annotated[
        int | None, typer.Option("--port", help="The port; 0 takes a free one; else ACCLIMATE_PORT, else 8470.")
    ] = None,
    stop_with_stdin: StopWithStdin = False,
) -> None:
    """Run the HTTP API on a data folder.

    The folder is made on first use. A dispatcher on the same folder does the work.

    Example: acclimate api --data /srv/acclimate --port 8470
    """
    need("server", "sqlalchemy", "fastapi", "uvicorn")
    from acclimate import config
    from acclimate.api import server

    settings = config.load(data, given={"host": host, "port": port})
    if stop_with_stdin:
        _stop_with_stdin()
    server.serve(settings)


def dispatch(
    data: DataFolder = None,
    runner: Annotated[
        str | None,
        typer.Option("--runner", help="ray, or local without Ray; else ACCLIMATE_RUNNER, else ray.", metavar="RUNNER"),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option("--slots", help="Jobs at once; 0 lets the runner decide; else ACCLIMATE_SLOTS, else 0."),
    ] = None,
    stop_with_stdin: StopWithStdin = False,
) -> None:
    """Run the dispatcher of a data folder, one a folder.

    It makes the scheduled transitions, and checks, prepares and evaluates models. All settings: docs/settings.md.

    Example: acclimate dispatch --data /srv/acclimate --runner local --slots 2
    """
    need("all", "sqlalchemy", "torch", "transformers", "mlflow")
    from acclimate import config, publisher
    from acclimate import dispatch as dispatcher

    settings = _made(config.load(data, given={"runner": runner, "slots": slots}))
    if settings.runner == "ray":
        need("all", "ray")
    if stop_with_stdin:
        _stop_with_stdin()
    dispatcher.run(settings, finish=publisher.finish)


def mlflow(
    data: DataFolder = None,
    host: Host = None,
    port: Annotated[int, typer.Option("--port", help="The port.")] = 5000,
) -> None:
    """Run MLflow's own pages on a data folder's results.

    A round appears there with its preparations once all are done, and with its results once its ranking is published.

    Example: acclimate mlflow --data /srv/acclimate --port 5000
    """
    need("server", "mlflow")
    from acclimate import config

    settings = _made(config.load(data))
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", settings.tracking]
    command += ["--artifacts-destination", str(settings.artifacts), "--host", host or "127.0.0.1", "--port", str(port)]
    say(f"MLflow on http://{host or '127.0.0.1'}:{port}")
    os.execv(sys.executable, command)


def _made(settings: "Settings") -> "Settings":
    """The settings, where their data folder is there: only `acclimate api` makes one, so that a wrong name is noticed.

    Raises:
        Refusal: config_invalid.
    """
    if not any(os.path.lexists(settings.data / name) for name in ("VERSION", "acclimate.db")):
        raise Refusal(
            "config_invalid",
            f"no data folder here: {settings.data}",
            hint="name it with --data or ACCLIMATE_DATA; `acclimate api --data DIR` makes one on first use",
        )
    return settings


def _stop_with_stdin() -> None:
    import signal

    def wait() -> None:
        # A pipe ends when the other end's process does, however it ended.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stop-with-stdin", daemon=True).start()
