"""The next round of a competition: what it takes over from the last one, what is different, and whether its holdout is new.

Nothing is signed before all of it was looked at. A round that was begun with this is looked at once more when it is sealed: between the two
somebody may have built the folder again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from acclimate import files
from acclimate.client import holdouts, organizer
from acclimate.client.connection import Client, Progress
from acclimate.client.definitions import definition_of
from acclimate.client.entrant import Say
from acclimate.client.holdouts import Seen
from acclimate.client.parties import Auditor, Custodian
from acclimate.client.public_files import DEFINITION_FILE
from acclimate.client.servers import Witnesses
from acclimate.keys import Keys
from acclimate_competitions import definition, differences, digests, records
from acclimate_competitions.definition import Competition
from acclimate_competitions.differences import Difference
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record

QUESTION = frozenset({"recipe", "tasks"})
"""Parts of a definition by which a round is another question than the one before, so that scores of the two are not of one kind."""


@dataclass(frozen=True)
class Following:
    """What was found out about the next round before anything was signed.

    Attributes:
        last: RoundDefined of the round that it follows.
        competition: its definition.
        differences: what is not as in the last round.
        seen: what could be told of each earlier holdout.
    """

    last: Record
    competition: Competition
    differences: tuple[Difference, ...]
    seen: tuple[Seen, ...]

    def document(self) -> dict[str, Any]:
        """All of it as JSON-ready data."""
        return {
            "last": self.last.round,
            "recipe": {"before": self.last["recipe"], "after": self.competition.preparation.digest},
            "differences": [difference.document() for difference in self.differences],
            "earlier": [seen.document() for seen in self.seen],
        }


def look(
    client: Client,
    keys: Keys,
    last: str,
    folder: Path,
    *,
    name: str = "",
    recipe_changed: bool = False,
    say: Say = lambda line: None,
) -> Following:
    """Look at everything that the next round must have in common with the last one, and must not with any.

    1. The last round: the one named, or the newest of the competition named that is not void, of these keys where they have one.
    2. Where the folder has no definition it gets the last round's, byte for byte. The new round's name is free, or that of a round just begun.
    3. The recipe is the last round's, or it is said that it is not.
    4. The splits are sound, and the holdout is disjoint from all that earlier rounds have.

    Args:
        client: a connection for the organizer's account.
        keys: the organizer's keys.
        last: a competition's name, or a round's id or its beginning.
        folder: the new splits, built; with a definition of its own where something is to be different.
        name: of the new round, which may be begun already by this command.
        recipe_changed: the organizer knows that the rounds are prepared by different recipes.
        say: told what takes its time.

    Raises:
        Refusal: round_unknown; round_exists; guard_failed, where the recipe changed unsaid; splits_invalid, where the holdout is not new; …
    """
    from acclimate_competitions import splits
    from acclimate_runners import prompts

    # 1
    defined, before = definition_of(client, _last(client, keys, last, but=name, say=say))
    # 2
    if not (folder / DEFINITION_FILE).exists() and folder.is_dir():
        files.write(folder / DEFINITION_FILE, before.raw, mode=0o644)
        say(f"{folder / DEFINITION_FILE}: the definition of {defined.round}")
    competition = definition.load(folder)
    if competition.slug != before.slug:
        raise Refusal(
            "definition_invalid",
            f"{folder} is of the competition {competition.slug!r}, {defined.round} of {before.slug!r}",
            hint="another competition's first round: acclimate round create",
        )
    organizer.require_free(client, competition.slug, name)
    # 3
    if competition.preparation.digest != defined["recipe"] and not recipe_changed:
        changed = [d for d in differences.of_definitions(before, competition) if d.part == "recipe"]
        raise Refusal(
            "guard_failed",
            f"the recipe is {competition.preparation.digest}, that of {defined.round} is {defined['recipe']}",
            hint="scores of the two are of differently prepared models; if that is meant, say so: --recipe-changed",
            problems=[f"{d.key}: {differences.told(d.before)} → {differences.told(d.after)}" for d in changed],
        )
    # 4
    splits.check(folder, competition)
    prompts.check(folder, competition)
    fields = {"files": {name: digests.of_file(path) for name, path in splits.public_files(folder).items()}}
    changes = [
        *differences.of_definitions(before, competition),
        *differences.of_rounds(defined.fields, {**fields, "code": client.terms()["code"]}),
    ]
    begun = next((s["round"] for s in _rounds(client, competition.slug) if s.get("name") == name), "")
    seen = holdouts.compare(client, keys, competition, folder, but=begun, say=say)
    holdouts.require_disjoint(seen, public=competition.data_is_public)
    return Following(defined, competition, tuple(changes), tuple(seen))


def custodians_of(last: Record) -> list[Custodian]:
    """Those of the last round, for the next one where no others are named."""
    return [dict(custodian) for custodian in last["custodians"]]


def next_round(
    client: Client,
    keys: Keys,
    following: Following,
    folder: Path,
    *,
    name: str,
    dates: Mapping[str, datetime],
    custodians: Sequence[Custodian] = (),
    auditor: Auditor | None = None,
    witnesses: Witnesses | None = None,
    progress: Progress | None = None,
    say: Say = lambda line: None,
) -> str:
    """Define the round that was looked at; its id. As organizer.create_round, of which RoundDefined names the last round as its predecessor.

    Raises:
        Refusal: round_exists, where the name is the last round's or another's; as organizer.create_round.
    """
    return organizer.create_round(
        client,
        keys,
        folder,
        custodians=custodians or custodians_of(following.last),
        name=name,
        auditor=auditor,
        witnesses=witnesses,
        predecessor=following.last.round,
        progress=progress,
        say=say,
        **_dates(following.competition, dates, now=records.parse_time(client.terms()["now"])),
    )


def _dates(competition: Competition, given: Mapping[str, datetime], *, now: datetime) -> dict[str, datetime]:
    """The dates given; those of the definition that are over, as they were the last round's, are left out of account."""
    dates = dict(given)
    if "closes" in dates:
        dates.setdefault("opens", max(now, competition.round.opens or now))
        latest = dates.setdefault(
            "closes_latest", max(dates["closes"], competition.round.closes_latest or dates["closes"])
        )
        if competition.round.release_by is None or competition.round.release_by <= latest:
            dates.setdefault("release_by", latest + organizer.RELEASE_AFTER)
    return dates


def _last(client: Client, keys: Keys, given: str, *, but: str, say: Say) -> str:
    """The id of the round that is followed, which has another name than the one to be begun; anybody may name a competition as others do.

    Raises:
        Refusal: round_unknown.
    """
    mine = [summary for summary in _rounds(client, given) if summary.get("name") != but]
    if not mine:
        return given
    standing = [str(summary["round"]) for summary in mine if summary["phase"] != "voided"]
    found = standing or [str(summary["round"]) for summary in mine]
    others: list[str] = []
    for round_id in found:
        if definition_of(client, round_id)[0].by == keys.public:
            if others:
                say(
                    f"note: {others[0]} is newer, and another organizer's: it is not followed, unless you name it by its id"
                )
            return round_id
        others.append(round_id)
    say(f"note: {found[0]} is another organizer's, and no round of {given} is of the key in {keys.folder}")
    return found[0]


def _rounds(client: Client, slug: str) -> list[dict[str, Any]]:
    """Rounds of a competition, the newest first."""
    return [summary for summary in client.rounds() if summary.get("competition") == slug]
