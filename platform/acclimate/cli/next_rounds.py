"""`acclimate round next` and `acclimate round anchors`: the next round of a competition, and what stands in it from earlier ones."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acclimate.cli import moments
from acclimate.cli.options import AsJson, KeysFolder, RoundId, connect, witnesses_asked
from acclimate.cli.output import bar, emit, say, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from acclimate.client.next_rounds import Following
    from acclimate_competitions.definition import Competition

WHEN = "RFC 3339 with an offset, or from now: +30s, +2h, +30d; or now."
Last = Annotated[
    str,
    typer.Argument(
        help="The competition, of which the newest round is meant, or the round that this one follows.",
        metavar="COMPETITION|ROUND",
    ),
]
Folder = Annotated[
    Path,
    typer.Argument(
        help="The new splits, built; with a competition.toml where something is to be different, else it gets the last round's.",
        metavar="FOLDER",
    ),
]
Custodians = Annotated[
    list[Path] | None,
    typer.Option(
        "--custodian",
        help="A custodian's public part, custodian.json; one for each. Else those of the last round.",
        metavar="FILE",
    ),
]
Auditor = Annotated[
    Path | None,
    typer.Option(
        "--auditor",
        help="The auditor's new public file, auditor.json, or its folder; a draw serves one round.",
        metavar="FILE",
    ),
]
Witnesses = Annotated[
    list[str] | None,
    typer.Option("--witness", help="As for `acclimate round create`; else those of your last round.", metavar="KEY"),
]
Quorum = Annotated[
    int | None, typer.Option("--quorum", min=0, help="How many of them must see the log before a release; 0: none.")
]


def next_round(
    last: Last,
    folder: Folder,
    keys: KeysFolder,
    name: Annotated[str, typer.Option("--name", help="The new round's name.")],
    closes: Annotated[
        str | None, typer.Option("--closes", help=f"When submissions end. {WHEN}", metavar="WHEN")
    ] = None,
    opens: Annotated[
        str | None, typer.Option("--opens", help="When submissions may begin; else now.", metavar="WHEN")
    ] = None,
    closes_latest: Annotated[
        str | None,
        typer.Option("--closes-latest", help="How far the close may be moved; else not at all.", metavar="WHEN"),
    ] = None,
    release_by: Annotated[
        str | None, typer.Option("--release-by", help="When custody has failed; else 14 days later.", metavar="WHEN")
    ] = None,
    custodian: Custodians = None,
    auditor: Auditor = None,
    witness: Witnesses = None,
    quorum: Quorum = None,
    recipe_changed: Annotated[
        bool,
        typer.Option(
            "--recipe-changed", help="The recipe is meant to be another one: scores are of differently prepared models."
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Look and tell; define nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Define the next round of a competition, after a look at what ties it to the earlier ones.

    The new holdout must be disjoint from every earlier one, by example id and by input, and from all that earlier rounds gave to everybody;
    the recipe must be the same, or it is said that it is not. What else is different is shown, and so is what could not be checked.
    Refused or interrupted, nothing is half done: the same command goes on, with the round that it had begun if there is one.

    Example: acclimate round next digits ./digits-2 --name 2027-2 --closes +30d --keys ./me
    """
    from acclimate.client import next_rounds
    from acclimate.files import read_json
    from acclimate_competitions.records import parse_time

    people = [read_json(path / "custodian.json" if path.is_dir() else path) for path in custodian or []]
    second = read_json(auditor / "auditor.json" if auditor.is_dir() else auditor) if auditor is not None else None
    wanted = witnesses_asked(witness or [], quorum)
    client, opened = connect(keys)
    with client, bar("uploading definition and public files") as progress:
        now = parse_time(client.terms()["now"])
        given = {"opens": opens, "closes": closes, "closes_latest": closes_latest, "release_by": release_by}
        dates = {label: moments.parse(text, now=now) for label, text in given.items() if text is not None}
        found = next_rounds.look(client, opened, last, folder, name=name, recipe_changed=recipe_changed, say=say)
        for line in _notes(found):
            say(line)
        created = ""
        if not dry_run:
            created = next_rounds.next_round(
                client, opened, found, folder, name=name, dates=dates, custodians=people, auditor=second,
                witnesses=wanted, progress=progress, say=say,
            )  # fmt: skip
            tell_begun(client.round(created), found.competition, folder, keys=keys)
    emit(
        {"round": created or None, **found.document()},
        as_json=as_json,
        text=[*_lines(found), *([created] if created else ["nothing was defined: --dry-run"])],
    )


def tell_begun(state: "Mapping[str, Any]", competition: "Competition", folder: Path, *, keys: Path) -> None:
    """Say of a round that was just defined when it opens and closes, which baselines are the organizer's to enter, and what comes next."""
    from acclimate.client import submitted_baselines
    from acclimate_competitions.records import parse_time

    created, now = state["round"], parse_time(state["now"])
    for name in ("opens", "closes"):
        say(f"{name:<6} {moments.show(parse_time(state[name]), now=now)}")
    anchors = [anchor.name for anchor in competition.anchors if anchor.model is not None]
    if anchors:
        say(
            f"the definition names the anchor(s) {', '.join(anchors)}; once the round is open you enter them with one command:"
        )
        say(f"  acclimate round anchors {created} --keys {keys}")
    for baseline in submitted_baselines(competition):
        if baseline in anchors:
            continue
        say(f"the definition names the baseline {baseline}; once the round is open you submit it:")
        say(f"  acclimate enter {created} --baseline {baseline} --keys {keys}")
        say(f"  acclimate submit MODEL --round {created} --baseline {baseline} --keys {keys}")
    say(f"next: acclimate round seal {created} {folder} --keys {keys}")


def _lines(found: "Following") -> list[str]:
    from acclimate_competitions.differences import told

    same = found.last["recipe"] == found.competition.preparation.digest
    rows: list[tuple[object, ...]] = [
        ("follows", found.last.round, ""),
        ("recipe", "the same" if same else "ANOTHER", found.competition.preparation.digest),
    ]
    rows += [(d.part, d.key, f"{told(d.before)} → {told(d.after)}") for d in found.differences]
    rows += [
        (
            "holdout",
            seen.round,
            f"disjoint, by its {seen.by}" + (f"; NOT CHECKED in part: {seen.why}" if seen.why else "")
            if seen.by
            else f"NOT CHECKED: {seen.why}",
        )
        for seen in found.seen
    ]
    return table(("what", "which", "found"), rows)


def _notes(found: "Following") -> list[str]:
    from acclimate.client.next_rounds import QUESTION

    notes = [f"note: {seen.round}: {note}" for seen in found.seen for note in seen.notes]
    if parts := sorted(QUESTION & {difference.part for difference in found.differences}):
        notes.append(
            f"note: {' and '.join(parts)} are not those of {found.last.round}: whoever compares scores of the two compares two questions, and"
            " every comparison says so"
        )
    if not found.seen:
        notes.append("note: there is no earlier round whose holdout the new one could share anything with")
    return notes


def anchors(
    round_id: RoundId,
    keys: KeysFolder,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="An anchor's folder, where no earlier round has it.", metavar="NAME=DIR"),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the server's check of each.")] = True,
    as_json: AsJson = False,
) -> None:
    """Enter every anchor that a round's definition names, unchanged: each as it was in the newest round that had it.

    An anchor is a baseline whose model the definition names by its digest, so that no other can be prepared in its place. Repeated, the command goes on.

    Example: acclimate round anchors digits-2027-2 --keys ./me
    """
    from acclimate.client import standing
    from acclimate.client.entrant import Sending

    folders = {}
    for given in model or []:
        name, equals, folder = given.partition("=")
        if not (name and equals and folder):
            raise typer.BadParameter(f"--model NAME=DIR, not {given!r}")
        folders[name] = Path(folder)
    client, opened = connect(keys)
    with client, bar("uploading") as progress:
        how = Sending(None, wait=wait, progress=progress, say=say)
        found = standing.enter_anchors(client, opened, round_id, models=folders, sending=how)
    rows = [(row["anchor"], row["state"], row["from"] or "-", row["model"]) for row in found]
    emit(
        found,
        as_json=as_json,
        text=table(("anchor", "state", "stands from", "model"), rows)
        if rows
        else ["the round's definition names no anchor with a model: nothing was entered"],
    )
    if any(row["state"] in ("refused", "forfeited") for row in found):
        raise typer.Exit(1)
