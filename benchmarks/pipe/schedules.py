"""python -m benchmarks.pipe.schedules   (make bench): pipeline schedules, simulated; no model runs, and no rank.

The fastest schedule that `zerofn.schedules.best` finds, beside torch.distributed.pipelining's own orders under the same
simulator: 38 tables of costs, each with two stages a rank, within the memory of as many microbatches as there are
ranks. And what balancing layers over ranks is worth, for 32 layers with an embedding and a head of two layers' cost.
Writes JSON beside the tables.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from benchmarks.common.check import Check
from benchmarks.common.options import add_end
from benchmarks.pipe import torch_orders
from zerofn.schedules import NAMES, Costs, Part, Placement, balance, best, check, make, simulate, stage_costs

GAIN = 1.010  # over the best of torch's, geometric mean of all tables
SECONDS = 2.0  # of CPU time, to find a schedule
BALANCED = {(4, 16): 1.10, (8, 32): 1.22}  # (ranks, microbatches): makespan over a rank's share of the work, at most
TORCHS = ("interleaved", "interleaved-zb", "zbv")
LAYERS = 32
LAYER = Part(1.0, 1.1, 0.9, crossing=0.05, saved=1.0, kept=1.0)
HEAD, EMBEDDING = Part(2.0, 2.0, 2.0, crossing=0.05), Part(0.05, 0.0, 0.1)


class Case(NamedTuple):
    """`kind`: "even" stages; "heavy": the last one takes 1.6 times as long, and the first one's W 1.2 times; "random":
    each takes 0.7 to 1.3 times as long. `work`: seconds of a rank's F, I and W. `send`: of a transfer."""

    ranks: int
    microbatches: int
    kind: str
    work: tuple[float, float, float]
    send: float

    def costs(self) -> Costs:
        """Of two stages a rank, which keep half of a microbatch's memory each."""
        n = 2 * self.ranks
        rng = random.Random(0)
        factors = [rng.uniform(0.7, 1.3) if self.kind == "random" else 1.0 for _ in range(n)]
        if self.kind == "heavy":
            factors[-1] = 1.6
        f, i, w = (tuple(x / 2 * factor for factor in factors) for x in self.work)
        w = ((1.2 if self.kind == "heavy" else 1.0) * w[0], *w[1:])
        sends, half = (self.send,) * (n - 1), (0.5,) * n
        return Costs(f, i, w, down=sends, up=sends, saved=half, kept=half)


def cases() -> Iterator[Case]:
    """The 38 tables."""
    equal, attention = (1.0, 1.0, 1.0), (1.0, 1.4, 0.8)  # attention has no weights: I takes longer, and W is shorter
    for ranks, numbers in ((2, (8,)), (4, (4, 8, 16)), (8, (8, 16, 32))):
        for m in numbers:
            if ranks == 4:
                yield Case(ranks, m, "even", equal, 0.0)
            yield Case(ranks, m, "even", equal, 0.05)
            yield Case(ranks, m, "even", attention, 0.0)
            yield Case(ranks, m, "even", attention, 0.05)
            yield Case(ranks, m, "heavy", attention, 0.05)
            yield Case(ranks, m, "random", (1.0, 1.2, 0.9), 0.05)


def compared(case: Case) -> dict[str, Any]:
    """A row of the first table. Times are of a microbatch."""
    costs, (p, m) = case.costs(), case[:2]
    theirs = {name: simulate(torch_orders.make(name, p, m), costs) for name in TORCHS}
    fitting = [line.makespan for line in theirs.values() if max(line.peak_bytes) <= p]
    begun = time.process_time()
    line = best({Placement("loop", p, 2): costs, Placement("v", p, 2): costs}, m, p)
    took = time.process_time() - begun
    check(line.schedule)
    return {
        **case._asdict(),
        "torch": {name: {"time": x.makespan / m, "peak": max(x.peak_bytes)} for name, x in theirs.items()},
        "time": line.makespan / m,
        "peak": max(line.peak_bytes),
        "schedule": line.schedule.name,
        "gain": min(fitting) / line.makespan,
        "seconds": took,
    }


def balanced(ranks: int, microbatches: int) -> list[dict[str, Any]]:
    """Rows of the second table: makespans over a rank's share of all work, within the memory of 1.5 times as many
    microbatches as ranks. "equal", "balanced": the best schedule that is found on such stages, beside the best named
    one."""
    parts = [EMBEDDING, *[LAYER] * LAYERS, HEAD]
    share = microbatches * sum(x.seconds for x in parts) / ranks
    rows = []
    for placement in [
        Placement("line", ranks),
        *(Placement("loop", ranks, v) for v in (2, 4)),
        Placement("v", ranks, 2),
    ]:
        n = placement.num_stages
        equal = [LAYERS // n + (s == 0) + (s == n - 1) for s in range(n)]
        sizes = balance(parts, placement, microbatches)
        row: dict[str, Any] = {
            "ranks": ranks,
            "microbatches": microbatches,
            "placement": str(placement),
            "sizes": sizes,
        }
        for label, these in (("equal", equal), ("balanced", sizes)):
            costs = stage_costs(parts, these, placement)
            names = [x for x, y in NAMES.items() if y.style == placement.style and x != "gpipe"]
            orders = [make(x, ranks, microbatches, placement.chunks) for x in names]
            row[f"{label}, named"] = min(simulate(x, costs).makespan for x in orders) / share
            line = best({placement: costs}, microbatches, 1.5 * LAYERS)
            check(line.schedule)
            row[label] = line.makespan / share
            row["schedule"] = line.schedule.name
        rows.append(row)
    return rows


def checks(run: dict[str, Any]) -> list[Check]:
    """What must hold."""
    gain = statistics.geometric_mean(row["gain"] for row in run["tables"])
    slowest = max(row["seconds"] for row in run["tables"])
    out = [
        Check(
            f"torch's fastest / the one found, geometric mean of {len(run['tables'])}, at least {GAIN}",
            f"{gain:.4f}",
            GAIN / gain,
            1.0,
        ),
        Check("CPU seconds to find a schedule", f"{slowest:.2f}", slowest, SECONDS),
    ]
    for (p, m), limit in BALANCED.items():
        least = min(row["balanced"] for row in run["balance"] if (row["ranks"], row["microbatches"]) == (p, m))
        out.append(Check(f"makespan / share of work, {p} ranks, {m} microbatches", f"{least:.3f}", least, limit))
    return out


def table(rows: list[dict[str, Any]]) -> Table:
    """Seconds a microbatch, and the peak in microbatches."""
    names = ("torch interleaved", "interleaved-zb", "zbv")
    out = Table("p, m", "stages", "F : I : W", "send", *names, "best found", "gain", "schedule", "CPU s")
    for row in rows:
        theirs = (f"{x['time']:.3f} ({x['peak']:g})" for x in row["torch"].values())
        work = " : ".join(f"{x:g}" for x in row["work"])
        what = (f"{row['ranks']}, {row['microbatches']}", row["kind"], work, f"{row['send']:g}")
        ours = (f"{row['time']:.3f} ({row['peak']:g})", f"{row['gain']:.4f}", row["schedule"], f"{row['seconds']:.2f}")
        out.add_row(*what, *theirs, *ours)
    return out


def balance_table(rows: list[dict[str, Any]]) -> Table:
    """Makespans over a rank's share of the work: 1 if no rank ever waited."""
    labels = ("equal, named", "equal", "balanced, named", "balanced")
    out = Table("m", "placement", *labels, "schedule", "parts of each stage")
    for row in rows:
        shares = (f"{row[x]:.3f}" for x in labels)
        out.add_row(
            str(row["microbatches"]), row["placement"], *shares, row["schedule"], " ".join(map(str, row["sizes"]))
        )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_end(parser, "pipe_schedules.json")
    args = parser.parse_args()
    console = Console(soft_wrap=True)
    tables = [compared(case) for case in cases()]
    rows = [row for numbers in BALANCED for row in balanced(*numbers)]
    run = {**report.surroundings(), "tables": tables, "balance": rows}
    found = checks(run)
    for shown in (table(tables), balance_table(rows), report.check_table(found)):
        console.print(shown)
    return report.conclude(args.out, run, found, args.check)


if __name__ == "__main__":
    sys.exit(main())
