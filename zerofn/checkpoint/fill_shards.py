"""Fill buffers, new ones or a donated state's, from a source: every rank reads only its own intervals."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..geometry.overlaps import region_of
from ..offload.disk import Store
from ..sharding.allocate import allocate, scratch_for, settle
from ..sharding.sharded import Sharded, is_sharded
from ..util.errors import CheckpointError
from .named_leaves import NamedLeaf, StatePart, join, leaves_of, storages_of
from .tensor_source import Source

log = logging.getLogger("zerofn")


@dataclass
class Filling:
    """The parts of a state to fill. Leaves that the source lacks (`absent`) keep their values. `donated`: shards are
    read into the memory of those that are there.
    """

    parts: Sequence[StatePart]
    absent: frozenset[str] = frozenset()
    donated: bool = False

    def check(self, source: Source, where: str) -> None:
        """Raise `CheckpointError` for a shape that differs or a dtype that cannot be cast. `where` names the source."""
        _check(list(self._wanted()), source.leaves, where)

    def fill(self, source: Source) -> list[Any]:
        """Return values of all parts, in order, from a source that was checked; replicas are not equal yet."""
        reused = self._reused()
        new = [p for k, p in enumerate(self.parts) if is_sharded(p.value) and k not in reused]
        scratch = scratch_for((p.value.spec, storages_of(p.value)) for p in new)
        return [
            self._sharded(p, source, scratch, k in reused) if is_sharded(p.value) else self._leaf(p, source)
            for k, p in enumerate(self.parts)
        ]

    def _reused(self) -> set[int]:
        """Return which parts are read into their own memory: none whose memory another one has, too."""
        found, seen = set(), set[int]()
        for k, part in enumerate(self.parts if self.donated else ()):
            if is_sharded(part.value) and part.value.lost is None:
                parts = [x for x in part.value.parts if x.numel()]
                memory = {x.untyped_storage().data_ptr() for x in parts}
                if not memory & seen and not any(x.is_meta for x in parts):
                    found.add(k)
                seen |= memory
        return found

    def _wanted(self) -> Iterator[NamedLeaf]:
        for part in self.parts:
            yield from (leaf for leaf in leaves_of(part) if leaf.name not in self.absent)

    def _sharded(self, part: StatePart, source: Source, scratch: Store | None, reused: bool) -> Sharded:
        like: Sharded = part.value
        fresh = Sharded(like.spec, like.stored, like.full) if reused else _allocate_like(part, scratch)
        spec = like.spec
        names = [join(part.name, name) for name in tree.field_names(spec.layout.treedef)]
        for i, unit in enumerate(spec.layout.units):
            start, stop = spec.own_cut(unit)  # the rest comes from other ranks
            shift = start - spec.bounds(unit)[0]
            held, before = fresh.stored[i].loaded(), None
            for leaf, a, b in unit.intervals(start, stop):
                name = names[leaf.index]
                if name in self.absent and reused:
                    continue
                if name in self.absent:
                    before = before or like.stored[i].loaded()
                    held.write(shift + a, before.read(shift + a, shift + b))
                else:
                    read = partial(source.read, name, start + a - leaf.offset, region=region_of(leaf.cuts, spec.mesh))
                    held.fill(shift + a, shift + b, read)
            fresh.stored[i].save(held)
        return fresh

    def _leaf(self, part: StatePart, source: Source) -> Any:
        x = part.value
        if part.name in self.absent:
            return x.detach().clone() if isinstance(x, Tensor) else x
        if isinstance(x, Tensor):
            device = torch.device("cpu") if x.is_meta else x.device
            fresh = torch.empty(x.shape, dtype=x.dtype, device=device)
            source.read(part.name, 0, fresh.view(-1))
            return fresh
        fresh = torch.empty(1, dtype=part.tensor.dtype)
        source.read(part.name, 0, fresh)
        return fresh.item()


def settle_all(values: Sequence[Any]) -> None:
    """Fill replicas and gathered copies from other ranks. All ranks must call it."""
    for x in values:
        if is_sharded(x):
            settle(x)


def _allocate_like(part: StatePart, scratch: Store | None) -> Sharded:
    like: Sharded = part.value
    spec = like.spec
    if like.lost is None:
        devices = {p.device for p in like.stored}
        device = devices.pop() if devices else torch.device("cpu")
    else:  # it was donated, and its device is unknown
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    is_params = part.name.rpartition(".")[2] == "params"
    cached = like.full is not None or (is_params and spec.has_copies)
    device = torch.device("cpu") if device.type == "meta" else device
    return allocate(spec, storages_of(like), device, cached=cached, scratch=scratch, name=part.name)


def _check(wanted: list[NamedLeaf], leaves: Mapping[str, NamedLeaf], where: str) -> None:
    """Shapes and dtypes; one log line if any leaf is cast."""
    cast = []
    for leaf in wanted:
        saved = leaves[leaf.name]
        if saved.shape != leaf.shape:
            raise CheckpointError(
                f"{where}: {leaf.name!r} has shape {saved.shape} in the file and {leaf.shape} in `like`. Build `like` "
                "with the configuration of the saved model."
            )
        if saved.dtype != leaf.dtype:
            if not torch.can_cast(saved.dtype, leaf.dtype):
                raise CheckpointError(
                    f"{where}: {leaf.name!r} is {saved.dtype} in the file, which cannot be cast to {leaf.dtype}, its "
                    f"dtype in `like`. Make it {saved.dtype} in `like`."
                )
            cast.append(f"{leaf.name} {_short(saved.dtype)} -> {_short(leaf.dtype)}")
    if cast:
        shown = ", ".join([*cast[:2], *["..."][: len(cast) - 2]])
        log.info("%s: %d of %d leaves are cast to like's dtypes (%s).", where, len(cast), len(wanted), shown)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
