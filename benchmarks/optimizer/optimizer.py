"""python -m benchmarks.optimizer.optimizer   (make bench): AdamW on one flat array, beside torch's and DeepSpeed's.

Alone in fp32, beside the memory's own speed; ZeroFn's other formats; and the whole phase from bf16 gradients to bf16
parameters. All rows run in one process on the same arrays, each row once a round, in an order that rotates. Ratios are
of one round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.options import add_end, add_pythons
from benchmarks.common.processes import BenchmarkError, program
from benchmarks.common.report import surroundings
from benchmarks.common.statistic import Ratio, interval, ratio
from benchmarks.common.turns import in_turn

AVX2 = ", AVX2"  # the end of the name of a row that leaves AVX-512 alone
ROWS = (
    "read-modify-write",
    "torch loop",
    "torch fused",
    "DeepSpeedCPUAdam",
    "ZeroFn fp32",
    "ZeroFn fp32, bf16 moments",
    "ZeroFn split",
    "ZeroFn split, bf16 moments",
    "ZeroFn split, 8-bit moments",
    "phase, torch",
    "phase, DeepSpeed",
    "phase, ZeroFn",
    "phase, ZeroFn, bf16 moments",
    "phase, ZeroFn, 8-bit moments",
)
ON_AVX2 = ("ZeroFn fp32", "ZeroFn split", "ZeroFn split, bf16 moments", "ZeroFn split, 8-bit moments")
# Bytes an element that must cross the memory bus: read, and written.
BYTES = {"fp32": 28, "fp32, bf16 moments": 20, "split": 26, "split, bf16 moments": 18, "split, 8-bit moments": 14}
# (row, beside which rows, at least so many times the speed of the fastest of them)
SPEEDS: list[tuple[str, tuple[str, ...], float]] = [
    ("ZeroFn fp32", ("DeepSpeedCPUAdam", "torch fused"), 0.97),
    ("ZeroFn fp32", ("read-modify-write",), 0.95),
    ("phase, ZeroFn", ("phase, DeepSpeed",), 1.9),
    ("phase, ZeroFn", ("phase, torch",), 1.9),
    ("ZeroFn split", ("ZeroFn fp32",), 1.0),
    ("ZeroFn split, bf16 moments", ("ZeroFn fp32",), 1.35),
    ("ZeroFn split, 8-bit moments", ("ZeroFn fp32",), 1.8),
    ("ZeroFn split" + AVX2, ("ZeroFn fp32" + AVX2,), 1.0),
    ("ZeroFn split, bf16 moments" + AVX2, ("ZeroFn fp32" + AVX2,), 1.35),
    ("ZeroFn split, 8-bit moments" + AVX2, ("ZeroFn fp32" + AVX2,), 1.5),
]


@dataclasses.dataclass(frozen=True)
class Check:
    """`measured`, a ratio of speeds, is to be `limit` at least."""

    what: str
    measured: Ratio
    limit: float

    @property
    def kept(self) -> bool:
        return self.measured.median >= self.limit


class Worker:
    """A process that runs rows when asked."""

    def __init__(self, python: str, threads: int, elements: int, **environment: str) -> None:
        command = [*program(python, "benchmarks.optimizer.rows"), str(threads), str(elements)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    def seconds(self, row: str) -> float:
        assert self.process.stdin and self.process.stdout and self.process.stderr
        try:
            self.process.stdin.write(row + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self.process.stdout.readline()
        if not answer:
            last = self.process.stderr.read().strip().splitlines()[-3:]
            raise BenchmarkError(f"{row}: its process ended with code {self.process.wait()}: {' / '.join(last)}")
        return float(answer)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def measure(options: argparse.Namespace, threads: int, console: Console) -> dict[str, list[float]]:
    """Seconds of each row, one a round, after one that does not count."""
    isas, folders = kernels(options)
    worker = Worker(options.peers_python, threads, options.elements, ZEROFN_FOLDERS=folders)
    rows = [*ROWS, *(row + AVX2 for row in ON_AVX2 if isas[0] == "avx512")]
    found: dict[str, list[float]] = {name: [] for name in rows}
    try:
        for number in range(options.rounds + 1):
            for name in in_turn(rows, number, options.rounds):
                seconds = min(worker.seconds(name) for _ in range(options.repeats))
                if number:
                    found[name].append(seconds)
            console.print(f"{threads} threads: round {number}/{options.rounds}", highlight=False)
    finally:
        worker.close()
    return found


def kernels(options: argparse.Namespace) -> tuple[list[str], str]:
    """The library's instruction sets, and where its Python and itself lie, as JSON."""
    program = (
        "import json, zerofn.ops; from zerofn.ops import cpu as n; folders = [zerofn, zerofn.ops];"
        "print(json.dumps([n.missing(), n.isas(), {m.__name__: list(m.__path__) for m in folders}]))"
    )
    done = subprocess.run([options.zerofn_python, "-c", program], capture_output=True, text=True, check=True)
    reason, isas, folders = json.loads(done.stdout)
    if reason:
        raise BenchmarkError(reason)
    return isas, json.dumps(folders)


def checks(found: dict[str, list[float]]) -> list[Check]:
    held = []
    for row, beside, limit in SPEEDS:
        if row in found:
            fastest = [min(times) for times in zip(*(found[name] for name in beside), strict=True)]
            held.append(Check(f"{row}: speed, {' or '.join(beside)} = 1", ratio(fastest, found[row]), limit))
    return held


def tables(found: dict[str, list[float]], held: list[Check], elements: int, threads: int) -> list[Table]:
    times = Table(
        title=f"AdamW on {elements / 1e6:.0f} M elements, {threads} threads",
        caption="Medians over rounds with the 95 % interval of the median.",
    )
    for name in ("row", "ms", "ns/element", "GB/s"):
        times.add_column(name, justify="left" if name == "row" else "right", no_wrap=True)
    for name, seconds in found.items():
        ms = interval([1e3 * x for x in seconds])
        form = name.removesuffix(AVX2).removeprefix("ZeroFn ")
        num_bytes = BYTES.get(form, None if "phase" in name else BYTES["fp32"])
        speed = f"{num_bytes * elements / ms.median / 1e6:.1f}" if num_bytes else "-"
        times.add_row(
            name,
            f"{ms.median:.1f} [{ms.low:.1f}, {ms.high:.1f}]",
            f"{1e6 * ms.median / elements:.3f}",
            speed,
            style="bold green" if "ZeroFn" in name else None,
        )
    limits = Table(title=f"What must hold, {threads} threads")
    for name in ("what", "median [95 % interval]", "limit", ""):
        limits.add_column(name, justify="left" if name == "what" else "right")
    for check in held:
        word = "kept" if check.kept else "MISSED"
        limits.add_row(
            check.what, str(check.measured), f">= {check.limit:.2f}", word, style="green" if check.kept else "bold red"
        )
    return [times, limits]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=2, help="runs of a row in a round; the faster counts")
    parser.add_argument("--elements", type=int, default=50_000_000)
    parser.add_argument("--threads", default="1,2", help="numbers of threads, comma between")
    add_end(parser, "optimizer.json")
    add_pythons(parser)
    return parser.parse_args()


def main() -> int:
    options, console = arguments(), Console(width=130 if not sys.stdout.isatty() else None)
    run: dict[str, Any] = {"surroundings": surroundings(), "elements": options.elements, "rounds": options.rounds}
    run["repeats"], run["threads"], missed = options.repeats, {}, []
    try:
        for threads in map(int, options.threads.split(",")):
            found = measure(options, threads, console)
            held = checks(found)
            console.print(*tables(found, held, options.elements, threads))
            missed += [f"{check.what} ({threads} threads)" for check in held if not check.kept]
            run["threads"][threads] = {
                "seconds": found,
                "ms": {name: 1e3 * statistics.median(x) for name, x in found.items()},
                "must_hold": [dataclasses.asdict(check) | {"kept": check.kept} for check in held],
            }
    except BenchmarkError as error:
        print(f"benchmark failed: {error}", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(run, indent=1) + "\n")
    console.print(f"written: {options.out}", highlight=False)
    if options.check and missed:
        print("missed: " + "; ".join(missed), file=sys.stderr)
    return int(options.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
