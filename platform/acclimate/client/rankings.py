"""The ranking that an organizer signs: recomputed on the organizer's machine, from a bundle of the log that the machine has read itself."""

from pathlib import Path
from typing import Any

from acclimate import verify
from acclimate.client.connection import Client
from acclimate.client.history import History, require_beginning
from acclimate.client.voiding import newest_history
from acclimate.keys import Keys
from acclimate.verify import files as bundles
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record


def recomputed(client: Client, keys: Keys, bundle: Path, defined: Record) -> tuple[dict[str, Any], History]:
    """The ranking that a bundle of exactly this round and log leads to, where no check of the bundle FAILED; and the log.

    Raises:
        Refusal: bundle_invalid; log_inconsistent, where the bundle is of another history than the log.
    """
    try:
        with bundles.opened(bundle) as found:
            entries = found.lines("entries.jsonl")
            history = newest_history(client, keys, defined, size=len(entries))
            finished = [index for index, record in history.numbered if record.type == "EvaluationFinished"]
            require_beginning(history, entries, of=bundle, holding=finished[-1] if finished else 0)
            return _verified(found, defined), history
    except verify.Failed as failed:
        raise Refusal("bundle_invalid", f"{failed.where}: {failed.why}", hint="nothing was signed") from failed


def _verified(bundle: bundles.Bundle, defined: Record) -> dict[str, Any]:
    report = verify.verify(bundle, log_key=defined["log"])
    if report.failed or report.round != defined.round:
        raise Refusal(
            "bundle_invalid",
            report.summary if report.failed else f"the server's bundle is of {report.round}, not {defined.round}",
            hint="nothing was signed; fetch the bundle and see: acclimate round bundle, acclimate verify",
            problems=[f"{check.where}: {check.meaning}" for check in report.failed],
        )
    return verify.recompute_ranking(bundle).document()
