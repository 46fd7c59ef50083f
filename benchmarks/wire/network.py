"""python -m benchmarks.wire.network   (make bench, as root): a step on slow networks, in ZeroFn and beside it.

The same Llama, tokens and AdamW everywhere, on 2 and on 4 ranks. Each rank has a network namespace of its own, whose
cable sends and receives at most 100 Mbit/s, 1 or 10 Gbit/s (`links.py`); without root, ranks talk over the loopback
interface instead. A rank is one process of one thread for all systems (DeepSpeed has one of its own), which train in
turns, in an order that rotates, so ratios are of one round. Bytes are what the kernel has counted on the cable, and in
ZeroFn also what its transport has; planned ones are the plan's. A peer that does not run here is a row with its error.
Writes JSON beside the tables; a number of ranks that is not run (`--worlds`) stays there as an earlier run has measured
it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import processes, report
from benchmarks.common.check import Check
from benchmarks.common.options import add_end, add_pythons
from benchmarks.common.processes import BenchmarkError, program
from benchmarks.common.statistic import ratio
from benchmarks.common.turns import Ranks, in_turn
from benchmarks.common.workload import WORKLOADS
from benchmarks.step.step import check_versions
from benchmarks.wire.curves import PLAIN, SIGNS
from benchmarks.wire.links import LOOPBACK, Hosts, Loopback, commands, throttled, unavailable
from benchmarks.wire.rows import PEERS, ZEROFN, every_of
from benchmarks.wire.staying import WARMUP_STEPS

MB = 1e6
UNCODED = "ZeroFn 3"
# Relative, of the first steps' losses: systems sum in different orders, and codes round.
TOLERANCE, CODED_TOLERANCE = 1e-3, 2e-2
Found = dict[str, dict[str, list[dict[str, Any]]]]  # row -> link -> what each round measured


@dataclasses.dataclass(frozen=True)
class Link:
    """`mbits`: 0 without a limit. `steps`: of a turn. `rounds`: by number of ranks; the slower the link, the fewer, as
    it alone decides there.
    """

    mbits: int
    steps: int
    rounds: dict[int, int]


LINKS = {
    "100 Mbit/s": Link(100, 1, {2: 3, 4: 2}),
    "1 Gbit/s": Link(1000, 2, {2: 5, 4: 2}),
    "10 Gbit/s": Link(10_000, 2, {2: 7, 4: 3}),
}
UNLIMITED = {"loopback": Link(0, 2, {2: 7, 4: 3})}
# Of two ranks: (row, relative to, link, milliseconds a step at most)
TIME = [
    ("ZeroFn 3, int8", PLAIN, "100 Mbit/s", 0.45),
    ("ZeroFn 3, int8", PLAIN, "1 Gbit/s", 0.80),
    (SIGNS, PLAIN, "100 Mbit/s", 0.20),
    (SIGNS, PLAIN, "1 Gbit/s", 0.70),
    *((row, PLAIN, "10 Gbit/s", 1.05) for row, way in ZEROFN.items() if way.wire),
    ("ZeroFn 3, bf16", UNCODED, "1 Gbit/s", 1.0),
    ("ZeroFn 3, bf16", UNCODED, "10 Gbit/s", 1.02),
]
STEPS_APART = 20  # at least a round of them is measured, where ranks meet seldom
AT_ONCE = {2: 99, 4: 5}  # rows in memory beside PLAIN, by number of ranks: 24 GiB hold no more
PLANNED = {"ZeroFn 3, bf16": 0.52, "ZeroFn 3, int8": 0.27}  # bytes, of those without a codec
INTERFACE_SLACK = 0.02  # headers, acknowledgements, segments sent again


class Cell:
    """All rows on so many ranks. `broken`: peers that do not run here, with their error."""

    def __init__(self, world: int, rows: list[str], options: argparse.Namespace) -> None:
        self.world, self.rows, self.options = world, rows, options
        self.broken: dict[str, str] = {}
        self.planned: dict[str, float] = {}
        self.found: Found = {}
        self._there: dict[str, Ranks] = {}

    def run(self, hosts: Hosts | Loopback, links: dict[str, Link], console: Console) -> None:
        """Measure all rows, as many at a time as memory holds, each of them beside PLAIN."""
        expected = reference(self.world, self.options)
        others = [row for row in self.rows if row != PLAIN]
        for first in range(0, max(1, len(others)), AT_ONCE[self.world]):
            rows = [PLAIN, *others[first : first + AT_ONCE[self.world]]]
            found = self._together(rows, expected, hosts, links, console)
            for row, by_link in found.items():
                for link, rounds in by_link.items():
                    for x, plain in zip(rounds, found[PLAIN][link], strict=False):
                        x["plain_ms"] = plain["ms"]
                self.found.setdefault(row, by_link)  # PLAIN's are those of the first rows

    def _together(
        self, rows: list[str], expected: list[float], hosts: Hosts | Loopback, links: dict[str, Link], console: Console
    ) -> Found:
        """Start some rows, measure them in turns on each link, and return what was found."""
        self._there = {}
        theirs = [row for row in rows if row.startswith("DeepSpeed")]
        with contextlib.ExitStack() as stack:
            for python, mine in (
                (self.options.zerofn_python, [row for row in rows if row not in theirs]),
                (self.options.peers_python, theirs),
            ):
                if not mine:
                    continue
                command = [*program(python, "benchmarks.wire.staying"), "--workload", self.options.workload]
                number = len(self.found) + len(self._there)
                ranks = stack.enter_context(Ranks(python, commands(hosts, command, self.world, number)))
                for row in mine:
                    self._begin(row, ranks, expected, console)
            found: Found = {row: {} for row in self._there}
            for link, turns in self._turns(links):
                if isinstance(hosts, Hosts):
                    hosts.throttle(links[link].mbits)
                for row in turns:
                    measured = self._step(row, link, links[link].steps, hosts, console)
                    found[row].setdefault(link, []).append(measured)
        return found

    def _begin(self, row: str, ranks: Ranks, expected: list[float], console: Console) -> None:
        try:
            found = ranks.ask("begin", row=row)
            error = found[0].get("error")
        except BenchmarkError as ended:
            if not row.startswith("DeepSpeed"):
                raise
            error = processes.last_words(ended)
        if error:
            self.broken[row] = error
            console.print(f"{row} does not run here: {error}", highlight=False, markup=False)
            return
        check_losses(row, [x["losses"] for x in found], expected)
        self._there[row] = ranks
        if row in ZEROFN:
            self.planned[row] = found[0]["planned"]
        console.print(f"{row} is there", highlight=False)

    def _turns(self, links: dict[str, Link]) -> Iterator[tuple[str, list[str]]]:
        """(link, rows in the order of this round), round by round; rounds of links alternate."""
        rounds = {name: self.options.rounds or link.rounds[self.world] for name, link in links.items()}
        apart = {row: max(1, STEPS_APART // every) for row in self._there if (every := every_of(row))}
        for number in range(max(rounds.values())):
            rows = [row for row in self._there if number < apart.get(row, number + 1)]
            for name in links:
                if number < rounds[name]:
                    yield name, in_turn(rows, number)

    def _step(self, row: str, link: str, steps: int, hosts: Hosts | Loopback, console: Console) -> dict[str, Any]:
        ranks = self._there[row].ask("step", row=row, num=every_of(row) or steps)
        # The loopback interface counts what all ranks send, a cable what its own does.
        sent = statistics.fmean(x["sent"] for x in ranks) / (self.world if hosts.interface == LOOPBACK else 1)
        found = {"ms": max(x["ms"] for x in ranks), "sent": sent, "counted": ranks[0]["counted"]}
        line = f"{link:<11} {row:<24} {found['ms']:.0f} ms, {found['sent'] / MB:.1f} MB"
        console.print(line, highlight=False)
        return found


def reference(world: int, options: argparse.Namespace) -> list[float]:
    """The losses of the first steps in one process that has all ranks' tokens."""
    command = [*program(options.zerofn_python, "benchmarks.step.worker"), "reference", "--rank", "0", "--port", "0"]
    command += ["--world", str(world), "--workload", options.workload, "--steps", str(WARMUP_STEPS)]
    return processes.run("reference", [command])[0]["losses"][:WARMUP_STEPS]


def check_losses(row: str, ranks: list[list[float]], expected: list[float]) -> None:
    """Raise `BenchmarkError` if a row trains another model than the reference. `ranks`: the losses of each; of ranks
    that train apart, only the first ones are those of one process.
    """
    exact, alike = row in (PLAIN, "FSDP2", UNCODED), 1 if every_of(row) else len(expected)
    ranks, expected = [losses[:alike] for losses in ranks], expected[:alike]
    for step, (losses, loss) in enumerate(zip(zip(*ranks, strict=True), expected, strict=True)):
        came = statistics.fmean(losses)
        if not abs(came - loss) <= (TOLERANCE if exact else CODED_TOLERANCE) * abs(loss):
            raise BenchmarkError(f"{row}: the loss of step {step} is {came:.6f}, and plain torch has {loss:.6f}.")


def checks(cells: dict[str, Any]) -> list[Check]:
    """What must hold of the cells that were measured."""
    out = []
    for row, peer, link, limit in TIME:
        rows, name = cells.get("2", {}).get("rows", {}), f"2 ranks, {link}: {row} / {peer}, ms/step"
        if link not in rows.get(row, {}) or link not in rows.get(peer, {}):
            out.append(Check(name, "not measured", None, limit))
            continue
        share = ratio([x["ms"] for x in rows[row][link]], [x["ms"] for x in rows[peer][link]])
        out.append(Check(name, str(share), share.median, limit))
    for world, cell in cells.items():
        planned = cell["planned"]
        for row, limit in PLANNED.items():
            if {row, UNCODED} <= planned.keys():
                share = planned[row] / planned[UNCODED]
                out.append(Check(f"{world} ranks: {row} / {UNCODED}, bytes planned", f"{share:.3f}", share, limit))
        out += [check for row in planned for check in _exact(world, row, planned[row], cell["rows"][row])]
    return out


def _exact(world: str, row: str, planned: float, links: dict[str, list[dict[str, Any]]]) -> Iterator[Check]:
    """Bytes that were sent beside those that were planned, on the link where they differ most."""
    counted = max(abs(x["counted"] - planned) for rounds in links.values() for x in rounds)
    yield Check(f"{world} ranks, {row}: bytes planned and not sent, or sent and not planned", f"{counted}", counted, 0)
    medians = (statistics.median(x["sent"] for x in rounds) for rounds in links.values())
    share = max((x / planned for x in medians), key=lambda x: abs(x - 1))
    name = f"{world} ranks, {row}: bytes by the interface over bytes planned, less 1"
    yield Check(name, f"{share - 1:.4f}", abs(share - 1), INTERFACE_SLACK)


def table(world: str, cell: dict[str, Any], parameters: int) -> Table:
    """A cell, as it is printed."""
    title = f"A step of {world} ranks: Llama of {parameters / 1e6:.1f} M parameters, fp32, AdamW"
    out = Table(title=title, caption=f"Ratio: to {PLAIN} in the same round, with the 95 % interval of its median.")
    rows = cell["rows"]
    links = list(rows[PLAIN])
    out.add_column("system", no_wrap=True)
    timed = [f"{link}\n{what}" for link in links for what in ("ms/step", f"of {PLAIN}'s")]
    for name in (*timed, "sent\nMB/rank", "planned\nMB/rank"):
        out.add_column(name, justify="right", no_wrap=True)
    for row, found in rows.items():
        figures = []
        for link in links:
            times, plain = ([x[which] for x in rows[row][link]] for which in ("ms", "plain_ms"))
            figures += [f"{statistics.median(times):.0f}", str(ratio(times, plain))]
        sent = statistics.median(x["sent"] for rounds in found.values() for x in rounds)
        planned = f"{cell['planned'][row] / MB:.1f}" if row in cell["planned"] else "-"
        style = "bold green" if row in ZEROFN else None
        out.add_row(row, *figures, f"{sent / MB:.1f}", planned, style=style)
    for row, error in cell["broken"].items():
        out.caption = f"{out.caption}\n{row} does not run here: {error}"
    return out


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, help="on each link, instead of more on faster ones")
    add("--worlds", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    add("--only", nargs="+", default=[""], help=f"rows by part of their names, beside {PLAIN}")
    add("--workload", choices=WORKLOADS, default="small")
    add_end(parser, "wire_network.json")
    add_pythons(parser)
    return parser.parse_args()


def measured(world: int, options: argparse.Namespace, why_not: str, console: Console) -> dict[str, Any]:
    """A cell as it is written. `why_not`: why there are no throttled links."""
    rows = [x for x in (*PEERS, *ZEROFN) if x == PLAIN or any(part.lower() in x.lower() for part in options.only)]
    cell = Cell(world, rows, options)
    with contextlib.nullcontext(Loopback()) if why_not else throttled(world) as hosts:
        cell.run(hosts, UNLIMITED if why_not else LINKS, console)
    return {"surroundings": report.surroundings(), "rows": cell.found, "planned": cell.planned, "broken": cell.broken}


def main() -> int:
    options, console = arguments(), Console(width=190 if not sys.stdout.isatty() else None)
    work = WORKLOADS[options.workload]
    run: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    cells = run.get("cells", {}) if run.get("workload") == options.workload else {}
    why_not = unavailable()
    if why_not:
        console.print(why_not, highlight=False)
    try:
        versions = check_versions(options) if Path(options.peers_python).exists() else {}
        for world in options.worlds:
            cells[str(world)] = measured(world, options, why_not, console)
            written = {"versions": versions, "workload": work.name, "parameters": work.num_parameters(), "cells": cells}
            report.write_json(options.out, written, checks(cells))  # what comes next may fail
    except BenchmarkError as error:
        print(f"benchmark failed: {error}", file=sys.stderr)
        return 1
    for world, cell in cells.items():
        console.print(table(world, cell, work.num_parameters()))
    held = checks(cells)
    console.print(report.check_table(held))
    return report.conclude(options.out, written, held, options.check)


if __name__ == "__main__":
    sys.exit(main())
