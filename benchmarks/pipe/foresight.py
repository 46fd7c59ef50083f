"""python -m benchmarks.pipe.foresight   (make bench): simulated schedules beside executed ones, on 2 gloo ranks.

Each step is run with a clock at every operation: so there are the begin and end of each action, and what F, I and W of
each stage take on average over the microbatches of that step, from which the schedule is simulated. Transfers are taken
as free: half a megabyte takes less than a hundredth of an action, and what a rank itself spends on sending counts to
the action before it. Beside it each rank's planned peak, and that of the host's allocator. Writes JSON and a picture:
one step as it was, and as simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

from benchmarks.common import processes, report
from benchmarks.common.check import Check
from benchmarks.common.options import add_end
from benchmarks.common.processes import HERE, program
from benchmarks.common.statistic import interval
from benchmarks.pipe.rows import WORKLOADS, begun
from zerofn.schedules import Costs, Timeline, make, simulate
from zerofn.schedules.actions import Action
from zerofn.schedules.simulate import Span

matplotlib.use("Agg")
from matplotlib import pyplot

RANKS = 2
SCHEDULES, NUMBERS = ("1f1b", "zb-h1", "interleaved", "zbv"), (4, 8, 16)
SECONDS, BYTES = 0.05, 0.001  # simulated and planned may differ from what came by these parts of it
DRAWN = 8  # microbatches of the steps in the picture
LABELLED = 0.012  # of a step: shorter actions have no room for their label
COLOURS = {"F": "#6c8ebf", "B": "#82b366", "I": "#82b366", "W": "#d6b656"}
Actions = list[tuple[str, float, float]]  # action, begin and end, in seconds since the epoch


def actions_of(profile: Any) -> Actions:
    """A rank's actions in a measured step. What it does behind a piece of an action, until it waits, counts to it; and
    so does what it prepares before the piece.
    """
    found: Actions = []
    count: Counter[str] = Counter()
    begin, after = None, False
    for node, start, seconds in profile.nodes:
        piece = getattr(node.args[0], "target", "") if node.args else ""
        stop = start + seconds
        if str(piece).startswith("stage_"):
            _, stage, kind, *_ = piece.split("_")
            name = f"{stage}{kind}"
            found.append((f"{name}{count[name]}", start if begin is None else begin, stop))
            count[name] += 1
            begin, after = None, True
        elif "wait" in str(node.target):
            begin, after = None, False
        elif after and any(x in str(node.target) for x in ("add", "send", "getitem")):
            found[-1] = (*found[-1][:2], stop)
        else:
            begin, after = start if begin is None else begin, False
    return [(name, profile.began + start, profile.began + stop) for name, start, stop in found]


def child(rank: int, port: int, workload: str, schedule: str, number: int, steps: int) -> dict[str, Any]:
    """What one rank measured: its actions in each step, its peak, planned and measured."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    work = WORKLOADS[workload]
    held, compiled, _ = begun(work, schedule, RANKS, microbatches=number)
    tokens = torch.arange(number * work.seq).view(number, work.seq) * 7 % work.vocab
    out: dict[str, Any] = {"steps": []}
    for _ in range(2):
        held[0], _ = compiled(held[0], tokens)
    for _ in range(steps):
        dist.barrier()
        (held[0], _), found = compiled.profile(held[0], tokens)
        out["steps"].append(actions_of(found))
    out |= {"peak": found.peak, "planned": found.plan.memory().total}
    dist.barrier()
    dist.destroy_process_group()
    return out


def executed(schedule: str, number: int, ranks: list[Actions]) -> Timeline:
    """A step as it was. Pieces of one action are joined: I and W where a schedule has B."""
    order = make(schedule, RANKS, number)
    first = min(begin for actions in ranks for _, begin, _ in actions)
    spans = []
    for wanted, actions in zip(order.orders, ranks, strict=True):
        whole, mine = set(wanted), {}
        for name, begin, stop in actions:
            action = Action.parse(name)
            if action not in whole:
                action = action._replace(kind="B")
            begin = mine[action].start + first if action in mine else begin
            mine[action] = Span(action, begin - first, stop - first)
        if list(mine) != list(wanted):
            raise RuntimeError(f"{schedule}, m = {number}: a rank ran {list(map(str, mine))}, not {order}")
        spans.append(tuple(mine.values()))
    last, nothing = max(span.stop for rank in spans for span in rank), (0.0,) * RANKS
    idle = tuple(1 - sum(x.stop - x.start for x in rank) / last for rank in spans)
    return Timeline(order, tuple(spans), last, idle, nothing, nothing)


def simulated(line: Timeline) -> Timeline:
    """The same schedule from what its actions took, by stage and kind. A B stands as I without W."""
    took: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for rank in line.spans:
        for action, start, stop in rank:
            took[action.stage, "I" if action.kind == "B" else action.kind].append(stop - start)
    n = line.schedule.num_stages
    f, i, w = (tuple(statistics.fmean(took.get((s, kind)) or [0.0]) for s in range(n)) for kind in "FIW")
    return simulate(line.schedule, Costs(f, i, w, (0.0,) * (n - 1), (0.0,) * (n - 1), (0.0,) * n, (0.0,) * n))


def row(options: argparse.Namespace, schedule: str, number: int) -> tuple[dict[str, Any], list[Timeline]]:
    """What came of a schedule; and its step of the middle makespan, as it was and simulated."""
    label = f"{schedule}, m = {number}"
    command = [*program(sys.executable, "benchmarks.pipe.foresight"), "--child", schedule, "--number", str(number)]
    command += ["--steps", str(options.steps), "--port", str(processes.free_port()), "--workload", options.workload]
    ranks = processes.run(label, [[*command, "--rank", str(rank)] for rank in range(RANKS)])
    lines = [executed(schedule, number, list(each)) for each in zip(*(rank["steps"] for rank in ranks), strict=True)]
    expected = [simulated(line) for line in lines]
    middle = sorted(range(len(lines)), key=lambda k: lines[k].makespan)[len(lines) // 2]
    found = {
        "executed": [line.makespan for line in lines],
        "simulated": [line.makespan for line in expected],
        "idle": [statistics.fmean(line.idle) for line in lines],
        "peak": [rank["peak"] for rank in ranks],
        "planned": [rank["planned"] for rank in ranks],
    }
    return found, [lines[middle], expected[middle]]


def checks(rows: dict[str, dict[str, Any]]) -> list[Check]:
    """What must hold."""
    out = []
    for label, found in rows.items():
        ratio = interval([a / b for a, b in zip(found["simulated"], found["executed"], strict=True)])
        out.append(Check(f"{label}: makespan, |simulated / executed - 1|", str(ratio), abs(ratio.median - 1), SECONDS))
        for rank, (planned, peak) in enumerate(zip(found["planned"], found["peak"], strict=True)):
            what = f"{label}, rank {rank}: peak, |planned / measured - 1|"
            out.append(Check(what, f"{planned / peak:.6f}", abs(planned / peak - 1), BYTES))
    return out


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """All rows: medians."""
    out = Table("schedule", "executed ms", "simulated ms", "idle", "planned MB", "measured MB")
    for label, found in rows.items():
        times = (f"{1e3 * statistics.median(found[x]):.1f}" for x in ("executed", "simulated"))
        idle = f"{statistics.median(found['idle']):.3f}"
        out.add_row(label, *times, idle, *(_megabytes(found[x]) for x in ("planned", "peak")))
    return out


def _megabytes(values: list[int]) -> str:
    return ", ".join(f"{x / 1e6:.3f}" for x in values)


def draw(pairs: dict[str, list[Timeline]], path: Path) -> None:
    """Each schedule's step as it was, above the simulated one."""
    figure, axes = pyplot.subplots(
        2 * len(pairs), 1, figsize=(12, 2.2 * len(pairs)), layout="constrained", squeeze=False
    )
    for k, (label, lines) in enumerate(pairs.items()):
        end = max(line.makespan for line in lines)
        for axis, line, what in zip(axes[2 * k : 2 * k + 2, 0], lines, ("executed", "simulated"), strict=True):
            for rank, spans in enumerate(line.spans):
                for (stage, kind, number), start, stop in spans:
                    odd = stage // RANKS % 2
                    axis.barh(
                        rank, 1e3 * (stop - start), 0.9, 1e3 * start, color=COLOURS[kind], edgecolor="white",
                        hatch="//" if odd else None, linewidth=0.5,
                    )  # fmt: skip
                    if stop - start > LABELLED * end:
                        axis.text(500 * (start + stop), rank, f"{kind}{number}", ha="center", va="center", fontsize=5)
            axis.set_title(f"{label}, {what}: {1e3 * line.makespan:.0f} ms", loc="left", fontsize=8)
            axis.set_xlim(0, 1e3 * end)
            axis.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)], fontsize=7)
            axis.tick_params(axis="x", labelsize=7)
            axis.invert_yaxis()
            axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("ms; hatched: a rank's second stage", fontsize=7)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--numbers", type=int, nargs="+", default=list(NUMBERS), help="of microbatches")
    parser.add_argument("--workload", choices=WORKLOADS, default="small")
    add_end(parser, "pipe_foresight.json")
    parser.add_argument("--picture", type=Path, default=HERE / "results" / "pipe.png")
    for name in ("child", "rank", "port", "number"):
        parser.add_argument(f"--{name}", type=str if name == "child" else int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        found = child(args.rank, args.port, args.workload, args.child, args.number, args.steps)
        print("RESULT " + json.dumps(found), flush=True)
        os._exit(0)
    console, rows, drawn = Console(soft_wrap=True), {}, {}
    for schedule in args.schedules:
        for number in args.numbers:
            label = f"{schedule}, m = {number}"
            rows[label], lines = row(args, schedule, number)
            if number == (DRAWN if DRAWN in args.numbers else args.numbers[0]):
                drawn[label] = lines
                for what, line in zip(("executed", "simulated"), lines, strict=True):
                    console.print(f"{label}, {what}\n{line.text(120)}", highlight=False, markup=False)
    console.print(table(rows))
    draw(drawn, args.picture)
    held = checks(rows)
    console.print(report.check_table(held))
    texts = {label: [line.text(120) for line in lines] for label, lines in drawn.items()}
    run = {"surroundings": report.surroundings(), "rows": rows, "timelines": texts}
    return report.conclude(args.out, run, held, args.check)


if __name__ == "__main__":
    sys.exit(main())
