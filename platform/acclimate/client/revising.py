"""What an organizer does when results were judged wrongly: a new version of the ranking, beside the old one, from the same predictions."""

import base64
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from acclimate import verify
from acclimate.client import organizer, rankings
from acclimate.client.connection import Client
from acclimate.keys import Keys
from acclimate.verify import files as bundles
from acclimate_competitions import corrections, digests, records
from acclimate_competitions.corrections import Correction
from acclimate_competitions.errors import Refusal

_OWN: dict[str, Any] = {"metrics": {}, "targets": {}, "void": {}}


@dataclass(frozen=True)
class Revised:
    """A new version, as it would be or was signed.

    Attributes:
        round: the round's id.
        correction: what it is judged with.
        ranking: its document.
        changes: as corrections.differences to the version in force.
        index: of its log entry; None where it was not sent.
    """

    round: str
    correction: Correction
    ranking: dict[str, Any]
    changes: list[dict[str, Any]]
    index: int | None = None

    @property
    def digest(self) -> str:
        """The ranking's digest."""
        return digests.of_json(self.ranking)


def correction_of(document: object, *, random: Callable[[int], bytes] = secrets.token_bytes) -> Correction:
    """The correction of what an organizer wrote: any of metrics, targets and void.

    Args:
        document: of the file.
        random: gives so many random bytes, for the nonce.

    Raises:
        Refusal: correction_invalid.
    """
    if not isinstance(document, dict) or not set(document) <= set(_OWN):
        raise Refusal(
            "correction_invalid",
            f"a correction has some of {', '.join(_OWN)}, and nothing else",
            hint='such as {"targets": {"digit": {"e17": "d4"}}, "void": {"digit": ["e99"]}}',
        )
    nonce = base64.b64encode(random(corrections.NONCE_BYTES)).decode()
    return corrections.parse({"v": 1, **_OWN, **document, "nonce": nonce})


def revise(
    client: Client,
    keys: Keys,
    round_id: str,
    document: object,
    *,
    reason: str,
    send: bool = True,
) -> Revised:
    """Judge a published round again with a correction, and publish that as a new version of its ranking.

    1. The bundle is downloaded and audited as for a publication: nothing may FAIL, and its log is the one that this machine has read.
    2. The ranking is recomputed from predictions and holdout with the correction, here.
    3. RankingRevised is signed and sent with both; the server computes the same, or refuses.

    Args:
        client: a connection for the organizer's account.
        keys: the organizer's keys.
        round_id: the round, or a prefix of its id.
        document: metrics, targets and void, whichever are to be others than the definition and the holdout have them.
        reason: why; everybody will read it.
        send: whether it is signed and sent; else it is only computed.

    Raises:
        Refusal: phase_wrong; correction_invalid; bundle_invalid, log_inconsistent; guard_failed; …
    """
    defined, competition = organizer.own_round(client, keys, round_id)
    before = client.versions(defined.round)
    if not before:
        raise Refusal(
            "phase_wrong",
            f"{defined.round} has no published ranking: there is nothing to revise",
            hint=f"acclimate round publish {defined.round} --keys {keys.folder}",
        )
    correction = correction_of(document)
    # 1
    with bundles.aside("acclimate-revise-") as temporary:
        whole = competition.round.holdout_after == "private"
        path = client.bundle(defined.round, temporary / "bundle.zip", whole=whole)
        in_force, _ = rankings.recomputed(client, keys, path, defined)
        # 2
        made = verify.recompute_ranking(path, correction=correction).document()
    found = Revised(defined.round, correction, made, corrections.differences(in_force, made))
    if not send:
        return found
    if (before[-1]["ranking"], before[-1]["reason"], len(before) > 1) == (found.digest, reason, True):
        # The same command again: the log has it, whether or not its answer came.
        last = [index for index, record in client.records(defined.round) if record.type == "RankingRevised"][-1]
        return Revised(found.round, correction, made, before[-1]["changes"], last)
    # 3
    fields = {"ranking": found.digest, "policy": defined["policy"], "reason": reason, "correction": correction.digest}
    request = records.sign("RankingRevised", defined.round, fields, key=keys.ed25519)
    answer = client.revise(defined.round, request, ranking=made, correction=correction.document())
    return Revised(found.round, correction, made, found.changes, answer["index"])
