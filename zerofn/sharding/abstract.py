"""`zerofn.abstract`: what a state is, without its values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from .. import tree
from ..comm.mesh import Mesh
from ..geometry.layout import ALIGN, Layout, Leaf, Unit, padded, padded_to
from ..ops.codecs import Codec
from .partition import Partition
from .sharded import Sharded, is_sharded
from .spec import Spec
from .storage import StorageSpec

_WHY = "This Sharded is from zerofn.abstract and has no values; zerofn.load(path, like=...) returns a state that has."

T = TypeVar("T")


def abstract(state: T) -> T:
    """Return a state's structure, shapes and settings, without the values of sharded leaves.

    Every `Sharded` keeps its stage, precision, units, storage and tiers. Replicated leaves (step counts, loss scales)
    keep their values. The state may be a donated one. Nothing is sent or allocated.

    Pass the result to `load` as `like`, also in another process. There, `load` shards the state over all ranks along
    `data`, whatever its mesh was, and leaves are not sliced. If a launcher started these ranks and they have no process
    group yet, unpickling the result makes it.

    The counterpart in JAX is a tree of abstract arrays, into which orbax restores.

    >>> import tempfile, torch, zerofn
    >>> state = zerofn.shard({"params": {"w": torch.ones(2)}})
    >>> like = zerofn.abstract(state)  # some kilobytes, which zerofn.run may send to other ranks
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = zerofn.save(f"{folder}/step-1", state)
    ...     zerofn.unshard(zerofn.load(f"{folder}/step-1", like=like))
    {'params': {'w': tensor([1., 1.])}}
    """
    nodes = [x for x in tree.leaves(state, is_leaf=is_sharded) if is_sharded(x)]
    units: dict[_Key, list[Unit]] = {}
    for unit in (unit for x in nodes for unit in x.layout.units):
        units.setdefault((unit.name, unit.size), []).append(unit)
    places = {key: _Places.of(found) for key, found in units.items()}
    return tree.tree_map(lambda x: _Abstract(x, places) if is_sharded(x) else x, state, is_leaf=is_sharded)


_Key = tuple[str, int]  # name and size of a unit


class _Places(NamedTuple):
    """Where the leaves of a unit lie once all of them are whole. `stop`: where the last one ends, in any tree.
    `offsets`: of each leaf, by its order; None if there is nothing to change.
    """

    stop: int
    offsets: dict[int, int] | None = None

    @staticmethod
    def of(units: Sequence[Unit]) -> _Places:
        """`units`: the same one in several trees, perhaps with other leaves left out."""
        stop = max(leaf.stop for unit in units for leaf in unit.leaves)
        if not any(leaf.cuts for unit in units for leaf in unit.leaves):
            return _Places(stop)
        shapes: dict[int, tuple[int, ...]] = {}
        for leaf in (leaf for unit in units for leaf in unit.leaves):
            if shapes.setdefault(leaf.order, leaf.whole) != leaf.whole:
                return _Places(stop, {})  # units of different trees that are not the same
        offsets, at = dict[int, int](), 0
        for order in sorted(shapes):
            offsets[order], stop = at, at + math.prod(shapes[order])
            at = padded(stop, ALIGN)
        return _Places(stop, offsets)

    def whole(self, unit: Unit) -> tuple[Leaf, ...]:
        """Return a unit's leaves, whole. Raises `RuntimeError` if it is not known how they lie then."""
        offsets = self.offsets
        if offsets is None:
            return unit.leaves
        if not offsets:
            raise RuntimeError(
                f"abstract: two trees of this state have a unit {unit.name!r}, with slices of different leaves in it, "
                "so zerofn.abstract cannot describe the state for another process. Make the state in that process, and "
                "pass it to zerofn.load as `like`."
            )
        leaves = sorted(unit.leaves, key=lambda leaf: leaf.order)
        return tuple(replace(leaf, shape=leaf.whole, offset=offsets[leaf.order], cuts=()) for leaf in leaves)


class _Abstract(Sharded):
    """A `Sharded` without shards. `places`: for the units of all trees."""

    __slots__ = ("places",)

    def __init__(self, like: Sharded, places: dict[_Key, _Places]) -> None:
        super().__init__(like.spec, ())
        self._storages, self._lost, self.places = like.storages, _WHY, places

    @property
    def is_abstract(self) -> bool:
        """True."""
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        spec, layout = self.spec, self.layout
        shared = spec.partition.shared_over
        replicas = shared.size if shared else 1
        units = []
        for x in layout.units:
            places, block = self.places[x.name, x.size], padded_to(x.num_shards, replicas)
            units.append((x.name, places.whole(x), _stop(x, places, block), x.trainable, x.dtype))
        there = [x for x in self._storages if x.placement]  # a unit of which this rank has nothing has no tier here
        storages = [
            next((replace(x, placement=y.placement) for y in there if y.num_parts == x.num_parts), x)
            if not u.size
            else x
            for x, u in zip(self._storages, layout.units, strict=True)
        ]
        how = {"stage": spec.stage, "precision": spec.precision}
        return _here, (units, layout.treedef, (how, spec.partition.codec), storages)


def _stop(unit: Unit, places: _Places, block: int) -> int:
    """Return where the leaves end that gave a unit its size, which may have been masked out of this tree."""
    known = places.offsets is not None or padded(places.stop, block) == unit.size
    return places.stop if known else unit.size


def _here(
    units: Sequence[tuple[Any, ...]],
    treedef: tree.PyTreeSpec,
    how: tuple[dict[str, Any], Codec],
    storages: Iterable[StorageSpec],
) -> Sharded:
    """Return the abstract `Sharded`, cut over the ranks that are here. `how`: arguments of `Partition.zero`, and the
    codec.
    """
    mesh = Mesh.of(None)
    axis = mesh.shards
    block = padded_to(axis.size)
    own = tuple(
        Unit(name, leaves, padded(stop, block), trainable, dtype, axis.size)
        for name, leaves, stop, trainable, dtype in units
    )
    spec = Spec(Layout(own, treedef, axis.name), replace(Partition.zero(mesh, **how[0]), codec=how[1]))
    cut = Sharded(spec, ())
    cut._storages = tuple(
        _on_this_device(x) if unit.size else replace(x, placement=None) for x, unit in zip(storages, own, strict=True)
    )
    known = {(x.name, x.size): _Places(stop) for x, (_, _, stop, *_) in zip(own, units, strict=True)}
    return _Abstract(cut, known)


def _on_this_device(storage: StorageSpec) -> StorageSpec:
    if storage.placement is None or storage.placement.device == "cpu":
        return storage
    device = torch.device(torch.device(storage.placement.device).type, torch.accelerator.current_device_index())
    return replace(storage, placement=replace(storage.placement, device=str(device)))


tree.register_node(_Abstract, lambda x: (x.shards, x.spec), lambda spec, shards: Sharded(spec, shards))
