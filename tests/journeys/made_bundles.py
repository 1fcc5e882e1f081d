"""The bundle of a made round, after the table of the protocol: without any code of bundle.py, so that writer and reader are held against a third hand."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate_competitions import digests, tables

if TYPE_CHECKING:
    from rounds_made import Made


def write(made: "Made", folder: Path, *, definition: str, defined: dict[str, Any], public: dict[str, Path]) -> None:
    """Write a played round's bundle.

    Args:
        made: the round.
        folder: where to.
        definition: text of its definition.
        defined: the fields of its RoundDefined.
        public: its public files, by name.
    """

    def put(name: str, data: bytes) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    put("definition.toml", definition.encode())
    for name, path in public.items():
        put(f"public/{name}", path.read_bytes())
    keys = {"origin": made.signer.origin, "threshold": defined["k"]}
    keys |= {name: defined[name] for name in ("log", "witnesses", "quorum", "organizer", "custodians")}
    put("keys.json", digests.canonical(keys))
    size = len(made.entries)
    put("checkpoint", made.notes[size].encode())
    for kept in made.kept:
        put(f"checkpoints/{kept}", made.notes[kept].encode())
    put("entries.jsonl", b"".join(entry + b"\n" for entry in made.entries))
    for index, text in made.receipts.items():
        put(f"receipts/{index}.tlog-proof", text.encode())
    lines = [{name: row[name] for name in ("entrant", "index", "manifest", "nonce")} for row in made.submissions]
    put("submissions.jsonl", b"".join(digests.canonical(line) + b"\n" for line in lines))
    put("holdout.sealed", (made.folder / "holdout.sealed").read_bytes())
    shares = [{"index": index, "document": json.loads(made.documents[index])} for index in (1, 3)]
    put("shares.json", digests.canonical(shares))
    opened = made.folder / "opened"
    for path in [path for path in opened.rglob("*") if path.is_file()]:
        put(f"holdout/{path.relative_to(opened).as_posix()}", path.read_bytes())
    for name in made.predictions:
        put(name, (made.folder / name).read_bytes())
    (folder / "scores").mkdir(exist_ok=True)
    for entrant, table in made.scores.items():
        tables.write(table, folder / "scores" / f"{entrant}.parquet")
    put("prepared.json", digests.canonical(made.prepared))
    put("ranking.json", digests.canonical(made.ranking))
    mend(folder)


def mend(folder: Path) -> None:
    """Write MANIFEST anew, as whoever changes a bundle would."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    lines = [f"{digests.of_file(folder / name)[7:]}  {name}\n" for name in names if name != "MANIFEST"]
    (folder / "MANIFEST").write_text("".join(lines), "utf-8")
