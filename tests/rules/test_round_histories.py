"""Histories of rounds that nobody thought of, and what a record costs in a large one."""

import contextlib
import dataclasses
import functools
import math
import random
import time

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rounds_made import public
from stories import (
    CLOSES,
    CUSTODIANS,
    GRACE,
    LATEST,
    OPENS,
    RELEASE_BY,
    STEPS,
    SUBMITTING,
    TICK,
    Story,
    competition,
    until,
)

from acclimate_competitions import records, rounds
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_competitions.records import Record, format_time

# ---- size ----------------------------------------------------------------------------------------------------------


def fold_seconds(entrants: int) -> float:
    """How long the rules take over the preparations and evaluations of a round, signatures left out."""
    story = until(Phase.OPEN)
    for number in range(entrants):
        story.register(f"e{number}").submit(f"e{number}", 1)
    story.close().prepare_all().finish("PreparationFinished").release(1).release(2).open_holdout()
    story.evaluate_all().finish("EvaluationFinished")
    closed = next(place for place, (_, record) in enumerate(story.log) if record.type == "RoundClosed")
    before, rest = rounds.fold(story.log[:closed], competition()), story.log[closed:]
    best = math.inf
    for _ in range(3):
        state, began = before, time.process_time()
        for index, record in rest:
            state = rounds.apply(state, record, index=index)
        best = min(best, time.process_time() - began)
    assert state == story.state
    return best


def test_the_cost_of_a_record_does_not_grow_with_the_round(monkeypatch):
    # Signatures cost the same in any round, and would hide what grows.
    monkeypatch.setattr(records, "verify", lambda record: None)
    small, large = fold_seconds(60), fold_seconds(240)
    assert large < 4 * 2.5 * small, (small, large)


told_until = functools.cache(until)

# ---- histories -----------------------------------------------------------------------------------------------------

NAMES = ("ada", "bea", "untrained")
# Mostly whoever should sign, so that histories get somewhere.
SIGNERS = (*[None] * 8, "ada", "bea", "organizer", "custodian-a", "evaluator")
MOMENTS = (OPENS - TICK, OPENS, CLOSES - TICK, CLOSES, CLOSES + GRACE, LATEST, RELEASE_BY)


def time_passes(story: Story, draw: random.Random) -> None:
    story.now = max(story.now, draw.choice(MOMENTS))


def the_honest_next_step(story: Story, draw: random.Random) -> None:
    later = [phase for phase in STEPS if list(Phase).index(phase) > list(Phase).index(story.state.phase)]
    if later:
        STEPS[later[0]](story)


def somebody_submits(story: Story, draw: random.Random) -> None:
    kind = draw.choice(["Committed", "Accepted", "Withdrawn"])
    name, by = draw.choice(NAMES), draw.choice(SIGNERS)
    story.submission(kind, name, draw.randint(1, 3), by=by or name)


def the_evaluator_refuses(story: Story, draw: random.Random) -> None:
    story.refuse(draw.choice(NAMES), draw.randint(1, 3), by=draw.choice([*SIGNERS, "evaluator"]) or "evaluator")


def somebody_registers(story: Story, draw: random.Random) -> None:
    story.register(draw.choice(NAMES), by=draw.choice(SIGNERS) or "")


def the_organizer_extends(story: Story, draw: random.Random) -> None:
    story.tell("ClosingExtended", {"closes": format_time(draw.choice(MOMENTS))}, by="organizer")


def a_custodian_acts(story: Story, draw: random.Random) -> None:
    draw.choice([story.release, story.acknowledge])(draw.randint(1, 3))


def the_server_acts(story: Story, draw: random.Random) -> None:
    acts = (
        lambda: story.open(story.now),
        lambda: story.close(story.now),
        lambda: story.finish("PreparationFinished"),
        lambda: story.finish("EvaluationFinished"),
        story.open_holdout,
    )
    draw.choice(acts)()


def the_evaluator_prepares(story: Story, draw: random.Random) -> None:
    if plan := story.state.preparation_plan():
        story.prepare(draw.choice(plan))


def the_evaluator_evaluates(story: Story, draw: random.Random) -> None:
    if story.state.opened is not None and (plan := story.state.evaluation_plan()):
        story.evaluate(draw.choice(plan))


def the_organizer_ends_it(story: Story, draw: random.Random) -> None:
    if draw.random() < 0.2:
        approvals = draw.choice([(), ("custodian-a",), ("custodian-a", "custodian-b")])
        phase = draw.choice([{}, {"phase": draw.choice([*Phase, story.state.phase])}])
        story.void(by=draw.choice(["organizer", "custodian-b"]), approvals=approvals, **phase)
    else:
        story.publish(by=draw.choice(SIGNERS) or "organizer")


ACTS = (
    time_passes, the_honest_next_step, somebody_submits, somebody_submits, somebody_registers, the_organizer_extends, a_custodian_acts,
    the_evaluator_refuses,    the_server_acts, the_server_acts, the_evaluator_prepares, the_evaluator_evaluates, the_organizer_ends_it,
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    phase=st.sampled_from([phase for phase in Phase if phase is not Phase.VOIDED]),
    acts=st.lists(st.integers(0, 2**32), min_size=40, max_size=60),
)
def test_whatever_anybody_tries_what_is_taken_is_a_fair_round(phase, acts):
    told = told_until(phase)
    story = dataclasses.replace(told, log=list(told.log))
    if phase is Phase.OPEN:
        story.register("ada").submit("ada", 1)
    for number in acts:
        draw = random.Random(number)
        with contextlib.suppress(Refusal):
            draw.choice(ACTS)(story, draw)
    check_fair([record for _, record in story.log], story.state)
    assert rounds.fold(story.log, competition()) == story.state


def check_fair(told: list[Record], state: Round) -> None:
    """What must hold of any accepted history, said without looking at the rules' own code."""
    place = {record.type: position for position, record in reversed(list(enumerate(told)))}

    def order(*kinds: str) -> None:
        found = [place[kind] for kind in kinds if kind in place]
        assert found == sorted(found), kinds
        present = [kind in place for kind in kinds]
        assert present == sorted(present, reverse=True), kinds

    order("RoundDefined", "HoldoutSealed", "RoundOpened", "RoundClosed", "PreparationFinished", "ShareReleased",
          "HoldoutOpened", "EvaluationFinished", "RankingPublished")  # fmt: skip
    closes, released, standing = CLOSES, set(), {}
    for position, record in enumerate(told):
        if record.type in SUBMITTING:
            assert place["RoundOpened"] < position < place.get("RoundClosed", len(told))
            committed = record.type in ("SubmissionAccepted", "SubmissionRefused") and any(
                r.type == "SubmissionCommitted" and r["commitment"] == record["commitment"] for r in told[:position]
            )
            assert OPENS <= record.at < (closes + GRACE if committed else closes)
        if record.type == "ClosingExtended":
            closes = records.parse_time(record["closes"])
            assert closes <= LATEST
        if record.type == "SubmissionAccepted":
            first = next(p for p, r in enumerate(told) if r.fields.get("commitment") == record["commitment"])
            standing.setdefault(record["entrant"], []).append((first, position))
        if record.type == "SubmissionRefused":
            mine = [r.type for r in told if r.fields.get("commitment") == record["commitment"]]
            assert mine == ["SubmissionCommitted", "SubmissionRefused"]
        if record.type == "SubmissionWithdrawn":
            gone = [p for p, r in enumerate(told) if r.fields.get("commitment") == record["commitment"]]
            mine = standing.get(record["entrant"], [])
            standing[record["entrant"]] = [pair for pair in mine if pair[0] not in gone]
        if record.type == "RoundClosed":
            assert record.at >= closes
            last = {name: max(found)[1] for name, found in standing.items() if found}
            assert {entry.entrant: entry.submission for entry in state.entries} == last
            assert record["count"] == len(last)
        if record.type == "ModelPrepared":
            assert place["RoundClosed"] < position < place.get("PreparationFinished", len(told))
        if record.type == "ShareReleased":
            assert place["PreparationFinished"] < position
            released.add(record["index"])
        if record.type == "HoldoutOpened":
            assert len(released) >= 2
        if record.type == "ModelEvaluated":
            assert place["HoldoutOpened"] < position
        if record.type == "RoundVoided":
            assert position == len(told) - 1
            assert record.fields.get("phase") in (None, state.phases[-2][0])
            if record.by != public("organizer"):
                approved = {approval["by"] for approval in record["approvals"]} | {record.by}
                assert len(approved & {public(name) for name in CUSTODIANS}) >= 2 and "HoldoutSealed" in place
    finished = {(r["submission"], r["task"], r["seed"]) for r in told if r.type == "ModelPrepared"}
    if "PreparationFinished" in place:
        assert len(finished) == len(state.entries) * 6
    assert sum(r.type == "ModelPrepared" for r in told) == len(finished)
