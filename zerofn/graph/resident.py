"""What of a step's inputs is there all the time, where it lies, and how many bytes it takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..disk import pages
from ..imagined import is_host
from .liveness import KINDS, Live, memory_bytes
from .program import Cut, Program, tensor_of


class Resident(NamedTuple):
    """Bytes that are there before, during and after a step: on the device by kind, in host memory, on drives."""

    device: Live
    host: int
    disk: int


def resident(program: Program) -> Resident:
    """Where the state and the batch lie, with what offloading keeps beside them."""
    device: Live = dict.fromkeys(KINDS, 0)
    host = disk = 0
    placeholders = iter(program.placeholders)
    for cut in program.state.nodes:
        if cut is None:
            device["state"] += memory_bytes(next(placeholders).meta["val"])
        for unit, kind in zip(cut.spec.layout.units, cut.kinds, strict=True) if isinstance(cut, Cut) else ():
            start, stop = cut.spec.bounds(unit)
            for dtype, size, tier in kind.parts(stop - start):
                nbytes = size * dtype.itemsize
                next(placeholders)
                if tier == "nvme":
                    disk += pages(nbytes)
                elif tier == "cpu":
                    host += nbytes
                else:
                    device["state"] += nbytes
    for piece, whole, shared in program.copies():
        device["gathered"] += memory_bytes(whole.meta["val"])
        device["state"] -= tensor_of(piece).nbytes if shared else 0  # type: ignore[union-attr]
    device["other"] += sum(memory_bytes(x.meta["val"]) for x in program.batch_placeholders)
    arenas = sum(arena.nbytes for arena in program.arenas)
    away = [kind.away for cut in program.state.nodes if isinstance(cut, Cut) for kind in cut.kinds if kind.away]
    on_host = any(not is_host(torch.device(x.device)) for x in away)
    if on_host:
        host += arenas
    else:
        device["staging"] += arenas
    disk += sum(pages(region.nbytes) for region in program.scratch or ())
    return Resident(device, host, disk)
