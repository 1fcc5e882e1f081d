"""Custodians and auditor of a round as RoundDefined names them: those whom the definition asks for, each with keys of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal

Custodian = Mapping[str, Any]
"""{name, age, ed25519, backup}: what `acclimate custodian keygen` prints."""
Auditor = Mapping[str, Any]
"""{name, ed25519, draw}: what `acclimate audit keygen` prints."""


def auditor(competition: Competition, given: Auditor | None) -> dict[str, dict[str, Any]]:
    """RoundDefined's auditor, as the definition names one; {} where it names none."""
    wanted = competition.round.auditor
    if given is None and wanted is None:
        return {}
    if given is None or not isinstance(given, Mapping) or given.get("name") != wanted:
        named = given.get("name") if isinstance(given, Mapping) else None
        raise Refusal(
            "definition_invalid",
            f"the definition names the auditor {wanted or 'none'}; given was {named or 'none'}",
            hint="the auditor makes keys with `acclimate audit keygen` and sends you its auditor.json: --auditor FILE",
        )
    return {"auditor": {field: given.get(field) for field in ("name", "ed25519", "draw")}}


def custodians(given: Sequence[Custodian], competition: Competition) -> list[dict[str, Any]]:
    """RoundDefined's custodians in the definition's order; refused where they are others, or share an age recipient."""
    names = [custodian["name"] for custodian in given]
    wanted = list(competition.custody.custodians)
    if sorted(names) != sorted(wanted):
        raise Refusal(
            "definition_invalid",
            f"the definition names the custodians {', '.join(wanted)}; given were {', '.join(names) or 'none'}",
            hint="each custodian makes keys with `acclimate custodian keygen` and sends you its custodian.json",
        )
    _require_own_recipients(given)
    by_name = {custodian["name"]: custodian for custodian in given}
    return [{field: by_name[name].get(field) for field in ("name", "age", "ed25519", "backup")} for name in wanted]


def _require_own_recipients(custodians: Sequence[Custodian]) -> None:
    """Refuse an age recipient that stands there twice: who holds its identity would hold two shares."""
    owner: dict[str, str] = {}
    for custodian in custodians:
        for recipient in (custodian.get("age"), custodian.get("backup")):
            if recipient is not None and recipient in owner:
                raise Refusal(
                    "definition_invalid",
                    f"{custodian['name']} and {owner[recipient]} have the same age recipient, {recipient}"
                    if owner[recipient] != custodian["name"]
                    else f"{custodian['name']} has its own age recipient as its backup, {recipient}",
                    hint="each custodian makes its own keys, and a backup identity of its own",
                )
            if recipient is not None:
                owner[recipient] = custodian["name"]
