"""One process: the step of a deep GPT-2 with dropout as it is, and with its activations computed again.

Prints one JSON line that starts with RESULT. memory.py starts it.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from benchmarks.common.workload import STACK, batches
from benchmarks.common.zerofn_rows import Compiled
from benchmarks.memory import allocations
from benchmarks.memory.worker import NUM_STEPS, hash_of

HOW = {"none": None, "full": "full", "auto": "auto"}


def begun(how: str, tokens: list[torch.Tensor]) -> tuple[Compiled, dict[str, Any]]:
    """A step compiled, trained with and measured: the most bytes of activations at any moment are the plan's."""
    row, start = Compiled(STACK, 3, remat=HOW[how]), time.perf_counter()
    plan = row.compiled.lower(row.state, tokens[0])
    seconds = time.perf_counter() - start
    losses = [float(row(part)) for part in tokens[:2]]
    rest = iter(tokens[2:])
    found: dict[str, Any] = allocations.peaks_of(lambda: losses.append(float(row(next(rest)))), tokens[:-1])
    found["activations"] = max(x.live["activations"] for x in plan.memory().over_time)
    found |= {"predicted": plan.memory().total, "seconds": seconds, "losses": losses}
    return row, found | {"parameters": hash_of(row.state.params), "ms": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = batches(STACK, 0, 1, NUM_STEPS)
    found, steps, state = {}, {}, None
    for how in HOW:
        state = None  # one at a time, or the others' would be measured, too
        row, found[how] = begun(how, tokens)
        steps[how], state = row.compiled, row.state
        del row
    order = list(HOW)
    for number in range(options.rounds + 1):
        for how in order:
            state, _ = steps[how](state, tokens[number % NUM_STEPS])  # the allocator gets used to another step
            start = time.perf_counter()
            state, _ = steps[how](state, tokens[number % NUM_STEPS])
            if number:  # the first round warms up
                found[how]["ms"].append(1e3 * (time.perf_counter() - start))
        order = order[1:] + order[:1]
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
