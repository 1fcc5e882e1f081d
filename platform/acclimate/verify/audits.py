"""Honest preparation and origin of the predictions: what only doing the work again can show."""

from acclimate.verify.audit import Audit
from acclimate.verify.report import NotChecked


def honest(audit: Audit) -> str:
    """A second operator, declared before the round opened, made drawn preparations again and found the same."""
    if audit.competition.round.audits == 0:
        raise NotChecked(
            "the round declared no drawn re-runs (audits = 0), so no second operator prepared a model again; that each entry"
            " was prepared by the recipe, and by nothing else, is the evaluator's word"
        )
    raise NotChecked("this version does not verify the audits of preparations")


def rerun(audit: Audit) -> str:
    """The auditor's own machine prepared and evaluated an entry again."""
    raise NotChecked(
        "the bundle holds no weights; that the logged models gave the logged predictions is the evaluator's word"
    )
