"""One rank of one system in a process of its own, which memory.py asks for one thing after another.

memory_worker.py SYSTEM --rank R --world N --port P --workload W [--preload FILE]
SYSTEM is a peer's row, or ZeroFn's compiled one, or "ZeroFn": then every budget is a row of the same process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import measure
from benchmarks.common.workload import Workload, batches
from benchmarks.memory import allocations
from benchmarks.step.worker import ALL_WORKLOADS, builder, join, preload

NUM_STEPS = 4  # before times are taken: the last two under the profiler
ZEROFN, COMPILED, STAGE = "ZeroFn", "ZeroFn 3, compiled", 3
AMPLE = "1TB"


class Rank:
    """What every system's rank does: begin to train, and take its turn."""

    def __init__(self, work: Workload, rank: int, world: int) -> None:
        self.work, self.rank, self.world = work, rank, world
        self.tokens = batches(work, rank, world, NUM_STEPS)
        self.imports = measure.memory_bytes("VmRSS")

    def begun(self, step: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """The first steps of a row: losses and peaks. `beyond` is of the process, whatever else it trained before."""
        losses: list[float] = []

        def next_one() -> None:
            losses.append(float(step(self.tokens[len(losses)])))

        next_one()
        next_one()
        beyond = measure.memory_bytes("VmHWM") - self.imports
        peaks = allocations.peaks_of(next_one, self.tokens[:-1])
        return peaks | {"losses": losses, "beyond": beyond}

    def timed(self, step: Callable[[torch.Tensor], torch.Tensor], steps: int) -> dict[str, Any]:
        """Milliseconds a step, after one that finds the caches as another system left them."""
        step(self.tokens[0])
        dist.barrier()
        start = time.perf_counter()
        for k in range(steps):
            step(self.tokens[k % NUM_STEPS])
        dist.barrier()
        return {"ms": 1e3 * (time.perf_counter() - start) / steps}


class Peer(Rank):
    """A system of one row."""

    def __init__(self, system: str, *where: Any) -> None:
        super().__init__(*where)
        self.system = system

    def begin(self) -> dict[str, Any]:
        self.row = builder(self.system)(self.work, self.rank, self.world)
        found = self.begun(self.row.step)
        if self.system == COMPILED:
            step: Any = self.row.step
            found["predicted"] = step.compiled.lower(step.state, self.tokens[0]).memory().total
        return found

    def turn(self, steps: int) -> dict[str, Any]:
        return self.timed(self.row.step, steps)


class Budgets(Rank):
    """ZeroFn: compiled steps for many budgets, and one state, which they pass on to each other in their turns."""

    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        self.rows: list[Any] = []
        self.state: Any = None

    def _compiled(self, memory: int | str) -> Any:
        from benchmarks.common.zerofn_rows import Compiled

        self.state = None
        return Compiled(self.work, STAGE, memory=memory)

    def bounds(self) -> dict[str, Any]:
        """The least budget that can be kept, and what a step takes that lacks nothing."""
        row = self._compiled(AMPLE)
        most = row.compiled.lower(row.state, self.tokens[0]).memory().total
        try:
            row = self._compiled(1)
            row.compiled.lower(row.state, self.tokens[0])
        except MemoryError as error:
            least = int(re.search(r"at least ([\d,]+) bytes", str(error))[1].replace(",", ""))
            return {"least": least, "ample": most}
        raise RuntimeError("a step was scheduled within one byte")

    def begin(self, memory: int) -> dict[str, Any]:
        """A row more: the same training from the start, with this budget; `parameters` is their hash after it."""
        import zerofn

        row, start = self._compiled(memory), time.perf_counter()
        plan = row.compiled.lower(row.state, self.tokens[0])
        seconds = time.perf_counter() - start
        found = self.begun(row) | {"predicted": plan.memory().total, "sent": plan.sent, "seconds": seconds}
        found["parameters"] = hash_of(zerofn.unshard(row.state.params))
        self.rows.append(row.compiled)
        self.state, row.compiled.state = row.state, None  # each would keep the last one that it has returned
        return found

    def turn(self, row: int, steps: int) -> dict[str, Any]:
        def step(tokens: torch.Tensor) -> torch.Tensor:
            self.state, metrics = self.rows[row](self.state, tokens)
            return metrics["loss"]

        found = self.timed(step, steps)
        self.rows[row].state = None
        return found


def hash_of(params: Any) -> str:
    """Of every bit of a tree's tensors."""
    import zerofn

    found = hashlib.sha256()
    for leaf in zerofn.tree.leaves(params):
        found.update(leaf.detach().contiguous().numpy())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system")
    for name in ("rank", "world", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--workload", choices=ALL_WORKLOADS, required=True)
    parser.add_argument("--preload", help="JSON file: modules to import before memory is read")
    options = parser.parse_args()
    torch.set_num_threads(1)
    preload(options.preload)
    join(options.rank, options.world, options.port)
    where = (ALL_WORKLOADS[options.workload], options.rank, options.world)
    rank = Budgets(*where) if options.system == ZEROFN else Peer(options.system, *where)
    for line in sys.stdin:
        asked = json.loads(line)
        print("RESULT " + json.dumps(getattr(rank, asked.pop("do"))(**asked)), flush=True)


if __name__ == "__main__":
    main()
