"""Honest preparation and origin of the predictions: what only doing the work again can show.

1. honest: a second operator, named before the round opened, made drawn preparations again. That the secret is the one committed to, that
   the draw follows from it and PreparationFinished, that no share was released before each of them agreed, and that no agreement
   contradicts its own values, check `rules` has shown by its fold. Here it is counted, and what does not agree is named. Equal bytes show an honest
   preparation; a validation nll within the tolerance shows a model that does as well on the validation split, however it was made. Of what the
   organizer gave up no re-run shows anything, and so the whole is not shown.
2. rerun: whoever verifies has made an entry's preparations and evaluations again. What does it is handed in: this package runs no model.
"""

from acclimate.verify.audit import Audit
from acclimate.verify.hardware import declared, undeclared
from acclimate.verify.report import Failed, NotChecked
from acclimate_competitions import records
from acclimate_competitions.phases import PreparationKey, Round


def honest(audit: Audit) -> str:
    """A second operator, declared before the round opened, made drawn preparations again and found the same."""
    state, asked = audit.round, audit.competition.round.audits
    if asked == 0:
        raise NotChecked(
            "the round declared no drawn re-runs (audits = 0), so no second operator prepared a model again; that each entry"
            " was prepared by the recipe, and by nothing else, is the evaluator's word"
        )
    assert state.auditor is not None, "a definition with audits names an auditor, and RoundDefined the same"
    who = state.auditor["name"]
    if state.drawn is None:
        raise NotChecked(f"{who} has not drawn the {asked} preparations to make again")
    for key, record in state.audited.items():
        if not record["agrees"]:
            raise Failed(
                f"PreparationAudited of {_named(state, key)}",
                f"made again by {who} on {record['hardware']}, it does not agree: {record['reason']}",
            )
    missing = [key for key in state.drawn if key not in state.audited]
    if missing:
        raise NotChecked(
            f"{who} has made {len(state.audited)} of {len(state.drawn)} drawn preparations again; of {_named(state, missing[0])}"
            " the log has no outcome"
        )
    if not state.drawn:
        raise NotChecked("the round has no preparation, so none could be drawn")
    if doubts := [doubt for doubt in (_given_up(state, who), _of_the_class(state, who)) if doubt]:
        raise NotChecked("; ".join(doubts))
    return (
        f"{len(state.drawn)} of {len(state.preparations)} preparations drawn and made again by {who}: {_counted(state)}"
    )


def _given_up(state: Round, who: str) -> str:
    """What is not shown since the organizer gave up drawn preparations, and how the others did; empty where none was given up.

    That it was the organizer, and for which reason, the evaluator says, whose key signs the record.
    """
    drawn, lost = state.drawn or (), state.drawn_given_up
    if not lost:
        return ""
    named = f"{_named(state, lost[0])}{' and others' if len(lost) > 1 else ''}"
    left = len(drawn) - len(lost)
    others = f"the other {left} were made again by {who}: {_counted(state)}" if left else "no other was drawn"
    return (
        f"{len(lost)} of {len(drawn)} drawn preparations ({named}) were given up by the round's organizer, as the evaluator says, so that no"
        f" re-run shows whether they were beyond mending; {others}"
    )


def _of_the_class(state: Round, who: str) -> str:
    """Why an agreement by numbers is not counted for which the evaluator had to name hardware that the definition does not; empty if all are.

    Which hardware a preparation ran on, its evaluator says; naming another class than the auditor's is all it takes to be asked for no equal bytes.
    """
    for key in _by_numbers(state):
        named = state.prepared[key]["hardware"]
        if undeclared(state.competition, [named]):
            return (
                f"{who}'s re-run of {_named(state, key)} has other bytes and agrees by a validation nll only, since the evaluator says that"
                f" the first ran on {named!r}; the definition declares {declared(state.competition)!r}. That it was prepared by the recipe is the"
                " evaluator's word"
            )
    return ""


def _by_numbers(state: Round) -> list[PreparationKey]:
    """The drawn preparations whose re-run agrees without equal bytes."""
    return [
        key
        for key, record in state.audited.items()
        if record["prepared"] not in (None, state.prepared[key].fields.get("prepared"))
    ]


def _counted(state: Round) -> str:
    """How many of the re-runs agree by what, without those of what was given up."""
    within = _by_numbers(state)
    made = [record for key, record in state.audited.items() if not records.was_given_up(state.prepared[key])]
    failed = sum(record["prepared"] is None for record in made)
    equal = len(made) - len(within) - failed
    said = [f"{equal} with equal bytes"] if equal else []
    if within:
        most = max(state.audited[key]["tolerance"] for key in within)
        ran = [record["hardware"] for record in state.prepared.values()]
        named = sorted({state.prepared[key]["hardware"] for key in within})
        classes = ", ".join(f"{name} (of {ran.count(name)} in {len(ran)} preparations)" for name in named)
        said.append(
            f"{len(within)} by a validation nll within {most:g} only, the evaluator naming other hardware than the auditor's: {classes}"
        )
    if failed:
        said.append(f"{failed} failed likewise")
    return ", ".join(said)


def _named(state: Round, key: PreparationKey) -> str:
    submission, task, seed = key
    entrant = next(entry.entrant for entry in state.entries if entry.submission == submission)
    return f"{entrant}, {task}, seed {seed}"


def rerun(audit: Audit) -> str:
    """The auditor's own machine prepared and evaluated an entry again."""
    if audit.rerun is None:
        raise NotChecked(
            "the bundle holds no weights; that the logged models gave the logged predictions is the evaluator's word."
            " With an entrant's files: --rerun ENTRANT --models DIR"
        )
    return audit.rerun(audit)
