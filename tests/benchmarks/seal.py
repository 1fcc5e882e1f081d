"""Sealing beside plain SHA-256 and the `age` command, over the same bytes in the same run: least wall and processor time of some tries.

Three ways of spending the time are told apart: what one thread takes (SHA-256 alone), what sealing takes in all (processor time), and what
it takes on this many cores (wall). Files lie in memory where there is room, since a slow disk would hide what is measured; the seal of
a folder on a disk is measured beside it, with its bytes safely on that disk.
"""

import hashlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyrage
from cryptography.cobblestone import Cobblestone256Encryptor

from acclimate import rows, sealing
from acclimate.blocks import BLOCK

MEBIBYTES = 2048
ROWS_MEBIBYTES = 256
ROW_BYTES = (100, 4096)
TRIES = 5
RECIPIENT = str(pyrage.x25519.Identity.generate().to_public())

Cost = tuple[float, float]
"""Wall and processor seconds, children's included."""


def cost(works: dict[str, Callable[[], object]]) -> dict[str, Cost]:
    """The least of several tries of each; the tries take turns, so that what else the machine does meets all of them."""
    found: dict[str, list[Cost]] = {name: [] for name in works}
    for _ in range(TRIES):
        for name, work in works.items():
            began, before = time.perf_counter(), sum(os.times()[:4])
            work()
            found[name].append((time.perf_counter() - began, sum(os.times()[:4]) - before))
    return {name: (min(c[0] for c in costs), min(c[1] for c in costs)) for name, costs in found.items()}


def sha256(path: Path) -> None:
    """What everything is compared with."""
    with path.open("rb") as stream:
        hashlib.file_digest(stream, "sha256")


def blob(folder: Path, mebibytes: int) -> tuple[Path, dict[str, Path]]:
    """Random bytes in one file that the one row names, and the holdout of both."""
    path, state = folder / "blob", hashlib.sha256()
    with path.open("wb") as stream:
        for _ in range(mebibytes):
            piece = os.urandom(BLOCK)
            state.update(piece)
            stream.write(piece)
    table = folder / "one.parquet"
    named = [{"sha256": f"sha256:{state.hexdigest()}", "size": mebibytes * BLOCK}]
    pq.write_table(pa.table({"example": ["one"], "blob": named}), table)
    return path, {"one.parquet": table, f"blobs/{state.hexdigest()}": path}


def table(folder: Path, mebibytes: int, row: int) -> tuple[Path, dict[str, Path]]:
    """Rows of so many bytes in one uncompressed Parquet file, and the holdout of it."""
    path = folder / f"rows-{row}.parquet"
    schema = pa.schema([("example", pa.string()), ("input", pa.string()), ("target", pa.string())])
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for part in range(0, mebibytes, 16):
            count = (16 * BLOCK) // row
            texts = [os.urandom(row // 2).hex() for _ in range(count)]
            names = [f"{part}-{i}" for i in range(count)]
            writer.write_table(pa.table({"example": names, "input": texts, "target": ["a"] * count}))
    return path, {"rows.parquet": path}


def seal(files: dict[str, Path], out: Path) -> None:
    """The seal with all commitments, for three custodians."""
    recipients = [sealing.Recipient(f"custodian-{i}", RECIPIENT) for i in range(3)]
    sealing.seal(files, out, round_id="bench", recipients=recipients, k=2)


def age(path: Path, out: Path) -> None:
    """The `age` command on the same file."""
    subprocess.run(["age", "-r", RECIPIENT, "-o", str(out), str(path)], check=True)


def parts(path: Path, out: Path) -> dict[str, Callable[[], object]]:
    """What sealing must do at least once to each byte, alone and in one thread."""
    piece = os.urandom(BLOCK)

    def read() -> None:
        buffer = bytearray(BLOCK)
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass

    def encrypt() -> None:
        encryptor, buffer = Cobblestone256Encryptor(bytes(32), b""), bytearray(2 * BLOCK)
        for _ in range(path.stat().st_size // BLOCK):
            encryptor.update_into(piece, buffer)

    def write() -> None:
        out.unlink(missing_ok=True)
        with out.open("wb", buffering=0) as stream:
            for _ in range(path.stat().st_size // BLOCK):
                stream.write(piece)

    return {"reading it": read, "encrypting it": encrypt, "writing it": write}


def lines(mebibytes: int = MEBIBYTES) -> list[str]:
    """The results as Markdown."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 4 * (mebibytes + 1024) * BLOCK
    result = [
        f"{os.cpu_count()} cores; files lie {'in memory' if roomy else 'on the disk'}; the least of {TRIES} tries that take turns.",
        "",
        "| what | wall seconds | processor seconds | processor time in SHA-256's |",
        "| --- | --- | --- | --- |",
    ]
    ratios = []
    with tempfile.TemporaryDirectory(dir=memory if roomy else None) as fast, tempfile.TemporaryDirectory() as slow:
        folder, out = Path(fast), Path(fast) / "out"
        path, files = blob(folder, mebibytes)
        works: dict[str, Callable[[], object]] = {
            f"SHA-256 of {mebibytes} MiB": lambda: sha256(path),
            "seal, one file that a row names": lambda: seal(files, out),
        }
        if shutil.which("age"):
            works["age of the same"] = lambda: age(path, folder / "age")
        found = cost(works | parts(path, folder / "written"))
        found |= cost({"seal to a disk": lambda: seal(files, Path(slow) / "out")})
        plain, sealed, *others = list(found.values())
        result += [_row(name, value, plain) for name, value in found.items()]
        ratios.append(("SHA-256 / seal, wall", _ratio(plain[0], sealed[0])))
        if "age of the same" in found:
            ratios.append(("age / seal, wall", _ratio(others[0][0], sealed[0])))
            ratios.append(("age / seal, processor time", _ratio(others[0][1], sealed[1])))
        fully = sealed[1] / (os.cpu_count() or 1)
        ratios.append(("SHA-256 / seal, processor time, if every core were used fully", _ratio(plain[1], fully)))
        path.unlink()
        for row in ROW_BYTES:
            large, holdout = table(folder, ROWS_MEBIBYTES, row)
            name = f"of {ROWS_MEBIBYTES} MiB of rows of {row} bytes"
            found = cost(
                {
                    f"SHA-256 {name}": lambda large=large: sha256(large),
                    f"seal {name}": lambda holdout=holdout: seal(holdout, out),
                    f"its rows' commitments {name}": lambda holdout=holdout: rows.commit_tables(holdout, bytes(32)),
                }
            )
            plain, sealed, _ = found.values()
            result += [_row(name, value, plain) for name, value in found.items()]
            ratios.append((f"SHA-256 / seal, wall, {name}", _ratio(plain[0], sealed[0])))
            large.unlink()
    result += ["", "| ratio | |", "| --- | --- |", *(f"| {name} | {ratio:.2f} |" for name, ratio in ratios)]
    return result


def _row(name: str, value: Cost, plain: Cost) -> str:
    return f"| {name} | {value[0]:.2f} | {value[1]:.2f} | {_ratio(value[1], plain[1]):.2f} |"


def _ratio(one: float, other: float) -> float:
    """Not a number where the other took less than the clock tells: processor time comes in hundredths of a second."""
    return one / other if other else math.nan


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines(*map(int, sys.argv[1:]))) + "\n")
