"""Host memory that drives read from and write to without a copy."""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from typing import Protocol
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from ..util.process import the
from ..util.sizes import PAGE, pages
from .host_allocator import in_huge_pages

_HUGE = 2 << 20  # bytes of a huge page


class Reader(Protocol):
    """A copy that reads from host memory."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""


class PageLocked:
    """Page-locked memory for what comes and goes: locked once, handed out in whole pages, and kept for the next who
    asks for as many, once nobody refers to it any more.

    torch's own allocator rounds up to the next power of two. `nbytes`: what is locked so, in use or not.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._free: dict[tuple[int, int], list[_Mapped]] = {}  # by device and bytes
        self._reading: WeakValueDictionary[int, _Mapped] = WeakValueDictionary()  # by address
        self._lock = threading.RLock()

    def take(self, nbytes: int, device: torch.device | None = None) -> Tensor:
        """Return uint8 [pages(nbytes)], at least a page, page-aligned, with any content, for copies of a CUDA device,
        by default the current one.
        """
        size, index = max(pages(nbytes), PAGE), _index(device)
        with self._lock:
            free = self._free.setdefault((index, size), [])
            at = next((k for k, x in enumerate(free) if x.reader is None or x.reader.done), None)
            memory = self._new(size, index) if at is None else free.pop(at)
        if memory is None:
            return _by_torch(size)
        memory.reader = None
        lent = memoryview(memory)
        finalize(lent, free.append, memory).atexit = False  # tensors keep `lent`
        return torch.frombuffer(lent, dtype=torch.uint8)

    def keep(self, x: Tensor, reader: Reader) -> None:
        """Hand out the memory of `x` no more until `reader` is done."""
        memory = self._reading.get(x.data_ptr())
        if memory is not None:
            memory.reader = reader

    def release(self) -> None:
        """Unlock what nobody uses."""
        with self._lock:
            for free in self._free.values():
                self.nbytes -= sum(map(len, free))
                free.clear()

    def _new(self, size: int, index: int) -> _Mapped | None:
        try:
            memory = _locked(size, index)
        except MemoryError:
            self.release()
            memory = _locked(size, index)
        if memory is not None:
            self.nbytes += size
            self._reading[memory.address] = memory
        return memory


class ForCopies(PageLocked):
    """What a device is copied to, on one stream, which first waits for copies back that the device has waited for."""


class ForDrives(PageLocked):
    """What drives read to and write from. A copy to a device that reads it tells `keep`."""


def release() -> None:
    """Unlock all that nobody uses."""
    for kind in (ForCopies, ForDrives):
        the(kind).release()


def aligned(nbytes: int) -> Tensor:
    """Return uint8 [pages(nbytes)] on the host, page-aligned, page-locked if there is CUDA, with any content.

    `buffer[:n].view(dtype)` is a tensor of another dtype in it.
    """
    if nbytes < 0:
        raise ValueError(f"aligned: nbytes must be 0 or more, not {nbytes}.")
    size = pages(nbytes)
    if torch.cuda.is_available():
        return the(ForDrives).take(size)[:size]
    memory = _in_huge_pages(size + _HUGE)
    start = -memory.data_ptr() % _HUGE
    return memory[start : start + size]


def like(x: Tensor, device: torch.device) -> Tensor:
    """Return memory on the host for a copy of `x` [any shape], which fills its memory, from a CUDA device."""
    if not x.numel():
        return torch.empty_like(x, device="cpu")
    return the(ForCopies).take(x.nbytes, device)[: x.nbytes].view(x.dtype).as_strided(x.shape, x.stride())


def locked(size: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return zeros [size] on the host, page-aligned, page-locked if there is CUDA, unlocked when nobody refers to
    them. `device`: whose copies it is for; by default the current one's.
    """
    nbytes = pages(size * dtype.itemsize)
    if not size:
        return torch.zeros(0, dtype=dtype)
    if not torch.cuda.is_available():
        memory: mmap.mmap | None = in_huge_pages(mmap.mmap, nbytes)
    else:
        memory = _locked(nbytes, _index(device))
    if memory is None:
        return _by_torch(nbytes).zero_().view(dtype)[:size]
    return torch.frombuffer(memory, dtype=dtype, count=size)


def _locked(nbytes: int, index: int) -> _Mapped | None:
    """Return zeros that are page-locked for a CUDA device; None if the driver does not."""
    memory = in_huge_pages(_Mapped, nbytes)
    return memory if memory.lock(index) else None


def _by_torch(nbytes: int) -> Tensor:
    """Return page-aligned memory of torch's allocator, which is locked in another way."""
    memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=True)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + nbytes]


def _index(device: torch.device | None) -> int:
    return torch.cuda.current_device() if device is None or device.index is None else device.index


class _Mapped(mmap.mmap):
    """Memory that CUDA may copy directly once it is locked. Tensors in it keep it alive."""

    address = 0
    index = 0  # of the device
    reader: Reader | None = None

    def lock(self, index: int) -> bool:
        """Page-lock the mapping for a device. Return whether the driver did."""
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        if int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0)):
            forget_error()
            return False
        self.address, self.index = address, index
        return True

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.synchronize(self.index)  # a copy may be under way
            torch.cuda.cudart().cudaHostUnregister(self.address)


def forget_error() -> None:
    """Take CUDA's last error, which the next kernel launch would otherwise raise as its own."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device="cuda").zero_()


def _in_huge_pages(nbytes: int) -> Tensor:
    """Use huge pages: drives get memory page by page, and with 2 MiB pages transfers were 1.5 times as fast as with 4
    KiB.
    """
    return torch.frombuffer(in_huge_pages(mmap.mmap, nbytes), dtype=torch.uint8)
