"""The model of an earlier round again: the same bytes, by the entrant's own signature, without being sent once more.

Which submission counted there, this machine's fold of the round's records says; what its manifest was, the key folder. The new submission has a
nonce and a commitment of its own, so nobody learns before the bundle that it is the old model.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from acclimate.client import entrant, model_folders
from acclimate.client.connection import Client
from acclimate.client.definitions import definition_of
from acclimate.client.entrant import Sending, Submission
from acclimate.client.folder import load_account
from acclimate.keys import Keys
from acclimate_competitions import manifests, rounds
from acclimate_competitions.anchors import Anchor
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Entry, Round
from acclimate_competitions.records import Record


def submit_standing(
    client: Client,
    keys: Keys,
    round_id: str,
    earlier: str,
    *,
    sending: Sending,
    changes: dict[str, Any] | None = None,
    baseline: str = "",
) -> Submission:
    """Submit again what counts for the account in an earlier round, or go on with it where it stopped.

    1. The entry of the earlier round is found in its records, its manifest in the key folder, or made of the model's folder where one is given.
    2. The manifest is the same but for the round, the words that change, and that it names the earlier submission.
    3. It is committed to, checked and accepted as every submission is; only files that the server lacks are sent.

    Args:
        client: a connection for the entrant's account.
        keys: the entrant's keys.
        round_id: the round, or a prefix of its id.
        earlier: the earlier round, likewise.
        sending: how it is sent; its model may be None.
        changes: title, weights_after, family, base, released where they are to be others than before.
        baseline: for the organizer: the baseline whose entry it was.

    Raises:
        Refusal: submission_unknown, where nothing of the account counts there; manifest_invalid, where the files are others; as entrant.submit.
    """
    name = baseline or load_account(keys.folder).id
    # 1
    defined, competition = definition_of(client, round_id)
    before, old_rules = definition_of(client, earlier)
    entry = _entry(rounds.fold(client.records(before.round), old_rules), before, name)
    known = next((s for s in entrant.submissions(keys, before.round) if s.commitment == entry.commitment), None)
    manifest = dict(known.manifest) if known is not None else {}
    if sending.model is not None:
        about = {"title": sending.model.resolve().name, "family": "", "base": None, "released": None}
        about |= {"weights_after": "delete", **(changes or {})}
        made = model_folders.manifest(client, sending.model, about, of=(defined, competition), entrant=name)
        if known is not None and made["files"] != known.manifest["files"]:
            raise Refusal(
                "manifest_invalid",
                f"{sending.model} holds other files than the submission {known.short} that counts in {before.round}",
                hint="nothing was sent; another model is a submission of its own, without --standing-from",
            )
        manifest = {**made, **manifest}
    elif known is None:
        raise Refusal(
            "submission_unknown",
            f"{keys.folder} does not have the submission of {name!r} that counts in {before.round}",
            hint="name the model's folder, too; or use the key folder that submitted it",
        )
    # 2
    manifest |= {**(changes or {}), "round": defined.round}
    manifest[manifests.STANDS] = {"round": before.round, "commitment": entry.commitment}
    # 3
    return entrant.send(client, keys, manifest, defined=defined, baseline=bool(baseline), sending=sending)


def _entry(state: Round, before: Record, name: str) -> Entry:
    """What counts for an entrant in an earlier round: as it closed, or as it would close now.

    Raises:
        Refusal: submission_unknown.
    """
    entries = state.entries if state.closed is not None else state.frozen_entries()
    found = next((entry for entry in entries if entry.entrant == name), None)
    if found is None:
        raise Refusal(
            "submission_unknown",
            f"nothing of {name!r} counts in {before.round}",
            hint="what was refused, withdrawn or not accepted in time stands for nothing: acclimate submission status",
        )
    return found


def enter_anchors(
    client: Client, keys: Keys, round_id: str, *, models: dict[str, Path], sending: Sending
) -> list[dict[str, Any]]:
    """For the organizer: enter every anchor of a round's definition, each as what it was in the newest round that had it.

    Args:
        client: a connection for the organizer's account.
        keys: the organizer's keys.
        round_id: the round, or a prefix of its id.
        models: folder of an anchor's model, where no earlier round of this key folder has it.
        sending: how they are sent, its model aside.

    Returns:
        A row an anchor with a model: {anchor, model, from (the round it stands from, or None), state, submission}.

    Raises:
        Refusal: guard_failed, where a folder is given of what is no anchor; submission_unknown, where neither a folder nor an earlier round has
            an anchor; as submit_standing.
    """
    from acclimate.client import organizer

    defined, competition = definition_of(client, round_id)
    anchors = [anchor for anchor in competition.anchors if anchor.model is not None]
    names = [anchor.name for anchor in anchors]
    if unknown := [name for name in models if name not in names]:
        raise Refusal(
            "guard_failed",
            f"{defined.round} has no anchor {unknown[0]!r} with a model: its definition names {', '.join(names) or 'none'}",
            hint="an anchor stands in the definition, under [[anchors]], before the round is created; a baseline that is none: "
            f"acclimate enter {defined.round} --baseline NAME, then acclimate submit MODEL --round {defined.round} --baseline NAME",
        )
    found = []
    for anchor in anchors:
        organizer.enter_baseline(client, keys, defined.round, name=anchor.name)
        how = replace(sending, model=models.get(anchor.name))
        mine, earlier = _enter(client, keys, defined, anchor, how, weights_after=competition.submission.weights_after)
        row = {"anchor": anchor.name, "model": anchor.model, "from": earlier}
        found.append({**row, "state": mine.state, "submission": mine.short})
    return found


def _enter(
    client: Client, keys: Keys, defined: Record, anchor: Anchor, how: Sending, *, weights_after: Sequence[str]
) -> tuple[Submission, str | None]:
    """An anchor's submission, begun or gone on with, and the round that it stands from.

    Raises:
        Refusal: as enter_anchors.
    """
    begun = [s for s in entrant.submissions(keys, defined.round) if s.entrant == anchor.name and not _ended(s)]
    if begun:
        manifest = dict(begun[-1].manifest)
        mine = entrant.send(client, keys, manifest, defined=defined, baseline=True, sending=how)
        return mine, manifest.get(manifests.STANDS, {}).get("round")
    earlier = _had(keys, anchor, but=defined.round)
    if earlier is not None:
        return submit_standing(client, keys, defined.round, earlier, sending=how, baseline=anchor.name), earlier
    if how.model is None:
        raise Refusal(
            "submission_unknown",
            f"{keys.folder} has no earlier round with the anchor {anchor.name}, {anchor.model}",
            hint=f"name its folder: --model {anchor.name}=DIR",
        )
    mine = entrant.submit(
        client,
        keys,
        defined.round,
        how.model,
        title=anchor.name,
        weights_after=weights_after[0],
        baseline=anchor.name,
        wait=how.wait,
        progress=how.progress,
        say=how.say,
    )
    return mine, None


def _ended(mine: Submission) -> bool:
    return mine.state in entrant.ENDED


def _had(keys: Keys, anchor: Anchor, *, but: str) -> str | None:
    """The newest round of the key folder to which an anchor's model was sent; whether it was accepted there, the log says."""
    mine = [
        each.round
        for each in entrant.submissions(keys)
        if each.entrant == anchor.name
        and each.round != but
        and not _ended(each)
        and manifests.model_of(each.manifest) == anchor.model
    ]
    return mine[-1] if mine else None
