"""Move one block between memory and a file, completely or with an error."""

from __future__ import annotations

import errno
import os

from ...util.errors import DiskError
from ...util.sizes import PAGE
from .files import File


def transfer(file: File, memory: memoryview, offset: int, writes: bool) -> None:
    """Write `memory` (whole pages) to the file from byte `offset` on, or fill it from there.

    Raises `OSError` as the drive does, and `DiskError` if the drive moves less than a page of the rest.
    """
    move = os.pwritev if writes else os.preadv
    done, nbytes = 0, len(memory)
    while done < nbytes:
        reached = done + move(file.fd, [memory[done:]], offset + done)
        if reached < nbytes:
            whole = reached - reached % PAGE  # a direct transfer continues at a page
            if whole == done:
                went = "written" if writes else "read"
                raise DiskError(f"{reached:,} of {nbytes:,} bytes were {went}", errno.EIO)
            reached = whole
        done = reached
