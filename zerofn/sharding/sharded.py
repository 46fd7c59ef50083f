"""`Sharded`: this rank's shards of a tree of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..comm.mesh import Mesh
from ..comm.transport import wait_
from ..geometry.grouping import title
from ..geometry.layout import Layout, Leaf
from ..job.in_flight import pending
from ..memory import donation
from ..offload.host_worker import worker
from ..util.html import preformatted, table
from ..util.sizes import counted
from .spec import Spec
from .storage import StorageSpec, Stored, stored

_NO_DICT = (
    "it is this rank's part of a tree, as flat shards. Write params['name'] for the description of a leaf, tree_map "
    "for elementwise operations, and zerofn.gather(params) or zerofn.unshard(params) for the tree with its tensors."
)


class Sharded:
    """This rank's shards of a tree of tensors: a pytree node whose leaves are flat tensors, one per unit.

    `tree_map` applies a function to this rank's shards. If the function is elementwise and the trees have one layout,
    the results are the shards of the full result. For other operations, use functions that know about ranks
    (`zerofn.global_norm`, `zerofn.gather`, ...). After a `Sharded` was donated to a compiled step, using it, or another
    one with the same shards, raises `RuntimeError`.

    >>> import zerofn
    >>> params = zerofn.shard({"params": {"w": torch.ones(2)}})["params"]
    >>> half = zerofn.tree_map(lambda shard: shard / 2, params)
    >>> zerofn.gather(half)
    {'w': tensor([0.5000, 0.5000])}
    """

    __slots__ = ("__weakref__", "_copies", "_kept", "_lost", "_pending", "_storages", "spec")

    def __init__(self, spec: Spec, shards: Iterable[Tensor | Stored], full: Sequence[Tensor] | None = None) -> None:
        self.spec = spec
        self._kept = tuple(shards)
        self._copies = full  # the gathered copy, a cache beside the tree: see `Partition`
        self._pending = 0  # the generation of the transfers that fill it, until somebody waits for them
        self._storages: tuple[StorageSpec, ...] = ()  # after the shards were donated
        self._lost: str | None = None

    @property
    def shards(self) -> tuple[Tensor, ...]:
        """The local shards, flat, in unit order, decoded."""
        worker().finish()
        return tuple([x.decode() if isinstance(x, Stored) else x for x in self._alive()])

    @property
    def stored(self) -> tuple[Stored, ...]:
        """The local shards as stored."""
        worker().finish()
        return tuple(map(stored, self._alive()))

    def _alive(self) -> tuple[Tensor | Stored, ...]:
        why = self.lost
        if why is not None:
            raise RuntimeError(why)
        return self._kept

    @property
    def storages(self) -> tuple[StorageSpec, ...]:
        """How each shard is, or was before its donation, stored."""
        return self._storages or tuple([stored(x).storage for x in self._kept])

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        placement = self.storages[0].placement
        return self._alive()[0].device if placement is None else torch.device(placement.device)

    @property
    def parts(self) -> list[Tensor]:
        """The tensors of the local shards that a captured step takes, in unit order."""
        return list(_parts(self._alive()))

    @property
    def lost(self) -> str | None:
        """Why it can no longer be used: it, or another one with the same shards, was donated. None while it can be
        used.
        """
        return self._lost or donation.reason(_parts(self._kept))

    @property
    def copies(self) -> Sequence[Tensor] | None:
        """The gathered copy of every unit, or of a part of it, perhaps in flight; None if there is none."""
        if self._pending and self._pending != pending().generation:
            self.forget_copies()  # a failed step has cut off all transfers, or this is a forked process
        return self._copies

    @property
    def full(self) -> Sequence[Tensor] | None:
        """The gathered copy of every unit, complete; None if there is none."""
        copies = self.copies
        if self._pending and copies is not None:
            for copy in copies:
                wait_(copy)
            self._pending = 0
        return copies

    @property
    def layout(self) -> Layout:
        """The place of every leaf."""
        return self.spec.layout

    def under(self, spec: Spec) -> Sharded:
        """Return the same shards, with the copy beside them, under another spec that cuts them alike."""
        other = Sharded(spec, self._kept, self._copies)
        other._pending, other._storages, other._lost = self._pending, self._storages, self._lost
        return other

    def move(self, shards: Iterable[Stored], full: Sequence[Tensor] | None) -> None:
        """Store the same values in other buffers, with a gathered copy beside them."""
        self._kept, self._copies, self._pending = tuple(shards), full, 0

    def expect_copies(self) -> None:
        """Note that transfers fill the gathered copy; its first user waits for them."""
        self._pending = pending().generation

    def forget_copies(self) -> None:
        """Drop the gathered copy, complete or not."""
        self._copies, self._pending = None, 0

    @property
    def is_abstract(self) -> bool:
        """Whether it is from `zerofn.abstract`, and never had values."""
        return False

    def donate(self, why: str) -> None:
        """Donate the buffers: from now on any use raises `why`."""
        self._storages = self.storages
        self._lost, self._kept = why, ()
        self.forget_copies()

    def __getattr__(self, name: str) -> Any:
        if name in ("keys", "values", "items", "get"):
            raise AttributeError(f"a Sharded has no {name!r}: {_NO_DICT}")
        raise AttributeError(f"a Sharded has no {name!r}.")

    def __getitem__(self, name: str) -> Sharded | LocalShard:
        """Return this rank's part of a leaf, by name, or the `Sharded` of the units under a prefix."""
        if not isinstance(name, str):  # as iteration does
            raise TypeError(f"a Sharded has no entry {name!r}: {_NO_DICT}")
        place = self.layout.where.get(name)
        if place is not None:
            return LocalShard.of(self, *place)
        layout = self.layout.subset(name)
        kept = self._positions(layout)
        full = None if self.full is None else [self.full[i] for i in kept]
        return Sharded(replace(self.spec, layout=layout), [self.stored[i] for i in kept], full)

    def _positions(self, part: Layout) -> list[int]:
        """Return the positions of the units of a subset of the layout."""
        index = {u.name: i for i, u in enumerate(self.layout.units)}
        return [index[u.name] for u in part.units]

    def replace(self, parts: dict[str, Sharded]) -> Sharded:
        """Return the tree with `self[prefix]` replaced for every prefix of `parts`."""
        shards = list(self.stored)
        for prefix, part in parts.items():
            mine = self[prefix]
            if not isinstance(mine, Sharded) or mine.layout != part.layout:
                raise ValueError(f"replace: the layout of the new {prefix!r} differs from that of params[{prefix!r}].")
            for i, shard in zip(self._positions(mine.layout), part.stored, strict=True):
                shards[i] = shard
        return Sharded(self.spec, shards)

    def __reduce__(self) -> tuple[Any, ...]:
        # For copy and pickle: the gathered copy may be incomplete, and can be made again.
        return Sharded, (self.spec, self.stored)

    def __repr__(self) -> str:
        return describe(self)

    def _repr_html_(self) -> str:
        if self.lost is not None:
            return preformatted(describe(self))
        head = ("unit", "leaves", "elements", "stored as", "here", "bytes here", "")
        return table(_title(self), head, _rows(self), left=(0, 3, 6))


def _parts(kept: Iterable[Tensor | Stored]) -> Iterator[Tensor]:
    for x in kept:
        yield from x.tensors if isinstance(x, Stored) else (x,)


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of one leaf. `local`: elements [start, stop) of the raveled leaf, a flat tensor."""

    name: str
    shape: tuple[int, ...]
    unit: str
    start: int
    stop: int
    local: Tensor = field(repr=False, compare=False)

    @staticmethod
    def of(sharded: Sharded, index: int, leaf: Leaf) -> LocalShard:
        """Return the local part of `leaf` of the index-th unit."""
        unit, shard = sharded.layout.units[index], sharded.stored[index]
        begin, end = sharded.spec.bounds(unit)
        for found, a, b in unit.intervals(begin, end):
            if found is leaf:
                first = begin + a - leaf.offset
                return LocalShard(leaf.name, leaf.shape, unit.name, first, first + b - a, shard.read(a, b))
        return LocalShard(leaf.name, leaf.shape, unit.name, 0, 0, shard.read(0, 0))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse: a local answer would differ from rank to rank."""
        mine = next(
            x
            for x in tree.leaves((args, kwargs or {}), is_leaf=lambda x: isinstance(x, LocalShard))
            if isinstance(x, LocalShard)
        )
        raise TypeError(
            f"torch.{getattr(func, '__name__', func)} got params[{mine.name!r}], which describes this rank's part of a "
            f"leaf and is not a tensor. Write zerofn.gather(params)[{mine.name!r}] for the leaf, "
            f"zerofn.global_norm(params) or zerofn.leaf_norms(params) for norms, or params[{mine.name!r}].local for "
            "this rank's part."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask before the fields exist
            raise AttributeError(name)
        advice = (
            (
                "; it describes this rank's part of a leaf and is not a tensor. Write "
                f"zerofn.gather(params)[{self.name!r}].{name}, or .local for this rank's part"
            )
            if hasattr(Tensor, name)
            else ""
        )
        raise AttributeError(f"params[{self.name!r}] has no {name!r}{advice}.")

    def __repr__(self) -> str:
        share = f"elements {self.start:,}:{self.stop:,}" if self.stop > self.start else "none of it"
        size = self.local.numel() * self.local.element_size()
        dtype = str(self.local.dtype).removeprefix("torch.")
        return f"{self.name} {list(self.shape)} {dtype}, unit {self.unit!r}; here: {share} ({size:,} bytes)"


tree.register_node(Sharded, lambda s: (s.shards, s.spec), lambda spec, shards: Sharded(spec, shards))


def is_sharded(x: Any) -> bool:
    """Return whether `x` is a `Sharded` node."""
    return isinstance(x, Sharded)


def check_whole(values: Any, what: str) -> None:
    """Raise `TypeError` for a tree with a `LocalShard`, which cannot be gathered by itself."""
    for x in tree.leaves(values, is_leaf=lambda x: isinstance(x, Sharded | LocalShard)):
        if isinstance(x, LocalShard):
            raise TypeError(
                f"{what}: params[{x.name!r}] describes this rank's part of a leaf, and zerofn.{what} takes the whole "
                f"tree. Write zerofn.{what}(params)[{x.name!r}]."
            )


def describe(sharded: Sharded) -> str:
    """Return a table with one line per unit: its leaves, global elements, dtype, and bytes on this rank."""
    if sharded.lost is not None:
        return f"Sharded(donated: {sharded.lost})"
    rows = _rows(sharded)
    width = max((len(name) for name, *_ in rows), default=0)
    lines = [
        f"  {name:<{width}}  {leaves:>3} leaves  {elements:>12} x {stored}  here {here}{frozen and '  ' + frozen}"
        for name, leaves, elements, stored, here, _, frozen in rows
    ]
    return "\n".join([f"Sharded: {_title(sharded)}", *lines])


def _title(sharded: Sharded) -> str:
    spec = sharded.spec
    held = sum(x.nbytes for x in sharded.stored)
    total = sum(u.numel for u in spec.layout.units)
    rank = spec.partition.over(experts=False)
    leaves, units = counted(len(spec.layout.where), "leaf", "leaves"), counted(len(spec.layout.units), "unit")
    return (
        f"{leaves}, {total:,} elements in {units}; stage {spec.stage}, "
        f"rank {rank.rank} of {rank.size} holds {held:,} bytes"
    )


def _rows(sharded: Sharded) -> list[tuple[str, ...]]:
    """Return for each unit: name, leaves, elements, how and which of them are stored here, bytes, whether frozen."""
    rows: list[tuple[str, ...]] = []
    for unit, shard in zip(sharded.layout.units, sharded.stored, strict=True):
        a, b = sharded.spec.bounds(unit)
        dtype = str(shard.dtype).removeprefix("torch.") + shard.storage.note
        numbers = (f"{len(unit.leaves)}", f"{unit.numel:,}", dtype, f"[{a:,}:{b:,}]", f"{shard.nbytes:,}")
        rows.append((title(unit.name, [x.name for x in unit.leaves]), *numbers, "" if unit.trainable else "frozen"))
    return rows


def trainable(sharded: Sharded) -> Sharded:
    """Return the part that an optimizer sees: without the frozen units."""
    spec = sharded.spec.trainable
    if spec.layout is sharded.layout:
        return sharded
    kept = [i for i, u in enumerate(sharded.layout.units) if u.trainable]
    full = None if sharded.full is None else [sharded.full[i] for i in kept]
    return Sharded(spec, [sharded.stored[i] for i in kept], full)


def with_trainable(sharded: Sharded, part: Sharded) -> Sharded:
    """Return `sharded` with its trainable units from `part`."""
    if len(part.layout.units) == len(sharded.layout.units):
        return Sharded(sharded.spec, part.stored)
    fresh = iter(part.stored)
    shards = [next(fresh) if u.trainable else p for u, p in zip(sharded.layout.units, sharded.stored, strict=True)]
    return Sharded(sharded.spec, shards)


def mesh_among(nodes: Iterable[Any]) -> Mesh | None:
    """Return the mesh of the first `Sharded` of these nodes; None if there is none."""
    spec = spec_among(nodes)
    return None if spec is None else spec.mesh


def spec_among(nodes: Iterable[Any]) -> Spec | None:
    """Return the spec of the first `Sharded` of these nodes; None if there is none."""
    return next((x.spec for x in nodes if is_sharded(x)), None)
