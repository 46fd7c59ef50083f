"""A recording: calls on buffer versions, and how one call is executed.

A tensor is logged as a `BufferView`, a geometry on a *buffer version*: the content of a buffer from one complete
overwrite to the next (static single assignment). The versions that calls touch tie them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .._torch_compat import below_autograd, tree_leaves
from .effects import mapped
from .rng_marks import SavedState


@dataclass(frozen=True)
class BufferView:
    """A tensor: a geometry (in elements) on a buffer version."""

    version: int
    dtype: torch.dtype
    device: torch.device
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool = False

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, once the buffer exists."""
        tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        return tensor.conj() if self.conj else tensor


@dataclass
class Version:
    """The content of a buffer from one complete overwrite to the next."""

    fake_storage: torch.UntypedStorage
    device: torch.device
    constant: torch.UntypedStorage | None = None  # the content before the first call that writes
    is_written: bool = False  # in place, by a call
    last_write: int | None = None
    readers: list[int] = field(default_factory=list)  # since the last write

    def take(self) -> torch.UntypedStorage:
        """The memory for it: fresh, or the constant, let go here (and copied if calls write into
        it)."""
        if self.constant is not None:
            constant, self.constant = self.constant, None
            return constant.clone() if self.is_written else constant
        return torch.empty(self.fake_storage.nbytes(), dtype=torch.uint8, device=self.device).untyped_storage()


@dataclass
class LoggedCall:
    """One logged operation. Tensors in `args` and `kwargs` are `BufferView`s."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[BufferView | None]  # the flat outputs; a `BufferView` where one is a new buffer
    versions: set[int]  # all that it touches
    is_random: bool
    # Settings of torch's that kernels read: a recurrent one rounds otherwise where no gradient will be asked for.
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    grad_mode: bool = field(default_factory=torch.is_grad_enabled)
    value_deps: set[int] = field(default_factory=set)  # calls whose results it needs
    order_deps: set[int] = field(default_factory=set)  # calls it must not overtake
    saves: list[SavedState] = field(default_factory=list)

    def run(self, buffers: dict[int, torch.UntypedStorage | None], versions: list[Version]) -> Any:
        """Execute; read, write and extend `buffers` (version -> storage). It is None for a result whose shape is not
        its fake twin's: a kernel's own workspace.
        """

        def tensor(x: Any) -> Any:
            if not isinstance(x, BufferView):
                return x
            if x.version not in buffers:
                buffers[x.version] = versions[x.version].take()
            return x.on(known(buffers[x.version]))

        for saved in self.saves:
            saved.save()
        ambient = torch.get_default_dtype()
        try:
            torch.set_default_dtype(self.default_dtype)
            with torch.set_grad_enabled(self.grad_mode), below_autograd():
                result = self.func(*mapped(tensor, self.args), **mapped(tensor, self.kwargs))
        finally:
            torch.set_default_dtype(ambient)
        for region, out in zip(self.outputs, tree_leaves(result), strict=False):
            if region is not None and region.version not in buffers:
                same = out is not None and tuple(out.shape) == region.size
                buffers[region.version] = _with_geometry(out, region).untyped_storage() if same else None
        return result


def known(storage: torch.UntypedStorage | None) -> torch.UntypedStorage:
    """A buffer; raises `RuntimeError` for one whose size its fake twin did not know."""
    if storage is None:
        raise RuntimeError(
            "the initialisation function computes gradients of a layer whose kernel stores data for its backward pass, "
            "and the size of these data is known only when the kernel runs. Do not compute gradients in the "
            "initialisation function, or pass `shard` the finished state instead of a function."
        )
    return storage


def closure(calls: list[LoggedCall], roots: Iterable[int]) -> set[int]:
    """The calls whose results `roots` need, themselves included."""
    needed: set[int] = set()
    stack = list(roots)
    while stack:
        index = stack.pop()
        if index not in needed:
            needed.add(index)
            stack.extend(calls[index].value_deps)
    return needed


def _with_geometry(tensor: torch.Tensor, region: BufferView) -> torch.Tensor:
    """Return `tensor`, copied if its layout differs from that of its fake twin."""
    found = (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.is_conj())
    if found == (region.size, region.stride, region.offset, region.conj):
        return tensor
    nbytes = tensor.element_size() * (
        region.offset + sum((n - 1) * s for n, s in zip(region.size, region.stride, strict=True)) + 1
    )
    copy = region.on(torch.empty(nbytes, dtype=torch.uint8, device=tensor.device).untyped_storage())
    return copy.copy_(tensor)
