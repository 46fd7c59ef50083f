"""python -m benchmarks.integrations.frameworks trainer|lightning   (make bench): ZeroFn and DeepSpeed under them.

The Llama of benchmarks/step, two gloo ranks of one thread, fp32, AdamW, clipping, each system at stages 2 and 3, under
transformers' Trainer or Lightning's; the whole of its loop is around every step: loader, callbacks, a log at every
step. Rounds are interleaved. Some ten minutes each. Lightning refuses DeepSpeed on CPUs; that check is left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from benchmarks.common.limits import Check
from benchmarks.common.processes import HERE, BenchmarkError, free_port, program, run
from benchmarks.common.statistic import ratio
from benchmarks.common.workload import WORKLOADS

SYSTEMS = ("DeepSpeed 2", "ZeroFn 2", "DeepSpeed 3", "ZeroFn 3")
TITLES = {"trainer": "transformers' Trainer", "lightning": "Lightning's Trainer"}
WORLD = 2


def once(framework: str, system: str, python: str, workload: str, steps: int) -> dict[str, Any]:
    """One training: the slower rank's milliseconds, the larger peak, the ranks' mean losses."""
    given = ["--world", str(WORLD), "--port", str(free_port()), "--steps", str(steps), "--workload", workload]
    worker = [*program(python, "benchmarks.integrations.worker"), framework, system]
    found = run(system, [[*worker, "--rank", str(r), *given] for r in range(WORLD)])
    losses = [statistics.fmean(x) for x in zip(*(x["losses"] for x in found), strict=True) if x]
    return {"ms": max(x["ms"] for x in found), "peak": max(x["peak"] for x in found), "losses": losses}


def checks(rows: dict[str, dict[str, Any]]) -> list[Check]:
    """What must hold."""
    found = []
    for stage in (2, 3):
        ours, theirs = rows[f"ZeroFn {stage}"], rows[f"DeepSpeed {stage}"]
        time, peak = ratio(ours["ms"], theirs["ms"]), ratio(ours["peak"], theirs["peak"])
        for what, x in (("ms/step", time), ("peak", peak)):
            found.append(Check(f"stage {stage}, {what}: ZeroFn / DeepSpeed", str(x), x.median, 1.0, strict=True))
        far = max(abs(a - b) / b for a, b in zip(ours["losses"], theirs["losses"], strict=True))
        found.append(Check(f"stage {stage}: losses, largest relative difference", f"{far:.1e}", far, 1e-4))
    return found


def table(rows: dict[str, dict[str, Any]], framework: str, workload: str) -> Table:
    """A line for each system."""
    shown = Table(title=f"{TITLES[framework]}, {workload} Llama, {WORLD} ranks")
    for name in ("system", "ms/step", "peak MB", "last loss"):
        shown.add_column(name, justify="left" if name == "system" else "right")
    for system, row in rows.items():
        ms, peak = report.middle(row["ms"]), report.middle(row["peak"]) / 1e6
        shown.add_row(system, f"{ms:.0f}", f"{peak:.0f}", f"{row['losses'][-1]:.4f}")
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=TITLES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=11, help="of a training; the first three are not timed")
    parser.add_argument("--workload", choices=WORKLOADS, default="small")
    parser.add_argument("--peers", default=str(HERE.parent / ".venv-peers" / "bin" / "python"))
    parser.add_argument("--out", type=Path, help="benchmarks/results/FRAMEWORK.json by default")
    parser.add_argument("--check", action="store_true", help="end with 1 if a limit is missed")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {name: {"ms": [], "peak": []} for name in SYSTEMS}
    try:
        for turn in range(options.rounds):
            for system in SYSTEMS:
                python = sys.executable if system.startswith("ZeroFn") else options.peers
                found = once(options.framework, system, python, options.workload, options.steps)
                rows[system]["ms"].append(found["ms"])
                rows[system]["peak"].append(found["peak"])
                rows[system]["losses"] = found["losses"]
                print(f"round {turn + 1}/{options.rounds}  {system:<12} {found['ms']:.0f} ms", file=sys.stderr)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 2
    console, held = Console(), checks(rows)
    console.print(table(rows, options.framework, options.workload))
    console.print(report.check_table(held))
    whole = {"surroundings": report.surroundings(), "world": WORLD, "rows": rows}
    return report.conclude(options.out or HERE / "results" / f"{options.framework}.json", whole, held, options.check)


if __name__ == "__main__":
    sys.exit(main())
