"""python -m benchmarks.gpu.gpu [--minutes 9]: on one GPU, bits, kernels, and models that do not fit, beside what others
have published.

Each part is a process of its own with a limit of time; one that fails, runs out of memory or is cut short says so and
does not end the others. Writes gpu.json. `--dry-run` goes through all of it on the CPU with tiny sizes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]  # benchmarks/
ROOT = HERE.parent
# What each part may take of the time that is left, beside the parts after it.
PARTS = {"correct": 110, "ranks": 70, "meshes": 60, "nccl": 120, "kernels": 40, "plain": 60, "large_offload": 95,
         "big_24": 95, "big_10": 90, "tokens": 60, "large_resident": 50}  # fmt: skip
NEEDED = ("torch", "optree", "safetensors", "numpy", "rich", "psutil")


def build(folder: Path) -> str:
    """Make the CPU kernels where they are missing, beside a copy of the package; a sentence about what serves."""
    ask = [sys.executable, "-c", "from zerofn.ops import cpu; print(cpu.missing() or '')"]

    def missing() -> str:
        done = subprocess.run(ask, capture_output=True, text=True, cwd=ROOT, env=environment(folder), check=True)
        return done.stdout.strip()

    reason = missing()
    if reason and shutil.which("cmake"):
        made = str(folder / "build")
        for command in (["cmake", "-S", str(ROOT), "-B", made], ["cmake", "--build", made, "-j"]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"CPU kernels: torch's operations stand in; {' '.join(command[:2])} said: {done.stderr[-300:]}"
        shutil.copytree(ROOT / "zerofn", folder / "zerofn")  # the checkout stays as it is
        shutil.copy(folder / "build" / "libzerofn.so", folder / "zerofn" / "ops")
        reason = missing()
    return f"CPU kernels: torch's operations stand in. {reason}" if reason else "CPU kernels: compiled"


def environment(folder: Path) -> dict[str, str]:
    """What every part runs in. `folder`: may hold a copy of the package."""
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    return os.environ | options | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def run_part(name: str, seconds: float, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What a part found until it ended, was ended, or its time was up."""
    command = [sys.executable, "-m", "benchmarks.gpu.parts", name, f"{0.9 * seconds:.0f}"]
    command += ["--device", "cpu"] if options.dry_run else []
    command += ["--host-gib", str(options.host_gib)] if options.host_gib else []
    log, began, why = folder / f"{name}.log", time.monotonic(), ""
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment(folder), cwd=ROOT)
        try:
            code = process.wait(seconds)
            why = f"ended with code {code}" if code else ""
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            why = f"cut short after {seconds:.0f} s"
    lines = log.read_text(errors="replace").splitlines()
    rows = [json.loads(x.removeprefix("ROW ")) for x in lines if x.startswith("ROW ")]
    tail = [x[:400] for x in lines if not x.startswith("ROW ")][-40:]
    return {"rows": rows, "seconds": time.monotonic() - began, "why": why, "log": tail}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=9, help="of everything together")
    parser.add_argument("--only", help="parts, comma between")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny")
    parser.add_argument(
        "--host-gib", type=float, help="the host's memory, on a machine that says less until it is used"
    )
    parser.add_argument("--check", action="store_true", help="end with 1 if a limit is missed")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder for gpu.json")
    options = parser.parse_args()
    for part in options.only.split(",") if options.only else ():
        if part not in PARTS:
            parser.error(f"--only {part!r} is no part; the parts are {', '.join(PARTS)}")
    return options


def problem(options: argparse.Namespace) -> str | None:
    """Why nothing can be run here."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        return f"this Python lacks {', '.join(absent)}; put them on PYTHONPATH (wheels unpack as zip archives)"
    import torch

    return None if options.dry_run or torch.cuda.is_available() else "no CUDA device; --dry-run goes without one"


def main() -> int:
    options, end = arguments(), time.monotonic()
    if reason := problem(options):
        print(f"benchmark failed: {reason}", file=sys.stderr)
        return 1
    sys.path.insert(0, str(ROOT))
    from rich.console import Console

    from benchmarks.gpu import report

    end += 60 * options.minutes
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    parts = options.only.split(",") if options.only else list(PARTS)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        run: dict[str, Any] = {"surroundings": report.surroundings(options.dry_run)}
        run["kernels"] = build(Path(folder))
        console.print(run["kernels"])
        for k, part in enumerate(parts):
            rest = sum(PARTS[x] for x in parts[k:])
            seconds = max(10.0, (end - time.monotonic() - 5) * PARTS[part] / rest)
            found[part] = run_part(part, seconds, options, Path(folder))
            one = found[part]
            console.print(f"{part}: {one['seconds']:.0f} of {seconds:.0f} s, {len(one['rows'])} rows. {one['why']}")
            for row in one["rows"]:
                if {"error", "out_of_memory", "cut_short", "ended"} & row.keys():
                    console.print(f"  {json.dumps(row)[:600]}", markup=False)
            if one["why"]:
                console.print("\n".join("    " + x for x in one["log"][-25:]), markup=False)
            # Written after each part, so that whatever ends this process leaves what was found.
            report.write(options.out / "gpu.json", run | {"parts": found}, report.checks(found))
    must_hold = report.checks(found)
    console.print(report.kernel_table(found), report.model_table(found), report.check_table(must_hold))
    missed = [check.what for check in must_hold if not check.kept]
    if options.check and missed:
        print("missed: " + "; ".join(missed), file=sys.stderr)
    return int(options.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
