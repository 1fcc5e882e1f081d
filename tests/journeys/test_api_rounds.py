"""Rounds over real HTTP: the happy way through every route, what a definition and a seal are refused for, and deadlines to the microsecond."""

import base64
import io
import zipfile

import live
import pyarrow as pa
import pytest
from by_hand import (
    ada,
    evaluate_all,
    prepare_all,
    publish_checked,
    refused,
    register_baseline,
    release_share,
    served,
    staged,
)

from acclimate import log
from acclimate.service import release, submit
from acclimate_competitions import digests, rounds, tables
from acclimate_competitions.phases import Phase
from acclimate_competitions.records import format_time, parse, parse_time

__all__ = ["ada", "served", "staged"]


# ---- the whole way -------------------------------------------------------------------------------------------------


def test_a_round_from_draft_to_published(served, tmp_path):
    staged = live.create(served, tmp_path)
    organizer, anyone = served.organizer(), served.anyone()
    assert anyone.get(staged.path).json()["next"].endswith(f"acclimate round seal {staged.round} FOLDER --keys DIR")
    live.seal(staged)
    status = anyone.get(staged.path).json()
    assert status["phase"] == "sealed"
    assert len(status["waiting_for"]) == 2 and "custodian-a" in status["waiting_for"][0]
    live.rehearse(staged)
    status = anyone.get(staged.path).json()
    assert (status["waiting_for"], status["next_at"]) == ([], staged.fields["opens"])
    assert served.tick() == []
    served.clock.set(staged.fields["opens"])
    assert served.tick() == ["RoundOpened"]
    entrants = [live.enter(staged, served.actor(name)) for name in ("ada", "bea")]
    baseline = register_baseline(staged)
    for seed, entrant in enumerate((*entrants, baseline), start=1):
        live.submit_model(staged, entrant, seed=seed)
    served.clock.set(staged.fields["closes"])
    assert served.tick() == ["RoundClosed"]
    prepare_all(staged)
    assert served.tick() == ["PreparationFinished"]
    documents = staged.share_documents(staged.seal, staged.envelopes)
    for index in (1, 3):
        answer = release_share(staged, index, documents[index])
        assert answer.status_code == 200, answer.text
    assert served.tick() == ["HoldoutOpened"]
    with served.store.snapshot() as tx:
        assert set(release.holdout_files(tx, staged.round)) == {"tint.parquet", "size.parquet"}
    refused(anyone.get(f"{staged.path}/ranking"), "phase_wrong", 409)
    evaluate_all(staged)
    assert served.tick() == ["EvaluationFinished"]
    hint = refused(anyone.get(f"{staged.path}/ranking"), "phase_wrong")["hint"]
    assert hint.startswith("its organizer publishes it next; wait for it: ")
    document = organizer.get(f"{staged.path}/ranking").json()
    assert [row["entrant"] for row in document["baselines"]] == ["majority", "untrained"]
    assert {row["entrant"] for row in document["ranking"]} == {"ada", "bea"}
    publish_checked(staged, document)
    answer = anyone.get(f"{staged.path}/ranking")
    assert answer.content == digests.canonical(document)
    status = anyone.get(staged.path).json()
    assert [item["phase"] for item in status["phases"]] == [str(phase) for phase in Phase if phase != "voided"]
    assert (status["entries"], status["ranking"]) == (3, digests.of_bytes(answer.content))
    report = anyone.get(f"{staged.path}/report")
    assert report.status_code == 200 and "ada" in report.text
    # From the scores by example, as `acclimate report` has it.
    for title in ("Which differences are significant", "Ranks if other examples had been drawn"):
        assert f">{title}</h3>" in report.text
    bundle = anyone.get(f"{staged.path}/bundle")
    with zipfile.ZipFile(io.BytesIO(bundle.content)) as archive:
        assert archive.read("ranking.json") == answer.content
    assert anyone.get(f"{staged.path}/bundle").content == bundle.content
    assert all(path.is_file() for path in (served.settings.reports / staged.round).iterdir())
    check_the_log(staged)


def check_the_log(staged):
    """Records, entries, receipts and checkpoints tell the same story, and folding it gives the round."""
    anyone = staged.live.anyone()
    server = anyone.get("/v1/server").json()
    verifier = log.parse_vkey(server["log"])
    listed = anyone.get(f"{staged.path}/records").json()
    lines = anyone.get("/v1/log/entries", params={"start": 0, "end": 10_000}).content.splitlines()
    assert [digests.canonical(item["record"]) for item in listed] == [lines[item["index"]] for item in listed]
    numbered = [(item["index"], parse(lines[item["index"]])) for item in listed]
    competition = staged.live.store.competition(staged.fields["definition"])
    assert rounds.fold(numbered, competition).phase == "published"
    checkpoint = log.open_checkpoint(anyone.get("/v1/log/checkpoint").text, verifier).checkpoint
    assert checkpoint.root == digests.root_of_hashes([digests.leaf_hash(line) for line in lines])
    for index in (0, len(lines) - 1):
        receipt = log.Receipt.parse(anyone.get(f"/v1/log/proof/{index}").content)
        assert receipt.verify(verifier).encode() == lines[index]
    proof = anyone.get("/v1/log/consistency", params={"first": 2, "second": len(lines)}).json()["proof"]
    log.verify_consistency(
        [base64.b64decode(node) for node in proof],
        first=2,
        first_root=digests.root_of_hashes([digests.leaf_hash(line) for line in lines[:2]]),
        second=len(lines),
        second_root=checkpoint.root,
    )


# ---- defining, sealing, opening ------------------------------------------------------------------------------------


def test_a_round_is_begun_once_and_found_by_a_prefix(served, tmp_path):
    staged, request = live.defined(served, tmp_path)
    organizer, anyone = served.organizer(), served.anyone()
    first = organizer.post("/v1/rounds", request)
    again = organizer.post("/v1/rounds", request)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    name = first.json()["round"]
    assert [row["round"] for row in anyone.get("/v1/rounds").json()] == [name]
    assert anyone.get(f"/v1/rounds/{name[:14]}").json()["round"] == name
    for unknown in ("nowhere", name + "0", "%00", "m%25", "_"):
        refused(anyone.get(f"/v1/rounds/{unknown}"), "round_unknown", 404)
    other = organizer.sign(
        "RoundDefined", "", **{**staged.fields, "grace": 60, "closes_latest": staged.fields["closes"]}
    )
    refused(organizer.post("/v1/rounds", other), "round_exists", 409)
    _, second = live.defined(served, tmp_path, name="tiny-2")
    assert organizer.post("/v1/rounds", second).status_code == 201
    problem = refused(anyone.get("/v1/rounds/marbles"), "round_unknown", 404)
    assert name in problem["detail"] and second["round"] in problem["detail"]
    raw = (staged.folder / "competition.toml").read_bytes()
    assert anyone.get(f"/v1/rounds/{name}/definition").content == raw
    assert (
        anyone.get(f"/v1/rounds/{name}/files/tokenizer.json").content == (staged.folder / "tokenizer.json").read_bytes()
    )
    for file in ("splits/tint/holdout.parquet", "../competition.toml", "nothing"):
        refused(anyone.get(f"/v1/rounds/{name}/files/{file}"), "not_found", 404)


def test_what_a_round_definition_is_refused_for(served, tmp_path):
    staged, _ = live.defined(served, tmp_path)
    organizer = served.organizer()
    ghost = "sha256:" + "e" * 64
    files = staged.fields["files"]
    custodian = staged.fields["custodians"][0]

    def post(**changes):
        return organizer.post("/v1/rounds", organizer.sign("RoundDefined", "", **{**staged.fields, **changes}))

    holdout = staged.upload(staged.folder / "splits/tint/holdout.parquet")
    for changes, code, word in (
        ({"definition": ghost}, "blob_unknown", "not uploaded"),
        ({"files": {**files, "tokenizer.json": ghost}}, "record_invalid", "tokenizer.json"),
        ({"files": {k: v for k, v in files.items() if "size" not in k}}, "record_invalid", "splits/size"),
        ({"files": {**files, "splits/tint/holdout.parquet": holdout}}, "record_invalid", "holdout"),
        ({"log": "elsewhere+00000000+AQ"}, "guard_failed", "log"),
        ({"code": ghost}, "guard_failed", "code"),
        ({"evaluators": [organizer.public]}, "guard_failed", "evaluators"),
        ({"quorum": 1}, "guard_failed", "quorum"),
        ({"recipe": ghost}, "guard_failed", "recipe"),
        ({"k": 3}, "guard_failed", "threshold"),
        ({"closes": staged.fields["opens"]}, "guard_failed", "dates"),
        (
            {"custodians": [{**custodian, "age": "age1nonsense"}, *staged.fields["custodians"][1:]]},
            "key_refused",
            "age",
        ),
        (
            {"opens": "2020-01-01T00:00:00.000000Z", "closes": "2020-01-02T00:00:00.000000Z"},
            "guard_failed",
            "would close",
        ),
    ):
        problem = refused(post(**changes), code)
        assert word in problem["detail"], problem
    with served.store.snapshot() as tx:
        assert tx.size() == 0


def test_a_definition_that_nobody_can_follow_is_refused_with_its_line(served, tmp_path):
    staged, _ = live.defined(served, tmp_path)
    toml = staged.folder / "competition.toml"
    toml.write_text(toml.read_text("utf-8").replace('"manual"', '"never"'), "utf-8")
    digest = staged.upload(toml)
    organizer = served.organizer()
    request = organizer.sign("RoundDefined", "", **{**staged.fields, "definition": digest})
    problem = refused(organizer.post("/v1/rounds", request), "definition_invalid", 422)
    assert any("line" in line and "publish" in line for line in problem["problems"])


def test_a_prompt_that_fits_no_rows_whatever_is_refused(served, tmp_path):
    """By a client that does not look, as ours does: the round would be open before an entrant sees it."""
    staged, _ = live.defined(served, tmp_path)
    toml = staged.folder / "competition.toml"
    text = toml.read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("prompt")]
    at = next(place for place, line in enumerate(lines) if line.startswith("choices"))
    lines.insert(at, """prompt = '{% include "x" %}'""")
    toml.write_text("\n".join(lines), "utf-8")
    fields = {**staged.fields, "definition": staged.upload(toml)}
    organizer = served.organizer()
    problem = refused(organizer.post("/v1/rounds", organizer.sign("RoundDefined", "", **fields)), "definition_invalid")
    assert "takes in another template" in problem["detail"]


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ("{{ nope }}", "'nope' is undefined; the columns that it may name here: example, input"),
        ("{{ target }}", "'target' is undefined"),
        ("{% if nope is defined %}{{ nope }}{% endif %}{{ other | default(input) }}{{ range(3) | list }}", ""),
    ],
)
def test_a_prompt_that_names_a_column_which_a_split_lacks_is_refused(served, tmp_path, prompt, why):
    staged, _ = live.defined(served, tmp_path)
    organizer = served.organizer()
    toml = staged.folder / "competition.toml"
    lines = [line for line in toml.read_text("utf-8").splitlines() if not line.startswith("prompt")]
    at = next(place for place, line in enumerate(lines) if line.startswith("choices"))
    lines.insert(at, f"prompt = '{prompt}'")
    toml.write_text("\n".join(lines), "utf-8")
    fields = {**staged.fields, "definition": staged.upload(toml)}
    answer = organizer.post("/v1/rounds", organizer.sign("RoundDefined", "", **fields))
    # A definition that names other columns is another: its recipe's digest is the same, and so it is begun.
    if why:
        assert why in refused(answer, "definition_invalid", 422)["detail"]
    else:
        assert answer.status_code == 201, answer.text


def test_public_splits_that_nobody_could_use_are_refused(served, tmp_path):
    staged, _ = live.defined(served, tmp_path)
    organizer = served.organizer()
    path = staged.folder / "splits/tint/validation.parquet"
    table = tables.read(path)

    def post():
        files = {**staged.fields["files"], "splits/tint/validation.parquet": staged.upload(path)}
        return organizer.post("/v1/rounds", organizer.sign("RoundDefined", "", **{**staged.fields, "files": files}))

    path.write_bytes(b"no table")
    problem = refused(post(), "splits_invalid", 422)
    assert problem["problems"] == ["tint/validation.parquet: not a readable Parquet file"]
    tables.write(table.drop_columns(["target"]), path)
    assert "column 'target' is missing" in refused(post(), "splits_invalid", 422)["detail"]
    more = {f"c{i}": ["x"] * table.num_rows for i in range(1000)}
    tables.write(pa.table({**table.to_pydict(), **dict(list(more.items())[:100])}), path)
    told = refused(post(), "splits_invalid", 422)["problems"]
    assert len(told) == 51 and told[-1] == "and 50 more"
    tables.write(pa.table(more | table.to_pydict()), path)
    assert "columns, at most 1000 are allowed" in refused(post(), "splits_invalid", 422)["detail"]


def test_a_seal_must_be_what_the_bytes_say(served, tmp_path):
    staged = live.create(served, tmp_path)
    organizer = served.organizer()
    fields, envelopes = live.make_seal(staged)

    def post(given=envelopes, **changes):
        record = organizer.sign("HoldoutSealed", staged.round, **{**fields, **changes})
        return organizer.post(f"{staged.path}/seal", {"record": record, "envelopes": given})

    refused(post(ciphertext="sha256:" + "0" * 64), "blob_unknown", 404)
    refused(post(size=fields["size"] + 1), "seal_mismatch", 422)
    refused(post(block_root="sha256:" + "0" * 64), "seal_mismatch")
    refused(post(envelopes[:2]), "seal_mismatch")
    refused(post([envelopes[1], envelopes[0], envelopes[2]]), "seal_mismatch")
    refused(post([{**envelopes[0], "main": envelopes[1]["main"]}, *envelopes[1:]]), "seal_mismatch")
    refused(post(rows=0), "seal_mismatch")
    staged.seal, staged.envelopes = fields, envelopes
    refused(served.custodians()[0].post(f"{staged.path}/acknowledgements", live.acknowledgement(
        staged, served.custodians()[0])), "phase_wrong", 409)  # fmt: skip
    first = post()
    assert first.status_code == 200 and post().json() == first.json()
    other, other_envelopes = live.make_seal(staged)
    problem = refused(post(other_envelopes, **other), "conflict", 409)
    assert fields["seal"] in problem["detail"]


def test_a_round_opens_only_after_rehearsal_and_acknowledgements(served, tmp_path):
    staged = live.seal(live.create(served, tmp_path))
    served.clock.set(staged.fields["opens"], minutes=1)
    custodians = served.custodians()
    for custodian in custodians:
        assert served.tick() == []
        assert custodian.post(f"{staged.path}/acknowledgements", live.acknowledgement(staged, custodian)).is_success
    assert served.tick() == []
    body = {"index": 1, "document": base64.b64encode(b"{}").decode()}
    refused(custodians[0].post(f"{staged.path}/rehearsal/shares", body), "rehearsal_missing", 409)
    fields, envelopes = live.make_seal(staged, dummy=True)
    assert served.organizer().post(f"{staged.path}/rehearsal", {"fields": fields, "envelopes": envelopes}).is_success
    refused(custodians[0].post(f"{staged.path}/rehearsal/shares", body), "share_false", 422)
    documents = staged.share_documents(fields, envelopes)

    def share(custodian, index):
        given = {"index": index, "document": base64.b64encode(documents[index]).decode()}
        return custodian.post(f"{staged.path}/rehearsal/shares", given)

    refused(share(custodians[0], 2), "role_missing", 403)
    assert share(custodians[1], 2).json() == {
        "seal": fields["seal"], "received": 1, "needed": 2, "succeeded": False}  # fmt: skip
    assert served.tick() == []
    assert share(custodians[1], 2).json()["received"] == 1
    assert share(custodians[2], 3).json()["succeeded"] is True
    assert served.tick() == ["RoundOpened"]
    assert served.tick() == []
    problem = refused(
        served.organizer().post(f"{staged.path}/rehearsal", {"fields": fields, "envelopes": envelopes}), "phase_wrong"
    )
    assert "open" in problem["detail"]


def test_a_dummy_that_does_not_open_is_no_rehearsal(served, tmp_path):
    staged = live.seal(live.create(served, tmp_path))
    fields, envelopes = live.make_seal(staged, dummy=True)
    wrong = {**fields, "row_root": "sha256:" + "0" * 64}
    assert served.organizer().post(f"{staged.path}/rehearsal", {"fields": wrong, "envelopes": envelopes}).is_success
    documents = staged.share_documents(fields, envelopes)
    answers = []
    for index, custodian in enumerate(served.custodians(), start=1):
        body = {"index": index, "document": base64.b64encode(documents[index]).decode()}
        answers.append(custodian.post(f"{staged.path}/rehearsal/shares", body))
    assert answers[0].status_code == 200
    refused(answers[1], "seal_mismatch", 422)
    assert "rehearsal" in " ".join(served.anyone().get(staged.path).json()["waiting_for"])
    # A new dummy puts it right.
    live.rehearse(staged)
    assert served.anyone().get(staged.path).json()["rehearsal"]["succeeded"] is not None


def test_a_round_that_misses_its_own_closing_time_never_opens(served, tmp_path):
    staged = live.seal(live.create(served, tmp_path))
    served.clock.set(staged.fields["closes"])
    live.rehearse(staged)
    assert served.tick() == []
    assert "voids" in served.anyone().get(staged.path).json()["next"]
    voided = served.organizer().sign("RoundVoided", staged.round, reason="nobody acknowledged in time")
    assert served.organizer().post(f"{staged.path}/void", voided).status_code == 200
    assert served.phase(staged.round) == "voided"


# ---- deadlines -----------------------------------------------------------------------------------------------------


def test_the_deadline_is_half_open_on_every_entry_point(staged, ada):
    served = staged.live
    live.commit(staged, ada, seed=1)
    bea, organizer = served.actor("bea"), served.organizer()
    with served.store.snapshot() as tx:
        commitment = tx.round(staged.round).outstanding[0]
    late = live.submission(staged, ada, live.manifest(staged, "ada", live.model(staged, seed=2)))
    entering = {"entrant": "bea", "ed25519": bea.public, "conflicts": []}
    requests = {
        "entrants": (bea, bea.sign("EntrantRegistered", staged.round, **entering)),
        "submissions": (ada, late),
        "withdrawals": (ada, ada.sign("SubmissionWithdrawn", staged.round, entrant="ada", commitment=commitment)),
        # The last one: it moves the deadline.
        "extension": (
            organizer,
            organizer.sign("ClosingExtended", staged.round, closes=staged.fields["closes_latest"]),
        ),
    }
    for microseconds in (1, 0):
        served.clock.set(staged.fields["closes"], microseconds=microseconds)
        for what, (actor, body) in requests.items():
            problem = refused(actor.post(f"{staged.path}/{what}", body), "round_closed", 409)
            assert staged.fields["closes"] in problem["detail"]
            assert format_time(served.clock.now) in problem["detail"]
    # Nothing was logged since, so the clock may go back: a microsecond earlier all of it is taken.
    served.clock.set(staged.fields["closes"], microseconds=-1)
    for what, (actor, body) in requests.items():
        answer = actor.post(f"{staged.path}/{what}", body)
        assert answer.is_success, (what, answer.text)


def test_a_round_opens_and_closes_to_the_microsecond(served, tmp_path):
    staged = live.rehearse(live.seal(live.create(served, tmp_path)))
    for moment, transitions in (("opens", ["RoundOpened"]), ("closes", ["RoundClosed", "PreparationFinished"])):
        served.clock.set(staged.fields[moment], microseconds=-1)
        assert served.tick() == []
        served.clock.set(staged.fields[moment])
        assert served.tick() == transitions


@pytest.mark.parametrize(("microseconds", "taken"), [(-1, True), (0, False)])
def test_committed_bytes_may_come_within_the_grace_and_no_later(staged, ada, microseconds, taken):
    served = staged.live
    made, files = live.commit(staged, ada, seed=1)
    ghost, _ = live.commit(staged, ada, seed=2)
    served.clock.set(staged.fields["closes"])
    assert served.tick() == []
    status = served.anyone().get(staged.path).json()
    until = format_time(parse_time(staged.fields["closes"]).replace(second=0, minute=1))
    assert status["next_at"] == until
    assert status["next"] == f"no more submissions; waiting for the checks of 2 committed ones until {until}"
    served.clock.set(staged.fields["closes"], seconds=60, microseconds=microseconds)
    path = files["config.json"]
    answer = ada.put(f"/v1/submissions/{made['submission']}/files/{digests.of_file(path)}", path.read_bytes())
    if not taken:
        refused(answer, "round_closed", 409)
    else:
        live.send_files(ada, made, files)
        assert ada.post(f"/v1/submissions/{made['submission']}/complete").json()["state"] == "checking"
        assert submit.accept(served.store, made["submission"])["state"] == "accepted"
    served.clock.set(staged.fields["closes"], seconds=60)
    assert served.tick()[0] == "RoundClosed"
    assert ada.get(f"/v1/submissions/{made['submission']}").json()["state"] == ("accepted" if taken else "forfeited")
    assert ada.get(f"/v1/submissions/{ghost['submission']}").json()["state"] == "forfeited"
    closed = next(r["record"] for r in served.anyone().get(f"{staged.path}/records").json()
                  if r["record"]["type"] == "RoundClosed")  # fmt: skip
    assert (closed["count"], closed["forfeited"]["count"]) == ((1, 1) if taken else (0, 2))


def test_a_check_that_ends_after_the_close_forfeits_and_costs_nothing(staged, ada):
    served = staged.live
    made, files = live.commit(staged, ada, seed=1)
    live.send_files(ada, made, files)
    ada.post(f"/v1/submissions/{made['submission']}/complete")
    served.clock.set(staged.fields["closes"], seconds=61)
    # The dispatcher's answer comes before the tick that closes.
    assert submit.accept(served.store, made["submission"])["state"] == "forfeited"
    found = ada.get(f"/v1/submissions/{made['submission']}").json()
    assert "after the close" in found["reason"]
    assert found["quota"]["used"] == 0


def test_the_close_moves_later_only_and_not_beyond_the_latest(staged):
    served = staged.live

    def extend(closes):
        return served.organizer().post(
            f"{staged.path}/extension", served.organizer().sign("ClosingExtended", staged.round, closes=closes)
        )

    refused(extend(staged.fields["closes"]), "guard_failed", 409)
    refused(extend(staged.fields["release_by"]), "guard_failed")
    first = extend(staged.fields["closes_latest"])
    assert first.status_code == 200 and extend(staged.fields["closes_latest"]).json() == first.json()
    served.clock.set(staged.fields["closes"])
    assert served.tick() == []
    assert served.anyone().get(staged.path).json()["closes"] == staged.fields["closes_latest"]
