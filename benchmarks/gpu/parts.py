"""python -m benchmarks.gpu.parts PART SECONDS [--device cpu]: one part of gpu.py.

Prints a line "ROW {json}" for each thing it found. It begins nothing that it expects not to end within SECONDS.
On the CPU everything is tiny.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

import zerofn
from benchmarks.gpu import model
from zerofn.cost import host_share
from zerofn.offload.host_worker import worker
from zerofn.ops import cpu, cuda

GIB = 1 << 30
DENSE = 8192  # rows of the matrix product that says how fast the device computes
LARGE, BIG = ("t5-large", "t5-3b")


class Run:
    """The options of this process, and what it says."""

    def __init__(self, device: str, seconds: float) -> None:
        since = time.time() - psutil.Process().create_time()  # imports count
        self.device, self.dry, self.end = device, device == "cpu", time.monotonic() + seconds - since

    def left(self) -> float:
        return self.end - time.monotonic()

    def row(self, **found: Any) -> None:
        print("ROW " + json.dumps(found), flush=True)

    def sync(self) -> None:
        worker().finish()
        if not self.dry:
            torch.cuda.synchronize()

    def cap(self, gib: float | None) -> None:
        """Let torch take no more of the device's memory; a context's own few hundred MB are beside that."""
        if gib is not None and not self.dry:
            torch.cuda.set_per_process_memory_fraction(gib * GIB / torch.cuda.mem_get_info()[1])

    def peak(self) -> tuple[int, int]:
        """Bytes of the device since the last call: that torch has held, with what its allocator keeps, and in use."""
        if self.dry:
            return 0, 0
        peak = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak


class HostMemory:
    """Watches this process' host memory: pages it holds, and page-locked ones that torch's allocator took, which the
    system does not count as its own. With a limit the process ends when it goes beyond it."""

    def __init__(self, limit: float | None = None) -> None:
        self.peak, self.limit = 0, limit
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        process = psutil.Process()
        while True:
            pinned = (
                torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if torch.cuda.is_initialized() else 0
            )
            self.peak = max(self.peak, process.memory_info().rss + pinned)
            if self.limit is not None and self.peak > self.limit:
                print("ROW " + json.dumps({"what": "host memory", "bytes": self.peak, "ended": True}), flush=True)
                os._exit(3)
            time.sleep(0.05)


def timed(run: Run, function: Callable[[], Any], repeats: int) -> float:
    """The least seconds of `repeats` calls, after two that do not count. On a GPU the device is kept busy before each,
    so that it never waits for a launch."""
    found, busy = [], None if run.dry else torch.randn(DENSE, DENSE, device=run.device, dtype=torch.bfloat16)
    for _ in range(repeats + 2):
        if run.dry:
            began = time.perf_counter()
            function()
            found.append(time.perf_counter() - began)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):
            busy @ busy
        begin.record()
        function()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return min(found[2:])


# --- kernels ---------------------------------------------------------------------------------------------------------


def moments_of(form: str, m: torch.Tensor, v: torch.Tensor, kernels: Any) -> list[list[torch.Tensor]]:
    if form == "8bit":
        return [list(kernels.encode(m, True)), list(kernels.encode(v, False))]
    return [[x.bfloat16()] if form == "bf16" else [x.clone()] for x in (m, v)]


def kernels(run: Run) -> None:
    size = 1 << (12 if run.dry else 27)
    served: Any = cpu if run.dry else cuda
    if not run.dry and cuda.missing():
        run.row(what="kernels", error=cuda.missing())
        return
    p, g = (torch.randn(size, device=run.device) for _ in range(2))
    m, v, half = 0.1 * g, g.square(), g.bfloat16()
    run.row(what="copy", seconds=timed(run, functools.partial(torch.empty_like(p).copy_, p), 10), bytes=8 * size)
    fused = torch.nn.Parameter(p.clone())
    fused.grad = g
    adamw = torch.optim.AdamW([fused], lr=1e-3, weight_decay=0.1, fused=True)
    run.row(what="AdamW, torch fused", seconds=timed(run, adamw.step, 10), bytes=28 * size)
    del fused, adamw
    common = {
        "starts": [0],
        "stops": [size],
        "rates": [1e-3],
        "decays": [0.1],
        "count": 10,
        "hyper": {"b1": 0.9, "b2": 0.999, "eps": 1e-8},
    }
    forms = [
        ("fp32", "fp32", 28.0),
        ("fp32", "bf16", 20.0),
        ("split", "fp32", 26.0),
        ("split", "bf16", 18.0),
        ("split", "8bit", 14.0625),
    ]
    for master, form, per in forms:
        kept, gradient = ([p.clone()], g) if master == "fp32" else (list(served.split(p)), half)
        held = moments_of(form, m, v, served)
        seconds = timed(run, functools.partial(served.update_, "adamw", kept, gradient, held, **common), 10)
        run.row(what=f"AdamW, {master} master, {form} moments", seconds=seconds, bytes=per * size)
    formats(run, p, half, served)


def formats(run: Run, p: torch.Tensor, half: torch.Tensor, served: Any) -> None:
    """Norms, casts and codecs; on the CPU there is no cast and one norm."""
    size, halves, coded = p.numel(), served.split(p), served.encode(p, True)
    works: dict[str, tuple[Callable[[], Any], float]] = {
        "split": (lambda: served.split(p), 8), "join": (lambda: served.join(*halves), 8),
        "encode": (lambda: served.encode(p, True), 5 + 4 / 256),
        "decode": (lambda: served.decode(*coded, True), 5 + 4 / 256)}  # fmt: skip
    if run.dry:
        works["norms of fp32"] = (lambda: cpu.norm2_and_extreme([p]), 4)
    else:
        works |= {"norms of fp32": (lambda: cuda.norms_and_extremes(p, [0], [size]), 4),
                  "norms of bf16": (lambda: cuda.norms_and_extremes(half, [0], [size]), 2),
                  "cast fp32 to bf16": (lambda: cuda.cast(p, torch.bfloat16), 6),
                  "cast bf16 to fp32": (lambda: cuda.cast(half, torch.float32), 6)}  # fmt: skip
    for name, (work, per) in works.items():
        run.row(what=name, seconds=timed(run, work, 10), bytes=per * size)


# --- training --------------------------------------------------------------------------------------------------------


class Training:
    """A state of one of the models, its compiled step, and what a step takes."""

    def __init__(self, run: Run, name: str, offload: Any, recompute: bool, on_nonfinite: str) -> None:
        self.run, self.name = run, name
        init, step = model.make(name, recompute, on_nonfinite)
        began = time.perf_counter()
        self.state = zerofn.shard(init, precision="bf16", unit=model.unit_of, offload=offload, device=run.device)
        self.step, self.sharding = zerofn.compile(step), time.perf_counter() - began
        self.first = 0.0  # seconds of the last capture and step

    def steps(self, batch: Any, num: int) -> list[float]:
        """The losses of `num` steps."""
        losses = []
        for _ in range(num):
            self.state, aux = self.step(self.state, batch)
            losses.append(aux["loss"])
        return [float(x) for x in losses]

    def measure(self, size: int, num: int = 5) -> dict[str, Any]:
        """One step that captures, one that warms up, and as many as fit of `num` that are timed as a loop."""
        batch = model.batch_of(self.name, size, self.run.device)
        self.run.peak()
        began = time.perf_counter()
        losses = self.steps(batch, 1)
        self.run.sync()
        self.first, began = time.perf_counter() - began, time.perf_counter()
        losses += self.steps(batch, 1)
        self.run.sync()
        warm, began = time.perf_counter() - began, time.perf_counter()
        num = max(1, min(num, int(self.run.left() / 3 / max(warm, 1e-3))))
        losses += self.steps(batch, num)
        self.run.sync()
        seconds = (time.perf_counter() - began) / num
        tokens = 2 * size * model.CONFIGS[self.name].length
        held, used = self.run.peak()
        return {
            "batch": size,
            "ms": 1e3 * seconds,
            "tokens_per_second": tokens / seconds,
            "losses": losses,
            "device_bytes": held,
            "used_bytes": used,
            "planned_bytes": self.step.lower(self.state, batch).memory().total,
            "first_step_s": self.first,
            "sharding_s": self.sharding,
        }


def offload_of(run: Run, **tiers: Any) -> Any:
    """On the CPU, where no other processor updates and host memory is no tier of its own, drives stand in."""
    return zerofn.Offload(**(tiers if not run.dry else {"optimizer": "nvme"}))


def largest(
    run: Run,
    what: str,
    name: str,
    cap: float,
    sizes: tuple[int, int],
    offload: Any,
    recompute: bool,
    on_nonfinite: str = "skip",
) -> None:
    """Measure two batch sizes, the largest that fits under the cap by the line through their peaks, and then, by
    halves, what is between the largest that ran and the least that did not."""
    run.cap(cap)
    memory = HostMemory()
    training = Training(run, "tiny" if run.dry else name, offload, recompute, on_nonfinite)
    done: list[dict[str, Any]] = []
    todo, least = list(sizes[1:] if run.dry else sizes), math.inf  # `least` did not fit
    while todo and (not done or run.left() > 1.5 * training.first):
        size = todo.pop(0)
        try:
            found = training.measure(size)
        except torch.OutOfMemoryError as error:
            run.row(what=what, batch=size, out_of_memory=str(error).splitlines()[0][:200])
            least, todo = size, []
            torch.cuda.empty_cache()
        else:
            done.append(found)
            run.row(what=what, host_bytes=memory.peak, cap_bytes=cap * GIB, recompute=recompute, **found)
        if todo or run.dry:
            continue
        best = done[-1]["batch"] if done else 0
        size = (best + int(least)) // 2 if least < math.inf else _by_line(done, cap)
        todo += [size] if size > best + 2 else []
    if todo:
        run.row(what=what, cut_short=f"no time for batch {todo}")


def _by_line(done: list[dict[str, Any]], cap: float) -> int:
    """The batch whose peak is 0.96 of the cap, on the line through the last two peaks."""
    if len(done) < 2:
        return 0
    (a, b), (low, high) = ([x[key] for x in done[-2:]] for key in ("device_bytes", "batch"))
    slope = (b - a) / (high - low)
    return int((0.96 * cap * GIB - b) / slope) + high if slope > 0 else 0


# --- beside plain torch ----------------------------------------------------------------------------------------------


def plain(run: Run) -> None:
    """The same steps by torch alone, in turns: fp32 parameters, autocast to bf16, its fused AdamW."""
    name = "tiny" if run.dry else LARGE
    training = Training(run, name, None, False, "ignore")
    module = model.T5(model.CONFIGS[name], False).to(run.device)
    with torch.no_grad():
        for key, p in module.named_parameters():
            p.copy_(model.weight(key, p.shape))
    adamw = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def steps(batch: Any) -> float:
        for _ in range(3):
            adamw.zero_grad()
            with torch.autocast(run.device, torch.bfloat16):
                loss = module(batch["source"], batch["target"])
            loss.backward()
            adamw.step()
        return loss.item()

    for size in (2,) if run.dry else (16, 64, 128):
        batch = model.batch_of(name, size, run.device)
        ways = {"plain": functools.partial(steps, batch), "ours": functools.partial(training.steps, batch, 3)}
        times: dict[str, list[float]] = {key: [] for key in ways}
        peaks = {}
        for turn in range(2 if run.dry else 6):
            for key, work in ways.items():
                run.sync()
                run.peak()
                began = time.perf_counter()
                work()
                run.sync()
                if turn:  # the first captures
                    times[key].append((time.perf_counter() - began) / 3)
                    peaks[key] = run.peak()[1]
        run.row(what="beside plain torch", batch=size, seconds=times, used_bytes=peaks,
                ratio=statistics.median(a / b for a, b in zip(times["ours"], times["plain"], strict=True)))  # fmt: skip


# --- largest batches -------------------------------------------------------------------------------------------------


def large_resident(run: Run) -> None:
    largest(run, "t5-large, resident", LARGE, 24, (8, 16), None, False)


def large_offload(run: Run) -> None:
    largest(run, "t5-large, offload to the host", LARGE, 24, (30, 50), offload_of(run, optimizer="cpu"), False)


def big_24(run: Run) -> None:
    largest(run, "t5-3b, offload to the host", BIG, 24, (20, 32), offload_of(run, optimizer="cpu"), True)


def big_10(run: Run) -> None:
    """Exact Adam for 2.85 G parameters in 10 GiB of device and 32 GiB of host memory: nine tenths of what is not
    computed with lies on the host, and no gradient waits for the finite check."""
    run.cap(10)
    memory = HostMemory(32 * GIB)
    tiers = offload_of(run, optimizer="cpu", fraction=0.9, update="cpu")
    training = Training(run, "tiny" if run.dry else BIG, tiers, True, "ignore")
    run.row(what="t5-3b, sharded", host_bytes=memory.peak, device_bytes=run.peak()[0], sharding_s=training.sharding)
    try:
        found = training.measure(1, num=3 if run.dry else 12)
    except torch.OutOfMemoryError as error:
        run.row(what="t5-3b, 10 GiB", batch=1, out_of_memory=str(error).splitlines()[0][:200])
        return
    run.row(what="t5-3b, 10 GiB", host_bytes=memory.peak, cap_bytes=10 * GIB, **found)


# --- tokens ----------------------------------------------------------------------------------------------------------


def needed_tokens(run: Run, dense: int) -> tuple[float, dict[str, float]]:
    """F / (6 U) tokens a step: six operations a parameter and token take as long as its update, with F operations a
    second of a matrix product and U updated elements a second."""
    a = torch.randn(dense, dense, device=run.device, dtype=torch.bfloat16)
    flops = 2 * dense**3 / timed(run, lambda: a @ a, 5)
    dram, link = (
        host_share.dram_rate(),
        host_share.dram_rate() if run.dry else host_share.link_rate(torch.device("cuda", 0)),
    )
    share = host_share.best_share(28, 10, dram, link)
    elements = 1 / host_share.seconds(share, 28, 10, dram, link)
    return flops / 6 / elements, {
        "flops": flops,
        "elements_per_second": elements,
        "dram": dram,
        "link": link,
        "host_share": share,
    }


def tokens(run: Run) -> None:
    """The same steps with the optimizer's state on the device and in host memory, in turns."""
    bound, found = needed_tokens(run, 64 if run.dry else DENSE)
    run.row(what="rates", tokens=bound, **found)
    name = "tiny" if run.dry else "shallow"
    each = 2 * model.CONFIGS[name].length
    here, there = (Training(run, name, x, False, "ignore") for x in (None, offload_of(run, optimizer="cpu")))
    for factor in (1.1, 0.25, 2.0)[: 1 if run.dry else None]:
        if run.left() < 3 * (here.first + there.first):
            run.row(what="tokens", cut_short=f"no time for {factor} times the bound")
            break
        size = 2 if run.dry else max(1, min(round(factor * bound / each), 600))
        batch, times = model.batch_of(name, size, run.device), ([], [])
        for training in (here, there):
            training.measure(size, 1)
        for _ in range(2 if run.dry else 7):
            for training, seconds in zip((here, there), times, strict=True):
                run.sync()
                began = time.perf_counter()
                training.steps(batch, 3)
                run.sync()
                seconds.append((time.perf_counter() - began) / 3)
        run.row(
            what="tokens",
            tokens=size * each,
            bound=bound,
            resident_s=times[0],
            offloaded_s=times[1],
            ratio=statistics.median(b / a for a, b in zip(*times, strict=True)),
        )


def main() -> None:
    from benchmarks.gpu.correct import correct
    from benchmarks.gpu.ranks import meshes, nccl, ranks

    large = (large_resident, large_offload, big_24, big_10, tokens)
    parts = {f.__name__: f for f in (correct, ranks, meshes, nccl, kernels, plain, *large)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=parts)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--host-gib", type=float, help="what the host has, where it says less until it is used")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    if options.host_gib:
        zerofn.offload.policy.free_memory = lambda: int(options.host_gib * GIB) - psutil.Process().memory_info().rss
    parts[options.part](Run(options.device, options.seconds))


if __name__ == "__main__":
    main()
