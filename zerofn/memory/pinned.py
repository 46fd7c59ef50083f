"""Host memory that drives read from and write to without a copy."""

from __future__ import annotations

import contextlib
import mmap
import sys

import torch
from torch import Tensor

from ..util.sizes import PAGE, pages
from .host_allocator import in_huge_pages

_HUGE = 2 << 20  # bytes of a huge page


def aligned(nbytes: int) -> Tensor:
    """Return uint8 [pages(nbytes)] on the host, page-aligned, page-locked if there is CUDA, with any content.

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


def locked(size: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return zeros [size] on the host, page-aligned, page-locked if there is CUDA. `device`: whose copies it is for;
    by default the current one's.

    It takes whole pages and no more. torch's own allocator of page-locked memory rounds up to the next power of
    two.
    """
    if not size:
        return torch.zeros(0, dtype=dtype)
    memory = in_huge_pages(_Mapped, pages(size * dtype.itemsize))
    out = torch.frombuffer(memory, dtype=dtype, count=size)
    if torch.cuda.is_available() and not memory.lock(out.data_ptr(), device):
        return torch.zeros(size, dtype=dtype, pin_memory=True)
    return out


class _Mapped(mmap.mmap):
    """Memory that CUDA may copy directly once it is locked. Tensors in it keep it alive."""

    address = 0
    device: torch.device | int | None = None

    def lock(self, address: int, device: torch.device | None) -> bool:
        """Page-lock the mapping, which begins at `address`. Return whether the driver did."""
        runtime = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(address, len(self), 0)):
            forget_error()
            return False
        self.address, self.device = address, torch.cuda.current_device() if device is None else device
        return True

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.synchronize(self.device)  # a copy may be under way
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
