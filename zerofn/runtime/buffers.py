"""Allocate the buffers that passes requested, and write their numbers into the graph."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch.fx import GraphModule

from ..graph.buffers import DriveSpec
from ..graph.edit import bodies
from ..graph.node_kinds import argument, is_ours, set_argument
from ..graph.program import Program
from ..memory.arena import arena_for, reserve
from ..memory.host_allocator import return_freed_memory
from ..offload.disk import Region, scratch_space
from ..offload.drive_tensor import handle_of
from ..ops.registry import argument_places
from ..util.process import the
from ..util.sizes import pages


class _Space(list[Region]):
    """Regions of one store. A subclass of list, because lists have no weak references."""


class _Spaces(WeakValueDictionary[tuple[DriveSpec, ...], _Space]):
    """The drive space of the process's steps, by request."""


class Buffers:
    """The allocations of a program: arenas, in the order of its `buffers`, and regions, of its `drive_space`.

    The graph is valid while this object lives. Raises `DiskError` if a drive has no room.
    """

    def __init__(self, program: Program) -> None:
        if any(x.device is None for x in program.buffers):  # state is on drives, so memory is short
            return_freed_memory()
        self.arenas = [arena_for(x.number, x.nbytes, x.device) for x in program.buffers]
        self.regions = _regions(tuple(program.drive_space))
        self._static = [
            (arena, x.nbytes)
            for arena, x in zip(self.arenas, program.buffers, strict=True)
            if x.device is not None  # buffers for drives do not count in a device's budget
        ]

    def bind(self, gm: GraphModule) -> None:
        """Replace indices in the nodes by the numbers of arenas and handles. Once for each graph."""
        handles = [int(handle_of(region)) for region in self.regions]
        for each in (gm, *bodies(gm)) if self.arenas or handles else ():
            _substitute(each, [arena.number for arena in self.arenas], handles)

    def reserve(self, exactly: bool) -> None:
        """Make room for the step just before it runs: steps share arenas. `exactly`: and no more than that."""
        reserve(self._static, exactly)

    def renew(self) -> None:
        """Use new memory: after a failed step, drives or other ranks may still read and write the old memory."""
        for arena in self.arenas:
            arena.renew()


def _regions(specs: tuple[DriveSpec, ...]) -> _Space:
    """Return regions for these requests. All steps with equal requests share them: they run one after the other."""
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
