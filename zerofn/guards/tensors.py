"""Whether tensors still hold what they held: by version, by address, and small ones on the host by their bytes.

A version counts what torch writes. What NumPy or `.data` write has none: the bytes of a small tensor tell of it. A
larger one may change so unnoticed; a captured step reads its elements when it runs, so it computes with the new ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..util.crc32 import crc32

SMALL = 4096  # bytes of a tensor or an array that is compared byte by byte
SUMMED = 1 << 20  # bytes of an array, which has no version, that is compared by its checksum: 0.1 ms a step

_version, _raw = attrgetter("_version"), attrgetter("raw")


class Contents:
    """What tensors and arrays hold now. `hold` says whether they still do."""

    def __init__(self, values: Iterable[Any]) -> None:
        values = list(values)
        self._arrays = [(x, _bytes_of(x)) for x in values if isinstance(x, np.ndarray)]
        self._counted = [x for x in values if isinstance(x, Tensor) and not x.is_inference()]
        self._versions = list(map(_version, self._counted))
        self._placed = [x for x in values if _has_address(x)]
        self._addresses = list(map(Tensor.data_ptr, self._placed))
        self._memory = [
            (ctypes.c_char * n).from_address(address)
            for x, address in zip(self._placed, self._addresses, strict=True)
            if (n := _small_size(x)) and address
        ]
        self._bytes = list(map(_raw, self._memory))

    def hold(self) -> bool:
        """Whether all of them hold what they held."""
        return (
            list(map(_version, self._counted)) == self._versions
            and list(map(Tensor.data_ptr, self._placed)) == self._addresses  # first: the old memory may be gone
            and list(map(_raw, self._memory)) == self._bytes
            and all(_bytes_of(x) == was for x, was in self._arrays)
        )


def contents_of(x: Any) -> tuple[Any, ...]:
    """Return what tells of most changes to a tensor or an array: version, address, and the bytes of a small one."""
    if isinstance(x, np.ndarray | np.generic):
        return (_bytes_of(x),)
    version = None if x.is_inference() else x._version
    if not _has_address(x):
        return (version,)
    address, n = x.data_ptr(), _small_size(x)
    return (version, address, ctypes.string_at(address, n)) if n and address else (version, address)


def _has_address(x: Any) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and x.device.type != "meta"


def _small_size(x: Tensor) -> int:
    """Return the bytes of a small dense tensor in host memory; 0 for any other."""
    n = x.numel() * x.element_size()
    return n if n <= SMALL and x.device.type == "cpu" and x.is_contiguous() else 0


def _bytes_of(x: Any) -> Any:
    """Return what an array holds: its bytes, the checksum of a larger one, the address of one that is larger still."""
    if x.nbytes <= SMALL and x.dtype != object:
        return x.tobytes()
    return crc32(np.ascontiguousarray(x)) if x.nbytes <= SUMMED and x.dtype != object else x.ctypes.data
