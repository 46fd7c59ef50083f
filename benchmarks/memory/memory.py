"""python -m benchmarks.memory.memory   (make bench): step time against memory, and whether a budget is kept.

A Llama and a T5 at stage 3 of two ranks. ZeroFn is given budgets from the least that it can keep to what a step takes
that lacks nothing; beside it FSDP2, with and without resharding after the forward pass, DeepSpeed 3 with its
defaults, and ZeroFn compiled by Inductor without a budget. Memory is read in the same way everywhere (allocations.py).
Then all take turns of a few steps, in an order that rotates, so that ratios are of one round. At last a deep GPT-2
whose activations are computed again. Writes JSON and a picture beside the table.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import processes, report
from benchmarks.common.options import add_end, add_pythons
from benchmarks.common.processes import BenchmarkError, program
from benchmarks.common.turns import Ranks, in_turn
from benchmarks.common.workload import BUDGETED, STACK
from benchmarks.memory import picture as memory_picture
from benchmarks.memory import report as memory_report
from benchmarks.memory.worker import COMPILED, NUM_STEPS, ZEROFN
from benchmarks.step.step import WORLD, Bench, check_versions
from benchmarks.step.worker import NUM_WARMUP_STEPS

PEERS = ("FSDP2", "FSDP2, kept", "DeepSpeed 3", COMPILED)
TRIED = ("FSDP2", "DeepSpeed 3", "ZeroFn 3")  # what each imports on the way is written down
FEWER = 3  # the second model and later ones get one budget for so many of the first's
FIGURES = ("peak", "between", "resident", "allocated", "beyond")  # bytes, the most of all ranks


class Model:
    """All systems' processes for one model, and what was found of each row."""

    def __init__(self, bench: Bench, workload: str, console: Console, stack: contextlib.ExitStack) -> None:
        self.bench, self.workload, self.console = bench, workload, console
        self.rows: dict[str, dict[str, Any]] = {}
        self.bounds: dict[str, int] = {}
        self.alike: dict[str, str] = {}  # peer -> the row of ZeroFn that has its memory
        reference = bench.ranks("reference", workload, NUM_STEPS - NUM_WARMUP_STEPS)
        bench.reference = reference[0]["losses"]
        self.systems = {name: stack.enter_context(self.ranks(name)) for name in (ZEROFN, *PEERS)}

    def ranks(self, system: str) -> Ranks:
        tried = "ZeroFn 3" if system == ZEROFN else system.partition(",")[0]
        command = [*program(self.bench.python(system), "benchmarks.memory.worker"), system, "--world", str(WORLD)]
        command += ["--workload", self.workload, "--port", str(processes.free_port())]
        command += ["--preload", str(self.bench.imports_of(tried))]
        return Ranks(f"{system}, {self.workload}", [[*command, "--rank", str(k)] for k in range(WORLD)])

    def begin(self, name: str, ranks: Ranks, **what: Any) -> dict[str, Any]:
        """A row's first steps, over its ranks: peaks, and that it trains what the others train."""
        found = ranks.ask("begin", **what)
        losses = [sum(step) / WORLD for step in zip(*(one["losses"] for one in found), strict=True)]
        self.bench.check_losses(name, losses)
        row = {key: max(one[key] for one in found) for key in FIGURES}
        row |= {"budget": what.get("memory"), "loss": losses[-1], "ms": []}
        if what:
            # How many different ones there are is looked at later: one, if they are bit-equal.
            row["parameters"] = sorted({one["parameters"] for one in found})
            row |= {key: max(one[key] for one in found) for key in ("predicted", "sent", "seconds")}
        elif name == COMPILED:
            row["predicted"] = max(one["predicted"] for one in found)
        shown = f"{row['peak'] / 1e6:.1f} MB" + (f", {row['seconds']:.1f} s to compile" if what else "")
        self.console.print(f"{self.workload}  {name:<28} {shown}", highlight=False)
        return row

    def begin_all(self, num_budgets: int) -> None:
        peers = {name: self.begin(name, self.systems[name]) for name in PEERS}
        ranks = self.systems[ZEROFN]
        found = ranks.ask("bounds")
        self.bounds = {key: max(one[key] for one in found) for key in found[0]}
        least, ample = self.bounds["least"], self.bounds["ample"]
        for k in range(num_budgets):
            self.begin_budget(least + (ample - least) * k // (num_budgets - 1))
        # What operations take for themselves comes on top of a budget, and is in the peers' peaks.
        more = max(row["peak"] - row["between"] for row in self.rows.values())
        for name, peer in peers.items():
            budget = min(ample, peer["peak"] - more)
            if budget >= least:
                self.alike[name] = self.begin_budget(budget)
        self.rows |= peers

    def begin_budget(self, budget: int) -> str:
        name = f"{ZEROFN} in {budget / 1e6:.1f} MB"
        if name not in self.rows:
            number = len(self.rows)
            self.rows[name] = self.begin(name, self.systems[ZEROFN], memory=budget) | {"number": number}
        return name

    def take_turns(self) -> None:
        """Every row once a round, starting with another one each round."""
        names, options = list(self.rows), self.bench.options
        for turn in range(options.rounds):
            for name in in_turn(names, turn, options.rounds):
                row = self.rows[name]
                what = {"row": row["number"]} if "number" in row else {}
                found = self.systems[name if not what else ZEROFN].ask("turn", steps=options.steps, **what)
                row["ms"].append(max(one["ms"] for one in found))
            self.console.print(f"{self.workload}  round {turn + 1}/{options.rounds}", highlight=False)

    def read_resident(self) -> None:
        """Peak RSS is a process's: ZeroFn's rows that are set beside others get one each. The rest has none."""
        ours = [name for name, row in self.rows.items() if "number" in row]
        for row in (self.rows[name] for name in ours):
            row["beyond"] = None
        edges = [min(ours, key=lambda x: self.rows[x]["budget"]), max(ours, key=lambda x: self.rows[x]["budget"])]
        for name in dict.fromkeys([*edges, *self.alike.values()]):
            with self.ranks(ZEROFN) as ranks:
                row = self.begin(f"{name}, alone", ranks, memory=self.rows[name]["budget"])
            self.rows[name]["beyond"] = row["beyond"]

    def found(self) -> dict[str, Any]:
        work = BUDGETED[self.workload]
        return {"kind": work.kind, "parameters": work.num_parameters(), **self.bounds, "rows": self.rows,
                "alike": self.alike}  # fmt: skip


def remat(options: argparse.Namespace) -> dict[str, Any]:
    command = [*program(options.zerofn_python, "benchmarks.memory.remat"), "--rounds", str(2 * options.rounds)]
    (found,) = processes.run("recomputing activations", [command])
    return {"layers": STACK.layers, "parameters": STACK.num_parameters(), "rows": found}


def bench(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    run = {"surroundings": report.surroundings(), "versions": check_versions(options), "world": WORLD,
           "num_rounds": options.rounds, "num_steps": options.steps, "models": {}}  # fmt: skip
    run["remat"] = remat(options)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        bench.try_out(list(TRIED), console)
        for workload in options.models.split(","):
            with contextlib.ExitStack() as stack:
                model = Model(bench, workload, console, stack)
                model.begin_all(max(3, options.budgets // (FEWER if run["models"] else 1)))
                model.take_turns()
            model.read_resident()
            run["models"][workload] = model.found()
    return run


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a turn, after one")
    parser.add_argument("--budgets", type=int, default=20, help="of the first model; others get a third of them")
    parser.add_argument("--models", default=",".join(BUDGETED), help="comma between")
    add_end(parser)
    add_pythons(parser)
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 1 or options.budgets < 3:
        parser.error("--rounds and --steps must be at least 1, --budgets at least 3")
    if set(options.models.split(",")) - set(BUDGETED):
        parser.error(f"--models: the models are {', '.join(BUDGETED)}")
    return options


def main() -> int:
    options, console = arguments(), Console(width=None if sys.stdout.isatty() else 150)
    try:
        run = bench(options, console)
    except BenchmarkError as error:
        print(f"benchmark failed: {error}", file=sys.stderr)
        return 1
    found = memory_report.checks(run)
    for each in (*memory_report.tables(run), report.check_table(found)):
        console.print(each)
    # Only a whole run may stand where the real results stand.
    whole = options.models == ",".join(BUDGETED) and options.budgets >= 20
    path = options.out / ("memory.json" if whole else "memory-partial.json")
    status = report.conclude(path, run, found, options.check)
    memory_picture.draw(run, path.with_suffix(".png"))
    console.print(f"written: {path} and .png", highlight=False)
    return status


if __name__ == "__main__":
    sys.exit(main())
