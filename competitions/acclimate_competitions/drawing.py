"""Draws that nobody chose: which preparations a second operator makes again, which rows of a private holdout are opened.

A draw takes `count` different numbers below `of`, in the order drawn, from a seed: the i-th block is sha256(seed ‖ i as unsigned 64-bit
big-endian), i = 0, 1, …; its first 8 bytes, big-endian, are a number x. x ≥ 2^64 − (2^64 mod of) is passed over, so that all numbers are
equally likely; x mod of is taken unless it was before.

Seeds:

    jobs   sha256("acclimate/job-draw/v1" ‖ 0x00 ‖ secret ‖ the log entry of PreparationFinished)
    rows   sha256("acclimate/row-draw/v1" ‖ 0x00 ‖ root of the log whose last entry is HoldoutOpened)

The secret (32 bytes) is the auditor's: RoundDefined holds its digest, AuditDrawn the secret itself. So who prepared the models did not know which
would be made again, and the auditor did not choose. The root is fixed once the row root has long been so; who runs the log
could try several receipt times for HoldoutOpened, and see several draws: a limit that docs/threat-model.md names.
"""

import hashlib

ROWS_OPENED = 32
"""How many rows of a holdout that stays private are opened; all of them where it has fewer."""


def numbers(seed: bytes, *, count: int, of: int) -> list[int]:
    """The draw of `count` different numbers below `of`; all of them, in their drawn order, where `of` is not more.

    Args:
        seed: 32 bytes.
        count: how many, from 0.
        of: how many there are, from 0.
    """
    found: dict[int, None] = {}
    limit = 2**64 - 2**64 % of if of else 0
    block = 0
    while len(found) < min(count, of):
        drawn = int.from_bytes(hashlib.sha256(seed + block.to_bytes(8, "big")).digest()[:8], "big")
        block += 1
        if drawn < limit:
            found.setdefault(drawn % of)
    return list(found)


def job_seed(secret: bytes, finished: bytes) -> bytes:
    """The seed of the draw of jobs; `finished` is the log entry of PreparationFinished."""
    return hashlib.sha256(b"acclimate/job-draw/v1\x00" + secret + finished).digest()


def row_seed(root: bytes) -> bytes:
    """The seed of the draw of rows; `root` is that of the log up to and with HoldoutOpened."""
    return hashlib.sha256(b"acclimate/row-draw/v1\x00" + root).digest()
