"""The seals of a round as they lie in `seals/<round>/` of the organizer's key folder until the server has them: made once, and found again."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from acclimate import files
from acclimate.client.entrant import Say
from acclimate_competitions import digests
from acclimate_competitions.records import Record


def made(
    work: Path, defined: Record, holdout: Mapping[str, Path], *, random: Callable[[int], bytes], say: Say
) -> dict[str, Any]:
    """Both seals of a round as {kind: {fields, envelopes}, holdout: digest}; made once, and found again for the same holdout."""
    from acclimate import sealing

    path = work / "sealed.json"
    digest = digests.of_tree(holdout.items())
    if path.exists():
        found: dict[str, Any] = files.read_json(path)
        if found["holdout"] == digest:
            say("going on with the seal made before")
            return found
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, mode=0o700)
    recipients = [sealing.Recipient(c["name"], c["age"], c["backup"]) for c in defined["custodians"]]
    result: dict[str, Any] = {"holdout": digest}
    with tempfile.TemporaryDirectory(dir=work) as temporary:
        for kind, contents in (("real", holdout), ("rehearsal", sealing.rehearsal_files(Path(temporary), random))):
            say(f"sealing the {'holdout' if kind == 'real' else 'rehearsal'}: {', '.join(contents)}")
            sealed = sealing.seal(
                contents,
                work / f"{kind}.sealed",
                round_id=defined.round,
                recipients=recipients,
                k=defined["k"],
                rehearsal=kind == "rehearsal",
                random=random,
            )
            result[kind] = {"fields": sealed.fields, "envelopes": sealed.envelopes}
    files.write_json(path, result)
    return result
