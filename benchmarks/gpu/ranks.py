"""python -m benchmarks.gpu.ranks BACKEND [--device cpu]: one rank of a small GPT's training on one GPU.

Several ranks share a card over gloo; NCCL takes one rank a card. `ranks` starts both. Rank 0 prints a line "ROW {json}"
for each thing that must hold: every stage has the bits of stage 0 and is near plain torch, recomputed layers draw the
same dropout, offloaded state has the bits of resident state, also in an evaluation right after a step, and a step's
peak is what was planned.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import zerofn
from benchmarks.common.processes import free_port
from zerofn import Offload, optim, tree

WIDTH, HEADS, LAYERS, VOCAB, LENGTH, ROWS, STEPS = 64, 4, 4, 257, 48, 8, 4
RATE, DECAY, NEAR = 1e-3, 0.1, 2e-3
PLANNED = 1.02  # of the plan's peak


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)))))


class GPT(nn.Module):
    """Tokens [batch, time] -> logits [batch, time, VOCAB]."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return F.linear(self.norm(h), self.tokens.weight / math.sqrt(WIDTH))


class Trial:
    """Training on this rank's rows of each batch."""

    def __init__(self, device: str, folder: str) -> None:
        self.device, self.folder = torch.device(device), folder

    def allocated(self) -> int:
        gc.collect()
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def batch(self, step: int, whole: bool = False) -> dict[str, Tensor]:
        rows = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        mine = rows if whole else rows.chunk(dist.get_world_size())[dist.get_rank()]
        return {"x": mine[:, :-1].to(self.device), "y": mine[:, 1:].to(self.device)}

    def model(self, dropout: float) -> GPT:
        torch.manual_seed(0)
        return GPT(dropout).to(self.device)

    def train(
        self, stage: int, dropout: float = 0.0, precision: str = "fp32", offload: Any = None, **options: Any
    ) -> tuple[list[Tensor], Any]:
        """(losses, an evaluation after each step, and the whole state, on the host; the last step's plan)."""
        module = self.model(dropout)
        before = self.allocated()  # with what matrix products work in, which no plan knows
        state = zerofn.shard(  # of what nobody else refers to, so that it does not count
            zerofn.TrainState.create(
                params={k: p.detach().clone() for k, p in module.named_parameters()},
                tx=optim.adamw(RATE, weight_decay=DECAY),
            ),
            stage=stage,
            precision=precision,
            offload=offload,
            device=self.device,
        )

        def loss_fn(params: Any, batch: Any) -> Tensor:
            logits = functional_call(module, params, (batch["x"],))
            return F.cross_entropy(logits.flatten(0, 1).float(), batch["y"].flatten())

        def step(state: Any, batch: Any) -> Any:
            loss, grads = state.value_and_grad(loss_fn)(batch)
            return state.apply_gradients(grads), {"loss": loss}

        def evaluate(state: Any, batch: Any) -> Tensor:
            return zerofn.gather(state.params)["tokens.weight"].float().square().sum()

        run, read = zerofn.compile(step, deterministic=True, **options), zerofn.compile(evaluate, deterministic=True)
        found = []
        for k in range(STEPS):
            if self.device.type == "cuda" and k == STEPS - 1:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            state, aux = run(state, self.batch(k))
            if self.device.type == "cuda" and k == STEPS - 1:
                self.peak = torch.cuda.max_memory_allocated() - before
            found += [aux["loss"], read(state, self.batch(k))]
        plan = run.lower(state, self.batch(STEPS - 1)).memory()
        return [x.float().cpu() for x in tree.leaves((found, zerofn.unshard(state.params)))], plan

    def plain(self) -> list[Tensor]:
        """The parameters that torch alone arrives at, with whole batches."""
        module = self.model(0.0)
        adamw = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=DECAY)
        for k in range(STEPS):
            batch = self.batch(k, whole=True)
            F.cross_entropy(module(batch["x"]).flatten(0, 1), batch["y"].flatten()).backward()
            adamw.step()
            adamw.zero_grad()
        return [x.detach().cpu() for x in tree.leaves(dict(module.named_parameters()))]

    def offloads(self) -> dict[str, Offload]:
        drive = {"drives": Offload(optimizer="nvme", path=self.folder)}
        if self.device.type == "cpu":  # host memory is no tier of its own
            return drive
        return {"host": Offload("cpu"), "host, parameters too": Offload(optimizer="cpu", params="cpu"), **drive}


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def trials(trial: Trial, say: Any) -> None:
    first, plan = trial.train(0)
    furthest = max(float((x - y).abs().max()) for x, y in zip(first[2 * STEPS :], trial.plain(), strict=True))
    say("stage 0 is near plain torch", furthest < NEAR, furthest=furthest)
    for stage in (1, 2, 3):
        found, plan = trial.train(stage)
        say(f"stage {stage} has the bits of stage 0", same(found, first))
    if trial.device.type == "cuda":
        ratio = trial.peak / plan.total
        say("stage 3: peak as planned", ratio <= PLANNED, ratio=ratio, peak=trial.peak, planned=plan.total)
    for precision in ("bf16", "fp16") if trial.device.type == "cuda" else ("bf16",):
        kept, _ = trial.train(3, 0.2, precision)
        again, _ = trial.train(3, 0.2, precision, remat="full")
        say(f"{precision}: recomputed layers draw the same dropout", same(again, kept))
        for name, offload in trial.offloads().items():
            found, _ = trial.train(3, 0.2, precision, offload)
            say(f"{precision}: state in {name} has the bits of resident state", same(found, kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=["gloo", "nccl"])
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    if options.device != "cpu":
        torch.cuda.set_device(options.device)
    dist.init_process_group(options.backend)
    with tempfile.TemporaryDirectory() as folder:
        trials(Trial(options.device, folder), say_all)
    dist.destroy_process_group()


def say_all(what: str, passed: bool, **found: Any) -> None:
    """Rank 0 prints a row, which has passed if it has on all ranks."""
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, passed)
    if dist.get_rank() == 0:
        where = _named(dist.get_world_size(), dist.get_backend())
        print("ROW " + json.dumps({"what": f"{where}: {what}", "passed": all(everywhere), **found}), flush=True)


def _named(size: int, backend: str) -> str:
    return f"{size} rank{'s' * (size > 1)} over {backend}"


def job(run: Any, backend: str, size: int, *module: str) -> None:
    """Run some ranks of a module; their rows, and a row for a job that fails or takes too long."""
    device = ["--device", "cpu"] if run.dry else []
    command = [sys.executable, "-m", *(module or ("benchmarks.gpu.ranks", backend)), *device]
    port, logs = str(free_port()), [Path(tempfile.mkstemp()[1]) for _ in range(size)]
    started = []
    for rank, log in enumerate(logs):
        places = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        places["PYTHONFAULTHANDLER"] = "1"  # one that is ended for its time says where it was
        with log.open("w") as out:
            started.append(subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | places))
    why = ""
    while any(x.poll() is None for x in started) and not any(x.poll() for x in started):
        if run.left() < 1:
            why = "no time"
            break
        time.sleep(0.05)
    time.sleep(2.0 * any(x.poll() for x in started))  # the others say what they heard
    for process in started:
        process.send_signal(signal.SIGABRT)
    time.sleep(0.5 * any(x.poll() is None for x in started))
    for process in started:
        process.kill()
        process.wait()
    said = [log.read_text(errors="replace").splitlines() for log in logs]
    for line in said[0]:
        if line.startswith("ROW "):
            run.row(**json.loads(line.removeprefix("ROW ")))
    if why or any(x.returncode for x in started):
        tails = [line[:300] for lines in said for line in lines[-120:] if not line.startswith("ROW ")]
        error = "\n".join(filter(None, [why, *tails]))
        run.row(what=f"{_named(size, backend)}: all ends well", passed=False, error=error)
    for log in logs:
        log.unlink()


def ranks(run: Any) -> None:
    """Two ranks of gloo on one device, then one of NCCL: it refuses two on a device."""
    job(run, "gloo", 2)
    if not run.dry:
        job(run, "nccl", 1)


def meshes(run: Any) -> None:
    """Two ranks of gloo on one device, on meshes."""
    job(run, "gloo", 2, "benchmarks.gpu.meshes")


if __name__ == "__main__":
    main()
