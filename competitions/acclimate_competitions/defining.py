"""How a round begins: the guards of RoundDefined, which commits to everything that can change a number."""

from collections.abc import Mapping, Sequence
from typing import Any

from acclimate_competitions import digests, records, vkeys
from acclimate_competitions.definition import ROUND_NAME, ROUND_NAME_MEANING, Competition
from acclimate_competitions.guards import require
from acclimate_competitions.phases import Phase, Round
from acclimate_competitions.records import Record, parse_time
from acclimate_competitions.tasks import Task


def scorer_digest(competition: Competition) -> str:
    """Digest of what scores a prediction: each task's kind, choices and metric, and how an answer is found in a generated text."""
    return digests.of_json([_scorer(task) for task in competition.tasks])


def _scorer(task: Task) -> dict[str, Any]:
    found: dict[str, Any] = {"task": task.name, "kind": task.kind, "choices": list(task.choices), "metric": task.metric}
    if task.kind == "generate":
        found |= {"stop": list(task.stop), "max_tokens": task.max_tokens, "extract": task.extract, "take": task.take}
        found["normalize"] = list(task.normalize)
    return found


def _check_witnesses(texts: Sequence[str], *, quorum: int) -> None:
    """Refuse witnesses that can't cosign, or that are fewer than they look: a public key counts once, whatever its names.

    Raises:
        Refusal: key_refused, guard_failed.
    """
    names: dict[bytes, str] = {}
    for text in texts:
        name, public = vkeys.parse_witness(text)
        require(public not in names, f"the witnesses {names.get(public)} and {name} are one key")
        names[public] = name
    require(quorum <= len(names), f"a quorum of {quorum} needs as many different witnesses, there are {len(names)}")


def begin(record: Record, competition: Competition) -> Round:
    """The draft round of a RoundDefined record.

    Raises:
        Refusal: record_invalid, signature_invalid, key_refused, guard_failed.
    """
    require(record.type == "RoundDefined", f"a round begins with RoundDefined, not {record.type}")
    records.verify(record)
    require(
        record.by == record["organizer"]["ed25519"],
        "RoundDefined is not signed by the organizer it names",
        "signature_invalid",
    )
    require(record["definition"] == competition.digest, "RoundDefined names another definition")
    require(record["competition"] == competition.slug, "RoundDefined names another competition")
    require(record["recipe"] == competition.preparation.digest, "RoundDefined names another recipe")
    require(record["policy"] == competition.ranking.digest, "RoundDefined names another ranking policy")
    require(record["scorer"] == scorer_digest(competition), "RoundDefined names another scorer")
    require(
        isinstance(record["name"], str) and ROUND_NAME.fullmatch(record["name"]) is not None,
        f"round name {record['name']!r}: {ROUND_NAME_MEANING}",
        "name_invalid",
    )
    dates = {name: record[name] for name in ("opens", "closes", "closes_latest", "release_by")}
    opens, closes, latest, by = map(parse_time, dates.values())
    require(
        opens < closes <= latest < by,
        "dates must satisfy opens < closes ≤ closes_latest < release_by; given are "
        + ", ".join(f"{name} {text}" for name, text in dates.items()),
        hint="move those that stand out of this order, such as --opens +1h --closes +30d --closes-latest +37d --release-by +60d",
    )
    custodians = record["custodians"]
    require(
        [c["name"] for c in custodians] == list(competition.custody.custodians),
        "custodians differ from the definition's",
    )
    require(record["k"] == competition.custody.threshold, "k differs from the definition's threshold")
    require(record["grace"] == int(competition.round.grace.total_seconds()), "grace differs from the definition's")
    auditor = record.fields.get("auditor")
    require(
        competition.round.auditor == (auditor["name"] if auditor is not None else None),
        "RoundDefined names another auditor than the definition",
    )
    _check_keys(record, custodians, auditor)
    require(bool(record["evaluators"]), "RoundDefined names no evaluator")
    _check_witnesses(record["witnesses"], quorum=record["quorum"])
    recipients = [text for c in custodians for text in (c["age"], c["backup"]) if text is not None]
    require(len(set(recipients)) == len(recipients), "custodians' age recipients, backups included, must be different")
    return Round(record.round, competition, record, Phase.DRAFT, closes, phases=((Phase.DRAFT, record.at),))


def _check_keys(record: Record, custodians: Sequence[Mapping[str, Any]], auditor: Mapping[str, Any] | None) -> None:
    """Refuse people of whom two have one key: whoever holds it would act for both."""
    people = [(f"custodian {c['name']}", c["ed25519"]) for c in custodians]
    people += [("organizer", record["organizer"]["ed25519"]), *(("evaluator", key) for key in record["evaluators"])]
    people += [("auditor", auditor["ed25519"])] if auditor is not None else []
    whose: dict[str, str] = {}
    for who, key in people:
        records.public_key(key)
        require(
            key not in whose,
            f"organizer, custodians, evaluators and auditor must have different keys; {whose.get(key)} and {who} have the same",
            hint="each of them has a key folder of their own; --keys DIR names the organizer's",
        )
        whose[key] = who
