"""Collectives as pure functions over a named axis of ranks.

Each is a linear map with a transpose, and `Linear` makes any such map differentiable under
`torch.autograd.grad`, `torch.func.grad`/`vjp`/`jvp`/`vmap`, to every order, and under capture: the derivative
of a linear map is the map itself forwards and its transpose backwards.

Here transposes are those of the plain sum over ranks. `zerofn.gather` and `zerofn.scatter` are each other's
transposes under another inner product; see `sharding`.

All ranks of the axis must call a collective, in the same order, with tensors of one shape and dtype. Nothing is written
to an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ._torch_compat import below_autograd
from .comm import transport  # noqa: F401  (defines the operations)
from .comm.mesh import DATA, Axis, Mesh, current_mesh
from .ops import ravel as _ravel  # noqa: F401  (defines zerofn::as_equal)
from .ops import same as _same  # noqa: F401  (defines zerofn::check_same)

ops = torch.ops.zerofn
__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "permute",
    "psum",
    "reduce_scatter",
    "same",
    "vary",
    "Linear",
    "LinearMap",
]


def __dir__() -> list[str]:
    return list(__all__)


class LinearMap(Protocol):
    """Tensors -> tensors, linear; leading batch dims pass through. `transpose` is again such a map."""

    @property
    def transpose(self) -> LinearMap:
        """The transposed map."""

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """The map itself, on tensors without autograd."""


class Linear(torch.autograd.Function):
    """`Linear.apply(map, *xs)`: a linear map under every transform of torch."""

    @staticmethod
    def forward(op: LinearMap, *xs: Tensor) -> tuple[Tensor, ...]:
        """Run the map below autograd."""
        with below_autograd():
            return op(*xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Remember the map; nothing of the values is needed."""
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """The transpose."""
        return None, *Linear.apply(ctx.op.transpose, *gradients)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        """The map itself."""
        return Linear.apply(getattr(ctx.op, "tangent", ctx.op), *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], op: LinearMap, *xs: Tensor) -> tuple[Any, Any]:
        """One call for the whole batch: its dim goes first, where maps let it pass."""
        moved = [
            x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0)
            for x, d in zip(xs, in_dims[1:], strict=True)
        ]
        out = Linear.apply(op, *moved)
        return out, (0,) * len(out)


def _rows_first(x: Tensor, size: int) -> Tensor:
    """[..., size * s] -> flat, the rank dim first."""
    return x.reshape(*x.shape[:-1], size, x.shape[-1] // size).movedim(-2, 0).reshape(-1)


@dataclass(frozen=True)
class AllGather:
    """[..., s] on each rank -> [..., size * s]."""

    axis: Axis
    unit: str = ""

    @property
    def transpose(self) -> ReduceScatter:
        """A summing reduce-scatter."""
        return ReduceScatter(self.axis, self.unit)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """Shards in rank order."""
        if self.axis.size == 1:
            return (ops.as_equal(x, self.axis.name),)
        full = ops.wait(ops.all_gather(x.reshape(-1), self.axis.size, self.axis.group, self.unit))
        if x.dim() > 1:
            rows = full.view(self.axis.size, *x.shape).movedim(0, -2)
            full = rows.reshape(*x.shape[:-1], self.axis.size * x.shape[-1])
        return (full,)


@dataclass(frozen=True)
class ReduceScatter:
    """[..., size * s] on each rank -> [..., s]: the sum over ranks, in rank order, of one's own shard."""

    axis: Axis
    unit: str = ""

    @property
    def transpose(self) -> AllGather:
        """An all-gather."""
        return AllGather(self.axis, self.unit)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The sum."""
        if self.axis.size == 1:
            return (x.view_as(x),)
        flat = _rows_first(x, self.axis.size) if x.dim() > 1 else x.contiguous()
        shard = ops.wait(ops.reduce_scatter(flat, self.axis.size, self.axis.group, self.unit))
        return (shard.view(*x.shape[:-1], x.shape[-1] // self.axis.size),)


@dataclass(frozen=True)
class AllReduce:
    """The sum over ranks, in rank order, so that every rank has the same bits. Its own transpose."""

    axis: Axis

    @property
    def transpose(self) -> AllReduce:
        """Itself."""
        return self

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The sum."""
        return (sum_over(x, self.axis),)


@dataclass(frozen=True)
class Vary:
    """The value itself, which from here on each rank uses in its own way. Transpose: the sum of what came of that."""

    axis: Axis

    @property
    def transpose(self) -> Psum:
        """The sum over ranks."""
        return Psum(self.axis)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The value itself."""
        return (x.view_as(x),)


@dataclass(frozen=True)
class Psum:
    """The sum over ranks of values of their own, one value from here on. Transpose: the value itself."""

    axis: Axis

    @property
    def transpose(self) -> Vary:
        """The value itself."""
        return Vary(self.axis)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The sum."""
        return (sum_in_parts(x, self.axis),)


@dataclass(frozen=True)
class Exchange:
    """[..., size, s] -> [..., size, s]: row r goes to rank r. Its own transpose."""

    axis: Axis

    @property
    def transpose(self) -> Exchange:
        """Itself: what came from rank r goes back to rank r."""
        return self

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The exchange."""
        if self.axis.size == 1:
            return (x.view_as(x),)
        rows = x.movedim(-2, 0).contiguous()
        out = ops.wait(ops.exchange(rows.view(self.axis.size, -1), self.axis.size, self.axis.group))
        return (out.view(rows.shape).movedim(0, -2),)


@dataclass(frozen=True)
class Permute:
    """Rank r receives what rank `sources[r]` holds."""

    axis: Axis
    sources: tuple[int, ...]

    @property
    def transpose(self) -> Permute:
        """The inverse permutation."""
        return Permute(self.axis, tuple(self.sources.index(r) for r in range(self.axis.size)))

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The permutation."""
        if self.axis.size == 1:
            return (x.view_as(x),)
        return (ops.wait(ops.permute(x.contiguous(), self.sources, self.axis.group)),)


@dataclass(frozen=True)
class Same:
    """The value itself, checked to have the same bits on every rank. Its own transpose, unchecked: each rank has the
    derivative of its own loss.
    """

    axis: Axis
    what: str
    checked: bool = True

    @property
    def transpose(self) -> Same:
        """The value itself."""
        return Same(self.axis, self.what, False)

    @property
    def tangent(self) -> Same:
        """The value itself."""
        return self.transpose

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The check."""
        if not self.checked:
            return (x.view_as(x),)
        if self.axis.size == 1:
            return (ops.as_equal(x, self.axis.name),)
        rows = rows_over(ops.digest(x), self.axis)
        return (ops.check_same(x, rows.view(-1), self.what, self.axis.name),)


def rows_over(x: Tensor, axis: Axis) -> Tensor:
    """[...] on each rank -> [size, ...], by rank. Not differentiable: for small, finished values."""
    if axis.size == 1:
        return ops.as_equal(x, axis.name).unsqueeze(0)
    full = ops.wait(ops.all_gather(x.reshape(-1), axis.size, axis.group, ""))
    return full.view(axis.size, *x.shape)


def sum_over(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks in rank order, whatever the number of dims. Not differentiable."""
    if axis.size == 1:
        return ops.as_equal(x, axis.name)
    rows = rows_over(x, axis)
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def sum_in_parts(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks in rank order: each sums a part, and all get it. Not differentiable: for large values."""
    if axis.size == 1:
        return ops.as_equal(x, axis.name)
    missing = -x.numel() % axis.size
    flat = torch.nn.functional.pad(x.reshape(-1), (0, missing)) if missing else x.reshape(-1)
    part = ops.wait(ops.reduce_scatter(flat, axis.size, axis.group, ""))
    full = ops.wait(ops.all_gather(part, axis.size, axis.group, ""))
    return (full[: x.numel()] if missing else full).view(x.shape)


def _axis(axis: str | Axis) -> Axis:
    return axis if isinstance(axis, Axis) else (current_mesh() or Mesh.of(None)).axis(axis)


def _last(x: Tensor, dim: int, what: str) -> Tensor:
    if x.dim() == 0:
        raise ValueError(f"{what}: expected a tensor with at least one dim, got a scalar; write x.view(1).")
    return x.movedim(dim, -1)


def all_gather(x: Tensor, axis: str | Axis = DATA, *, dim: int = 0) -> Tensor:
    """Concatenate every rank's `x` along `dim`, in rank order.

    `x` [..., s, ...]: any dtype, of one shape and dtype on all ranks, at least one dim. `axis`: the ranks that take
    part, "data" for all of the job, or an `Axis` of another mesh (`Mesh.of(device_mesh).axis("name")`). `dim`: which
    dim to concatenate along, negative ones counted from the last.

    -> [..., size * s, ...] in the dtype and on the device of `x`, the same on all ranks. At one rank a view of `x`.
    Transpose: `reduce_scatter`, a sum. Raises `ValueError` for a scalar and for an axis that is not there, `IndexError`
    for a dim that is not there.

    >>> all_gather(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    return Linear.apply(AllGather(_axis(axis)), _last(x, dim, "all_gather"))[0].movedim(-1, dim)


def reduce_scatter(x: Tensor, axis: str | Axis = DATA, *, dim: int = 0) -> Tensor:
    """Sum `x` over ranks and keep this rank's equal part along `dim`.

    `x` [..., size * s, ...]: of one shape and dtype on all ranks, at least one dim. `axis`: see `all_gather`. `dim`:
    which dim to cut, negative ones counted from the last.

    -> [..., s, ...]: rank r gets elements [r * s, (r + 1) * s) of the sum along `dim`, added up in the dtype of `x`, on
    gloo in rank order, on its device. At one rank a view of `x`. Transpose: `all_gather`. Raises `ValueError` for a
    scalar, where the size of `dim` is no multiple of the number of ranks, and for an axis that is not there;
    `IndexError` for a dim that is not there.

    >>> reduce_scatter(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    where = _axis(axis)
    moved = _last(x, dim, "reduce_scatter")
    if moved.shape[-1] % where.size:
        raise ValueError(
            f"reduce_scatter: dim {dim} has {moved.shape[-1]} elements, which {where.size} ranks of "
            f"axis {where.name!r} cannot share equally; pad it to a multiple."
        )
    return Linear.apply(ReduceScatter(where), moved)[0].movedim(-1, dim)


def all_reduce(x: Tensor, axis: str | Axis = DATA) -> Tensor:
    """Sum `x` over ranks.

    `x` [...]: of one shape and dtype on all ranks. `axis`: see `all_gather`.

    -> [...] in the dtype of `x`, added up in rank order, so that all ranks have the same bits, on its device. At one
    rank a view of `x`. Each rank receives the values of all others: meant for losses and norms, not for gradients of a
    model, which `scatter` averages. Transpose: itself. Raises `ValueError` for an axis that is not there.

    >>> all_reduce(torch.tensor(3.0), axis="data")
    tensor(3.)
    """
    return Linear.apply(AllReduce(_axis(axis)), x)[0]


def vary(x: Tensor, axis: str | Axis) -> Tensor:
    """Let each rank use one value in its own way, as the input of a layer that is cut over an axis. JAX's `pvary`.

    `x` [...]: the same on all ranks. `axis`: see `all_gather`.

    -> a view of `x`. Its gradient is the sum of those of all ranks: transpose `psum`. All ranks must call it. Raises
    `ValueError` for an axis that is not there.

    >>> vary(torch.tensor(3.0), axis="data")
    tensor(3.)
    """
    return Linear.apply(Vary(_axis(axis)), x)[0]


def psum(x: Tensor, axis: str | Axis) -> Tensor:
    """Sum `x` over ranks into one value, as the output of a layer whose input is cut over an axis. JAX's `psum`.

    `x` [...]: of one shape and dtype on all ranks. `axis`: see `all_gather`.

    -> [...] in the dtype of `x`, added up in rank order, so that all ranks have the same bits. What follows is computed
    alike on all of them, so that the gradient of `x` is that of the sum: transpose `vary`. In `all_reduce` each rank
    goes on in its own way, and gradients are summed. All ranks must call it. Raises `ValueError` for an axis that is
    not there.

    >>> psum(torch.tensor(3.0), axis="data")
    tensor(3.)
    """
    return Linear.apply(Psum(_axis(axis)), x)[0]


def all_to_all(x: Tensor, axis: str | Axis = DATA) -> Tensor:
    """Send row r of `x` to rank r.

    `x` [size, ...]: any dtype, of one shape and dtype on all ranks, a row for each rank of the axis. `axis`: see
    `all_gather`.

    -> [size, ...] in the dtype and on the device of `x`: row r is what came from rank r. At one rank a view of `x`.
    Transpose: itself. Raises `ValueError` for another number of rows and for an axis that is not there.

    >>> all_to_all(torch.tensor([[1, 2]]))
    tensor([[1, 2]])
    """
    where = _axis(axis)
    if x.dim() == 0 or x.shape[0] != where.size:
        raise ValueError(
            f"all_to_all: expected a first dim of {where.size}, one row per rank of axis "
            f"{where.name!r}, got shape {tuple(x.shape)}."
        )
    return Linear.apply(Exchange(where), x.reshape(where.size, -1))[0].view(x.shape)


def permute(x: Tensor, sources: Sequence[int], axis: str | Axis = DATA) -> Tensor:
    """Hand each rank another rank's `x`: rank r receives what rank `sources[r]` holds.

    `x` [...]: any dtype, of one shape and dtype on all ranks. `sources`: the ranks of the axis, each once, the same on
    all ranks. `axis`: see `all_gather`.

    -> [...] in the dtype and on the device of `x`. At one rank a view of `x`. Transpose: the inverse permutation.
    Raises `ValueError` unless `sources` names each rank once, and for an axis that is not there.

    >>> permute(torch.tensor([1.0, 2.0]), sources=[0])
    tensor([1., 2.])
    """
    where = _axis(axis)
    if sorted(sources) != list(range(where.size)):
        raise ValueError(
            f"permute: sources must name each of the {where.size} ranks of axis {where.name!r} once, "
            f"got {list(sources)}."
        )
    return Linear.apply(Permute(where, tuple(sources)), x)[0]


def same(x: Tensor, axis: str | Axis = DATA) -> Tensor:
    """Declare that `x` has the same value on every rank of an axis, and check it.

    `x` [...]: of one shape and dtype on all ranks. `axis`: see `all_gather`. In a compiled step, a value that depends
    on a rank's own batch, random key or place may not scale a shard or a gradient. If you know that it is equal
    everywhere (a temperature in the batch, a file that all ranks read), say so with this function.

    -> a view of `x`. Checksums of its bits are compared in every step, before the first write to the state; on a
    device the host waits for them. Transpose: itself, unchecked. Raises `RuntimeError` on every rank if values differ;
    the state is as it was.

    >>> same(torch.tensor(0.5))
    tensor(0.5000)
    """
    return Linear.apply(Same(_axis(axis), "the value given to zerofn.same"), x)[0]
