"""Reading the machine's own counters: memory, the loopback interface, live tensors."""

from __future__ import annotations

import gc
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


def loopback_bytes() -> int:
    """Bytes sent over the loopback interface since boot, by every process of the machine."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("/proc/net/dev has no interface lo: communicated bytes cannot be read")


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`: views and aliases count once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        if storage.nbytes():
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


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


def live_tensor_bytes() -> int:
    """Bytes of every tensor Python can see between steps: state, and gradients and buffers kept."""
    gc.collect()
    return storage_bytes(thing for thing in gc.get_objects() if type(thing) in _TENSOR_TYPES)


_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
