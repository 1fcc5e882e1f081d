"""Every refusal of Acclimate: one class, a code from one table, a sentence, a hint.

The table is the whole list: a code that is not in it can't be raised. Its second column is the HTTP status with which the
API answers; its third is the general meaning, printed in docs/errors.md. The sentence of a refusal names the
values at hand ("round closes 12:00, received 12:01"), the hint says what to do next.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """One kind of refusal.

    Attributes:
        status: HTTP status of the API's answer.
        meaning: what the code means in general, one sentence.
    """

    status: int
    meaning: str


CODES: dict[str, Code] = {
    # definitions, files, records
    "definition_invalid": Code(
        422, "The competition's definition has problems; all of them are listed with their lines."
    ),
    "correction_invalid": Code(
        422, "A correction of a round's results is malformed, corrects nothing, or does not fit the round's holdout."
    ),
    "splits_invalid": Code(
        422, "The competition's split files are missing, malformed, or share an example between splits."
    ),
    "record_invalid": Code(422, "A log record lacks a field, has one too many, or a value of the wrong form."),
    "not_canonical": Code(422, "Bytes that must be canonical JSON (RFC 8785) are not."),
    "signature_invalid": Code(403, "A signature does not verify, or its key is not one that may sign this."),
    "key_refused": Code(422, "A public key is malformed or of low order, or a key file is unsafe or unreadable."),
    # accounts
    "token_invalid": Code(401, "The API token is missing, unknown or malformed."),
    "role_missing": Code(403, "The account's role does not allow this action."),
    "invitation_invalid": Code(403, "The invitation is unknown, already used, or for another role."),
    "name_taken": Code(409, "The name is already in use by another account."),
    "name_invalid": Code(422, "A name is empty, too long, or holds control or direction characters."),
    # rounds
    "round_unknown": Code(404, "No round has this id, or more than one begins with it."),
    "round_exists": Code(409, "A round of this competition already has this name."),
    "phase_wrong": Code(409, "The round's phase does not allow this; the sentence says what is allowed now."),
    "too_early": Code(
        409,
        "The time for this has not come: by the database's clock, this machine's or the witnesses', or something must come first.",
    ),
    "round_closed": Code(409, "The round closed before this arrived, by the database's clock."),
    "guard_failed": Code(409, "A condition of the protocol for this transition does not hold."),
    "seal_mismatch": Code(422, "A seal, share or opening differs from what was committed to."),
    "holdout_private": Code(
        403, "The holdout of the round stays private: only its organizer and its auditor get this."
    ),
    "share_false": Code(
        422,
        "A share document does not match its commitment, or is of another round, seal or threshold; the sentence names whose.",
    ),
    "share_missing": Code(409, "Fewer shares are at hand than the threshold that opens the seal."),
    "share_unreadable": Code(
        422, "An envelope does not open with this key, or what it holds is not a well-formed share document."
    ),
    "rehearsal_missing": Code(409, "The rehearsal on the dummy seal has not succeeded yet."),
    "conflict": Code(409, "The same thing was sent before with other content."),
    # submissions
    "quota_exceeded": Code(429, "The entrant's quota for this round or day is used up."),
    "manifest_invalid": Code(422, "The submission's manifest has problems; all of them are listed."),
    "model_invalid": Code(422, "The model is not acceptable: wrong format, shapes, architecture or size."),
    "upload_mismatch": Code(422, "Uploaded bytes differ in size or digest from what was declared."),
    "submission_unknown": Code(404, "No submission has this id."),
    "entrant_unknown": Code(404, "The entrant is not registered for this round."),
    # log, bundle
    "log_inconsistent": Code(
        500,
        "The transparency log contradicts itself, or a checkpoint that a custodian, a client, a mirror or a receipt holds.",
    ),
    "proof_invalid": Code(422, "A receipt, checkpoint or proof does not parse or does not verify."),
    "rotation_invalid": Code(422, "A record by which a log's key hands over to another is forged or out of order."),
    "entry_unknown": Code(404, "The log has no such entry yet."),
    "quorum_missing": Code(
        503, "Fewer witnesses than the quorum have cosigned what is asked for; the sentence names those that have not."
    ),
    "witness_unreachable": Code(
        503, "A witness of the log does not answer, or not with a cosignature that can be used."
    ),
    "witness_ahead": Code(409, "A witness has cosigned a newer checkpoint of the log than the one at hand."),
    "witness_disagrees": Code(409, "A witness has seen another history of the log than the one at hand."),
    "bundle_invalid": Code(422, "The bundle is unreadable or lacks a file."),
    "backup_invalid": Code(
        422, "A backup is damaged, unfinished or no backup, or the place for it or for what it restores is taken."
    ),
    "scores_invalid": Code(422, "A score table has unknown columns, doubled keys or impossible values."),
    # machine
    "blob_unknown": Code(404, "No blob has this digest."),
    "blob_corrupt": Code(500, "A stored blob differs from its digest; it was set aside."),
    "data_version": Code(500, "The data folder or database was written by another version of Acclimate."),
    "database_unreachable": Code(503, "The database does not answer, or refuses the login; nothing was changed."),
    "blobs_unreachable": Code(503, "The store of blobs does not answer, refuses the login, or can't be written."),
    "other_installation": Code(500, "Database, blobs, keys and data folder do not belong to the same installation."),
    "lease_lost": Code(
        503, "Another process has the lease now: it leads, or has the log cosigned; this one's write was refused."
    ),
    "infeasible": Code(409, "No machine of the pool can take a job of this competition, or there is none."),
    "no_space": Code(507, "The disk or the memory of the machine is full; nothing was lost."),
    "busy": Code(503, "Another process holds what this one needs; try again shortly."),
    "server_unreachable": Code(503, "The server does not answer."),
    "file_unreadable": Code(422, "A file is missing or can't be read."),
    "time_invalid": Code(422, "A date has no offset, does not exist, or is not in RFC 3339."),
    "extra_missing": Code(500, "This command needs an extra that is not installed."),
    "job_failed": Code(500, "A job on a runner failed; the sentence gives the reason."),
    "runner_failed": Code(503, "A machine or its runner failed, not the job; the job is tried again."),
    "challenge_invalid": Code(
        403, "The challenge that a registration or a request signs is missing, not this server's, too old, or used."
    ),
    "code_other": Code(409, "This machine runs other code or libraries than the round was prepared with."),
    "rerun_undecided": Code(
        409, "A preparation made again can't be compared with the first: the machines differ too much."
    ),
    "limit_exceeded": Code(422, "A model needed more time or memory than the competition allows."),
    "work_blocked": Code(500, "Work of a round failed too often or can't be done here; an operator must look at it."),
    "request_invalid": Code(422, "The request's body or parameters are malformed; all problems are listed."),
    "not_found": Code(404, "There is nothing at this address."),
    "internal_error": Code(
        500, "The server failed in a way nobody foresaw; its log has the details under the request id."
    ),
    "config_invalid": Code(422, "A setting has an unknown name or an impossible value."),
}


class Refusal(Exception):
    """A clear no: code, sentence, hint.

    Args:
        code: a key of CODES.
        sentence: what is wrong, with the values at hand.
        hint: what to do next; empty where there is nothing to do.
        problems: where several things are wrong at once, one line each.
    """

    def __init__(self, code: str, sentence: str, *, hint: str = "", problems: Sequence[str] = ()) -> None:
        if code not in CODES:
            raise KeyError(f"refusal code {code!r} is not in CODES")
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence
        self.hint = hint
        self.problems = tuple(problems)

    @property
    def status(self) -> int:
        """HTTP status of the API's answer."""
        return CODES[self.code].status

    def of(self, what: str, *, hint: str = "") -> "Refusal":
        """The same refusal, saying first what it is of; with a hint, where it has none of its own."""
        return Refusal(self.code, f"{what}: {self.sentence}", hint=self.hint or hint, problems=self.problems)

    def document(self) -> dict[str, object]:
        """The refusal as JSON-ready data: {code, sentence, hint, problems}."""
        return {
            "code": self.code,
            "sentence": self.sentence,
            "hint": self.hint,
            "problems": list(self.problems),
        }


def installing(extras: str) -> str:
    """The hint how to install extras: from what was given, as the name on a public index may be somebody else's."""
    return f"in a clone of Acclimate: pip install '.[{extras}]'; or with the .whl file that you were given: 'FILE.whl[{extras}]'"
