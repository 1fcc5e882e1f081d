"""What an audit says: numbered checks, each ok, FAILED or NOT CHECKED, in plain words, with the first bad place."""

import dataclasses
import errno
from dataclasses import dataclass
from typing import Any, Literal

from acclimate.files import is_full
from acclimate_competitions import reading
from acclimate_competitions.errors import Refusal

Status = Literal["ok", "FAILED", "NOT CHECKED"]


class Failed(Exception):
    """The evidence contradicts the claim.

    Args:
        where: the first bad file, byte, row, record or receipt.
        why: what is wrong there, with both values.
    """

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}")
        self.where = where
        self.why = why


class NotChecked(Exception):
    """There is no evidence for the claim, and none against it.

    Args:
        reason: what is missing, and what that leaves open.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Beside(Exception):
    """The claim is not one of this round, and nothing is said of it."""


def lacking(error: BaseException) -> Refusal | None:
    """What this machine lacks, where an exception comes of that: it is no evidence against a bundle, and none for it."""
    if (fault := reading.of_the_machine(error)) is None:
        return None
    code = (
        "file_unreadable"
        if isinstance(fault, OSError) and not is_full(fault) and fault.errno != errno.ENOMEM
        else "no_space"
    )
    why = (fault.strerror if isinstance(fault, OSError) else str(fault)) or type(fault).__name__
    return Refusal(
        code,
        f"this machine could not verify it: {why}; that says nothing about the bundle",
        hint="free some space, or name a folder that has it (TMPDIR=DIR), and verify it again",
    )


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        number: from 1, the same for the same check in every report.
        name: short and stable, for programs and for talking about it.
        meaning: ok: what has been shown; FAILED: what is wrong; NOT CHECKED: why, and what that leaves open.
        where: FAILED: the first bad place; ok: how much was looked at; otherwise empty.
    """

    number: int
    name: str
    status: Status
    meaning: str
    where: str = ""


@dataclass(frozen=True)
class Report:
    """The audit of one bundle; nothing FAILED means exit code 0.

    Attributes:
        bundle: the path as given.
        round: the round's id, empty where it could not be told.
    """

    bundle: str
    round: str
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that FAILED."""
        return tuple(check for check in self.checks if check.status == "FAILED")

    @property
    def exit_code(self) -> int:
        """0 if nothing FAILED, else 1."""
        return 1 if self.failed else 0

    @property
    def summary(self) -> str:
        """One sentence for people."""
        open_ = sum(check.status == "NOT CHECKED" for check in self.checks)
        passed = len(self.checks) - open_ - len(self.failed)
        if not self.failed:
            named = ", ".join(check.name for check in self.checks if check.status == "NOT CHECKED")
            return f"Nothing FAILED: {passed} checks ok, {open_} NOT CHECKED{f': {named}' if named else ''}."
        first = self.failed[0]
        count = f"{len(self.failed)} check{'s' if len(self.failed) > 1 else ''} FAILED"
        return f"{count} ({passed} ok, {open_} NOT CHECKED); the first: {first.name}, at {first.where}."

    def document(self) -> dict[str, Any]:
        """The report as JSON-ready data: {bundle, round, ok, summary, checks: [{number, name, status, meaning, where}]}."""
        return {
            "bundle": self.bundle,
            "round": self.round,
            "ok": not self.failed,
            "summary": self.summary,
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }
