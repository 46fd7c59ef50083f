"""Measure this machine: the profile that `zerofn profile` writes."""

from __future__ import annotations

import functools
import itertools
import json
import os
import platform
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..comm.mesh import Axis, Mesh
from ..comm.transport import all_gather_start, wait_
from ..job.agreement import exchange
from ..job.step_order import meetings
from ..memory.turns import refuse_while_capturing
from ..offload.disk.probe import probe
from ..offload.policy import total_memory
from ..ops.fp8_products import fp8_mm
from ..sharding.float8 import multiplies
from ..util.arguments import known_arguments
from .host_share import dram_rate, link_rate
from .machine import Machine, hops, this_hardware
from .op_timer import once

ROUNDS = 7
SIDE = {"cpu": 768, "cuda": 8192}  # rows and columns of the matrices to multiply
LARGE = 1 << 26  # bytes, more than caches hold
SENT = (1 << 12, 1 << 23)  # bytes a rank sends in transfers that are timed
SMALL_OPS = 200
# The work of a rank before it waits for another, about 10 ms: rows of matrices, and products; and repetitions.
STRETCH, STRETCHES = {"cpu": (256, 40), "cuda": (8192, 1)}, 40


@known_arguments
def this_machine(folder: str | os.PathLike[str] | None = None) -> Machine:
    """Measure this machine under the load of all ranks, and return it as a `Machine`.

    Every rank must call it; all get the first rank's result. `folder`: a folder on a drive to measure as well; None
    measures no drive. It takes some seconds.

        zerofn.this_machine("/mnt/nvme").save("here.json")  # then: zerofn.plan(..., machine="here.json")
    """
    refuse_while_capturing("zerofn.this_machine")
    axis = Mesh.of(None).axis()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = ("float32", "bfloat16", "float16") if device.type == "cuda" else ("float32", "bfloat16", "float64")
    flops = {name: _products(getattr(torch, name), device) for name in names}
    if multiplies(device):
        flops["float8_e4m3fn"] = _float8_products(device)
    x = torch.zeros(LARGE // 4, device=device)
    memory_rate = 2 * LARGE / _seconds(lambda: x.add_(1.0))
    launch = _launch(device)
    latency, link, busy = _link(axis, device)
    slowest = _slowest(axis, device)
    drive = probe(Path(folder)) if folder is not None else None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", axis.size))
    host = total_memory()
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host / ranks
    host_link, host_rate = (link_rate(device), dram_rate()) if device.type == "cuda" else (0.0, memory_rate)
    found = Machine(
        platform.node() or "this machine",
        device.type,
        ranks,
        memory,
        memory_rate,
        flops,
        link,
        link,
        host_link=host_link,
        host_memory=host,
        host_rate=host_rate * ranks,
        launch=launch,
        latency=latency,
        busy=busy,
        slowest=slowest,
        disk=_free(folder),
        disk_read=drive.read if drive else 0.0,
        disk_write=drive.write if drive else 0.0,
        measured_on=this_hardware(),
    )
    if axis.size == 1:
        return found
    first, *_ = exchange("zerofn.this_machine()", found.to_json())
    return Machine.from_json(first)


def _free(folder: str | os.PathLike[str] | None) -> float:
    return float(shutil.disk_usage(folder).free) if folder is not None else 0.0


def _seconds(run: Callable[[], object]) -> float:
    """The median of some runs."""
    run()
    return statistics.median(once(run) for _ in range(ROUNDS))


def _products(dtype: torch.dtype, device: torch.device) -> float:
    """Return operations per second of products of square matrices."""
    side = SIDE[device.type]
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    return 2 * side**3 / _seconds(lambda: a @ b)


def _float8_products(device: torch.device) -> float:
    """Return the same of float8 numbers, which are there already."""
    side = SIDE[device.type]
    codes, scale = torch.zeros(side, side, dtype=torch.uint8, device=device), torch.ones((), device=device)
    product = functools.partial(fp8_mm, codes, codes, scale, scale, None, False, torch.bfloat16)
    return 2 * side**3 / _seconds(product)


def _launch(device: torch.device) -> float:
    """Return the seconds of an operation that does almost nothing."""
    small = torch.zeros(16, device=device)
    return _seconds(lambda: [small.add_(1.0) for _ in range(SMALL_OPS)]) / SMALL_OPS


def _link(axis: Axis, device: torch.device) -> tuple[float, float, float]:
    """Return (seconds before the first byte, bytes per second, seconds of computation lost per byte) of transfers."""
    if axis.size == 1:
        return 0.0, 0.0, 0.0  # it is not known
    with meetings().lasting([axis.group], "the measurement of links", b""):
        return _measured_link(axis, device)


def _measured_link(axis: Axis, device: torch.device) -> tuple[float, float, float]:
    shards = [torch.ones(n // 4 // (axis.size - 1), device=device) for n in SENT]
    small, large = (_seconds(functools.partial(_transfer, shard, axis)) for shard in shards)
    sent = [shard.nbytes * (axis.size - 1) for shard in shards]
    rate = (sent[1] - sent[0]) / max(large - small, 1e-9)
    a = torch.ones(256, 256, device=device)
    rounds = max(1, int(3 * large / _seconds(lambda: a @ a)))

    def work(shard: Tensor | None) -> None:
        under_way = None if shard is None else _start(shard, axis)
        _multiply(a, rounds)
        if under_way is not None:
            wait_(under_way)

    longer = statistics.median(once(lambda: work(shards[1])) - once(lambda: work(None)) for _ in range(ROUNDS))
    before = max(0.0, small - sent[0] / rate) / hops(axis.size)
    # At most as much as if computation stopped for the whole transfer.
    return before, rate, min(max(0.0, longer) / sent[1], 1 / rate)


def _slowest(axis: Axis, device: torch.device) -> float:
    """Return how much longer the slowest of ranks with equal work takes than the average. Cores differ, and so does
    the load that each shares its hardware with.
    """
    if axis.size == 1:
        return 1.0
    side, products = STRETCH[device.type]
    a, signal, times = torch.ones(side, side, device=device), torch.ones(1, device=device), []
    for _ in range(STRETCHES):
        _transfer(signal, axis)  # ranks begin together
        times.append(once(functools.partial(_multiply, a, products)))
    ranks = [json.loads(x) for x in exchange("zerofn.this_machine()", json.dumps(times))]
    return statistics.fmean(map(max, zip(*ranks, strict=True))) / statistics.fmean(itertools.chain(*ranks))


def _multiply(a: Tensor, times: int) -> None:
    for _ in range(times):
        a @ a


def _transfer(shard: Tensor, axis: Axis) -> None:
    wait_(_start(shard, axis))


def _start(shard: Tensor, axis: Axis) -> Tensor:
    return all_gather_start(shard, axis.size, axis.group, "")
