"""What an entrant does: enter a round, submit a model, see what became of it, withdraw it.

A submission is saved in `submissions/<round>-<commitment>.json` of the key folder, with its nonce, before anything of it is sent. The same model
and the same words again are the same submission: whatever was interrupted goes on where it stopped.
"""

import base64
import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acclimate import files
from acclimate import keys as key_files
from acclimate.client import model_folders
from acclimate.client.connection import Client, Progress, Request
from acclimate.client.definitions import definition_of, full_id
from acclimate.client.folder import lacks_quorum, load_account, save_receipt
from acclimate.client.folder_lock import alone
from acclimate.keys import Keys
from acclimate.service import manifests
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.guards import require_baseline
from acclimate_competitions.records import Record

ENDED = ("refused", "forfeited", "withdrawn")
"""States in which a submission counts for nothing, and comes back by none."""
FINAL = ("accepted", *ENDED)
LOST = "lost"
"""Of a submission that was sent, and that the server does not know any more."""
FIRST_LOOK, SLOWEST_LOOK = 0.2, 2.0
_SENDINGS = 3
_NEVER = ("manifest_invalid", "round_closed", "phase_wrong")
"""Answers to a commitment that is not in the log (what is there is answered as it stands, by a closed or void round, too) and never will be.
Others may be another one next time: the same submission is signed anew by each command, and keys, quota, server or client may have changed."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Submission:
    """One submission, as its file keeps it.

    Attributes:
        round, entrant, server: whose it is and where.
        manifest: what was committed to.
        nonce: 32 random bytes, base64; secret until the entrant sends it.
        commitment: digest of nonce ‖ canonical JSON of the manifest.
        submission: the server's id for it; "" until it was sent.
        state: unsent | uploading | checking | accepted | refused | forfeited | withdrawn.
        reason: why it was refused, or what its check waits for.
        committed, accepted: log indices.
        receipt: file name of the newest receipt in `receipts/`.
    """

    round: str
    entrant: str
    server: str
    manifest: dict[str, Any]
    nonce: str
    commitment: str
    submission: str = ""
    state: str = "unsent"
    reason: str = ""
    committed: int | None = None
    accepted: int | None = None
    receipt: str = ""

    @property
    def short(self) -> str:
        """Round and eight digits of the commitment: the name of its files."""
        return f"{self.round}-{self.commitment[7:15]}"


def enter_round(client: Client, keys: Keys, round_id: str, *, conflicts: Sequence[str] = ()) -> dict[str, Any]:
    """Register the account as an entrant of a round, with the conflicts of interest it declares; {index, record, …}."""
    entrant = load_account(keys.folder).id
    fields = {"entrant": entrant, "ed25519": keys.public, "conflicts": list(conflicts)}
    return enter(client, full_id(client, round_id), fields, keys)


def enter(client: Client, round_id: str, fields: dict[str, Any], keys: Keys) -> dict[str, Any]:
    """Send EntrantRegistered, signed; {index, record, …}.

    Raises:
        Refusal: phase_wrong, round_closed, in plain words where the round is not open yet, or no more; …
    """
    try:
        return client.post(round_id, "entrants", records.sign("EntrantRegistered", round_id, fields, key=keys.ed25519))
    except Refusal as refusal:
        if refusal.code not in ("phase_wrong", "round_closed"):
            raise
        state = client.round(round_id)
        if state["phase"] in ("draft", "sealed"):
            sentence = f"{round_id} is not open yet, and takes entrants once it is: not before {state['opens']}"
            hint = f"wait for it: acclimate status {round_id} --until open; then the same command again"
            raise Refusal("phase_wrong", sentence, hint=hint) from refusal
        if state["phase"] == "open" and refusal.code == "phase_wrong":
            raise Refusal("phase_wrong", f"{round_id} opened just now", hint="the same command again") from refusal
        ended = f"closed {state['closes']}" if refusal.code == "round_closed" else f"is {state['phase']}"
        sentence = f"{round_id} {ended}: it takes entrants only while it is open"
        hint = f"enter the competition's next round: acclimate round list --server {client.url}"
        raise Refusal(refusal.code, sentence, hint=hint) from refusal


def submit(
    client: Client,
    keys: Keys,
    round_id: str,
    model: Path,
    *,
    title: str,
    weights_after: str,
    family: str = "",
    base: str | None = None,
    released: str | None = None,
    baseline: str = "",
    again: bool = False,
    wait: bool = True,
    progress: Progress | None = None,
    say: Say = lambda line: None,
) -> Submission:
    """Submit a model, or go on with its submission where it stopped.

    1. The model is read strictly, the manifest made from its files; the nonce is saved; nothing was sent yet.
    2. The commitment and the acceptance to be logged later are signed and sent; the commitment's receipt is checked and saved.
    3. The files that the server lacks are uploaded.
    4. The server checks the model; once accepted, the acceptance's receipt is checked and saved.

    Args:
        client: a connection for the entrant's account.
        keys: the entrant's keys.
        round_id: the round, or a prefix of its id.
        model: folder with config.json, model.safetensors (or its index and shards), tokenizer.json; or with an adapter's two files.
        title: what people read beside the entry.
        weights_after: what becomes of the weights: publish | auditor | delete.
        family: the model's family, if it has one.
        base: the model that it was trained from, if any; an adapter's own is taken from its files.
        released: when the model was released (YYYY-MM-DD), if it was.
        baseline: for the organizer: the baseline to submit; its own key signs.
        again: submit anew what was refused or withdrawn.
        wait: wait for the server's check.
        progress: called while uploading with (bytes done, bytes in all).
        say: called with a sentence at each step.

    Raises:
        Refusal: model_invalid, file_unreadable, quota_exceeded, round_closed, proof_invalid, …; a submission that the server refuses is
            no exception but a state.
    """
    entrant = baseline or load_account(keys.folder).id
    defined, competition = definition_of(client, round_id)
    if baseline:
        require_baseline(competition, baseline, baseline=True)
    about = {"title": title, "family": family, "base": base, "released": released, "weights_after": weights_after}
    manifest = model_folders.manifest(client, model, about, of=(defined, competition), entrant=entrant)
    sending = Sending(model, again=again, wait=wait, progress=progress, say=say)
    return send(client, keys, manifest, defined=defined, baseline=bool(baseline), sending=sending)


@dataclass(frozen=True)
class Sending:
    """How a submission is sent.

    Attributes:
        model: folder with the files; None where the server is to have them all.
        again: begin anew what was refused or withdrawn.
        wait: wait for the server's check.
        progress: called while uploading with (bytes done, bytes in all).
        say: called with a sentence at each step.
    """

    model: Path | None
    again: bool = False
    wait: bool = True
    progress: Progress | None = None
    say: Say = lambda line: None


def send(
    client: Client, keys: Keys, manifest: dict[str, Any], *, defined: Record, baseline: bool, sending: Sending
) -> Submission:
    """Commit to a manifest, send what the server lacks of its files, and wait for the check; or go on with it where it stopped.

    Raises:
        Refusal: as submit.
    """
    say = sending.say
    mine = _taken_up(client, keys, manifest, baseline=baseline, again=sending.again, say=say)
    if mine.state in FINAL:
        before = submission_status(client, keys, mine.short)[0]
        say(f"this model was submitted before: {before.state}")
        if before.state in ENDED:
            say("nothing was sent now; the same command with --again submits it anew")
        return before
    committed, accepted = requests(mine, _signing(keys, mine))
    answer = _commit(client, keys, mine, committed=committed, accepted=accepted)
    mine = _keep(keys, mine, submission=answer["submission"], state=answer["state"], committed=answer["index"])
    # Before a byte of the model leaves: it is in the log, or the server is given nothing.
    mine = _receipt(client, keys, mine, defined=defined, request=committed)
    say(f"committed as log entry {mine.committed}; receipt {keys.folder / 'receipts' / mine.receipt}")
    if mine.state == "uploading":
        outcome = _sent(client, mine, sending, missing=answer["missing"])
        mine = _keep(keys, mine, state=outcome["state"], reason=outcome.get("reason") or "")
    mine = refresh(client, keys, mine)
    if sending.wait and mine.state not in FINAL:
        say("all files are there; the server checks the model")
        mine = await_outcome(client, keys, mine, say=say)
    if mine.state == "accepted":
        mine = _receipt(client, keys, mine, defined=defined, request=accepted)
    return mine


def await_outcome(client: Client, keys: Keys, mine: Submission, *, say: Say = lambda line: None) -> Submission:
    """Look again and again until the submission is accepted or refused; says what it waits for, where the server tells."""
    pause, said = FIRST_LOOK, ""
    while (mine := refresh(client, keys, mine)).state not in FINAL:
        if mine.reason not in ("", said):
            said = mine.reason
            say(
                f"the check waits: {said}; what is not checked by the end of the grace is forfeited, so tell the organizer"
            )
        time.sleep(pause)
        pause = min(pause * 1.5, SLOWEST_LOOK)
    return mine


def refresh(client: Client, keys: Keys, mine: Submission) -> Submission:
    """The submission with the server's newest word on it, kept."""
    if not mine.submission:
        return mine
    answer = client.submission(mine.submission)
    return _keep(keys, mine, state=answer["state"], reason=answer["reason"] or "", accepted=answer["accepted_index"])


def submissions(keys: Keys, round_id: str = "") -> list[Submission]:
    """The submissions of a key folder, of the rounds whose id begins with round_id: by their log entries, then what has none yet."""
    paths = sorted(path for path in (keys.folder / "submissions").glob("*.json") if path.name.startswith(round_id))
    # Not by the files' times: what the server says anew of a submission is written to its file.
    return sorted(map(_load, paths), key=lambda mine: float("inf") if mine.committed is None else mine.committed)


def submission_status(client: Client, keys: Keys, round_id: str = "") -> list[Submission]:
    """The key folder's submissions with the server's newest word; missing receipts of accepted ones, or cosignatures of them, are fetched."""
    result = []
    for mine in submissions(keys, round_id):
        moved = mine.server != client.url
        try:
            mine = refresh(client, keys, mine)
        except Refusal as refusal:
            # Sent when the account had another server; one that only has another address now knows it.
            if refusal.code != "submission_unknown" and not (moved and refusal.code == "not_found"):
                raise
            if not moved:
                # Its file stays as it was: what it had come to may be proved by receipts.
                mine = dataclasses.replace(
                    mine, state=LOST, reason=f"the server does not know it any more: {mine.state} before"
                )
        else:
            if mine.state == "accepted":
                defined, _ = definition_of(client, mine.round)
                for request in requests(mine, _signing(keys, mine)):
                    mine = _receipt(client, keys, mine, defined=defined, request=request)
        result.append(mine)
    return result


def withdraw(client: Client, keys: Keys, which: str) -> Submission:
    """Withdraw a submission before the round closes.

    Args:
        client: a connection for the entrant's account.
        keys: the entrant's keys.
        which: the server's id of it, its short name, or (a prefix of) its commitment.

    Raises:
        Refusal: submission_unknown, round_closed, …
    """
    found = [mine for mine in submissions(keys) if _is(mine, which)]
    if len(found) != 1:
        count = "none" if not found else f"{len(found)}"
        raise Refusal(
            "submission_unknown",
            f"{count} of the submissions in {keys.folder} is called {which!r}",
            hint=f"acclimate submission status --keys {keys.folder}",
        )
    fields = {"entrant": found[0].entrant, "commitment": found[0].commitment}
    request = records.sign("SubmissionWithdrawn", found[0].round, fields, key=_signing(keys, found[0]).ed25519)
    try:
        client.post(found[0].round, "withdrawals", request)
    except Refusal as refusal:
        hints = {
            "conflict": f"it counts for nothing already: acclimate submission status --keys {keys.folder}",
            "submission_unknown": "nothing of it is in the log, so that there is nothing to withdraw",
        }
        raise refusal.of(found[0].short, hint=hints.get(refusal.code, "")) from refusal
    return _keep(keys, found[0], state="withdrawn")


def baseline_keys(keys: Keys, name: str) -> Keys:
    """The key pair of a baseline, made on first use in `baselines/<name>/` of the organizer's key folder."""
    folder = keys.folder / "baselines" / name
    if not (folder / key_files.ED25519_FILE).exists():
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        return key_files.create(folder, age=False)
    return key_files.load(folder)


def _signing(keys: Keys, mine: Submission) -> Keys:
    folder = keys.folder / "baselines" / mine.entrant
    return key_files.load(folder) if folder.exists() else keys


def requests(mine: Submission, keys: Keys) -> tuple[Request, Request]:
    """The signed SubmissionCommitted and SubmissionAccepted; the same bytes each time, since Ed25519 signs without chance."""
    fields = {"entrant": mine.entrant, "commitment": mine.commitment}
    return (
        records.sign("SubmissionCommitted", mine.round, fields, key=keys.ed25519),
        records.sign("SubmissionAccepted", mine.round, fields, key=keys.ed25519),
    )


def _require_entered(client: Client, keys: Keys, round_id: str, entrant: str, *, baseline: bool) -> None:
    """Refuse to begin a submission for somebody who has not entered the round.

    Raises:
        Refusal: entrant_unknown; role_missing, where the keys are no entrant's.
    """
    for _, record in client.records(round_id):
        if record.type == "EntrantRegistered" and record["entrant"] == entrant:
            return
    account = load_account(keys.folder)
    if not baseline and account.role != "entrant":
        raise Refusal(
            "role_missing",
            f"{keys.folder} has the keys of {account.id}, which is registered as {account.role}: only an entrant submits a model",
            hint="take your entrant's key folder; a new one: acclimate register --server URL --name NAME --keys DIR",
        )
    raise Refusal(
        "entrant_unknown",
        f"{entrant!r} has not entered {round_id}; nothing was sent or written",
        hint=f"acclimate enter {round_id}{f' --baseline {entrant}' if baseline else ''} --keys {keys.folder}",
    )


def _taken_up(
    client: Client, keys: Keys, manifest: dict[str, Any], *, baseline: bool, again: bool, say: Say
) -> Submission:
    """The submission of a manifest, found again or begun; two of the same command at once are one submission.

    Raises:
        Refusal: manifest_invalid, entrant_unknown, busy.
    """
    manifests.check_texts(manifest)
    with alone(keys.folder / ".submissions.lock", doing=f"beginning a submission in {keys.folder}"):
        mine = _find(keys, manifest, again=again)
        if mine is None:
            _require_entered(client, keys, manifest["round"], manifest["entrant"], baseline=baseline)
            return _begin(keys, manifest, server=client.url)
    if mine.state not in FINAL:
        say(f"going on with submission {mine.short}")
    return mine


def _commit(client: Client, keys: Keys, mine: Submission, *, committed: Request, accepted: Request) -> dict[str, Any]:
    """Send the commitment; what will never be taken is kept no longer."""
    try:
        return client.submit(
            mine.round, committed=committed, accepted=accepted, nonce=mine.nonce, manifest=mine.manifest
        )
    except Refusal as refusal:
        if mine.state == "unsent" and refusal.code in _NEVER:
            _path(keys, mine).unlink(missing_ok=True)
        raise


def _begin(keys: Keys, manifest: dict[str, Any], *, server: str) -> Submission:
    nonce = secrets.token_bytes(32)
    commitment = digests.of_bytes(nonce + digests.canonical(manifest))
    mine = Submission(
        manifest["round"], manifest["entrant"], server, manifest, base64.b64encode(nonce).decode(), commitment
    )
    files.write_json(_path(keys, mine), dataclasses.asdict(mine))
    return mine


def _find(keys: Keys, manifest: dict[str, Any], *, again: bool) -> Submission | None:
    same = [mine for mine in submissions(keys, manifest["round"]) if mine.manifest == manifest]
    if again:
        same = [mine for mine in same if mine.state not in ENDED]
    return same[-1] if same else None


def _keep(keys: Keys, mine: Submission, **changes: Any) -> Submission:
    after = dataclasses.replace(mine, **changes)
    if after != mine:
        files.write_json(_path(keys, after), dataclasses.asdict(after))
    return after


def _load(path: Path) -> Submission:
    try:
        return Submission(**files.read_json(path))
    except TypeError as error:
        raise Refusal("file_unreadable", f"{path} is not a submission's file: {error}") from error


def _path(keys: Keys, mine: Submission) -> Path:
    return keys.folder / "submissions" / f"{mine.short}.json"


def _is(mine: Submission, which: str) -> bool:
    names = (mine.submission, mine.short, mine.commitment, mine.commitment.removeprefix("sha256:"))
    return which in names or (len(which) >= 4 and names[3].startswith(which))


def _receipt(client: Client, keys: Keys, mine: Submission, *, defined: Record, request: Request) -> Submission:
    """Save the receipt of what has been logged, or one with the cosignatures that it lacks; the commitment's stays beside the acceptance's.

    Raises:
        Refusal: proof_invalid, where the server names no log entry, or its receipt does not verify or is of something else.
    """
    accepted = request["type"] == "SubmissionAccepted"
    index = mine.accepted if accepted else mine.committed
    name = f"{mine.short}{'' if accepted else '.committed'}.tlog-proof"
    path = keys.folder / "receipts" / name
    if not path.exists():
        if type(index) is not int:
            raise Refusal(
                "proof_invalid",
                f"the server says that {mine.short} is {'accepted' if accepted else 'committed'}, and names no log entry of it",
                hint="nothing proves it: keep the key folder, and ask the operator; the same command asks again",
            )
        save_receipt(client, path, index=index, vkey=defined["log"], request=request)
    elif type(index) is int:
        # What is there proves the entry; without the witnesses it stays as it is.
        with contextlib.suppress(Refusal):
            if lacks_quorum(client, path, defined):
                save_receipt(client, path, index=index, vkey=defined["log"], request=request)
    return _keep(keys, mine, receipt=name)


def _sent(client: Client, mine: Submission, sending: Sending, *, missing: Sequence[str]) -> dict[str, Any]:
    """Upload what is missing and say that all is there; what the server has lost since is sent again, a few times."""
    for left in reversed(range(_SENDINGS)):
        try:
            _upload(client, mine, sending, missing=missing)
            return client.complete(mine.submission)
        except Refusal as refusal:
            if refusal.code == "phase_wrong":
                # It takes no files, since it has them all: from another command of this account.
                found = client.submission(mine.submission)
                if found["state"] == "uploading":
                    raise
                sending.say("another command has sent the files")
                return found
            if refusal.code != "upload_mismatch" or not left:
                raise
            missing = client.submission(mine.submission)["missing"]
            if not missing:
                raise
    raise AssertionError("unreachable")


def _upload(client: Client, mine: Submission, sending: Sending, *, missing: Sequence[str]) -> None:
    todo = [item for item in mine.manifest["files"] if item["sha256"] in missing]
    if todo and sending.model is None:
        raise Refusal(
            "upload_mismatch",
            f"the server lacks {len(todo)} of the files, such as {todo[0]['name']}",
            hint="give the model's folder as well: the same command goes on with this submission",
        )
    total = sum(item["size"] for item in todo)
    before = 0
    for item in todo:

        def tell(done: int, size: int, before: int = before) -> None:
            if sending.progress is not None:
                sending.progress(before + done, total)

        assert sending.model is not None
        client.put_file(mine.submission, sending.model / item["name"], digest=item["sha256"], progress=tell)
        before += item["size"]
