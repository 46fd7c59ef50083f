"""A finished run as tables, and as JSON with the machine and versions it belongs to."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.limits import BYTES, Check
from benchmarks.common.processes import HERE
from benchmarks.common.statistic import ratio

MB = 1e6
REFERENCE = "one process"
# What a run measures: all of the project but what runs before this one wrote.
MEASURED = ("--", ":/", ":!results")


def surroundings() -> dict[str, Any]:
    """Hardware, operating system, date and commit."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(HERE), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    info = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD") or "unknown",
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no", *MEASURED)),
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": pages,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def main_table(run: dict[str, Any]) -> Table:
    rows, world, parameters = run["rows"], run["world"], run["parameters"]
    one_pass = BYTES * parameters
    table = Table(
        title=f"A training step: Llama of {parameters / 1e6:.1f} M parameters, fp32, AdamW, "
        f"{world} gloo ranks of one thread, {run['num_rounds']} rounds of {run['num_steps']} steps",
        caption="Medians over rounds. Ratio: to one process in the same round, with the 95 % "
        "interval of its median.\nOne process trains on one rank's tokens and sends nothing, so "
        "its loss is its own.\nSteps follow one another without barriers, as in a training loop; the "
        "clock stops when all ranks have come to the end of the last.\nIn ZeroFn's processes malloc "
        "keeps freed memory, which compile() asks of it; in the others it has glibc's defaults.",
    )
    table.add_column("system", no_wrap=True)
    for name in (
        "ms/step",
        f"ratio to {REFERENCE}",
        "peak RSS\nMB",
        "imports\nMB",
        "beyond\nMB",
        "state\nMB/rank",
        "sent\nMB/rank",
        "x params",
        "last loss",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in rows.items():
        relative = str(ratio(row["ms"], rows[REFERENCE]["ms"])) if REFERENCE in rows else "-"
        table.add_row(
            name,
            f"{middle(row['ms']):.0f}",
            relative,
            *(f"{middle(row[k]) / MB:.0f}" for k in ("peak", "imports", "beyond", "state", "wire")),
            f"{middle(row['wire']) / one_pass:.2f}",
            f"{row['loss'][-1]:.6f}",
            style="bold green" if name.startswith("ZeroFn") else None,
        )
    return table


def one_rank_table(run: dict[str, Any]) -> Table:
    table = Table(
        title="One rank, ZeroFn's compiled step beside the hand-written loop in the same process",
        caption="Ratio: median over rounds of the median over steps of one step to the other.\n"
        "malloc keeps freed memory, which compile() asks of it, for the hand-written loop as well: it is "
        "in the same process.",
    )
    for name in ("model", "loop", "ms/step", "ratio to hand-written", "losses equal bit for bit"):
        table.add_column(name, justify="left" if name in ("model", "loop") else "right")
    for workload, loops in run["one_rank"].items():
        for name, loop in loops.items():
            relative = str(ratio(loop["ratios"], [1.0] * len(loop["ratios"])))
            equal = "yes" if loop["equal"] else f"no, {loop['difference']:.1e} relative"
            table.add_row(workload, name, f"{middle(loop['ms']):.3f}", relative, equal)
    return table


def check_table(found: Sequence[Check]) -> Table:
    table = Table(title="What must hold")
    table.add_column("what")
    for name in ("measured [95 % interval]", "limit", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for check in found:
        sign = "<" if check.strict else "<="
        word = "kept" if check.kept else "-" if check.measured is None else "MISSED"
        style = {"kept": "green", "MISSED": "bold red", "-": "dim"}[word]
        table.add_row(check.what, check.shown, f"{sign} {check.limit:.3f}", word, style=style)
    return table


def show(run: dict[str, Any], found: Sequence[Check], console: Console) -> None:
    if run["rows"]:
        console.print(main_table(run))
    if run["one_rank"]:
        console.print(one_rank_table(run))
    console.print(check_table(found))


def conclude(path: Path, run: dict[str, Any], found: Sequence[Check], check: bool) -> int:
    """Write the run; the exit status, 1 if a limit is missed and that is to be told (`check`)."""
    write_json(path, run, found)
    missed = [each.what for each in found if not each.kept]
    if check and missed:
        print("missed: " + "; ".join(missed), file=sys.stderr)
    return int(check and bool(missed))


def write_json(path: Path, run: dict[str, Any], found: Sequence[Check]) -> None:
    checks = [
        {"what": c.what, "measured": c.measured, "shown": c.shown, "limit": c.limit, "kept": c.kept} for c in found
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run | {"must_hold": checks}, indent=1) + "\n")
