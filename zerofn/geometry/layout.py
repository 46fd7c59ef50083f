"""The place of every leaf: leaf <-> (unit, offset, shape). No communication here.

[Note: layout] The leaves of one *unit* (usually a layer; FSDP's parameter group) are raveled into one flat buffer. Each
leaf starts at a multiple of `ALIGN` elements. Slices of leaves along `tensor` come behind whole leaves, and start at a
multiple of `SHARD_MULTIPLE`: so a block with a scale of its own, of what is sent or of moments in 8 bits, has elements
of one kind, and ranks along `tensor` round whole leaves alike. The buffer is padded so that it cuts into N equal shards
of a multiple of `SHARD_MULTIPLE` elements; rank r owns the r-th shard. Padding is never read: it may hold anything. A
unit whose leaves have no elements on this rank has none either: then those that it is cut over have nothing of it, and
send nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..comm.axes import USUAL, kind_of
from ..tree import PyTreeSpec
from ..util.errors import nearest
from .cuts import Cut, stages_of
from .grouping import units_by_leaf
from .leaf_choices import by_levels, is_learned, with_prefixes

PART_MULTIPLE = 128  # elements: the smallest block that is sent with a scale of its own
ALIGN = 32  # elements: 64 bytes in bf16, the alignment of torch's own allocator
SHARD_MULTIPLE = 2048  # elements: a whole number of 256-element quantisation blocks and of vector widths
_NO_NAME = "masks and labels receive a leaf, not its name"


class LeafInfo(NamedTuple):
    """A logical leaf, the argument of functions for masks and labels; never a flat shard.

    >>> leaf = LeafInfo("layers.0.weight", (4, 2), torch.float32)
    >>> leaf.ndim, leaf.numel()
    (2, 8)
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    # Functions that expect a name would work on a tuple, and always give the same answer.

    def __contains__(self, x: object) -> bool:
        if isinstance(x, str):
            raise TypeError(f"{x!r} in leaf: {_NO_NAME}; write {x!r} in leaf.name.")
        return tuple.__contains__(self, x)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            raise TypeError(f"leaf == {other!r}: {_NO_NAME}; write leaf.name == {other!r}.")
        return tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return tuple.__hash__(self)

    def __getattr__(self, name: str) -> Any:
        if hasattr(str, name):
            advice = f"{_NO_NAME}; write leaf.name.{name}"
        else:
            advice = "a leaf has name, shape, dtype, ndim and numel(), but no values"
        raise AttributeError(f"a leaf has no {name!r}: {advice}.")


@dataclass(frozen=True)
class Leaf:
    """One logical tensor, or this rank's slice of it: name, shape, and its place in the tree and in its unit's flat
    buffer. `cuts`: how the slices of ranks make up the whole. `order`: its place among the unit's leaves where all are
    whole.
    """

    name: str
    shape: tuple[int, ...]
    index: int  # position among the tree's leaves
    offset: int  # elements from the start of the unit
    dtype: torch.dtype = field(compare=False)
    cuts: tuple[Cut, ...] = ()
    order: int = field(default=0, compare=False)

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        sizes = {cut.dim: cut.size for cut in self.cuts}
        return tuple(sizes.get(d, n) for d, n in enumerate(self.shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def of_experts(self) -> bool:
        """Whether it is a slice of experts."""
        return cut_by_experts(self.cuts)

    @property
    def stop(self) -> int:
        """Offset of the first element after the leaf."""
        return self.offset + self.numel


@dataclass(frozen=True)
class Unit:
    """One flat buffer: some leaves of one dtype, all trainable or all frozen. `size` counts padding. `num_shards`: the
    equal parts that it is cut into.
    """

    name: str = field(compare=False)  # two parts of one structure, such as twin critics, get equal layouts
    leaves: tuple[Leaf, ...]
    size: int
    trainable: bool
    dtype: torch.dtype = field(compare=False)
    num_shards: int

    @property
    def numel(self) -> int:
        """Elements that belong to leaves."""
        return sum(leaf.numel for leaf in self.leaves)

    @property
    def of_experts(self) -> bool:
        """Whether it consists of slices of experts, and is cut into shards over the ranks that have the same ones."""
        return any(leaf.of_experts for leaf in self.leaves)

    def intervals(self, start: int, stop: int) -> Iterator[tuple[Leaf, int, int]]:
        """Yield (leaf, a, b): the parts of leaves in [start, stop), as offsets from `start`."""
        for leaf in self.leaves:
            a, b = max(leaf.offset, start), min(leaf.stop, stop)
            if a < b:
                yield leaf, a - start, b - start

    def runs(self, start: int, stop: int, value: Callable[[Leaf], Hashable]) -> list[tuple[int, int, Any]]:
        """Return [start, stop) cut where `value` changes: [(a, b, value)].

        The gap between two leaves also ends a run. A kernel may round the last elements of its input
        differently; these are then the last of one leaf, as in plain torch.
        """
        out: list[tuple[int, int, Any]] = []
        for leaf, a, b in self.intervals(start, stop):
            v = value(leaf)
            if out and out[-1][1:] == (a, v):
                out[-1] = (out[-1][0], b, v)
            else:
                out.append((a, b, v))
        return out


@dataclass(frozen=True, eq=False)
class Layout:
    """The cut of a tree of tensors into units, and of units into shards. `axis`: the ranks that have these."""

    units: tuple[Unit, ...]
    treedef: PyTreeSpec
    axis: str

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return (self.units, self.axis)

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self._hash == other._hash and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def where(self) -> dict[str, tuple[int, Leaf]]:
        """Leaf name -> (index of its unit, leaf)."""
        return {leaf.name: (i, leaf) for i, unit in enumerate(self.units) for leaf in unit.leaves}

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """All leaves in the tree's order."""
        return tuple(sorted((leaf for unit in self.units for leaf in unit.leaves), key=lambda x: x.index))

    def cut(self, unit: Unit, shard: int) -> tuple[int, int]:
        """[start, stop) of a rank's shard of `unit`, in elements."""
        size = unit.size // unit.num_shards
        return shard * size, (shard + 1) * size

    def subset(self, prefix: str) -> Layout:
        """Return the layout of the units under `prefix`. Raises `KeyError` if a unit is only partly under it."""
        names = {n for n in self.where if n == prefix or n.startswith(prefix + ".")}
        units = tuple(u for u in self.units if any(leaf.name in names for leaf in u.leaves))
        if not names:
            raise KeyError(_nothing_under(prefix, self))
        for unit in units:
            outside = [leaf.name for leaf in unit.leaves if leaf.name not in names]
            if outside:
                raise KeyError(
                    f"params[{prefix!r}]: unit {unit.name!r} also holds {outside[0]!r}, so the entry cannot be taken "
                    "out. Put them into separate units with shard(..., unit=lambda path: ...)."
                )
        return self._keep(prefix, units)

    def _keep(self, prefix: str, units: tuple[Unit, ...]) -> Layout:
        order = {index: k for k, index in enumerate(sorted(leaf.index for u in units for leaf in u.leaves))}
        paths = self.treedef.paths()
        heads = {paths[i][0] for i in order}
        inside = len(heads) == 1 and all(len(paths[i]) > 1 for i in order) and str(next(iter(heads))) == prefix
        sub = (
            self.treedef.child(self.treedef.entries().index(next(iter(heads))))
            if inside
            else tree.structure({str(paths[i][0]): i for i in order})
        )
        if sub.num_leaves != len(order):
            raise KeyError(
                f"params[{prefix!r}]: only a top-level entry of params can be taken out. Write "
                f"params{by_levels(prefix, paths[min(order)])}."
            )
        strip = len(prefix) + 1 if inside else 0
        renamed = tuple(
            replace(u, leaves=tuple(replace(x, name=x.name[strip:], index=order[x.index]) for x in u.leaves))
            for u in units
        )
        return Layout(renamed, sub, self.axis)


def _nothing_under(name: str, layout: Layout) -> str:
    near = nearest(name, with_prefixes(layout.where))
    units = [u.name for u in layout.units]
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"the units are {units}."
    return f"params: no leaf is named {name!r} or below it; {hint}"


def restrict(layout: Layout, keep: Callable[[Unit, Leaf], bool]) -> Layout:
    """Return the layout with None for leaves that are not kept. They become padding; units without leaves disappear."""
    kept = {leaf.index for unit in layout.units for leaf in unit.leaves if keep(unit, leaf)}
    if len(kept) == len(layout.where):
        return layout
    order = {index: k for k, index in enumerate(sorted(kept))}
    units = []
    for u in layout.units:
        leaves = tuple(replace(x, index=order[x.index]) for x in u.leaves if x.index in kept)
        if leaves:
            units.append(replace(u, leaves=leaves))
    marks = [i if i in kept else None for i in range(layout.treedef.num_leaves)]
    treedef = tree.structure(tree.unflatten(layout.treedef, marks))
    return Layout(tuple(units), treedef, layout.axis)


def make_layout(
    params: Any,
    num_shards: int,
    *,
    axis: str = USUAL,
    of_experts: int | None = None,
    replicas: int = 1,
    unit: Callable[[str], str] | None = None,
    trainable: Callable[[str], bool] = lambda name: True,
    label: Callable[[str, Tensor], Hashable] = lambda name, leaf: (),
    dtype: torch.dtype | None = None,
    slice_of: Callable[[str, tuple[int, ...]], tuple[tuple[int, ...], tuple[Cut, ...]]] = lambda name, shape: (
        shape,
        (),
    ),
) -> Layout:
    """Assign every tensor leaf of `params` a unit and an offset.

    A unit is the key path up to its first integer component; leaves without one join by parent module. Units under 2^16
    elements merge into the previous one, within one top-level entry of a nested tree. `unit` (leaf name -> unit name)
    replaces these rules. There is one buffer per (unit, dtype, trainable, stages it lies on), and one of its own for
    slices along `expert`, which fewer ranks have: it is cut into `of_experts` shards, by default `num_shards` like the
    others. Within it, whole leaves come first, then slices along `tensor`; both are ordered by (label, path), so that
    each label of an optimizer is one run of elements. `dtype` replaces the leaves' floating dtype (the master's).
    `slice_of`: (name, shape) of a leaf -> the shape of this rank's slice, and the cuts.

    Raises `TypeError` for a complex leaf that is to be trained; integers never are.
    """
    paths, values, treedef = tree.flatten_with_path(params)
    order = sorted(range(len(paths)), key=lambda i: tree.natural_key(paths[i]))
    slices = {i: slice_of(tree.name_of(paths[i]), tuple(values[i].shape)) for i in order}
    groups = units_by_leaf(paths, values, order, unit, {i: stages_of(cuts) for i, (_, cuts) in slices.items()})
    place = {i: k for k, i in enumerate(order)}
    buffers: dict[_Kind, list[int]] = {}
    for i in order:
        kind = dtype if dtype is not None and values[i].is_floating_point() else values[i].dtype
        learns = is_learned(tree.name_of(paths[i]), values[i], trainable)
        apart = cut_by_experts(slices[i][1]), stages_of(slices[i][1])
        buffers.setdefault(_Kind(groups[i], kind, learns, *apart), []).append(i)
    names = _buffer_names(buffers)
    units = []
    for key, members in buffers.items():
        shards = of_experts if key.of_experts and of_experts is not None else num_shards
        labels = {i: repr(label(tree.name_of(paths[i]), values[i])) for i in members}
        members = sorted(members, key=lambda i: (labels[i], place[i]))
        units.append(
            _unit(
                names[key],
                [(i, tree.name_of(paths[i]), *slices[i]) for i in members],
                padded_to(shards, replicas),
                key.dtype,
                key.trainable,
                shards,
            )
        )
    return Layout(tuple(units), treedef, axis)


def cut_by_experts(cuts: Iterable[Cut]) -> bool:
    """Return whether slices of a leaf are those of experts."""
    return any(kind_of(cut.axis).experts for cut in cuts)


def _is_slice(cuts: Iterable[Cut]) -> bool:
    """Return whether ranks have slices of a leaf in a buffer that all of them have."""
    kinds = [kind_of(cut.axis) for cut in cuts]
    return any(not kind.experts and not kind.stages for kind in kinds)


class _Kind(NamedTuple):
    """What leaves of one buffer have in common."""

    group: str
    dtype: torch.dtype
    trainable: bool
    of_experts: bool
    stages: tuple[int, ...]


def _buffer_names(keys: Iterable[_Kind]) -> dict[_Kind, str]:
    """Return unit names. If one group has several buffers, the later names say what sets them apart."""
    names: dict[_Kind, str] = {}
    for key in keys:
        name = key.group
        if name in names.values():
            words = [str(key.dtype).removeprefix("torch."), "" if key.trainable else "frozen"]
            words += ["experts" if key.of_experts else "", " and ".join(f"stage {k}" for k in key.stages)]
            name += f" ({', '.join(filter(None, words))})"
        names[key] = name
    return names


def _unit(
    name: str,
    members: Sequence[tuple[int, str, tuple[int, ...], tuple[Cut, ...]]],
    block: int,
    dtype: torch.dtype,
    trainable: bool,
    num_shards: int,
) -> Unit:
    leaves: list[Leaf] = []
    offset = 0
    for order, (index, leaf_name, shape, cuts) in sorted(enumerate(members), key=lambda x: _is_slice(x[1][3])):
        if leaves and _is_slice(cuts) and not _is_slice(leaves[-1].cuts):
            offset = padded(offset, SHARD_MULTIPLE)
        leaf = Leaf(leaf_name, shape, index, offset, dtype, cuts, order)
        leaves.append(leaf)
        offset = padded(leaf.stop, ALIGN)
    return Unit(name, tuple(leaves), padded(offset, block), trainable, dtype, num_shards)


def padded_to(num_shards: int, replicas: int = 1) -> int:
    """Return what the elements of a unit are a multiple of: it cuts into equal shards, and a shard into equal parts for
    the ranks that share it, whose gradients they sum, each of whole blocks.
    """
    return num_shards * math.lcm(SHARD_MULTIPLE, PART_MULTIPLE * replicas)


def padded(stop: int, block: int) -> int:
    """Return the elements of a unit whose leaves end at `stop`: a multiple of `block`, 0 where leaves have none."""
    return -(-stop // block) * block


def unravel(flat: Tensor, unit: Unit) -> list[Tensor]:
    """Return the leaves of `unit` as views of `flat`: [..., unit.size] -> [..., *leaf.shape] each."""
    lead = flat.shape[:-1]
    return [flat.narrow(-1, leaf.offset, leaf.numel).view((*lead, *leaf.shape)) for leaf in unit.leaves]
