"""python -m benchmarks.memory.what_fits: the field's headline results, planned anew on a laptop.

Each case is a published result: model, machine, batch. ZeroFn plans the same (no GPU, no weights, no data) and says
what a rank would hold, what a step would take and what bounds it. Writes benchmarks/what_fits.md and, beside it in
results/, the figures as JSON. `--only` plans some of the cases again and keeps what is known of the others.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import zerofn
from zerofn import Offload, Precision, optim
from zerofn.planning.plan_row import Row

HERE = Path(__file__).resolve().parents[1]  # benchmarks/
PAGE, FIGURES = HERE / "what_fits.md", HERE / "results" / "what_fits.json"
MEASURED = HERE / "results" / "host.json"  # of benchmarks.memory.host
GB = 1e9
ON_HOST = Offload(optimizer="cpu", params="cpu", update="cpu")
HALF = Precision(param=torch.float32, compute=torch.float16, reduce=torch.float16)


def t5(width: int, ff: int, heads: int, per_head: int) -> Callable[[], torch.nn.Module]:
    config = hf.T5Config(
        d_model=width, d_ff=ff, num_heads=heads, d_kv=per_head, num_layers=24, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return lambda: hf.T5ForConditionalGeneration(config)


def gpt(layers: int, width: int) -> Callable[[], torch.nn.Module]:
    config = hf.GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 128, n_positions=1024, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return lambda: hf.GPT2LMHeadModel(config)


def a_matrix(name: str) -> str:
    """A unit for each matrix of GPT-2's layers, with the norm before it: 2.6e9 elements at a width of 25,600."""
    parts = name.split(".")
    if parts[1] != "h":
        return ".".join(parts[:2])
    before = {"ln_1": "attn.c_attn", "ln_2": "mlp.c_fc"}
    return ".".join([*parts[:3], before.get(parts[3], ".".join(parts[3:5]))])


@dataclass(frozen=True)
class Case:
    """`tokens`: of a row. `rows`: of a rank's batch, tried in this order until one does not fit."""

    name: str
    published: str
    build: Callable[[], torch.nn.Module]
    machine: str
    world: int
    rows: tuple[int, ...]
    options: dict[str, Any]
    tokens: int = 1024
    moments: str | None = None
    unit: Callable[[str], str] | None = field(default=None)

    def plan(self, rows: int) -> Row:
        model = zerofn.skeleton(self.build)

        def loss_fn(params: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(model, params, (), batch).loss

        def init_state() -> zerofn.TrainState:
            tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-4, moments=self.moments))
            return zerofn.TrainState.create(params=dict(self.build().named_parameters()), tx=tx)

        def train_step(state: zerofn.TrainState, batch: dict[str, torch.Tensor]) -> Any:
            loss, grads = state.value_and_grad(loss_fn)(batch)
            return state.apply_gradients(grads), {"loss": loss}

        x = torch.empty(rows, self.tokens, dtype=torch.int64, device="meta")
        return zerofn.plan(
            train_step, init_state, {"input_ids": x, "labels": x}, world=self.world, machine=self.machine,
            unit=self.unit, **self.options,
        )[0]  # fmt: skip


STAGE_2 = {"stage": 2, "offload": None, "precision": "fp16", "remat": None}
OFFLOADED = {"stage": 3, "offload": ON_HOST, "remat": "full"}
CASES = [
    Case("t5-large, no offload", "2 x 24 GB, DeepSpeed ZeRO-2: batch 40", t5(1024, 4096, 16, 64), "TitanRTX-2", 2,
         (40, 60, 80), STAGE_2, 128),
    Case("t5-large, recomputing", "2 x 24 GB, DeepSpeed ZeRO-2 with offload: batch 50", t5(1024, 4096, 16, 64),
         "TitanRTX-2", 2, (50, 200), {**STAGE_2, "remat": "full"}, 128),
    Case("t5-3b on 24 GB", "RTX 3090, DeepSpeed ZeRO-2 with offload: batch 20, 71 GB of host memory; 30 does not fit",
         t5(1024, 16384, 32, 128), "3090", 1, (20, 64), {**OFFLOADED, "precision": "bf16"}, 128),
    Case("t5-3b on 10 GB + 32 GB", "RTX 3080, 32 GB of host memory: did not fit with DeepSpeed",
         t5(1024, 16384, 32, 128), "3080", 1, (20,),
         {**OFFLOADED, "offload": Offload(optimizer="nvme", params="cpu"), "precision": "bf16"}, 128),
    Case("t5-3b on 10 GB + 32 GB, 8-bit moments", "the same, no drive", t5(1024, 16384, 32, 128), "3080", 1, (20,),
         {**OFFLOADED, "precision": "bf16"}, 128, "8bit"),
    Case("13 B on one V100", "ZeRO-Offload: 13 B on one V100 of 32 GB", gpt(40, 5120), "V100", 1, (8,),
         {**OFFLOADED, "precision": HALF}),
    Case("40 B on one V100", "ZeRO-3 Offload: 40 B on one V100 of 32 GB and 1.5 TB", gpt(80, 6400), "V100", 1, (8,),
         {**OFFLOADED, "precision": HALF}),
    Case("45 B on 8 GPUs", "Lightning with DeepSpeed: 45 B on 8 A100 of 40 GB and 1 TB", gpt(72, 7168), "A100-40-8",
         8, (4,), {**OFFLOADED, "precision": "bf16"}),
    Case("1 T on 16 GPUs", "ZeRO-Infinity: 1 T on one DGX-2 (16 V100, 1.5 TB, 28 TB of NVMe)", gpt(256, 18048),
         "V100-16", 16, (1,), {"stage": 3, "offload": "nvme", "precision": HALF, "remat": "full"}, unit=a_matrix),
    Case("1 T on 1024 GPUs", "beyond the published ones", gpt(128, 25600), "H100-8", 1024, (1,),
         {"stage": 3, "offload": None, "precision": "bf16", "remat": "full"}, unit=a_matrix),
    Case("2 T on 512 GPUs", "ZeRO-3 Offload: 2 T on 512 V100 (32 DGX-2), 40.7 TFLOP/s a GPU", gpt(256, 25600),
         "V100-16", 512, (2,), {**OFFLOADED, "precision": HALF}, unit=a_matrix),
]  # fmt: skip


def figures(case: Case) -> list[dict[str, Any]]:
    """What comes of a case, for each number of rows."""
    out = []
    for rows in case.rows:
        began = time.perf_counter()
        row = case.plan(rows)
        plan = row.plan
        out.append({
            "rows": rows, "fits": row.fits, "lacks": row.lacks, **row.needs._asdict(),
            "seconds": row.seconds if plan else None, "speed": row.speed if plan else None,
            "bound": plan.timeline().bound if plan else None, "peak": plan.memory().peak if plan else None,
            "took": time.perf_counter() - began,
            "planner": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        })  # fmt: skip
        print(f"{case.name}, {rows} rows: {out[-1]}", flush=True)
    return out


def page(known: dict[str, list[dict[str, Any]]]) -> str:
    """All that is known, as Markdown."""
    lines = [
        "# What fits",
        "",
        "Results that the field is known for, and what ZeroFn plans for the same model on the same machine: made by",
        "`python -m benchmarks.memory.what_fits`, on a CPU, without weights or data. Nothing here has run on these "
        "machines;",
        "bytes are counted, as they are elsewhere to within 1 % of the allocator's, and times are simulated from rates",
        "that `zerofn/cost/machine.py` names. GB is 1e9 bytes, of one rank for the device and of all of a node's for "
        "host",
        "and drives. A batch is of one rank.",
        "",
        "| case | published | batch | device | host | drives | step | bound by | tokens/s | fits |",
        "|---|---|---:|---:|---:|---:|---:|---|---:|---|",
    ]
    for case in CASES:
        node = min(case.world, zerofn.cost.machine.KNOWN[case.machine].ranks)
        for k, x in enumerate(known.get(case.name, ())):
            first = (case.name, case.published) if k == 0 else ("", "")
            sizes = [f"{x['device'] / GB:.1f}", *(f"{x[n] * node / GB:,.0f}" for n in ("host", "disk"))]
            times = ["", "", ""]
            if x["seconds"] is not None:
                times = [f"{x['seconds']:.1f} s", x["bound"], f"{x['speed']:,.0f}"]
            cells = [*first, str(x["rows"]), *sizes, *times, x["lacks"] or "yes"]
            lines.append(f"| {' | '.join(cells)} |")
    took = [x["took"] for found in known.values() for x in found]
    most = max((x["planner"] for found in known.values() for x in found), default=0)
    lines += ["", f"Planning took {sum(took):.0f} s in all, {max(took, default=0):.0f} s at most for one row, and "
              f"{most / GB:.1f} GB of memory."]  # fmt: skip
    if MEASURED.exists():
        lines += ["", *measured(json.loads(MEASURED.read_text()))]
    return "\n".join(lines) + "\n"


def measured(runs: dict[str, dict[str, Any]]) -> list[str]:
    """What a process took beside its plan, as lines of Markdown."""
    limit = next(iter(runs.values()))["limit"]
    lines = [
        "## Beside a process",
        "",
        f"t5-3b trained on a CPU, with {limit / GB:.1f} GB for device and host together, by `python -m "
        "benchmarks.memory.host`: exact Adam",
        "with everything but the parameters on a drive and gradients that wait there for the norm and the finite "
        "check; and",
        "8-bit moments without a drive, updated inside the backward pass. GB at most since the moment before. The "
        "process itself",
        "is Python, torch, transformers and the graph of the step. At construction the state is planned; leaves and "
        "units on their",
        "way into it come on top, less than a step needs. What a step takes beyond both are holes of malloc.",
        "",
        "| plan | moment | planned | process | measured | measured / both |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, run in runs.items():
        for x in run["moments"]:
            if x["moment"] in ("construction", "step 1", "step 5"):
                cells = [f"{x[key] / GB:.2f}" for key in ("planned", "process", "peak")]
                share = f"{x['peak'] / (x['planned'] + x['process']):.3f}"
                lines.append(f"| {name} | {x['moment']} | {' | '.join(cells)} | {share} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="names of cases, or parts of them")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    known = json.loads(FIGURES.read_text()) if args.only and FIGURES.exists() else {}
    for case in CASES:
        if not args.only or any(part in case.name for part in args.only):
            known[case.name] = figures(case)
            FIGURES.write_text(json.dumps(known, indent=1) + "\n")
    PAGE.write_text(page(known))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
