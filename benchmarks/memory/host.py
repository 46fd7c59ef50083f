"""python -m benchmarks.memory.host: the memory of a process that trains t5-3b, beside what its plan says.

The two plans of `what_fits.md` for 10 GiB beside 32 GiB, on a machine without a GPU: the model computes on the CPU, so
device and host are one memory, of which the process gets `--limit`. A process that exceeds it is ended.

"drives": exact Adam, with everything but the parameters on the drive of `--folder` (40 GB of t5-3b), and gradients that
wait there for the finite check. "8-bit moments": no drive; updates inside the backward pass.

Each process is asked at the same moments (imports, skeleton, construction, plan, each step) for its resident memory,
and for the most of it since the last moment, as the kernel counts. A plan counts tensors. The rest is of the process
itself: what it holds before there is a state (Python, torch, transformers), and from the plan on all but the state,
with the graph of the captured step. `--size small` is a dry run of two minutes, in which the process itself is a third.
Writes JSON beside the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import measure, report
from benchmarks.common.check import Check
from benchmarks.common.processes import HERE, BenchmarkError, program

# Width, feed-forward width, heads, a head's width; 24 layers each way.
SIZES = {"3b": (1024, 16384, 32, 128), "large": (1024, 4096, 16, 64), "small": (256, 4096, 8, 32)}
PLANS = {"drives": {"moments": None, "clip": True}, "8-bit moments": {"moments": "8bit", "clip": False}}
TOKENS = 16  # of the batch's only row, to make steps quick
LIMIT = 18 << 30
SHARE = 1.02  # measured over planned, with what the process itself takes: malloc's holes
POLL_SECONDS = 0.02


def tell(moment: str, began: float, **known: Any) -> float:
    """Print what the kernel counts now, and the most since it was told last."""
    now, peak = measure.memory_bytes("VmRSS"), measure.memory_bytes("VmHWM")
    row = {"moment": moment, "seconds": time.perf_counter() - began, "peak": peak, "now": now, **known}
    print("AT " + json.dumps(row), flush=True)
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is from now on
    return time.perf_counter()


def child(sizes: tuple[int, int, int, int], moments: str | None, clip: bool, folder: str, steps: int) -> None:
    """Train, and tell."""
    import torch
    import transformers as hf

    import zerofn
    from benchmarks.memory.what_fits import t5
    from zerofn import Offload, optim

    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    began, build = tell("imports", time.perf_counter()), t5(*sizes)
    model = zerofn.skeleton(build)
    began = tell("skeleton", began)

    def loss_fn(params: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, params, (), batch).loss

    def init_state() -> zerofn.TrainState:
        tx = optim.adamw(1e-4, moments=moments)
        tx = optim.chain(optim.clip_by_global_norm(1.0), tx) if clip else tx
        return zerofn.TrainState.create(params=dict(build().named_parameters()), tx=tx)

    def train_step(state: zerofn.TrainState, batch: dict[str, torch.Tensor]) -> Any:
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads, on_nonfinite="skip" if clip else "ignore"), {"loss": loss}

    offload = Offload(optimizer="nvme", path=folder) if clip else None
    state = zerofn.shard(init_state, precision="bf16", offload=offload)
    began = tell("construction", began)
    step, tokens = zerofn.compile(train_step, remat="full"), torch.arange(TOKENS)[None] + 5
    batch = {"input_ids": tokens, "labels": tokens}
    memory = step.lower(state, batch).memory()
    plan = {"total": memory.total, "host": memory.host, "disk": memory.disk, "there": memory.there}
    parameters = sum(x.numel() for x in model.parameters())
    began = tell("plan", began, plan=plan, parameters=parameters, state=memory.peak["state"])
    for k in range(steps):
        state, metrics = step(state, batch)
        began = tell(f"step {k + 1}", began, loss=float(metrics["loss"]))


def run(sizes: tuple[int, int, int, int], plan: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what a process told at each moment. Raises `BenchmarkError` if it failed or exceeded the limit."""
    command = [*program(sys.executable, "benchmarks.memory.host"), "--steps", str(options.steps)]
    command += ["--folder", str(options.folder), "--child", json.dumps({"sizes": sizes, **plan})]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, env=os.environ | {"OMP_NUM_THREADS": "1"})
        status, exceeded = Path(f"/proc/{process.pid}/status"), False
        while process.poll() is None and not exceeded:
            found = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmRSS")]
            exceeded = bool(found) and int(found[0]) * 1024 > options.limit
            time.sleep(POLL_SECONDS)
        if exceeded:
            process.kill()
        why = f"exceeded {options.limit / 1e9:.2f} GB" if exceeded else f"ended with exit code {process.wait()}"
        out.seek(0)
        told = out.read()
    if exceeded or process.returncode:
        raise BenchmarkError(f"the process {why} after:\n{told}")
    return [json.loads(line.removeprefix("AT ")) for line in told.splitlines() if line.startswith("AT ")]


def planned(rows: list[dict[str, Any]], moment: str) -> int:
    """Bytes of tensors at a moment: those of the state from its construction on, and at a step its peak."""
    plan = next(x for x in rows if x["moment"] == "plan")
    if moment.startswith("step"):
        return plan["plan"]["total"] + plan["plan"]["host"]
    return plan["state"] if moment in ("construction", "plan") else 0


def beside(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each moment with what was `planned`, and what the `process` itself takes."""
    now, state = {x["moment"]: x["now"] for x in rows}, planned(rows, "plan")
    own = {"imports": now["imports"], "skeleton": now["skeleton"], "construction": now["skeleton"]}
    return [
        {**x, "planned": planned(rows, x["moment"]), "process": own.get(x["moment"], now["plan"] - state)} for x in rows
    ]


def checks(name: str, moments: list[dict[str, Any]], limit: int, size: str, **_: Any) -> list[Check]:
    """What must hold of a run. Construction and capture need no more than a step."""
    most = max(x["peak"] for x in moments)
    found = [Check(f"{name}: bytes at most, of {limit / 1e9:.2f} GB", f"{most / 1e9:.2f} GB", most, limit)]
    step = max(x["planned"] + x["process"] for x in moments)
    for x in moments if size != "small" else ():
        if x["planned"]:
            share = x["peak"] / (step if x["moment"] in ("construction", "plan") else x["planned"] + x["process"])
            found.append(Check(f"{name}, {x['moment']}: measured / planned", f"{share:.4f}", share, SHARE))
    return found


def table(runs: dict[str, Any]) -> Table:
    """All moments."""
    out = Table("plan", "moment", "planned MB", "process", "together", "measured", "after it", "s")
    for name, run in runs.items():
        for x in run["moments"]:
            both = x["planned"] + x["process"]
            cells = (x["planned"], x["process"], both, x["peak"], x["now"])
            out.add_row(name, x["moment"], *(f"{n / 1e6:,.0f}" for n in cells), f"{x['seconds']:.0f}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="3b")
    parser.add_argument("--only", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=int, default=LIMIT, help="bytes of the process")
    parser.add_argument("--folder", default="/tmp", help="on the drive")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "host.json")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(**options.child, folder=options.folder, steps=options.steps)
        return 0
    import torch
    import transformers

    console, runs = Console(), json.loads(options.out.read_text()) if options.out.exists() else {}
    runs = {name: x for name, x in runs.items() if x["size"] == options.size}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    for name in options.only:
        try:
            rows = beside(run(SIZES[options.size], PLANS[name], options))
        except BenchmarkError as error:
            console.print(f"[red]{name}: {error}[/red]", highlight=False)
            return 1
        known = {"size": options.size, "limit": options.limit, "moments": rows}
        runs[name] = {**report.surroundings(), **versions, **known}
        options.out.write_text(json.dumps(runs, indent=1) + "\n")
    console.print(table(runs))
    outcome = [check for name in options.only for check in checks(name, **runs[name])]
    for check in outcome:
        console.print(f"{'kept  ' if check.kept else 'MISSED'} {check.what}: {check.shown}", highlight=False)
    return 0 if all(check.kept for check in outcome) else 1


if __name__ == "__main__":
    sys.exit(main())
