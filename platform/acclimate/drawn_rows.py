"""The rows of a private holdout that a draw opens to everybody, each with what leads from it to the seal's row root.

`rows.jsonl` of a bundle has a line for each of the drawn indices (drawing.py), in drawn order: canonical JSON of

    index   the row's global index (rows.py), a whole number
    row     the row, as rows.py says it
    salt    its salt, base64
    path    the inclusion proof in the tree over all rows, from the leaf's sibling up, each hash base64

so that the leaf is sha256(0x00 ‖ salt ‖ canonical row). A salt tells nothing of another row's.
"""

import base64
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from acclimate import archive, rows
from acclimate_competitions import digests, drawing
from acclimate_competitions.errors import Refusal


def drawn(root: bytes, count: int) -> list[int]:
    """The indices of the rows that are opened, in drawn order.

    Args:
        root: of the log up to and with HoldoutOpened.
        count: rows of the holdout.
    """
    return drawing.numbers(drawing.row_seed(root), count=drawing.ROWS_OPENED, of=count)


def lines(files: Mapping[str, Path], row_key: bytes, *, fields: Mapping[str, Any], root: bytes) -> list[bytes]:
    """The lines of rows.jsonl, in memory that does not grow with the holdout.

    Args:
        files: name in the archive -> file, of the opened holdout.
        row_key: what salts its rows.
        fields: of the HoldoutSealed record.
        root: of the log up to and with HoldoutOpened.

    Raises:
        Refusal: seal_mismatch, where the files have other rows than those sealed; splits_invalid.
    """
    wanted = drawn(root, fields["rows"])
    tree, kept = _Tree(sorted(wanted)), dict[int, tuple[bytes, bytes]]()
    for index, (salt, text) in enumerate(_salted(files, row_key)):
        tree.add(digests.leaf_hash(salt + text))
        if index in tree.paths:
            kept[index] = (salt, text)
    found = (tree.size, "sha256:" + tree.finish().hex())
    if found != (fields["rows"], fields["row_root"]):
        sealed = f"{fields['rows']} rows with root {fields['row_root']}"
        raise Refusal(
            "seal_mismatch", f"the opened holdout has {found[0]} rows with root {found[1]}, sealed were {sealed}"
        )
    return [digests.canonical(_document(index, *kept[index], tree.paths[index])) for index in wanted]


def _document(index: int, salt: bytes, text: bytes, path: list[bytes]) -> dict[str, Any]:
    return {
        "index": index,
        "row": digests.parse_canonical(text),
        "salt": base64.b64encode(salt).decode(),
        "path": [base64.b64encode(node).decode() for node in path],
    }


def _salted(files: Mapping[str, Path], row_key: bytes) -> Iterator[tuple[bytes, bytes]]:
    index = 0
    for name in archive.ordered(files):
        if name.endswith(rows.SUFFIX):
            for text in rows.texts(files[name], name=name):
                yield rows.salt(row_key, index), text
                index += 1


class _Tree:
    """An RFC 6962 tree that forgets all but one hash for each power of two, and the proofs of a few leaves.

    Attributes:
        size: leaves so far.
        paths: leaf -> its inclusion proof so far, from its sibling up.
    """

    def __init__(self, wanted: list[int]) -> None:
        self.size = 0
        self.paths: dict[int, list[bytes]] = {index: [] for index in wanted}
        self._wanted = wanted
        self._peaks: list[tuple[int, bytes]] = []  # the complete subtrees from the left: first leaf, hash

    def add(self, leaf: bytes) -> None:
        self._peaks.append((self.size, leaf))
        self.size += 1
        rest = self.size
        while not rest & 1:
            self._join()
            rest >>= 1

    def finish(self) -> bytes:
        """The root; nothing may be added after."""
        while len(self._peaks) > 1:
            self._join()
        return self._peaks[0][1] if self._peaks else digests.root_of_hashes([])

    def _join(self) -> None:
        middle, right = self._peaks.pop()
        start, left = self._peaks.pop()
        cut = bisect_left(self._wanted, middle)
        for index in self._wanted[bisect_left(self._wanted, start) : cut]:
            self.paths[index].append(right)
        for index in self._wanted[cut : bisect_left(self._wanted, self.size)]:
            self.paths[index].append(left)
        self._peaks.append((start, digests.node_hash(left, right)))
