"""How a round ends: published by whom and when, voided by whom, lapsed."""

import dataclasses
import functools
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds_made import public
from stories import (
    CLOSES,
    CUSTODIANS,
    RELEASE_BY,
    STEPS,
    TICK,
    Story,
    begin,
    competition,
    digest,
    key,
    refuses,
    until,
)

from acclimate_competitions import records, rounds
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase

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
