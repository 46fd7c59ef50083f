"""python -m benchmarks.step.compiled: what compiled regions cost and bring on a CPU, one thread.

A Llama of 24 layers: CPU seconds of the first call with an empty cache and with a full one, beside
the eager first call. Then CPU time of a step beside the eager step's, in turns in one process. Writes compiled.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.func import functional_call

import zerofn
from benchmarks.common import report
from zerofn import optim

HERE = Path(__file__).resolve().parents[1]  # benchmarks/
LAYERS, TURNS = (24,), 41
STEPS = {"width 64, 4 layers, 64 tokens": (64, 4, 64, None), "width 256, 4 layers, 512 tokens": (256, 4, 512, None),
         "width 256, 4 layers, 512 tokens, bf16": (256, 4, 512, "bf16")}  # fmt: skip


def started(width: int, layers: int, backend: str, precision: str | None = None) -> tuple[Any, Any]:
    """(state, step) of a Llama with grouped heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, "vocab_size": 256}
    model = LlamaForCausalLM(LlamaConfig(**heads, **sizes, use_cache=False))
    params = {k: p.detach().clone() for k, p in model.named_parameters()}
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))

    def train_step(state: Any, ids: torch.Tensor) -> Any:
        def loss_fn(params: Any, ids: torch.Tensor) -> torch.Tensor:
            return functional_call(model, params, kwargs={"input_ids": ids, "labels": ids}).loss

        loss, grads = state.value_and_grad(loss_fn)(ids)
        return state.apply_gradients(grads), loss

    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=tx), stage=3, precision=precision)
    return state, zerofn.compile(train_step, backend=backend)


def first_call(layers: int, backend: str) -> dict[str, float]:
    """CPU seconds of the first call, this process's and its children's, behind one that has imported everything."""
    ids = torch.zeros(2, 32, dtype=torch.int64)
    state, step = started(48, 1, backend)
    step(state, ids)
    if not layers:
        return {}
    state, step = started(64, layers, backend)
    began = os.times()
    step(state, ids)
    ended = os.times()
    mine, children = ended.user + ended.system - began.user - began.system, ended.children_user - began.children_user
    return {"seconds": mine + children + ended.children_system - began.children_system}


def in_turns(width: int, layers: int, tokens: int, precision: str | None) -> dict[str, float]:
    """Medians of CPU milliseconds of this thread."""
    ids = torch.zeros(2, tokens // 2, dtype=torch.int64)
    known = {backend: [*started(width, layers, backend, precision), []] for backend in ("eager", "inductor")}
    for turn in range(TURNS + 3):
        for each in known.values():
            state, step, times = each
            began = time.thread_time()
            each[0], _ = step(state, ids)
            times += [1e3 * (time.thread_time() - began)] if turn >= 3 else []
    return {backend: statistics.median(times) for backend, (*_, times) in known.items()}


def child(what: str, folder: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.step.compiled", "--child", what]
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, env=env)
    if done.returncode:
        raise SystemExit(f"benchmark failed: {what}: {done.stderr[-600:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    if options.child:
        torch.set_num_threads(1)
        what, _, more = options.child.partition(":")
        found = in_turns(*STEPS[more]) if what == "turns" else first_call(int(more), what)
        print(json.dumps(found))
        return 0
    console, rows = Console(highlight=False), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        child("inductor:0", folder)  # torch's precompiled header
        for layers in LAYERS:
            cold, warm = (child(f"inductor:{layers}", folder)["seconds"] for _ in range(2))
            rows[f"first call, {layers} layers"] = {"eager": child(f"eager:{layers}", folder)["seconds"], "cold": cold,
                                                    "warm": warm}  # fmt: skip
            console.print(layers, rows[f"first call, {layers} layers"])
        for name in STEPS:
            rows[name] = child(f"turns:{name}", folder)
            console.print(name, rows[name])
    table = Table("", "eager", "compiled", "warm", "compiled / eager")
    for name, r in rows.items():
        compiled = r.get("cold", r.get("inductor"))
        table.add_row(name, f"{r['eager']:.2f}", f"{compiled:.2f}", f"{r['warm']:.2f}" if "warm" in r else "",
                      f"{compiled / r['eager']:.3f}")  # fmt: skip
    console.print(table, "CPU seconds of a first call; CPU milliseconds of a step, medians.")
    report.write_json(options.out / "compiled.json", {"surroundings": report.surroundings(), "rows": rows}, [])
    return 0


if __name__ == "__main__":
    sys.exit(main())
