"""What the auditor whom a round names does: commit to a draw, draw, make the drawn preparations again, say what came of it.

The draw's secret is made before the round is, and kept in `draws.json` of the key folder; RoundDefined holds its digest. So whoever
prepared the models did not know which would be made again. A secret serves one round: once told, it tells every draw it is for.

An auditor trusts its own machine only: it reads the whole log, hashes it to the checkpoint, folds the round's records and demands that the
log only grew since it last looked. The secret leaves it after PreparationFinished is in such a checkpoint, not before.
"""

import base64
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate import files
from acclimate import keys as key_files
from acclimate.client.connection import Client, Progress
from acclimate.client.definitions import definition_of
from acclimate.client.evidence import require_quorum, require_seen
from acclimate.client.folder import ACCOUNT_FILE, DOCUMENT_FILE, load_account
from acclimate.client.folder_lock import alone
from acclimate.client.history import History, Known, Online, behind, read_history, require_beginning
from acclimate.keys import Keys
from acclimate.notes import LARGEST_NOTE
from acclimate_competitions import digests, reading, records, rounds
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_competitions.records import Record

if TYPE_CHECKING:
    from acclimate.verify import files as bundles

AUDITOR_FILE = "auditor.json"
DRAWS_FILE = "draws.json"
DRAW_ROUNDS_FILE = "draw-rounds.json"
"""{draw: the round that it is for}"""


def keygen(keys: Keys, *, name: str, again: bool = False) -> dict[str, str]:
    """The auditor's public part {name, ed25519, draw}, with a new secret; both are kept in the key folder.

    Killed at any moment and called again, it finishes: the secret is kept before its digest is.

    Args:
        keys: the auditor's keys.
        name: as the definition names the auditor.
        again: whether a public part that is there already is replaced, for another round.

    Raises:
        Refusal: key_refused, where one is there; conflict, where the folder is somebody else's.
    """
    path = keys.folder / AUDITOR_FILE
    if (keys.folder / DOCUMENT_FILE).exists():
        raise _somebody_elses(keys, "a custodian's", name)
    if (keys.folder / ACCOUNT_FILE).exists():
        account = load_account(keys.folder)
        if (account.id, account.role) != (name, "auditor"):
            raise _somebody_elses(keys, f"of the account {account.id!r} ({account.role})", name)
    if path.exists():
        document = files.read_json(path)
        if not again:
            raise Refusal(
                "key_refused",
                f"{path} exists already, with the draw {document.get('draw')}",
                hint="send it to the organizer; for another round make a new secret with --again: each serves one round",
            )
        if document.get("name") != name:
            raise _somebody_elses(keys, f"of the auditor {document.get('name')!r}", name)
    secret = secrets.token_bytes(32)
    draw = digests.of_bytes(secret)
    made = {"name": name, "ed25519": keys.public, "draw": draw}
    with alone(keys.folder / ".draws.lock", doing=f"writing {keys.folder / DRAWS_FILE}"):
        files.write_json(keys.folder / DRAWS_FILE, {**_draws(keys), draw: base64.b64encode(secret).decode()})
        files.write_json(path, made)
    return made


def name_of(folder: Path) -> str | None:
    """The name of the auditor whose folder it is; None where it is none's yet.

    Raises:
        Refusal: file_unreadable.
    """
    if not (folder / AUDITOR_FILE).exists():
        return None
    found = files.read_json(folder / AUDITOR_FILE)
    name = found.get("name") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


def open_keys(folder: Path) -> Keys:
    """The keys of a folder, made where there are none."""
    if (folder / key_files.ED25519_FILE).exists():
        return key_files.load(folder)
    return key_files.create(folder, age=False)


def secret_of(keys: Keys, draw: str) -> str:
    """The secret (base64) that a round's draw commits to.

    Raises:
        Refusal: file_unreadable, where the folder does not keep it.
    """
    found = _draws(keys).get(draw)
    if not isinstance(found, str):
        raise Refusal(
            "file_unreadable",
            f"{keys.folder / DRAWS_FILE} does not hold the secret of draw {draw}",
            hint="restore the key folder from its backup; without the secret nobody can draw, and the organizer voids the round",
        )
    return found


# ---- what the log says ---------------------------------------------------------------------------------------------


def evidence(
    client: Client, keys: Keys, round_id: str, *, holding: str = "", progress: Progress | None = None
) -> Round:
    """Where the round stands by the log that this machine has read and hashed itself.

    1. RoundDefined and definition agree with the round's id, and name these keys' auditor.
    2. The checkpoint is signed by the log's key, which is the one kept, and is not behind what was seen; only then so many entries are read. They
       hash to it, in the order of their dates; the round's quorum of witnesses cosigned it, and RoundDefined is among them as it was shown. No
       record of the round is dated after the quorum saw it.
    3. The log only grew since this folder last looked; what was seen is kept in `checkpoints/`.
    4. The records fold.
    5. The draw is no other round's, in the log or by what this folder looked at before: its secret would be told for both.

    Args:
        client: a connection for the auditor's account.
        keys: the auditor's keys.
        round_id: the round, or a prefix of its id.
        holding: a record type of the round that must be there; waited for a moment.
        progress: told (log entries read, of how many).

    Raises:
        Refusal: role_missing, log_inconsistent, phase_wrong, …
    """
    return _seen(client, keys, round_id, holding=holding, progress=progress)[0]


def _seen(
    client: Client, keys: Keys, round_id: str, *, holding: str = "", size: int = 0, progress: Progress | None = None
) -> tuple[Round, History]:
    # 1
    defined, competition = definition_of(client, round_id)
    named = defined.fields.get("auditor")
    if named is None or named["ed25519"] != keys.public:
        whom = "no auditor" if named is None else f"the auditor {named['name']}, with the key {named['ed25519']}"
        raise Refusal(
            "role_missing",
            f"round {defined.round} names {whom}; the key in {keys.folder} is {keys.public}",
            hint="name the key folder whose auditor.json the organizer was sent: --keys DIR",
        )
    # 2
    known = _known(keys, defined)
    history = read_history(Online(client, progress), defined, known=known, holding=holding, size=size)
    require_seen(history, require_quorum(history, defined), defined)
    # 3
    if known.seen:
        known.require_growth(history)
    files.write(_checkpoint_file(keys, defined), history.note.encode(), mode=0o644)
    # 4
    state = rounds.fold(history.numbered, competition)
    # 5
    _require_own_draw(keys, state, history)
    return state, history


def _require_own_draw(keys: Keys, state: Round, history: History) -> None:
    """Refuse a round whose draw is another's: the secret, once told for the one, says what is drawn in the other.

    Which round a draw of this folder is for is settled by the first one that is looked at.

    Raises:
        Refusal: conflict.
    """
    assert state.auditor is not None
    draw, path = state.auditor["draw"], keys.folder / DRAW_ROUNDS_FILE
    with alone(keys.folder / ".draws.lock", doing=f"writing {path}"):
        kept = files.read_json(path) if path.exists() else {}
        if not isinstance(kept, dict):
            raise Refusal("file_unreadable", f"{path} does not hold draws", hint="restore it from a backup")
        first, where = history.draws[draw], "the log has it first in"
        if first == state.id:
            first, where = kept.get(draw, state.id), f"{path} has it for"
        if first != state.id:
            raise Refusal(
                "conflict",
                f"round {state.id} names the draw {draw}, and {where} {first}: a secret serves one round",
                hint="nothing was told; tell both organizers: who copies a draw wants to know beforehand what will be drawn in the other round",
            )
        if draw not in kept:
            files.write_json(path, {**kept, draw: state.id})


def _known(keys: Keys, defined: Record) -> Known:
    """What this folder knows of the log: its key, and the checkpoint at which it looked last."""
    path = _checkpoint_file(keys, defined)
    return Known.of(keys, seen=reading.text(path, LARGEST_NOTE) if path.exists() else "", where=str(path))


def _checkpoint_file(keys: Keys, defined: Record) -> Path:
    return keys.folder / "checkpoints" / f"{defined.round}.txt"


def draw(client: Client, keys: Keys, round_id: str, *, progress: Progress | None = None) -> Round:
    """Tell the secret, once every preparation is in the log, so that the draw follows; the round with its drawn jobs.

    Raises:
        Refusal: phase_wrong, guard_failed where the round asks for no re-runs, file_unreadable where the secret is lost, …
    """
    state, history = _seen(client, keys, round_id, progress=progress)
    assert state.auditor is not None
    if state.drawn is not None:
        return state
    if state.competition.round.audits == 0:
        raise Refusal(
            "guard_failed",
            f"the definition of {state.id} asks for no re-runs: audits = 0",
            hint="the auditor of such a round reports on its bundle: acclimate audit report",
        )
    if state.phase is not Phase.PREPARED:
        late = behind(Online(client), state.defined, history)
        raise Refusal(
            "phase_wrong",
            f"round {state.id} is {state.phase}; the draw comes once it is prepared, before the first share"
            + (f"; {late}" if late else ""),
            hint=f"acclimate status {state.id} --keys {keys.folder} --watch; the secret stays here until then",
        )
    fields = {"secret": secret_of(keys, state.auditor["draw"])}
    client.post(state.id, "draw", records.sign("AuditDrawn", state.id, fields, key=keys.ed25519))
    return evidence(client, keys, state.id, holding="AuditDrawn", progress=progress)


def status(
    client: Client, keys: Keys, round_id: str, *, size: int = 0, progress: Progress | None = None
) -> dict[str, Any]:
    """Where the audit stands.

    Args:
        client: a connection for the auditor's account.
        keys: the auditor's keys.
        round_id: the round, or a prefix of its id.
        size: how many log entries must be seen: all up to what was sent last. Waited for a moment.
        progress: told (log entries read, of how many).

    Returns:
        {round, phase, due, drawn, missing, jobs: [{submission, entrant, task, seed, given_up, agrees (null: no outcome), reason}], reports};
        given_up says that the organizer gave the preparation up, so that it is not made again; missing says in words what stands between the audit and the release.
    """
    state, history = _seen(client, keys, round_id, size=size, progress=progress)
    late = behind(Online(client), state.defined, history) if state.finished is None else ""
    entrants = {entry.submission: entry.entrant for entry in state.entries}
    jobs = []
    for key in state.drawn or ():
        record = state.audited.get(key)
        outcome = {"agrees": record["agrees"], "reason": record["reason"]} if record is not None else {}
        named = dict(zip(("submission", "task", "seed"), key, strict=True))
        lost = records.was_given_up(state.prepared[key])
        jobs.append({**named, "entrant": entrants[key[0]], "given_up": lost, "agrees": None, "reason": "", **outcome})
    return {
        "round": state.id,
        "phase": str(state.phase),
        "due": state.audits_due if state.closed is not None else state.competition.round.audits,
        "drawn": state.drawn is not None,
        "missing": rounds.audits_missing(state)
        if state.finished is not None
        else "the preparations have not finished yet" + (f", by what is cosigned; {late}" if late else ""),
        "jobs": jobs,
        "reports": len(state.reports),
    }


# ---- the report ----------------------------------------------------------------------------------------------------


def report(
    client: Client,
    keys: Keys,
    round_id: str,
    bundle: Path,
    *,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Verify the whole bundle of a published round, and sign that nothing FAILED; {round, index, bundle, checks}.

    1. The bundle is the round's, whole, and of the newest ranking; its entries are those that this machine has read of the log itself.
    2. It is verified here, by the log key that RoundDefined names; nothing may FAIL. It is opened once: what is verified is what is signed.
    3. RoundAudited names the bundle by its MANIFEST.

    Args:
        client: a connection for the auditor's account.
        keys: the auditor's keys.
        round_id: the round, or a prefix of its id.
        bundle: the whole bundle.
        progress: told (done, of how many, what is done).

    Raises:
        Refusal: phase_wrong, bundle_invalid, log_inconsistent, …
    """
    from acclimate import verify
    from acclimate.verify import files as bundles

    # 1
    def reading_log(done: int, total: int) -> None:
        progress(done, total, "reading the log")

    state, history = _seen(client, keys, round_id, progress=reading_log)
    if state.phase is not Phase.PUBLISHED:
        raise Refusal(
            "phase_wrong",
            f"round {state.id} is {state.phase}; the auditor reports once the ranking is published",
            hint=f"acclimate status {state.id} --keys {keys.folder} --watch",
        )
    try:
        with bundles.opened(bundle) as found:
            entries = found.lines("entries.jsonl")
            if len(entries) > len(history.entries):
                # Newer than what the quorum has cosigned so far: nothing is signed for what was not read.
                history = _seen(client, keys, round_id, size=len(entries), progress=reading_log)[1]
            _require_whole(found, state)
            ranked = [i for i, r in history.numbered if r.type in ("RankingPublished", "RankingRevised")]
            require_beginning(history, entries, of=bundle, holding=ranked[-1])
            # 2
            manifest = found.digest("MANIFEST")
            checked = verify.verify(found, log_key=state.defined["log"], progress=progress)
            unchanged = digests.of_file(found.path("MANIFEST")) == manifest
    except verify.Failed as failed:
        raise Refusal("bundle_invalid", f"{failed.where}: {failed.why}", hint="download the bundle again") from failed
    if checked.failed or checked.round != state.id or not unchanged:
        wrong = f"the bundle is of {checked.round}, not {state.id}" if unchanged else f"{bundle} changed meanwhile"
        raise Refusal(
            "bundle_invalid",
            checked.summary if checked.failed else wrong,
            hint="nothing was signed; `acclimate verify` on it says all that is wrong",
            problems=[f"{check.where}: {check.meaning}" for check in checked.failed],
        )
    # 3
    said = [check.status for check in checked.checks]
    counts = {"ok": said.count("ok"), "failed": said.count("FAILED"), "not_checked": said.count("NOT CHECKED")}
    fields = {"bundle": manifest, "ranking": state.rankings[-1][0], "checks": counts}
    answer = client.post(state.id, "reports", records.sign("RoundAudited", state.id, fields, key=keys.ed25519))
    return {"round": state.id, "index": answer["index"], "bundle": manifest, "checks": counts}


def _require_whole(found: "bundles.Bundle", state: Round) -> None:
    """Refuse a public bundle where there is a whole one, and one of an older ranking.

    Raises:
        Refusal: bundle_invalid.
    """
    whole, ranking = bool(found.under("predictions")), found.digest("ranking.json")
    newest = state.rankings[-1][0]
    if not whole or ranking != newest:
        sentence = (
            f"{found.source} has no predictions: it is the public bundle of a round whose holdout stays private"
            if not whole
            else f"{found.source} has the ranking {ranking}, the newest published is {newest}"
        )
        whole_bundle = f"acclimate round bundle {state.id} --out FILE" + (" --whole" if state.private else "")
        raise Refusal("bundle_invalid", sentence, hint=f"report on the whole bundle of now: {whole_bundle}")


def _draws(keys: Keys) -> dict[str, Any]:
    path = keys.folder / DRAWS_FILE
    found = files.read_json(path) if path.exists() else {}
    if not isinstance(found, dict):
        raise Refusal("file_unreadable", f"{path} does not hold draws", hint="restore it from a backup")
    return found


def _somebody_elses(keys: Keys, whose: str, name: str) -> Refusal:
    return Refusal(
        "conflict",
        f"{keys.folder} is {whose}, asked for was the auditor {name!r}",
        hint="one folder holds the keys of one account; name another folder",
    )
