"""python -m benchmarks.mesh.plans: the plans that the pages show, made by `zerofn plan` on a CPU.

An 8 B Llama on one node and a 70 B Llama on eight, on every mesh that may be the fastest; four wide layers with stages
and without; and float8 beside bfloat16. Nothing here has run on such machines. Writes JSON beside the table.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from benchmarks.common.options import add_end
from benchmarks.common.processes import HERE

CONFIGS = HERE / "mesh" / "configs"
MS, GB = 1e3, 1e9
SMALL, LARGE = "llama_8b", "llama_70b"
ONE_NODE, PLAINLY = "--context 4096 --machine H100-8", "--precision bf16 --offload none --remat none"
# name -> (configuration, its number of layers if it is another, arguments of `zerofn plan`)
CASES: dict[str, tuple[str, int | None, str]] = {
    "8B": (SMALL, None, f"{ONE_NODE} --mesh auto"),
    "8B, whole tokens": (SMALL, None, f"{ONE_NODE} --mesh tensor=8 --stage 3 --no-sequence-parallel {PLAINLY}"),
    "70B": (LARGE, None, "--context 4096 --machine '8 x H100-8' --mesh auto"),
    "4 layers": (LARGE, 4, f"{ONE_NODE} --mesh data=8 --stage 3 --microbatches 4 {PLAINLY}"),
    "4 layers in stages": (LARGE, 4, f"{ONE_NODE} --mesh pipe=2,data=4 --stage 3 --microbatches 4 {PLAINLY}"),
    "float8": (
        SMALL,
        8,
        "--context 8192 --machine H100 --world 1 --precision bf16 fp8 --offload none --stage 0 --remat none",
    ),
}


def planned(name: str) -> dict[str, Any]:
    """The rows of a case by their labels, and the CPU seconds that they took."""
    config, layers, arguments = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "config.json"), Path(folder, "plan.json")
        given = json.loads((CONFIGS / f"{config}.json").read_text())
        file.write_text(json.dumps(given if layers is None else {**given, "num_hidden_layers": layers}))
        words = shlex.split(arguments)
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        command = [sys.executable, "-m", "zerofn.cli", "plan", str(file), *words, "--json", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        table = json.loads(out.read_text())
    took = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    best = None if table["best"] is None else label(table["rows"][table["best"]])
    rows = {label(row): figures(row) for row in table["rows"]}
    return {"config": config, "layers": layers, "arguments": words, "best": best, "rows": rows, "cpu": took}


def label(row: dict[str, Any]) -> str:
    """The mesh and the options of a row."""
    parts = [",".join(f"{axis}={size}" for axis, size in row["mesh"].items()), f"stage {row['stage']}"]
    parts += ["hpz"] * row["again"] + [row["precision"] or "", row["offload"] or "", row["remat"] or ""]
    return ", ".join(x for x in parts if x)


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """What is known of a row: bytes, seconds, tokens a second of all ranks."""
    known = row.get("estimate", row)
    found = {name: known.get(name) for name in ("seconds", "speed", "bound")}
    return {"device": row["device"], **found, "fits": row["fits"], "estimated": "estimate" in row}


def table(run: dict[str, Any]) -> Table:
    """All rows."""
    out = Table("case", "row", "GB", "ms", "tokens/s", "", title="Planned, and run nowhere")
    for name, case in run.items():
        for text, row in case["rows"].items():
            ms = "-" if row["seconds"] is None else f"{MS * row['seconds']:,.0f}"
            speed = "-" if row["speed"] is None else f"{row['speed']:,.0f}"
            told = "best" if text == case["best"] else "estimated" if row["estimated"] else ""
            out.add_row(name, text, f"{row['device'] / GB:.1f}", ms, speed, told)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, help="plan these, and keep what is known of the others")
    add_end(parser, "mesh_plans.json")
    args = parser.parse_args()
    known = json.loads(args.out.read_text())["plans"] if args.out.exists() else {}
    known |= {name: planned(name) for name in args.only or CASES}
    run = {name: known[name] for name in CASES if name in known}
    Console(soft_wrap=True).print(table(run))
    return report.conclude(args.out, {"surroundings": report.surroundings(), "plans": run}, [], args.check)


if __name__ == "__main__":
    sys.exit(main())
