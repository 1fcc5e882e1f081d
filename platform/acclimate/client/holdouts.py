"""Whether a new holdout is disjoint from all that earlier rounds of its competition hold, as far as this machine can tell.

Of each holdout that it seals a key folder keeps digests, in `holdouts/<round>.json` (mode 0600: they are as secret as the holdout), with the id of
the seal that they are of: they count for a round whose seal in the log that is, and for no other. A holdout that was published is read
from the round's bundle, which is audited up to it; one that stays private from the whole bundle, which its own organizer gets. What can be
told in none of these ways is said, and why.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate import files, verify
from acclimate.client import seals
from acclimate.client.connection import Client
from acclimate.client.definitions import definition_of
from acclimate.keys import Keys
from acclimate.verify import files as bundles
from acclimate_competitions import digests
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "holdouts"
_RANKED = frozenset({"published"})
_WHOLE = frozenset({"evaluated", "published"})
_NOTHING = frozenset({"draft"})
_OUT = frozenset({"released", "opened", "evaluated"})
Say = Callable[[str], None]


@dataclass(frozen=True)
class Seen:
    """What could be told of an earlier round.

    Attributes:
        round, phase: which, and where it stands; its phase is "elsewhere" where this server does not have it.
        by: kept digests | published holdout | whole bundle; empty where the holdouts could not be compared.
        why: why they could not, or what could not.
        problems: what stands in both and must not.
        notes: what stands in both and may.
    """

    round: str
    phase: str
    by: str
    why: str
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """All of it as JSON-ready data."""
        return {
            "round": self.round,
            "phase": self.phase,
            "holdout": "compared" if self.by else "NOT CHECKED",
            "by": self.by or None,
            "why": self.why or None,
            "problems": list(self.problems),
            "notes": list(self.notes),
        }


def keep(keys: Keys, defined: Record, competition: Competition, folder: Path, *, seal: str) -> None:
    """Keep the digests of a holdout that is sealed for a round, once the log has the seal.

    Raises:
        Refusal: splits_invalid, no_space, file_unreadable.
    """
    from acclimate_competitions import holdouts

    document = holdouts.kept(holdouts.tables_of(folder, competition, "holdout"), competition)
    _write(keys, defined, document | {"seal": seal})


def compare(
    client: Client, keys: Keys, competition: Competition, folder: Path, *, but: str = "", say: Say = lambda line: None
) -> list[Seen]:
    """What can be told of each earlier round of a competition, the newest first.

    1. Each round of the competition that the server names, and each of which the key folder keeps digests.
    2. The new holdout against the earlier one: by example id and input; shared clusters are noted.
    3. The new holdout against what the earlier round gave to everybody.
    4. What the new round will give to everybody against an earlier holdout that is still secret.

    Args:
        client: a connection for the organizer's account.
        keys: the organizer's keys.
        competition: the new round's definition.
        folder: the built competition of the new round.
        but: the new round's id, where it is defined already.
        say: told what takes its time.

    Raises:
        Refusal: splits_invalid, where a file can't be read; bundle_invalid, where a bundle of an earlier round FAILED; as definition_of.
    """
    from acclimate_competitions import holdouts

    mine = holdouts.tables_of(folder, competition, "holdout")
    given = holdouts.public_tables(folder, competition)
    found = []
    # 1
    for round_id, phase in _earlier(client, keys, competition.slug):
        if round_id == but:
            continue
        if phase in _NOTHING:
            found.append(Seen(round_id, phase, "", "nothing is sealed in it yet"))
            continue
        standing = _standing(client, round_id, phase)
        known, by, why = _known(client, keys, round_id, phase=phase, say=say)
        problems, notes = list[str](), list[str]()
        if known is not None:
            # 2
            for overlap in holdouts.shared(known, mine, competition):
                unopened = standing == "unopened"
                told = f"its holdout has {overlap.sentence()}"
                told += "; it was voided before a share was out, so they may serve again" if unopened else ""
                (notes if unopened or overlap.what == "clusters" else problems).append(told)
            if tasks := holdouts.incomparable(known, mine):
                why = f"inputs of the task {tasks[0]!r} could not be compared: they were made of columns that are not there any more"
            # 4
            if standing == "secret":
                problems += [
                    f"its holdout is secret still, and this round would give away {overlap.sentence()}"
                    for overlap in holdouts.shared(known, given, competition)
                    if overlap.what != "clusters"
                ]
        # 3
        if phase != "elsewhere":
            problems += _made_public(client, round_id, competition, folder, mine)
        found.append(Seen(round_id, phase, by, why, tuple(problems), tuple(notes)))
    return found


def _standing(client: Client, round_id: str, phase: str) -> str:
    """Whether a round's holdout is secret still, was never opened and won't be (`unopened`), or may be known."""
    if phase == "elsewhere":
        return "known"
    if phase == "voided":
        passed = {each.get("phase") for each in client.round(round_id).get("phases") or []}
        return "known" if passed & _OUT else "unopened"
    private = definition_of(client, round_id)[1].round.holdout_after == "private"
    return "secret" if private or phase not in _RANKED else "known"


def require_unknown(
    client: Client,
    keys: Keys,
    competition: Competition,
    folder: Path,
    *,
    but: str,
    follows: bool,
    say: Say = lambda line: None,
) -> None:
    """Refuse a holdout that an earlier round of these keys has made known already, or, in a round that follows another, shares with any.

    1. A round that follows another: as `compare`, all of it.
    2. Any other: the rounds of the same competition of which the key folder keeps digests, as `compare` knows them. What stands in a round whose
       holdout may be known by now is refused, unless the definition says that the data are public; what stands in one that is secret still is said.

    Args:
        client: a connection for the organizer's account.
        keys: the organizer's keys.
        competition: the round's definition.
        folder: the built competition.
        but: the round's own id; empty where it is not begun.
        follows: whether it follows another.
        say: told what takes its time, and what is no reason to refuse.

    Raises:
        Refusal: splits_invalid; as compare.
    """
    from acclimate_competitions import holdouts

    # 1
    if follows:
        require_disjoint(
            compare(client, keys, competition, folder, but=but, say=say), public=competition.data_is_public
        )
        return
    # 2
    earlier = [
        (round_id, phase)
        for round_id, phase in _earlier(client, keys, competition.slug)
        if round_id != but and phase not in _NOTHING and _path(keys, round_id).exists()
    ]
    # A holdout may have millions of rows, and most rounds are the first of their keys.
    mine = holdouts.tables_of(folder, competition, "holdout") if earlier else {}
    found = []
    for round_id, phase in earlier:
        known, by, why = _known(client, keys, round_id, phase=phase, say=say)
        if known is None:
            say(f"warning: {round_id}: its holdout was not compared: {why}")
            continue
        overlaps = [o for o in holdouts.shared(known, mine, competition) if o.what != "clusters"]
        if not overlaps:
            continue
        standing = _standing(client, round_id, phase)
        told = tuple(f"its holdout has {overlap.sentence()}" for overlap in overlaps)
        if standing == "known" and not competition.data_is_public:
            found.append(Seen(round_id, phase, by, "", told))
        else:
            why = "the definition says that the data are public" if standing == "known" else f"it is {phase}"
            say(f"warning: {round_id}: {told[0]}; {why}")
    require_disjoint(found)


def require_disjoint(found: list[Seen], *, public: bool = False) -> None:
    """Refuse a holdout that shares what it must not.

    Args:
        found: what was told of each earlier round.
        public: whether the definition says that the data are public anyway: rounds that follow each other have rows of their own all the same,
            since what one says beside the other is of two draws.

    Raises:
        Refusal: splits_invalid.
    """
    problems = [f"{seen.round}: {problem}" for seen in found for problem in seen.problems]
    if problems:
        hint = "draw other rows, and build the competition again; nothing was signed or sealed"
        if public:
            hint += "; to use rows of public data again, begin a round that follows none: acclimate round create … --name NAME"
        raise Refusal(
            "splits_invalid",
            f"the new holdout is not disjoint from earlier rounds: {problems[0]}",
            hint=hint,
            problems=problems,
        )


def _earlier(client: Client, keys: Keys, slug: str) -> Iterator[tuple[str, str]]:
    """(id, phase) of each earlier round."""
    there = set()
    for summary in client.rounds():
        if summary.get("competition") == slug:
            there.add(summary["round"])
            yield summary["round"], summary["phase"]
    for path in sorted((keys.folder / FOLDER).glob("*.json")):
        if path.stem not in there and _read(path).get("competition") == slug:
            yield path.stem, "elsewhere"


def _known(
    client: Client, keys: Keys, round_id: str, *, phase: str, say: Say
) -> tuple[Mapping[str, Any] | None, str, str]:
    """What is known of a holdout, how, and why not if nothing is."""
    document, lacks = _kept(client, keys, round_id, phase=phase)
    if document is not None:
        return document, str(document.get("source", "kept digests")), ""
    if phase == "elsewhere":
        return None, "", lacks
    defined, competition = definition_of(client, round_id)
    private = competition.round.holdout_after == "private"
    own = defined.by == keys.public
    if phase in _RANKED and not private:
        return _of_bundle(client, keys, defined, competition, say=say), "published holdout", ""
    if phase in _WHOLE and own:
        return _of_bundle(client, keys, defined, competition, say=say, whole=private), "whole bundle", ""
    if private and not own:
        return None, "", "its holdout stays private, and another organizer has it"
    return None, "", f"its holdout is not opened to this machine, and {lacks}"


def _kept(client: Client, keys: Keys, round_id: str, *, phase: str) -> tuple[Mapping[str, Any] | None, str]:
    """The digests that the key folder keeps of a holdout, where they are of the seal that the log has; else why there are none."""
    path = _path(keys, round_id)
    if not path.exists():
        return None, f"{keys.folder} keeps no digests of it"
    document = _read(path)
    # What was read from a bundle was audited against the log; a round that is not here has no log here.
    if "source" in document or phase == "elsewhere":
        return document, ""
    # Earlier versions wrote no seal here, but beside it.
    own = document.get("seal") or seals.kept_id(keys.folder / "seals" / round_id)
    there = seals.logged(client, round_id)
    if there is not None and own == there[1]:
        return document, ""
    sealed = "none" if there is None else there[1]
    return None, f"the digests in {path} are of the seal {own or 'of which nothing is kept'}, the log has {sealed}"


def _of_bundle(
    client: Client, keys: Keys, defined: Record, competition: Competition, *, say: Say, whole: bool = False
) -> Mapping[str, Any]:
    """What is kept of a holdout that a bundle holds, once the bundle is audited up to it."""
    from acclimate_competitions import holdouts

    say(f"reading the holdout of {defined.round} from its bundle")
    with bundles.aside("acclimate-next-") as folder:
        path = client.bundle(defined.round, folder / "bundle.zip", whole=whole)
        try:
            with bundles.opened(path) as bundle:
                report = verify.verify(bundle, log_key=defined["log"], levels=("seal",))
                shown = {check.name for check in report.checks if check.status == "ok"}
                if report.failed or report.round != defined.round or "holdout" not in shown:
                    raise Refusal(
                        "bundle_invalid",
                        f"the bundle of {defined.round} does not show its holdout: {report.summary}",
                        hint="fetch it and see: acclimate round bundle, acclimate verify",
                    )
                tables = {
                    task.name: holdouts.read(bundle.path(f"holdout/{task.name}.parquet")) for task in competition.tasks
                }
        except verify.Failed as failed:
            raise Refusal("bundle_invalid", f"the bundle of {defined.round}: {failed}") from failed
    document = holdouts.kept(tables, competition)
    source = "published holdout" if competition.round.holdout_after == "public" else "whole bundle"
    _write(keys, defined, document | {"source": source})
    return document


def _made_public(
    client: Client, round_id: str, competition: Competition, folder: Path, mine: "Mapping[str, pa.Table]"
) -> list[str]:
    """What of the new holdout an earlier round gave to everybody."""
    from acclimate_competitions import holdouts, splits

    defined, before = definition_of(client, round_id)
    own = {digests.of_file(path) for path in splits.public_files(folder).values()}
    problems = []
    with bundles.aside("acclimate-next-") as aside:
        for number, (name, digest) in enumerate(sorted(defined["files"].items())):
            # What is public in both rounds was compared with the holdout when the splits were checked.
            if digest in own or not name.startswith("splits/"):
                continue
            path = client.file(defined.round, name, aside / f"{number}.parquet")
            if digests.of_file(path) != digest:
                raise Refusal("log_inconsistent", f"{name} of {round_id} is not the file that it commits to")
            task = name.split("/")[1]
            document = holdouts.kept({task: holdouts.read(path)}, before)
            problems += [
                f"everybody has had, in {name}, {overlap.sentence()}"
                for overlap in holdouts.shared(document, mine, competition)
                if overlap.what != "clusters"
            ]
    return problems


def _path(keys: Keys, round_id: str) -> Path:
    return keys.folder / FOLDER / f"{round_id}.json"


def _write(keys: Keys, defined: Record, document: Mapping[str, Any]) -> None:
    path = _path(keys, defined.round)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    files.write_json(path, {"competition": defined["competition"], **document})


def _read(path: Path) -> dict[str, Any]:
    from acclimate_competitions import holdouts

    found = files.read_json(path)
    if not holdouts.is_kept(found):
        raise Refusal("file_unreadable", f"{path} holds no digests of a holdout", hint="put it back, or delete it")
    return dict(found)
