"""The seals of a round as they lie in `seals/<round>/` of the organizer's key folder until the server has them: made once, and found again.

Another holdout gets another seal only as long as the log has none: what is kept of a seal that is in the log is never written over.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from acclimate import files
from acclimate.client.connection import Client, Progress
from acclimate.client.entrant import Say
from acclimate.keys import Keys
from acclimate_competitions import definition, digests, records
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record

FILE = "sealed.json"


def logged(client: Client, round_id: str) -> tuple[int, str] | None:
    """Log index and id of a round's seal; None where the log has none yet.

    Raises:
        Refusal: round_unknown, record_invalid.
    """
    # A draft takes no record but this, or its end.
    for index, record in client.records(round_id, limit=2):
        if record.type == "HoldoutSealed" and record.round == round_id:
            return index, str(record["seal"])
    return None


def kept(work: Path) -> dict[str, Any] | None:
    """The seals as `made` left them; None where there are none.

    Raises:
        Refusal: file_unreadable.
    """
    path = work / FILE
    if not path.exists():
        return None
    found = files.read_json(path)
    if not isinstance(found, dict) or not {"holdout", "real", "rehearsal"} <= set(found):
        raise Refusal("file_unreadable", f"{path} holds no seals", hint="put it back from your copy of the key folder")
    return found


def kept_id(work: Path) -> str | None:
    """The id of the seal that is kept; None where there is none.

    Raises:
        Refusal: file_unreadable.
    """
    found = kept(work)
    return None if found is None else str(found["real"]["fields"]["seal"])


def require_same(client: Client, work: Path, defined: Record, *, holdout: str, folder: Path) -> None:
    """Refuse to seal a round whose seal is in the log, unless it is the one kept here, and of the same holdout.

    Args:
        client: a connection to the server.
        work: the round's folder in `seals/`.
        defined: RoundDefined.
        holdout: digest of the holdout that is to be sealed.
        folder: where it lies, for what is said.

    Raises:
        Refusal: conflict.
    """
    there = logged(client, defined.round)
    if there is None:
        return
    index, seal = there
    mine = kept(work)
    if mine is None or mine["real"]["fields"]["seal"] != seal:
        why = f"{work} keeps {'none' if mine is None else 'another'}"
        hint = "go on with the key folder that sealed it"
    elif mine["holdout"] != holdout:
        why = f"it is of another holdout than that of {folder}"
        hint = "go on with the folder that was sealed"
    else:
        return
    raise Refusal(
        "conflict",
        f"{defined.round} is sealed already: {seal}, log entry {index}; {why}",
        hint=f"{hint}; a seal is for good: where another holdout was meant, void the round and create its successor under another"
        f" --name: acclimate round void {defined.round} --reason …",
    )


def require_created_from(
    folder: Path, defined: Record, competition: Competition, *, holdout: str, looked_at: str | None
) -> None:
    """Refuse to seal another folder than the one that the round was created from.

    Args:
        folder: the built competition.
        defined: RoundDefined.
        competition: the round's definition.
        holdout: digest of the folder's holdout.
        looked_at: digest of the one that was looked at when the round was created; None where it is not known, or another one is meant.

    Raises:
        Refusal: conflict.
    """
    from acclimate_competitions import splits

    found = definition.load(folder).digest
    if found != competition.digest:
        raise Refusal(
            "conflict",
            f"{folder} has another definition than {defined.round}: {found}, {competition.digest}",
            hint="seal the folder that the round was created from",
        )
    public = {name: digests.of_file(path) for name, path in splits.public_files(folder).items()}
    if public != defined["files"]:
        named = defined["files"]
        others = sorted(name for name in {*public, *named} if public.get(name) != named.get(name))
        raise Refusal(
            "conflict",
            f"{folder} is not what {defined.round} was created from: {', '.join(others)} {'is' if len(others) == 1 else 'are'} not as everybody has them",
            hint="seal the folder that the round was created from",
            problems=[
                f"{name}: the round has {named.get(name, 'none')}, the folder {public.get(name, 'none')}"
                for name in others
            ],
        )
    if looked_at not in (None, holdout):
        raise Refusal(
            "conflict",
            f"the holdout of {folder} is not the one that {defined.round} was created from: {holdout}, it was {looked_at}",
            hint="seal the folder that the round was created from; or, where this holdout is meant, say so: --holdout-changed",
        )


def made(
    work: Path,
    defined: Record,
    contents: Mapping[str, Path],
    *,
    holdout: str,
    random: Callable[[int], bytes],
    say: Say,
) -> dict[str, Any]:
    """Both seals of a round as {kind: {fields, envelopes}, holdout: digest}; made once, and found again for the same holdout.

    Args:
        work: the round's folder in `seals/`; seals of another holdout that lie there are replaced (`require_same` was asked before).
        defined: RoundDefined.
        contents: the holdout's files, by name in the archive.
        holdout: their digest.
        random: gives that many uniform random bytes.
        say: called with a sentence at each step.
    """
    from acclimate import sealing

    if (before := kept(work)) is not None and before["holdout"] == holdout:
        say("going on with the seal made before")
        return before
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, mode=0o700)
    recipients = [sealing.Recipient(c["name"], c["age"], c["backup"]) for c in defined["custodians"]]
    result: dict[str, Any] = {"holdout": holdout}
    with tempfile.TemporaryDirectory(dir=work) as temporary:
        for kind, members in (("real", contents), ("rehearsal", sealing.rehearsal_files(Path(temporary), random))):
            say(f"sealing the {'holdout' if kind == 'real' else 'rehearsal'}: {', '.join(members)}")
            sealed = sealing.seal(
                members,
                work / f"{kind}.sealed",
                round_id=defined.round,
                recipients=recipients,
                k=defined["k"],
                rehearsal=kind == "rehearsal",
                random=random,
            )
            result[kind] = {"fields": sealed.fields, "envelopes": sealed.envelopes}
    files.write_json(work / FILE, result)
    return result


def hand_in(
    client: Client, keys: Keys, defined: Record, sealed: Mapping[str, Any], *, progress: Progress | None, say: Say
) -> int:
    """Send the seal; the index of its log entry."""
    fields = _uploaded(client, keys, defined, sealed, kind="real", progress=progress, say=say)
    request = records.sign("HoldoutSealed", defined.round, fields, key=keys.ed25519)
    index: int = client.seal(defined.round, request, envelopes=sealed["real"]["envelopes"])["index"]
    return index


def rehearse(
    client: Client, keys: Keys, defined: Record, sealed: Mapping[str, Any], *, progress: Progress | None, say: Say
) -> None:
    """Send the rehearsal's seal, the last that is sent; what was sent needs no copy here."""
    fields = _uploaded(client, keys, defined, sealed, kind="rehearsal", progress=progress, say=say)
    client.rehearse(defined.round, fields, envelopes=sealed["rehearsal"]["envelopes"])
    for kind in ("real", "rehearsal"):
        (keys.folder / "seals" / defined.round / f"{kind}.sealed").unlink(missing_ok=True)


def _uploaded(
    client: Client,
    keys: Keys,
    defined: Record,
    sealed: Mapping[str, Any],
    *,
    kind: str,
    progress: Progress | None,
    say: Say,
) -> dict[str, Any]:
    """The fields of a seal whose ciphertext the server has now."""
    fields: dict[str, Any] = sealed[kind]["fields"]
    ciphertext = keys.folder / "seals" / defined.round / f"{kind}.sealed"
    if ciphertext.exists():
        say(f"uploading the {'holdout' if kind == 'real' else 'rehearsal'}, sealed: {ciphertext.stat().st_size} bytes")
        client.put_blob(ciphertext, digest=fields["ciphertext"], progress=progress)
    return fields
