"""python -m benchmarks.step.step   (make bench): a training step in ZeroFn and in the systems beside it.

Same model, tokens and AdamW everywhere. Each round starts every system once, in an order that
rotates, as fresh processes of one thread: ms/step, peak memory, state and bytes sent come from
there, and ratios are of one round. A system that is missing, dies, or whose loss is not that of
the global batch ends the benchmark with a sentence. Writes JSON and a picture beside the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import limits, picture, processes, report
from benchmarks.common.options import add_end, add_pythons
from benchmarks.common.peers import KEEPING, PEERS
from benchmarks.common.processes import BenchmarkError, program
from benchmarks.common.turns import in_turn
from benchmarks.common.workload import WORKLOADS
from benchmarks.common.zerofn_rows import ACCUMULATING
from benchmarks.common.zerofn_rows import ROWS as ZEROFN
from benchmarks.step.onerank import HANDWRITTEN

WORLD = 2
LOSS_TOLERANCE = 1e-3  # relative; systems sum in different orders
# Pseudo-rows, every loop in one process (onerank.py): steps of a turn; --steps is the turns.
ONE_RANK = {"one rank small": 1, "one rank tiny": 20}
SYSTEMS = [*PEERS, *ZEROFN, *ONE_RANK]


class Bench:
    """The options, the modules each system imports, and how a system's processes are started."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.reference: list[float] = []

    def python(self, system: str) -> str:
        return self.options.peers_python if system in PEERS | KEEPING else self.options.zerofn_python

    def ranks(self, system: str, workload: str, steps: int, preload: Path | None = None) -> list[dict[str, Any]]:
        """One run of a row: what each rank measured."""
        world = 1 if system == "one process" else WORLD
        command = [*program(self.python(system), "benchmarks.step.worker"), system]
        command += ["--world", str(world), "--port", str(processes.free_port())]
        command += ["--workload", workload, "--steps", str(steps)]
        command += ["--preload", str(preload)] if preload else []
        # The reference trains on all ranks' tokens in one process.
        num_processes = 1 if system == "reference" else world
        commands = [[*command, "--rank", str(rank)] for rank in range(num_processes)]
        return processes.run(system, commands)

    def imports_of(self, system: str) -> Path:
        return self.folder / (system.replace(" ", "-") + ".json")

    def try_out(self, systems: list[str], console: Console) -> None:
        """Start each system once on a small model: a missing one is found before the long part.

        What it imports on the way is written down, and imported first when memory is measured.
        """
        for system in systems:
            console.print(f"trying out {system}", highlight=False)
            if system in ONE_RANK:
                self.one_rank(system, "tiny", 1)
                continue
            first = self.ranks(system, "smoke", 1)[0]
            self.imports_of(system).write_text(json.dumps(first["late_imports"]))

    def row(self, system: str, preload: Path | None = None) -> dict[str, Any]:
        """One round of one row, over its ranks."""
        options = self.options
        ranks = self.ranks(system, options.workload, options.steps, preload)
        losses = [statistics.fmean(step) for step in zip(*(r["losses"] for r in ranks), strict=True)]
        if len(ranks) > 1:
            self.check_losses(system, losses)
        return {
            "ms": max(r["ms"] for r in ranks),
            "peak": max(r["peak"] for r in ranks),
            "imports": max(r["imports"] for r in ranks),
            "beyond": max(r["peak"] - r["imports"] for r in ranks),
            "beyond_of_setup": max(r["peak_of_setup"] - r["imports"] for r in ranks),
            "state": max(r["state"] for r in ranks),
            "allocated": max(r["allocated"] for r in ranks),
            "late_imports": max(len(r["late_imports"]) for r in ranks),
            # The counter is the whole machine's: each rank's share of what all sent.
            "wire": ranks[0]["wire"] / len(ranks),
            "loss": losses[-1],
        }

    def sent_accumulating(self, systems: list[str]) -> dict[str, float]:
        """Bytes a rank sends in a step of several microbatches, for the stages among `systems`."""
        wanted = [name for name in ACCUMULATING if name.partition(" of ")[0] in systems]
        return {name: self.row(name)["wire"] for name in wanted}

    def check_losses(self, system: str, losses: list[float]) -> None:
        for step, (came, expected) in enumerate(zip(losses, self.reference, strict=True)):
            if not abs(came - expected) <= LOSS_TOLERANCE * abs(expected):
                raise BenchmarkError(
                    f"{system}: the loss of step {step} is {came:.6f}, and plain torch on the "
                    f"global batch has {expected:.6f}. It does not train the same model, so its "
                    "row would mean nothing."
                )

    def one_rank(self, system: str, workload: str, turns: int) -> dict[str, Any]:
        command = [*program(self.options.zerofn_python, "benchmarks.step.onerank")]
        command += ["--workload", workload, "--turns", str(turns)]
        command += ["--block", str(ONE_RANK[system])]
        (loops,) = processes.run(system, [command])
        by_hand = loops[HANDWRITTEN]
        found = {}
        for name, loop in loops.items():
            pairs = list(zip(loop["losses"], by_hand["losses"], strict=True))
            steps_ratio = [a / b for a, b in zip(loop["ms"], by_hand["ms"], strict=True)]
            found[name] = {
                "ms": statistics.median(loop["ms"]),
                "ratios": statistics.median(steps_ratio),
                "equal": all(a == b for a, b in pairs),
                "difference": max(abs(a - b) / abs(b) for a, b in pairs),
            }
        return found


def check_versions(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Both environments' versions; raises unless torch and transformers are the same in both."""
    program = (
        "import importlib.metadata as m, json\n"
        "names = 'torch transformers deepspeed fairscale zerofn numpy'.split()\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({n: found[n] for n in names if n in found}))"
    )
    versions = {}
    for kind, python in (("peers", options.peers_python), ("zerofn", options.zerofn_python)):
        try:
            done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise BenchmarkError(
                f"{python}, the Python of the {kind} environment, does not run: {error}. "
                "`make bench` makes both environments."
            ) from error
        versions[kind] = json.loads(done.stdout)
    for name in ("torch", "transformers"):
        pair = [versions[kind].get(name) for kind in ("peers", "zerofn")]
        if pair[0] != pair[1] or None in pair:
            raise BenchmarkError(
                f"{name} is {pair[0]} in the peers' environment and {pair[1]} in ZeroFn's; they "
                f"must be the same: {options.peers_python} -m pip install {name}=={pair[1]}"
            )
    return versions


def selected(only: str | None) -> list[str]:
    """The rows that `--only` names by part of their names, all without it."""
    if not only:
        return SYSTEMS
    wanted = [part.strip().lower() for part in only.split(",")]
    for part in wanted:
        if not any(part in name.lower() for name in SYSTEMS):
            raise BenchmarkError(f"--only {part!r} names no row; the rows are {', '.join(SYSTEMS)}.")
    return [name for name in SYSTEMS if any(part in name.lower() for part in wanted)]


def measure_rounds(bench: Bench, systems: list[str], console: Console) -> dict[str, list[dict]]:
    """Every system once a round, starting with another one each round."""
    found: dict[str, list[dict]] = {system: [] for system in systems}
    for number in range(bench.options.rounds):
        for system in in_turn(systems, number, bench.options.rounds):
            if system in ONE_RANK:
                workload = "tiny" if "tiny" in system else bench.options.workload
                result = bench.one_rank(system, workload, bench.options.steps)
                what = f"{result['ZeroFn 3']['ratios']:.3f} of the hand-written loop at stage 3"
            else:
                result = bench.row(system, bench.imports_of(system))
                what = f"{result['ms']:.0f} ms, {result['beyond'] / 1e6:.0f} MB beyond imports"
            found[system].append(result)
            line = f"round {number + 1}/{bench.options.rounds}  {system:<24} {what}"
            console.print(line, highlight=False)
    return found


def columns(rounds: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {key: [one[key] for one in rounds] for key in rounds[0]}


def collect(found: dict[str, list[dict]], options: argparse.Namespace, versions: dict) -> dict:
    """The run as it is written: settings, and for every row a list over rounds of each figure."""
    one_rank: dict[str, dict[str, Any]] = {}
    for system in filter(found.__contains__, ONE_RANK):
        loops = {name: columns([one[name] for one in found[system]]) for name in found[system][0]}
        for loop in loops.values():
            loop["equal"], loop["difference"] = all(loop["equal"]), max(loop["difference"])
        one_rank[system.rpartition(" ")[2]] = loops
    return {
        "surroundings": report.surroundings(),
        "versions": versions,
        "workload": options.workload,
        "parameters": WORKLOADS[options.workload].num_parameters(),
        "world": WORLD,
        "num_rounds": options.rounds,
        "num_steps": options.steps,
        "rows": {s: columns(rounds) for s, rounds in found.items() if s not in ONE_RANK},
        "one_rank": one_rank,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a run, after two")
    parser.add_argument("--only", help="rows by part of their names, comma between")
    parser.add_argument("--workload", choices=WORKLOADS, default="small")
    add_end(parser)
    add_pythons(parser)
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    return options


def bench(options: argparse.Namespace, console: Console) -> list[limits.Check]:
    systems = selected(options.only)
    versions = check_versions(options)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        bench.try_out(systems, console)
        bench.reference = bench.ranks("reference", options.workload, options.steps)[0]["losses"]
        run = collect(measure_rounds(bench, systems, console), options, versions)
        run["accumulating"] = bench.sent_accumulating(systems)
    found = limits.checks(run)
    # Only a whole run of the real model may stand where the real results stand.
    name = "step" if systems == SYSTEMS and options.workload == "small" else "step-partial"
    report.show(run, found, console)
    report.write_json(options.out / f"{name}.json", run, found)
    if run["rows"]:
        picture.draw(run, options.out / f"{name}.png")
    console.print(f"written: {options.out / name}.json and .png", highlight=False)
    return found


def main() -> int:
    options, console = arguments(), Console(width=150 if not sys.stdout.isatty() else None)
    try:
        found = bench(options, console)
    except BenchmarkError as error:
        print(f"benchmark failed: {error}", file=sys.stderr)
        return 1
    missed = [check.what for check in found if not check.kept]
    if options.check and missed:
        print("missed or not measured: " + "; ".join(missed), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
