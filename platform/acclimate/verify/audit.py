"""One audit under way: the bundle, what the auditor brought along, and what the checks have shown so far."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from acclimate.hand_overs import Chain
from acclimate.log import Checkpoint, Tree, Verifier
from acclimate.log_keys import LogKeys
from acclimate.verify.files import Bundle
from acclimate_competitions.definition import Competition
from acclimate_competitions.digests import leaf_hash
from acclimate_competitions.phases import EvaluationKey, Round
from acclimate_competitions.ranking import Ranking
from acclimate_competitions.records import Record


@dataclass
class Audit:
    """The state of one audit.

    The fields below `work` are facts. Each is set by the check named beside it, and read only by checks whose `needs` name
    that one, so no fact is read before it was shown.

    Attributes:
        bundle: the files under audit.
        log_keys: the log's keys that the auditor got elsewhere, if any: the newest, and those that were given up.
        witnesses: vkeys of witnesses that the auditor got elsewhere.
        work: a temporary folder, for the opened holdout.
        rerun: makes an entry's preparations and evaluations again, and says how many agree; raises Failed or NotChecked.
    """

    bundle: Bundle
    log_keys: LogKeys | None
    witnesses: tuple[str, ...]
    work: Path
    rerun: "Rerun | None" = None
    log: Verifier = field(init=False)  # checkpoint: the key that keys.json names
    chain: Chain = field(init=False)  # checkpoint: all keys of the log, by its hand-overs
    note: Checkpoint = field(init=False)  # checkpoint
    records: list[Record] = field(init=False)  # records: of each log entry
    first: int = field(init=False)  # round: log index of its RoundDefined
    last: int | None = field(init=False, default=None)  # round: log index of its last record; None before
    competition: Competition = field(init=False)  # definition
    round: Round = field(init=False)  # rules
    manifests: dict[str, Mapping[str, Any]] = field(init=False)  # submissions: manifest by commitment
    documents: dict[int, bytes] = field(init=False)  # shares: share document by index
    secret: bytes = field(init=False)  # key
    opened: dict[str, Path] = field(init=False)  # opening: the files in the seal
    holdout: dict[str, pa.Table] = field(init=False)  # holdout: by task
    plan: dict[str, dict[str, list[EvaluationKey]]] = field(init=False)  # predictions: by entrant and task
    scores: dict[str, pa.Table] = field(init=False)  # scores, majority: recomputed, by entrant
    ranking: Ranking = field(init=False)  # ranking: recomputed

    @property
    def log_key(self) -> str | None:
        """The newest of the log's keys that the auditor got elsewhere."""
        return self.log_keys.newest if self.log_keys is not None else None

    @cached_property
    def leaves(self) -> list[bytes]:
        """The bytes of each log entry."""
        return self.bundle.lines("entries.jsonl")

    @cached_property
    def tree(self) -> Tree:
        """The Merkle tree over the entries."""
        return Tree(map(leaf_hash, self.leaves))


Rerun = Callable[[Audit], str]
"""Makes an entry again from a bundle that the checks before it have gone through."""
