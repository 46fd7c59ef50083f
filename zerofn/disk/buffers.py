"""Memory that drives read from and write to without a copy."""

from __future__ import annotations

import mmap
import sys
import threading
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..host_memory import in_huge_pages
from .files import PAGE, pages

if TYPE_CHECKING:
    from .engine import Request

_HUGE = 2 << 20  # bytes of a huge page


def aligned(nbytes: int) -> Tensor:
    """uint8 [pages(nbytes)] on the host, beginning at a page; page-locked where there is CUDA. Any content.

    `buffer[:n].view(dtype)` is a tensor of another dtype in it.
    """
    if nbytes < 0:
        raise ValueError(f"aligned: nbytes must be 0 or more, not {nbytes}.")
    size = pages(nbytes)
    if torch.cuda.is_available():
        memory, begin = torch.empty(size + PAGE, dtype=torch.uint8, device="cpu", pin_memory=True), PAGE
    else:
        memory, begin = _in_huge_pages(size + _HUGE), _HUGE
    start = -memory.data_ptr() % begin
    return memory[start : start + size]


def locked(size: int, dtype: torch.dtype) -> Tensor:
    """Zeros [size] on the host, beginning at a page; page-locked where there is CUDA, and no byte more than whole
    pages: torch's own allocator of such memory gives the next power of two, up to twice as much.
    """
    if not size:
        return torch.zeros(0, dtype=dtype)
    memory = in_huge_pages(_Mapped, pages(size * dtype.itemsize))
    out = torch.frombuffer(memory, dtype=dtype, count=size)
    if torch.cuda.is_available() and not memory.lock(out.data_ptr()):
        return torch.zeros(size, dtype=dtype, pin_memory=True)
    return out


class _Mapped(mmap.mmap):
    """Memory that CUDA's copies may read and write by themselves once it is locked; tensors in it keep it alive."""

    address = 0

    def lock(self, address: int) -> bool:
        """Page-lock all of it, which begins at `address`; -> whether the driver did."""
        runtime = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(address, len(self), 0)):
            return False
        self.address = address
        return True

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.synchronize()  # a copy may be on its way
            torch.cuda.cudart().cudaHostUnregister(self.address)


def _in_huge_pages(nbytes: int) -> Tensor:
    """Drives are told of memory page by page: with pages of 2 MiB transfers were 1.5 times as fast as with 4 KiB."""
    return torch.frombuffer(in_huge_pages(mmap.mmap, nbytes), dtype=torch.uint8)


class Ring:
    """`num_buffers` buffers of `nbytes` (in whole pages), made once and lent in turn."""

    def __init__(self, num_buffers: int, nbytes: int) -> None:
        if num_buffers < 1:
            raise ValueError(f"Ring: num_buffers must be 1 or more, not {num_buffers}.")
        buffers = [aligned(nbytes) for _ in range(num_buffers)]
        self._names = {b.data_ptr(): b for b in buffers}
        self._free: list[tuple[Tensor, Request | None]] = [(b, None) for b in buffers]
        self._given = threading.Condition()

    def take(self, timeout: float | None = None) -> Tensor:
        """A free buffer, uint8; waits until one is given back, and until what it was given back after is done.

        Raises `TimeoutError` after `timeout` seconds without one, and what that request raises.
        """
        with self._given:
            if not self._given.wait_for(lambda: self._free, timeout):
                raise TimeoutError(f"Ring.take: none of {len(self._names)} buffers was given back in {timeout} s.")
            ready = [i for i, (_, after) in enumerate(self._free) if after is None or after.done]
            buffer, after = self._free.pop(ready[0] if ready else 0)
        try:
            if after is not None:
                after.wait()
        except BaseException:
            self.give(buffer)
            raise
        return buffer

    def give(self, buffer: Tensor, after: Request | None = None) -> None:
        """Lend `buffer` out again once the request `after` is done. Raises `ValueError` for one that is not lent."""
        own = self._names.get(buffer.data_ptr())
        with self._given:
            if own is None or any(own is free for free, _ in self._free):
                raise ValueError("Ring.give: this buffer was not taken from this ring, or was given back already.")
            self._free.append((own, after))
            self._given.notify()
