"""Numbers over whole trees, sharded or plain: norms, dot products, the finite check.

[Note: order of sums] A leaf is cut at the boundaries of ranks' shards, at every stage. Each part is reduced by itself,
the parts are combined in rank order, then the leaves in the tree's order. So every stage gives the same bits at a given
number of ranks, and one rank gives those of `torch.nn.utils.get_total_norm`. Padding is never read. One small
all-gather serves a whole tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from .._torch_compat import is_functorch_tensor
from ..collectives.over_ranks import ops, rows_over
from ..comm.mesh import Axis
from ..ops import part_reductions as _parts_ops  # noqa: F401  (defines zerofn::part_norms and its like)
from ..ops import runs as _runs_ops  # noqa: F401  (defines zerofn::fill_runs)
from ..sharding.sharded import Sharded, is_sharded, spec_among
from ..sharding.spec import Spec
from ..util.arguments import told


class _Part(NamedTuple):
    """Elements [start, stop) of the `tensor`-th tensor: the part of leaf `column` on rank `row`. `counts`: whether no
    rank before this one has the same slice.
    """

    tensor: int
    start: int
    stop: int
    row: int
    column: int
    counts: bool


class _Parts(NamedTuple):
    """This rank's parts of a tree."""

    names: list[str]
    tensors: list[list[Tensor]]  # one list per tree
    parts: list[_Part]
    spec: Spec | None
    complete: bool  # no other rank of the axis of shards has parts that are not here
    shards: set[int]  # which tensors are shards

    @staticmethod
    def of(*trees: Any) -> _Parts:
        paths, nodes, _ = tree.flatten_with_path(trees[0], is_leaf=is_sharded)
        others = [tree.leaves(t, is_leaf=is_sharded) for t in trees[1:]]
        found = _Parts(
            [], [[] for _ in trees], [], spec_among(nodes), all(n.spec.is_whole for n in nodes if is_sharded(n)), set()
        )
        for k, node in enumerate(nodes):
            if not isinstance(node, Tensor) and not is_sharded(node):
                where = f" at {tree.name_of(paths[k])!r}" if paths[k] else ""
                raise TypeError(
                    f"norms, dot products and finite checks: values must be tensors, got {told(node)}{where}."
                )
            found._add(tree.name_of(paths[k]), [node, *(o[k] for o in others)])
        return found

    def _add(self, name: str, group: list[Any]) -> None:
        first = len(self.tensors[0])
        if is_sharded(group[0]):
            self.parts.extend(_sharded_parts(group[0], first, len(self.names)))
            self.shards.update(range(first, first + len(group[0].stored)))
            prefix = f"{name}." if name else ""
            self.names.extend(prefix + leaf.name for leaf in group[0].layout.leaves)
        else:
            if self.complete or all(axis.rank == 0 for axis in self.rows):  # replicated: only one rank counts it
                once = all(axis.rank == 0 for axis in self.slices)
                self.parts.append(_Part(first, 0, group[0].numel(), 0, len(self.names), once))
            self.names.append(name)
        for tensors, x in zip(self.tensors, group, strict=True):
            tensors.extend(x.shards if is_sharded(x) else [x.reshape(-1)])

    @property
    def rows(self) -> tuple[Axis, ...]:
        """The axes of shards; see `Spec.rows`."""
        return () if self.spec is None else self.spec.rows

    @property
    def slices(self) -> tuple[Axis, ...]:
        """The axes of slices."""
        return () if self.spec is None else self.spec.mesh.slices

    @property
    def tracked(self) -> bool:
        """Return whether something is differentiated with respect to these tensors."""
        return any(
            is_functorch_tensor(x) or (x.requires_grad and torch.is_grad_enabled())
            for tensors in self.tensors
            for x in tensors
        )

    def with_tensors(self, tensors: Sequence[Tensor]) -> _Parts:
        """Return the same parts with other tensors, of one tree or of two."""
        n = len(self.tensors[0]) or 1
        return self._replace(tensors=[list(tensors[k : k + n]) for k in range(0, len(tensors), n)])

    def without_padding(self, k: int, x: Tensor) -> Tensor:
        """Return the k-th tensor of a tree with zeros in the padding: second derivatives would count what is there."""
        if k not in self.shards:
            return x
        runs = [(p.start, p.stop) for p in self.parts if p.tensor == k]
        if sum(b - a for a, b in runs) == x.numel():
            return x
        like = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        read = ops.fill_runs(like, [a for a, _ in runs], [b for _, b in runs], [1.0] * len(runs))
        return torch.where(read, x, torch.zeros_like(x))

    def reduce(self, op: Any) -> Tensor:
        """Reduce each part to a number: [ranks, leaves], zero where a rank has no part of a leaf."""
        rows = math.prod(axis.size for axis in self.rows) if self.complete else 1
        parts = [p for p in self.parts if p.stop > p.start and p.counts]
        if not self.tensors[0] or not self.names:
            grid = torch.zeros(rows, len(self.names))
        else:  # also on a rank without parts: all ranks need the same graph
            columns = [[p[k] for p in parts] for k in range(len(_Part._fields) - 1)]
            grid = op(*self.tensors, *columns, rows, len(self.names))
        if not self.complete:
            grid = rows_of(grid[0], self.rows)
        for axis in self.slices:
            grid = rows_over(grid, axis).flatten(0, 1)
        return grid


def _sharded_parts(sharded: Sharded, first: int, column: int) -> Iterator[_Part]:
    for x in sharded.spec.stored_runs():
        yield _Part(first + x.unit, x.start, x.stop, x.row, column + x.leaf.index, x.counts)


def rows_of(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """[...] on each rank -> [ranks, ...] by rank along several axes, the last of which varies slowest."""
    rows = rows_over(x, axes[0]) if axes else x.unsqueeze(0)
    for axis in axes[1:]:
        rows = rows_over(rows, axis).flatten(0, 1)
    return rows


def leaf_norms(values: Any) -> dict[str, Tensor]:
    """Return the 2-norm of every leaf by name, 0-d tensors in float32 or float64. All ranks must call it.

    >>> leaf_norms({"a": torch.tensor([3.0, 4.0])})
    {'a': tensor(5.)}
    """
    names, numbers = norms(values)
    return dict(zip(names, numbers.unbind(), strict=True))


def norms(values: Any) -> tuple[list[str], Tensor]:
    """Return the names of all leaves and their 2-norms [leaves], with the same bits on every rank.

    Not differentiable: raises `RuntimeError` if a derivative is needed.
    """
    parts = _Parts.of(values)
    if parts.tracked:
        raise RuntimeError(
            "leaf_norms has no derivative. Write it with torch.linalg.vector_norm on the gathered "
            "leaves, use zerofn.global_norm, or detach the values that you pass to it."
        )
    return parts.names, _norms(parts)


def _norms(parts: _Parts) -> Tensor:
    grid = parts.reduce(ops.part_norms)
    return grid[0] if len(grid) == 1 else torch.linalg.vector_norm(grid, dim=0)


def global_norm(values: Any) -> Tensor:
    """Return the 2-norm over all leaves and ranks, a 0-d tensor with the same bits on every rank. Differentiable.

    All ranks must call it.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    """
    parts = _Parts.of(values)
    return _GlobalNorm.apply(parts, *parts.tensors[0]) if parts.tracked else _norm_of(parts)


def vdot(a: Any, b: Any) -> Tensor:
    """Return the inner product of two trees with the same structure, a 0-d tensor with the same bits on every rank.
    Differentiable.

    All ranks must call it. Raises `ValueError` if structures or layouts differ.

    >>> vdot({"w": torch.ones(2)}, {"w": torch.tensor([1.0, 2.0])})
    tensor(3.)
    """
    if tree.structure(a) != tree.structure(b):
        raise ValueError(
            "vdot: the two trees differ in structure or layout. If only one of them is sharded, call "
            "zerofn.scatter(tree, like=sharded) on the other first."
        )
    parts = _Parts.of(a, b)
    return _Vdot.apply(parts, *parts.tensors[0], *parts.tensors[1]) if parts.tracked else _vdot_of(parts)


def _norm_of(parts: _Parts) -> Tensor:
    return torch.linalg.vector_norm(_norms(parts))


def _vdot_of(parts: _Parts) -> Tensor:
    grid = parts.reduce(ops.part_dots)
    total = grid[0]
    for row in grid[1:]:
        total = total + row
    return total.sum()


# Derivatives. Such a scalar sums over ranks' shards, and all ranks have it. Its derivative with respect to this
# rank's shards needs no communication. See [Note: inner products] in sharding.


class _Vdot(torch.autograd.Function):
    @staticmethod
    def forward(parts: _Parts, *tensors: Tensor) -> Tensor:
        return _vdot_of(parts.with_tensors(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.parts = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        other = (*saved[len(saved) // 2 :], *saved[: len(saved) // 2])
        return None, *_products(ctx.parts, g, other, saved)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensor:
        saved = ctx.saved_tensors
        n, moved = len(saved) // 2, _filled(tangents, saved)
        return _Vdot.apply(ctx.parts, *moved[:n], *saved[n:]) + _Vdot.apply(ctx.parts, *saved[:n], *moved[n:])


class _GlobalNorm(torch.autograd.Function):
    @staticmethod
    def forward(parts: _Parts, *tensors: Tensor) -> Tensor:
        return _norm_of(parts.with_tensors(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.parts = inputs[0]
        ctx.save_for_backward(*inputs[1:], output)
        ctx.save_for_forward(*inputs[1:], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        *saved, norm = ctx.saved_tensors
        return None, *_products(ctx.parts, _over(g, norm), saved, saved)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensor:
        *saved, norm = ctx.saved_tensors
        return _over(_Vdot.apply(ctx.parts, *saved, *_filled(tangents, saved)), norm)


def _products(parts: _Parts, g: Tensor, factors: Sequence[Tensor], likes: Sequence[Tensor]) -> list[Tensor | None]:
    n = len(parts.tensors[0])
    return [
        parts.without_padding(k % n, g * y).to(x.dtype) if x.is_floating_point() else None
        for k, (x, y) in enumerate(zip(likes, factors, strict=True))
    ]


def _over(g: Tensor, norm: Tensor) -> Tensor:
    """Return g / norm; zero where the norm is zero, as in torch."""
    return torch.where(norm == 0, torch.zeros_like(g), g / norm)


def _filled(tangents: Sequence[Tensor | None], values: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) if t is None else t for t, x in zip(tangents, values, strict=False)]


def largest(values: Any) -> tuple[list[str], Tensor]:
    """Return the names of all leaves and their largest magnitudes [leaves], with the same bits on every rank.

    Not differentiable. All ranks must call it.
    """
    parts = _Parts.of(values)
    return parts.names, parts.reduce(ops.part_extremes).amax(0)


def all_finite(values: Any) -> Tensor:
    """Return whether every element on every rank is finite: a 0-d bool tensor on the device, the same on every rank.

    All ranks must call it.

    >>> all_finite({"w": torch.tensor([1.0, float("nan")])})
    tensor(False)
    """
    return torch.isfinite(largest(values)[1]).all()


def first_nonfinite(values: Any) -> str | None:
    """Return the name of the first leaf with a non-finite element on any rank, or None. Waits for the device.

    All ranks must call it.

    >>> first_nonfinite({"a": torch.ones(1), "b": torch.tensor([float("inf")])})
    'b'
    """
    names, ends = largest(values)
    return next((n for n, e in zip(names, ends.tolist(), strict=True) if not math.isfinite(e)), None)
