"""A state as a checkpoint sees it: named parts, and the named leaves in them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..geometry.overlaps import Region, region_of, shape_in
from ..sharding.sharded import Sharded, is_sharded
from ..sharding.state_tree import as_tensor
from ..sharding.storage import StorageSpec
from ..training.feedback import Feedback
from ..training.loss_scale import NoLossScale, StaticLossScale
from ..tree import PyTreeSpec
from ..util.errors import nearest
from .tensor_file import CODES


@dataclass(frozen=True)
class StatePart:
    """A `Sharded` or a replicated leaf of a state. `optional`: it belongs to what a state may lack."""

    name: str
    value: Any
    optional: bool = False

    @property
    def tensor(self) -> Tensor:
        """A replicated leaf as a tensor; numbers as 0-d ones."""
        return self.value.detach() if isinstance(self.value, Tensor) else as_tensor(self.value)


@dataclass(frozen=True)
class NamedLeaf:
    """A logical leaf of `shape`. `unit` and `offset`: its place in a `Sharded`, or that of its slice `region`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: int = -1
    offset: int = 0
    optional: bool = False
    region: Region = ()

    @property
    def numel(self) -> int:
        """The number of elements that lie there: of its slice."""
        return math.prod(shape_in(self.shape, self.region))


def take_apart(state: Any, what: str) -> tuple[list[StatePart], PyTreeSpec]:
    """Return the parts of a state in tree order, and the treedef that puts them together again.

    Raises `TypeError` for a leaf that a checkpoint cannot store, `ValueError` if two leaves have one name.
    """
    nodes, treedef = tree.flatten(state, is_leaf=is_sharded)
    names = tree.field_names(treedef)
    optional = _optional(state)
    parts = [StatePart(n, x, n.startswith(optional)) for n, x in zip(names, nodes, strict=True)]
    seen: set[str] = set()
    for part in parts:
        _check_value(part, what)
        for leaf in leaves_of(part):
            if leaf.name in seen:
                raise ValueError(f"{what}: two leaves have the name {leaf.name!r}. Rename one of them.")
            seen.add(leaf.name)
            _check_dtype(leaf, what)
    return parts, treedef


def leaves_of(part: StatePart) -> list[NamedLeaf]:
    """The logical leaves of a part, with the slices of them that this rank has."""
    if not is_sharded(part.value):
        dtype = part.value.dtype if isinstance(part.value, Tensor) else as_tensor(part.value).dtype
        return [NamedLeaf(part.name, tuple(getattr(part.value, "shape", ())), dtype, optional=part.optional)]
    layout, mesh = part.value.layout, part.value.spec.mesh
    names, storages = tree.field_names(layout.treedef), storages_of(part.value)
    found = []
    for i, unit in enumerate(layout.units):
        for leaf in unit.leaves:
            place = (storages[i].dtype, i, leaf.offset, part.optional, region_of(leaf.cuts, mesh))
            found.append(NamedLeaf(join(part.name, names[leaf.index]), leaf.whole, *place))
    return found


def with_entries(parts: Iterable[StatePart], axis: str) -> frozenset[str]:
    """Return the names of leaves that have an entry for each replica, or for each rank: along an axis of these."""
    found = set()
    for part in parts:
        names = tree.field_names(part.value.layout.treedef) if is_sharded(part.value) else []
        for leaf in part.value.layout.leaves if names else ():
            if any(cut.axis == axis for cut in leaf.cuts):
                found.add(join(part.name, names[leaf.index]))
    return frozenset(found)


def storages_of(sharded: Sharded) -> list[StorageSpec]:
    """Return how each shard is, or was before its donation, stored."""
    return list(sharded.storages)


def join(prefix: str, name: str) -> str:
    """Two parts of a dotted name.

    >>> join("params", "w"), join("", "w"), join("w", "")
    ('params.w', 'w', 'w')
    """
    return f"{prefix}.{name}" if prefix and name else prefix or name


def describe(parts: Iterable[StatePart]) -> list[str]:
    """Describe what ranks must agree about before they save or load, one line each."""
    lines = []
    for part in parts:
        if is_sharded(part.value):
            spec = part.value.spec
            units: list[Any] = [(u.name, u.size) for u in spec.layout.units]
            if spec.mesh.slices:  # ranks have units of their own sizes
                units = [(u.name, [leaf.cuts for leaf in u.leaves if leaf.cuts]) for u in spec.layout.units]
                lines.append(f"{part.name}: {[(axis.name, axis.size) for axis in spec.mesh.axes]}")
            shards = [u.num_shards for u in spec.layout.units]
            lines.append(f"{part.name}: stage {spec.stage}, {shards} shards, {units}")
        lines += [f"{leaf.name} {list(leaf.shape)} {leaf.dtype}" for leaf in leaves_of(part)]
    return lines


def missing_leaf(name: str, where: str, names: Mapping[str, Any], count: int) -> str:
    """Return the sentence about a name that is not among `names`, with the nearest name."""
    near = nearest(name, names, 1, 0.6)
    more = f" (and {count - 1} more)" if count > 1 else ""
    return f"{where} has no leaf {name!r}{more}{f'; the nearest name is {near[0]!r}' if near else ''}."


_OPTIONAL = StaticLossScale | NoLossScale | Feedback  # a state goes on without, or with a new one


def _optional(state: Any) -> tuple[str, ...]:
    """The prefixes of the names of loss scales' leaves, and of what codes have left out."""
    nodes, treedef = tree.flatten(state, is_leaf=lambda x: is_sharded(x) or isinstance(x, _OPTIONAL))
    names = tree.field_names(treedef)
    return tuple(f"{n}." if n else "" for n, x in zip(names, nodes, strict=True) if isinstance(x, _OPTIONAL))


def _check_value(part: StatePart, what: str) -> None:
    x = part.value
    if isinstance(x, Sharded) or type(x) in (bool, int, float):
        return
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{what}: leaf {part.name!r} is a {type(x).__name__}; a checkpoint holds tensors, ints, floats, bools and "
            "None. Store other objects outside the state."
        )
    if x.layout is not torch.strided:
        raise TypeError(
            f"{what}: leaf {part.name!r} is a {x.layout} tensor, which safetensors cannot store. Store the dense "
            "tensors it is made of."
        )


def _check_dtype(leaf: NamedLeaf, what: str) -> None:
    if leaf.dtype not in CODES:
        raise TypeError(
            f"{what}: leaf {leaf.name!r} has dtype {leaf.dtype}, which safetensors cannot store. Convert it to another "
            "dtype (torch.view_as_real for complex128)."
        )
