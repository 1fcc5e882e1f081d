"""The state machine of a round: every transition and guard, and histories that nobody thought of."""

import base64
import contextlib
import dataclasses
import functools
import math
import random
import time
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from marbles import DEFINITION
from rounds_made import START, public
from stories import (
    CLOSES,
    CUSTODIANS,
    GRACE,
    LATEST,
    OPENS,
    RELEASE_BY,
    SEAL,
    STEPS,
    SUBMITTING,
    TICK,
    Story,
    begin,
    competition,
    custodian,
    digest,
    key,
    signed,
    until,
)

from acclimate_competitions import definition, digests, records, rounds, vkeys
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_competitions.records import Record, format_time


def refuses(expected: str, act: object, /, *arguments: object, **named: object) -> Refusal:
    """The act is refused with this code, and changes nothing."""
    story = act.__self__
    before, length = story.state, len(story.log)
    with pytest.raises(Refusal) as caught:
        act(*arguments, **named)
    assert caught.value.code == expected, caught.value
    assert story.state is before and len(story.log) == length
    return caught.value


# ---- the table -----------------------------------------------------------------------------------------------------


def test_the_phases_follow_each_other_in_the_order_of_the_protocol():
    story = until(Phase.PUBLISHED)
    assert [phase for phase, _ in story.state.phases] == [phase for phase in Phase if phase is not Phase.VOIDED]
    assert [record.at for _, record in story.log] == sorted(record.at for _, record in story.log)
    assert rounds.fold(story.log, competition()) == story.state


def test_folding_parsed_bytes_gives_the_same_round():
    story = until(Phase.PUBLISHED)
    parsed = [(index, records.parse(record.encode())) for index, record in story.log]
    assert rounds.fold(parsed, competition()) == story.state


@pytest.mark.parametrize("phase", list(Phase))
def test_every_record_that_a_phase_does_not_take_is_refused(phase):
    story = until(phase)
    for kind, (phases, _, _) in rounds.TABLE.items():
        if phase in phases:
            continue
        late = kind in SUBMITTING and phase not in (Phase.DRAFT, Phase.SEALED, Phase.VOIDED)
        refusal = refuses("round_closed" if late else "phase_wrong", story.tell, kind, {}, by=None)
        if not late:
            assert refusal.hint and not any(name in refusal.hint for name in rounds.TABLE)
            for allowed in rounds.allowed(phase):
                assert allowed in refusal.sentence
    refuses("phase_wrong", story.tell, "RoundDefined", {})


def test_the_table_takes_what_the_protocol_says_and_nothing_else():
    taken = {phase: set(rounds.allowed(phase)) for phase in Phase}
    assert taken == {
        Phase.DRAFT: {"HoldoutSealed", "RoundVoided"},
        Phase.SEALED: {"ShareAcknowledged", "RoundOpened", "RoundVoided"},
        Phase.OPEN: {*SUBMITTING, "ShareAcknowledged", "RoundClosed", "RoundVoided"},
        Phase.CLOSED: {"ModelPrepared", "PreparationFinished", "RoundVoided"},
        Phase.PREPARED: {"AuditDrawn", "PreparationAudited", "ShareReleased", "RoundVoided"},
        Phase.RELEASED: {"HoldoutOpened", "RoundVoided"},
        Phase.OPENED: {"ModelEvaluated", "EvaluationFinished", "RoundVoided"},
        Phase.EVALUATED: {"RankingPublished", "RoundVoided"},
        Phase.PUBLISHED: {"RankingRevised", "RoundAudited"},
        Phase.VOIDED: set(),
    }


@pytest.mark.parametrize("thief", ["ada", "organizer", "custodian-a", "evaluator", "stranger"])
def test_only_who_may_sign_a_record_signs_it(thief):
    owners = {
        "HoldoutSealed": (Phase.DRAFT, SEAL, {"organizer"}),
        "ShareAcknowledged": (
            Phase.SEALED,
            {"seal": SEAL["seal"], "index": 1, "commitment": digest("share 1")},
            {"custodian-a"},
        ),
        "ClosingExtended": (Phase.OPEN, {"closes": format_time(LATEST)}, {"organizer"}),
        "ShareReleased": (
            Phase.PREPARED,
            {"seal": SEAL["seal"], "index": 1, "document": digest("share 1")},
            {"custodian-a"},
        ),
        "RankingPublished": (
            Phase.EVALUATED,
            {"ranking": digest("r"), "policy": competition().ranking.digest, "reason": ""},
            {"organizer"},
        ),
        "RankingRevised": (
            Phase.PUBLISHED,
            {"ranking": digest("r"), "policy": competition().ranking.digest, "reason": "x"},
            {"organizer"},
        ),
        "RoundVoided": (Phase.DRAFT, {"reason": "x"}, {"organizer"}),
    }
    for kind, (phase, fields, may) in owners.items():
        story = until(phase)
        if thief in may:
            story.tell(kind, fields, by=thief)
        else:
            refuses("signature_invalid", story.tell, kind, fields, by=thief)
        # A good signature under other words is none.
        (owner,) = may
        record = signed(kind, fields, at=story.now, by=owner, round_id=story.state.id)
        forged = dataclasses.replace(record, sig=signed("RoundVoided", {"reason": "y"}, at=START, by=owner).sig)
        with pytest.raises(Refusal):
            rounds.apply(until(phase).state, forged, index=99)
    story = until(Phase.CLOSED)
    if thief != "evaluator":
        refuses("signature_invalid", story.prepare, story.state.preparation_plan()[0], by=thief)


def test_a_record_of_another_round_is_refused():
    story = until(Phase.DRAFT)
    record = signed("HoldoutSealed", SEAL, at=START, by="organizer", round_id="marbles-2027-1-000000000000")
    with pytest.raises(Refusal) as caught:
        rounds.apply(story.state, record, index=1)
    assert caught.value.code == "guard_failed"


def test_a_fold_names_the_entry_that_the_rules_refuse():
    story = until(Phase.OPEN)
    wrong = story.log[-1][1]
    with pytest.raises(Refusal) as caught:
        rounds.fold([*story.log, (41, wrong)], competition())
    assert "log entry 41" in caught.value.sentence
    with pytest.raises(Refusal) as caught:
        rounds.fold([], competition())
    assert caught.value.code == "round_unknown"


# ---- guards --------------------------------------------------------------------------------------------------------


def witness(name, *, key=None, kind=vkeys.COSIGNATURE):
    return vkeys.text(name, kind, base64.b64decode(public(key or name)))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"definition": digest("other")}, "guard_failed"),
        ({"competition": "other"}, "guard_failed"),
        ({"recipe": digest("other")}, "guard_failed"),
        ({"policy": digest("other")}, "guard_failed"),
        ({"scorer": digest("other")}, "guard_failed"),
        ({"opens": format_time(CLOSES)}, "guard_failed"),
        ({"closes_latest": format_time(CLOSES - TICK)}, "guard_failed"),
        ({"release_by": format_time(LATEST)}, "guard_failed"),
        ({"k": 1}, "guard_failed"),
        ({"grace": 61}, "guard_failed"),
        ({"custodians": []}, "guard_failed"),
        ({"evaluators": []}, "guard_failed"),
        ({"evaluators": [public("organizer")]}, "guard_failed"),
        ({"evaluators": [public("custodian-a")]}, "guard_failed"),
        ({"custodians": [custodian(name, backup="age1one") for name in CUSTODIANS]}, "guard_failed"),
        ({"custodians": [custodian(name, age="age1one") for name in CUSTODIANS]}, "guard_failed"),
        ({"custodians": [custodian(n, backup=f"age1{n}") for n in CUSTODIANS]}, "guard_failed"),
        ({"custodians": [custodian(n, backup=f"age1{CUSTODIANS[0]}") for n in CUSTODIANS]}, "guard_failed"),
        ({"organizer": {"ed25519": public("ada")}}, "signature_invalid"),
        ({"evaluators": ["AQ" + "A" * 41 + "="]}, "key_refused"),
        ({"quorum": 1}, "guard_failed"),
        ({"witnesses": [witness("w1"), witness("w1")], "quorum": 2}, "guard_failed"),
        ({"witnesses": [witness("w1"), witness("w2", key="w1")], "quorum": 2}, "guard_failed"),
        ({"witnesses": [witness("w1"), witness("w2")], "quorum": 3}, "guard_failed"),
        ({"witnesses": ["rubbish", "rubbish2"], "quorum": 2}, "key_refused"),
        ({"witnesses": [witness("w1", kind=vkeys.ED25519)], "quorum": 1}, "key_refused"),
        ({"witnesses": [witness("w1").replace("+", "+0", 1)], "quorum": 1}, "key_refused"),
    ],
)
def test_a_round_begins_by_its_definition(changes, code):
    with pytest.raises(Refusal) as caught:
        begin(**changes)
    assert caught.value.code == code


def test_a_round_may_name_as_many_witnesses_as_its_quorum():
    state = begin(witnesses=[witness("w1"), witness("w2")], quorum=2).state
    assert state.phase is Phase.DRAFT


def test_a_round_begins_with_round_defined_only():
    with pytest.raises(Refusal):
        rounds.begin(signed("HoldoutSealed", SEAL, at=START, by="organizer", round_id="r"), competition())


def test_a_seal_has_one_share_a_custodian_in_order():
    story = begin()
    a, b, c = SEAL["shares"]
    for shares in ([a, b], [b, a, c], [a, b, c, c], [a, b, {**c, "to": "ada"}], [a, b, {**c, "index": 4}]):
        refuses("guard_failed", story.seal, shares=shares)


def test_a_share_is_acknowledged_by_its_custodian_for_what_was_sealed():
    story = until(Phase.SEALED)
    refuses("share_false", story.acknowledge, 1, commitment=digest("share 2"))
    refuses("seal_mismatch", story.acknowledge, 1, seal=digest("other"))
    refuses("signature_invalid", story.acknowledge, 1, index=2)
    story.acknowledge(1).acknowledge(1)
    assert story.state.acknowledged == {1}


def test_a_round_opens_at_its_time_after_one_more_than_the_threshold_acknowledged():
    story = until(Phase.SEALED).acknowledge(1).acknowledge(2)
    refuses("guard_failed", story.open)
    story.acknowledge(3)
    refuses("too_early", story.open, OPENS - TICK)
    refuses("seal_mismatch", story.tell, "RoundOpened", {"seal": digest("other")}, at=OPENS)
    assert story.open().state.phase is Phase.OPEN


def test_where_all_custodians_are_needed_all_must_acknowledge():
    text = DEFINITION.replace("threshold = 2", "threshold = 3")
    story = begin(definition.parse(text.encode()), k=3).seal().acknowledge(1).acknowledge(2)
    refuses("guard_failed", story.open)
    assert story.acknowledge(3).open().state.phase is Phase.OPEN


def test_the_close_moves_later_only_never_beyond_the_latest():
    story = until(Phase.OPEN)
    for closes in (CLOSES, CLOSES - TICK, LATEST + TICK):
        refuses("guard_failed", story.tell, "ClosingExtended", {"closes": format_time(closes)}, by="organizer")
    late = {"by": "organizer", "at": CLOSES}
    refuses("round_closed", story.tell, "ClosingExtended", {"closes": format_time(LATEST)}, **late)
    story.tell("ClosingExtended", {"closes": format_time(LATEST)}, by="organizer", at=CLOSES - TICK)
    refuses("too_early", story.close, at=LATEST - TICK)
    assert story.close(at=LATEST).state.phase is Phase.CLOSED


@pytest.mark.parametrize(("at", "taken"), [(CLOSES - TICK, True), (CLOSES, False), (CLOSES + TICK, False)])
def test_the_deadline_is_half_open(at, taken):
    for act in (
        lambda story: story.tell("EntrantRegistered", {"entrant": "bea", "ed25519": public("bea"), "conflicts": []},
                                 by="bea", at=at),
        lambda story: story.submission("Committed", "ada", 2, at=at),
        lambda story: story.submission("Accepted", "ada", 2, at=at),
        lambda story: story.submission("Withdrawn", "ada", 1, at=at),
    ):  # fmt: skip
        story = until(Phase.OPEN).register("ada").submit("ada", 1)
        if taken:
            act(story)
        else:
            with pytest.raises(Refusal) as caught:
                act(story)
            assert caught.value.code == "round_closed"
            assert format_time(CLOSES) in caught.value.sentence and format_time(at) in caught.value.sentence


@pytest.mark.parametrize(("at", "taken"), [(CLOSES + GRACE - TICK, True), (CLOSES + GRACE, False)])
def test_what_was_committed_may_be_accepted_within_the_grace(at, taken):
    story = until(Phase.OPEN).register("ada").submission("Committed", "ada", 1)
    refuses("too_early", story.close, at=CLOSES)
    if not taken:
        refuses("round_closed", story.submission, "Accepted", "ada", 1, at=at)
        story.close(at=at)
        leaf = digest("ada 1").encode()
        assert story.state.closed["forfeited"] == {"count": 1, "root": digests.root_of_leaves([leaf])}
        assert story.state.entries == ()
    else:
        story.submission("Accepted", "ada", 1, at=at).close(at=at)
        assert [entry.entrant for entry in story.state.entries] == ["ada"]


def test_a_refused_submission_keeps_no_round_waiting_and_forfeits_nothing():
    story = until(Phase.OPEN).register("ada").submit("ada", 1).submission("Committed", "ada", 2)
    refuses("too_early", story.close, at=CLOSES)
    story.refuse("ada", 2).close(at=CLOSES)
    assert story.state.closed["forfeited"] == {"count": 0, "root": digests.root_of_leaves([])}
    assert [entry.commitment for entry in story.state.entries] == [digest("ada 1")]
    assert story.state.submissions[digest("ada 2")].refused
    refuses("round_closed", story.refuse, "ada", 1)
    assert rounds.fold(story.log, competition()) == story.state


def test_a_submission_is_refused_once_by_an_evaluator_who_says_why():
    story = until(Phase.OPEN).register("ada").register("bea").submission("Committed", "ada", 1)
    for thief in ("ada", "bea", "organizer", "custodian-a"):
        refuses("signature_invalid", story.refuse, "ada", 1, by=thief)
    refuses("submission_unknown", story.refuse, "ada", 2)
    other = {"entrant": "bea", "commitment": digest("ada 1"), "reason": "not hers"}
    refuses("submission_unknown", story.tell, "SubmissionRefused", other, by="evaluator")
    for reason in ("", " \n", "x" * 2001):
        refuses("record_invalid", story.refuse, "ada", 1, reason=reason)
    story.refuse("ada", 1, reason="x" * 2000)
    refuses("conflict", story.refuse, "ada", 1)
    for kind in ("Committed", "Accepted", "Withdrawn"):
        refuses("conflict", story.submission, kind, "ada", 1)
    # What was accepted stays so, and what was withdrawn needs no reason.
    refuses("conflict", story.submit("ada", 2).refuse, "ada", 2)
    refuses("conflict", story.submission("Committed", "bea", 1).submission("Withdrawn", "bea", 1).refuse, "bea", 1)
    assert [entry.commitment for entry in story.state.frozen_entries()] == [digest("ada 2")]


@pytest.mark.parametrize(("at", "taken"), [(CLOSES + GRACE - TICK, True), (CLOSES + GRACE, False)])
def test_what_was_committed_may_be_refused_within_the_grace(at, taken):
    story = until(Phase.OPEN).register("ada").submission("Committed", "ada", 1)
    if taken:
        story.refuse("ada", 1, at=at)
    else:
        refuses("round_closed", story.refuse, "ada", 1, at=at)
    assert story.close(at=at).state.closed["forfeited"]["count"] == (0 if taken else 1)


def test_an_entrant_registers_once_with_its_own_key():
    story = until(Phase.OPEN).register("ada")
    refuses("conflict", story.register, "ada")
    refuses("conflict", story.register, "ada-2", ed25519=public("ada"), by="ada")
    refuses("guard_failed", story.register, "bea", by="organizer")
    refuses("signature_invalid", story.register, "bea", by="cleo")
    refuses("key_refused", story.register, "bea", ed25519="AQ" + "A" * 41 + "=", by="organizer")


def test_baselines_are_those_of_the_definition_and_the_organizers():
    story = until(Phase.OPEN)
    refuses("guard_failed", story.register, "untrained", by="untrained")
    refuses("guard_failed", story.register, "ada", conflicts=["baseline"], by="organizer")
    refuses("guard_failed", story.register, "untrained", conflicts=[])
    assert story.register("untrained").state.baselines == {"untrained"}


def test_a_submission_is_committed_and_accepted_once_by_its_entrant():
    story = until(Phase.OPEN).register("ada").register("bea")
    refuses("entrant_unknown", story.submission, "Committed", "cleo", 1)
    refuses("signature_invalid", story.submission, "Committed", "ada", 1, by="bea")
    story.submission("Committed", "ada", 1)
    refuses("conflict", story.submission, "Committed", "ada", 1)
    stolen = {"entrant": "bea", "commitment": digest("ada 1")}
    refuses("conflict", story.tell, "SubmissionCommitted", stolen, by="bea")
    refuses("signature_invalid", story.tell, "SubmissionAccepted", stolen, by="bea")
    refuses("submission_unknown", story.tell, "SubmissionWithdrawn", stolen, by="bea")
    story.submission("Accepted", "ada", 1)
    refuses("conflict", story.submission, "Accepted", "ada", 1)
    story.submission("Withdrawn", "ada", 1)
    refuses("conflict", story.submission, "Withdrawn", "ada", 1)
    story.submission("Committed", "bea", 1).submission("Withdrawn", "bea", 1)
    refuses("conflict", story.submission, "Accepted", "bea", 1)
    assert story.state.frozen_entries() == () and story.state.outstanding == ()


def test_of_the_accepted_submissions_that_stand_the_last_committed_is_the_entry():
    story = until(Phase.OPEN).register("bea").register("ada")
    # The check of the first took longer than that of the second.
    story.submission("Committed", "ada", 1).submit("ada", 2).submission("Accepted", "ada", 1)
    story.submit("bea", 1).submit("bea", 2).submission("Withdrawn", "bea", 2)
    story.close()
    assert [(e.entrant, e.commitment) for e in story.state.entries] == [
        ("ada", digest("ada 2")),
        ("bea", digest("bea 1")),
    ]


def test_what_was_accepted_without_a_commitment_counts_from_its_acceptance():
    story = until(Phase.OPEN).register("ada").submission("Committed", "ada", 1)
    story.submission("Accepted", "ada", 2).submission("Accepted", "ada", 1).close()
    assert [entry.commitment for entry in story.state.entries] == [digest("ada 2")]


def test_a_close_says_what_the_log_says():
    story = until(Phase.OPEN).register("ada").submit("ada", 1).submission("Committed", "ada", 2)
    forfeits = [{"forfeited": {**story.state.forfeited(), **other}} for other in ({"count": 0}, {"root": digest("x")})]
    for changes in ({"count": 2}, {"entries_root": digest("x")}, *forfeits):
        refuses("guard_failed", story.close, **changes)


def test_a_round_closes_over_any_number_of_forfeited_commitments():
    story = until(Phase.OPEN).register("ada")
    for number in range(1200):  # listed one by one they would not fit into a record
        story.submission("Committed", "ada", number)
    story.close()
    leaves = sorted(digest(f"ada {number}").encode() for number in range(1200))
    assert story.state.closed["forfeited"] == {"count": 1200, "root": digests.root_of_leaves(leaves)}
    assert len(story.log[-1][1].encode()) < 1000


def test_who_declared_a_conflict_is_not_ranked():
    story = until(Phase.OPEN).register("ada", conflicts=["works with the organizer"]).register("bea")
    assert story.register("untrained").state.unranked == {"ada", "untrained"}


def test_a_preparation_is_of_the_plan_by_the_rounds_own_recipe_and_code():
    story = until(Phase.CLOSED)
    first, *_ = plan = story.state.preparation_plan()
    assert len(plan) == 2 * 2 * 3
    refuses("guard_failed", story.prepare, (first[0], first[1], 99))
    refuses("guard_failed", story.prepare, (0, first[1], first[2]))
    refuses("guard_failed", story.prepare, first, recipe=digest("other"))
    refuses("guard_failed", story.prepare, first, code=digest("other"))
    failed = {"reason": "out of memory", "log": digest("log")}
    refuses("record_invalid", story.prepare, first, failed=failed)
    refuses("record_invalid", story.prepare, first, drop="prepared")
    refuses("record_invalid", story.prepare, first, drop="prepared candidates selected")
    story.prepare(first)
    refuses("conflict", story.prepare, first)
    refuses("guard_failed", story.prepare, plan[1], base=digest("another model"))
    both = {"failed": failed, "diverged": "the loss is NaN"}
    refuses("record_invalid", story.prepare, plan[1], drop="prepared candidates selected", **both)
    story.prepare(plan[1], drop="prepared candidates selected", failed=failed)
    story.prepare(plan[2], diverged="the loss is NaN")
    assert len(story.state.prepared) == 3


def test_preparation_is_finished_when_every_entry_has_an_outcome():
    story = until(Phase.CLOSED)
    plan = story.state.preparation_plan()
    for number, plan_key in enumerate(plan):
        refuses("guard_failed", story.finish, "PreparationFinished")
        story.prepare(plan_key) if number else story.prepare(
            plan_key, drop="prepared candidates selected", failed={"reason": "r", "log": digest("l")}
        )
    refuses("guard_failed", story.finish, "PreparationFinished", count=len(plan) - 1)
    refuses("guard_failed", story.finish, "PreparationFinished", root=digest("x"))
    story.finish("PreparationFinished")
    assert len(story.state.evaluation_plan()) == len(story.state.model_digests()) == 4 + len(plan) - 1
    failed = plan[0]
    assert (*failed, "prepared") not in story.state.evaluation_plan()
    assert (failed[0], failed[1], None, "direct") in story.state.evaluation_plan()


def test_preparation_is_finished_after_the_objection_window():
    story = until(Phase.CLOSED, competition(window='objection_window = "2h"')).prepare_all()
    ends = story.now + timedelta(hours=2)
    story.now = ends - TICK
    refuses("too_early", story.finish, "PreparationFinished")
    story.now = ends
    assert story.finish("PreparationFinished").state.phase is Phase.PREPARED


def test_a_round_without_entries_goes_its_way():
    story = until(Phase.OPEN).close().finish("PreparationFinished").release(1).release(2).open_holdout()
    assert story.finish("EvaluationFinished").publish().state.phase is Phase.PUBLISHED


def test_nothing_is_released_before_the_preparation_is_finished():
    for phase in (Phase.DRAFT, Phase.SEALED, Phase.OPEN, Phase.CLOSED):
        refuses("phase_wrong", until(phase).release, 1)
    story = until(Phase.CLOSED).prepare_all()
    refuses("phase_wrong", story.release, 1)


def test_a_release_is_of_the_own_committed_share():
    story = until(Phase.PREPARED)
    refuses("share_false", story.release, 1, document=digest("share 2"))
    refuses("seal_mismatch", story.release, 1, seal=digest("other"))
    refuses("signature_invalid", story.release, 1, index=2)
    story.release(1).release(1)
    assert story.state.phase is Phase.PREPARED and story.state.released == {1: digest("share 1")}
    assert story.release(2).state.phase is Phase.RELEASED


def test_what_is_opened_is_what_was_sealed():
    refuses("seal_mismatch", until(Phase.RELEASED).open_holdout, row_root=digest("other"))


def test_an_evaluation_is_of_the_plan_with_the_logged_model():
    story = until(Phase.OPENED)
    first, *_ = plan = story.state.evaluation_plan()
    assert len(plan) == 2 * 2 + 2 * 2 * 3
    refuses("guard_failed", story.evaluate, (*first[:3], "prepared"))
    refuses("guard_failed", story.evaluate, (99, *first[1:]))
    refuses("guard_failed", story.evaluate, first, prepared=digest("another model"))
    refuses("guard_failed", story.finish, "EvaluationFinished")
    story.evaluate(first)
    refuses("conflict", story.evaluate, first)
    story.evaluate_all()
    refuses("guard_failed", story.finish, "EvaluationFinished", count=0)
    assert story.finish("EvaluationFinished").state.phase is Phase.EVALUATED


def test_a_ranking_is_by_the_rounds_policy_and_revised_with_a_reason():
    story = until(Phase.EVALUATED)
    refuses("guard_failed", story.publish, policy=digest("other"))
    story.publish(reason="")
    refuses("guard_failed", story.publish, "RankingRevised", reason="")
    story.publish("RankingRevised", ranking=digest("second"), reason="a wrong label")
    assert [ranking for ranking, _ in story.state.rankings] == [digest("ranking"), digest("second")]


HOUR = timedelta(hours=1)
PUBLISHING = {"manual": 'publish = "manual"', "within": 'publish_within = "1h"', "auto": 'publish = "auto"'}


@settings(max_examples=100, deadline=None)
@given(
    how=st.sampled_from(sorted(PUBLISHING)),
    by=st.sampled_from(["organizer", "evaluator", "ada", "custodian-a", "stranger"]),
    after=st.sampled_from([timedelta(0), TICK, HOUR - TICK, HOUR, HOUR + TICK]),
    reason=st.sampled_from(["", "the first"]),
)
def test_a_ranking_is_published_by_its_organizer_or_when_the_definition_says_so_by_an_evaluator(how, by, after, reason):
    told = evaluated_story(how)
    story = dataclasses.replace(told, log=list(told.log), now=told.now + after)
    opens = {"manual": None, "within": HOUR, "auto": timedelta(0)}[how]
    alone = by == "evaluator" and opens is not None
    assert story.state.publishes_itself == (None if opens is None else told.now + opens)
    if by == "organizer" or (alone and after >= opens and not reason):
        story.publish(by=by, reason=reason)
        assert story.state.phase is Phase.PUBLISHED and story.state.rankings == ((digest("ranking"), reason),)
        # Once is enough, whoever comes second; and revising stays the organizer's.
        refuses("phase_wrong", story.publish, by="evaluator", reason="")
        refuses("signature_invalid", story.publish, "RankingRevised", by="evaluator", reason="better")
        story.publish("RankingRevised", reason="better", ranking=digest("other"))
    elif not alone:
        refuses("signature_invalid", story.publish, by=by, reason=reason)
    else:
        refuses("too_early" if after < opens else "guard_failed", story.publish, by=by, reason=reason)


@functools.cache
def evaluated_story(how: str) -> Story:
    return until(Phase.EVALUATED, competition(publish=PUBLISHING[how]))


@pytest.mark.parametrize("phase", [phase for phase in STEPS if phase not in (Phase.EVALUATED, Phase.PUBLISHED)])
def test_nothing_publishes_itself_before_it_is_evaluated(phase):
    story = until(phase, competition(publish=PUBLISHING["auto"]))
    assert story.state.publishes_itself is None
    refuses("phase_wrong", story.publish, by="evaluator", reason="")


def test_what_publishes_itself_is_by_the_rounds_policy():
    told = evaluated_story("auto")
    story = dataclasses.replace(told, log=list(told.log))
    refuses("guard_failed", story.publish, by="evaluator", reason="", policy=digest("other"))


def test_voiding_needs_a_reason_and_after_the_close_k_custodians():
    refuses("guard_failed", until(Phase.OPEN).tell, "RoundVoided", {"reason": ""}, by="organizer")
    for phase in (Phase.CLOSED, Phase.PREPARED, Phase.RELEASED, Phase.OPENED, Phase.EVALUATED):
        story = until(phase)
        for approvals in ((), ("custodian-a",), ("custodian-a", "custodian-a"), ("custodian-a", "ada")):
            refuses("guard_failed", story.void, approvals=approvals)
        assert story.void(approvals=("custodian-a", "custodian-c")).state.phase is Phase.VOIDED
    for phase in (Phase.DRAFT, Phase.SEALED, Phase.OPEN):
        assert until(phase).void().state.phase is Phase.VOIDED


def test_in_the_grace_voiding_needs_the_custodians_too():
    story = until(Phase.OPEN)
    refuses("guard_failed", story.void, at=CLOSES)
    assert story.void(at=CLOSES, approvals=("custodian-a", "custodian-c")).state.phase is Phase.VOIDED
    assert until(Phase.OPEN).void(at=CLOSES - TICK).state.phase is Phase.VOIDED


def test_custodians_void_without_the_organizer_whoever_of_them_signs():
    refuses("signature_invalid", until(Phase.DRAFT).void, by="custodian-a", approvals=CUSTODIANS, phase="draft")
    for phase in (
        Phase.SEALED,
        Phase.OPEN,
        Phase.CLOSED,
        Phase.PREPARED,
        Phase.RELEASED,
        Phase.OPENED,
        Phase.EVALUATED,
    ):
        story = until(phase)
        # The signer is one of the k; an approval of its own, a stranger's or the organizer's is none more.
        for approvals in ((), ("custodian-b",), ("ada", "organizer")):
            refuses("guard_failed", story.void, by="custodian-b", approvals=approvals, phase=phase)
        # Failed custody excuses the organizer only.
        refuses("guard_failed", story.void, by="custodian-b", phase=phase, at=RELEASE_BY)
        refuses("guard_failed", story.void, by="custodian-b", approvals=("custodian-c",))
        ended = story.void(by="custodian-b", approvals=("custodian-c",), phase=phase)
        assert ended.state.phase is Phase.VOIDED
        assert rounds.fold(ended.log, competition()) == ended.state
    story = until(Phase.CLOSED)
    refuses("signature_invalid", story.void, by="evaluator", approvals=CUSTODIANS, phase="closed")
    # An approval is of what one signer signs: nobody else can use it.
    fields = {"reason": "a mistake", "phase": "closed"}
    given = [records.approve("RoundVoided", story.state.id, fields, by=public("organizer"), key=key("custodian-a"))]
    refuses("signature_invalid", story.tell, "RoundVoided", {**fields, "approvals": given}, by="custodian-b")


def test_an_approval_of_a_voiding_ages_with_the_phase():
    both = ("custodian-a", "custodian-c")
    for phase in (Phase.CLOSED, Phase.PREPARED, Phase.EVALUATED):
        for other in set(Phase) - {phase}:
            refusal = refuses("guard_failed", until(phase).void, approvals=both, phase=other)
            assert f"phase {other}" in refusal.sentence and f"phase {phase}" in refusal.sentence
        assert until(phase).void(approvals=both, phase=phase).state.phase is Phase.VOIDED
    # What was agreed to after the close can't be passed off as agreed to later: the approvals cover the phase.
    story, early = until(Phase.EVALUATED), {"reason": "a mistake", "phase": "closed"}
    given = [records.approve("RoundVoided", story.state.id, early, by=public("organizer"), key=key(a)) for a in both]
    late = {"reason": "a mistake", "phase": "evaluated", "approvals": given}
    refuses("signature_invalid", story.tell, "RoundVoided", late, by="organizer")
    # Before the close the organizer needs nobody, and an older client's record names no phase.
    refuses("guard_failed", until(Phase.OPEN).void, phase="sealed")
    assert until(Phase.OPEN).void(phase="open").state.phase is Phase.VOIDED


@pytest.mark.parametrize("name", ["c/d", "../x", "a b", "‮x", "<b>", "%2f", "", "A", "tab\t", "x" * 33, 7])
def test_a_round_s_name_fits_into_an_address(name):
    with pytest.raises(Refusal) as caught:
        begin(name=name)
    assert caught.value.code in ("name_invalid", "record_invalid")


def test_an_approval_of_another_reason_is_none():
    story = until(Phase.CLOSED)
    other = {"reason": "another"}
    given = [
        records.approve("RoundVoided", story.state.id, other, by=public("organizer"), key=key(name))
        for name in CUSTODIANS
    ]
    fields = {"reason": "a mistake", "approvals": given}
    refuses("signature_invalid", story.tell, "RoundVoided", fields, by="organizer")


def test_failed_custody_lets_the_organizer_void_alone():
    for phase, at, taken in (
        (Phase.PREPARED, RELEASE_BY - TICK, False),
        (Phase.PREPARED, RELEASE_BY, True),
        (Phase.CLOSED, RELEASE_BY, False),  # the custodians can't release yet: their silence is not the reason
        (Phase.RELEASED, RELEASE_BY, False),
        (Phase.OPENED, RELEASE_BY, False),
    ):
        story = until(phase)
        if taken:
            assert story.void(at=at).state.phase is Phase.VOIDED
        else:
            refuses("guard_failed", story.void, at=at)


def test_whoever_is_left_ends_a_round_that_has_lapsed():
    """Fewer than k custodians can't agree to anything: 30 days after the shares were due one of them is enough."""
    lapse = RELEASE_BY + rounds.LAPSE
    for phase in (Phase.SEALED, Phase.OPEN, Phase.CLOSED, Phase.PREPARED):
        refusal = refuses("guard_failed", until(phase).void, by="custodian-b", phase=phase, at=lapse - TICK)
        assert "30 days after release_by" in refusal.sentence
        ended = until(phase).void(by="custodian-b", phase=phase, at=lapse)
        assert ended.state.phase is Phase.VOIDED
        assert rounds.fold(ended.log, competition()) == ended.state
        # Nobody else, and not in another phase than it stands in, nor without saying so.
        story = until(phase)
        refuses("signature_invalid", story.void, by="evaluator", phase=phase, at=lapse)
        refuses("guard_failed", story.void, by="custodian-b", phase="draft", at=lapse)
        refuses("guard_failed", story.void, by="custodian-b", at=lapse)


def test_who_may_know_the_ranking_never_voids_it_by_waiting():
    """`at` is the server's word: with k shares out, organizer and server know the scores, and could date a voiding ahead."""
    late = RELEASE_BY + rounds.LAPSE + timedelta(days=1000)
    for phase in (Phase.RELEASED, Phase.OPENED, Phase.EVALUATED):
        for by in ("organizer", "custodian-b"):
            refusal = refuses("guard_failed", until(phase).void, by=by, phase=phase, at=late)
            assert "30 days" not in refusal.sentence
    # The organizer gains nothing by waiting in any other phase, either, but what failed custody gives.
    refuses("guard_failed", until(Phase.CLOSED).void, phase=Phase.CLOSED, at=late)
    # A published round stays published.
    for by in ("organizer", "custodian-b"):
        refuses("phase_wrong", until(Phase.PUBLISHED).void, by=by, phase="published", at=late)


def test_a_record_dated_before_its_predecessor_is_not_folded():
    """Else one dated ahead, so that a window counts as over, hides behind a later one dated honestly."""
    log = until(Phase.PUBLISHED).log
    assert rounds.fold(log, competition()).phase is Phase.PUBLISHED
    named = set()
    for place, (index, record) in enumerate(log[:-1]):
        ahead = dataclasses.replace(record, at=log[-1][1].at + TICK)
        with pytest.raises(Refusal) as caught:
            rounds.fold([*log[:place], (index, ahead), *log[place + 1 :]], competition())
        if not caught.value.sentence.startswith(f"log entry {index}:"):  # no guard of its own speaks against the date
            assert caught.value.code == "log_inconsistent"
            assert caught.value.sentence.startswith(f"log entry {log[place + 1][0]}:")
            named.add(record.type)
    assert {"ModelPrepared", "PreparationFinished", "ShareReleased", "EvaluationFinished"} <= named


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
