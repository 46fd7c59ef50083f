"""One rank of a framework's training, on DeepSpeed or on ZeroFn: worker FRAMEWORK SYSTEM --rank R --world N --port P.

A small model is trained first, so that what is imported on the way is imported; then peak and times are taken.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
from pathlib import Path

import torch

from benchmarks.common import measure
from benchmarks.common.workload import SMOKE, WORKLOADS

SKIPPED = 3  # steps that are not timed: capture, and buffers that are made
FRAMEWORKS = ("trainer", "lightning")  # transformers' Trainer, Lightning's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("system")
    for name in ("rank", "world", "port", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(options.rank), "LOCAL_RANK": str(options.rank), "NODE_RANK": "0", "WORLD_SIZE": str(options.world),
        "LOCAL_WORLD_SIZE": str(options.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port),
        "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    train = importlib.import_module(f"benchmarks.integrations.under_{options.framework}").train
    train(options.system, SMOKE, options.world, 2)
    gc.collect()
    before = measure.memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    found = train(options.system, WORKLOADS[options.workload], options.world, options.steps)
    peak = measure.memory_bytes("VmHWM") - before
    ends = found["ends"][SKIPPED - 1 :]
    ms = 1e3 * statistics.median(b - a for a, b in zip(ends, ends[1:], strict=False))
    print("RESULT " + json.dumps({"losses": found["losses"], "ms": ms, "peak": peak}), flush=True)


if __name__ == "__main__":
    main()
