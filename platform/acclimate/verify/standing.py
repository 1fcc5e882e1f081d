"""What stands in a round from earlier ones: entries whose manifest names an earlier submission, and the definition's anchors.

The earlier round's records are in the same log, and so in the same bundle. Only those that are read here are verified, each by its own
signature: the entrant's over the earlier acceptance, by the key that the entrant has in this round; the earlier organizer's over RoundDefined, and
that of an evaluator whom it names over ModelPrepared.
"""

from collections.abc import Mapping
from typing import Any

from acclimate.verify import others
from acclimate.verify.audit import Audit
from acclimate.verify.report import Beside, Failed, NotChecked
from acclimate_competitions import bases, digests, records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Entry
from acclimate_competitions.records import Record


def standing(audit: Audit) -> str:
    """Each entry that stands from an earlier round has the model that the log names for it there; each anchor the definition's.

    That an anchor was prepared from no other model, the rules have shown; here it is said which ones entered.
    """
    entries = audit.round.entries
    mine = [entry for entry in entries if "stands" in audit.manifests[entry.commitment]]
    anchors = [anchor.name for anchor in audit.competition.anchors if anchor.model is not None]
    if not mine and not anchors:
        raise Beside
    silent = [said for entry in mine if (said := _earlier(audit, entry))]
    if silent:
        raise NotChecked(f"{len(silent)} of {len(mine)} standing entries: {silent[0]}")
    names = {entry.entrant for entry in entries}
    absent = [name for name in anchors if name not in names]
    told = [f"{len(mine)} standing {'entry' if len(mine) == 1 else 'entries'}"]
    told += [f"{len(anchors) - len(absent)} of {len(anchors)} anchors with a model"] if anchors else []
    told += [f"anchors that did not enter: {', '.join(absent)}"] if absent else []
    return "; ".join(told)


def _earlier(audit: Audit, entry: Entry) -> str:
    """Why it can't be told that an entry's model is the earlier one; empty where it is.

    Raises:
        Failed: the log says otherwise.
    """
    manifest = audit.manifests[entry.commitment]
    where = f"submissions.jsonl, the manifest of {entry.entrant}"
    round_id, commitment = _named(manifest, where)
    index = _accepted(audit, entry, round_id, commitment, where)
    before = _defined(audit, round_id, where)
    if manifest.get("kind") == bases.KIND:
        base = str(manifest.get("base"))
        if bases.of(before["files"], base) != bases.of(audit.round.defined["files"], base):
            raise Failed(where, f"the base {base} that the adapter stands on has other files than in {round_id}")
    mine = digests.of_json({file["name"]: file["sha256"] for file in manifest["files"]})
    made = [
        (at, record)
        for at, record in enumerate(audit.records)
        if record.type == "ModelPrepared" and record.round == round_id and record["submission"] == index
    ]
    if not made:
        return f"{round_id} has prepared no model of {entry.entrant} by log entry {len(audit.records) - 1}, so the log names none"
    for at, record in made:
        _signed(record, f"log entry {at}")
        if record.by not in before["evaluators"]:
            raise Failed(f"log entry {at}", f"it is signed by {record.by}, no evaluator of {round_id}")
        if record["base"] != mine:
            raise Failed(where, f"its files are the model {mine}, log entry {at} names {record['base']} in {round_id}")
    return ""


def _named(manifest: Mapping[str, Any], where: str) -> tuple[str, str]:
    stands = manifest["stands"]
    if not isinstance(stands, dict) or set(stands) != {"round", "commitment"}:
        raise Failed(where, f"stands is {stands!r}, it must have exactly round and commitment")
    return str(stands["round"]), str(stands["commitment"])


def _accepted(audit: Audit, entry: Entry, round_id: str, commitment: str, where: str) -> int:
    """Log index of the earlier acceptance, which the same entrant signed by the same key, before this entry's."""
    for at, record in enumerate(audit.records[: entry.submission]):
        if (record.type, record.round) == ("SubmissionAccepted", round_id) and record["commitment"] == commitment:
            _signed(record, f"log entry {at}")
            key = audit.round.entrants[entry.entrant]
            if (record["entrant"], record.by) != (entry.entrant, key):
                raise Failed(
                    f"log entry {at}", f"it is of {record['entrant']}, {record.by}; here stands {entry.entrant}, {key}"
                )
            return at
    raise Failed(where, f"no entry of the log before it accepts {commitment} in {round_id}")


def _defined(audit: Audit, round_id: str, where: str) -> Record:
    _, found = others.defined(audit.records).get(round_id, (0, None))
    if found is None or found["competition"] != audit.competition.slug:
        raise Failed(
            where,
            f"the log has no round {round_id} of the competition {audit.competition.slug} that its organizer signed",
        )
    return found


def _signed(record: Record, where: str) -> None:
    try:
        records.verify(record)
    except Refusal as refusal:
        raise Failed(where, refusal.sentence) from refusal
