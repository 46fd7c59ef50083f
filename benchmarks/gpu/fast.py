"""python -m benchmarks.gpu.fast [--minutes 4]: training steps on one GPU, by plain torch and by each backend of ZeroFn.

Each row is a process of its own: milliseconds a step (the median), model FLOPs utilisation, the time that kernels take,
peak memory beside the plan, and seconds until the first step has run. Writes fast_gpu.json after each row.
`--dry-run` goes through all of it on the CPU with tiny sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call

import zerofn
from benchmarks.gpu import model, report
from zerofn import optim

HERE = Path(__file__).resolve().parents[1]  # benchmarks/
PEAK = 989.4e12  # bf16 operations a second of an H100 or H200 SXM
RATE, DECAY = 1e-4, 0.1
WARM, STEPS = 5, 12
FP8 = " fp8"  # behind a backend's name: precision="fp8"
SYSTEMS = ("torch", "torch compiled", "eager", "eager fp8", "inductor", "graphs", "inductor+graphs",
           "inductor+graphs fp8")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Workload:
    """`rows` of `length` tokens; `seconds`: what a row of the table may take."""

    rows: int
    length: int
    seconds: float


WORKLOADS = {"gpt2": Workload(8, 1024, 60), "t5-large": Workload(16, 128, 60), "llama-1b": Workload(4, 4096, 90),
             "llama-wide": Workload(2, 4096, 90)}  # fmt: skip
# Width, layers, heads, heads of keys and values, width inside, vocabulary. The wide one has 8 layers of Llama 3 8B.
LLAMAS = {"llama-1b": (2048, 16, 32, 8, 8192, 128256), "llama-wide": (4096, 8, 32, 8, 14336, 32000)}


def build(name: str, dry: bool) -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor]]:
    """A model, and its loss of a batch: whatever holds the parameters calls it."""
    if name == "t5-large":
        t5 = model.T5(model.CONFIGS["tiny" if dry else name], False)
        with torch.no_grad():
            for key, p in t5.named_parameters():
                p.copy_(model.weight(key, p.shape))
        return t5, lambda net, x: net(x["source"], x["target"])
    import transformers as hf

    if name == "gpt2":
        small = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 96} if dry else {"vocab_size": 50304}
        config: Any = hf.GPT2Config(**small, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
        net: Any = hf.GPT2LMHeadModel(config)
    else:
        sizes = (32, 2, 4, 2, 64, 96) if dry else LLAMAS[name]
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
                 "vocab_size")  # fmt: skip
        config = hf.LlamaConfig(**dict(zip(names, sizes, strict=True)), tie_word_embeddings=True, use_cache=False)
        net = hf.LlamaForCausalLM(config)
    return net, lambda net, x: net(input_ids=x["ids"], labels=x["ids"]).loss


def batch_of(name: str, dry: bool, device: str) -> dict[str, Tensor]:
    work = WORKLOADS[name]
    rows, length = (2, 8) if dry else (work.rows, work.length)
    if name == "t5-large":
        return model.batch_of("tiny" if dry else name, rows, device)
    vocab = 96 if dry else 32000 if name == "llama-wide" else 50257
    return {"ids": torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(0)).to(device)}


def flops_of_token(net: nn.Module, length: int) -> float:
    """6 N + 12 x layers x hidden x tokens; N without the embedding table, attention counted in full."""
    config = getattr(net, "config", None)
    if config is None:
        return float("nan")  # encoder and decoder: no field counts them so
    layers, hidden = config.num_hidden_layers, config.hidden_size
    inside = sum(p.numel() for p in net.parameters())
    tied = net.get_input_embeddings().weight.numel()  # type: ignore[operator]
    return 6.0 * (inside - tied + (tied if config.tie_word_embeddings else 0)) + 12.0 * layers * hidden * length


class Torch:
    """Plain torch: float32 parameters, autocast to bfloat16, its fused AdamW."""

    def __init__(self, net: nn.Module, loss: Any, device: str, compiled: bool) -> None:
        self.net, self.loss, self.device = net.to(device), loss, device
        self.adamw = torch.optim.AdamW(self.net.parameters(), RATE, weight_decay=DECAY, fused=True)
        self.forward = torch.compile(self.net) if compiled else self.net
        self.planned = 0

    def step(self, batch: Any) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.loss(self.forward, batch)
        loss.backward()
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return loss.detach()


class Ours:
    """ZeroFn: bfloat16 parameters with float32 masters and moments, and with `FP8` float8 products."""

    def __init__(self, net: nn.Module, loss: Any, device: str, system: str) -> None:
        backend, precision = system.removesuffix(FP8), "fp8" if system.endswith(FP8) else "bf16"
        init = {k: p.detach() for k, p in net.named_parameters()}
        buffers = {k: x.to(device) for k, x in net.named_buffers()}
        tx = optim.adamw(RATE, weight_decay=DECAY)
        self.state = zerofn.shard(zerofn.TrainState.create(params=init, tx=tx), precision=precision, device=device)
        self.planned = 0

        def loss_fn(params: Any, batch: Any) -> Tensor:
            def call(*args: Any, **kwargs: Any) -> Any:
                return functional_call(net, {**params, **buffers}, args, kwargs)

            return loss(call, batch)

        def train_step(state: Any, batch: Any) -> Any:
            value, grads = state.value_and_grad(loss_fn)(batch)
            return state.apply_gradients(grads), {"loss": value}

        self.run = zerofn.compile(train_step, backend=backend)

    def step(self, batch: Any) -> Tensor:
        self.state, aux = self.run(self.state, batch)
        if not self.planned:
            self.planned = self.run.lower(self.state, batch).memory().total
        return aux["loss"]


def kernel_ms(step: Callable[[], Any]) -> float:
    """What the kernels of one call take together."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    return sum(x.self_device_time_total for x in found.key_averages()) / 1e3


def measure(name: str, system: str, dry: bool) -> dict[str, Any]:
    device = "cpu" if dry else "cuda"
    torch.manual_seed(0)
    net, loss = build(name, dry)
    batch, began = batch_of(name, dry, device), time.perf_counter()
    length = next(iter(batch.values())).shape[1]
    flops, tokens = flops_of_token(net, length), sum(x.numel() for x in batch.values())
    how = Torch(net, loss, device, "compiled" in system) if "torch" in system else Ours(net, loss, device, system)

    def sync() -> None:
        if not dry:
            torch.cuda.synchronize()

    losses = [float(how.step(batch))]
    first, times = time.perf_counter() - began, []
    for k in range(WARM + (2 if dry else STEPS)):
        if k == WARM and not dry:
            torch.cuda.reset_peak_memory_stats()
        sync()
        start = time.perf_counter()
        value = how.step(batch)
        sync()
        times.append(time.perf_counter() - start)
        losses.append(float(value))
    ms = 1e3 * statistics.median(times[WARM:])
    found = {"system": system, "workload": name, "ms": ms, "all_ms": [round(1e3 * x, 2) for x in times],
             "first_s": first, "tokens_per_second": tokens / ms * 1e3, "mfu": flops * tokens / ms * 1e3 / PEAK,
             "losses": losses, "planned_bytes": how.planned}  # fmt: skip
    if not dry:
        found |= {"used_bytes": torch.cuda.max_memory_allocated(), "held_bytes": torch.cuda.max_memory_reserved()}
        found["kernel_ms"] = kernel_ms(lambda: how.step(batch))
    return found


def row(name: str, system: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What a process of its own measures, or why it did not."""
    command = [sys.executable, "-m", "benchmarks.gpu.fast", "--one", name, system]
    command += ["--dry-run"] if options.dry_run else []
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=HERE.parent, env=os.environ)
        try:
            process.wait(seconds)
            why = ""
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            why = f"cut short after {seconds:.0f} s"
        out.seek(0)
        lines = out.read().splitlines()
    for line in lines:
        if line.startswith("ROW "):
            return dict(json.loads(line.removeprefix("ROW ")), log=[x[:300] for x in lines if "zerofn" in x][-6:])
    return {"system": system, "workload": name, "error": why or "\n".join(x[:300] for x in lines[-12:])}


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table("workload", "system", "ms", "kernels ms", "tokens/s", "MFU", "peak GiB", "of the plan", "first s",
                  "last loss")  # fmt: skip
    for r in rows:
        if "error" in r:
            table.add_row(r["workload"], r["system"], r["error"][-160:])
            continue
        used, plan = r.get("used_bytes", 0), r["planned_bytes"]
        table.add_row(
            r["workload"], r["system"], f"{r['ms']:.1f}", f"{r.get('kernel_ms', 0):.1f}",
            f"{r['tokens_per_second']:,.0f}", f"{r['mfu']:.1%}", f"{used / 2**30:.2f}",
            f"{used / plan:.3f}" if plan else "", f"{r['first_s']:.1f}", f"{r['losses'][-1]:.4f}")  # fmt: skip
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=4, help="of everything together")
    parser.add_argument("--only", help="workloads, comma between")
    parser.add_argument("--systems", help="comma between")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    if options.one:
        print("ROW " + json.dumps(measure(*options.one, options.dry_run)), flush=True)
        return 0
    end, rows = time.monotonic() + 60 * options.minutes, list[dict[str, Any]]()
    console = Console(width=None if sys.stdout.isatty() else 170, highlight=False)
    for name in options.only.split(",") if options.only else WORKLOADS:
        for system in options.systems.split(",") if options.systems else SYSTEMS:
            seconds = min(WORKLOADS[name].seconds, end - time.monotonic())
            if seconds < 5:
                rows.append({"system": system, "workload": name, "error": "no time"})
                continue
            rows.append(row(name, system, options, seconds))
            console.print({k: x for k, x in rows[-1].items() if k not in ("losses", "all_ms")}, markup=False)
            report.write(
                options.out / "fast_gpu.json", {"surroundings": report.surroundings(options.dry_run), "rows": rows}, []
            )
    console.print(table_of(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
