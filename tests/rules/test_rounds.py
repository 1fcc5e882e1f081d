"""The state machine of a round: every transition and guard, and histories that nobody thought of."""

import base64
import dataclasses
from datetime import timedelta

import pytest
from marbles import DEFINITION
from rounds_made import START, public
from stories import (
    CLOSES,
    CUSTODIANS,
    GRACE,
    LATEST,
    OPENS,
    SEAL,
    SUBMITTING,
    TICK,
    begin,
    competition,
    custodian,
    digest,
    refuses,
    signed,
    until,
)

from acclimate_competitions import definition, digests, records, rounds, untimely, vkeys
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase
from acclimate_competitions.records import format_time

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
        assert untimely.told(kind) in refusal.sentence
        assert not any(name in refusal.hint for name in rounds.TABLE)
        # What the server itself says too late is nobody's to mend.
        assert refusal.hint or kind == "SubmissionRefused"
        if not late:
            for allowed in rounds.allowed(phase):
                assert untimely.WORDS[allowed] in refusal.sentence and allowed not in refusal.sentence.replace(kind, "")
    refuses("phase_wrong", story.tell, "RoundDefined", {})


def test_every_record_of_a_round_has_words_and_a_close_that_can_not_move_yet_has_a_way_on():
    assert set(untimely.WORDS) == set(rounds.TABLE)
    for phase in (Phase.DRAFT, Phase.SEALED):
        refusal = refuses("phase_wrong", until(phase).tell, "ClosingExtended", {}, by=None)
        assert "only once the round is open" in refusal.hint and "void" in refusal.hint


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


def test_one_entry_has_one_micro_batch_which_is_the_batch_of_32_halved():
    story = until(Phase.CLOSED)
    plan = story.state.preparation_plan()
    # The whole batch is what a record without it means, and there is no other way to say it.
    for size in (0, 3, 12, 31, 32, 64):
        refuses("guard_failed", story.prepare, plan[0], micro_batch=size)
    refuses("record_invalid", story.prepare, plan[0], micro_batch=8.0)
    refuses("record_invalid", story.prepare, plan[0], micro_batch=None)
    story.prepare(plan[0], micro_batch=8)
    for other in ({}, {"micro_batch": 4}, {"micro_batch": 16}):
        refuses("guard_failed", story.prepare, plan[1], **other)
    failed = {"failed": {"reason": "out of memory", "log": digest("log")}}
    story.prepare(plan[1], drop="prepared candidates selected", micro_batch=8, **failed)
    # Another entry has another one.
    last = plan[-1]
    assert last[0] != plan[0][0]
    story.prepare(last)
    refuses("guard_failed", story.prepare, plan[-2], micro_batch=8)


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
