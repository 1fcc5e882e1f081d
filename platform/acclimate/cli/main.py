"""`acclimate`: every command, and how commands end.

Exit codes: 0 done; 1 refused (error, hint, no traceback) or checked and found wrong; 2 a wrong command line; 4 standard output took
no more (`__main__.py`); 130 interrupted. An exception that is no refusal is a fault of ours and shows its traceback.
"""

import sys

import typer

from acclimate.cli import (
    analysis,
    audit,
    backup,
    blobs,
    competition,
    custodian,
    database,
    demo,
    doctor,
    gaps,
    logs,
    plan,
    receipts,
    register,
    report,
    results,
    rounds,
    seal,
    server,
    settings,
    stage,
    submit,
    trials,
    up,
    verify,
    witness,
)
from acclimate.cli.output import complain, say
from acclimate.cli.status import status
from acclimate_competitions.errors import Refusal

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        from acclimate import __version__

        typer.echo(f"acclimate {__version__}")
        raise typer.Exit


@app.callback()
def acclimate(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Blind evaluation rounds for machine-learning models: sealed holdout, equal preparation, verifiable ranking.

    A word a person: entrants `check`, `register`, `enter`, `submit`; custodians `custodian ack`, `custodian release`; organizers
    `round create`, `round seal`, `round publish`; a round's auditor `audit run`, `audit report`; operators `up`, `doctor`, `invite`;
    partners `witness run`, `log mirror`; analysts `rank`, `compare`, `stability`, `export`, `report`; everybody `status`, `ranking`, `verify`.
    """


app.command("register")(register.register)
app.command("status")(status)
app.command("enter")(submit.enter)
app.command("submit")(submit.submit)
app.add_typer(submit.app, name="submission")
app.add_typer(receipts.app, name="receipt")
app.command("check", short_help="Check a model as a round's server will, and forecast its preparation.")(trials.check)
app.command("prepare", short_help="Prepare a model on this machine as a round does.")(trials.prepare)
app.command("evaluate", short_help="Evaluate a model on this machine on a public split.")(trials.evaluate)
app.command("ranking")(rounds.ranking)
app.add_typer(rounds.app, name="round")
app.add_typer(stage.app, name="stage")
app.add_typer(custodian.app, name="custodian")
app.add_typer(seal.app, name="seal")
app.add_typer(audit.app, name="audit")
app.command("plan", short_help="Tell whether the pool can run a round, and how much at once.")(plan.plan)
app.command("up", short_help="Run a whole installation on this machine.")(up.up)
app.command("invite")(server.invite)
app.command("api")(server.api)
app.command("dispatch")(server.dispatch)
app.add_typer(results.app, name="mlflow", short_help="Run MLflow's own pages on the results; check and rebuild them.")
app.command("doctor", short_help="Say what this machine has and lacks for a server.")(doctor.doctor)
app.command("config")(settings.config)
app.command("backup", short_help="Back up an installation while it runs.")(backup.backup)
app.command("restore", short_help="Make an installation anew from its backup.")(backup.restore)
app.add_typer(database.app, name="db")
app.add_typer(blobs.app, name="blobs")
app.add_typer(logs.app, name="log")
app.add_typer(competition.app, name="competition", short_help="Build, check and show competitions.")
app.add_typer(witness.app, name="witness")
app.command("verify", short_help="Verify a round from its bundle alone, offline.")(verify.verify)
app.command("rank", short_help="Rank entrants of any score table, with rank intervals.")(analysis.rank)
app.command("compare", short_help="Tell whether one entrant is better than another.")(analysis.compare)
app.command("stability", short_help="Tell how far the tasks of any score tables agree.")(analysis.stability)
app.command("gap", short_help="Tell the smallest difference that a round's size can tell.")(gaps.gap)
app.command("export", short_help="Write scores as tables for any tool, or as Every Eval Ever.")(analysis.export)
app.command("report", short_help="Make one page of plots and numbers from rounds or tables.")(report.report)
app.command("demo", short_help="Play a whole blind round on this machine.")(demo.demo)


def _carried_out() -> None:
    """Carry out the command.

    What the system refuses of a file or folder that somebody named is a refusal, not a fault of ours; so is a package of an extra that
    is not installed.
    """
    try:
        app(prog_name="acclimate")
    except ModuleNotFoundError as error:
        from acclimate import extras

        if (lacking := extras.of_the_install(error)) is None:
            raise
        raise lacking from error
    except OSError as error:
        from acclimate import files

        if isinstance(error, ConnectionError) or (refusal := files.of_the_system(error)) is None:
            raise
        raise refusal from error


def run() -> None:
    """Run the command line of this process, and end it."""
    try:
        _carried_out()
    except Refusal as refusal:
        complain(refusal, as_json="--json" in sys.argv and sys.argv[1] != "demo")
        if "--stop-with-stdin" in sys.argv:
            from acclimate import console, supervision

            console.say(supervision.REFUSED, level="error", **supervision.reported(refusal))
        sys.exit(1)
    except SystemExit as end:
        if end.code == 130:
            say("interrupted")
        raise
