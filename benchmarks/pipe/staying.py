"""One rank of one row in a process that stays: it reads what to do line by line, and prints RESULT and a line of JSON.

pipe.py starts it: python -m benchmarks.pipe.staying ROW --rank R --world N --port P --workload W --steps K
"begin" makes the model and trains two steps; "step" trains one more, of K, between barriers; "end" ends it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import measure
from benchmarks.common.workload import batches
from benchmarks.pipe.rows import WORKLOADS, builders
from benchmarks.step.worker import NUM_WARMUP_STEPS, answer, join, preload

Answer = dict[str, Any]


def answers(options: argparse.Namespace) -> Iterator[Answer]:
    """What is answered to "begin", to each "step", and to "end"."""
    preload(options.preload)
    join(options.rank, options.world, options.port)
    work, num_steps = WORKLOADS[options.workload], NUM_WARMUP_STEPS + options.steps
    parts = [batches(work, rank, options.world, num_steps) for rank in range(options.world)]
    tokens = iter([torch.cat(each) for each in zip(*parts, strict=True)])
    imports = measure.memory_bytes("VmRSS")
    row = builders()[options.row](work, options.rank, options.world)
    losses = [row.step(next(tokens)) for _ in range(NUM_WARMUP_STEPS)]
    yield {}
    for part in tokens:
        dist.barrier()
        sent, start = measure.loopback_bytes(), time.perf_counter()
        losses.append(row.step(part))
        dist.barrier()
        elapsed, sent = time.perf_counter() - start, measure.loopback_bytes() - sent
        yield {"ms": 1e3 * elapsed, "wire": sent}
    yield {
        "beyond": measure.memory_bytes("VmHWM") - imports,
        "state": measure.storage_bytes(row.state()),
        "losses": [float(loss) for loss in losses],
    }


def run(options: argparse.Namespace) -> Answer:
    """Answer each line; what is answered to the last one."""
    found = answers(options)
    for line in sys.stdin:
        answered = next(found)
        if json.loads(line)["do"] == "end":
            return answered
        print("RESULT " + json.dumps(answered), flush=True)
    raise EOFError("nobody asked for the end")


if __name__ == "__main__":
    answer(__doc__, "row", WORKLOADS, run)
