"""python -m benchmarks.pipe.plans: 70B and 405B on clusters of H100s, with stages and without, planned on a CPU.

Each model trains on the same rows in a step, on every mesh. Of meshes without `pipe` some are estimated from plans with
a few layers, and the fastest is planned with all; those with `pipe` are planned stage by stage. A step's seconds are
split into what a rank computes, its waits for other stages, and its waits for transfers: these say why one mesh is
faster. Nothing here has run on such machines. Writes JSON beside the tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers as hf
from rich.console import Console
from rich.table import Table

import zerofn
from benchmarks.common import report
from benchmarks.common.check import Check
from benchmarks.common.options import add_end
from zerofn import optim
from zerofn.comm.mesh import Mesh
from zerofn.planning.asked import ALL, Asked, Layers, Step
from zerofn.planning.plan_row import Row
from zerofn.planning.planner import cluster, plan_step
from zerofn.planning.search import Search

TOKENS = 4096  # of a row
SECONDS = 300.0  # of CPU time for the row with `pipe`, and for all others together
GB = 1e9
IN_PARTS = {"model.layers.*": "sequence_parallel", "lm_head": "colwise"}


class Case(NamedTuple):
    """A Llama, and where it trains. `rows`: of a step, over all ranks. `stages`, `others`: meshes with `pipe`, and
    without.
    """

    name: str
    machine: str
    layers: int
    width: int
    inner: int
    heads: int
    rows: int
    stages: tuple[dict[str, int], ...]
    others: tuple[dict[str, int], ...]
    stage: int  # of ZeRO, on meshes with `pipe`; 1 where `data` crosses nodes: nothing is gathered for a microbatch


CASES = [
    Case("70B", "8 x H100-8", 80, 8192, 28672, 64, 512, ({"pipe": 8, "data": 8},),
         ({"data": 64}, {"data": 32, "tensor": 2}, {"data": 16, "tensor": 4}, {"data": 8, "tensor": 8}), 3),
    Case("405B", "64 x H100-8", 126, 16384, 53248, 128, 512, ({"pipe": 8, "data": 8, "tensor": 8},),
         ({"data": 512}, {"data": 64, "tensor": 8}), 1),
]  # fmt: skip


def step_on(case: Case, mesh: Mesh, layers: int | None = None) -> Step:
    """The step on a mesh: AdamW, gradients clipped, microbatches of one row. `layers`: only so many. The schedule of
    stages is 1F1B, which keeps the fewest microbatches, and no gradients for later.
    """

    def build() -> torch.nn.Module:
        config = hf.LlamaConfig(
            hidden_size=case.width, intermediate_size=case.inner, num_hidden_layers=layers or case.layers,
            num_attention_heads=case.heads, num_key_value_heads=8, vocab_size=128256, use_cache=False,
        )  # fmt: skip
        return hf.LlamaForCausalLM(config)

    model = zerofn.skeleton(build)
    cuts = zerofn.parallel.tensor(model, mesh, {**model.tp_plan, **IN_PARTS}) if mesh.partial else None
    rows = case.rows // mesh.rows.size

    def loss_fn(params: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, params, (), batch).loss

    def init_state() -> zerofn.TrainState:
        tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-4))
        return zerofn.TrainState.create(params=dict(build().named_parameters()), tx=tx)

    def train_step(state: zerofn.TrainState, batch: dict[str, torch.Tensor]) -> Any:
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), rows)(batch)
        return state.apply_gradients(grads), loss

    x = torch.empty(rows, TOKENS, dtype=torch.int64, device="meta")
    if mesh.stages.size > 1:
        one, given = {"input_ids": x[:1], "labels": x[:1]}, {"machine": case.machine, "precision": "bf16", "cuts": cuts}
        cuts = zerofn.parallel.pipe(model, mesh, loss_fn, one, schedule="1f1b", microbatches=rows, **given)
    few = None if layers else Layers(case.layers, 0, lambda number: step_on(case, mesh, number))
    return Step(train_step, init_state, {"input_ids": x, "labels": x}, cuts, layers=few)


def with_stages(case: Case, sizes: Mapping[str, int]) -> Row:
    """The plan of a mesh with `pipe`."""
    mesh, (where, _) = Mesh.planned(sizes), cluster(case.machine, None, None)
    asked = Asked(stage=case.stage, offload=None, precision="bf16", remat="full")
    (row,) = plan_step(step_on(case, mesh), mesh, case.machine, where, asked)
    return row


def without(case: Case) -> list[Row]:
    """The plans, and estimates, of meshes without: the fastest that fits first."""
    where, _ = cluster(case.machine, None, None)
    search = Search(lambda mesh: step_on(case, mesh), where, repr(case.machine))
    search.plan(case.others, Asked(stage=3, offload=None, precision="bf16", remat=ALL))
    search.settle()
    return search.sorted()


def figures(row: Row) -> dict[str, Any]:
    """What is known of a row. Seconds are of a rank; of several stages, the mean over their ranks."""
    found: dict[str, Any] = {
        "mesh": row.config.grid, "remat": row.config.remat, "microbatches": row.microbatches, "fits": row.fits,
        "lacks": row.lacks, "seconds": row.seconds, "speed": row.speed, "bound": row.bound, "device": row.needs.device,
    }  # fmt: skip
    if row.plan is None:
        return found
    if row.pipelined is None:
        waits, idle = sum(row.plan.timeline().waited.values()), 0.0
    else:
        ranks, idle = row.pipelined.ranks, row.pipelined.idle * row.seconds
        waits = row.seconds * sum(x.exposed for x in ranks) / len(ranks)
        found["schedule"] = row.pipelined.schedule
        found["stages"] = [{**x._asdict(), "device": x.device} for x in ranks]
    again = row.plan.flops.again / (row.plan.flops.again + row.plan.flops.model)
    return {**found, "computing": row.seconds - idle - waits, "idle": idle, "waits": waits, "again": again}


def reason(staged: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Why the faster one of two rows is faster, in a sentence."""
    fast, slow = sorted((staged, other), key=lambda x: x["seconds"])
    words = {"computing": "computing", "idle": "waiting for other stages", "waits": "waiting for transfers"}
    told = [
        f"{fast[part]:.1f} s for {slow[part]:.1f} s {what}" for part, what in words.items() if fast[part] or slow[part]
    ]
    return (
        f"{fast['mesh']} is {slow['seconds'] / fast['seconds']:.2f} times as fast as {slow['mesh']}: {', '.join(told)}."
    )


def planned(case: Case) -> dict[str, Any]:
    """All rows of a case, with the CPU seconds that they took, and the reason."""
    begun = time.process_time()
    staged = [figures(with_stages(case, sizes)) for sizes in case.stages]
    between = time.process_time()
    others = [figures(row) for row in without(case)]
    took = {"with pipe": between - begun, "without": time.process_time() - between}
    best = min((x for x in staged if x["fits"]), key=lambda x: x["seconds"], default=staged[0])
    return {**case._asdict(), "staged": staged, "unstaged": others, "cpu": took, "reason": reason(best, others[0])}


def table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each mesh. Seconds are those of a rank in a step."""
    columns = ("model", "mesh", "remat", "m", "step s", "computing", "idle", "transfers", "GB by rank", "tokens/s")
    out = Table(*columns, "fits")
    for run in runs:
        for x in (*run["staged"], *run["unstaged"]):
            spent = (f"{x[part]:.1f}" if part in x else "~" for part in ("computing", "idle", "waits"))
            sizes = [rank["device"] for rank in x["stages"]] if "stages" in x else [x["device"]]
            memory = " ".join(f"{n / GB:.1f}" for n in sizes)
            rest = (memory, f"{x['speed']:,.0f}", x["lacks"] or "yes")
            out.add_row(
                run["name"], x["mesh"], x["remat"] or "-", str(x["microbatches"]), f"{x['seconds']:.1f}", *spent, *rest
            )
    return out


def checks(runs: Sequence[Mapping[str, Any]]) -> list[Check]:
    """What must hold."""
    return [
        Check(f"{run['name']} {what}, CPU seconds", f"{seconds:.0f}", seconds, SECONDS)
        for run in runs
        for what, seconds in run["cpu"].items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[case.name for case in CASES],
        help="plan these, and keep what is known of the others",
    )
    add_end(parser, "pipe_plans.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    console = Console(soft_wrap=True)
    known = {run["name"]: run for run in (json.loads(args.out.read_text())["plans"] if args.out.exists() else ())}
    known |= {case.name: planned(case) for case in CASES if not args.only or case.name in args.only}
    runs = [known[case.name] for case in CASES if case.name in known]
    found = checks(runs)
    console.print(table(runs))
    for run in runs:
        console.print(run["reason"])
    console.print(report.check_table(found))
    return report.conclude(args.out, {**report.surroundings(), "plans": runs}, found, args.check)


if __name__ == "__main__":
    sys.exit(main())
