"""Arenas: memory that is allocated once for captured steps, in which passes place values.

Short-lived values then leave no holes between long-lived ones, and cost no allocation. A *place* is [arena, first
byte], a constant of the graph.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..ops.registry import OnShard, Traits, define
from ..util.errors import DiskError
from ..util.process import the
from ..util.sizes import pages
from .host_allocator import zeros
from .pinned import Reader, aligned, locked


class Arenas:
    """The arenas of the process, held weakly.

    `numbered`: by the number in graphs. `shared`: by position among a step's arenas and device; steps run one after
    the other, so all share them.
    """

    def __init__(self) -> None:
        self.numbered: WeakValueDictionary[int, Arena] = WeakValueDictionary()
        self.shared: WeakValueDictionary[tuple[int, torch.device | None], Arena] = WeakValueDictionary()
        self._numbers = itertools.count(1)

    def addresses(self) -> dict[int, int]:
        """Map the numbers of arenas on devices to where their memory begins."""
        there = ((x.number, x._memory) for (_, device), x in list(self.shared.items()) if device is not None)
        return {number: memory.data_ptr() for number, memory in there if memory is not None}

    def add(self, arena: Arena) -> int:
        """Return the number of a new arena."""
        number = next(self._numbers)
        self.numbered[number] = arena
        return number


class ReadingTransfer(Reader, Protocol):
    """A transfer that reads from an arena."""

    def wait(self) -> Any:
        """Wait until it has ended. Raises `DiskError` if it failed."""


class Arena:
    """`nbytes` of a device's memory, or of the host's (device None), allocated at the first use."""

    def __init__(self, nbytes: int, device: torch.device | None = None) -> None:
        self.nbytes, self.device = pages(nbytes), device
        self._memory: Tensor | None = None
        self._leaving: list[tuple[int, int, ReadingTransfer]] = []  # [start, stop) is being written from
        self.number = the(Arenas).add(self)

    def part(self, start: int, nbytes: int) -> Tensor:
        """Return uint8 [nbytes] from `start` on, once no write reads from there."""
        if self._memory is None:
            self._memory = self._made()
        stop = start + nbytes
        assert stop <= self.nbytes, (stop, self.nbytes)
        for a, b, request in self._leaving:
            if a < stop and start < b:
                end(request)
        self._leaving = [x for x in self._leaving if not x[2].done]
        return self._memory[start:stop]

    def _made(self) -> Tensor:
        if self.device is not None:  # exactly the bytes that a plan counts
            return zeros(self.nbytes, torch.uint8, self.device)
        return locked(self.nbytes, torch.uint8) if torch.cuda.is_available() else aligned(self.nbytes)

    def resize(self, nbytes: int) -> None:
        """Change the size. Its contents are lost, so only between steps."""
        if pages(nbytes) != self.nbytes:
            for *_, request in self._leaving:
                end(request)
            self.renew()
            self.nbytes = pages(nbytes)

    def renew(self) -> None:
        """Use new memory: after a failed step, drives or other ranks may still read and write the old memory."""
        self._memory, self._leaving = None, []

    def holds(self, x: Tensor) -> bool:
        """Return whether `x` is in this arena."""
        return self._memory is not None and 0 <= x.data_ptr() - self._memory.data_ptr() < self.nbytes

    def leave(self, x: Tensor, nbytes: int, request: ReadingTransfer) -> None:
        """Note that `x`, which is in this arena, is being written to a drive."""
        assert self._memory is not None
        start = x.data_ptr() - self._memory.data_ptr()
        self._leaving.append((start, start + nbytes, request))


def arena_for(number: int, nbytes: int, device: torch.device | None = None) -> Arena:
    """Return a step's `number`-th arena on a device (None: for drives). All steps share it: they run one after the
    other.
    """
    shared = the(Arenas).shared
    found = shared.get((number, device))
    if found is None:
        found = shared[number, device] = Arena(nbytes, device)
    found.resize(max(nbytes, found.nbytes))
    return found


def reserve(needs: Sequence[tuple[Arena, int]], exactly: bool) -> None:
    """Give each arena at least the bytes that the next step needs. `exactly`: and no more, also in arenas of other
    steps.
    """
    for arena, nbytes in needs:
        if exactly or arena.nbytes < nbytes:
            arena.resize(nbytes)
    mine = [arena for arena, _ in needs]
    if exactly:
        for (_, device), arena in list(the(Arenas).shared.items()):
            if device is not None and arena not in mine:
                arena.resize(0)


def arena_of(x: Tensor) -> Arena | None:
    """Return the arena that holds a host tensor, or None."""
    return next((a for a in list(the(Arenas).numbered.values()) if x.device.type == "cpu" and a.holds(x)), None)


def memory_at(place: Sequence[int], nbytes: int) -> Tensor:
    """Return uint8 [nbytes] at a place."""
    return the(Arenas).numbered[place[0]].part(place[1], nbytes)


def empty(size: int, dtype: torch.dtype, device: torch.device, place: Sequence[int]) -> Tensor:
    """Return memory [size] at a place, or of its own if the place is empty."""
    if not place:
        return torch.empty(size, dtype=dtype, device=device)
    return memory_at(place, size * dtype.itemsize).view(dtype)


def end(request: ReadingTransfer) -> None:
    """Wait for a write, perhaps of another state. A failure is raised by its store, at every later request."""
    with contextlib.suppress(DiskError):
        request.wait()


define(
    "bucket(int size, ScalarType dtype, Device device, int[] place) -> Tensor",
    empty,
    lambda size, dtype, device, place: torch.empty(size, dtype=dtype, device=device),
    traits=Traits(OnShard.REFUSED, bucket=True, free=True),
)
