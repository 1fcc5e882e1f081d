"""What an organizer does: define a round, seal its holdout, move its close, publish its ranking, void it.

The holdout never leaves the organizer's machine in clear, and the seal's secret exists only while sealing. What was sealed is kept as
ciphertext in `seals/<round>/` of the key folder until the server has it, so that an interrupted sealing goes on with the same seal.

The rounds that a key folder created are kept in its `rounds.json`, each with the digest of the holdout that was looked at then. A beginning
of an id means one of these, whatever the server says, and nothing is signed or sealed for a round that another key defined: no server
chooses whose custodians get the shares.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from acclimate import files
from acclimate.client import parties, seals, servers
from acclimate.client.addresses import require_round
from acclimate.client.connection import Client, Progress
from acclimate.client.definitions import definition_of
from acclimate.client.entrant import Say, baseline_keys, enter
from acclimate.client.folder import load_account
from acclimate.client.folder_lock import alone
from acclimate.client.parties import Auditor, Custodian
from acclimate.client.servers import Witnesses
from acclimate.client.voiding import approvals_of, newest_history
from acclimate.keys import Keys
from acclimate.verify import files as bundles
from acclimate_competitions import definition, digests, records, rounds
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.guards import require_baseline
from acclimate_competitions.metrics import MAJORITY
from acclimate_competitions.records import Record, format_time

ROUNDS_FILE = "rounds.json"
_DATES = ("opens", "closes", "closes_latest", "release_by")
_BEGUN = frozenset({"draft", "sealed"})
"""Phases in which the same command again goes on with a round."""
RELEASE_AFTER = timedelta(days=14)
"""Default of release_by, counted from closes_latest."""


def create_round(
    client: Client,
    keys: Keys,
    folder: Path,
    *,
    custodians: Sequence[Custodian],
    opens: datetime | None = None,
    closes: datetime | None = None,
    closes_latest: datetime | None = None,
    release_by: datetime | None = None,
    name: str | None = None,
    auditor: Auditor | None = None,
    witnesses: Witnesses | None = None,
    predecessor: str = "",
    progress: Progress | None = None,
    say: Say = lambda line: None,
) -> str:
    """Define a round of a built competition; its id. The same again is the same round, with the dates that it was begun with.

    1. Definition, splits, name and people are checked, and that no earlier round made the holdout known; for log and witnesses see servers.py.
    2. RoundDefined is made and put through the round's own rules, before anything is sent.
    3. Definition and public files are uploaded; never a holdout.
    4. The id is kept in the key folder, with the holdout's digest, and RoundDefined is sent.

    Args:
        client: a connection for the organizer's account.
        keys: the organizer's keys.
        folder: the built competition.
        custodians: one for each name in the definition, in any order.
        opens: when submissions may begin; None: the definition's date, as for the next three; else now, where closes is given.
        closes: when they end.
        closes_latest: how far the close may be moved; else not at all.
        release_by: when custody has failed; else RELEASE_AFTER later.
        name: the round's name; None: the definition's.
        auditor: the public part of the auditor whom the definition names.
        witnesses: those that the server must have, and their quorum; None: those of the folder's last round, else none.
        predecessor: the id of the round that this one follows, or takes the place of.
        progress: called while uploading with (bytes done, bytes in all).
        say: told the log, evaluators and witnesses of the round, before anything is signed.

    Raises:
        Refusal: definition_invalid, splits_invalid, guard_failed, log_inconsistent, round_exists, …
    """
    from acclimate_competitions import splits

    # 1
    competition = _checked(folder)
    name = name or competition.round.name
    _require_new(client, keys, competition, folder, name=name, predecessor=predecessor, say=say)
    public, server = splits.public_files(folder), client.terms()
    at = records.parse_time(server["now"])
    given = {"opens": opens, "closes": closes, "closes_latest": closes_latest, "release_by": release_by}
    dates, people = _plan(competition, custodians, given, now=at)
    fields = {
        "competition": competition.slug,
        "name": name,
        "definition": competition.digest,
        "files": {label: digests.of_file(path) for label, path in public.items()},
        "recipe": competition.preparation.digest,
        "scorer": rounds.scorer_digest(competition),
        "policy": competition.ranking.digest,
        **dates,
        **parties.auditor(competition, auditor),
        "grace": int(competition.round.grace.total_seconds()),
        "id_digits": records.ID_DIGITS,
        "k": competition.custody.threshold,
        "custodians": people,
        "organizer": {"name": load_account(keys.folder).id, "ed25519": keys.public},
        "code": server["code"],
        **servers.agreed(client, keys, server, asked=witnesses, say=say),
        **({"predecessor": predecessor} if predecessor else {}),
    }
    # 2
    request = _signed(keys, fields, competition, now=at)
    # 3
    _upload(client, [folder / "competition.toml", *public.values()], progress=progress)
    # 4
    created = _define(client, keys, request, holdout=digests.of_tree(splits.holdout_files(folder).items()), say=say)
    servers.keep(keys.folder, fields)
    return created


def seal_round(
    client: Client,
    keys: Keys,
    round_id: str,
    folder: Path,
    *,
    holdout_changed: bool = False,
    progress: Progress | None = None,
    say: Say = lambda line: None,
    random: Callable[[int], bytes] = secrets.token_bytes,
) -> dict[str, Any]:
    """Seal the holdout of a built competition for a round's custodians, and hand in the rehearsal; {seal, index}.

    1. The round is one that these keys defined. Where the log has its seal, it is the one kept here, of this holdout.
    2. Definition and public files are the round's, the holdout is the one that was looked at when the round was created. It is none that an earlier
       round has made known, and, where the round follows another, disjoint from all.
    3. Holdout and dummy rows are sealed with secrets of their own; the secrets are split, wrapped and forgotten.
    4. Ciphertext, HoldoutSealed and envelopes are sent, and digests of the rows are kept once the log has the seal; then the same of the rehearsal.

    Args:
        client: a connection for the organizer's account.
        keys: the organizer's keys.
        round_id: the round, or a prefix of its id.
        folder: the built competition.
        holdout_changed: the organizer knows that the holdout was built anew since the round was created.
        progress: called while uploading with (bytes done, bytes in all).
        say: called with a sentence at each step.
        random: gives that many uniform random bytes.

    Raises:
        Refusal: round_unknown, signature_invalid, conflict, splits_invalid, phase_wrong, …
    """
    from acclimate.client import holdouts
    from acclimate_competitions import splits
    from acclimate_runners import prompts

    # 1
    defined, competition = own_round(client, keys, round_id)
    work = keys.folder / "seals" / defined.round
    work.parent.mkdir(mode=0o700, exist_ok=True)
    with alone(work.with_name(f".{work.name}.lock"), doing=f"sealing {defined.round}", within=0.0):
        files_of = splits.holdout_files(folder)
        holdout = digests.of_tree(files_of.items())
        seals.require_same(client, work, defined, holdout=holdout, folder=folder)
        # 2
        looked_at = None if holdout_changed else _looked_at(keys, defined)
        seals.require_created_from(folder, defined, competition, holdout=holdout, looked_at=looked_at)
        splits.check(folder, competition)
        prompts.check(folder, competition)
        follows = "predecessor" in defined.fields
        holdouts.require_unknown(client, keys, competition, folder, but=defined.round, follows=follows, say=say)
        # 3
        sealed = seals.made(work, defined, files_of, holdout=holdout, random=random, say=say)
        # 4
        index = seals.hand_in(client, keys, defined, sealed, progress=progress, say=say)
        holdouts.keep(keys, defined, competition, folder, seal=sealed["real"]["fields"]["seal"])
        seals.rehearse(client, keys, defined, sealed, progress=progress, say=say)
        return {"round": defined.round, "seal": sealed["real"]["fields"]["seal"], "index": index}


def _looked_at(keys: Keys, defined: Record) -> str | None:
    """The digest of the holdout that was looked at when a round was created; None where the folder keeps none."""
    path = keys.folder / ROUNDS_FILE
    kept = files.read_json(path).get(defined.round, {}) if path.exists() else {}
    return kept.get("holdout") if isinstance(kept, dict) else None


def extend(client: Client, keys: Keys, round_id: str, *, closes: datetime) -> dict[str, Any]:
    """Move the close of an open round later, never beyond closes_latest; {index, record, …}."""
    round_id = own_round(client, keys, round_id)[0].round
    request = records.sign("ClosingExtended", round_id, {"closes": format_time(closes)}, key=keys.ed25519)
    return client.post(round_id, "extension", request)


def enter_baseline(
    client: Client, keys: Keys, round_id: str, *, name: str, ed25519: str | None = None
) -> dict[str, Any]:
    """Register a baseline that the definition names as an entrant.

    Its submissions are signed by a key of its own, which `submit(…, baseline=name)` finds below the organizer's key folder;
    ed25519 names another public key instead.
    """
    defined, competition = own_round(client, keys, round_id)
    round_id = defined.round
    # Before a key is made for it.
    require_baseline(competition, name, baseline=True)
    fields = {"entrant": name, "ed25519": ed25519 or baseline_keys(keys, name).public, "conflicts": ["baseline"]}
    return enter(client, round_id, fields, keys)


def submitted_baselines(competition: Competition) -> list[str]:
    """The baselines that the organizer submits as models; the majority predictor needs none."""
    return [name for name in competition.ranking.baselines if name != MAJORITY]


def publish(
    client: Client, keys: Keys, round_id: str, *, reason: str = "", say: Say = lambda line: None
) -> dict[str, Any]:
    """Publish the ranking of an evaluated round, after recomputing it from the predictions here; {index, ranking}.

    1. The bundle is downloaded and audited as a stranger would, by the log key that RoundDefined names: nothing may FAIL. Its entries are those
       that this machine has read of the log itself.
    2. Scores are recomputed from predictions and holdout, the ranking from the scores: a second process, on the
       organizer's machine. The ranking that is signed is the recomputed one.
    3. RankingPublished is sent with the document; the server compares it with its own.

    Raises:
        Refusal: phase_wrong, bundle_invalid, log_inconsistent, scores_invalid, …
    """
    from acclimate.client import rankings

    defined, competition = own_round(client, keys, round_id)
    # 1
    with bundles.aside("acclimate-publish-") as temporary:
        whole = competition.round.holdout_after == "private"
        bundle = client.bundle(defined.round, temporary / "bundle.zip", whole=whole)
        # 2
        document, history = rankings.recomputed(client, keys, bundle, defined)
    ranking = digests.of_json(document)
    submitted = {record["entrant"] for _, record in history.numbered if record.type == "SubmissionAccepted"}
    for name in submitted_baselines(competition):
        if name not in submitted:
            say(f"warning: the baseline {name}, which the definition names, was never submitted; it has no scores")
    # 3
    fields = {"ranking": ranking, "policy": competition.ranking.digest, "reason": reason}
    request = records.sign("RankingPublished", defined.round, fields, key=keys.ed25519)
    answer = client.publish(defined.round, request, ranking=document)
    return {"round": defined.round, "index": answer["index"], "digest": ranking, "ranking": document}


def void(
    client: Client,
    keys: Keys,
    round_id: str,
    *,
    reason: str,
    predecessor: str = "",
    approvals: Sequence[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """Void a round; after its close k custodians' approvals of exactly this reason, in its phase, are needed; {index, record, …}."""
    defined, competition = own_round(client, keys, round_id)
    round_id = defined.round
    # Which phase it is in, this machine's fold of the log says: what is signed for one is of no use in another.
    state = rounds.fold(newest_history(client, keys, defined).numbered, competition)
    if "RoundVoided" not in rounds.allowed(state.phase):
        raise Refusal("phase_wrong", f"{state.id} is {state.phase}: nothing is left to void", hint="nothing was signed")
    fields: dict[str, Any] = {"reason": reason, "phase": str(state.phase)}
    if predecessor:
        fields["predecessor"] = predecessor
    if approvals:
        fields["approvals"] = approvals_of(approvals, round_id, fields, signer=keys.public)
    return client.post(round_id, "void", records.sign("RoundVoided", round_id, fields, key=keys.ed25519))


def _signed(keys: Keys, fields: dict[str, Any], competition: Competition, *, now: datetime) -> dict[str, Any]:
    """RoundDefined, signed, once it has passed the rules by which a round begins."""
    if records.parse_time(fields["closes"]) <= now:
        sentence = f"the round would close {fields['closes']}, it is {format_time(now)}"
        raise Refusal("guard_failed", sentence, hint="name a later close, such as --closes +30d")
    request = records.sign("RoundDefined", "", fields, key=keys.ed25519)
    rounds.begin(Record("RoundDefined", request["round"], now, fields, request["by"], request["sig"]), competition)
    return request


def _checked(folder: Path) -> Competition:
    """The definition of a built competition whose splits are sound."""
    from acclimate_competitions import splits
    from acclimate_runners import adapter_files, prompts

    competition = definition.load(folder)
    splits.check(folder, competition)
    prompts.check(folder, competition)
    adapter_files.check_bases(folder, competition)
    return competition


def _plan(
    competition: Competition, custodians: Sequence[Custodian], given: Mapping[str, datetime | None], *, now: datetime
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The round's dates and custodians; what is missing of both is refused together."""
    refusals: list[Refusal] = []
    dates: dict[str, str] = {}
    people: list[dict[str, Any]] = []
    try:
        dates = _dates(competition, given, now=now)
    except Refusal as refusal:
        refusals.append(refusal)
    try:
        people = parties.custodians(custodians, competition)
    except Refusal as refusal:
        refusals.append(refusal)
    if len(refusals) > 1:
        raise Refusal(
            "definition_invalid",
            f"{len(refusals)} things are missing: {refusals[0].sentence}",
            hint="; ".join(refusal.hint for refusal in refusals),
            problems=[refusal.sentence for refusal in refusals],
        )
    if refusals:
        raise refusals[0]
    return dates, people


def _dates(competition: Competition, given: Mapping[str, datetime | None], *, now: datetime) -> dict[str, str]:
    chosen = {name: value or getattr(competition.round, name) for name, value in given.items()}
    if given["closes"] is not None and chosen["opens"] is None:
        chosen["opens"] = now
    missing = [name for name in ("opens", "closes") if chosen[name] is None]
    if missing:
        raise Refusal(
            "definition_invalid",
            f"neither the definition nor the command says when the round {' and '.join(missing)}",
            hint="give --closes, and --opens where that is not now, such as --opens 2027-03-01T12:00:00Z --closes +30d",
        )
    if given["closes"] is not None and given["closes_latest"] is None:
        chosen["closes_latest"] = max(chosen["closes"], chosen["closes_latest"] or chosen["closes"])
    latest = chosen["closes_latest"] = chosen["closes_latest"] or chosen["closes"]
    chosen["release_by"] = chosen["release_by"] or latest + RELEASE_AFTER
    return {name: format_time(moment) for name, moment in chosen.items() if moment is not None}


def _define(client: Client, keys: Keys, request: dict[str, Any], *, holdout: str, say: Say) -> str:
    """Keep the round's id, then send RoundDefined; an id that the server refuses is forgotten, and the one of the same round before taken.

    With the id the digest is kept of the holdout that was looked at, the last time that the command was given.
    """
    round_id = str(request["round"])
    with _keeping_rounds(keys) as known:
        new = round_id not in known
        known[round_id] = {"server": client.url, "holdout": holdout}
    try:
        answer = client.define(request)
    except Refusal as refusal:
        # Whoever can't be reached, or whose database gives no answer, may have logged it.
        if refusal.status < 500 and new:
            with _keeping_rounds(keys) as known:
                known.pop(round_id, None)
        if refusal.code == "round_exists" and (before := _begun(client, keys, request["fields"])) is not None:
            say(
                f"going on with {before.round}, which was begun before with the same words: it opens {before['opens']} and closes"
                f" {before['closes']}, whatever dates are given now"
            )
            with _keeping_rounds(keys) as known:
                known[before.round] = {"server": client.url, **known.get(before.round, {}), "holdout": holdout}
            return before.round
        raise
    if answer.get("round") != round_id:
        raise Refusal("log_inconsistent", f"defined was {round_id}, the server answers with {answer.get('round')!r}")
    return round_id


def _begun(client: Client, keys: Keys, fields: Mapping[str, Any]) -> Record | None:
    """RoundDefined of the round of this name, where these keys signed it and it says the same but for its dates."""
    for summary in _named(client, fields["competition"], fields["name"]):
        if summary["phase"] in _BEGUN:
            defined, _ = definition_of(client, summary["round"])
            same = {**defined.fields, **{name: fields[name] for name in _DATES}} == fields
            return defined if same and defined.by == keys.public else None
    return None


def require_free(client: Client, slug: str, name: str) -> None:
    """Refuse a round's name that one has which entrants have seen open, or that is void: it is not begun again.

    Raises:
        Refusal: round_exists.
    """
    for summary in _named(client, slug, name):
        if summary["phase"] not in _BEGUN:
            raise Refusal(
                "round_exists",
                f"the competition {slug!r} has a round {name!r} already, {summary['round']}, and it is {summary['phase']}",
                hint="nothing was signed; another round needs a name of its own: --name NAME",
            )


def _require_new(
    client: Client, keys: Keys, competition: Competition, folder: Path, *, name: str, predecessor: str, say: Say
) -> None:
    """Refuse a name that is taken, and a holdout that an earlier round of these keys has made known; a round begun under this name is this one."""
    from acclimate.client import holdouts

    require_free(client, competition.slug, name)
    if predecessor:
        # What follows another was compared with all of them.
        return
    begun = next((str(summary["round"]) for summary in _named(client, competition.slug, name)), "")
    holdouts.require_unknown(client, keys, competition, folder, but=begun, follows=False, say=say)


def _named(client: Client, slug: str, name: str) -> list[Mapping[str, Any]]:
    """The server's rounds of a competition that have this name."""
    return [each for each in client.rounds() if (each.get("competition"), each.get("name")) == (slug, name)]


@contextmanager
def _keeping_rounds(keys: Keys) -> Iterator[dict[str, Any]]:
    """The rounds that the folder keeps, to be changed: nobody else changes them meanwhile."""
    path = keys.folder / ROUNDS_FILE
    with alone(keys.folder / ".rounds.lock", doing=f"writing {path}"):
        known = files.read_json(path) if path.exists() else {}
        yield known
        files.write_json(path, known)


def own_round(client: Client, keys: Keys, round_id: str) -> tuple[Record, Competition]:
    """RoundDefined and definition of a round that these keys defined; a beginning of an id means one of `rounds.json`.

    Raises:
        Refusal: round_unknown; signature_invalid, where another key defined the round; as definition_of.
    """
    path = keys.folder / ROUNDS_FILE
    known = files.read_json(path) if path.exists() else {}
    require_round(round_id)
    found = [name for name in known if name == round_id] or [name for name in known if name.startswith(round_id)]
    if len(found) > 1:
        raise Refusal(
            "round_unknown", f"several rounds of {path} begin with {round_id!r}: {', '.join(found)}", hint="name one"
        )
    wanted = found[0] if found else round_id
    defined, competition = definition_of(client, wanted)
    if defined.by != keys.public:
        raise Refusal(
            "signature_invalid",
            f"{defined.round} was defined by {defined.by}, the key in {keys.folder} is {keys.public}",
            hint="nothing was signed; name the key folder that created the round: --keys DIR",
        )
    if defined.round != wanted:
        raise Refusal(
            "round_unknown",
            f"{path} has no round that begins with {round_id!r}",
            hint=f"the server knows {defined.round}; if that is the round you mean, give its whole id",
        )
    return defined, competition


def _upload(client: Client, paths: Sequence[Path], *, progress: Progress | None) -> None:
    total = sum(path.stat().st_size for path in paths)
    before = 0
    for path in paths:
        client.put_blob(path, progress=_after(before, total, progress))
        before += path.stat().st_size


def _after(before: int, total: int, progress: Progress | None) -> Progress | None:
    if progress is None:
        return None
    tell = progress
    return lambda done, size: tell(before + done, total)
