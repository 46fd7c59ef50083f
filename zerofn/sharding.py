"""`Sharded`, and the two functions that give and take it: `gather` and `scatter`, each the other's transpose.

[Note: inner products] Values on gathered parameters (a loss, its gradients) are one per rank and stand for
their mean over the data axis; values on shards are parts of one whole and stand for their sum. Under these
inner products the transpose of the all-gather is the averaging reduce-scatter, and the transpose of that is
the plain all-gather. With derivatives defined so, gradients, Hessian-vector products and everything of
higher order come out as those of the global batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from . import donation, tree
from .collectives import AllGather, Linear, ReduceScatter, ops
from .layout import Layout, Leaf, Unit, restrict, unravel
from .mesh import Axis
from .ops import flat as _flat  # noqa: F401  (defines zerofn::ravel)
from .precision import Precision
from .transport import generation, wait_

_signatures: dict[Any, int] = {}


@dataclass(frozen=True)
class Spec:
    """What is static about a `Sharded`. Equal specs have equal layouts: dtype, stage and rank do not count."""

    layout: Layout
    axis: Axis = field(compare=False)
    stage: int = field(compare=False)
    precision: Precision = field(compare=False)

    @property
    def num_pieces(self) -> int:
        """How many parts a unit is stored in: 1 at stage 0."""
        return 1 if self.stage == 0 else self.axis.size

    def bounds(self, unit: Unit) -> tuple[int, int]:
        """[start, stop) of what this rank stores of `unit`, in elements."""
        if self.num_pieces == 1:
            return 0, unit.size
        return self.layout.cut(unit, self.axis.rank)

    @cached_property
    def signature(self) -> int:
        """A number that two specs share if a step captured with one may run with the other on this rank."""
        axis = self.axis
        key = (self.layout, self.layout.treedef, self.stage, self.precision, axis.rank, axis.size, axis.group)
        return _signatures.setdefault(key, len(_signatures))

    @cached_property
    def trainable(self) -> Spec:
        """The spec without frozen units."""
        return Spec(restrict(self.layout, lambda unit, _: unit.trainable), self.axis, self.stage, self.precision)


class Sharded:
    """This rank's pieces of a tree of tensors: a pytree node whose leaves are flat tensors, one per unit.

    `tree_map` over `Sharded` trees of one layout is the partitioned elementwise operation. Anything that is
    not elementwise goes through functions that know about ranks (`zerofn.global_norm`, `zerofn.gather`, ...).
    Using one after a compiled step consumed it, or another one that holds the same pieces, raises `RuntimeError`.
    """

    __slots__ = ("__weakref__", "_arriving", "_copies", "_lost", "_pieces", "spec")

    def __init__(self, spec: Spec, pieces: Iterable[Tensor], full: Sequence[Tensor] | None = None) -> None:
        self.spec = spec
        self._pieces = tuple(pieces)
        self._copies = full  # stages 1 and 2: the gathered copy, a cache beside the tree
        self._arriving = 0  # the generation of the transfers that fill it, while nobody has waited for them
        self._lost: str | None = None

    @property
    def pieces(self) -> tuple[Tensor, ...]:
        """The local pieces, flat, in unit order."""
        why = self.lost
        if why is not None:
            raise RuntimeError(why)
        return self._pieces

    @property
    def lost(self) -> str | None:
        """Why it can no longer be used, given away itself or by another one with the same pieces; None while it can."""
        return self._lost or donation.reason(self._pieces)

    @property
    def copies(self) -> Sequence[Tensor] | None:
        """The gathered copy of every unit, perhaps still arriving; None where there is none."""
        if self._arriving and self._arriving != generation():
            self.forget_copies()  # a failed step has cut off all transfers, or this is a forked process
        return self._copies

    @property
    def full(self) -> Sequence[Tensor] | None:
        """The gathered copy of every unit, complete; None where there is none."""
        copies = self.copies
        if self._arriving and copies is not None:
            for copy in copies:
                wait_(copy)
            self._arriving = 0
        return copies

    @property
    def layout(self) -> Layout:
        """Where every leaf lies."""
        return self.spec.layout

    def move(self, pieces: Iterable[Tensor], full: Sequence[Tensor] | None) -> None:
        """Hold the same values in other buffers, with a gathered copy beside them."""
        self._pieces, self._copies, self._arriving = tuple(pieces), full, 0

    def expect_copies(self) -> None:
        """Say that transfers into the gathered copy are under way, for whoever needs it first to wait for."""
        self._arriving = generation()

    def forget_copies(self) -> None:
        """Drop the gathered copy, whatever has arrived of it."""
        self._copies, self._arriving = None, 0

    def donate(self, why: str) -> None:
        """Give the buffers away; from here on any use raises `why`."""
        self._lost, self._pieces = why, ()
        self.forget_copies()

    def __getitem__(self, name: str) -> Sharded | Held:
        """A leaf's name -> what this rank holds of it; a prefix -> the `Sharded` of the units under it."""
        place = self.layout.where.get(name)
        if place is not None:
            return Held.of(self, *place)
        layout = self.layout.subset(name)
        kept = self._positions(layout)
        full = None if self.full is None else [self.full[i] for i in kept]
        spec = Spec(layout, self.spec.axis, self.spec.stage, self.spec.precision)
        return Sharded(spec, [self.pieces[i] for i in kept], full)

    def _positions(self, part: Layout) -> list[int]:
        """Where the units of a subset of the layout are."""
        index = {u.name: i for i, u in enumerate(self.layout.units)}
        return [index[u.name] for u in part.units]

    def replace(self, parts: dict[str, Sharded]) -> Sharded:
        """The same tree with `self[prefix]` replaced for every prefix of `parts`."""
        pieces = list(self.pieces)
        for prefix, part in parts.items():
            mine = self[prefix]
            if not isinstance(mine, Sharded) or mine.layout != part.layout:
                raise ValueError(f"replace: what is given for {prefix!r} is not laid out like params[{prefix!r}].")
            for i, piece in zip(self._positions(mine.layout), part.pieces, strict=True):
                pieces[i] = piece
        return Sharded(self.spec, pieces)

    def __reduce__(self) -> tuple[Any, ...]:
        # For copy and pickle: the gathered copy may be half there, and can be made again.
        return Sharded, (self.spec, self.pieces)

    def __repr__(self) -> str:
        return describe(self)


@dataclass(frozen=True)
class Held:
    """What this rank holds of one leaf: `local` is the flat part, elements [start, stop) of the raveled leaf."""

    name: str
    shape: tuple[int, ...]
    unit: str
    start: int
    stop: int
    local: Tensor = field(repr=False, compare=False)

    @staticmethod
    def of(sharded: Sharded, index: int, leaf: Leaf) -> Held:
        """The held part of `leaf` of the index-th unit."""
        unit, piece = sharded.layout.units[index], sharded.pieces[index]
        begin, end = sharded.spec.bounds(unit)
        for found, a, b in unit.intervals(begin, end):
            if found is leaf:
                first = begin + a - leaf.offset
                return Held(leaf.name, leaf.shape, unit.name, first, first + b - a, piece[a:b])
        return Held(leaf.name, leaf.shape, unit.name, 0, 0, piece[:0])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask before there are fields
            raise AttributeError(name)
        advice = ("; it says what this rank holds of a leaf and is no tensor: write "
                  f"zerofn.gather(params)[{self.name!r}].{name}, or .local for this rank's part"
                  ) if hasattr(Tensor, name) else ""
        raise AttributeError(f"params[{self.name!r}] has no {name!r}{advice}.")

    def __repr__(self) -> str:
        share = f"elements {self.start:,}:{self.stop:,}" if self.stop > self.start else "none of it"
        size = self.local.numel() * self.local.element_size()
        dtype = str(self.local.dtype).removeprefix("torch.")
        return f"{self.name} {list(self.shape)} {dtype}, unit {self.unit!r}; here: {share} ({size:,} bytes)"


tree.register_node(Sharded, lambda s: (s.pieces, s.spec), lambda spec, pieces: Sharded(spec, pieces))


def is_sharded(x: Any) -> bool:
    """Whether `x` is a `Sharded` node."""
    return isinstance(x, Sharded)


def describe(sharded: Sharded) -> str:
    """A table: one line per unit with its leaves, global elements, dtype and the bytes held here."""
    spec = sharded.spec
    if sharded.lost is not None:
        return f"Sharded(donated: {sharded.lost})"
    held = sum(p.numel() * p.element_size() for p in sharded.pieces)
    total = sum(u.numel for u in spec.layout.units)
    lines = [f"Sharded: {len(spec.layout.where)} leaves, {total:,} elements in {len(spec.layout.units)} units; "
             f"stage {spec.stage}, rank {spec.axis.rank} of {spec.axis.size} holds {held:,} bytes"]
    width = max((len(u.name) for u in spec.layout.units), default=0)
    for unit, piece in zip(spec.layout.units, sharded.pieces, strict=True):
        a, b = spec.bounds(unit)
        dtype = str(piece.dtype).removeprefix("torch.")
        lines.append(f"  {unit.name:<{width}}  {len(unit.leaves):>3} leaves  {unit.numel:>12,} x {dtype}  "
                     f"here [{a:,}:{b:,}]{'' if unit.trainable else '  frozen'}")
    return "\n".join(lines)


def trainable(sharded: Sharded) -> Sharded:
    """The part an optimizer sees: without the frozen units."""
    spec = sharded.spec.trainable
    if spec.layout is sharded.layout:
        return sharded
    kept = [i for i, u in enumerate(sharded.layout.units) if u.trainable]
    full = None if sharded.full is None else [sharded.full[i] for i in kept]
    return Sharded(spec, [sharded.pieces[i] for i in kept], full)


def with_trainable(sharded: Sharded, part: Sharded) -> Sharded:
    """`sharded` with its trainable units from `part`."""
    if len(part.layout.units) == len(sharded.layout.units):
        return Sharded(sharded.spec, part.pieces)
    fresh = iter(part.pieces)
    pieces = [next(fresh) if u.trainable else p for u, p in zip(sharded.layout.units, sharded.pieces, strict=True)]
    return Sharded(sharded.spec, pieces)


# The four maps of which gather and scatter are made. [Note: inner products]


@dataclass(frozen=True)
class GatherUnit:
    """piece -> the unit's flat buffer, in the compute dtype; `full` is that buffer where it is cached."""

    spec: Spec
    unit: Unit
    dtype: torch.dtype  # of the stored piece
    full: Tensor | None = field(default=None, compare=False)

    @property
    def transpose(self) -> ScatterUnit:
        """The averaging reduce-scatter."""
        return ScatterUnit(self.spec, self.unit, self.dtype)

    @property
    def tangent(self) -> GatherUnit:
        """Tangents are never cached."""
        return GatherUnit(self.spec, self.unit, self.dtype)

    def __call__(self, piece: Tensor) -> tuple[Tensor]:
        """Cast on the shard, then gather."""
        if self.full is not None:
            return (self.full.view_as(self.full),)
        piece = piece.to(self.spec.precision.computes(self.dtype))
        if self.spec.num_pieces == 1:
            return (ops.whole(piece),)
        return AllGather(self.spec.axis, self.unit.name)(piece)


@dataclass(frozen=True)
class ScatterUnit:
    """The unit's flat buffer on each rank -> this rank's piece of the mean over ranks, in the reduce dtype."""

    spec: Spec
    unit: Unit
    dtype: torch.dtype  # of the stored piece

    @property
    def transpose(self) -> GatherUnit:
        """The plain gather."""
        return GatherUnit(self.spec, self.unit, self.dtype)

    def __call__(self, flat: Tensor) -> tuple[Tensor]:
        """Reduce, then divide."""
        size = self.spec.axis.size
        flat = flat.to(self.spec.precision.reduces(self.dtype))
        piece = reduce_unit(self.spec, self.unit, flat)
        return (piece.div(size) if size > 1 else piece,)


def reduce_unit(spec: Spec, unit: Unit, flat: Tensor) -> Tensor:
    """flat [..., size] on each rank -> what this rank stores of the sum over ranks, summed in rank order."""
    if spec.axis.size == 1:
        return ops.piece(flat)
    (piece,) = ReduceScatter(spec.axis, unit.name)(flat)
    # Stage 0 in the same two halves, so that its sums have the same bits as every other stage's.
    return piece if spec.num_pieces > 1 else ops.piece(AllGather(spec.axis, unit.name)(piece)[0])


@dataclass(frozen=True)
class Unravel:
    """flat [..., size] -> its leaves [..., *shape]."""

    unit: Unit
    dtype: torch.dtype

    @property
    def transpose(self) -> Ravel:
        """Back into the flat buffer."""
        return Ravel(self.unit, self.dtype)

    def __call__(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Views."""
        return tuple(unravel(flat, self.unit))


@dataclass(frozen=True)
class Ravel:
    """Leaves [..., *shape] -> flat [..., size], zero where there is padding."""

    unit: Unit
    dtype: torch.dtype

    @property
    def transpose(self) -> Unravel:
        """The leaves again; what lies in the padding is dropped."""
        return Unravel(self.unit, self.dtype)

    def __call__(self, *leaves: Tensor) -> tuple[Tensor]:
        """One copy."""
        return (ravel(leaves, self.unit, self.dtype),)


def ravel(leaves: Sequence[Tensor | None], unit: Unit, dtype: torch.dtype) -> Tensor:
    """The unit's flat buffer in `dtype`; None stands for zeros."""
    num_batch_dims = next((x.dim() - len(leaf.shape) for x, leaf in zip(leaves, unit.leaves, strict=True)
                           if x is not None), 0)
    return ops.ravel(list(leaves), [leaf.offset for leaf in unit.leaves], unit.size, dtype, num_batch_dims)


def gather_leaves(sharded: Sharded) -> list[Tensor]:
    """All logical leaves, in the tree's order, differentiable in the pieces."""
    out: list[Any] = [None] * len(sharded.layout.where)
    for i, unit in enumerate(sharded.layout.units):
        full = None if sharded.full is None else sharded.full[i]
        (flat,) = Linear.apply(GatherUnit(sharded.spec, unit, sharded.pieces[i].dtype, full), sharded.pieces[i])
        for leaf, value in zip(unit.leaves, Linear.apply(Unravel(unit, flat.dtype), flat), strict=True):
            out[leaf.index] = value
    return out


def gather(values: Any) -> Any:
    """Every `Sharded` in a tree -> the tree of full tensors it stands for, in the compute dtype.

    All ranks must call it. A pure function, differentiable to every order; its transpose is `scatter`. Plain tensors
    pass unchanged. At stages 1 and 2 the gathered copy that hangs on the parameters is returned without communication.
    There, and at one rank, the result shares the state's memory: clone what is to outlive the next compiled step.
    """
    def full(x: Any) -> Any:
        return tree.unflatten(x.layout.treedef, gather_leaves(x)) if is_sharded(x) else x

    return tree.tree_map(full, values, is_leaf=is_sharded)


def scatter(values: Any, like: Sharded) -> Sharded:
    """A tree of full tensors on each rank -> this rank's pieces of their mean over ranks, laid out as `like`.

    A pure function, differentiable to every order; its transpose is `gather`. All ranks must call it. Raises
    `ValueError` where structure or shapes are not those of `like`.
    """
    leaves, treedef = tree.flatten(values)
    expected = like.layout.leaves
    names = list(map(tree.name_of, treedef.paths()))
    if names != [leaf.name for leaf in expected]:
        odd = sorted({leaf.name for leaf in expected} ^ set(names))[:3]
        raise ValueError(f"scatter: expected the {len(expected)} leaves of `like`, got {len(names)}, which differ in "
                         f"{odd}.")
    for value, leaf in zip(leaves, expected, strict=True):
        if tuple(value.shape) != leaf.shape:
            raise ValueError(f"scatter: {leaf.name!r} has shape {tuple(value.shape)}, expected {leaf.shape}.")
    pieces = []
    for unit, piece in zip(like.layout.units, like.pieces, strict=True):
        mine = [leaves[leaf.index] for leaf in unit.leaves]
        dtype = functools.reduce(torch.promote_types, [x.dtype for x in mine])
        (flat,) = Linear.apply(Ravel(unit, dtype), *mine)
        pieces.append(Linear.apply(ScatterUnit(like.spec, unit, piece.dtype), flat)[0])
    return Sharded(like.spec, pieces)
