"""Evaluations and rankings of a round: what its rules take, and in which order."""

from stories import digest, refuses, until

from acclimate_competitions.phases import Phase


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
