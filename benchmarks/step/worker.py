"""One rank of one system in a process of its own; prints one JSON line that starts with RESULT.

step.py starts it: python -m benchmarks.step.worker SYSTEM --rank R --world N --port P --workload W --steps K
SYSTEM is a row's name, or "reference": the hand-written loop on all N ranks' tokens at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import measure
from benchmarks.common.handwritten import Handwritten
from benchmarks.common.peers import KEEPING, PEERS, Row
from benchmarks.common.workload import BUDGETED, WORKLOADS, batches

NUM_WARMUP_STEPS = 2
ALL_WORKLOADS = WORKLOADS | BUDGETED


def builder(system: str):
    if system in PEERS | KEEPING:
        return (PEERS | KEEPING)[system]
    from benchmarks.common import zerofn_rows  # imports ZeroFn's environment, which the peers' does not hold

    return (zerofn_rows.ROWS | zerofn_rows.ACCUMULATING)[system]


def preload(path: str | None) -> None:
    """Import the modules that an earlier run of this system wrote down as imported on the way."""
    for module in json.loads(Path(path).read_text()) if path else ():
        with contextlib.suppress(Exception):  # some can only be imported by what imported them
            importlib.import_module(module)


def join(rank: int, world: int, port: int, address: str = "127.0.0.1", interface: str = "lo") -> None:
    """`address`: rank 0's, on `interface`."""
    os.environ.update(
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        GLOO_SOCKET_IFNAME=interface,
    )
    dist.init_process_group("gloo")
    if "deepspeed" in sys.modules:  # its own start takes the group above, and imports much
        sys.modules["deepspeed"].init_distributed("gloo")


def timed_steps(row: Row, tokens: list[torch.Tensor], barrier) -> dict[str, Any]:
    """Milliseconds and loopback bytes a step, and every step's loss.

    Steps follow one another as in a training loop. The clock and the counter stop when all ranks
    have come to the end of the last: what a step leaves under way is paid for, in the next one or
    at the end.
    """
    losses = [row.step(part) for part in tokens[:NUM_WARMUP_STEPS]]
    barrier()
    sent, start = measure.loopback_bytes(), time.perf_counter()
    losses += [row.step(part) for part in tokens[NUM_WARMUP_STEPS:]]
    barrier()
    elapsed, sent = time.perf_counter() - start, measure.loopback_bytes() - sent
    num_steps = len(tokens) - NUM_WARMUP_STEPS
    return {"ms": 1e3 * elapsed / num_steps, "wire": sent / num_steps, "losses": [float(loss) for loss in losses]}


def run(options: argparse.Namespace) -> dict[str, object]:
    preload(options.preload)
    if options.world > 1:
        join(options.rank, options.world, options.port)
    work = ALL_WORKLOADS[options.workload]
    num_steps = NUM_WARMUP_STEPS + options.steps
    tokens = batches(work, options.rank, options.world, num_steps)
    imports, loaded = measure.memory_bytes("VmRSS"), set(sys.modules)
    row = builder(options.system)(work, options.rank, options.world)
    peak_of_setup = measure.memory_bytes("VmHWM")
    result = timed_steps(row, tokens, dist.barrier if options.world > 1 else lambda: None)
    return result | {
        "imports": imports,
        "peak_of_setup": peak_of_setup,
        "peak": measure.memory_bytes("VmHWM"),
        "state": measure.storage_bytes(row.state()),
        "allocated": measure.live_tensor_bytes(),
        "late_imports": [name for name in sys.modules if name not in loaded],
    }


def reference(options: argparse.Namespace) -> dict[str, object]:
    """Losses of the hand-written loop on the global batch: the mean over the ranks' parts."""
    work = ALL_WORKLOADS[options.workload]
    num_steps = NUM_WARMUP_STEPS + options.steps
    parts = [batches(work, rank, options.world, num_steps) for rank in range(options.world)]
    loop = Handwritten(work)
    return {"losses": [float(loop.on_global_batch(list(p))) for p in zip(*parts, strict=True)]}


def answer(description: str | None, row: str, workloads: dict, result: Callable[[argparse.Namespace], dict]) -> None:
    """Read the command line of one rank, and print `result` of it. `row`: what rows are called there."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(row)
    for name in ("rank", "world", "port", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--workload", choices=workloads, required=True)
    parser.add_argument("--preload", help="JSON file: modules to import before memory is read")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("RESULT " + json.dumps(result(options)), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    answer(__doc__, "system", ALL_WORKLOADS, lambda x: reference(x) if x.system == "reference" else run(x))


if __name__ == "__main__":
    main()
