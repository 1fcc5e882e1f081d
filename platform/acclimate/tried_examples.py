"""The file of scores by example that an evaluation at home leaves: its columns, and whose scores they are."""

import tempfile
from pathlib import Path
from typing import Any

from acclimate import files
from acclimate_competitions import tables
from acclimate_competitions.errors import Refusal

SUMMARY = "preparation.json"
"""Written last into the folder of a preparation, which holds <task>/<seed>/ with each prepared model: what `prepare` gives back."""


def named(entrant: str | None, model: Path) -> str:
    """Whose scores a model's are: the name given, that of the model's folder, or of a prepared model the folder of its preparation.

    Raises:
        Refusal: request_invalid: a blank name, or none where the folder is called by a number alone.
    """
    if entrant is not None:
        if not entrant.strip():
            raise Refusal("request_invalid", "the entrant's name is blank", hint="--entrant NAME")
        return entrant
    folder = model.resolve()
    # A prepared model's folder is called by its seed, and two entrants' seeds are the same numbers.
    whole = folder.parent.parent
    if (whole / SUMMARY).is_file():
        folder = whole
    if not folder.name or folder.name.isdecimal():
        raise Refusal(
            "request_invalid",
            f"whose scores are they? {str(model)!r} is called by a number alone",
            hint="--entrant NAME",
        )
    return folder.name


def write(rows: list[dict[str, Any]], path: Path, *, entrant: str, seed: int | None) -> None:
    """Write the rows of one model, as `rank`, `compare` and `stability` take them; a column seed where one is given.

    Raises:
        Refusal: as files.write.
    """
    import pyarrow as pa

    text, numbers = pa.string(), pa.list_(pa.float64())
    columns = {"entrant": text, "task": text, "example": text, "cluster": text, "target": text}
    columns |= {"choices": pa.list_(text), "loglikelihoods": numbers, "text": text}
    columns |= {"metric": text, "score": pa.float64(), "reason": text}
    columns |= {"seed": pa.int64()} if seed is not None else {}
    schema = pa.schema(list(columns.items()))
    with tempfile.TemporaryDirectory(prefix="acclimate-") as folder:
        draft = Path(folder) / "examples.parquet"
        tables.write(
            pa.Table.from_pylist([{"entrant": entrant, "seed": seed, **row} for row in rows], schema=schema), draft
        )
        files.write(path, draft.read_bytes(), mode=0o644)
