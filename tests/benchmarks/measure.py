"""`make bench`: how long the parts of the demo take here, what sealing costs beside plain SHA-256, log appends. Writes Markdown to stdout."""

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import log_appends
import log_verify

from acclimate import sealing
from acclimate_competitions import records

MEBIBYTES = 256
TRIES = 3


def demo(folder: Path) -> list[tuple[str, float]]:
    """Seconds of the demo's parts: those it notes itself, and the phases of its round."""
    out = folder / "result.json"
    command = [sys.executable, "-m", "acclimate", "demo", "--data", str(folder / "data"), "--json", str(out)]
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = list(json.loads((folder / "data" / "timings.json").read_text("utf-8")).items())
    phases = json.loads(out.read_text("utf-8"))["phases"]
    for before, after in zip(phases, phases[1:], strict=False):
        seconds = records.parse_time(after["at"]) - records.parse_time(before["at"])
        rows.append((f"… of it {before['phase']} → {after['phase']}", seconds.total_seconds()))
    return [*rows, ("whole demo", time.monotonic() - began)]


def seal(folder: Path) -> list[tuple[str, float]]:
    """Seconds, the smallest of some tries, of SHA-256 over a file and of sealing it with all commitments."""
    blob = folder / "blob"
    blob.write_bytes(os.urandom(MEBIBYTES << 20))
    name = f"blobs/{hashlib.sha256(blob.read_bytes()).hexdigest()}"
    table = folder / "rows.parquet"
    _rows(table, name.removeprefix("blobs/"), blob.stat().st_size)
    identity = custody_recipient()
    plain, sealed = [], []
    for number in range(TRIES):
        began = time.perf_counter()
        with blob.open("rb") as stream:
            hashlib.file_digest(stream, "sha256")
        plain.append(time.perf_counter() - began)
        began = time.perf_counter()
        recipients = [sealing.Recipient(f"custodian-{i}", identity, None) for i in range(3)]
        files = {"rows.parquet": table, name: blob}
        sealing.seal(
            files, folder / f"sealed-{number}", round_id="bench", recipients=recipients, k=2, random=os.urandom
        )
        sealed.append(time.perf_counter() - began)
    return [(f"SHA-256 of {MEBIBYTES} MiB", min(plain)), (f"seal {MEBIBYTES} MiB", min(sealed))]


def custody_recipient() -> str:
    """A fresh age recipient."""
    import pyrage

    return str(pyrage.x25519.Identity.generate().to_public())


def _rows(path: Path, digest: str, size: int) -> None:
    import pyarrow as pa

    from acclimate_competitions import tables

    rows = {
        "example": ["one"],
        "input": ["see the blob"],
        "target": ["a"],
        "blob": [{"sha256": f"sha256:{digest}", "size": size}],
    }
    tables.write(pa.table(rows), path)


def main() -> None:
    """Measure, and print."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = demo(folder)
        sealing_rows = seal(folder)
        append_rows = log_appends.measure(folder / "appends")
        verify_rows = log_verify.measure(folder / "verify")
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}",
        "",
        "| part | seconds |",
        "| --- | --- |",
        *(f"| {name} | {seconds:.1f} |" for name, seconds in rows),
        "",
        "| seal | seconds |",
        "| --- | --- |",
        *(f"| {name} | {seconds:.2f} |" for name, seconds in sealing_rows),
        f"| ratio, SHA-256 / seal | {sealing_rows[0][1] / sealing_rows[1][1]:.2f} |",
        "",
        "| log | a second |",
        "| --- | --- |",
        *(f"| {name} | {rate:.0f} |" for name, rate in append_rows),
        "",
        "| audit | seconds |",
        "| --- | --- |",
        *(f"| {name} | {seconds:.2f} |" for name, seconds in verify_rows),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
