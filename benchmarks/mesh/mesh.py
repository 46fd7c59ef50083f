"""python -m benchmarks.mesh.mesh   (make bench): a step on meshes, in ZeroFn and in the systems that have them.

The same Llama, tokens and AdamW everywhere, on 2 and on 4 ranks: cut along tensor, and along the sequence. Each round
starts every system once, as fresh processes of one thread, in an order that rotates. A peer that does not run here is
a row with its error. With --equality: models, meshes and stages beside plain torch in float64, without times.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

from benchmarks.common import processes, report
from benchmarks.common.check import Check
from benchmarks.common.options import add_end, add_pythons
from benchmarks.common.processes import BenchmarkError, program
from benchmarks.common.statistic import ratio
from benchmarks.common.turns import in_turn
from benchmarks.common.workload import WORKLOADS
from benchmarks.mesh.rows import PEERS, ZEROFN
from benchmarks.step.worker import NUM_WARMUP_STEPS

matplotlib.use("Agg")
from matplotlib import pyplot

LIMIT = 0.90  # of the best peer's time
LOSS_TOLERANCE = 1e-3  # relative; systems sum in different orders
MB = 1e6
Found = dict[str, dict[str, list[dict[str, float]]]]  # cell -> row -> what each round measured


class Runs:
    """How rows are started. `broken`: peers that do not run here, with the end of their error."""

    worker = "benchmarks.mesh.worker"  # what runs a rank

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.broken: dict[str, str] = {}
        self._losses: dict[int, list[float]] = {}

    def commands(self, worker: str, row: str, world: int, steps: int, workload: str = "") -> list[list[str]]:
        """What starts the ranks of a row; of the workload that is measured, what it imports is imported first."""
        python = self.options.peers_python if row.startswith("DeepSpeed") else self.options.zerofn_python
        command = [*program(python, worker), row, "--world", str(world), "--steps", str(steps)]
        command += ["--workload", workload or self.options.workload, "--port", str(processes.free_port())]
        alone = row == "reference"
        if not workload and not alone:
            command += ["--preload", str(self._imports(row, world))]
        return [[*command, "--rank", str(k)] for k in range(1 if alone else world)]

    def ranks(self, row: str, world: int, steps: int, workload: str = "") -> list[dict]:
        """One run: what each rank measured."""
        return processes.run(row, self.commands(self.worker, row, world, steps, workload))

    def try_out(self, row: str, world: int, console: Console) -> None:
        """Start a row once on a small model, and note what it imports on the way, or why it does not run."""
        try:
            first = self.ranks(row, world, 1, "smoke")[0]
        except BenchmarkError as error:
            if row.startswith("ZeroFn"):
                raise
            self.broken[row] = processes.last_words(error)
            console.print(f"{row} does not run here: {self.broken[row]}", highlight=False)
            return
        self._imports(row, world).write_text(json.dumps(first["late_imports"]))

    def _imports(self, row: str, world: int) -> Path:
        return self.folder / f"{world} {row}.json"

    def measured(self, row: str, world: int) -> dict[str, float]:
        """One round of a row. Raises `BenchmarkError` if it trains another model than the reference."""
        ranks = self.ranks(row, world, self.options.steps)
        self.check_losses(row, world, [r["losses"] for r in ranks])
        return {
            "ms": max(r["ms"] for r in ranks),
            "beyond": max(r["peak"] - r["imports"] for r in ranks),
            "state": max(r["state"] for r in ranks),
            "wire": ranks[0]["wire"] / len(ranks),
        }

    def check_losses(self, row: str, world: int, ranks: list[list[float]]) -> None:
        """Raise `BenchmarkError` if a row trains another model than the reference. `ranks`: the losses of each."""
        if world not in self._losses:
            steps = len(ranks[0]) - NUM_WARMUP_STEPS
            self._losses[world] = self.ranks("reference", world, steps)[0]["losses"]
        for step, losses in enumerate(zip(*ranks, strict=True)):
            there = [x for x in losses if not math.isnan(x)]  # in a pipeline of some systems one rank has it
            came, expected = statistics.fmean(there), self._losses[world][step]
            if not abs(came - expected) <= LOSS_TOLERANCE * abs(expected):
                raise BenchmarkError(
                    f"{row}: the loss of step {step} is {came:.6f}, and plain torch has {expected:.6f}."
                )


def cells(options: argparse.Namespace) -> list[tuple[int, str]]:
    """(ranks, what is cut) of the tables."""
    return [(world, kind) for world in options.worlds for kind in PEERS[world]]


def measure(runs: Runs, console: Console) -> Found:
    """Every cell's rows, round by round."""
    return {
        f"{kind}, {world} ranks": rounds(runs, [*PEERS[world][kind], *ZEROFN[world][kind]], world, console)
        for world, kind in cells(runs.options)
    }


def rounds(runs: Runs, rows: list[str], world: int, console: Console) -> dict[str, list[dict[str, float]]]:
    """The rows of a cell that run here, round by round."""
    rows = [x for x in rows if x not in runs.broken]
    cell: dict[str, list[dict[str, float]]] = {row: [] for row in rows}
    for number in range(runs.options.rounds):
        for row in in_turn(rows, number):
            cell[row].append(runs.measured(row, world))
            console.print(f"round {number + 1}  {row:<32} {cell[row][-1]['ms']:.0f} ms", highlight=False)
    return cell


def _of(rounds: list[dict[str, float]], what: str) -> list[float]:
    return [one[what] for one in rounds]


def checks(found: Found) -> list[Check]:
    """ZeroFn's fastest row of each cell beside the best peer: time and memory."""
    out = []
    for cell, rows in found.items():
        ours = {k: v for k, v in rows.items() if k.startswith("ZeroFn")}
        peers = {k: v for k, v in rows.items() if k not in ours}
        if not peers:
            continue
        mine = min(ours, key=lambda k: statistics.median(_of(ours[k], "ms")))
        for what, limit in (("ms", LIMIT), ("beyond", 1.0)):
            best = min(peers, key=lambda k: statistics.median(_of(peers[k], what)))
            share = ratio(_of(ours[mine], what), _of(peers[best], what))
            name = "ms/step" if what == "ms" else "memory"
            out.append(Check(f"{cell}: {name}, {mine} / {best}", str(share), share.median, limit, strict=what != "ms"))
    return out


def table(cell: str, rows: dict[str, list[dict[str, float]]], broken: dict[str, str], peers: list[str]) -> Table:
    """A cell, as it is printed."""
    out = Table("system", "ms/step", "beyond imports\nMB", "state\nMB/rank", "sent\nMB/rank", title=cell)
    for name, rounds in rows.items():
        figures = [statistics.median(_of(rounds, "ms"))]
        figures += [statistics.median(_of(rounds, what)) / MB for what in ("beyond", "state", "wire")]
        out.add_row(name, *(f"{x:.0f}" for x in figures), style="bold green" if name.startswith("ZeroFn") else None)
    for name in peers:
        if name in broken:
            out.caption = f"{out.caption or ''}\n{name} does not run here: {broken[name]}".strip()
    return out


def draw(found: Found, path: Path) -> None:
    """Milliseconds a step and memory, a row a cell."""
    figure, axes = pyplot.subplots(
        len(found), 2, figsize=(11, 0.9 + 1.5 * len(found)), layout="constrained", squeeze=False
    )
    for (cell, rows), pair in zip(found.items(), axes, strict=True):
        for axis, what, unit, title in zip(
            pair, ("ms", "beyond"), (1, MB), ("ms/step", "MB beyond imports"), strict=True
        ):
            values = [statistics.median(_of(rounds, what)) / unit for rounds in rows.values()]
            colours = ["#d1495b" if name.startswith("ZeroFn") else "#6c8ebf" for name in rows]
            bars = axis.barh(list(rows), values, color=colours)
            axis.bar_label(bars, [f"{x:.0f}" for x in values], padding=3, fontsize=8)
            axis.set_title(f"{cell}: {title}", loc="left", fontsize=9)
            axis.invert_yaxis()
            axis.margins(x=0.12)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
        pair[1].set_yticklabels([])
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=5, help="timed steps of a run, after two")
    add("--worlds", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    add("--workload", choices=WORKLOADS, default="small")
    add_end(parser)
    add_pythons(parser)
    add("--equality", action="store_true", help="only models beside plain torch, in float64")
    return parser.parse_args()


def main() -> int:
    options, console = arguments(), Console(width=150 if not sys.stdout.isatty() else None)
    if options.equality:
        from benchmarks.mesh import equality

        return equality.main(options.out / "mesh_equality.json", console)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(options, Path(folder))
        for world, kind in cells(options):
            for row in (*PEERS[world][kind], *ZEROFN[world][kind]):
                runs.try_out(row, world, console)
        found = measure(runs, console)
    held = checks(found)
    for (world, kind), (cell, rows) in zip(cells(options), found.items(), strict=True):
        console.print(table(cell, rows, runs.broken, list(PEERS[world][kind])))
    console.print(report.check_table(held))
    run: dict[str, Any] = {"surroundings": report.surroundings(), "workload": options.workload, "cells": found}
    options.out.mkdir(parents=True, exist_ok=True)
    draw(found, options.out / "mesh.png")
    return report.conclude(options.out / "mesh.json", run | {"broken": runs.broken}, held, options.check)


if __name__ == "__main__":
    sys.exit(main())
