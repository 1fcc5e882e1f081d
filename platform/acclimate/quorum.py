"""So many of certain witnesses, and what their cosignatures under a checkpoint say about the time.

A quorum is of a round, whose RoundDefined names the witnesses, or of an installation, whose settings do.

A cosignature has the second at which its witness saw the checkpoint. Of q witnesses, where q is the quorum, at least one is taken to be
honest. So a checkpoint was there *by* the q-th smallest of its times, and it was still the newest that the witnesses were shown *at* the q-th largest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from acclimate.log import SignedCheckpoint
from acclimate.notes import COSIGNATURE, Verifier
from acclimate_competitions import vkeys

_LAST_SECOND = 253_402_300_799  # of the year 9999: what a date can hold


@dataclass(frozen=True)
class Quorum:
    """So many of these witnesses.

    Attributes:
        witnesses: their keys, in the order in which RoundDefined or the settings list them.
        needed: how many of them are enough; 0 where none is asked for.
    """

    witnesses: tuple[Verifier, ...]
    needed: int

    @classmethod
    def of(cls, defined: Mapping[str, Any]) -> "Quorum":
        """The quorum of a RoundDefined's fields.

        Raises:
            Refusal: key_refused, where a witness's key is malformed or not one that cosigns.
        """
        return cls(tuple(parse_witness(text) for text in defined["witnesses"]), int(defined["quorum"]))

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The witnesses' vkeys."""
        return tuple(witness.text() for witness in self.witnesses)

    def reached(self, signed: SignedCheckpoint) -> bool:
        """Whether enough of these witnesses cosigned a checkpoint."""
        return len(self._times(signed)) >= self.needed

    def by(self, signed: SignedCheckpoint) -> datetime | None:
        """The moment by which the quorum had seen a checkpoint; None where fewer did, or none are asked for."""
        return moment(self._times(signed)[self.needed - 1]) if self.needed and self.reached(signed) else None

    def at(self, signed: SignedCheckpoint) -> datetime | None:
        """The latest moment at which the quorum still was shown a checkpoint; None where fewer saw it, or none are asked for."""
        return moment(self._times(signed)[-self.needed]) if self.needed and self.reached(signed) else None

    def missing(self, signed: SignedCheckpoint) -> list[str]:
        """Names of the witnesses that did not cosign a checkpoint."""
        return [witness.name for witness in self.witnesses if witness.text() not in signed.cosigned]

    def _times(self, signed: SignedCheckpoint) -> list[int]:
        return sorted(time for vkey, time in signed.cosigned.items() if vkey in self.keys)


def parse_witness(text: str) -> Verifier:
    """The verifier of a witness's vkey.

    Raises:
        Refusal: key_refused.
    """
    name, public = vkeys.parse_witness(text)
    return Verifier(name, COSIGNATURE, public)


def moment(seconds: int) -> datetime:
    """The time of a cosignature, in UTC; what no date can hold is the last that one can."""
    return datetime.fromtimestamp(min(seconds, _LAST_SECOND), UTC)
