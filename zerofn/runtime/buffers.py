"""Allocate the buffers and drive space that passes requested, and let the graph's nodes refer to them."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch.fx import GraphModule

from ..graph.buffers import DriveSpec
from ..graph.nested import graphs_of
from ..graph.node_kinds import argument, is_ours, set_argument
from ..graph.program import Program
from ..memory.arena import arena_for, reserve
from ..memory.host_allocator import return_freed_memory
from ..memory.pinned import release
from ..offload.disk import Region, scratch_space
from ..offload.drive_tensor import handle_of
from ..ops.registry import argument_places
from ..util.process import the
from ..util.sizes import pages


class _Space(list[Region]):
    """Regions of one store: a subclass, because a plain list cannot be referenced weakly."""


class _Spaces(WeakValueDictionary[tuple[DriveSpec, ...], _Space]):
    """The drive space that the process's steps use: requests -> regions."""


class Buffers:
    """The allocations of a program: an arena for each of its `buffers`, a region for each of its `drive_space`.

    The graph may run only while this object is alive. Raises `DiskError` if a drive has no room.
    """

    def __init__(self, program: Program) -> None:
        if any(x.device is None for x in program.buffers):  # state is on drives, so memory is short
            return_freed_memory()
        release()  # steps send values of other sizes
        self.arenas = [arena_for(x.number, x.nbytes, x.device) for x in program.buffers]
        self.regions = _regions(tuple(program.drive_space))
        self._static = [
            (arena, x.nbytes)
            for arena, x in zip(self.arenas, program.buffers, strict=True)
            if x.device is not None  # what drives read to and write from is not part of a device's budget
        ]

    def bind(self, gm: GraphModule) -> None:
        """Replace the indices of requests, in the graph's nodes, by the numbers of arenas and handles.

        Call it once for each graph.
        """
        handles = [int(handle_of(region)) for region in self.regions]
        if self.arenas or handles:
            for each in graphs_of(gm):
                _substitute(each, [arena.number for arena in self.arenas], handles)

    def reserve(self, exactly: bool) -> None:
        """Resize the arenas, which steps share, to at least what this step needs. Call it just before the step runs.

        `exactly`: to exactly that, and other steps' arenas to nothing: the step has a memory budget.
        """
        reserve(self._static, exactly)

    def renew(self) -> None:
        """Replace the arenas' memory: after a failed step, drives or other ranks may still read and write the old."""
        for arena in self.arenas:
            arena.renew()


def _regions(specs: tuple[DriveSpec, ...]) -> _Space:
    """Return regions for these requests. Steps with equal requests share them, because they run one after the other."""
    if not specs:
        return _Space()
    spaces = the(_Spaces)
    found = spaces.get(specs)
    if found is None or found[0].store.failed:
        store = scratch_space(specs[0].paths, sum(pages(x.nbytes) for x in specs))
        found = spaces[specs] = _Space(store.allocate(x.nbytes, x.label) for x in specs)
    return found


def _substitute(gm: GraphModule, arenas: Sequence[int], handles: Sequence[int]) -> None:
    for node in gm.graph.nodes:
        if node.target is torch.ops.zerofn.drive_handle.default:
            set_argument(node, "number", handles[argument(node, "number")])
        elif is_ours(node) and "place" in argument_places(node.target) and (place := argument(node, "place")):
            set_argument(node, "place", [arenas[place[0]], place[1]])
    gm.recompile()
