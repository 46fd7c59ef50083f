"""A T5 of plain torch: encoder and decoder, without relative positions; and its training state.

Sizes are those of t5-large and t5-3b (Raffel et al. 2020, section 3.7; vocabulary 32,128). Weights are random.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import zerofn
from zerofn import optim


@dataclasses.dataclass(frozen=True)
class Config:
    """`inner` is heads times d_kv; `layers` of the encoder, and as many of the decoder."""

    width: int
    ff: int
    heads: int
    inner: int
    layers: int
    vocab: int = 32128
    length: int = 128  # tokens of a source sentence, and of a target


CONFIGS = {
    "t5-large": Config(1024, 4096, 16, 1024, 24),
    "t5-3b": Config(1024, 16384, 32, 4096, 24),
    "shallow": Config(1024, 4096, 16, 1024, 6),  # t5-large's layers, six and six
    "tiny": Config(16, 32, 2, 16, 2, vocab=64, length=8),
}


class Norm(nn.Module):
    """Root mean square norm [..., width], in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Attention(nn.Module):
    """x [batch, n, width] looks at y [batch, m, width]."""

    def __init__(self, c: Config, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.norm = c.heads, causal, Norm(c.width)
        self.q, self.k, self.v = (nn.Linear(c.width, c.inner, bias=False) for _ in range(3))
        self.o = nn.Linear(c.inner, c.width, bias=False)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        mine = self.norm(x)
        y = mine if other is None else other
        q, k, v = (f(z).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for f, z in ((self.q, mine), (self.k, y), (self.v, y)))  # fmt: skip
        scores = q @ k.transpose(-1, -2)
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, -1e4)
        return x + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, c: Config, decodes: bool) -> None:
        super().__init__()
        self.self_attention = Attention(c, causal=decodes)
        self.cross = Attention(c, causal=False) if decodes else None
        self.norm = Norm(c.width)
        self.wide, self.narrow = nn.Linear(c.width, c.ff, bias=False), nn.Linear(c.ff, c.width, bias=False)

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        x = self.self_attention(x)
        if self.cross is not None:
            x = self.cross(x, encoded)
        return x + self.narrow(F.relu(self.wide(self.norm(x))))


class T5(nn.Module):
    """(source, target) int64 [batch, length] each -> the mean cross-entropy of the target's tokens, float32."""

    def __init__(self, c: Config, recompute: bool) -> None:
        super().__init__()
        self.recompute, self.scale = recompute, c.width**-0.5
        self.embedding = nn.Embedding(c.vocab, c.width)
        self.encoder = nn.ModuleList(Block(c, False) for _ in range(c.layers))
        self.decoder = nn.ModuleList(Block(c, True) for _ in range(c.layers))
        self.ends = nn.ModuleList([Norm(c.width), Norm(c.width)])

    def _run(self, block: nn.Module, *args: Tensor) -> Tensor:
        return checkpoint(block, *args, use_reentrant=False) if self.recompute else block(*args)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(source)
        for block in self.encoder:
            x = self._run(block, x)
        encoded = self.ends[0](x)
        y = self.embedding(F.pad(target[:, :-1], (1, 0)))
        for block in self.decoder:
            y = self._run(block, y, encoded)
        logits = F.linear(self.ends[1](y) * self.scale, self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def weight(name: str, shape: torch.Size) -> Tensor:
    """The parameter's first value, on the CPU."""
    if len(shape) == 1:
        return torch.ones(shape)
    deviation = 1.0 if name.startswith("embedding") else 0.5 / math.sqrt(shape[-1])
    if name.endswith(("o.weight", "narrow.weight", "q.weight")):
        deviation /= 8  # so that attention begins flat, and 48 layers do not add up
    bound = math.sqrt(3.0) * deviation
    return torch.empty(shape).uniform_(-bound, bound)


def make(name: str, recompute: bool, on_nonfinite: str) -> tuple[Callable[[], Any], Callable[..., Any]]:
    """(init_state, train_step) of one of `CONFIGS`, with AdamW."""
    with torch.device("meta"):
        module = T5(CONFIGS[name], recompute)
    shapes = {k: p.shape for k, p in module.named_parameters()}

    def init_state() -> Any:
        torch.manual_seed(0)
        params = {k: weight(k, shape) for k, shape in shapes.items()}
        return zerofn.TrainState.create(params=params, tx=optim.adamw(1e-4))

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any, batch: Any) -> Tensor:
            return functional_call(module, params, (batch["source"], batch["target"]))

        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads, on_nonfinite=on_nonfinite), {"loss": loss}

    return init_state, train_step


def unit_of(name: str) -> str:
    """A unit a layer."""
    return ".".join(name.split(".")[:2])


def num_parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in T5(CONFIGS[name], False).parameters())


def batch_of(name: str, size: int, device: str, seed: int = 0) -> dict[str, Tensor]:
    """`size` random sentence pairs."""
    c, draws = CONFIGS[name], torch.Generator().manual_seed(seed)
    return {k: torch.randint(c.vocab, (size, c.length), generator=draws).to(device) for k in ("source", "target")}
