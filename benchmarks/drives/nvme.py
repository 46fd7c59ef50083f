"""python -m benchmarks.drives.nvme   what the drive does, and what ZeroFn makes of it.

The raw part: the same file written, read, and both at a time, by fio, by ZeroFn's engine (which also
computes and compares checksums) and by DeepSpeed's async_io, with the block size and depth that ZeroFn's
probe found. Training steps: what a step that has much state and little to compute moves, beside fio's reading and
writing as much. Rounds are interleaved; every figure is a median over them. Under three minutes and 4 GiB.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from benchmarks.common.limits import Check
from benchmarks.common.options import add_end
from benchmarks.common.processes import HERE, BenchmarkError
from benchmarks.common.statistic import ratio
from benchmarks.drives.rows import REGION, WORKS, AsyncIO, Engine, Fio
from benchmarks.drives.steps import UNITS, WIDTH, Steps
from zerofn.offload.disk import checksum

FIO, SMALL, OURS, DEEPSPEED = "fio, huge pages", "fio, small pages", "ZeroFn", "DeepSpeed async_io"
LIMIT = 1 / 0.90  # fio's rate to ours: at least 90 % of it
# What is on the drive, and whether updates wait for the finite check: then little can be moved meanwhile.
STEPS: dict[str, dict[str, Any]] = {
    "optimizer": {"finite_check": False, "optimizer": "nvme"},
    "optimizer, params": {"finite_check": False, "optimizer": "nvme", "params": "nvme"},
    "optimizer, finite check": {"finite_check": True, "optimizer": "nvme"},
    "optimizer, params, finite check": {"finite_check": True, "optimizer": "nvme", "params": "nvme"},
}


def raw_rounds(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """Bytes a second, by system and work, a figure a round; what was left out, and why."""
    nbytes = options.gib << 30
    engine = Engine(folder, nbytes)
    systems: dict[str, Any] = {OURS: engine}
    left_out = {}
    try:
        block, depth = engine.store.block, engine.depth
        systems[FIO] = Fio(engine.path, nbytes, block, depth, huge=True)
        systems[SMALL] = Fio(engine.path, nbytes, block, depth, huge=False)
        try:
            systems[DEEPSPEED] = AsyncIO(options.peers_python, engine.path, nbytes, block, depth)
        except BenchmarkError as error:
            left_out[DEEPSPEED] = str(error)
        engine.seconds("write")  # the first write to a place is slow, whoever does it
        rates: dict[str, dict[str, list[float]]] = {name: {work: [] for work in WORKS} for name in systems}
        for number in range(options.rounds):
            names = list(systems)[:: 1 if number % 2 == 0 else -1]
            for name in names:
                for work in WORKS:
                    rates[name][work].append(nbytes / systems[name].seconds(work))
                shown = ", ".join(f"{work} {rates[name][work][-1] / 1e9:.2f}" for work in WORKS)
                console.print(f"round {number + 1}/{options.rounds}  {name}  {shown} GB/s", highlight=False)
        described = engine.store.describe()
        return {"rates": rates, "left_out": left_out, "block": block, "depth": depth, "store": described,
                "checksums": checksum.function().__module__, "num_bytes": nbytes}  # fmt: skip
    finally:
        for system in reversed(systems.values()):
            system.close()


def raw_table(raw: dict[str, Any]) -> Table:
    table = Table(
        title=f"One file of {raw['num_bytes'] >> 30} GiB, blocks of {raw['block'] >> 20} MiB, {raw['depth']} under way",
        caption="GB/s, medians over rounds",
    )
    for name in ("system", *WORKS):
        table.add_column(name, justify="left" if name == "system" else "right")
    for name, rates in raw["rates"].items():
        middles = [f"{statistics.median(rates[work]) / 1e9:.2f}" for work in WORKS]
        table.add_row(name, *middles, style="bold green" if name == OURS else None)
    for name, why in raw["left_out"].items():
        table.add_row(name, why.splitlines()[0])
    return table


def raw_checks(raw: dict[str, Any]) -> list[Check]:
    found = []
    for work in WORKS:
        value = ratio(raw["rates"][FIO][work], raw["rates"][OURS][work])
        found.append(Check(f"{work}: {FIO} / ZeroFn, bytes a second", str(value), value.median, LIMIT))
    return found


def step_rounds(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """Bytes a second of training steps and of fio, a figure a round, by what lies on the drive."""
    nbytes = options.gib << 30
    engine, found = Engine(folder, nbytes), {}
    try:
        engine.seconds("write")
        for name, what in STEPS.items():
            steps = Steps(folder, **what)
            fio = Fio(engine.path, nbytes, engine.store.block, engine.depth, huge=True, share=steps.share)
            rates: dict[str, list[float]] = {OURS: [], FIO: []}
            for _ in range(options.rounds):
                rates[OURS].append(steps.rate())
                rates[FIO].append(nbytes / fio.seconds("mixed"))
            steps.close()
            found[name] = {"rates": rates, "share_read": steps.share}
            shown = ", ".join(f"{system} {statistics.median(x) / 1e9:.2f}" for system, x in rates.items())
            console.print(f"steps with {name} on the drive  {shown} GB/s", highlight=False)
    finally:
        engine.close()
    return found


def step_table(found: dict[str, Any]) -> Table:
    table = Table(
        title=f"Training steps, {UNITS * WIDTH**2 / 1e6:.0f} M parameters, one thread",
        caption="GB/s read and written, medians over rounds",
    )
    for name in ("on the drive", "of it read", OURS, FIO):
        table.add_column(name, justify="left" if name == "on the drive" else "right")
    for name, row in found.items():
        middles = [f"{statistics.median(row['rates'][system]) / 1e9:.2f}" for system in (OURS, FIO)]
        table.add_row(name, f"{row['share_read']:.0%}", *middles)
    return table


def step_checks(found: dict[str, Any]) -> list[Check]:
    values = {name: ratio(row["rates"][FIO], row["rates"][OURS]) for name, row in found.items()}
    return [Check(f"steps with {name}: {FIO} / ZeroFn, bytes a second", str(value), value.median, LIMIT)
            for name, value in values.items()]  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gib", type=int, default=1, help="size of the scratch file, 1 to 3 GiB")
    parser.add_argument("--folder", type=Path, default=HERE.parent, help="a folder on the drive")
    parser.add_argument("--peers-python", type=Path, default=HERE.parent / ".venv-peers/bin/python",
                        help="the Python that DeepSpeed is installed for")  # fmt: skip
    add_end(parser)
    options = parser.parse_args()
    if options.rounds < 1 or not 1 <= options.gib <= 3:
        parser.error("--rounds must be at least 1, and --gib 1 to 3")
    return options


def main() -> int:
    options = arguments()
    console = Console(width=None if sys.stdout.isatty() else 150)
    assert (options.gib << 30) % REGION == 0
    try:
        if shutil.which("fio") is None:
            raise BenchmarkError("fio is missing; install it: apt-get install fio")
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            raw = raw_rounds(options, Path(folder), console)
            steps = step_rounds(options, Path(folder), console)
    except (BenchmarkError, OSError) as error:
        print(f"benchmark failed: {error}", file=sys.stderr)
        return 1
    found = [*raw_checks(raw), *step_checks(steps)]
    console.print(f"{raw['store']}\nchecksums by {raw['checksums']}", highlight=False)
    for table in (raw_table(raw), step_table(steps), report.check_table(found)):
        console.print(table)
    run = {"surroundings": report.surroundings(), "raw": raw, "steps": steps}
    return report.conclude(options.out / "nvme.json", run, found, options.check)


if __name__ == "__main__":
    sys.exit(main())
