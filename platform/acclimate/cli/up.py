"""`acclimate up`: a whole installation on this machine with one command."""

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acclimate.cli.options import Blobs, ConfigFile, Database, DataFolder, need
from acclimate.cli.output import dumps, plain
from acclimate.cli.output import say as note
from acclimate.cli.server import Host, Runner, Slots

if TYPE_CHECKING:
    from acclimate.config import Settings
    from acclimate.parts import Addresses

_SOON = "  (its pages take up to a minute to start)"
_ELSEWHERE = [
    "`acclimate invite` needs --database and --blobs, or ACCLIMATE_DATABASE and ACCLIMATE_BLOBS, as they were given here."
]
_REACH = " on this machine; others use its name in the network in place of this address"


def up(
    data: DataFolder = None,
    port: Annotated[
        int | None, typer.Option("--port", help="The API's port; 0 takes a free one; else ACCLIMATE_PORT, else 8470.")
    ] = None,
    host: Host = None,
    mlflow_port: Annotated[
        int | None,
        typer.Option(
            "--mlflow-port",
            help="Port of MLflow's pages; 0 takes a free one; else ACCLIMATE_MLFLOW_PORT, else 5000, or a free one where that is taken.",
        ),
    ] = None,
    mlflow: Annotated[bool, typer.Option("--mlflow/--no-mlflow", help="Whether to run MLflow's pages.")] = True,
    runner: Runner = None,
    slots: Slots = None,
    database: Database = None,
    blobs: Blobs = None,
    file: ConfigFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line on stdout once it is ready; notes stay on stderr.")
    ] = False,
) -> None:
    """Run a whole installation on this machine: API, dispatcher with a local Ray, and MLflow.

    Everything lies in the data folder, which is made on first use; the same command again goes on where it was, also after a crash. Once the
    API is ready, the addresses and the first steps of each role are printed. It stays in the foreground: Ctrl-C or SIGTERM ends
    all parts in order, a second one at once. A part that ends by itself is started again. The parts' lines are in DATA/logs, in files of 10 MB, five old ones kept.

    The status is 1 where a part had to be killed, as it did not end in time or nobody wanted to wait. Nothing is lost then either.

    As long as there is no organizer, each start prints an invitation for the first one and withdraws the one that it printed before.

    MLflow asks nobody for a password, so its pages are for this machine only, whatever --host says; `acclimate mlflow --host` opens them to others.

    With --json the line has api, mlflow, tracking, data, logs, log_key, pid and organizer_invitation, null where there is an organizer already.

    Examples: acclimate up --data /srv/acclimate, or for others with a database and a store of your own:
    ACCLIMATE_DATABASE=postgresql://acclimate:PASSWORD@db/acclimate acclimate up --data /srv/acclimate --host 0.0.0.0 --blobs s3://acclimate/blobs
    """
    need("all", "sqlalchemy", "fastapi", "uvicorn", "torch", "transformers", "mlflow")
    from acclimate import config
    from acclimate.parts import Parts, Stopped

    # What the parts hear of. The ports are chosen here, and free ones may be taken.
    given: dict[str, Any] = {"database": database, "blobs": blobs, "runner": runner, "slots": slots, "host": host}
    here = {"port": port, "mlflow_port": mlflow_port}
    settings = config.load(data, file=file, given={**given, **here})
    if settings.runner == "ray":
        need("all", "ray")
    stop, hurry = threading.Event(), threading.Event()

    def end(*_: object) -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    parts = Parts(settings, given=given, mlflow=mlflow, say=_say, stop=stop, hurry=hurry)
    with parts, contextlib.suppress(Stopped):
        addresses = parts.start()
        invitation = _invitation(settings)
        if as_json:
            facts = _document(settings, addresses, invitation)
            _print([dumps(facts)])
        else:
            _print(_page(settings, addresses, invitation))
        parts.watch()
        _say("stopping; once more Ctrl-C to stop at once")
    _say("stopped")
    if parts.killed:
        raise typer.Exit(1)


def _invitation(settings: "Settings") -> str | None:
    """An invitation for the first organizer; None where there is one.

    It takes the place of the one that the start before printed: the folder keeps the hash, so that of all starts one is valid at most.
    """
    from acclimate.config import unusable
    from acclimate.service.accounts import first_organizer, hash_of
    from acclimate.store import Store

    kept = settings.data / "up.invitation"
    made = kept.read_text("ascii", "replace").split() if kept.exists() else []

    def note(*hashes: str) -> None:
        try:
            with os.fdopen(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.writelines(f"{one}\n" for one in hashes)
        except OSError as error:
            raise unusable(settings.data, error) from error

    store = Store.open(settings)
    try:
        code = first_organizer(store, made, lambda new: note(*made, new))
    finally:
        store.close()
    if code is None:
        kept.unlink()
    else:
        note(hash_of(code))
    return code


def _document(settings: "Settings", addresses: "Addresses", invitation: str | None) -> dict[str, Any]:
    from acclimate.redaction import place

    return {
        "api": addresses.api,
        "mlflow": addresses.mlflow,
        "tracking": place(addresses.tracking),
        "data": str(settings.data),
        "logs": str(settings.data / "logs"),
        "log_key": addresses.log_key,
        "pid": os.getpid(),
        "organizer_invitation": invitation,
    }


def _page(settings: "Settings", addresses: "Addresses", invitation: str | None) -> list[str]:
    """The addresses, and for each role what to do first."""
    from acclimate.ports import EVERYWHERE
    from acclimate.redaction import place
    from acclimate.supervision import shown

    url, tracking = addresses.api, place(addresses.tracking)
    invite = shown("invite", "--data", str(settings.data), "--role")
    lines = [
        "",
        "Acclimate is up.",
        f"  API     {url}" + (_REACH if settings.host in EVERYWHERE else ""),
        f"  MLflow  {addresses.mlflow + _SOON if addresses.mlflow else 'none here; results: ' + tracking}",
        f"  data    {settings.data}",
        f"  logs    {settings.data / 'logs'}",
        f"  log key {addresses.log_key}",
        "          (publish it where others find it without this server: it is what an auditor checks with)",
        *_witnesses(settings),
        "",
        "First steps. Everybody makes keys of their own, on their own machine: a key folder is secret.",
        *(_ELSEWHERE if settings.origins["database"] != "default" else []),
        "",
        "Organizer (docs/organizers.md):",
    ]
    if invitation is not None:
        join = ("register", "--role", "organizer", "--invitation", invitation, "--server", url)
        lines.append("  " + shown(*join, "--name", "organizer", "--keys", "./organizer"))
    else:
        lines.append("  one is registered; an invitation for another:")
        lines.append(f"  {invite} organizer")
    lines += [
        "  " + shown("competition", "build", "digits", "--out", "./digits"),
        "  " + shown("round", "create", "--help"),
        "",
        "Custodian (docs/custodians.md); the operator makes an invitation for each:",
        f"  {invite} custodian",
        "  " + shown("custodian", "keygen", "--name", "custodian-a", "--keys", "./custodian-a"),
        "  "
        + shown("register", "--role", "custodian", "--server", url, "--name", "custodian-a", "--keys", "./custodian-a")
        + " --invitation CODE",
        "",
        "Entrant (docs/entrants.md); "
        + ("needs no invitation:" if settings.entrants == "open" else "the operator makes an invitation for each:"),
        "  " + shown("register", "--server", url, "--name", "team-a", "--keys", "./team-a"),
        "  " + shown("round", "list", "--server", url),
        "  " + shown("enter", "--help"),
        "",
        "Analyst (docs/analysts.md); needs no account, only the tracking URI:",
        f"""  python -c "from acclimate import tracking; print(tracking.rounds('{tracking}'))\"""",
        "",
        "Auditor (docs/auditors.md); needs no account, only a round's bundle and the log key:",
        "  " + shown("round", "bundle", "--server", url) + " ROUND --out round.zip",
        "  " + shown("verify") + f" round.zip --log-key {addresses.log_key}",
        "  where a round names one, to make its preparations again (the operator makes an invitation):",
        "  " + shown("audit", "keygen", "--name", "lab", "--keys", "./lab"),
        "",
        "Witness (docs/witnesses.md), at another institution; needs no account, only the log key:",
        "  " + shown("witness", "keygen", "--name", "witness.example.org", "--keys", "./witness"),
        "",
        "Ctrl-C stops everything; the same command starts again where it was.",
    ]
    return lines


def _witnesses(settings: "Settings") -> list[str]:
    """Who cosigns the log; nothing where nobody does."""
    if not settings.witnesses:
        return []
    from acclimate.config import doubts

    names = ", ".join(one.split()[1].partition("+")[0] for one in settings.witnesses)
    return [
        f"  witnesses {names}; a checkpoint needs {settings.quorum} of them",
        "          (each needs the log key from you: docs/operators.md)",
        *(f"  warning {doubt.sentence}; {doubt.hint}" for doubt in doubts(settings)),
    ]


def _print(lines: list[str]) -> None:
    # Who asked for them may be gone, which is no reason to stop.
    with contextlib.suppress(OSError):
        for line in lines:
            typer.echo(plain(line))


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        note(line)
