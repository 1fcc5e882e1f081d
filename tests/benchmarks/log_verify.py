"""How long a stranger's audit of a log of 10,000 entries takes, and the whole audit of its bundle."""

import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "journeys"))
import rounds_made

from acclimate import verify
from acclimate_competitions import digests, records
from acclimate_competitions.records import Record

ENTRIES = 10_000


def bundle(folder: Path) -> tuple[Path, str]:
    """A small round's bundle whose log goes on with another round's signed records, and the log's vkey."""
    made = rounds_made.make(folder / "round")
    for number in range(ENTRIES - len(made.entries)):
        fields = {"entrant": f"entrant-{number}", "commitment": digests.of_bytes(b"%d" % number)}
        request = records.sign("SubmissionCommitted", "another-round", fields, key=rounds_made.key("ada"))
        made.now += timedelta(seconds=1)
        record = Record(request["type"], "another-round", made.now, fields, request["by"], request["sig"])
        made.entries.append(record.encode())
        made.tree.append(digests.leaf_hash(made.entries[-1]))
    size = len(made.entries)
    note = rounds_made.log.sign_checkpoint(made.signer, size, made.tree.root())
    made.notes[size] = rounds_made.cosigned(note, at=made.now)
    return made.write(folder / "bundle"), made.signer.vkey


def measure(folder: Path) -> list[tuple[str, float]]:
    """Seconds, the smallest of three: the log alone, and all levels."""
    path, key = bundle(folder)
    rows = []
    for name, levels in (("verify --log", ["log"]), ("verify", verify.LEVELS)):
        took = []
        for _ in range(3):
            began = time.perf_counter()
            report = verify.verify(path, log_key=key, levels=levels)
            took.append(time.perf_counter() - began)
            assert report.exit_code == 0, report.summary
        rows.append((f"{name}, {ENTRIES} log entries", min(took)))
    return rows
