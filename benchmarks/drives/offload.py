"""python -m benchmarks.drives.offload   (make bench): the memory that an offloaded state takes.

Each run is a process of its own, which trains a chain of square layers on a few rows; its peak of anonymous memory is
measured from the first line of `shard` on. Bytes per parameter are the slope of a line through several sizes. Where
memory is limited it is by RLIMIT_DATA, which needs no rights and is stricter than a cgroup's limit: it counts private
memory when it is mapped, used or not. Some three minutes, 3 GiB of disk and 3 GiB of memory.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from benchmarks.common.limits import Check
from benchmarks.common.options import add_end
from benchmarks.common.processes import BenchmarkError, program, run
from benchmarks.common.statistic import Ratio

WIDTH = 2048  # 4.2 M parameters a unit
SIZES = (12, 24, 36)  # units
NARROW = 256  # the same number of units, next to nothing in them
DRIVES = {"optimizer": "nvme", "params": "nvme"}
LIMIT = 320 << 20  # bytes of private writable memory beyond the imports
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182}  # quantiles of 97.5 %, by degrees of freedom


@dataclass(frozen=True)
class Row:
    """What is trained, and the bytes per parameter it may take.

    `unit`: bytes per parameter of a unit on its way between drive and memory: halves and moments (12), the half that
    is computed with (2) and the gradient (2).
    """

    name: str
    what: dict[str, Any]
    limit: float
    unit: int = 0


ROWS = (
    Row("host, exact, no finite check", {}, 12.2),
    Row("host, exact, clipped and checked", {"finite_check": True}, 14.2),
    Row("host, precision='bf16', clipped and checked", {"finite_check": True, "precision": "bf16"}, 16.2),
    Row("host, 8-bit moments, no finite check", {"moments": "8bit"}, 6.3),
    Row("host, 8-bit moments, clipped and checked", {"moments": "8bit", "finite_check": True}, 8.3),
    Row("drives, exact, no finite check", DRIVES, 0.2, unit=16),  # capture takes some 0.4 MB a unit
    Row("drives, exact, clipped and checked", {**DRIVES, "finite_check": True}, 0.2, unit=16),
)


class Trainer:
    """Starts runs. The first one, small, finds out what is imported on the way, for the others to import before."""

    def __init__(self, folder: str) -> None:
        self.folder, self.preload = folder, []
        self.preload = self.run("a small run", units=2, width=64, finite_check=True, **DRIVES)["late_imports"]

    def run(self, label: str, **what: Any) -> dict[str, Any]:
        if "nvme" in (what.get("optimizer"), what.get("params")):
            what["folder"] = self.folder
        what["preload"] = self.preload
        return run(label, [[*program(sys.executable, "benchmarks.drives.offload_worker"), json.dumps(what)]])[0]


def slope(points: Sequence[tuple[float, float]]) -> Ratio:
    """Of the least-squares line through (x, y), with its 95 % interval (Student's)."""
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((a - x) ** 2 for a, _ in points)
    value = sum((a - x) * (b - y) for a, b in points) / spread
    free = len(points) - 2
    rest = sum((b - y - value * (a - x)) ** 2 for a, b in points)
    half = STUDENT[free] * math.sqrt(rest / free / spread)
    return Ratio(value, value - half, value + half)


def sizes_of(trainer: Trainer, row: Row, console: Console) -> dict[str, Any]:
    """Parameters and peaks of a row's runs; for drives also of a run with narrow units."""
    found = [trainer.run(f"{row.name}, {units} units", units=units, width=WIDTH, **row.what) for units in SIZES]
    points = [(one["parameters"], one["peak"]) for one in found]
    shown = ", ".join(f"{n / 1e6:.0f} M: {peak / 1e6:.0f}" for n, peak in points)
    console.print(f"{row.name}: parameters: peak, MB: {shown}", highlight=False)
    result: dict[str, Any] = {"points": points, "losses": [one["losses"] for one in found]}
    if row.unit:
        small = trainer.run(f"{row.name}, narrow", units=SIZES[-1], width=NARROW, **row.what)
        result["constant"] = small["peak"] - 3 * row.unit * NARROW**2
    return result


def limited(trainer: Trainer, console: Console) -> dict[str, Any]:
    """The largest model with `LIMIT`, on drives and in memory."""
    model = {"units": SIZES[-1], "width": WIDTH, "finite_check": True, "limit": LIMIT}
    found = {"drives": trainer.run("limited, on drives", **model, **DRIVES),
             "memory": trainer.run("limited, in memory", **model)}  # fmt: skip
    for name, one in found.items():
        del one["late_imports"]
        said = one.get("refused") or f"losses {', '.join(f'{x:.3f}' for x in one['losses'])}"
        console.print(f"{LIMIT >> 20} MiB beyond the imports, state in {name}: {said}", highlight=False)
    return found


def table(rows: dict[str, Any]) -> Table:
    shown = Table(title="Peak of anonymous memory beyond the imports",
                  caption="MB; the slope with the 95 % interval of the fit")  # fmt: skip
    shown.add_column("row")
    for units in SIZES:
        shown.add_column(f"{units * WIDTH**2 / 1e6:.0f} M", justify="right")
    shown.add_column("bytes per parameter", justify="right")
    for name, row in rows.items():
        peaks = [f"{peak / 1e6:.0f}" for _, peak in row["points"]]
        shown.add_row(name, *peaks, str(slope(row["points"])))
    return shown


def checks(rows: dict[str, Any], limited: dict[str, Any]) -> list[Check]:
    found = []
    for row in ROWS:
        value = slope(rows[row.name]["points"])
        found.append(Check(f"{row.name}: bytes per parameter", str(value), value.median, row.limit))
    for row in filter(lambda row: row.unit, ROWS):
        most = max(peak for _, peak in rows[row.name]["points"])
        bound = 3 * row.unit * WIDTH**2 + rows[row.name]["constant"]
        what = f"{row.name}: peak / (three units + what narrow units take)"
        found.append(Check(what, f"{most / 1e6:.0f} / {bound / 1e6:.0f} MB", most / bound, 1.0))
    fall = max(losses[-1] / losses[0] for row in rows.values() for losses in row["losses"])
    found.append(Check("all of these runs: last loss / first", f"{fall:.3f}", fall, 1.0, strict=True))
    drives, memory = limited["drives"], limited["memory"]
    state = 16 * drives["parameters"]
    part = 3 * LIMIT / state
    found.append(Check("limited memory: 3 x limit / 16 bytes a parameter", f"{part:.3f}", part, 1.0))
    fall = drives["losses"][-1] / drives["losses"][0] if "losses" in drives else math.inf
    found.append(Check("limited memory, on drives: last loss / first", f"{fall:.3f}", fall, 1.0, strict=True))
    trained = float("losses" in memory)
    found.append(Check("limited memory, not offloaded: trains (1) or is refused (0)", f"{trained:.0f}", trained, 0.0))
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--folder", type=Path, help="a folder on a drive; the system's temporary one by default")
    add_end(parser)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            trainer = Trainer(folder)
            rows = {row.name: sizes_of(trainer, row, console) for row in ROWS}
            bounded = limited(trainer, console)
    except (BenchmarkError, OSError) as error:
        print(f"benchmark failed: {error}", file=sys.stderr)
        return 1
    found = checks(rows, bounded)
    for each in (table(rows), report.check_table(found)):
        console.print(each)
    run = {"surroundings": report.surroundings(), "rows": rows, "limit": LIMIT, "limited": bounded}
    return report.conclude(options.out / "offload.json", run, found, options.check)


if __name__ == "__main__":
    sys.exit(main())
