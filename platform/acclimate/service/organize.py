"""What an organizer does: define a round, seal its holdout, rehearse, move the closing time, void."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, insert, select, update

from acclimate import custody, keys, sealing
from acclimate.service import finding, names, submit
from acclimate.service.accounts import Account, require_signer
from acclimate.service.identity import Identity
from acclimate.service.submit import answer
from acclimate.store import Store, Tx, rounds, seals, stages, submissions, timestamp
from acclimate_competitions import bases
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_competitions.records import FIELDS, ID_DIGITS, format_time, parse_time
from acclimate_runners import prompts

_PUBLIC_SPLITS = ("preparation", "validation")
_SHOWN = 50
"""Problems of split files that an answer has."""


def define(store: Store, identity: Identity, account: Account, request: Mapping[str, Any]) -> dict[str, Any]:
    """Begin a round.

    1. The caller signed RoundDefined with the account's key; its id has the digits that bind it.
    2. The definition and all public files are here, and they are those that the definition asks for; each split has the columns that definition
       and prompts name.
    3. Log, evaluators, code and witnesses are this server's.
    4. No other round of the competition has this name, none has the auditor's draw; the round can still open; the one that it follows is one of
       the competition's.

    Returns:
        {round, index, new}.

    Raises:
        Refusal: definition_invalid, splits_invalid, blob_unknown, record_invalid, guard_failed, round_exists, …
    """
    # 1
    if request.get("type") != "RoundDefined":
        raise Refusal("record_invalid", f"this address takes RoundDefined, the request is {request.get('type')}")
    require_signer(dict(request), account)
    fields = request["fields"]
    if "id_digits" not in fields:
        raise Refusal(
            "record_invalid",
            f"RoundDefined has no id_digits; {ID_DIGITS} are asked for, so that its id binds all of it",
            hint="the organizer's acclimate is older than the server's: update it, and create the round again",
        )
    # 2
    if not store.blobs.keep(fields["definition"]):
        raise Refusal(
            "blob_unknown",
            f"the definition {fields['definition']} was not uploaded",
            hint="PUT /v1/blobs/{digest} first",
        )
    competition = store.competition(fields["definition"])
    _check_files(store, fields["files"], competition)
    _check_splits(store, fields["files"], competition)
    # 3
    _check_server(identity, fields)
    if "name" in fields["organizer"]:
        names.check(fields["organizer"]["name"], what="the organizer's name")
    for custodian in fields["custodians"]:
        names.check_id(custodian["name"], what="custodian name")
        keys.check_recipient(custodian["age"])
        if custodian["backup"] is not None:
            keys.check_recipient(custodian["backup"])
    with store.transaction() as tx:
        # 4
        known = tx.execute(
            select(rounds).where(rounds.c.competition == fields["competition"], rounds.c.name == fields["name"])
        ).one_or_none()
        if known is not None and known.id != request["round"]:
            raise Refusal(
                "round_exists",
                f"competition {fields['competition']!r} has a round {fields['name']!r} already: {known.id}",
                hint="choose another name",
            )
        if known is None and parse_time(fields["closes"]) <= tx.now():
            raise Refusal("guard_failed", f"the round would close {fields['closes']}, it is {format_time(tx.now())}")
        if known is None:
            _check_draw(tx, fields.get("auditor"))
            _check_predecessor(tx, fields.get("predecessor"), competition)
        index, record, new = tx.append_once(request)
        if new:
            row = {"id": record.round, "competition": competition.slug, "name": fields["name"], "owner": account.id}
            tx.execute(insert(rounds), {**row, "definition": competition.digest, "created": format_time(record.at)})
        return {"round": record.round, "index": index, "new": new}


def _check_predecessor(tx: Tx, predecessor: str | None, competition: Competition) -> None:
    """Refuse a predecessor that is no round of the competition here: nobody could look at the two together."""
    if predecessor is None:
        return
    row = tx.execute(select(rounds).where(rounds.c.id == predecessor)).one_or_none()
    if row is None or row.competition != competition.slug:
        what = "no round of this server" if row is None else f"a round of {row.competition!r}"
        raise Refusal("guard_failed", f"the predecessor {predecessor} is {what}, not of {competition.slug!r}")


def _check_draw(tx: Tx, auditor: Mapping[str, Any] | None) -> None:
    """Refuse the draw of another round: once its secret is told there, what is drawn here could be known in advance."""
    for name in tx.execute(select(rounds.c.id)).scalars() if auditor is not None else ():
        other = tx.round(name).auditor
        if auditor is not None and other is not None and other["draw"] == auditor["draw"]:
            raise Refusal(
                "conflict",
                f"the draw {auditor['draw']} of auditor {auditor['name']!r} is that of round {name}",
                hint="a secret serves one round; the auditor makes a new one: acclimate audit keygen --again --keys DIR",
            )


def _check_files(store: Store, files: Mapping[str, str], competition: Competition) -> None:
    required = {f"splits/{task.name}/{split}.parquet" for task in competition.tasks for split in _PUBLIC_SPLITS}
    optional = {f"splits/{task.name}/practice.parquet" for task in competition.tasks} | {"tokenizer.json"}
    problems = [f"{name} is missing" for name in sorted(required - set(files))]
    # Nothing else may be made public under a round: a holdout by mistake, above all.
    standing = {name for name in files if name.startswith(f"{bases.FOLDER}/")}
    problems += [
        f"{name!r} is not a public file of this competition"
        for name in sorted(set(files) - required - optional - standing)
    ]
    problems += bases.problems(files, competition.submission.bases)
    problems += [
        f"{name}: blob {digest} was not uploaded" for name, digest in files.items() if not store.blobs.keep(digest)
    ]
    if problems:
        raise Refusal(
            "record_invalid",
            f"the files of RoundDefined have {len(problems)} problem(s): {problems[0]}",
            hint="upload the definition and every public file first (PUT /v1/blobs/{digest})",
            problems=problems,
        )


def _check_splits(store: Store, files: Mapping[str, str], competition: Competition) -> None:
    """Refuse public splits that the tasks' prompts don't fit. The client fills the prompts with all rows; here no template is run, only parsed."""
    from acclimate import table_blobs
    from acclimate_competitions import splits

    problems = []
    for task in competition.tasks:
        prompts.require_template(task)
        for split in splits.PUBLIC:
            name = f"{task.name}/{split}.parquet"
            if f"splits/{name}" not in files:
                continue
            try:
                found = table_blobs.columns(store.blobs, files[f"splits/{name}"])
            except Refusal as refusal:
                if refusal.code != "file_unreadable":
                    raise
                problems.append(f"{name}: not a readable Parquet file")
                continue
            if not splits.too_wide(found, name):
                prompts.require_columns(task, found.names)
            problems += splits.column_problems(found, name, task, competition)
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise Refusal(
            "splits_invalid",
            f"the public split files have {len(problems)} problem(s): {problems[0]}",
            hint="see them all before a round is begun: acclimate competition check FOLDER",
            problems=[*problems[:_SHOWN], *more],
        )


def _check_server(identity: Identity, fields: Mapping[str, Any]) -> None:
    ours: dict[str, Any] = {
        "log": identity.vkey,
        "evaluators": [identity.evaluator],
        "code": identity.code,
        "witnesses": list(identity.witnesses),
        "quorum": identity.quorum,
    }
    problems = [
        f"{name} is {fields[name]!r}, this server has {value!r}"
        for name, value in ours.items()
        if fields[name] != value
    ]
    if problems:
        raise Refusal(
            "guard_failed",
            f"RoundDefined was made for another server: {problems[0]}",
            hint="`GET /v1/server` says what belongs there; `acclimate round create` fills it in",
            problems=problems,
        )


def seal(
    store: Store, account: Account, given: str, request: Mapping[str, Any], *, envelopes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Log the seal of the holdout.

    1. The caller is the round's organizer and signed HoldoutSealed.
    2. The ciphertext is here; digest, size and block root are recomputed from its bytes.
    3. There is one envelope a share, the one that the share names.
    4. The seal is logged and the envelopes stored in one transaction.

    Raises:
        Refusal: role_missing, signature_invalid, seal_mismatch, blob_unknown, phase_wrong, conflict, …
    """
    with store.snapshot() as tx:
        # 1
        state = finding.find(tx, given)
        finding.require_owner(tx, state.id, account)
        finding.require_kind(request, "HoldoutSealed", state)
        require_signer(dict(request), account)
        if tx.find(request) is None and state.phase is not Phase.DRAFT:
            sealed = state.seal["seal"] if state.seal is not None else "none"
            raise Refusal("conflict", f"round {state.id} has another seal already: {sealed}")
    # 2, 3: hashing takes long, so outside the writing transaction; a blob does not change.
    _check_seal(store, state, request["fields"], envelopes)
    with store.transaction() as tx:
        # 4
        index, record, new = tx.append_once(request)
        if new:
            _keep_seal(tx, state.id, request["fields"], envelopes, kind="real")
        return answer(index, record, new)


def rehearse(
    store: Store,
    account: Account,
    given: str,
    fields: Mapping[str, Any],
    *,
    envelopes: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Take a dummy seal, which the custodians then open in earnest; the newest one counts.

    Returns:
        {seal, round}.

    Raises:
        Refusal: role_missing, seal_mismatch, blob_unknown, phase_wrong, record_invalid, …
    """
    with store.snapshot() as tx:
        state = finding.find(tx, given)
        finding.require_owner(tx, state.id, account)
        _require_rehearsing(state)
    if set(fields) != FIELDS["HoldoutSealed"][0]:
        raise Refusal("record_invalid", f"the fields of a seal are {sorted(FIELDS['HoldoutSealed'][0])}")
    _check_seal(store, state, fields, envelopes)
    with store.transaction() as tx:
        _require_rehearsing(tx.round(state.id))
        known = tx.execute(select(seals).where(seals.c.seal == fields["seal"])).one_or_none()
        if known is not None and (known.kind, known.round, known.header) != ("rehearsal", state.id, dict(fields)):
            raise Refusal("conflict", f"another seal has the id {fields['seal']}", hint="make a new dummy seal")
        if known is None:
            _keep_seal(tx, state.id, fields, envelopes, kind="rehearsal")
        return {"seal": fields["seal"], "round": state.id, "new": known is None}


def _require_rehearsing(state: Round) -> None:
    if state.phase not in (Phase.DRAFT, Phase.SEALED):
        raise Refusal("phase_wrong", f"a rehearsal belongs before the opening, round {state.id} is {state.phase}")


def _check_seal(store: Store, state: Round, fields: Mapping[str, Any], envelopes: Sequence[Mapping[str, Any]]) -> None:
    digest = fields["ciphertext"]
    if not store.blobs.keep(digest):
        raise Refusal("blob_unknown", f"the ciphertext {digest} was not uploaded", hint="PUT /v1/blobs/{digest} first")
    try:
        with store.blobs.local(digest) as ciphertext:
            sealing.check_ciphertext(ciphertext, fields)
    except Refusal:
        # The organizer's fault only where these are the bytes that were sent.
        store.blobs.check(digest)
        raise
    shares, custodians = fields["shares"], state.defined["custodians"]
    problems = []
    if [(s["index"], s["to"]) for s in shares] != [(i, c["name"]) for i, c in enumerate(custodians, start=1)]:
        problems.append("the shares must be one a custodian, in their order")
    elif [(e["index"], e["to"]) for e in envelopes] != [(s["index"], s["to"]) for s in shares]:
        problems.append("the envelopes must be one a share, in their order")
    else:
        for share, envelope in zip(shares, envelopes, strict=True):
            if custody.envelope_digest(envelope) != share["envelope"]:
                problems.append(f"the envelope for {share['to']} is not the one that its share names")
    if fields["rows"] < 1:
        problems.append("a holdout has at least one row")
    if problems:
        raise Refusal("seal_mismatch", f"the seal does not match: {problems[0]}", problems=problems)


def _keep_seal(
    tx: Tx, round_id: str, fields: Mapping[str, Any], envelopes: Sequence[Mapping[str, Any]], *, kind: str
) -> None:
    if tx.execute(select(seals.c.seal).where(seals.c.seal == fields["seal"])).first() is not None:
        raise Refusal(
            "conflict", f"another seal has the id {fields['seal']}", hint="a seal's id is drawn anew each time"
        )
    number = tx.execute(select(func.count()).select_from(seals).where(seals.c.round == round_id)).scalar_one()
    row = {"seal": fields["seal"], "round": round_id, "kind": kind, "header": dict(fields), "number": number}
    row["received"] = timestamp(tx)
    tx.execute(insert(seals), {**row, "envelopes": [dict(envelope) for envelope in envelopes]})


def envelopes(store: Store, account: Account, given: str) -> dict[str, Any]:
    """The envelopes of the real and the newest rehearsal seal: all for the organizer, its own for a custodian.

    Raises:
        Refusal: round_unknown, role_missing.
    """
    with store.snapshot() as tx:
        state = finding.find(tx, given)
        mine = None
        if not finding.is_owner(tx, state.id, account):
            mine = finding.custodian_index(state, account)
        found: dict[str, Any] = {"round": state.id, "real": None, "rehearsal": None}
        for row in tx.execute(select(seals).where(seals.c.round == state.id).order_by(seals.c.number)):
            chosen = [envelope for envelope in row.envelopes if mine in (None, envelope["index"])]
            found[row.kind] = {"seal": row.seal, "fields": row.header, "envelopes": chosen, "succeeded": row.succeeded}
        return found


def extend(store: Store, account: Account, given: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Log ClosingExtended, which only the round's organizer signs.

    Raises:
        Refusal: role_missing, signature_invalid, and whatever rounds.apply refuses.
    """
    with store.transaction() as tx:
        state = finding.find(tx, given)
        finding.require_owner(tx, state.id, account)
        finding.require_kind(request, "ClosingExtended", state)
        require_signer(dict(request), account)
        return answer(*tx.append_once(request))


def void(store: Store, account: Account, given: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Log RoundVoided, by the round's organizer, or by one of its custodians for k of them; it ends all that waits in the round.

    Raises:
        Refusal: role_missing, signature_invalid, and whatever rounds.apply refuses.
    """
    with store.transaction() as tx:
        state = finding.find(tx, given)
        if account.role != "custodian" or state.custodian_index(account.ed25519) is None:
            finding.require_owner(tx, state.id, account)
        finding.require_kind(request, "RoundVoided", state)
        require_signer(dict(request), account)
        names.check(request["fields"]["reason"], what="the reason", longest=2000)
        logged = tx.append_once(request)
        _end_all(tx, state.id)
        return answer(*logged)


def _end_all(tx: Tx, round_id: str) -> None:
    """Submissions that wait for anything are forfeited at our expense; what the dispatcher holds of the round it then gives up."""
    reason = "the round was voided"
    waiting = submissions.c.state.in_(("uploading", "checking"))
    query = select(submissions).where(submissions.c.round == round_id, waiting).order_by(submissions.c.committed_index)
    for row in tx.execute(query).all():
        submit.forfeit(tx, row, reason=reason, ours=True)
    open_ones = (stages.c.round == round_id) & stages.c.state.in_(
        ("pending", "starting", "running", "verifying", "blocked")
    )
    tx.execute(update(stages).where(open_ones).values(state="cancelled", code=None, reason=reason))
