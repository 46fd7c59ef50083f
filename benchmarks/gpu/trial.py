"""A small GPT, and its training on this rank's rows, on a GPU or the CPU."""

from __future__ import annotations

import gc
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import zerofn
from zerofn import Offload, optim, tree

WIDTH, HEADS, LAYERS, VOCAB, LENGTH, ROWS, STEPS = 64, 4, 4, 257, 48, 8, 4
RATE, DECAY = 1e-3, 0.1


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
        self,
        stage: int,
        dropout: float = 0.0,
        precision: str = "fp32",
        offload: Any = None,
        *,
        num_microbatches: int = 1,
        storage: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[list[Tensor], Any]:
        """(losses, an evaluation after each step, and the whole state, on the host; the last step's plan).

        `storage`: more for `shard`. `options`: for `compile`.
        """
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
            **(storage or {}),
        )

        def loss_fn(params: Any, batch: Any) -> Tensor:
            logits = functional_call(module, params, (batch["x"],))
            return F.cross_entropy(logits.flatten(0, 1).float(), batch["y"].flatten())

        def step(state: Any, batch: Any) -> Any:
            vg = state.value_and_grad(loss_fn)
            if num_microbatches > 1:
                vg = zerofn.accumulate(vg, num_microbatches, reduce="microbatch")
            loss, grads = vg(batch)
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


def begin(backend: str, device: str) -> None:
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
