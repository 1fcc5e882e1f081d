"""A live round for tests, driven by hand over the routes: what its people send, and what the dispatcher and the clock would do."""

import base64
import random

import live
import pyarrow as pa
import pytest
import tiny
from sqlalchemy import insert, select

from acclimate import custody
from acclimate.api import problems
from acclimate.service import identity, publish, release
from acclimate.store import results, stages, submissions
from acclimate_competitions import digests, metrics, tables
from acclimate_competitions.records import format_time, sign


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def served(request, tmp_path):
    given = {"database": request.getfixturevalue("postgresql_url")} if request.param == "postgresql" else {}
    with live.serve(tmp_path, **given) as running:
        yield running


@pytest.fixture
def staged(served, tmp_path):
    """An open round, nobody in it yet."""
    return live.open_round(served, tmp_path)


@pytest.fixture
def ada(staged):
    return live.enter(staged, staged.live.actor("ada"))


def refused(answer, code, status=None):
    """The problem document of a refusal."""
    problem = answer.json()
    assert problem.get("code") == code, (answer.status_code, answer.text)
    assert answer.headers["Content-Type"] == problems.MEDIA_TYPE
    assert problem["request_id"] == answer.headers["X-Request-Id"]
    assert problem["status"] == answer.status_code
    if status is not None:
        assert answer.status_code == status
    return problem


def register_baseline(staged):
    """The organizer registers `untrained`, whose submissions a key of its own signs and the organizer's account sends."""
    organizer = staged.live.organizer()
    own = live.Actor("untrained", "organizer", live.Ed25519PrivateKey.generate(), organizer.http)
    request = organizer.sign(
        "EntrantRegistered", staged.round, entrant="untrained", ed25519=own.public, conflicts=["baseline"]
    )
    answer = organizer.post(f"{staged.path}/entrants", request)
    assert answer.status_code == 200, answer.text
    return own


def prepare_all(staged):
    """What the dispatcher does: one signed record for every preparation of the plan; one of them failed."""
    store = staged.live.store
    key = identity.load(staged.live.settings, staged.live.store).evaluator_key
    with store.transaction() as tx:
        state = tx.round(staged.round)
        for number, (submission, task, seed) in enumerate(state.preparation_plan()):
            fields = {
                "submission": submission,
                "task": task,
                "seed": seed,
                "recipe": state.defined["recipe"],
                "base": digests.of_json([submission]),
                "code": state.defined["code"],
                "hardware": "cpu",
            }
            done = {"prepared": digests.of_json([number]), "candidates": [], "selected": {"lr": 0.002, "epoch": 1}}
            failed = {"failed": {"reason": "out of memory", "log": digests.of_bytes(b"")}}
            tx.append(sign("ModelPrepared", staged.round, {**fields, **(done if number else failed)}, key=key))


def release_share(staged, index, document):
    custodian = staged.live.custodians()[index - 1]
    digest = custody.document_digest(document)
    record = custodian.sign("ShareReleased", staged.round, seal=staged.seal["seal"], index=index, document=digest)
    body = {"record": record, "document": base64.b64encode(document).decode()}
    return custodian.post(f"{staged.path}/shares", body)


def evaluate_all(staged):
    """What the dispatcher does: predictions, scores, results and signed records."""
    store, draw = staged.live.store, random.Random(3)
    key = identity.load(staged.live.settings, staged.live.store).evaluator_key
    with store.transaction() as tx:
        state = tx.round(staged.round)
        holdout = {
            task.name: tables.read(store.blobs.path(release.holdout_files(tx, staged.round)[f"{task.name}.parquet"]))
            for task in state.competition.tasks
        }
        rows = {row.accepted_index: row for row in tx.execute(select(submissions)).all()}
        models = state.model_digests()
        for submission, task, seed, protocol in state.evaluation_plan():
            row = rows[submission]
            table = predictions(row.entrant, task, seed, protocol, holdout[task], draw)
            scores = metrics.score_predictions(table, holdout[task], state.competition.task(task), cluster="cluster")
            found = {"predictions": keep(staged, table), "scores": keep(staged, scores)}
            stage = digests.of_json([submission, task, seed, protocol])
            stage_row = {"key": stage, "round": state.id, "kind": "evaluate", "submission": row.id, "task": task}
            tx.execute(insert(stages), {**stage_row, "seed": seed, "protocol": protocol, "state": "committed"})
            tx.execute(insert(results), {"stage": stage, "document": found, "at": format_time(tx.now())})
            fields = {
                "submission": submission,
                "task": task,
                "seed": seed,
                "protocol": protocol,
                "prepared": models[submission, task, seed, protocol],
                "predictions": found["predictions"],
                "count": table.num_rows,
            }
            tx.append(sign("ModelEvaluated", state.id, fields, key=key))


def predictions(entrant, task, seed, protocol, holdout, draw):
    count = holdout.num_rows
    lists = [[-draw.random() for _ in tiny.TASKS[task]] for _ in range(count)]
    columns = {"entrant": [entrant] * count, "protocol": [protocol] * count, "task": [task] * count}
    columns |= {"seed": pa.array([seed] * count, pa.int64()), "example": holdout.column("example")}
    columns |= {"loglikelihoods": lists, "text": pa.array([None] * count, pa.string())}
    return pa.table(columns).cast(tables.PREDICTIONS)


def keep(staged, table):
    path = staged.folder / "table.parquet"
    tables.write(table, path)
    return staged.live.store.blobs.put(path)


def publish_checked(staged, document):
    """Publish; a changed ranking, a changed digest and another's signature are refused before."""
    organizer = staged.live.organizer()

    def body(sent, **changes):
        fields = {"ranking": digests.of_json(sent), "policy": staged.fields["policy"], "reason": "", **changes}
        return {"record": organizer.sign("RankingPublished", staged.round, **fields), "ranking": sent}

    rows = document["ranking"]
    swapped = {**document, "ranking": [{**rows[0], "score": 0.99}, *rows[1:]]}
    refused(organizer.post(f"{staged.path}/ranking", body(swapped)), "guard_failed", 409)
    other = body(document, ranking=digests.of_json(swapped))
    refused(organizer.post(f"{staged.path}/ranking", other), "guard_failed")
    policy = body(document, policy="sha256:" + "0" * 64)
    refused(organizer.post(f"{staged.path}/ranking", policy), "guard_failed")
    assert publish.ranking(staged.live.store, staged.round).document() == document
    # Computed once for a last log entry: further requests get the very same.
    assert publish.ranking(staged.live.store, staged.round) is publish.ranking(staged.live.store, staged.round)
    first = organizer.post(f"{staged.path}/ranking", body(document))
    assert first.status_code == 200, first.text
    assert organizer.post(f"{staged.path}/ranking", body(document)).json() == first.json()
    refused(organizer.post(f"{staged.path}/ranking", body(document, reason="again")), "conflict")


def prepared_round(staged, ada):
    live.submit_model(staged, ada, seed=1)
    staged.live.clock.set(staged.fields["closes"])
    staged.live.tick()
    prepare_all(staged)
    staged.live.tick()
    assert staged.live.phase(staged.round) == "prepared"
    return staged.share_documents(staged.seal, staged.envelopes)
