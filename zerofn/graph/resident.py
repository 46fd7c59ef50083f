"""The memory that a step holds all the time: its inputs' bytes on the device, in host memory and on drives."""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .._torch_compat import storage_key
from ..dry_run.fake_machine import is_host
from ..offload.host_worker import BEHIND
from ..util.sizes import PAGE, pages
from .alias import roots, touches
from .liveness import KINDS, Live, memory_bytes, tensors_of
from .nested import call_of, graphs_of
from .node_kinds import ASIDE, argument
from .program import Program, ShardedInput, tensor_of

ops = torch.ops.zerofn


class Resident(NamedTuple):
    """Bytes held before, during and after a step: on the device by kind, in host memory, on drives."""

    device: Live
    host: int
    disk: int


def resident(program: Program) -> Resident:
    """Return the bytes of the state, the batch, closed-over tensors and static buffers.

    `host` also includes activations that are offloaded, and gradients and parameters that wait for the host's updates:
    of each size the most at one time, since page-locked memory is handed out again for the same size only.
    """
    device: Live = dict.fromkeys(KINDS, 0)
    host, disk = sum(n * times for n, times in (offloaded(program.gm) + queued(program.gm)).items()), 0
    placeholders = iter(program.placeholders)
    for cut in program.state.nodes:
        if cut is None:
            device["state"] += memory_bytes(next(placeholders).meta["val"])
        if not isinstance(cut, ShardedInput):
            continue
        for unit, storage in zip(cut.spec.layout.units, cut.storages, strict=True):
            start, stop = cut.spec.bounds(unit)
            for dtype, size, tier in storage.parts(stop - start):
                nbytes = size * dtype.itemsize
                next(placeholders)
                if tier == "nvme":
                    disk += pages(nbytes)
                elif tier == "cpu":
                    host += nbytes
                else:
                    device["state"] += nbytes
    for shard, whole, shared in program.copies():
        device["gathered"] += memory_bytes(whole.meta["val"])
        if shared:  # its bytes are those of the copy
            device["state"] -= tensor_of(shard).nbytes  # type: ignore[union-attr]
    device["other"] += sum(memory_bytes(x.meta["val"]) for x in program.batch_placeholders)
    device["other"] += sum(constants(program.gm).values())
    staging = sum(x.nbytes for x in program.buffers if x.device is None)  # what drives read to and write from
    placements = [
        storage.placement
        for cut in program.state.nodes
        if isinstance(cut, ShardedInput)
        for storage in cut.storages
        if storage.placement
    ]
    if any(not is_host(torch.device(x.device)) for x in placements):  # models compute on an accelerator
        host += staging
    else:
        device["staging"] += staging
    device["reserved"] += sum(x.nbytes for x in program.buffers if x.device is not None)
    disk += sum(pages(x.nbytes) for x in program.drive_space)
    return Resident(device, host, disk)


def constants(gm: GraphModule) -> dict[int, int]:
    """Return the bytes of tensors that the step closes over, such as another model's parameters, by storage."""
    values = [
        operator.attrgetter(str(node.target))(each)
        for each in graphs_of(gm)
        for node in each.graph.nodes
        if node.op == "get_attr"
    ]
    return {storage_key(x): memory_bytes(x) for x in values if isinstance(x, Tensor) and x.dim()}


def offloaded(gm: GraphModule) -> Counter[int]:
    """Return of each size, in bytes of whole pages, the most activations that are offloaded to host memory at one
    time.
    """
    nodes = list(gm.graph.nodes)
    copies_to_host = [n for n in nodes if _goes_to_host(n) and argument(n, "offloaded")]
    change: dict[Node, Counter[int]] = defaultdict(Counter)  # node -> how many of a size more there are behind it
    if copies_to_host:
        touched = touches(gm.graph, roots(gm.graph))
        for node in copies_to_host:
            change[node][_locked(node)] += 1
            change[touched[node][-1]][_locked(node)] -= 1
    now, most = Counter[int](), Counter[int]()
    inside: dict[GraphModule, Counter[int]] = {}  # of bodies, which run again
    for node in nodes:
        if call := call_of(node):
            if call.body not in inside:
                inside[call.body] = offloaded(call.body)
            most |= now + inside[call.body]
        if node in change:
            now.update(change[node])
            most |= now
    return most


def queued(gm: GraphModule) -> Counter[int]:
    """Return of each size, in bytes of whole pages, the most values that wait in host memory at one time for the thread
    that updates there: gradients, and parameters that return to the device.

    They are sent when at most `BEHIND` of the thread's jobs are left, perhaps of the step before.
    """
    sent = {x for x in gm.graph.nodes if _goes_to_host(x) and not argument(x, "offloaded")}
    if not sent:
        return Counter()
    touched = touches(gm.graph, roots(gm.graph))
    jobs = {n: k for k, n in enumerate(x for x in gm.graph.nodes if x.meta.get(ASIDE))}
    waiting: list[tuple[int, float]] = []  # bytes, and the job after which they are freed
    most = Counter[int]()
    for turn in range(2):
        begun = turn * len(jobs)
        for node in gm.graph.nodes:
            begun += node in jobs
            value = tensor_of(node)
            if node in sent and value is not None and value.dim():
                last = max(jobs.get(x, -math.inf) for x in touched[node])
                waiting = [x for x in waiting if x[1] >= begun - BEHIND]
                waiting.append((_locked(node), turn * len(jobs) + last))
                most |= Counter(nbytes for nbytes, _ in waiting)
    return most


def _locked(node: Node) -> int:
    """Return the bytes that the host takes for a copy."""
    return max(pages(memory_bytes(node.meta["val"])), PAGE)


def _goes_to_host(node: Node) -> bool:
    """Whether a node starts a copy from a device to the host. Where models compute on the host, an offloaded activation
    is counted like any other memory of the step.
    """
    if node.target is not ops.bring.default or not is_host(argument(node, "device")):
        return False
    return not all(is_host(x.device) for x in tensors_of(argument(node, "x").meta["val"]))
