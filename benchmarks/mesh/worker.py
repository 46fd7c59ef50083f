"""One rank of one row in a process of its own; prints one JSON line that starts with RESULT.

mesh.py starts it: python -m benchmarks.mesh.worker ROW --rank R --world N --port P --workload W --steps K
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.common import measure
from benchmarks.common.workload import WORKLOADS, Workload, batches
from benchmarks.mesh import rows
from benchmarks.step.worker import NUM_WARMUP_STEPS, answer, join, preload, timed_steps


def run(
    options: argparse.Namespace,
    builders: Callable[[], dict[str, rows.Builder]] = rows.builders,
    workloads: dict[str, Workload] = WORKLOADS,
) -> dict[str, object]:
    preload(options.preload)
    alone = options.row == "reference"
    if not alone:
        join(options.rank, options.world, options.port)
    work, num_steps = workloads[options.workload], NUM_WARMUP_STEPS + options.steps
    parts = [batches(work, rank, options.world, num_steps) for rank in range(options.world)]
    tokens = [torch.cat(each) for each in zip(*parts, strict=True)]
    imports, loaded = measure.memory_bytes("VmRSS"), set(sys.modules)
    row = builders()[options.row](work, options.rank, options.world)
    result = timed_steps(row, tokens, (lambda: None) if alone else dist.barrier)
    return result | {
        "imports": imports,
        "peak": measure.memory_bytes("VmHWM"),
        "state": measure.storage_bytes(row.state()),
        "late_imports": [name for name in sys.modules if name not in loaded],
    }


def main() -> None:
    answer(__doc__, "row", WORKLOADS, run)


if __name__ == "__main__":
    main()
