"""The round itself: its definition and data as committed, its records by the rules, its submissions by their commitments."""

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from acclimate import hand_overs
from acclimate.verify import others
from acclimate.verify.audit import Audit
from acclimate.verify.files import Bundle, parse
from acclimate.verify.report import Failed
from acclimate_competitions import definition, digests, manifests, records, rounds, zones
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Submission
from acclimate_competitions.records import Record

_SHOWN = 20


def find(audit: Audit) -> str:
    """Which of the log's rounds the bundle is about: see first_of. Whether its files really are this round's, later checks tell.

    The log may hold other rounds; their entries are there because the tree needs them, and are not judged.
    """
    audit.first = first_of(audit.records, audit.bundle)
    round_id = audit.records[audit.first].round
    audit.last = max(index for index, record in enumerate(audit.records) if record.round == round_id)
    beside = _others(audit)
    said = f"; besides, of the same competition and organizer: {', '.join(beside)}" if beside else ""
    return f"{round_id}, from log entry {audit.first}{said}"


def first_of(log: Sequence[Record], bundle: Bundle) -> int:
    """The RoundDefined that most of definition, ciphertext and manifests point to, by its place in the log.

    Raises:
        Failed: none or several.
    """
    defined = {index: r for index, r in enumerate(log) if r.type == "RoundDefined"}
    definition_file, ciphertext = (
        bundle.digest(name) if name in bundle else "" for name in ("definition.toml", "holdout.sealed")
    )
    sealed = {r.round for r in log if r.type == "HoldoutSealed" and r["ciphertext"] == ciphertext}
    named = bundle.read("submissions.jsonl") if "submissions.jsonl" in bundle else b""
    fit = {
        index: (r["definition"] == definition_file) + (r.round in sealed) + (f'"round":"{r.round}"'.encode() in named)
        for index, r in defined.items()
    }
    best = [index for index, points in fit.items() if points == max(fit.values()) and points > 0]
    if len(best) != 1:
        raise Failed(
            "entries.jsonl", f"{len(best)} of the log's {len(defined)} rounds fit this definition and ciphertext"
        )
    return best[0]


def own_records(bundle: Bundle) -> list[tuple[int, Record]]:
    """The records of the bundle's round with their log indices, RoundDefined first, as they stand there: nothing of them is checked.

    Raises:
        Failed: as first_of.
        Refusal: record_invalid.
    """
    log = [records.parse(line) for line in bundle.read("entries.jsonl").splitlines()]
    first = first_of(log, bundle)
    return [(i, record) for i, record in enumerate(log) if i >= first and record.round == log[first].round]


def _others(audit: Audit) -> list[str]:
    """The log's other rounds of this competition and organizer, and how each ended by its own records: see others.py.

    Whoever tries until a ranking pleases leaves the other tries here.
    """
    own = audit.records[audit.first]
    same = [
        name
        for name, (_, record) in others.defined(audit.records).items()
        if name != own.round
        and record["competition"] == own["competition"]
        and record["organizer"]["ed25519"] == own["organizer"]["ed25519"]
    ]
    ended = others.ends(audit.records)
    said = [
        f"{name} ({f'{ended[name][1]} at log entry {ended[name][0]}' if name in ended else 'no end in these entries'})"
        for name in same
    ]
    return [*said[:_SHOWN], f"and {len(said) - _SHOWN} more"] if len(said) > _SHOWN else said


def read_definition(audit: Audit) -> str:
    """definition.toml is the file that RoundDefined names, and is valid."""
    defined = audit.records[audit.first]
    found = audit.bundle.digest("definition.toml")
    if found != defined["definition"]:
        raise Failed("definition.toml", f"its digest is {found}, log entry {audit.first} says {defined['definition']}")
    audit.competition = definition.parse(audit.bundle.read("definition.toml"))
    return f"{audit.competition.slug}: {len(audit.competition.tasks)} tasks"


def fold(audit: Audit) -> str:
    """Every record of the round was allowed when it came: phase, time, signature, guard; the same function as the server's.

    That RoundDefined commits to the definition's recipe, scorer and policy is the first of the guards.
    """
    round_id = audit.records[audit.first].round
    own = [(i, r) for i, r in enumerate(audit.records) if r.round == round_id]
    try:
        audit.round = rounds.fold(own, audit.competition)
    except Refusal as refusal:
        where, _, why = refusal.sentence.partition(": ")
        raise Failed(where, why) from refusal
    except Exception as error:
        # A field of another shape than its type's; which record it was, a fold over growing prefixes would say.
        raise Failed(
            _first_malformed(own, audit), f"a field has another form: {type(error).__name__} {error}"
        ) from error
    if audit.round.phase not in (Phase.EVALUATED, Phase.PUBLISHED):
        raise Failed(
            f"log entry {own[-1][0]}",
            f"the round stands at {audit.round.phase} there; a bundle is of an evaluated or published round",
        )
    _check_one_key(own, audit)
    return f"{len(own)} records; " + " → ".join(phase for phase, _ in audit.round.phases)


def _check_one_key(own: list[tuple[int, Record]], audit: Audit) -> None:
    """The log was not handed over to another key between RoundDefined and the first ranking."""
    done = next((index for index, record in own if record.type == "RankingPublished"), len(audit.records))
    for index in range(own[0][0], done):
        record = audit.records[index]
        if record.type == hand_overs.TYPE:
            raise Failed(
                f"log entry {index}",
                f"the log was handed over to {record['new']} while the round was under way, which no operator may do",
            )


def _first_malformed(own: list[tuple[int, Record]], audit: Audit) -> str:
    state = None
    for index, record in own:
        try:
            state = (
                rounds.begin(record, audit.competition) if state is None else rounds.apply(state, record, index=index)
            )
        except Exception:
            return f"log entry {index}"
    return "entries.jsonl"


def keys(audit: Audit) -> str:
    """keys.json says of log, organizer, custodians and threshold what RoundDefined says."""
    defined, found = audit.records[audit.first], audit.bundle.json("keys.json")
    expected = keys_document(defined)
    if not isinstance(found, dict) or set(found) != set(expected):
        raise Failed("keys.json", f"it must have exactly the keys {', '.join(sorted(expected))}")
    for name, value in expected.items():
        if digests.canonical(found[name]) != digests.canonical(value):
            raise Failed(f"keys.json, {name}", f"it says {found[name]!r}, log entry {audit.first} says {value!r}")
    return f"{len(found['custodians'])} custodians, {found['threshold']} open the seal"


def keys_document(defined: Record) -> dict[str, Any]:
    """keys.json of a RoundDefined record; the log's origin is the name in its vkey."""
    return {
        "origin": str(defined["log"]).partition("+")[0],
        "log": defined["log"],
        "witnesses": defined["witnesses"],
        "quorum": defined["quorum"],
        "organizer": defined["organizer"],
        "custodians": defined["custodians"],
        "threshold": defined["k"],
    }


def public(audit: Audit) -> str:
    """public/ holds exactly the preparation, validation and other public files that RoundDefined committed to."""
    committed: Mapping[str, str] = audit.records[audit.first]["files"]
    for name in sorted({f"public/{name}" for name in committed} | set(audit.bundle.under("public"))):
        expected = committed.get(name.removeprefix("public/"))
        if expected is None:
            raise Failed(name, f"log entry {audit.first} commits to no such file")
        if audit.bundle.digest(name) != expected:
            raise Failed(name, f"its digest is {audit.bundle.digest(name)}, log entry {audit.first} says {expected}")
    return f"{len(committed)} files"


def submissions(audit: Audit) -> str:
    """Each accepted submission's nonce and manifest give the commitment that its entrant signed for this round, and are within its rules."""
    accepted = {s.accepted: s for s in audit.round.submissions.values() if s.accepted is not None}
    audit.manifests, last = {}, -1
    for number, line in enumerate(audit.bundle.lines("submissions.jsonl"), start=1):
        where = f"submissions.jsonl, line {number}"
        row = parse(line, where)
        if not isinstance(row, dict) or set(row) != {"entrant", "index", "manifest", "nonce"}:
            raise Failed(where, "it must have exactly entrant, index, manifest and nonce")
        if type(row["index"]) is not int:  # JSON's true would pass for 1
            raise Failed(where, f"index is {row['index']!r}, it must be a whole number")
        submission = accepted.get(row["index"])
        if submission is None or row["index"] <= last:
            raise Failed(where, f"log entry {row['index']} accepts no submission, or the lines are out of order")
        found = commitment(row["nonce"], row["manifest"], where)
        if found != submission.commitment:
            raise Failed(
                where, f"nonce and manifest give {found}, log entry {row['index']} says {submission.commitment}"
            )
        named = (row["entrant"], row["manifest"].get("entrant"), row["manifest"].get("round"))
        if named != (submission.entrant, submission.entrant, audit.round.id):
            raise Failed(
                where, f"it names {named}, log entry {row['index']} is of {submission.entrant}, {audit.round.id}"
            )
        _is_allowed(audit, row["manifest"], submission.entrant, where)
        audit.manifests[submission.commitment] = row["manifest"]
        last = row["index"]
    for index, submission in accepted.items():
        if submission.commitment not in audit.manifests and not submission.withdrawn:
            raise Failed("submissions.jsonl", f"the submission that log entry {index} accepts is missing")
    _within_quota(audit, list(accepted.values()))
    return f"{len(audit.manifests)} submissions{_without(audit)}"


def _is_allowed(audit: Audit, manifest: Mapping[str, Any], entrant: str, where: str) -> None:
    """Fail where a manifest has what the definition does not allow, such as a larger model, and was accepted all the same."""
    if isinstance(manifest.get("files"), list):
        public = audit.round.defined["files"]
        problems = manifests.beyond(manifest, audit.competition, entrant=entrant, public=public)
    else:
        problems = ["files must be a list of {name, size, sha256}"]
    if problems:
        raise Failed(where, f"the definition does not allow this submission of {entrant}: {'; '.join(problems)}")


def _within_quota(audit: Audit, accepted: Sequence[Submission]) -> None:
    """Fail where an entrant had more submissions accepted than the definition gives: of the round, or committed on one day."""
    quota = audit.competition.submission.per_entrant
    for entrant, count in Counter(one.entrant for one in accepted).items():
        if count > quota.total:
            raise Failed(
                "submissions.jsonl",
                f"{count} submissions of {entrant} were accepted, the definition allows {quota.total}",
            )
    # Another zone that this machine does not know has ended the reading of the definition.
    zone = zones.zone(quota.day)
    days = [(one.entrant, audit.records[one.order].at.astimezone(zone).date().isoformat()) for one in accepted]
    for (entrant, day), count in Counter(days).items():
        if count > quota.per_day:
            said = f"{count} submissions of {entrant} that were committed on {day} ({quota.day}) were accepted"
            raise Failed("submissions.jsonl", f"{said}, the definition allows {quota.per_day} a day")


def _without(audit: Audit) -> str:
    """What was committed to, or accepted, and is no entry, by whom: each may be a server's or an evaluator's doing."""
    submissions = audit.round.submissions.values()
    kinds = {
        "forfeited (committed to, never accepted or refused: the log does not say why)": [
            s for s in submissions if s.accepted is None and not s.ended
        ],
        "refused by an evaluator, with its reason in the log": [s for s in submissions if s.refused],
        "withdrawn": [s for s in submissions if s.withdrawn],
    }
    return "".join(f"; {len(found)} {what}: {_names(found)}" for what, found in kinds.items() if found)


def _names(found: Sequence[Submission]) -> str:
    names = sorted({submission.entrant for submission in found})
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def commitment(nonce: object, manifest: object, where: str) -> str:
    """sha256(nonce ‖ JCS(manifest)) of a base64 nonce of 32 bytes."""
    try:
        raw = base64.b64decode(nonce, validate=True) if isinstance(nonce, str) else b""
    except ValueError:  # not base64, or not even ASCII
        raw = b""
    if len(raw) != 32 or base64.b64encode(raw).decode() != nonce or not isinstance(manifest, dict):
        raise Failed(where, "the nonce must be the base64 of 32 bytes, the manifest an object")
    return digests.of_bytes(raw + digests.canonical(manifest))
