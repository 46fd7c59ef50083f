"""`gather` and `scatter`, transposes of each other, and the four linear maps that they consist of.

[Note: inner products] A value on gathered parameters (a loss, its gradients) exists once per rank and stands for the
mean over the data axis. Values on shards are parts of one whole and stand for their sum. Under these inner products the
transpose of the all-gather is the averaging reduce-scatter, whose transpose is the plain all-gather. With derivatives
defined so, gradients, Hessian-vector products and all higher orders equal those of the global batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import tree
from .._torch_compat import current_trace
from ..collectives.expected import GRADIENT_OF
from ..collectives.maps import Linear, ops
from ..comm.axes import kind_of
from ..comm.mesh import Axis, Mesh
from ..geometry.layout import Leaf, Unit, unravel
from ..ops import ravel as _flat  # noqa: F401  (defines zerofn::ravel)
from ..util.arguments import checked
from .sharded import Sharded, check_whole, is_sharded
from .spec import Spec
from .storage import Stored
from .transfers import assembled, gather_unit, on_stage, reduce_unit


@dataclass(frozen=True)
class GatherUnit:
    """shard -> the unit's flat buffer in the compute dtype. `full`: the copy that is held of it, or of a part of it."""

    spec: Spec
    unit: Unit
    dtype: torch.dtype  # of the stored shard
    full: Tensor | None = field(default=None, compare=False)

    @property
    def transpose(self) -> ScatterUnit:
        """The averaging reduce-scatter."""
        return ScatterUnit(self.spec, self.unit, self.dtype)

    @property
    def tangent(self) -> GatherUnit:
        """Tangents are never cached."""
        return GatherUnit(self.spec, self.unit, self.dtype)

    def __call__(self, shard: Tensor) -> tuple[Tensor]:
        """Cast on the shard, then gather."""
        x = self.spec.precision.narrow(shard) if self.full is None else self.full
        return (gather_unit(self.spec, self.unit, x, self.dtype, from_copy=self.full is not None),)


@dataclass(frozen=True)
class ScatterUnit:
    """The unit's flat buffer on each rank -> this rank's shard of the mean over ranks, in the reduce dtype."""

    spec: Spec
    unit: Unit
    dtype: torch.dtype  # of the stored shard

    @property
    def transpose(self) -> GatherUnit:
        """The plain gather."""
        return GatherUnit(self.spec, self.unit, self.dtype)

    def __call__(self, flat: Tensor) -> tuple[Tensor]:
        """Reduce, then divide."""
        size = self.spec.mesh.batch.size
        flat = flat.to(self.spec.precision.reduces(self.dtype))
        shard = reduce_unit(self.spec, self.unit, flat)
        return (shard.div(size) if size > 1 else shard,)


@dataclass(frozen=True)
class Unravel:
    """flat [..., size] -> its leaves [..., *shape]."""

    unit: Unit
    dtype: torch.dtype

    @property
    def transpose(self) -> Ravel:
        """Back to the flat buffer."""
        return Ravel(self.unit, self.dtype)

    def __call__(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Views, marked where they are slices."""
        return tuple(
            _marked(x, leaf, ops.as_slice, leaf.name)
            for x, leaf in zip(unravel(flat, self.unit), self.unit.leaves, strict=True)
        )


@dataclass(frozen=True)
class Ravel:
    """Leaves [..., *shape] -> flat [..., size], with zeros in the padding."""

    unit: Unit
    dtype: torch.dtype

    @property
    def transpose(self) -> Unravel:
        """Back to leaves, without the padding."""
        return Unravel(self.unit, self.dtype)

    def __call__(self, *leaves: Tensor) -> tuple[Tensor]:
        """One copy."""
        return (ravel(leaves, self.unit, self.dtype),)


def ravel(leaves: Sequence[Tensor | None], unit: Unit, dtype: torch.dtype) -> Tensor:
    """The unit's flat buffer in `dtype`; None stands for zeros. What belongs to slices differs by right."""
    leaves = [None if x is None else _marked(x, leaf, ops.as_part) for x, leaf in zip(leaves, unit.leaves, strict=True)]
    num_batch_dims = next(
        (x.dim() - len(leaf.shape) for x, leaf in zip(leaves, unit.leaves, strict=True) if x is not None), 0
    )
    return ops.ravel(list(leaves), [leaf.offset for leaf in unit.leaves], unit.size, dtype, num_batch_dims)


def _marked(x: Tensor, leaf: Leaf, mark: Callable[..., Tensor], *of: str) -> Tensor:
    for cut in leaf.cuts:
        x = mark(x, cut.axis, *of)
    return x


def own_gradient(gradient: Tensor | None, leaf: Leaf, mesh: Mesh) -> Tensor | None:
    """Return what this rank adds up of a leaf's gradient: all of it, or nothing if the leaf lies on other stages."""
    found = expected(gradient, leaf, mesh)
    stages = on_stage(leaf.cuts, leaf.shape, mesh, leaf.name)
    return found if found is None or stages is None else stages.transpose(found)[0]


def expected(gradient: Tensor | None, leaf: Leaf, mesh: Mesh) -> Tensor | None:
    """Return a leaf's gradient, of which a captured step is to hold that ranks which have the leaf whole, and compute
    parts with slices of others, have the same.
    """
    if gradient is None or current_trace() is None:
        return gradient
    for axis in mesh.partial:
        if not any(cut.axis == axis.name for cut in leaf.cuts):
            gradient = ops.expect(gradient, axis.name, GRADIENT_OF + leaf.name)
    return gradient


def gather_leaves(
    sharded: Sharded, only: Callable[[str], bool] | None = None, decode: Callable[[Stored], Tensor] = Stored.decode
) -> list[Any]:
    """Return all logical leaves in the tree's order, differentiable in the shards. With `only`, units without a leaf
    of such a name are left out: None. `decode` returns the public tensor of a shard.
    """
    out: list[Any] = [None] * len(sharded.layout.where)
    copies: Sequence[Tensor | None] = sharded.full or [None] * len(sharded.stored)
    for unit, kept, full in zip(sharded.layout.units, sharded.stored, copies, strict=True):
        if only is not None and not any(only(leaf.name) for leaf in unit.leaves):
            continue
        (flat,) = Linear.apply(GatherUnit(sharded.spec, unit, kept.dtype, full), decode(kept))
        for leaf, x in zip(unit.leaves, Linear.apply(Unravel(unit, flat.dtype), flat), strict=True):
            stages = on_stage(leaf.cuts, leaf.shape, sharded.spec.mesh, leaf.name)
            out[leaf.index] = x if stages is None else Linear.apply(stages, x)[0]
    return out


@checked("only", "axis")
def gather(values: Any, *, axis: str | Axis | None = None, only: str | Callable[[str], bool] | None = None) -> Any:
    """Return a tree with the full tensors of every `Sharded` in it: one all-gather per unit.

    `values`: a tree; plain tensors and other leaves pass through. `axis`: the mesh axis to gather over, a name or an
    `Axis`; it must be the axis that the tree is sharded over, which is also what None means. `only`: the name of a
    leaf, a key path above leaves, or a predicate of leaf names; the other leaves are None, and units without a selected
    leaf are not gathered. Use `only` to read leaves: for a sliced leaf (along `tensor` or `expert`), the result is the
    whole leaf, as `unshard` returns it, and is not differentiable. Without `only`, it is this rank's slice, which
    sliced layers need.

    Each leaf is on the shards' device, in the precision's compute dtype (the stored dtype without a precision), the
    same on all ranks that have the same slices. At stages 1 and 2 the parameters hold a gathered copy, which is
    returned without communication. At these stages, and with one rank, the result shares the state's memory: clone a
    leaf that must outlive the next compiled step.

    Outside a compiled step, leaves on drives are read at once, into new memory.

    A pure function, differentiable to every order; its transpose is `scatter`. All ranks must call it. Raises
    `ValueError` for an axis that the tree is not sharded over; `KeyError` if `only` selects no leaf; `TypeError` if a
    value is `params["name"]` (one rank's part of a leaf), or if a sliced leaf that `only` selects would be
    differentiated; `RuntimeError` for a donated state.

    >>> import zerofn
    >>> params = zerofn.shard({"params": {"w": torch.arange(3.0)}})["params"]
    >>> zerofn.gather(params, axis="data")
    {'w': tensor([0., 1., 2.])}
    """
    check_whole(values, "gather")
    chosen = _named(only) if isinstance(only, str) else only
    found: list[str] = []

    def full(x: Any) -> Any:
        if not is_sharded(x):
            return x
        x.spec.check_axis(axis, "gather")
        leaves = gather_leaves(x, chosen, Stored.load_and_decode)
        if chosen is not None:
            kept = [[leaf for leaf in unit.leaves if chosen(leaf.name)] for unit in x.layout.units]
            found.extend(leaf.name for each in kept for leaf in each)
            leaves = _looked_at(leaves, kept, x.spec.mesh)
        return tree.unflatten(x.layout.treedef, leaves)

    out = tree.tree_map(full, values, is_leaf=is_sharded)
    if only is not None and not found:
        raise KeyError(
            f"gather: only={only!r} selects no leaf of the tree. print(params) shows the names of its units."
        )
    return out


def _looked_at(values: Sequence[Any], kept: Sequence[Sequence[Leaf]], mesh: Mesh) -> list[Any]:
    """Return the whole leaves that are kept of each unit, by their indices, of which `values` are this rank's slices;
    None for the others.
    """
    out: list[Any] = [None] * len(values)
    for leaves in kept:
        for leaf in leaves:
            out[leaf.index] = values[leaf.index]
        cuts = {
            leaf.index: [x for x in leaf.cuts if mesh.size(x.axis) > 1 and not kind_of(x.axis).stages]
            for leaf in leaves
        }
        cut = [leaf for leaf in leaves if cuts[leaf.index]]
        odd = next((x for x in cut if out[x.index].requires_grad and torch.is_grad_enabled()), None)
        if odd is not None:
            raise TypeError(
                f"gather: each rank has a slice of {odd.name!r}, and gather(only=...) joins the slices without a "
                "derivative, but the parameters require grad. Leave `only` out to compute with this rank's slice, or "
                "detach the parameters to read the whole leaf."
            )
        whole = assembled([out[x.index].detach() for x in cut], [cuts[x.index] for x in cut], mesh)
        for leaf, x in zip(cut, whole, strict=True):
            out[leaf.index] = x
    return out


def _named(path: str) -> Callable[[str], bool]:
    return lambda name: name == path or name.startswith(f"{path}.")


@checked()
def scatter(values: Any, like: Sharded, *, axis: str | Axis | None = None) -> Sharded:
    """Average a tree of full tensors over ranks. Return this rank's shards of the mean: one reduce-scatter per unit.

    `values`: a tree with the leaves of `like`, floating tensors in their full shapes, different on every rank.
    `like`: the tree whose layout the result takes, usually the parameters. `axis`: the mesh axis to average over, a
    name or an `Axis`; it must be the axis that `like` is sharded over, which is also what None means.

    Shards are on the values' device, in the precision's reduce dtype (by default its compute dtype, or the stored
    one). Ranks are summed in order, so every stage gives the same bits.

    A pure function, differentiable to every order; its transpose is `gather`. All ranks must call it. Raises
    `ValueError` if names or shapes differ from those of `like`, or for an axis that it is not sharded over.

    >>> import zerofn
    >>> params = zerofn.shard({"params": {"w": torch.zeros(3)}})["params"]
    >>> zerofn.gather(zerofn.scatter({"w": torch.arange(3.0)}, like=params, axis="data"))
    {'w': tensor([0., 1., 2.])}
    """
    like.spec.check_axis(axis, "scatter")
    of_experts = (cut.axis for leaf in like.layout.leaves for cut in leaf.cuts if kind_of(cut.axis).experts)
    if (found := next(of_experts, None)) is not None:  # the ranks that have them are fewer than it divides by
        raise NotImplementedError(
            f"scatter: some leaves are cut along {found!r}, and scatter cannot average such slices yet. Take gradients "
            "with zerofn.value_and_grad, or through zerofn.gather."
        )
    leaves, treedef = tree.flatten(values)
    expected = like.layout.leaves
    names = list(map(tree.name_of, treedef.paths()))
    if names != [leaf.name for leaf in expected]:
        odd = sorted({leaf.name for leaf in expected} ^ set(names))[:3]
        raise ValueError(
            f"scatter: expected the {len(expected)} leaves of `like`, got {len(names)} leaves; the names differ in "
            f"{odd}."
        )
    for value, leaf in zip(leaves, expected, strict=True):
        if tuple(value.shape) != leaf.shape:
            raise ValueError(f"scatter: {leaf.name!r} has shape {tuple(value.shape)}, expected {leaf.shape}.")
    shards = []
    for unit, shard in zip(like.layout.units, like.stored, strict=True):
        mine = [leaves[leaf.index] for leaf in unit.leaves]
        dtype = functools.reduce(torch.promote_types, [x.dtype for x in mine])
        (flat,) = Linear.apply(Ravel(unit, dtype), *mine)
        shards.append(Linear.apply(ScatterUnit(like.spec, unit, shard.dtype), flat)[0])
    return Sharded(like.spec, shards)
