"""`zerofn.abstract`: what a state is, without its values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import tree
from ..comm.mesh import Mesh
from .layout import Layout, Unit, padded, padded_to
from .precision import Precision
from .sharded import Sharded, Spec, is_sharded, refuse_slices
from .storage import StorageSpec

_WHY = "This Sharded is from zerofn.abstract and has no values; zerofn.load(path, like=...) returns a state that has."


def abstract(state: Any) -> Any:
    """Return a state's structure, shapes and settings, without the values of what is sharded.

        like = zerofn.abstract(state)         # some kilobytes
        state = zerofn.load(path, like=like)  # here, or in a function that zerofn.run calls on other ranks

    Every `Sharded` keeps its stage, precision, units, storage and tiers. What is replicated (step counts, loss scales)
    keeps its values. In another process it is cut over the ranks that are there, and makes their process group if a
    launcher started them. A state that a step has used up will do. Nothing is sent or allocated.

    As JAX has abstract arrays, which orbax restores into.
    """
    nodes = [x for x in tree.leaves(state, is_leaf=is_sharded) if is_sharded(x)]
    refuse_slices(state, "abstract")
    stops: dict[tuple[str, int], int] = {}
    for unit in (unit for x in nodes for unit in x.layout.units):
        key = unit.name, unit.size
        stops[key] = max(stops.get(key, 0), max(leaf.stop for leaf in unit.leaves))
    return tree.tree_map(lambda x: _Abstract(x, stops) if is_sharded(x) else x, state, is_leaf=is_sharded)


class _Abstract(Sharded):
    """A `Sharded` without shards. `stops`: (name, size) of a unit -> where its last leaf ends, in any tree."""

    __slots__ = ("stops",)

    def __init__(self, like: Sharded, stops: dict[tuple[str, int], int]) -> None:
        super().__init__(like.spec, ())
        self._storages, self._lost, self.stops = like.storages, _WHY, stops

    @property
    def is_abstract(self) -> bool:
        """True."""
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        spec, layout = self.spec, self.layout
        block = padded_to(layout.num_shards, spec.mesh.num_replicas)
        units = [(x.name, x.leaves, _stop(x, self.stops, block), x.trainable, x.dtype) for x in layout.units]
        return _here, (units, layout.treedef, spec.stage, spec.precision, spec.halves, self._storages)


def _stop(unit: Unit, stops: dict[tuple[str, int], int], block: int) -> int:
    """Return where the leaves end that gave a unit its size, which may have been masked out of this tree."""
    stop = stops[unit.name, unit.size]
    return stop if padded(stop, block) == unit.size else unit.size


def _here(
    units: Sequence[tuple[Any, ...]],
    treedef: tree.PyTreeSpec,
    stage: int,
    precision: Precision,
    halves: bool,
    storages: Iterable[StorageSpec],
) -> Sharded:
    """Return the abstract `Sharded`, cut over the ranks that are here."""
    mesh = Mesh.of(None)
    axis = mesh.shards
    block = padded_to(axis.size)
    own = tuple(Unit(name, leaves, padded(stop, block), *rest) for name, leaves, stop, *rest in units)
    spec = Spec(Layout(own, treedef, axis.name, axis.size), mesh, stage, precision, halves)
    cut = Sharded(spec, ())
    cut._storages = tuple(map(_on_this_device, storages))
    return _Abstract(cut, {(x.name, x.size): stop for x, (_, _, stop, *_) in zip(own, units, strict=True)})


def _on_this_device(storage: StorageSpec) -> StorageSpec:
    if storage.placement is None or storage.placement.device == "cpu":
        return storage
    device = torch.device(torch.device(storage.placement.device).type, torch.accelerator.current_device_index())
    return replace(storage, placement=replace(storage.placement, device=str(device)))


tree.register_node(_Abstract, lambda x: (x.shards, x.spec), lambda spec, shards: Sharded(spec, shards))
