"""python -m benchmarks.step.wire   (make bench, as root): a step whose transfers are coded, on throttled links.

Two ranks, each in a network namespace of its own, whose cable sends at most 1 or 10 Gbit/s (tc's token bucket). One
process a rank has both states, with and without `shard(wire="bf16")`, and steps of them run in turns, so a ratio is of
one round. Bytes are what the kernel has counted on the cable; planned ones are the plan's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.common import processes, report
from benchmarks.common.limits import Check
from benchmarks.common.processes import HERE, BenchmarkError, program
from benchmarks.common.statistic import interval, ratio
from benchmarks.common.workload import WORKLOADS, batches

WORLD, STAGE, STEPS = 2, 3, 3
GBITS = (1, 10)
BYTES_LIMIT = 0.52  # of the bytes of float32
TIME_LIMIT = {1: 1.0, 10: 1.02}  # faster on the slow link, not slower beyond noise on the fast one
ADDRESS = "10.76.0.{}"


def do(command: str) -> None:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"{command}: {done.stderr.strip()} (network namespaces need root)")


@contextlib.contextmanager
def cable() -> Iterator[list[str]]:
    """Two network namespaces and a cable between them."""
    spaces = [f"zfwire{os.getpid()}-{rank}" for rank in range(WORLD)]
    try:
        for space in spaces:
            do(f"ip netns add {space}")
        do(f"ip link add eth0 netns {spaces[0]} type veth peer name eth0 netns {spaces[1]}")
        for rank, space in enumerate(spaces):
            do(f"ip -n {space} address add {ADDRESS.format(rank + 1)}/24 dev eth0")
            for each in ("lo", "eth0"):
                do(f"ip -n {space} link set {each} up")
        yield spaces
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)


def throttle(spaces: list[str], gbits: int) -> None:
    for space in spaces:
        do(f"tc -n {space} qdisc replace dev eth0 root tbf rate {gbits}gbit burst {gbits * 256}kb latency 100ms")


def rank_of(rank: int, workload: str, rounds: int) -> dict[str, Any]:
    """What a rank measures: seconds a step and bytes sent a step of each wire, by round; and the planned bytes."""
    os.environ.update(MASTER_ADDR=ADDRESS.format(1), MASTER_PORT="29471", GLOO_SOCKET_IFNAME="eth0")
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    import zerofn
    from benchmarks.common.zerofn_rows import train_step

    work = WORKLOADS[workload]
    init_state, step = train_step(work)
    (tokens,) = batches(work, rank, WORLD, 1)
    rows: dict[str, list[Any]] = {}
    found: dict[str, dict[str, list[float]]] = {}
    planned = {}
    for wire in (None, "bf16"):
        torch.manual_seed(0)
        state, compiled = zerofn.shard(init_state, stage=STAGE, wire=wire), zerofn.compile(step)
        planned[str(wire)] = compiled.lower(state, tokens).sent
        state, _ = compiled(state, tokens)
        rows[str(wire)], found[str(wire)] = [compiled, state], {"seconds": [], "sent": []}
    for turn in range(rounds):
        for wire in list(rows) if turn % 2 else reversed(rows):
            compiled, state = rows[wire]
            dist.barrier()
            before, start = sent_bytes(), time.perf_counter()
            for _ in range(STEPS):
                state, metrics = compiled(state, tokens)
            float(metrics["loss"])
            dist.barrier()
            found[wire]["seconds"].append((time.perf_counter() - start) / STEPS)
            found[wire]["sent"].append((sent_bytes() - before) / STEPS)
            rows[wire][1] = state
    parameters = sum(x.numel() for x in work.module().parameters())
    return {"wires": found, "planned": planned, "parameters": parameters}


def sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def measured(spaces: list[str], gbits: int, options: argparse.Namespace) -> dict[str, Any]:
    throttle(spaces, gbits)
    commands = []
    for rank, space in enumerate(spaces):
        # A namespace has its own counters in a /sys that is mounted inside of it, which `ip netns exec` does.
        command = ["ip", "netns", "exec", space, *program(sys.executable, "benchmarks.step.wire")]
        more = ["--rank", str(rank), "--workload", options.workload, "--rounds", str(options.rounds)]
        commands.append([*command, *more])
    return processes.run(f"{gbits} Gbit/s", commands)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workload", choices=WORKLOADS, default="small")
    parser.add_argument("--check", action="store_true", help="end with 1 if a limit is missed")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print("RESULT " + json.dumps(rank_of(options.rank, options.workload, options.rounds)), flush=True)
        return 0
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        with cable() as spaces:
            links = {gbits: measured(spaces, gbits, options) for gbits in GBITS}
    except BenchmarkError as error:
        print(f"benchmark failed: {error}", file=sys.stderr)
        return 1
    table = Table(title=f"A step at stage {STAGE} of {WORLD} ranks: transfers in float32 and in bfloat16")
    for name in ("link", "float32, s/step", "bf16, s/step", "bf16 / float32", "bytes sent", "bytes planned"):
        table.add_column(name, justify="right")
    checks = []
    for gbits, run in links.items():
        plain, coded = run["wires"]["None"], run["wires"]["bf16"]
        faster, fewer = ratio(coded["seconds"], plain["seconds"]), ratio(coded["sent"], plain["sent"])
        planned = run["planned"]["bf16"] / run["planned"]["None"]
        seconds = (str(interval(x["seconds"])) for x in (plain, coded))
        table.add_row(f"{gbits} Gbit/s", *seconds, str(faster), str(fewer), f"{planned:.3f}")
        checks.append(Check(f"bf16 / float32 at {gbits} Gbit/s", str(faster), faster.median, TIME_LIMIT[gbits]))
        checks.append(Check(f"bytes planned, {gbits} Gbit/s", f"{planned:.3f}", planned, BYTES_LIMIT))
    console.print(table)
    console.print(report.check_table(checks))
    run = {"surroundings": report.surroundings(), "workload": options.workload, "world": WORLD, "stage": STAGE}
    run |= {"steps": STEPS, "links": {str(gbits): found for gbits, found in links.items()}}
    return report.conclude(options.out / "wire.json", run, checks, options.check)


if __name__ == "__main__":
    sys.exit(main())
