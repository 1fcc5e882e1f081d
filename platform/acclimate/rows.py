"""Row commitments: one root over every row of the holdout, that opens single rows without the others.

A row's text is canonical JSON (RFC 8785) of {column: value}. Values: null; true, false; whole numbers up to ±(2^53 − 1); strings; lists;
structs as objects; floats as a string of the shortest decimal that gives the same 64-bit float back, written as RFC 8785 writes numbers, no NaN
or infinity; bytes as a base64 string; timestamps as RFC 3339 in UTC, with the shortest fraction of a second that says
the same, and only such as name a time zone; dates as YYYY-MM-DD. A file that a row names (an image, a structure) stands in it as the struct
{sha256: digest, size: bytes}, and in the archive as `blobs/` and the 64 hex digits.

The row with global index i, counted over the Parquet files in bytewise order of their names, is the leaf salt ‖ text of an RFC 6962
tree, with salt = HMAC-SHA256(row_key, i as unsigned 64-bit big-endian). The salt keeps a guessed row from being confirmed before the opening.
It is values that are committed to, not Parquet bytes, which change with the version and codec of the writer.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from acclimate import archive
from acclimate.row_texts import texts, views
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

__all__ = ["BLOBS", "SUFFIX", "Commitment", "check_blob", "commit", "commit_tables", "salt", "texts"]

SUFFIX = ".parquet"
BLOBS = "blobs/"


@dataclass(frozen=True)
class Commitment:
    """What the rows of a holdout are committed to with.

    Attributes:
        root: the RFC 6962 root over the salted rows, as a digest.
        count: how many rows.
        counts: rows of each Parquet file.
        blobs: name in the archive -> (digest, size) of each blob that a row names.
    """

    root: str
    count: int
    counts: Mapping[str, int]
    blobs: Mapping[str, tuple[str, int]]


def commit(files: Mapping[str, Path], row_key: bytes) -> Commitment:
    """Commit to the rows of Parquet files, in memory that grows with their pages, not with the files; blobs are checked.

    Args:
        files: name in the archive -> file; those that don't end in .parquet must be blobs that rows name.
        row_key: 32 bytes.

    Raises:
        Refusal: splits_invalid, where a file is not Parquet, a value can't be said in JSON, or a file is not named by any row.
    """
    result = commit_tables(files, row_key)
    for name, expected in result.blobs.items():
        with files[name].open("rb") as stream:
            check_blob(name, expected, digests.of_stream(stream))
    return result


def commit_tables(files: Mapping[str, Path], row_key: bytes) -> Commitment:
    """As `commit`, but of blobs only name and size are compared: whoever reads them anyway calls check_blob.

    Raises:
        Refusal: splits_invalid, as `commit`.
    """
    tree, counts, named = _Root(), dict[str, int](), dict[str, int]()
    salt_of = _salts(row_key)
    for name in archive.ordered(files):
        if not name.endswith(SUFFIX):
            continue
        before = tree.size
        for text in views(files[name], named, name=name):
            leaf = hashlib.sha256(b"\x00" + salt_of(tree.size))
            leaf.update(text)
            tree.add(leaf.digest())
        counts[name] = tree.size - before
    if not counts:
        raise Refusal("splits_invalid", "a holdout needs at least one Parquet file")
    if not tree.size:
        raise Refusal("splits_invalid", f"there are no rows in {', '.join(counts)}")
    blobs = {BLOBS + digest.removeprefix("sha256:"): (digest, size) for digest, size in named.items()}
    _check_named({name: path for name, path in files.items() if not name.endswith(SUFFIX)}, blobs)
    return Commitment("sha256:" + tree.root().hex(), tree.size, counts, blobs)


def check_blob(name: str, expected: tuple[str, int], found: tuple[str, int]) -> None:
    """Compare (digest, size) of a blob with what its row says.

    Raises:
        Refusal: splits_invalid.
    """
    if found != expected:
        raise Refusal(
            "splits_invalid",
            f"{name} is {found[0]} of {found[1]} bytes, its row says {expected[0]} of {expected[1]} bytes",
            hint="a row names a blob by the digest and the size of its bytes",
        )


def _check_named(blobs: Mapping[str, Path], named: Mapping[str, tuple[str, int]]) -> None:
    """Every file besides Parquet is named by a row, and every blob that a row names is there, of its size."""
    for name in sorted(set(named) | set(blobs)):
        if name not in blobs:
            raise Refusal("splits_invalid", f"a row names {named[name][0]}, but {name} is missing")
        if name not in named:
            raise Refusal("splits_invalid", f"{name} is neither a Parquet file nor a blob that a row names")
        digest, size = named[name]
        if (found := blobs[name].stat().st_size) != size:
            raise Refusal("splits_invalid", f"{name} is of {found} bytes, its row says {size} bytes of {digest}")


def salt(row_key: bytes, index: int) -> bytes:
    """What salts the row with this global index."""
    return _salts(row_key)(index)


def _salts(row_key: bytes) -> Callable[[int], bytes]:
    """HMAC-SHA256(row_key, index as unsigned 64-bit big-endian), its two keyed hashes begun once: rows are many and short."""
    key = (row_key if len(row_key) <= 64 else hashlib.sha256(row_key).digest()).ljust(64, b"\0")
    inner, outer = (hashlib.sha256(bytes(byte ^ pad for byte in key)) for pad in (0x36, 0x5C))

    def of(index: int) -> bytes:
        within, without = inner.copy(), outer.copy()
        within.update(index.to_bytes(8, "big"))
        without.update(within.digest())
        return without.digest()

    return of


class _Root:
    """An RFC 6962 root that grows leaf by leaf and remembers one hash for each power of two."""

    def __init__(self) -> None:
        self.size = 0
        self._peaks: list[bytes] = []  # the complete subtrees from the left; sizes are the bits of `size`

    def add(self, leaf: bytes) -> None:
        rest = self.size
        while rest & 1:
            leaf = digests.node_hash(self._peaks.pop(), leaf)
            rest >>= 1
        self._peaks.append(leaf)
        self.size += 1

    def root(self) -> bytes:
        if not self._peaks:
            return digests.root_of_hashes([])
        result = self._peaks[-1]
        for peak in reversed(self._peaks[:-1]):
            result = digests.node_hash(peak, result)
        return result
