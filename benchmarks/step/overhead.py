"""python -m benchmarks.step.overhead   (make bench): what ZeroFn itself costs.

Capture and passes: seconds, and seconds a node, for a 12- and a 48-layer Llama at stage 3 of two
ranks, on a process group that moves nothing; once more with backend="inductor", whose regions nothing
has compiled before. Dispatch: the step of a tiny model, eager at each stage and compiled at stage 3,
beside the hand-written loop in one process. Guards: what a call looks at. Meetings: how much longer a step of
two ranks that transfers next to nothing takes because ranks tell each other what they run. Rounds are
interleaved; every figure is a median over them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from benchmarks.common import processes, report
from benchmarks.common.limits import ONE_RANK, Check
from benchmarks.common.options import add_end
from benchmarks.common.processes import BenchmarkError, program
from benchmarks.common.statistic import interval, ratio
from benchmarks.step.onerank import COMPILED, HANDWRITTEN

LAYERS = (12, 48)
WORLD, STAGE = 2, 3
SECONDS_LIMIT, PER_NODE_LIMIT = 10.0, 1.3
COMPILED_ROUNDS = 1  # each compiles 25 s and more
DISPATCH_TURNS, DISPATCH_BLOCK = 10, 20
MEETINGS, MEETING_LIMIT = 300, 0.5  # of two ranks on one machine; milliseconds a step
GUARDED, GUARDS_LIMIT = 1000, 0.25  # modules; milliseconds a call


def capture(layers: int, backend: str) -> dict[str, Any]:
    """Capture a step of a Llama of that depth: `step.timings` and the first call, in seconds."""
    import torch

    from benchmarks.common.workload import DEEP, batches
    from benchmarks.common.zerofn_rows import Compiled
    from zerofn._torch_compat import join_fake_group

    torch.set_num_threads(1)
    join_fake_group(WORLD)
    # A small model first: what is imported and built once a process is reported apart, as `cold`,
    # or the 12-layer model's time per node would hold more of it than the 48-layer model's.
    found = {}
    for name, depth in (("cold", 2), ("warm", layers)):
        tokens = batches(DEEP[depth], 0, WORLD, 1)[0]
        compiled = Compiled(DEEP[depth], STAGE, backend=backend)
        start = time.perf_counter()
        compiled(tokens)
        found[name] = dict(compiled.compiled.timings) | {"call": time.perf_counter() - start}
    return found


def capture_rounds(num_rounds: int, console: Console, backend: str = "eager") -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {layers: [] for layers in LAYERS}
    for number in range(num_rounds):
        for layers in LAYERS if number % 2 == 0 else reversed(LAYERS):
            command = [*program(sys.executable, "benchmarks.step.overhead"), "--child", str(layers)]
            with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
                (result,) = processes.run(f"capture of {layers} layers", [[*command, "--backend", backend]])
            found[layers].append(result)
            seconds = total(result["warm"])
            line = f"round {number + 1}/{num_rounds}  {layers} layers  {seconds:.2f} s"
            console.print(line, highlight=False)
    return found


def total(timings: dict[str, Any]) -> float:
    return timings["capture"] + sum(timings["passes"].values())


def dispatch_rounds(num_rounds: int, console: Console) -> dict[str, dict[str, list[float]]]:
    """Milliseconds a step and per-round ratios to the hand-written loop, by loop."""
    found: dict[str, dict[str, list[float]]] = {}
    command = [*program(sys.executable, "benchmarks.step.onerank"), "--workload", "tiny"]
    command += ["--turns", str(DISPATCH_TURNS), "--block", str(DISPATCH_BLOCK), "--compiled"]
    for number in range(num_rounds):
        (loops,) = processes.run("dispatch of a tiny model", [command])
        by_hand = loops[HANDWRITTEN]["ms"]
        for name, loop in loops.items():
            series = found.setdefault(name, {"ms": [], "ratios": []})
            pairs = zip(loop["ms"], by_hand, strict=True)
            series["ms"].append(statistics.median(loop["ms"]))
            series["ratios"].append(statistics.median(a / b for a, b in pairs))
        console.print(f"round {number + 1}/{num_rounds}  dispatch", highlight=False)
    return found


def guards(calls: int = 200) -> list[float]:
    """Milliseconds of a call's look at all that a model of `GUARDED` modules may have changed."""
    import torch

    from zerofn.graph.same_graph import Outline
    from zerofn.runtime.guarded_captures import Captures, LeftOut

    blocks = [[torch.nn.LayerNorm(8), *(torch.nn.Linear(8, 8) for _ in range(3))] for _ in range(GUARDED // 5)]
    model = torch.nn.Sequential(*(torch.nn.Sequential(*block) for block in blocks))

    def step(state, x):
        return model(x)

    def again(lines: bool) -> Outline:
        raise AssertionError("nothing changes here")

    captures, entry = Captures(step, None, LeftOut("step")), mock.Mock()  # an entry is only handed back
    assert captures.find(again) is None
    captures.captured(lambda: (entry, ()))
    found = []
    for _ in range(calls):
        start = time.perf_counter()
        assert captures.find(again) is entry
        found.append(1e3 * (time.perf_counter() - start))
    return found


def meet(rank: int, port: int) -> dict[str, list[float]]:
    """Milliseconds of a small all-gather, in a meeting and without its message."""
    import torch
    import torch.distributed as dist

    from zerofn.comm import transport  # noqa: F401  (defines the operations)
    from zerofn.job.step_order import meetings

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    group, shard = dist.group.WORLD.group_name, torch.ones(8)
    found: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(MEETINGS):
        for name, groups in (("with", [group]), ("without", [])):
            start = time.perf_counter()
            with meetings().lasting(groups, "a step", b"a digest"):
                torch.ops.zerofn.wait(torch.ops.zerofn.all_gather(shard, WORLD, group, ""))
            found[name].append(1e3 * (time.perf_counter() - start))
    dist.destroy_process_group()
    return found


def meeting_rounds(num_rounds: int) -> list[float]:
    """Milliseconds that a meeting adds, one figure a round."""
    found = []
    for _ in range(num_rounds):
        command = [*program(sys.executable, "benchmarks.step.overhead"), "--port", str(processes.free_port())]
        first, *_ = processes.run("meetings", [[*command, "--meet", str(rank)] for rank in range(WORLD)])
        found.append(statistics.median(a - b for a, b in zip(first["with"], first["without"], strict=True)))
    return found


def capture_table(captures: dict[int, list[dict[str, Any]]], backend: str = "eager") -> Table:
    table = Table(
        title=f"Capture and passes, {backend}: Llama at stage {STAGE} of {WORLD} ranks (fake process group)",
        caption="Seconds, medians over rounds. Once a process: the same for 2 layers, done first.",
    )
    names = list(captures[LAYERS[0]][0]["warm"]["passes"])
    for name in ("", *(f"{layers} layers" for layers in LAYERS)):
        table.add_column(name, justify="right" if name else "left")

    def line(name: str, figure, form: str) -> None:
        middles = (statistics.median(map(figure, captures[layers])) for layers in LAYERS)
        table.add_row(name, *(format(value, form) for value in middles))

    line("nodes", lambda r: r["warm"]["nodes"], ".0f")
    line("capture", lambda r: r["warm"]["capture"], ".3f")
    for name in names:
        line(f"  pass {name}", lambda r, name=name: r["warm"]["passes"][name], ".3f")
    line("capture and passes", lambda r: total(r["warm"]), ".3f")
    line("microseconds a node", lambda r: 1e6 * per_node(r), ".1f")
    line("first call, all of it", lambda r: r["warm"]["call"], ".3f")
    line("once a process", lambda r: r["cold"]["call"], ".3f")
    return table


def per_node(result: dict[str, Any]) -> float:
    return total(result["warm"]) / result["warm"]["nodes"]


def dispatch_table(loops: dict[str, dict[str, list[float]]]) -> Table:
    table = Table(title="Dispatch: a step of a tiny Llama, one process")
    for name in ("loop", "microseconds a step", "ratio to hand-written"):
        table.add_column(name, justify="left" if name == "loop" else "right")
    for name, loop in loops.items():
        microseconds = 1e3 * statistics.median(loop["ms"])
        table.add_row(name, f"{microseconds:.0f}", str(interval(loop["ratios"])))
    return table


def checks(
    captures: dict[int, list[dict]],
    loops: dict[str, dict[str, list[float]]],
    guarded: Sequence[float] = (),
    met: Sequence[float] = (),
) -> list[Check]:
    low, high = LAYERS
    seconds = interval([total(result["warm"]) for result in captures[high]])
    growth = ratio([per_node(r) for r in captures[high]], [per_node(r) for r in captures[low]])
    found = [
        Check(f"capture and passes, {high} layers, s", str(seconds), seconds.median, SECONDS_LIMIT),
        Check(f"time per node, {high} / {low} layers", str(growth), growth.median, PER_NODE_LIMIT),
    ]
    if guarded:
        value, what = interval(guarded), f"guards of {GUARDED:,} modules, ms a call"
        found.append(Check(what, str(value), value.median, GUARDS_LIMIT))
    if met:
        value = interval(met)
        found.append(Check(f"meeting of {WORLD} ranks, ms a step", str(value), value.median, MEETING_LIMIT))
    for name, loop in loops.items():
        if name not in (HANDWRITTEN, COMPILED):
            value, what = interval(loop["ratios"]), f"dispatch, {name} / hand-written"
            found.append(Check(what, str(value), value.median, ONE_RANK["tiny"]))
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    add_end(parser)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="eager", help=argparse.SUPPRESS)
    parser.add_argument("--meet", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main() -> int:
    options = arguments()
    if options.child is not None:
        print("RESULT " + json.dumps(capture(options.child, options.backend)), flush=True)
        return 0
    if options.meet is not None:
        print("RESULT " + json.dumps(meet(options.meet, options.port)), flush=True)
        return 0
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        captures = capture_rounds(options.rounds, console)
        compiled = capture_rounds(COMPILED_ROUNDS, console, "inductor")
        loops = dispatch_rounds(options.rounds, console)
        met = meeting_rounds(options.rounds)
    except BenchmarkError as error:
        print(f"benchmark failed: {error}", file=sys.stderr)
        return 1
    found = checks(captures, loops, guards(), met)
    for table in (
        capture_table(captures),
        capture_table(compiled, "inductor"),
        dispatch_table(loops),
        report.check_table(found),
    ):
        console.print(table)
    run = {"surroundings": report.surroundings(), "capture": captures, "compiled": compiled}
    run |= {"dispatch": loops, "meetings": met}
    return report.conclude(options.out / "overhead.json", run, found, options.check)


if __name__ == "__main__":
    sys.exit(main())
