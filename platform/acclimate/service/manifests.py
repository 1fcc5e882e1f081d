"""The manifest of a submission: what a model is and who says so. All problems are reported at once."""

import re
from collections.abc import Mapping
from datetime import date
from typing import Any

from acclimate.service import names
from acclimate_competitions import bases, digests, records
from acclimate_competitions import manifests as rules
from acclimate_competitions.definition import IMAGES
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Round
from acclimate_runners import adapter_files, reading, shards

_KEYS = frozenset("v round entrant title kind files family base parameters released weights_after".split())
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_LARGEST = 2**53 - 1


def check(manifest: Mapping[str, Any], *, state: Round, entrant: str) -> None:
    """Refuse a manifest that the round does not take.

    Raises:
        Refusal: manifest_invalid, with every problem.
    """
    problems = _keys(manifest) or [
        *_identity(manifest, state, entrant),
        *_texts(manifest),
        *(
            _files(manifest)
            or rules.beyond(manifest, state.competition, entrant=entrant, public=state.defined["files"])
        ),
        *_standing(manifest, state),
    ]
    if problems:
        raise Refusal(
            "manifest_invalid",
            f"the manifest has {len(problems)} problem{'' if len(problems) == 1 else 's'}: {problems[0]}",
            hint="`acclimate submit` writes manifests; nothing was logged and the quota is untouched",
            problems=problems,
        )


def check_texts(manifest: Mapping[str, Any]) -> None:
    """Refuse the words of a manifest that no round takes; for whoever makes one, before anything is kept or sent.

    Raises:
        Refusal: manifest_invalid, with every problem.
    """
    problems = _texts(manifest)
    if problems:
        raise Refusal(
            "manifest_invalid",
            f"the manifest would have {len(problems)} problem{'' if len(problems) == 1 else 's'}: {problems[0]}",
            hint="nothing was sent or written; mend --title, --family, --base or --released, and submit again",
            problems=problems,
        )


def digests_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """File name -> digest."""
    return {item["name"]: item["sha256"] for item in manifest["files"]}


def sizes_of(manifest: Mapping[str, Any]) -> dict[str, int]:
    """Digest -> size in bytes."""
    return {item["sha256"]: item["size"] for item in manifest["files"]}


def _keys(manifest: Mapping[str, Any]) -> list[str]:
    missing, extra = sorted(_KEYS - set(manifest)), sorted(set(manifest) - _KEYS - {rules.STANDS})
    return [f"{name} is missing" for name in missing] + [f"{name[:64]!r} is not a known key" for name in extra]


def _identity(manifest: Mapping[str, Any], state: Round, entrant: str) -> list[str]:
    problems = []
    if type(manifest["v"]) is not int or manifest["v"] != 1:
        problems.append("v must be 1")
    if manifest["round"] != state.id:
        problems.append(f"round is {manifest['round']!r}, the submission is for {state.id!r}")
    if manifest["entrant"] != entrant:
        problems.append(f"entrant is {manifest['entrant']!r}, the commitment is signed for {entrant!r}")
    return problems


def _texts(manifest: Mapping[str, Any]) -> list[str]:
    problems = []
    for name in ("title", "family", "base", "released"):
        value = manifest[name]
        # Only the title must say something; the others may be unknown.
        if name != "title" and value in (None, ""):
            continue
        wrong = names.problem(value)
        if wrong is None and name == "released" and not _is_date(value):
            wrong = "must be a date that exists, such as 2027-03-01"
        if wrong is not None:
            problems.append(f"{name} {wrong}")
    return problems


def _is_date(text: str) -> bool:
    try:
        return bool(_DATE.fullmatch(text) and date.fromisoformat(text))
    except ValueError:
        return False


def _files(manifest: Mapping[str, Any]) -> list[str]:
    files, kind = manifest["files"], manifest["kind"]
    if not isinstance(files, list) or not all(
        isinstance(f, dict) and set(f) == {"name", "size", "sha256"} for f in files
    ):
        return ["files must be a list of {name, size, sha256}"]
    problems = []
    given = [str(f["name"]) for f in files]
    besides = reading.IMAGE_BESIDES if kind == IMAGES else reading.BESIDES
    if kind == bases.KIND:
        if sorted(given) != sorted(adapter_files.NAMES):
            problems.append(f"files must be exactly {' and '.join(adapter_files.NAMES)}, each once")
    elif (
        len(set(given)) < len(given)
        or set(given) & set(reading.BESIDES) != set(besides)
        or reading.unknown(given)
        or shards.lacking(given)
    ):
        said = ", ".join([*besides, shards.WHOLE])
        problems.append(f"files must be exactly {said}, each once; or an index and all its shards")
    for f in files:
        if type(f["size"]) is not int or not 0 < f["size"] <= _LARGEST:
            problems.append(f"size of {f['name']!r} must be a whole number of bytes above 0")
        if not digests.is_digest(f["sha256"]):
            problems.append(f"sha256 of {f['name']!r} must be 'sha256:' and 64 lower-case hex digits")
    return problems


def _standing(manifest: Mapping[str, Any], state: Round) -> list[str]:
    if rules.STANDS not in manifest:
        return []
    stands = manifest[rules.STANDS]
    if not isinstance(stands, dict) or set(stands) != {"round", "commitment"}:
        return [f"{rules.STANDS} must be {{round, commitment}} of an earlier submission"]
    if not records.is_round_id(stands["round"]) or stands["round"] == state.id:
        return [f"{rules.STANDS}.round is {str(stands['round'])[:120]!r}, must be the id of another round"]
    if not digests.is_digest(stands["commitment"]):
        return [f"{rules.STANDS}.commitment must be 'sha256:' and 64 lower-case hex digits"]
    return []
