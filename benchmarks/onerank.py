"""One process, several loops in it: the hand-written one and ZeroFn's at each stage, step by step.

A few percent between two loops cannot be told apart in processes of their own on a machine that
drifts by more. Here every loop does a step on the same tokens before any does the next, in an
order that rotates, so each ratio is of two steps that lie within seconds of each other.
Prints one JSON line that starts with RESULT. step.py and overhead.py start it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from handwritten import Handwritten
from workload import WORKLOADS, Workload, batches

NUM_WARMUP_STEPS = 2
HANDWRITTEN = "hand-written"


def loops(work: Workload, stages: list[int]) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    from zerofn_rows import Compiled

    return {HANDWRITTEN: Handwritten(work), **{f"ZeroFn {k}": Compiled(work, k) for k in stages}}


Series = dict[str, list[float]]


def alternate(work: Workload, stages: list[int], num_steps: int) -> dict[str, Series]:
    """Milliseconds of each timed step and every loss, by loop."""
    rows = loops(work, stages)
    result = {name: {"ms": [], "losses": []} for name in rows}
    order = list(rows)
    for index, tokens in enumerate(batches(work, 0, 1, NUM_WARMUP_STEPS + num_steps)):
        for name in order:
            start = time.perf_counter()
            loss = rows[name](tokens)
            elapsed = time.perf_counter() - start
            result[name]["losses"].append(float(loss))
            if index >= NUM_WARMUP_STEPS:
                result[name]["ms"].append(1e3 * elapsed)
        order = order[1:] + order[:1]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 1, 2, 3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = alternate(WORKLOADS[options.workload], options.stages, options.steps)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
