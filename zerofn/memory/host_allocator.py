"""Host memory: large tensors use huge pages, and malloc keeps what a step frees, or returns it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
from typing import TypeVar

import torch
from torch import Tensor

from ..dry_run.fake_machine import fake_machine

# glibc's malloc.h. Blocks from MMAP_THRESHOLD on are mapped one by one and unmapped when freed; what is free at the
# end of the heap goes back to the system when it is more than TRIM_THRESHOLD.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT = (1 << 31) - 1  # bytes: the most that the call accepts
Mapping = TypeVar("Mapping", bound=mmap.mmap)
_LARGE = 4 << 20  # bytes: two huge pages


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros [size]; on the host, from 4 MiB on, in huge pages if the system has them.

    An update reads and writes up to nine streams at once, and with pages of 4 KiB needs a new page every few
    hundred elements. In huge pages an update with bf16 moments took 0.86 of the time.
    """
    machine = fake_machine()
    if machine is not None:
        return machine.zeros(size, dtype, device)
    if device.type != "cpu" or size * dtype.itemsize < _LARGE:
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.frombuffer(in_huge_pages(mmap.mmap, size * dtype.itemsize), dtype=dtype, count=size)


def in_huge_pages(kind: type[Mapping], nbytes: int) -> Mapping:
    """Return a private mapping of `nbytes` zeros. Raises `MemoryError` if there is no room for it."""
    try:
        memory = kind(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes:,} bytes of host memory are not available: {error.strerror}.") from error
    with contextlib.suppress(OSError, AttributeError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@functools.cache
def map_large_blocks() -> bool:
    """Tell malloc to map each block from 1 MiB on separately, until a step is compiled. Return whether that worked.

    A new state is filled unit by unit, with temporary tensors between those that stay. Otherwise malloc soon takes
    blocks of up to 32 MiB from its heap, and the holes between them came to a byte per parameter.
    """
    return _tell((_M_MMAP_THRESHOLD, 1 << 20))


@functools.cache
def keep_freed_memory() -> bool:
    """Tell malloc to return nothing under 1 GiB to the system. Return whether that worked.

    A step frees as much as it takes, and the next one takes it again. New memory costs a page fault for every 4
    KiB, which were 1 to 4 % of a step; the peak is the same. It holds for the process, once a step was compiled for
    the host. `malloc_trim(0)` returns free memory. Other allocators (jemalloc, tcmalloc) keep memory by themselves.
    """
    map_large_blocks()  # never again after this
    return _tell((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, _KEPT))


@functools.cache
def return_freed_memory() -> bool:
    """Tell malloc to return blocks from 1 MiB on to the system, for the rest of the process. Return whether that
    worked.

    State is on drives because memory is short. A small block in the hole of a large one keeps the next large one
    out of it, so kept memory would grow by up to the gradients. A page fault costs little beside a drive.
    """
    keep_freed_memory()  # never again after this
    told = _tell((_M_MMAP_THRESHOLD, 1 << 20), (_M_TRIM_THRESHOLD, 1 << 20))
    if told:
        ctypes.CDLL(None).malloc_trim(0)
    return told


def _tell(*settings: tuple[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and not [x for x in settings if not mallopt(*x)]  # None: another C library
