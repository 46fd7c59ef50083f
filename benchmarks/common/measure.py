"""Reading the machine's own counters: memory, the loopback interface, live tensors."""

from __future__ import annotations

import ctypes
import gc
import mmap
import types
from collections.abc import Iterable
from pathlib import Path

import torch


def memory_bytes(field: str) -> int:
    """A field of this process's status in bytes: "VmRSS" now, "VmHWM" the highest so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: peak memory can only be read on Linux")


def sent_bytes(interface: str) -> int:
    """Bytes that an interface of this network namespace has sent. Those of the loopback interface are all ranks'."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise RuntimeError(f"/proc/self/net/dev has no interface {interface}: communicated bytes cannot be read")


def loopback_bytes() -> int:
    """Bytes sent over the loopback interface since boot, by every process of the machine."""
    return sent_bytes("lo")


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes of the distinct storages behind `tensors`: views and aliases count once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        if storage.nbytes() and storage.data_ptr():  # tensors on meta have no address
            seen[storage.data_ptr()] = storage.nbytes()
    return seen


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(storages(tensors).values())


def touched_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages' bytes those that the system has given memory to: whole pages that were ever written or read.

    A buffer that is allocated large and used a little costs its size on an accelerator, and here what is used.
    """
    return sum(min(size, _present(address, size)) for address, size in storages(tensors).items())


def _present(address: int, size: int) -> int:
    """Bytes of the pages of this range that are in memory."""
    first = address - address % mmap.PAGESIZE
    num_pages = -(-(address + size - first) // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(num_pages * mmap.PAGESIZE), pages):
        raise OSError(ctypes.get_errno(), f"mincore of {size} bytes")
    return mmap.PAGESIZE * sum(page & 1 for page in bytes(pages))


def reachable_tensors(root: object) -> list[torch.Tensor]:
    """Every tensor that `root` keeps alive, caches included, whatever attribute holds them."""
    # Modules, classes and functions lead to the whole program, not to the state.
    elsewhere = (type, types.ModuleType, types.FunctionType)
    seen, stack, found = {id(root)}, [root], []
    while stack:
        thing = stack.pop()
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        for other in gc.get_referents(thing):
            if id(other) not in seen and not isinstance(other, elsewhere):
                seen.add(id(other))
                stack.append(other)
    return found


def live_tensors() -> list[torch.Tensor]:
    """Every tensor Python can see between steps: state, and gradients and buffers kept."""
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) in _TENSOR_TYPES]


def live_tensor_bytes() -> int:
    return storage_bytes(live_tensors())


_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
