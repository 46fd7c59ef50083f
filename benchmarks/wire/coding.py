"""python -m benchmarks.wire.coding   (make bench): coding of what ranks send, beside a copy of the same array.

Each row reads and writes memory once: its speed is bytes read and written over time, and its ratio is to a copy in the
same round. All rows run in one process on the same arrays, in an order that rotates. Writes JSON beside the table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from benchmarks.common.check import Check
from benchmarks.common.options import add_end
from benchmarks.common.statistic import ratio
from benchmarks.common.turns import in_turn
from zerofn.comm.block_wire import BlockWire
from zerofn.comm.wire import CODECS
from zerofn.ops import cpu

COPY = "copy"
LEAST = {"bf16": 0.8, "fp8": 0.8, "int8": 0.8}  # of a copy's speed
Run = tuple[int, Callable[[], object]]  # bytes read and written, and what does it


def rows(x: torch.Tensor) -> dict[str, Run]:
    """Each row of the table, for a flat float32 array."""
    to, found = torch.empty_like(x), {}
    found[COPY] = (2 * x.nbytes, lambda: to.copy_(x))
    bf16, half = CODECS["bf16"], torch.empty_like(x, dtype=torch.bfloat16)
    found["bf16, encode"] = (x.nbytes + half.nbytes, lambda: bf16.encode(x, half))
    found["bf16, decode"] = (x.nbytes + half.nbytes, lambda: bf16.sum_(to, [half]))
    found["bf16, sum of 2"] = (x.nbytes + 2 * half.nbytes, lambda: bf16.sum_(to, [half, half]))
    for form in ("fp8", "int8", "int4"):
        how = BlockWire(form, 256, ((0, len(x) // 256),))
        coded = how.encode_all(x[None])
        nbytes = x.nbytes + coded.nbytes
        found[f"{form}, encode"] = (nbytes, lambda how=how, coded=coded: how.encode_row(x, coded, 0))
        found[f"{form}, encode, drawn"] = (nbytes, lambda how=how, coded=coded: how.encode_row(x, coded, 0, key=1))
        found[f"{form}, decode"] = (nbytes, lambda how=how, coded=coded: how.decode_rows(to, coded))
        both = [coded[0], coded[0].clone()]
        found[f"{form}, sum of 2"] = (nbytes + coded.nbytes, lambda how=how, both=both: how.sum_(to, both))
    return found


def measured(options: argparse.Namespace) -> dict[str, list[float]]:
    """Bytes a second of each row, one a round, after one that does not count."""
    torch.set_num_threads(options.threads)
    x = torch.randn(options.elements // 2048 * 2048, generator=torch.Generator().manual_seed(0))
    every = rows(x)
    names, found = list(every), {name: [] for name in every}
    for number in range(options.rounds + 1):
        for name in in_turn(names, number):
            nbytes, run = every[name]
            began = time.perf_counter()
            run()
            if number:
                found[name].append(nbytes / (time.perf_counter() - began))
    return found


def table(found: dict[str, list[float]], threads: int) -> Table:
    """The table of a run."""
    out = Table(title=f"Coding float32 in {threads} threads, {cpu.isa()}: bytes read and written a second")
    for name in ("", "GB/s", "of a copy"):
        out.add_column(name, justify="left" if not name else "right")
    for name, speeds in found.items():
        out.add_row(name, f"{statistics.median(speeds) / 1e9:.1f}", str(ratio(speeds, found[COPY])))
    return out


def checks(found: dict[str, list[float]]) -> list[Check]:
    """A copy's speed over that of encoding and decoding."""
    out = []
    for form, least in LEAST.items():
        for what in ("encode", "decode", *(["encode, drawn"] if form != "bf16" else [])):
            share = ratio(found[COPY], found[f"{form}, {what}"])
            out.append(Check(f"{form}, {what}: speed of a copy over its own", str(share), share.median, 1 / least))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--elements", type=int, default=29_500_000, help="float32; 118 MB by default")
    parser.add_argument("--threads", type=int, default=2)
    add_end(parser, "wire_coding.json")
    options, console = parser.parse_args(), Console(width=120 if not sys.stdout.isatty() else None)
    found = measured(options)
    held = checks(found)
    console.print(table(found, options.threads))
    console.print(report.check_table(held))
    run = {"surroundings": report.surroundings(), "isa": cpu.isa(), "threads": options.threads, "rows": found}
    return report.conclude(options.out, run, held, options.check)


if __name__ == "__main__":
    sys.exit(main())
