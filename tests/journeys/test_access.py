"""Who may call what: every route × every kind of caller, and nothing outside the table."""

import base64
import subprocess
import sys
import threading

import live
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route

from acclimate.api import access
from acclimate.api.app import create_app
from acclimate.service import accounts

ROLES = ("anonymous", "organizer", "entrant", "custodian", "auditor", "analyst")


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """An open round; a second organizer, entrant and custodian who have nothing to do with it; a committed submission."""
    folder = tmp_path_factory.mktemp("access")
    with live.serve(folder) as served:
        staged = live.open_round(served, folder)
        ada = live.enter(staged, served.actor("ada"))
        made, _ = live.commit(staged, ada, seed=1)
        served.actor("other-organizer", "organizer")
        served.actor("other-custodian", "custodian")
        served.actor("bea")
        served.actor("analyst", "analyst")
        served.actor("other-auditor", "auditor")
        yield staged, made["submission"]


def caller(staged, role):
    names = {"entrant": "bea", "analyst": "analyst"} | {
        other: f"other-{other}" for other in ("organizer", "custodian", "auditor")
    }
    served = staged.live
    return served.stranger() if role == "anonymous" else served.actor(names[role], role)


def address(path, staged, submission):
    named = {
        "{round_id}": staged.round,
        "{submission}": submission,
        "{digest}": "sha256:" + "0" * 64,
        "{name:path}": "tokenizer.json",
        "{index}": "0",
    }
    for name, value in named.items():
        path = path.replace(name, value)
    return path + (
        "?start=0&end=1" if path.endswith("entries") else "?first=0&second=1" if "consistency" in path else ""
    )


def test_every_route_has_a_row_and_every_row_a_route(stage):
    app_routes = {
        (method, route.path)
        for route in create_app(stage[0].live.settings).routes
        if isinstance(route, Route | APIRoute)
        for method in route.methods - {"HEAD"}
    }
    assert app_routes == set(access.ACCESS)


def test_a_route_without_a_row_is_not_built():
    with pytest.raises(KeyError):
        access.Guarded("/v1/forgotten", lambda: None, methods=["GET"])


def test_every_route_but_the_description_asks_the_table(stage):
    for route in create_app(stage[0].live.settings).routes:
        assert isinstance(route, access.Guarded) or route.path == "/v1/openapi.json", route.path


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(("method", "path"), sorted(access.ACCESS))
def test_a_role_that_the_table_does_not_name_is_refused_before_the_body_is_read(stage, method, path, role):
    staged, submission = stage
    answer = caller(staged, role).http.request(method, address(path, staged, submission), content=b"{not json")
    allowed = role in access.ACCESS[method, path].roles
    if allowed:
        # Whatever it answers, it is about the request, or about whose the round or submission is.
        assert answer.status_code != 401
        assert answer.status_code < 500
    else:
        problem = answer.json()
        assert answer.status_code == (401 if role == "anonymous" else 403), answer.text
        assert problem["code"] == ("token_invalid" if role == "anonymous" else "role_missing")
        assert (answer.headers.get("WWW-Authenticate") == "Bearer") == (role == "anonymous")


@pytest.mark.parametrize("token", ["acc_unknown", "a b", "acc_" + "x" * 5000, "häß"])
def test_an_unknown_token_is_refused_even_where_none_is_needed(stage, token):
    http = stage[0].live.anyone()
    answer = http.get("/v1/rounds", headers={"Authorization": b"Bearer " + token.encode()})
    assert (answer.status_code, answer.json()["code"]) == (401, "token_invalid")
    answer = http.get("/v1/rounds", headers={"Authorization": "Basic YTpi"})
    assert (answer.status_code, answer.json()["code"]) == (401, "token_invalid")


# ---- whose it is ---------------------------------------------------------------------------------------------------


def test_another_organizer_has_no_say_in_the_round(stage):
    staged, _ = stage
    other = staged.live.actor("other-organizer", "organizer")
    sign = lambda kind, **fields: other.sign(kind, staged.round, **fields)  # noqa: E731
    envelope = {"index": 1, "to": "custodian-a", "main": "", "backup": None}
    tries = {
        "seal": {"record": sign("HoldoutSealed", **staged.seal), "envelopes": [envelope]},
        "rehearsal": {"fields": staged.seal, "envelopes": [envelope]},
        "extension": sign("ClosingExtended", closes=staged.fields["closes_latest"]),
        "void": sign("RoundVoided", reason="I dislike it"),
        "entrants": sign("EntrantRegistered", entrant="untrained", ed25519=other.public, conflicts=["baseline"]),
        "ranking": {
            "record": sign("RankingPublished", ranking=staged.seal["seal"], policy=staged.fields["policy"], reason=""),
            "ranking": {},
        },
    }
    for name, body in tries.items():
        answer = other.post(f"{staged.path}/{name}", body)
        assert (answer.status_code, answer.json()["code"]) == (403, "role_missing"), (name, answer.text)
    assert other.get(f"{staged.path}/envelopes").json()["code"] == "role_missing"


def test_a_stolen_organizers_token_neither_seals_nor_voids_nor_extends(stage):
    staged, _ = stage
    served = staged.live
    thief = served.stranger("organizer", "organizer")
    thief.http.headers["Authorization"] = f"Bearer {served.organizer().token}"
    for name, kind, fields in (
        ("extension", "ClosingExtended", {"closes": staged.fields["closes_latest"]}),
        ("void", "RoundVoided", {"reason": "mine"}),
    ):
        answer = thief.post(f"{staged.path}/{name}", thief.sign(kind, staged.round, **fields))
        assert (answer.status_code, answer.json()["code"]) == (403, "signature_invalid"), answer.text
    forged = served.organizer().sign("ClosingExtended", staged.round, closes=staged.fields["closes_latest"])
    forged["fields"]["closes"] = staged.fields["closes"].replace("12:00", "12:01")
    answer = thief.post(f"{staged.path}/extension", forged)
    assert (answer.status_code, answer.json()["code"]) == (403, "signature_invalid"), answer.text


def test_a_custodian_of_another_round_gets_nothing(stage):
    staged, _ = stage
    other = staged.live.actor("other-custodian", "custodian")
    share = staged.seal["shares"][0]
    document = base64.b64encode(b"{}").decode()
    fields = {"seal": staged.seal["seal"], "index": 1}
    tries = {
        "rehearsal/shares": {"index": 1, "document": document},
        "acknowledgements": other.sign("ShareAcknowledged", staged.round, **fields, commitment=share["commitment"]),
        "shares": {
            "record": other.sign("ShareReleased", staged.round, **fields, document=share["commitment"]),
            "document": document,
        },
    }
    for name, body in tries.items():
        assert other.post(f"{staged.path}/{name}", body).json()["code"] == "role_missing", name
    assert other.get(f"{staged.path}/envelopes").status_code == 403


def test_a_custodian_sees_its_own_envelope_only_and_the_organizer_all(stage):
    staged, _ = stage
    for index, custodian in enumerate(staged.live.custodians(), start=1):
        answer = custodian.get(f"{staged.path}/envelopes").json()
        assert [e["index"] for kind in ("real", "rehearsal") for e in answer[kind]["envelopes"]] == [index, index]
    answer = staged.live.organizer().get(f"{staged.path}/envelopes").json()
    assert [e["index"] for e in answer["real"]["envelopes"]] == [1, 2, 3]


def test_another_entrants_submission_does_not_exist(stage):
    staged, submission = stage
    bea = staged.live.actor("bea")
    base = f"/v1/submissions/{submission}"
    for answer in (
        bea.get(base),
        bea.post(f"{base}/complete"),
        bea.put(f"{base}/files/sha256:{'0' * 64}", b"x"),
        bea.get("/v1/submissions/nonsense"),
        staged.live.actor("other-organizer", "organizer").get(base),
    ):
        assert (answer.status_code, answer.json()["code"]) == (404, "submission_unknown"), answer.text
    assert staged.live.organizer().get(base).json()["entrant"] == "ada"


def test_an_entrant_cannot_register_or_submit_for_another(stage):
    staged, _ = stage
    ada, bea = staged.live.actor("ada"), staged.live.actor("bea")
    request = bea.sign("EntrantRegistered", staged.round, entrant="ada-2", ed25519=bea.public, conflicts=[])
    assert bea.post(f"{staged.path}/entrants", request).json()["code"] == "signature_invalid"
    body = live.submission(staged, bea, live.manifest(staged, "ada", live.model(staged, seed=1)))
    assert bea.post(f"{staged.path}/submissions", body).json()["code"] == "signature_invalid"
    # Signed by ada, sent by bea: ada's signature alone is not enough either.
    body = live.submission(staged, ada, live.manifest(staged, "ada", live.model(staged, seed=2)))
    assert bea.post(f"{staged.path}/submissions", body).json()["code"] == "signature_invalid"


def test_whose_stage_it_is_is_hidden_until_the_close(stage):
    from sqlalchemy import insert

    from acclimate.store import stages

    staged, submission = stage
    row = {"key": "sha256:" + "a" * 64, "round": staged.round, "kind": "check", "submission": submission}
    with staged.live.store.transaction() as tx:
        tx.execute(insert(stages), {**row, "state": "failed", "reason": "ada's model is broken"})
    for name, shown in (("ada", "ada"), ("bea", None), ("organizer", None)):
        actor = staged.live.actors[name]
        (found,) = actor.get(f"{staged.path}/stages").json()
        assert (found["entrant"], found["reason"]) == (shown, "ada's model is broken" if shown else ""), name
    assert staged.live.anyone().get(f"{staged.path}/stages").json()[0]["entrant"] is None


@pytest.mark.parametrize(
    ("state", "reason", "told"),
    [
        ("blocked", "its runner was lost: nothing at 10.1.2.3:6379", "it waits for the server's operator"),
        ("pending", "the machine gpu-7 can't make the folder /srv/work", "an earlier try came to no result"),
        ("pending", "no machine has 8 GPUs; the pool has gpu-7 (2 GPUs)", "no machine has 8 GPUs"),
        ("blocked", "the round is pinned to code sha256:ab", "the round is pinned to code sha256:ab"),
        ("failed", "the model holds NaN", "the model holds NaN"),
        ("cancelled", "the round was voided", "the round was voided"),
    ],
)
def test_machines_addresses_and_folders_are_not_told_to_others(stage, state, reason, told):
    from sqlalchemy import delete, insert

    from acclimate.store import stages

    staged, submission = stage
    row = {"key": "sha256:" + "a" * 64, "round": staged.round, "kind": "check", "submission": submission}
    with staged.live.store.transaction() as tx:
        tx.execute(delete(stages))
        tx.execute(insert(stages), {**row, "state": state, "reason": reason})
    (mine,) = staged.live.actors["ada"].get(f"{staged.path}/stages").json()
    assert mine["reason"].startswith(told)
    for path in (f"{staged.path}/stages", staged.path):
        answers = [mine["reason"], staged.live.anyone().get(path).text]
        assert not any(word in text for text in answers for word in ("gpu-7", "10.1.2.3", "/srv/work")), path


def test_what_became_of_a_try_is_told_to_others_as_it_was(stage):
    """Where its own words may name machines: nothing is said to be tried again that is not."""
    from sqlalchemy import delete, insert

    from acclimate.store import attempts, events, stages, timestamp

    staged, submission = stage
    key, attempt, served = "sha256:" + "a" * 64, "sha256:" + "b" * 64, staged.live
    own = {"round": staged.round, "kind": "check", "submission": submission, "attempt": attempt, "fence": 1, "epoch": 1}
    happened = (
        ("again", "hung", "no progress on gpu-7"),
        ("blocked", "job_failed", "/srv/work: KeyError"),
        ("released", "", "the disk was exchanged"),
        ("released", "given_up", "its tokenizer crashes the process"),
        ("cancelled", "cancelled", "10.1.2.3 was let go"),
    )
    with served.store.transaction() as tx:
        at = timestamp(tx)
        tx.execute(delete(stages))
        row = {"round": staged.round, "kind": "check", "submission": submission, "key": key, "attempt": attempt}
        tx.execute(insert(stages), {**row, "state": "cancelled", "fence": 1})
        tried = {**own, "stages": [key], "state": "cancelled", "claimed": at}
        tx.execute(insert(attempts), tried)
        for event, code, reason in happened:
            tx.execute(insert(events), {**own, "at": at, "event": event, "code": code, "reason": reason})

    def told(name):
        return [one["reason"] for one in served.actors[name].get(f"{staged.path}/stages/{key}").json()["history"]]

    # Whose stage it is is hidden from the organizer, too, until the close.
    assert told("organizer") == [""] * 5
    again, held, exchanged, given_up, cancelled = told("ada")
    assert again.startswith("an earlier try") and exchanged.startswith("an earlier try")
    assert held.startswith("it waits for the server's operator")
    assert given_up == "its tokenizer crashes the process"
    assert cancelled == "nobody waits for it any more"


# ---- accounts ------------------------------------------------------------------------------------------------------


def test_an_invitation_works_once_and_for_its_role(stage):
    served = stage[0].live
    code = accounts.invite(served.store, "analyst")
    for name, role, expected in (("a1", "custodian", 403), ("a1", "analyst", 201), ("a2", "analyst", 403)):
        someone = served.stranger(name, role)
        answer = someone.post("/v1/accounts", {**someone.registration(), "invitation": code})
        assert answer.status_code == expected, answer.text
    someone = served.stranger("a3", "organizer")
    answer = someone.post("/v1/accounts", someone.registration())
    assert (answer.status_code, answer.json()["code"]) == (403, "invitation_invalid")


def test_one_invitation_used_by_many_at_once_makes_one_account(stage):
    served = stage[0].live
    code = accounts.invite(served.store, "analyst")
    found = []

    def register(name):
        someone = served.stranger(name, "analyst")
        found.append(someone.post("/v1/accounts", {**someone.registration(), "invitation": code}).status_code)

    threads = [threading.Thread(target=register, args=(f"racer-{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [201] + [403] * 7


def test_a_token_is_stored_as_a_hash_only_and_registering_again_ends_it(stage):
    served = stage[0].live
    cleo = served.actor("cleo")
    assert cleo.token.startswith("acc_") and len(cleo.token) >= 47
    for file in served.settings.data.glob("acclimate.db*"):
        assert cleo.token.encode() not in file.read_bytes()
    assert cleo.post("/v1/rounds", {}).status_code == 403
    served.clock.forward(seconds=1)
    answer = served.anyone().post("/v1/accounts", json=cleo.registration())
    assert answer.status_code == 201 and answer.json()["token"] != cleo.token
    assert answer.headers["Cache-Control"] == "no-store"
    assert cleo.post("/v1/rounds", {}).json()["code"] == "token_invalid"


def test_a_name_a_key_and_a_proof_belong_together(stage):
    served = stage[0].live
    dora = served.actor("dora")
    thief = served.stranger("dora")
    assert thief.post("/v1/accounts", thief.registration()).json()["code"] == "name_taken"
    body = {**dora.registration(), "name": "dora-2"}
    assert thief.post("/v1/accounts", body).json()["code"] == "signature_invalid"
    twin = live.Actor("dora-2", "entrant", dora.key, thief.http)
    assert thief.post("/v1/accounts", twin.registration()).json()["code"] == "conflict"
    weak = {**thief.registration(), "name": "weak", "ed25519": "AQ" + "A" * 41 + "="}
    assert thief.post("/v1/accounts", weak).json()["code"] == "key_refused"


def refused_registration(served, body, *words):
    problem = served.anyone().post("/v1/accounts", json=body).json()
    assert problem.get("code") == "challenge_invalid" and problem["hint"], problem
    assert all(word in problem["detail"] for word in words), problem


def test_a_registration_that_somebody_saw_is_of_no_use(stage):
    """A proxy's log of bodies, or another server where the same key is registered, is no way to a token, nor to lock its owner out."""
    served = stage[0].live
    earl = served.actor("earl")
    about = served.anyone().get("/v1/server").json()
    served.clock.forward(seconds=1)
    seen = earl.registration()
    token = served.anyone().post("/v1/accounts", json=seen).json()["token"]
    earl.http.headers["Authorization"] = f"Bearer {token}"
    refused_registration(served, seen, "earl has registered", seen["challenge"][:27])
    # One that was signed, but never arrived, ends with the next that does.
    refused_registration(served, earl.registration(about), about["challenge"][:27])
    served.clock.forward(seconds=1)
    held = earl.registration()
    served.clock.forward(minutes=5, seconds=1)
    refused_registration(served, held, "301 s ago")
    # Nobody but the server names a time, and it names it for its own log.
    later = served.anyone().get("/v1/server").json()
    other = later["challenge"].replace("2027", "2028")
    refused_registration(served, earl.registration({**later, "challenge": other}), "not of this server")
    for odd in ("", "x", "2027-03-01", later["challenge"] + "x", later["challenge"][:-1], "é" * 40):
        refused_registration(served, earl.registration({**later, "challenge": odd}))
    elsewhere = earl.registration({**later, "log": "elsewhere.example.org/log+00000000+AAAA"})
    answer = served.anyone().post("/v1/accounts", json=elsewhere)
    assert answer.json()["code"] == "signature_invalid"
    # The first token still opens what it opened.
    assert served.connect(token).post("/v1/rounds", json={}).status_code == 403
    # Clients of before are told what they lack.
    old = {name: text for name, text in earl.registration().items() if name != "challenge"}
    refused_registration(served, old, "no challenge")
    assert "install the version" in served.anyone().post("/v1/accounts", json=old).json()["hint"]


def test_a_clock_that_was_ahead_once_locks_nobody_out(stage):
    served = stage[0].live
    served.clock.forward(days=400)
    faye = served.actor("faye")
    served.clock.forward(days=-400)
    about = served.anyone().get("/v1/server").json()
    assert served.anyone().post("/v1/accounts", json=faye.registration(about)).status_code == 201
    refused_registration(served, faye.registration(about))


@pytest.mark.slow
def test_where_entrants_are_invited_a_stranger_is_none(tmp_path):
    with live.serve(tmp_path, entrants="invited") as served:
        gil = served.stranger("gil")
        answer = gil.post("/v1/accounts", gil.registration())
        assert (answer.status_code, answer.json()["code"]) == (403, "invitation_invalid")
        assert "acclimate invite --role entrant" in answer.json()["hint"]
        code = accounts.invite(served.store, "entrant")
        answer = gil.post("/v1/accounts", {**gil.registration(), "invitation": code})
        assert answer.status_code == 201, answer.text
        # It was for one, who needs none for a new token.
        served.clock.forward(seconds=1)
        assert gil.post("/v1/accounts", gil.registration()).status_code == 201
        hal = served.stranger("hal")
        answer = hal.post("/v1/accounts", {**hal.registration(), "invitation": code})
        assert answer.json()["code"] == "invitation_invalid"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("Team A", "team-a"), ("", ""), ("a" * 64, "a" * 63), ("-a", "a"), ("ä", "a"), ("a\u202eb", ""), ("=1+1", "1-1")],
)
def test_account_names_are_plain_ids(stage, name, hint):
    someone = stage[0].live.stranger(name)
    problem = someone.post("/v1/accounts", someone.registration()).json()
    assert problem["code"] == "name_invalid", problem
    assert hint in problem["hint"]


# ---- what the API may hold -----------------------------------------------------------------------------------------


def test_the_api_imports_no_heavy_library():
    code = (
        "import sys; import acclimate.api.server, acclimate.api.app;"
        "print([m for m in ('ray', 'torch', 'transformers', 'mlflow', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_description_is_complete(stage):
    described = stage[0].live.anyone().get("/v1/openapi.json").json()
    found = {(m.upper(), p) for p, operations in described["paths"].items() for m in operations}
    assert found == {(m, p.replace(":path", "")) for m, p in access.ACCESS} - {("GET", "/v1/openapi.json")}
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            where = (method, path)
            assert operation["summary"] and "Who: " in operation["description"], where
            assert ("4XX" in operation["responses"]) and "security" in operation, where
            good = [content for code, answer in operation["responses"].items() if code in ("200", "201")
                    for content in answer["content"].values()]  # fmt: skip
            assert any("example" in content for content in good), where
