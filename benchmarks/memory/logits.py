"""python -m benchmarks.memory.logits: a head of 128,256 words on 8,192 tokens, with whole logits and in tiles.

A Llama of one layer, 64 wide, in float32 at one rank of one thread. Each row is a process: what its plan says, the peak
by torch's allocator, which counts what operations have while they run, and the CPU time of a step. The whole form is
measured where the machine has memory for it. Writes logits.json beside what it prints.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.func import functional_call

import zerofn
from benchmarks.common import report
from benchmarks.memory.allocations import peaks_of
from zerofn import optim

HERE = Path(__file__).resolve().parents[1]  # benchmarks/
VOCABULARY, WIDTH, LENGTH, STEPS = 128_256, 64, 1024, 2
ROWS = [(tokens, budget) for tokens in (4096, 8192) for budget in (None, "1.5GB")]
MORE = 1.2  # of the planned peak, that must be free


def row(tokens: int, budget: str | None, measure: bool) -> dict[str, Any]:
    """One row: bytes and seconds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY, use_cache=False))
    params = {k: p.detach().clone() for k, p in model.named_parameters()}

    def train_step(state: Any, ids: torch.Tensor) -> Any:
        def loss_fn(params: Any, ids: torch.Tensor) -> torch.Tensor:
            return functional_call(model, params, kwargs={"input_ids": ids, "labels": ids}).loss

        loss, grads = state.value_and_grad(loss_fn)(ids)
        return state.apply_gradients(grads), loss

    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.adamw(1e-3)), stage=3)
    del params, model.lm_head.weight, model.model.embed_tokens.weight
    step, ids = zerofn.compile(train_step, memory=budget), torch.randint(VOCABULARY, (tokens // LENGTH, LENGTH))
    plan = step.lower(state, ids)
    found: dict[str, Any] = {"planned": plan.memory().total}
    free = next(int(x.split()[1]) * 1024 for x in open("/proc/meminfo") if x.startswith("MemAvailable"))
    if not measure or free < MORE * plan.memory().total:
        return found
    loss, seconds = None, []

    def run() -> None:
        nonlocal state, loss
        start = time.process_time()
        state, loss = step(state, ids)
        seconds.append(time.process_time() - start)

    for _ in range(STEPS):
        run()
    found |= {"seconds": statistics.median(seconds[1:]), "loss": loss.item()}
    return found | {"measured": peaks_of(run, [])["peak"]}


def main() -> None:
    """Run all rows, print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--plan-only", action="store_true", help="measure nothing")
    given = parser.parse_args()
    if given.row:
        tokens, budget = given.row
        print(json.dumps(row(int(tokens), None if budget == "-" else budget, not given.plan_only)))
        return
    table = Table("tokens", "logits", "planned MB", "measured MB", "CPU ms", title="a head of 128,256 words, float32")
    rows = {}
    for tokens, budget in ROWS:
        command = [sys.executable, "-m", "benchmarks.memory.logits", "--row", str(tokens), budget or "-"]
        command += ["--plan-only"] if given.plan_only else []
        one = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=one)
        found, name = json.loads(done.stdout.splitlines()[-1]), "tiles" if budget else "whole"
        rows[f"{tokens} tokens, {name}"] = found
        cells = [f"{found[k] * by:,.0f}" if k in found else "-" for k, by in
                 (("planned", 1e-6), ("measured", 1e-6), ("seconds", 1e3))]  # fmt: skip
        table.add_row(f"{tokens:,}", name, *cells)
    Console(width=100).print(table)
    about = {"surroundings": report.surroundings(), "torch": torch.__version__, "rows": rows}
    (HERE / "results" / "logits.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
