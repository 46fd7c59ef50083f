"""python -m benchmarks.pipe.pipe   (make bench): a step in a pipeline, in ZeroFn and in the systems that have them.

The same Llama, tokens, AdamW and 8 microbatches everywhere: on 2 ranks, and as 2 x 2 ranks whose parameters are cut
along the second axis, two to a core. All systems' processes, of one thread each, are there at once, and train one step
each in turns, in an order that rotates: what slows the machine down for a while slows all of them. A peer that does not
run here is a row with its error. Writes JSON beside the tables; a number of ranks that is not run (`--worlds`) stays
there as an earlier run has measured it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.common import report
from benchmarks.common.check import Check
from benchmarks.common.options import add_end, add_pythons
from benchmarks.common.processes import BenchmarkError
from benchmarks.common.statistic import ratio
from benchmarks.common.turns import Ranks, in_turn
from benchmarks.mesh.mesh import Found, Runs, table
from benchmarks.pipe.rows import PEERS, WORKLOADS, ZEROFN

# (ranks, how the names of peers begin): milliseconds of ZeroFn's fastest row over their fastest's, at most
TIME = {(2, "torch"): 1.00, (2, "DeepSpeed"): 0.90, (4, "torch"): 0.90}
CELLS = {2: "pipe 2", 4: "pipe 2 x data 2"}


class PipeRuns(Runs):
    """How these rows are started."""

    worker = "benchmarks.pipe.worker"

    def staying(self, row: str, world: int) -> Ranks:
        """The ranks of a row, which train when they are asked to."""
        return Ranks(row, self.commands("benchmarks.pipe.staying", row, world, 1 + self.options.rounds))


def in_turns(runs: PipeRuns, rows: list[str], world: int, console: Console) -> dict[str, list[dict[str, float]]]:
    """The rows of a cell that run here, round by round: each trains a step in every round."""
    rows = [x for x in rows if x not in runs.broken]
    cell: dict[str, list[dict[str, float]]] = {row: [] for row in rows}
    with contextlib.ExitStack() as stack:
        there = {}
        for row in rows:  # one after the other: setting up takes more memory than staying
            before = psutil.virtual_memory().available
            there[row] = stack.enter_context(runs.staying(row, world))
            there[row].ask("begin")
            left = psutil.virtual_memory().available
            if row != rows[-1] and left < before - left:  # the next ones would push out each other's pages
                raise BenchmarkError(
                    f"{left / 1e9:.1f} GB are left for the rows after {row!r}: leave some out by --only."
                )
        for number in range(1 + runs.options.rounds):
            for row in in_turn(rows, number):
                ranks = there[row].ask("step")
                if number == 0:  # all are there only now
                    continue
                cell[row].append({"ms": max(r["ms"] for r in ranks), "wire": ranks[0]["wire"] / len(ranks)})
                console.print(f"round {number}  {row:<32} {cell[row][-1]['ms']:.0f} ms", highlight=False)
        for row in rows:
            ranks = there[row].ask("end")
            runs.check_losses(row, world, [r["losses"] for r in ranks])
            for one in cell[row]:
                one |= {what: max(r[what] for r in ranks) for what in ("beyond", "state")}
    return cell


def selected(world: int, only: Sequence[str]) -> list[str]:
    """The rows of a cell that `only` names by part of their names; all without it."""
    rows = [*PEERS[world], *ZEROFN[world]]
    return [row for row in rows if any(part.lower() in row.lower() for part in only or [""])]


def checks(found: Found) -> list[Check]:
    """ZeroFn's fastest row of each cell beside the best peers: time, and memory of the worst rank."""
    out = []
    for (world, system), limit in TIME.items():
        rows = found.get(CELLS[world], {})
        ours = [row for row in rows if row.startswith("ZeroFn")]
        theirs = [row for row in rows if row.startswith(system)]
        if not ours or not theirs:
            out.append(Check(f"{CELLS[world]}: ms/step, ZeroFn / {system}", "not measured", None, limit))
            continue
        mine = min(ours, key=lambda row: _median(rows, row, "ms"))
        for what, name, most in (("ms", "ms/step", limit), ("beyond", "memory", 1.0)):
            best = min(theirs, key=lambda row: _median(rows, row, what))
            share = ratio([x[what] for x in rows[mine]], [x[what] for x in rows[best]])
            told = f"{CELLS[world]}: {name}, {mine} / {best}"
            out.append(Check(told, str(share), share.median, most, strict=what != "ms"))
    return out


def earlier(path: Path, workload: str) -> dict[str, Any]:
    """What a file has of each cell, if it trained the same."""
    run = json.loads(path.read_text()) if path.exists() else {}
    return run["cells"] if run.get("workload") == workload else {}


def _median(rows: dict[str, list[dict[str, float]]], row: str, what: str) -> float:
    return statistics.median(one[what] for one in rows[row])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=9, help="timed steps of each row, after three")
    add("--worlds", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    add("--only", nargs="+", default=[], help="rows by part of their names")
    add("--workload", choices=WORKLOADS, default="small")
    add_end(parser, "pipe.json")
    add_pythons(parser)
    return parser.parse_args()


def main() -> int:
    options, console = arguments(), Console(width=150 if not sys.stdout.isatty() else None)
    cells = earlier(options.out, options.workload)
    with tempfile.TemporaryDirectory() as folder:
        runs = PipeRuns(options, Path(folder))
        try:
            for world in options.worlds:
                rows = selected(world, options.only)
                for row in rows:
                    runs.try_out(row, world, console)
                found = in_turns(runs, rows, world, console)
                broken = {row: runs.broken[row] for row in rows if row in runs.broken}
                cells[CELLS[world]] = {"surroundings": report.surroundings(), "rows": found, "broken": broken}
        except BenchmarkError as error:
            print(f"benchmark failed: {error}", file=sys.stderr)
            return 1
    for world, name in CELLS.items():
        if name in cells:
            console.print(table(name, cells[name]["rows"], cells[name]["broken"], list(PEERS[world])))
    held = checks({name: cell["rows"] for name, cell in cells.items()})
    console.print(report.check_table(held))
    return report.conclude(options.out, {"workload": options.workload, "cells": cells}, held, options.check)


if __name__ == "__main__":
    sys.exit(main())
