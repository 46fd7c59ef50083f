"""`torch.get_rng_state` and its relatives while draws have a position, not a generator's state.

`torch.utils.checkpoint` saves the generators' states before a segment and sets them again before
it recomputes the segment. Here the state it saves holds the position of the next draw. That holds
for the CPU's state and each device's alike, and for the calling thread alone: a loader that draws
in another thread keeps its generators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from .._torch_compat import without_dispatch_modes
from ..util.patches import Patches, Replacement
from .draws import mix

_MAGIC = b"zerofn: position"


class HasPosition(Protocol):
    """The number of draws so far, which is where the next one is."""

    position: int


class _Active(threading.local):
    def __init__(self) -> None:
        self.stack: list[HasPosition] = []


_active = _Active()


@contextmanager
def virtual_rng_state(draws: HasPosition) -> Iterator[None]:
    """Inside, torch's generator state functions read and set `draws.position` in this thread."""
    with _patches:
        _active.stack.append(draws)
        try:
            yield
        finally:
            _active.stack.pop()


def is_virtual() -> bool:
    """Whether this thread's draws have a position."""
    return bool(_active.stack)


def _modules() -> Iterator[Any]:
    yield torch
    yield torch.random
    for name in ("cuda", "xpu", "mps", "mtia"):
        module = getattr(torch, name, None)
        if module is not None:
            yield module
            if hasattr(module, "random"):
                yield module.random


def _get(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_rng_state(*args: Any, **kwargs: Any) -> Tensor:
        if not _active.stack:
            return original(*args, **kwargs)
        return _encode(_active.stack[-1].position)

    return get_rng_state


def _set(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_rng_state(new_state: Tensor, *args: Any, **kwargs: Any) -> None:
        if _active.stack:
            _active.stack[-1].position = _decode(new_state)
        else:
            original(new_state, *args, **kwargs)

    return set_rng_state


def _manual_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    def manual_seed(seed: int) -> torch.Generator:
        if not _active.stack:
            return original(seed)
        # Far from the positions counted from 0; the draws after one seed are always the same.
        _active.stack[-1].position = (mix(int(seed)) >> 2) | (1 << 61)
        return torch.default_generator

    return manual_seed


_REPLACEMENTS = {"get_rng_state": _get, "set_rng_state": _set, "manual_seed": _manual_seed}


def _replacements() -> Iterator[Replacement]:
    for module in _modules():
        for name, replacement in _REPLACEMENTS.items():
            if getattr(module, name, None) is not None:
                yield module, name, replacement


_patches = Patches(_replacements)


def _encode(position: int) -> Tensor:
    with without_dispatch_modes():  # a real tensor, also while capturing
        return torch.tensor(list(_MAGIC + position.to_bytes(8, "little")), dtype=torch.uint8, device="cpu")


def _decode(state: Tensor) -> int:
    try:
        with without_dispatch_modes():
            data = bytes(state.tolist())
    except Exception:  # not a tensor, or one without data
        data = b""
    if len(data) != len(_MAGIC) + 8 or not data.startswith(_MAGIC):
        raise RuntimeError(
            "set_rng_state: inside a loss function, draws come from a key, so only a state that get_rng_state returned "
            "inside the loss function can be set. Call get_rng_state inside, or leave the call out."
        )
    return int.from_bytes(data[len(_MAGIC) :], "little")
