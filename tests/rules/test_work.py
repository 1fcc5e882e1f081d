"""From a round to work and back: what is left to do, and what the evaluator says of what was done."""

import contextlib
import json
import math
import time
from dataclasses import replace

import pytest
import stories as told
from sqlalchemy import insert

from acclimate import assignments, commits, config, round_jobs
from acclimate.store import Store, accounts, rounds, submissions
from acclimate_competitions import digests, records
from acclimate_competitions.phases import Phase
from acclimate_runners import jobs
from acclimate_runners.jobs import ModelFiles, Outcome
from acclimate_runners.runner import Status

FILES = ("config.json", "model.safetensors", "tokenizer.json")


def stored(folder, story):
    """A store whose rows are those of the story's entries."""
    store = Store.open(config.load(folder, environ={}))
    manifest = {"files": [{"name": n, "size": 1, "sha256": told.digest(n)} for n in FILES], "parameters": 1}
    manifest |= {"kind": "hf-causal-lm", "base": None}
    same = {"owner": "all", "nonce": "", "manifest": manifest, "acceptance": {}, "state": "accepted", "created": ""}
    with store.transaction() as tx:
        tx.execute(insert(accounts), {"id": "all", "role": "entrant", "ed25519": "", "token_hash": "", "created": ""})
        row = {"competition": "marbles", "name": "x", "owner": "all", "definition": "", "created": ""}
        tx.execute(insert(rounds), {"id": story.state.id, **row})
        for entry in story.state.entries:
            own = {"entrant": entry.entrant, "commitment": entry.commitment, "committed_index": entry.submission}
            tx.execute(insert(submissions), {"id": entry.entrant, "round": story.state.id, **own, **same})
    return store


def outstanding(store, state):
    inputs = {task.name: told.digest(task.name) for task in state.competition.tasks}
    with contextlib.closing(store), store.snapshot() as tx:
        return assignments.outstanding(tx, state, holdout_inputs=inputs)


def with_files(state):
    """The same state, whose definition names the public files."""
    tasks, splits = [task.name for task in state.competition.tasks], ("preparation", "validation")
    names = [*(f"splits/{task}/{split}.parquet" for task in tasks for split in splits), "tokenizer.json"]
    fields = {**state.defined.fields, "files": {name: told.digest(name) for name in names}}
    return replace(state, defined=replace(state.defined, fields=fields))


def opened_round(entrants):
    story = told.until(Phase.OPEN)
    for number in range(entrants):
        story.register(f"e{number}").submit(f"e{number}", 1)
    return story.close().prepare_all().finish("PreparationFinished").release(1).release(2).open_holdout()


def test_what_is_left_to_evaluate_is_the_plan_without_what_the_log_has(tmp_path):
    story = opened_round(3)
    first, second, *_ = story.state.evaluation_plan()
    story.evaluate(first)
    for key in story.state.evaluation_plan():
        if key[0] == story.state.entries[1].submission:
            story.evaluate(key)
    found = outstanding(stored(tmp_path, story), story.state)
    left = [key for key in story.state.evaluation_plan() if key not in story.state.evaluated]
    left.sort(key=lambda key: key[0])  # an assignment is of one entry; the plan has all direct evaluations first
    assert [(a.entry, s.task, s.seed, s.protocol) for a in found for s in a.stages] == left and second in left
    assert [a.entrant for a in found] == ["e0", "e2"]
    models = story.state.model_digests()
    assert found[1].job.prepared == {
        f"{task}/{seed}": models[submission, task, seed, protocol]
        for submission, task, seed, protocol in left
        if submission == found[1].entry and protocol == "prepared"
    }


def test_entries_of_the_same_files_have_stages_of_their_own(tmp_path):
    """Equal keys would be one row: the second entry would wait for ever."""
    story = told.until(Phase.OPEN)
    for number in range(3):
        story.register(f"e{number}").submit(f"e{number}", 1)
    story.close()
    found = outstanding(stored(tmp_path / "prepare", story), with_files(story.state))
    story.prepare_all().finish("PreparationFinished").release(1).release(2).open_holdout()
    found += outstanding(stored(tmp_path / "evaluate", story), story.state)
    assert len({a.job.model.digest for a in found}) == 1
    keys = [stage.key for assignment in found for stage in assignment.stages]
    assert len(set(keys)) == len(keys) and len({a.attempt for a in found}) == len(found) == 6


def test_an_entrys_jobs_are_the_same_whoever_else_entered_and_in_whatever_order(tmp_path):
    def planned(*entrants):
        story = told.until(Phase.OPEN)
        for name in entrants:
            story.register(name).submit(name, 1)
        story.close()
        found = outstanding(stored(tmp_path / "prepare" / "-".join(entrants), story), with_files(story.state))
        story.prepare_all().finish("PreparationFinished").release(1).release(2).open_holdout()
        found += outstanding(stored(tmp_path / "evaluate" / "-".join(entrants), story), story.state)
        assert len(found) == 2 * len(entrants)
        # Of the prepared models the story makes digests up, by the place of the submission.
        return {(a.entrant, a.job.kind): json.loads(jobs.to_json(a.job)) | {"prepared": None} for a in found}

    alone, among = planned("ada"), planned("cal", "bea", "ada")
    assert len(alone) == 2 and among == among | alone
    assert among == planned("ada", "cal", "bea")


def test_whoever_makes_an_entry_again_makes_the_dispatchers_jobs(tmp_path):
    """From the records and the files' digests alone, as an auditor has them."""
    model = ModelFiles({name: told.digest(name) for name in FILES})
    story = told.until(Phase.OPEN)
    story.register("e0").submit("e0", 1)
    story.close()
    state = with_files(story.state)
    fields = state.defined.fields
    (dispatched,) = outstanding(stored(tmp_path / "prepare", story), state)
    again = round_jobs.prepare(state, model, [(stage.task, stage.seed) for stage in dispatched.stages])
    assert jobs.to_json(again) == jobs.to_json(dispatched.job) and len(again.stages) > 1
    assert jobs.inputs(again) == {*model.files.values(), *fields["files"].values()}
    story.prepare_all().finish("PreparationFinished").release(1).release(2).open_holdout()
    (dispatched,) = outstanding(stored(tmp_path / "evaluate", story), story.state)
    again = round_jobs.evaluate(
        story.state,
        model,
        [(stage.task, stage.seed, stage.protocol) for stage in dispatched.stages],
        inputs={task.name: told.digest(task.name) for task in story.state.competition.tasks},
        prepared={f"{task}/{seed}": made["prepared"] for (_, task, seed), made in story.state.prepared.items()},
        entrant="e0",
    )
    assert jobs.to_json(again) == jobs.to_json(dispatched.job)


def computing(state, **changes):
    competition = replace(state.competition, compute=replace(state.competition.compute, **changes))
    return replace(state, competition=competition)


def test_where_weights_lie_is_in_jobs_and_keys_and_leaves_other_keys_as_they_were():
    state = with_files(opened_round(1).state)
    model = ModelFiles({name: told.digest(name) for name in FILES})
    inputs = {task.name: told.digest(task.name) for task in state.competition.tasks}
    task, found, keys = state.competition.tasks[0].name, {}, {}
    for weights in ("whole", "shards"):
        now = computing(state, processes=2, weights=weights)
        prepared = round_jobs.prepare(now, model, [(task, 1)])
        asked = [(task, None, "direct")]
        evaluated = round_jobs.evaluate(now, model, asked, inputs=inputs, prepared={}, entrant="e0")
        every = (round_jobs.check(now, model), prepared, evaluated)
        assert all(jobs.from_json(jobs.to_json(job)) == job for job in every)
        found[weights] = [(job.processes, job.weights) for job in every]
        keys[weights] = assignments.stage_key("prepare", now, inputs=["x"], params={"task": task})
    # A model in shards is checked and evaluated by all of them, too: it need not fit anywhere else.
    assert found == {"whole": [(1, "whole"), (2, "whole"), (1, "whole")], "shards": [(2, "shards")] * 3}
    assert keys["whole"] != keys["shards"]
    mandated = state.competition.preparation
    assert keys["whole"] == digests.of_json(
        {
            "kind": "prepare",
            "code": state.defined["code"],
            "recipe": mandated.digest,
            "inputs": ["x"],
            "params": {"task": task},
            "hardware": state.competition.compute.hardware,
            "world_size": 2,
            "determinism": mandated.determinism,
            "salt": state.id,
        }
    )


def test_planning_costs_the_same_for_an_entry_in_any_round(tmp_path):
    def seconds(entrants):
        story = opened_round(entrants)
        store, best = stored(tmp_path / str(entrants), story), math.inf
        for _ in range(3):
            began = time.process_time()
            assert len(outstanding(store, story.state)) == entrants
            best = min(best, time.process_time() - began)
        return best

    small, large = seconds(40), seconds(200)
    assert large < 5 * 2.5 * small, (small, large)


@pytest.mark.parametrize("diverged", ["", "at learning rate 0.005: the loss at step 3 is nan"])
def test_the_record_says_that_the_base_stands_in_for_a_preparation_that_diverged(tmp_path, diverged):
    seed = {"task": "tint", "seed": 11, "prepared": told.digest("base"), "cost": {"tokens": 1}, "note": "a note"}
    entry = {**seed, **({"diverged": diverged} if diverged else {})}
    selection = {"candidates": [{"lr": 0.005, "epoch": 6, "validation": 0.5}], "selected": {"lr": 0.005, "epoch": 6}}
    opened = opened_round(1)
    assignment, *_ = outstanding(stored(tmp_path, opened), opened.state)
    status = Status("done", outcome=Outcome("done", "", {}, {}, "cpu/x86_64", {}), log=told.digest("log"))
    kind, fields = commits._prepared_fields(opened.state, assignment, entry, selection, status)
    records.check_fields(kind, fields, signed=True)
    assert fields.get("diverged", "") == diverged and fields["selected"] == {"lr": 0.005, "epoch": 6}
