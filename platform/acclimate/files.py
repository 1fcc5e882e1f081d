"""What every module that writes files for good needs of the operating system: a name that lasts, and whether the disk is full."""

import errno
import os
from pathlib import Path


def is_full(error: OSError) -> bool:
    """Whether a file could not be written because the disk, a quota or the largest size of a file is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sync_folder(folder: Path) -> None:
    """Make new and changed names in a folder last, also where the power goes; Windows has no such call, and does so by itself.

    Raises:
        OSError: where the folder can't be opened.
    """
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
