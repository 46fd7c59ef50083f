"""One rank of several rows in a process that stays: it reads what to do line by line, and prints RESULT and a line of
JSON.

network.py starts it: python -m benchmarks.wire.staying --rank R --world N --workload W --port P, and where rank 0 is.
"begin" makes a row's model and trains a few steps; "step" trains more, of which it tells the time and the bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.measure import sent_bytes
from benchmarks.common.workload import WORKLOADS, batches
from benchmarks.step.worker import join
from benchmarks.wire.links import INTERFACE, LOOPBACK
from benchmarks.wire.rows import PEERS, ZEROFN, Coded

WARMUP_STEPS = 4  # PowerSGD compresses from the third one on
NUM_BATCHES = 8  # that pass again and again: a step takes as long with any
Answer = dict[str, Any]


def turn(steps: Callable[[], Any], num_steps: int, interface: str) -> Answer:
    """What `steps` took on this rank, and what was sent: milliseconds and bytes a step.

    It begins and ends when all ranks have: what a step leaves under way is paid for before the next system has its
    turn.
    """
    dist.barrier()
    bytes_before, start = sent_bytes(interface), time.perf_counter()
    steps()
    dist.barrier()
    elapsed, sent = time.perf_counter() - start, sent_bytes(interface) - bytes_before
    return {"ms": 1e3 * elapsed / num_steps, "sent": sent / num_steps}


class Transport:
    """What ZeroFn itself counts."""

    def __init__(self) -> None:
        from zerofn.comm.transport import SentBytes
        from zerofn.job.in_flight import pending
        from zerofn.util.process import the

        self._counted, self._pending = the(SentBytes).by_group, pending()

    def settle(self) -> None:
        """Wait for what the last step has left under way."""
        self._pending.wait_for_all()

    def sent(self) -> int:
        """Bytes that this rank has sent."""
        return self._counted.total()


class Trained:
    """A row's model in training."""

    def __init__(self, row: str, options: argparse.Namespace) -> None:
        work = WORKLOADS[options.workload]
        self.interface, self.transport, self.plan = options.interface, None, lambda: None
        tokens = batches(work, options.rank, options.world, NUM_BATCHES)
        self.tokens = itertools.cycle(tokens)
        if row in PEERS:
            self.train = PEERS[row](work, options.rank, options.world).step
        else:
            self.train = mine = Coded(row, work)
            self.transport = Transport()
            self.plan = lambda: ZEROFN[row].planned(mine.compiled.lower(mine.state, tokens[0]))

    def begin(self) -> Answer:
        """The losses of the first steps, and the bytes of a step that a plan foresees."""
        losses = [float(self.train(next(self.tokens))) for _ in range(WARMUP_STEPS)]
        self._settle()
        return {"losses": losses, "planned": self.plan()}

    def step(self, num: int) -> Answer:
        """`turn` of so many steps, and the bytes of a step by the transport's own counters."""
        counted = self.transport.sent() if self.transport else 0
        found = turn(lambda: self._steps(num), num, self.interface)
        return found | {"counted": (self.transport.sent() - counted) / num if self.transport else None}

    def _steps(self, num: int) -> None:
        for _ in range(num):
            loss = self.train(next(self.tokens))
        self._settle()
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is {float(loss)}")

    def _settle(self) -> None:
        if self.transport:
            self.transport.settle()


class Rows:
    """The rows of this process, by name."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.there: dict[str, Trained] = {}

    def begin(self, row: str) -> Answer:
        """Make a row; where that fails, which it does on all ranks, the last line of why."""
        try:
            self.there[row] = Trained(row, self.options)
            return self.there[row].begin()
        except Exception as error:  # whatever a system raises where it does not run
            traceback.print_exc()
            if row in ZEROFN:
                raise
            told = str(error).strip().splitlines() or [""]
            return {"error": f"{type(error).__name__}: {told[0]}"[:200]}

    def step(self, row: str, num: int) -> Answer:
        """Have a row train."""
        return self.there[row].step(num)


def joined(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of a rank, and where it is, as `links.commands` says it, when it has joined the others."""
    for name in ("rank", "world", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--address", required=True, help="rank 0's")
    parser.add_argument("--interface", choices=[INTERFACE, LOOPBACK], required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    join(options.rank, options.world, options.port, options.address, options.interface)
    return options


def answer_lines(do: dict[str, Callable[..., Answer]]) -> None:
    """Do what each line asks for, until nobody asks any more."""
    for line in sys.stdin:
        asked = json.loads(line)
        print("RESULT " + json.dumps(do[asked.pop("do")](**asked)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    rows = Rows(joined(parser))
    answer_lines({"begin": rows.begin, "step": rows.step})


if __name__ == "__main__":
    main()
