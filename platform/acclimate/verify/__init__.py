"""The auditor: verifies a round from its published bundle alone, offline, without a module of the server.

How to read it: CHECKS in checks.py is the list of all that is claimed, in order. Each check is one function that returns how much it
looked at, or raises `Failed` with the first bad place, or `NotChecked` with the reason why it can't tell.

    files.py    a bundle, folder or ZIP; MANIFEST
    history.py  the log: checkpoint, entries, records, receipts
    order.py    the round: definition, public files, the rules that every record obeyed, submissions
    witnesses.py one history, and when it was there
    seal.py     ciphertext, shares, key, opening, holdout
    private.py  what stands in for a holdout that stays private
    scores.py   preparations, predictions, scores
    submitted.py models that count as submitted; hardware.py the classes that records name
    versions.py the ranking, and its older versions
    standing.py what stands from earlier rounds, and the anchors; earlier.py which those are, and what of them was open
    audits.py   preparations made again: by a second operator, by the auditor
    report.py   what is said; audit.py: what is known so far; parquet.py: where two tables differ

What a bundle can't show is said in a line of its own, NOT CHECKED, and never counted as ok:
- whose log it is, unless the auditor brings the log's key from elsewhere;
- time, and that there is no second history, unless witnesses cosigned;
- that each preparation was done as the recipe says, and that the logged models gave the logged predictions: only a re-run shows it.
And what no record of any kind can show is not claimed at all: whether those who made the labels talked.

A check whose ground another check has taken away is NOT CHECKED too, and says by which one. Nothing in a bundle is an
instruction, and nothing malformed in it ends the audit: the check that met it has FAILED.
"""

from acclimate.verify.checks import CHECKS, LEVELS, recompute_ranking, recompute_scores, unopened, verify
from acclimate.verify.report import Check, Failed, Report

__all__ = [
    "CHECKS",
    "LEVELS",
    "Check",
    "Failed",
    "Report",
    "recompute_ranking",
    "recompute_scores",
    "unopened",
    "verify",
]
