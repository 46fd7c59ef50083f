"""Sources of named tensors, of which any slice is read: from the whole, or from other slices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..geometry.overlaps import Region, Runs, overlap
from ..ops.same import checksum
from .named_leaves import NamedLeaf
from .tensor_file import BLOCK

_FEW = 64  # elements
_SPAN = 4 * BLOCK  # bytes that are read at a time for many short runs
Read = Callable[[int, Tensor], None]  # fill a 1-d tensor with raveled elements from a place on, cast to its dtype


class Source:
    """Named tensors on the disk, or elsewhere. `leaves`: by name."""

    leaves: dict[str, NamedLeaf]

    def places(self, name: str) -> Iterable[tuple[Region, Read]]:
        """Yield the slices in which a leaf lies, and what reads each of them."""
        raise NotImplementedError

    def read(self, name: str, start: int, into: Tensor, region: Region = ()) -> None:
        """Fill the 1-d `into` with elements from `start` on of the raveled leaf, or of its slice `region`, cast to its
        dtype.
        """
        shape = self.leaves[name].shape
        for there, read in self.places(name):
            for runs in overlap(shape, there, region, start, start + into.numel()):
                _copy(read, runs, into)

    def samples(self) -> list[str]:
        """Return a line for each leaf, in which other values are told by a few of its elements."""
        lines = []
        for name, leaf in self.leaves.items():
            few = torch.empty(min(math.prod(leaf.shape), _FEW), dtype=leaf.dtype)
            if len(few):
                self.read(name, (math.prod(leaf.shape) - len(few)) // 2, few)
            lines.append(f"{name!r} with {checksum(few)}, the checksum of {len(few)} of its elements")
        return lines

    def close(self) -> None:
        """Close all files."""


class Renamed(Source):
    """A source with other names. `rename(its name) -> name here`, or None to leave a leaf out; `what` begins errors."""

    def __init__(self, source: Source, rename: Callable[[str], str | None], what: str) -> None:
        self._source = source
        self._names: dict[str, str] = {}
        for name in source.leaves:
            new = rename(name)
            if new in self._names:
                raise ValueError(
                    f"{what}: {self._names[new]!r} and {name!r} would both get the name {new!r}. Let rename return "
                    "None for one of them."
                )
            if new is not None:
                self._names[new] = name
        self.leaves = {new: replace(source.leaves[name], name=new) for new, name in self._names.items()}

    def places(self, name: str) -> Iterable[tuple[Region, Read]]:
        """Yield the slices in which a leaf lies, and what reads each of them."""
        return self._source.places(self._names[name])

    def close(self) -> None:
        """Close all files."""
        self._source.close()


class OtherReplicas(Source):
    """A source for another number of replicas than it has entries for: replica r reads entry r % n of the n that there
    are. `sizes`: how many entries each leaf is to have, by name.
    """

    def __init__(self, source: Source, sizes: Mapping[str, int]) -> None:
        self._source = source
        self._there = {name: source.leaves[name].shape[0] for name in sizes}
        others = {
            name: replace(source.leaves[name], shape=(size, *source.leaves[name].shape[1:]))
            for name, size in sizes.items()
        }
        self.leaves = {**source.leaves, **others}

    def places(self, name: str) -> Iterable[tuple[Region, Read]]:
        """Yield the slices in which a leaf lies, and what reads each of them."""
        return self._source.places(name)

    def read(self, name: str, start: int, into: Tensor, region: Region = ()) -> None:
        """Read from the entry of another replica, if there is none for this one."""
        if name in self._there:
            num, entries = self._there[name], dict(region)
            ((first, _),) = entries.pop(0)  # a replica has one
            region = ((0, ((first % num, first % num + 1),)), *sorted(entries.items()))
        self._source.read(name, start, into, region)

    def close(self) -> None:
        """Close all files."""
        self._source.close()


class OtherRanks(OtherReplicas):
    """A source for another number of ranks than it has entries for, whose sum counts: rank r reads the sum of the
    entries r, r + size, ..., or zeros if there are none.
    """

    def read(self, name: str, start: int, into: Tensor, region: Region = ()) -> None:
        """Read the sum of entries, added in their order."""
        if name not in self._there:
            self._source.read(name, start, into, region)
            return
        entries = dict(region)
        ((first, _),) = entries.pop(0)
        into.zero_()
        for k in range(first, self._there[name], self.leaves[name].shape[0]):
            now = torch.empty_like(into)
            self._source.read(name, start, now, ((0, ((k, k + 1),)), *sorted(entries.items())))
            into.add_(now)


def _copy(read: Read, runs: Runs, into: Tensor) -> None:
    """Read runs: short ones with what lies between them, several at a time."""
    size = into.element_size()
    num_rows = max(1, min(runs.count, _SPAN // max(1, runs.step * size)))
    if num_rows == 1 or (runs.step - runs.length) * size >= BLOCK:
        for k in range(runs.count):
            at = runs.at + k * runs.stride
            read(runs.start + k * runs.step, into[at : at + runs.length])
        return
    span = torch.empty((num_rows - 1) * runs.step + runs.length, dtype=into.dtype)
    for k in range(0, runs.count, num_rows):
        shape = (min(num_rows, runs.count - k), runs.length)
        part = span[: (shape[0] - 1) * runs.step + runs.length]
        read(runs.start + k * runs.step, part)
        place = into.storage_offset() + runs.at + k * runs.stride
        into.as_strided(shape, (runs.stride, 1), place).copy_(part.as_strided(shape, (runs.step, 1)))
