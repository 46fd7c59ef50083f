"""One process, several loops in it: the hand-written one and ZeroFn's at each stage, step by step.

A few percent between two loops cannot be told apart in processes of their own on a machine that
drifts by more. Here the loops take turns of a few steps on the same tokens, so that each ratio is
of two steps that lie within seconds of each other.
Prints one JSON line that starts with RESULT. step.py and overhead.py start it.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from benchmarks.common.handwritten import Handwritten, Step
from benchmarks.common.workload import WORKLOADS, Workload, batches

NUM_WARMUP_TURNS = 2
HANDWRITTEN, COMPILED = "hand-written", "ZeroFn 3, compiled"


def loops(work: Workload, stages: list[int], compiled: bool = False) -> dict[str, Step]:
    from benchmarks.common.zerofn_rows import Compiled

    rows: dict[str, Step] = {HANDWRITTEN: Handwritten(work), **{f"ZeroFn {k}": Compiled(work, k) for k in stages}}
    return rows | ({COMPILED: Compiled(work, 3, backend="inductor")} if compiled else {})


Series = dict[str, list[float]]  # "ms", "losses"


def alternate(
    work: Workload, stages: list[int], num_turns: int, block: int, compiled: bool = False
) -> dict[str, Series]:
    """Milliseconds of each timed step and every loss, by loop.

    Each turn every loop trains on the same `block` batches. In a longer block the first step is
    not timed: it finds the caches as another loop left them, which no training run does.
    """
    rows = loops(work, stages, compiled)
    result = {name: {"ms": [], "losses": []} for name in rows}
    tokens = iter(batches(work, 0, 1, (NUM_WARMUP_TURNS + num_turns) * block))
    order = list(rows)
    for turn in range(NUM_WARMUP_TURNS + num_turns):
        parts = [next(tokens) for _ in range(block)]
        for name in order:
            milliseconds, losses = timed(rows[name], parts)
            result[name]["losses"] += losses
            if turn >= NUM_WARMUP_TURNS:
                result[name]["ms"] += milliseconds[1:] if block > 1 else milliseconds
        # Rotated and turned round, so that no loop always follows the same one.
        order = order[1:] + order[:1] if turn % 2 else order[::-1]
    return result


def timed(step: Step, parts: list[torch.Tensor]) -> tuple[list[float], list[float]]:
    milliseconds, losses = [], []
    for part in parts:
        start = time.perf_counter()
        loss = step(part)
        milliseconds.append(1e3 * (time.perf_counter() - start))
        losses.append(float(loss))
    return milliseconds, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--block", type=int, default=1, help="steps of a turn")
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 1, 2, 3])
    parser.add_argument("--compiled", action="store_true", help="stage 3 by Inductor, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = alternate(WORKLOADS[options.workload], options.stages, options.turns, options.block, options.compiled)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
