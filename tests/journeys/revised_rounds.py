"""A made round (rounds_made.py) whose ranking was revised: the second version is computed by a third hand, with none of the code that judges again."""

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import made_bundles
import pyarrow as pa
import rounds_made

from acclimate_competitions import digests


@dataclass(frozen=True)
class Revised:
    """The round, with its second ranking; the first one; and what was corrected."""

    made: rounds_made.Made
    first: dict[str, Any]
    correction: dict[str, Any]

    def write(self, folder: Path) -> Path:
        """Write its bundle, with both versions."""
        self.made.write(folder)
        for name, document in (("1/ranking.json", self.first), ("2/correction.json", self.correction)):
            (folder / "versions" / name).parent.mkdir(parents=True)
            (folder / "versions" / name).write_bytes(digests.canonical(document))
        made_bundles.mend(folder)
        return folder


def play(folder: Path) -> Revised:
    """Play a round; then the first target of a task is wrong, and its second example counts for nobody."""
    made = rounds_made.make(folder)
    first, holdout, scores, predictions = made.ranking, dict(made.holdout), dict(made.scores), dict(made.predictions)
    table = holdout["tint"]
    names, targets = table["example"].to_pylist(), table["target"].to_pylist()
    targets[0] = next(choice for choice in rounds_made.TASKS["tint"] if choice != targets[0])
    correction = {"v": 1, "metrics": {}, "targets": {"tint": {names[0]: targets[0]}}, "void": {"tint": [names[1]]}}
    correction |= {"nonce": base64.b64encode(b"n" * 32).decode()}
    wrong = table.set_column(2, "target", pa.array(targets))
    made.holdout["tint"] = wrong.filter(pa.array([name != names[1] for name in names]))
    for name, found in predictions.items():
        if "-tint-" in name:
            keep = pa.array([example != names[1] for example in found["example"].to_pylist()])
            made.predictions[name] = found.filter(keep)
    second = rounds_made.rank(made)
    assert digests.of_json(second) != digests.of_json(first)
    made.holdout, made.predictions, made.scores = holdout, predictions, scores
    fields = {"ranking": digests.of_json(second), "policy": made.competition.ranking.digest, "reason": "mislabelled"}
    fields["correction"] = digests.of_json(correction)
    made.signed("RankingRevised", fields, by="organizer", keep=True)
    made.ranking = second
    return Revised(made, first, correction)
