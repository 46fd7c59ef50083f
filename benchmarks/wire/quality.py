"""python -m benchmarks.wire.quality: what sending less costs in loss and gains in time, with the demo GPT.

`examples/gpt.py` on two ranks, with each codec, by 1-bit Adam and by DiLoCo, and beside DDP with PowerSGD. All have the
same seeds and tokens, so final validation losses differ in pairs. Training runs without a limit. Then steps of all rows
run in turns at 100 Mbit/s (`links.py`), and the picture puts both together: the loss of each step at the time that so
many steps take on that network. Without root there are losses alone. Writes JSON, and a picture beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import report
from benchmarks.common.check import Check
from benchmarks.common.options import add_end
from benchmarks.common.processes import HERE, BenchmarkError, program
from benchmarks.common.turns import Ranks, in_turn
from benchmarks.wire.curves import (
    APART,
    INT8,
    PLAIN,
    POWER_SGD,
    ROWS,
    SIGNS,
    SIGNS_AFTER_INT8,
    TIMED,
    TRAINED,
    UNCODED,
    WORSE,
    losses,
    minutes_to,
    over_time,
    reached_by_all,
)
from benchmarks.wire.links import Hosts, Loopback, commands, throttled, unavailable
from benchmarks.wire.rows import every_of

matplotlib.use("Agg")
from matplotlib import pyplot

WORLD, MBITS, STEPS_OF_A_TURN = 2, 100, 3


@contextlib.contextmanager
def running(hosts: Hosts | Loopback, options: argparse.Namespace) -> Iterator[tuple[Ranks, dict[str, int]]]:
    """The ranks, and how many tokens they have."""
    command = [*program(sys.executable, "benchmarks.wire.gpt_rank"), "--steps", str(options.steps)]
    command += ["--every", str(options.every), "--folder", str(options.folder)]
    with Ranks("the demo GPT", commands(hosts, command, WORLD)) as ranks:
        yield ranks, ranks.ask("begin")[0]


def trained(options: argparse.Namespace, earlier: dict[str, Any], console: Console) -> dict[str, Any]:
    """Losses of every row and seed; those of an earlier run stay."""
    found: dict[str, list[dict[str, Any]]] = {row: earlier.get("trained", {}).get(row, []) for row in TRAINED}
    if earlier and (earlier["steps"], earlier["seeds"]) != (options.steps, options.seeds):
        raise BenchmarkError(f"{options.out} has {earlier['seeds']} seeds of {earlier['steps']} steps")
    missing = [row for row in TRAINED if not found[row]]
    with running(Loopback(), options) as (ranks, tokens):
        for seed, row in itertools.product(range(options.seeds), missing):
            found[row].append(ranks.ask("train", row=row, seed=seed)[0])
            loss, ms = found[row][-1]["validation"][-1][1], found[row][-1]["ms"]
            console.print(f"seed {seed}  {row:<24} {loss:.4f} after {ms:.0f} ms/step", highlight=False)
    return {"steps": options.steps, "seeds": options.seeds, "tokens": tokens, "trained": found}


def timed(options: argparse.Namespace, console: Console) -> dict[str, list[float]]:
    """Milliseconds of a step of every row, round by round, at 100 Mbit/s."""
    found: dict[str, list[float]] = {row: [] for row in TIMED}
    with throttled(WORLD) as hosts, running(hosts, options) as (ranks, _):
        for row in TIMED:
            ranks.ask("ready", row=row)
        hosts.throttle(MBITS)
        for number in range(options.rounds):
            for row in in_turn(TIMED, number):
                num = every_of(row) or STEPS_OF_A_TURN
                found[row].append(max(x["ms"] for x in ranks.ask("time", row=row, num=num)))
    for row, times in found.items():
        console.print(f"{row:<24} {statistics.median(times):.0f} ms/step at {MBITS} Mbit/s", highlight=False)
    return found


def differences(trained: dict[str, list[dict[str, Any]]], row: str) -> list[float]:
    """Final validation loss less that without a codec, seed by seed."""
    pairs = zip(trained[row], trained[UNCODED], strict=True)
    return [mine["validation"][-1][1] - plain["validation"][-1][1] for mine, plain in pairs]


def checks(run: dict[str, Any]) -> list[Check]:
    """What must hold of a finished run."""
    out = []
    for row, limit in WORSE.items():
        found = differences(run["trained"], row)
        mean = statistics.fmean(found)
        shown = f"{mean:+.4f} ({', '.join(f'{x:+.4f}' for x in found)})"
        out.append(Check(f"{row}: final validation loss less that of {UNCODED}", shown, mean, limit))
    for row in (INT8, SIGNS_AFTER_INT8):
        what = f"{row} / {POWER_SGD}, time to the same loss at {MBITS} Mbit/s"
        if not run["ms at 100 Mbit/s"][PLAIN]:
            out.append(Check(what, "not measured", None, 1.0, strict=True))
            continue
        target = max(losses(run, x)[-1][1] for x in (row, POWER_SGD))
        share = minutes_to(over_time(run, row), target) / minutes_to(over_time(run, POWER_SGD), target)
        out.append(Check(f"{what} of {target:.3f}", f"{share:.3f}", share, 1.0, strict=True))
    return out


def table(run: dict[str, Any]) -> Table:
    """A run, as it is printed."""
    has_times = bool(run["ms at 100 Mbit/s"][PLAIN])
    title = f"The demo GPT, {run['steps']} steps of {WORLD} ranks, {run['seeds']} seeds: validation loss"
    out = Table("system", title=title)
    for name in ("final", f"less {UNCODED}", f"ms/step\n{MBITS} Mbit/s", f"minutes\nto {reached_by_all(run):.3f}"):
        out.add_column(name, justify="right")
    for row in ROWS:
        difference = statistics.fmean(differences(run["trained"], row)) if row in TRAINED else None
        figures = [f"{losses(run, row)[-1][1]:.4f}", "-" if difference is None else f"{difference:+.4f}", "-", "-"]
        if has_times:
            figures[2] = f"{statistics.median(run['ms at 100 Mbit/s'][row]):.0f}"
            figures[3] = f"{minutes_to(over_time(run, row), reached_by_all(run)):.2f}"
        out.add_row(row, *figures, style="bold green" if row.startswith("ZeroFn") else None)
    return out


# row -> (what it is called, its colour): those whose lines would lie on another's are left out
DRAWN = {
    PLAIN: ("DDP", "#6c8ebf"),
    POWER_SGD: (f"DDP + PowerSGD, rank {POWER_SGD.split()[-1]}", "#1f3a6e"),
    UNCODED: ("ZeroFn, stage 3", "#e9a3ab"),
    INT8: ("ZeroFn, stage 3, int8", "#d1495b"),
    SIGNS: ("ZeroFn, 1-bit Adam", "#e08a1e"),
    SIGNS_AFTER_INT8: ("ZeroFn, stage 1, int8, then 1-bit Adam", "#2a9d8f"),
    APART: ("ZeroFn, DiLoCo, met every 10 steps", "#7d1128"),
}


def draw(run: dict[str, Any], path: Path) -> None:
    """The validation loss over minutes at 100 Mbit/s."""
    figure, axes = pyplot.subplots(figsize=(8.5, 5), layout="constrained")
    target = reached_by_all(run)
    for row, (name, colour) in DRAWN.items():
        curve = over_time(run, row)
        reached = minutes_to(curve, target)
        axes.plot(*zip(*curve, strict=True), color=colour, linewidth=2.2, label=f"{name}: {reached:.2f} min")
        axes.plot([reached], [target], "o", color=colour, markersize=7, zorder=3)
    axes.axhline(target, color="#888888", linestyle=":", linewidth=1, zorder=0)
    axes.set(xlabel="minutes of training at 100 Mbit/s", ylabel="validation loss, nats per token")
    axes.set_xlim(left=0)
    axes.set_title("A small GPT, trained by two ranks over 100 Mbit/s", loc="left", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title=f"time to a loss of {target:.2f}", alignment="left")
    told = f"{run['steps']} steps, seeds: {run['seeds']}. Losses: runs without a limit; DDP has those of stage 3.\n"
    told += "Minutes are steps times a step's time, measured at 100 Mbit/s."
    figure.supxlabel(told, fontsize=8, color="#555555", x=0.02, ha="left")
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=300)
    add("--seeds", type=int, default=3)
    add("--every", type=int, default=50, help="steps between validations")
    add("--rounds", type=int, default=7, help=f"turns of {STEPS_OF_A_TURN} steps at {MBITS} Mbit/s")
    add("--keep", action="store_true", help="train only rows of which --out has no losses from an earlier run")
    add("--folder", type=Path, default=HERE.parent / "runs" / "wire_quality", help="where tokens lie")
    add_end(parser, "wire_quality.json")
    return parser.parse_args()


def main() -> int:
    options, console = arguments(), Console(width=150 if not sys.stdout.isatty() else None)
    why_not = unavailable()
    if why_not:
        console.print(why_not, highlight=False)
    try:
        earlier = json.loads(options.out.read_text()) if options.keep else {}
        run = trained(options, earlier, console)
        run["ms at 100 Mbit/s"] = dict.fromkeys(TIMED, []) if why_not else timed(options, console)
    except BenchmarkError as error:
        print(f"benchmark failed: {error}", file=sys.stderr)
        return 1
    run = {"surroundings": report.surroundings(), "torch": torch.__version__} | run
    held = checks(run)
    console.print(table(run))
    console.print(report.check_table(held))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if not why_not:
        draw(run, options.out.with_suffix(".png"))
    return report.conclude(options.out, run, held, options.check)


if __name__ == "__main__":
    sys.exit(main())
