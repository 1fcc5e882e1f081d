"""Drawn re-runs: who draws, what is drawn, and that no share is released before each of them agrees."""

import base64

import pytest
from rounds_made import key as made
from stories import SECRET, STEPS, begin, competition, digest, until

from acclimate_competitions import drawing, records, rounds
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase


def refuses(code, act, /, *arguments, **named):
    with pytest.raises(Refusal) as caught:
        act(*arguments, **named)
    assert caught.value.code == code, caught.value
    return caught.value


AUDITS = 'audits = 2\nauditor = "lab"\naudit_tolerance = 0.01'


def audited(phase=Phase.PREPARED, audits=AUDITS):
    return until(phase, competition(audits=audits))


def test_the_release_waits_for_the_draw_and_for_every_drawn_job():
    story = audited()
    assert "has not drawn the 2" in refuses("guard_failed", story.release, 1).sentence
    first, second = story.draw().state.drawn
    assert "2 of the 2" in refuses("guard_failed", story.release, 1).sentence
    story.audit(first)
    assert "1 of the 2" in refuses("guard_failed", story.release, 1).sentence
    assert story.audit(second).release(1).release(2).state.phase is Phase.RELEASED
    assert rounds.fold(story.log, story.state.competition) == story.state


def test_the_draw_follows_from_the_secret_and_the_finished_preparation():
    story = audited().draw()
    finished = next(record for _, record in story.log if record.type == "PreparationFinished")
    plan = story.state.preparation_plan()
    seed = drawing.job_seed(SECRET, finished.encode())
    assert story.state.drawn == tuple(plan[n] for n in drawing.numbers(seed, count=2, of=len(plan)))
    refuses("conflict", story.draw)


def test_a_re_run_that_does_not_agree_leaves_only_voiding():
    story = audited().draw()
    first, second = story.state.drawn
    story.audit(first, agrees=False).audit(second)
    assert "does not agree" in refuses("guard_failed", story.release, 1).sentence
    refuses("conflict", story.audit, first)
    assert story.void(approvals=("custodian-a", "custodian-b")).state.phase is Phase.VOIDED


@pytest.mark.parametrize("by", ["organizer", "evaluator", "custodian-a", "ada", "stranger"])
def test_only_the_named_auditor_draws_audits_and_reports(by):
    story = audited()
    secret = {"secret": base64.b64encode(SECRET).decode()}
    refuses("signature_invalid", story.tell, "AuditDrawn", secret, by=by)
    first, _ = story.draw().state.drawn
    refuses("signature_invalid", story.audit, first, by=by)


def test_what_was_not_drawn_is_not_audited():
    story = audited()
    some = story.state.preparation_plan()[0]
    refuses("guard_failed", story.audit, some)
    story.draw()
    other = next(key for key in story.state.preparation_plan() if key not in story.state.drawn)
    refuses("guard_failed", story.audit, other)
    assert "above the declared" in refuses("guard_failed", story.audit, story.state.drawn[0], tolerance=0.02).sentence


def test_an_agreement_that_its_own_values_deny_is_none():
    story = audited().draw()
    first, second = story.state.drawn
    said = refuses("guard_failed", story.audit, first, prepared=digest("other")).sentence
    assert "only equal bytes agree" in said and digest("other") in said
    assert "outcome of its kind" in refuses("guard_failed", story.audit, first, prepared=None).sentence
    assert "gives its reason" in refuses("guard_failed", story.audit, first, agrees=False, reason=" ").sentence
    story.audit(first, prepared=digest("other"), hardware="another class", tolerance=0.01)
    assert story.audit(second).release(1).state.released


def test_a_failed_preparation_is_agreed_with_by_failing():
    story = until(Phase.CLOSED, competition(audits=AUDITS.replace("2", "10000")))
    failing = story.state.preparation_plan()[0]
    story.prepare(failing, drop="prepared candidates selected", failed={"reason": "no room", "log": digest("log")})
    story.prepare_all().finish("PreparationFinished").draw()
    assert "outcome of its kind" in refuses("guard_failed", story.audit, failing).sentence
    assert story.audit(failing, prepared=None).state.audited[failing]["agrees"]


@pytest.mark.parametrize("secret", ["", "AAAA", "x" * 44, "QUJD" * 11])
def test_another_secret_than_the_committed_one_draws_nothing(secret):
    with pytest.raises(Refusal) as caught:
        audited().draw(secret=secret)
    assert caught.value.code in ("record_invalid", "guard_failed")


def test_more_audits_than_jobs_are_all_jobs():
    story = audited(audits='audits = 10000\nauditor = "lab"').draw()
    assert sorted(story.state.drawn) == sorted(story.state.preparation_plan())
    assert story.audit(story.state.drawn[0]).state.audits_due == len(story.state.preparation_plan())


def test_a_round_without_an_auditor_takes_no_audit():
    story = until(Phase.PREPARED)
    for kind, fields in (("AuditDrawn", {"secret": "A" * 43 + "="}),):
        refuses("signature_invalid", story.tell, kind, fields, by="lab")


def test_the_auditor_reports_on_the_newest_ranking():
    story = audited(audits='audits = 0\nauditor = "lab"')
    for phase in (Phase.RELEASED, Phase.OPENED, Phase.EVALUATED, Phase.PUBLISHED):
        STEPS[phase](story)
    counts = {"ok": 28, "failed": 0, "not_checked": 1}
    fields = {"bundle": digest("MANIFEST"), "ranking": digest("ranking"), "checks": counts}
    refuses("guard_failed", story.tell, "RoundAudited", {**fields, "ranking": digest("other")}, by="lab")
    refuses("signature_invalid", story.tell, "RoundAudited", fields, by="organizer")
    assert story.tell("RoundAudited", fields, by="lab").state.reports[-1]["checks"] == counts


def test_the_round_names_the_auditor_of_its_definition():
    rules = competition(audits=AUDITS)
    for auditor in ({"name": "other", "ed25519": digest("x"), "draw": digest("d")},):
        with pytest.raises(Refusal, match="another auditor"):
            begin(rules, auditor=auditor)


def test_a_hand_over_has_its_form_and_belongs_to_no_round():
    fields = {"old": "log+1+A", "new": "log+2+B", "reason": "a new machine", "approvals": [{"by": "b", "sig": "s"}]}
    request = records.sign("LogKeyRotated", "", fields, key=made("log"))
    assert request["round"] == "" and request["by"] == records.public_text(made("log").public_key())
    record = records.Record("LogKeyRotated", "", audited().now, fields, request["by"], request["sig"])
    assert records.parse(record.encode()) == record
    assert b'"round"' not in record.encode()
    records.verify(record)
