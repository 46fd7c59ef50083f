"""Checksums of blocks, to notice a drive that returns other bytes than were written."""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable

from ...util.crc32 import crc32


def checksum(address: int, nbytes: int) -> int:
    """Return a checksum of host memory, 0 or more. It is the same within one process only, so it is never stored."""
    return function()(address, nbytes)


@functools.cache
def function() -> Callable[[int, int], int]:
    """Return the compiled checksum if there is one, else CRC-32, which is several times slower."""
    try:
        cpu = importlib.import_module("zerofn.ops.cpu")
    except ImportError:
        return _crc32
    return _crc32 if cpu.missing() else cpu.checksum


def _crc32(address: int, nbytes: int) -> int:
    return crc32((ctypes.c_char * nbytes).from_address(address))
