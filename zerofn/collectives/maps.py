"""Linear maps over an axis of ranks, with their transposes.

`Linear` makes any such map differentiable under `torch.autograd.grad`, `torch.func.grad`/`vjp`/`jvp`/`vmap`, to every
order, and under capture: the derivative of a linear map is the map itself forwards and its transpose backwards.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .._torch_compat import below_autograd
from ..comm.mesh import Axis
from ..ops import ravel as _ravel  # noqa: F401  (defines zerofn::as_equal)
from ..ops import same as _same  # noqa: F401  (defines zerofn::check_same)
from ..util.context import inside
from .expected import OWN_OF
from .over_ranks import ops as ops
from .over_ranks import rows_over, sum_in_parts, sum_over


class LinearMap(Protocol):
    """Tensors -> tensors, linear; leading batch dims pass through. `transpose` is again such a map."""

    @property
    def transpose(self) -> LinearMap:
        """The transposed map."""

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """The map itself, on tensors without autograd."""


_heard: ContextVar[list[Axis] | None] = ContextVar("heard_transfers", default=None)


def heard_now() -> list[Axis] | None:
    """Return what is noted so far; None outside of a loss function."""
    return _heard.get()


def heard_transfers() -> contextlib.AbstractContextManager[list[Axis]]:
    """Inside, note the axis of every map between several ranks that is run, but for checks."""
    return inside(_heard, [])


class Linear(torch.autograd.Function):
    """`Linear.apply(map, *xs)`: a linear map under every transform of torch.

    >>> from zerofn import collectives
    >>> class Double:
    ...     transpose = property(lambda self: self)
    ...     def __call__(self, x):
    ...         return (2 * x,)
    >>> collectives.Linear.apply(Double(), torch.tensor(3.0))
    (tensor(6.),)
    """

    @staticmethod
    def forward(op: LinearMap, *xs: Tensor) -> tuple[Tensor, ...]:
        """Run the map below autograd."""
        heard, axis = _heard.get(), getattr(op, "axis", None)
        if heard is not None and axis is not None and axis.size > 1 and not isinstance(op, CheckedSame):
            heard.append(axis)
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


def begins_at(codec: str, start: int) -> dict[str, int]:
    """Return the argument of a transfer that says at which element of a unit it begins: codecs alone ask."""
    return {"start": start} if codec and start else {}


@dataclass(frozen=True)
class AllGather:
    """[..., s, ...] on each rank -> [..., size * s, ...], along `dim`, which counts from the last. `kept`: for the
    backward pass of a captured step, which else gathers it again. `codec`, `start`: in which form it is sent, here and
    in a reduce-scatter, and from which element of a unit on; rounding counts as the identity.
    """

    axis: Axis
    unit: str = ""
    dim: int = -1
    kept: bool = True
    codec: str = ""
    start: int = 0

    @property
    def transpose(self) -> ReduceScatter:
        """A summing reduce-scatter."""
        return ReduceScatter(self.axis, self.unit, self.dim, self.codec, self.start)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """Shards in rank order."""
        if self.axis.size == 1:
            return (ops.as_equal(x, self.axis.name),)
        to = (self.axis.size, self.axis.group, self.unit, self.codec)
        more = {**({} if self.kept else {"kept": False}), **begins_at(self.codec, self.start)}
        full = ops.wait(ops.all_gather(x.reshape(-1), *to, **more))
        if x.dim() == 1:
            return (full,)
        rows = full.view(self.axis.size, *x.shape).movedim(0, self.dim - 1)
        return (rows.flatten(self.dim - 1, self.dim),)


@dataclass(frozen=True)
class ReduceScatter:
    """[..., size * s, ...] on each rank -> [..., s, ...]: the sum over ranks, in rank order, of one's own shard. `key`,
    `number`: draw the codes of a flat tensor; see `comm.transport`. Its transpose rounds to nearest.
    """

    axis: Axis
    unit: str = ""
    dim: int = -1
    codec: str = ""
    start: int = 0
    key: Tensor | None = field(default=None, compare=False)
    number: int = 0

    @property
    def transpose(self) -> AllGather:
        """An all-gather."""
        return AllGather(self.axis, self.unit, self.dim, codec=self.codec, start=self.start)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The sum."""
        if self.axis.size == 1:
            return (x.view_as(x),)
        to = (self.axis.size, self.axis.group, self.unit, self.codec)
        if x.dim() == 1:
            drawn = {"key": self.key, "number": self.number} if self.key is not None else {}
            return (ops.wait(ops.reduce_scatter(x.contiguous(), *to, **drawn, **begins_at(self.codec, self.start))),)
        rows = x.unflatten(self.dim, (self.axis.size, x.shape[self.dim] // self.axis.size)).movedim(self.dim - 1, 0)
        return (ops.wait(ops.reduce_scatter(rows.reshape(-1), *to)).view(rows.shape[1:]),)


@dataclass(frozen=True)
class AllReduce:
    """The sum over ranks, in rank order, so that every rank has the same bits. Its own transpose. `between`: it is
    differentiated along an axis over which gradients are not averaged; then ranks must have values of their own, and go
    on with the sum in their own ways.
    """

    axis: Axis
    between: bool = False

    @property
    def transpose(self) -> AllReduce:
        """Itself."""
        return self

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The sum."""
        return (sum_over(ops.expect(x, self.axis.name, "all_reduce") if self.between else x, self.axis),)


@dataclass(frozen=True)
class Vary:
    """The value itself, which from here on each rank uses in its own way. Transpose: the sum of what came of that.
    `backward`: it is the transpose of a sum, whose gradient must be the same on all ranks. `of`: the module whose
    parameter it is, for errors.
    """

    axis: Axis
    backward: bool = False
    of: str = ""

    @property
    def transpose(self) -> Psum:
        """The sum over ranks."""
        return Psum(self.axis)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The value itself."""
        if self.axis.size == 1:
            return (x.view_as(x),)
        return (ops.expect(x, self.axis.name, "vary") if self.backward else ops.as_slice(x, self.axis.name, self.of),)


@dataclass(frozen=True)
class Psum:
    """The sum over ranks of values of their own, one value from here on. Transpose: the value itself. `forward`: it is
    the user's and differentiated, so that ranks must have values of their own. `of`: the module of a plan that leaves
    them.
    """

    axis: Axis
    forward: bool = False
    of: str = ""

    @property
    def transpose(self) -> Vary:
        """The value itself."""
        return Vary(self.axis, backward=True)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The sum."""
        if self.forward and self.axis.size > 1:
            x = ops.expect(x, self.axis.name, "psum")
        if self.of and self.axis.size > 1:
            x = ops.expect(x, self.axis.name, OWN_OF + self.of)
        return (sum_in_parts(x, self.axis),)


@dataclass(frozen=True)
class VaryLast:
    """The value itself, whose last `size` features each rank uses in its own way, and the others as all ranks do.
    Transpose: the sum of what came of those. `of`: the module that leaves it, for errors.

    Nothing marks the value: it is the same on all ranks, and its other features would be taken for a rank's own.
    """

    axis: Axis
    size: int
    of: str = ""

    @property
    def transpose(self) -> PsumLast:
        """The sum over ranks, of the last features."""
        return PsumLast(self.axis, self.size, self.of)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The value itself."""
        return (x.view_as(x),)


@dataclass(frozen=True)
class PsumLast:
    """A value that is the same on all ranks but for its last `size` features, which are summed. See `VaryLast`."""

    axis: Axis
    size: int
    of: str = ""

    @property
    def transpose(self) -> VaryLast:
        """The value itself."""
        return VaryLast(self.axis, self.size, self.of)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The sum."""
        same, own = x.split([x.shape[-1] - self.size, self.size], -1)
        return (torch.cat([ops.as_equal(same, self.axis.name), *Psum(self.axis, of=self.of)(own)], -1),)


@dataclass(frozen=True)
class Concat:
    """[..., sizes[r]] on rank r -> [..., sum(sizes)]: one value from here on. Transpose: this rank's part of it."""

    axis: Axis
    sizes: tuple[int, ...]

    @property
    def transpose(self) -> Take:
        """This rank's part."""
        return Take(self.axis, self.sizes, backward=True)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """All parts, in rank order."""
        longest = max(self.sizes)
        x = torch.nn.functional.pad(x, (0, longest - x.shape[-1])) if x.shape[-1] < longest else x
        rows = rows_over(x.contiguous(), self.axis)
        if len(set(self.sizes)) == 1:
            return (rows.movedim(0, -2).reshape(*x.shape[:-1], -1),)
        return (torch.cat([row[..., :n] for row, n in zip(rows, self.sizes, strict=True)], -1),)


@dataclass(frozen=True)
class Take:
    """[..., sum(sizes)], one value -> [..., sizes[r]] on rank r, which it uses in its own way. Transpose: all parts.
    `backward`: see `Vary`.
    """

    axis: Axis
    sizes: tuple[int, ...]
    backward: bool = False

    @property
    def transpose(self) -> Concat:
        """All parts."""
        return Concat(self.axis, self.sizes)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """This rank's part."""
        start = sum(self.sizes[: self.axis.rank])
        x = ops.expect(x, self.axis.name, "vary") if self.backward else x
        return (x.narrow(-1, start, self.sizes[self.axis.rank]),)


@dataclass(frozen=True)
class Exchange:
    """[..., size, s] -> [..., size, s]: row r goes to rank r. Its own transpose. `purpose`: equal on all ranks."""

    axis: Axis
    purpose: str = ""

    @property
    def transpose(self) -> Exchange:
        """Itself: what came from rank r goes back to rank r."""
        return self

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The exchange."""
        if self.axis.size == 1:
            return (x.view_as(x),)
        rows = x.movedim(-2, 0).contiguous()
        out = ops.wait(ops.exchange(rows.view(self.axis.size, -1), self.axis.size, self.axis.group, self.purpose))
        return (out.view(rows.shape).movedim(0, -2),)


@dataclass(frozen=True)
class Permute:
    """Rank r receives what rank `sources[r]` holds. `purpose`: as for `Exchange`."""

    axis: Axis
    sources: tuple[int, ...]
    purpose: str = ""

    @property
    def transpose(self) -> Permute:
        """The inverse permutation."""
        return Permute(self.axis, tuple(self.sources.index(r) for r in range(self.axis.size)), self.purpose)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The permutation."""
        if self.axis.size == 1:
            return (x.view_as(x),)
        return (ops.wait(ops.permute(x.contiguous(), self.sources, self.axis.group, self.purpose)),)


@dataclass(frozen=True)
class CheckedSame:
    """The value itself, checked to have the same bits on every rank. Its own transpose, unchecked: each rank has the
    derivative of its own loss.
    """

    axis: Axis
    what: str
    checked: bool = True

    @property
    def transpose(self) -> CheckedSame:
        """The value itself."""
        return CheckedSame(self.axis, self.what, False)

    @property
    def tangent(self) -> CheckedSame:
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
