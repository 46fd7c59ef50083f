"""Steps of small models, with the regions that a compiler gets, or compiled."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.small_steps import captures_of
from tests.support.tiny_models import BUILDERS
from tests.support.tiny_models import batch as batch_of
from zerofn import optim
from zerofn.graph.nested import Call, calls, graphs_of, is_region
from zerofn.lowering.outline_regions import outline_regions
from zerofn.passes import Pass, before

OUTLINED = before("hide_sums", Pass(outline_regions, "body"))
TOKENS, WIDTH = 24, 16


class Blocks(nn.Module):
    """Few regions: residual blocks of a norm, a product, a lone nonlinearity and a product."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(num_layers))
        self.down = nn.ModuleList(nn.Linear(3 * WIDTH, WIDTH) for _ in range(num_layers))
        self.norm = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(num_layers + 1))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed(input_ids)
        for norm, up, down in zip(self.norm, self.up, self.down, strict=False):
            x = x + down(F.gelu(up(norm(x))))
        return F.linear(self.norm[-1](x), self.embed.weight)


@functools.cache
def model_of(name: str) -> nn.Module:
    """The same model for the same name; "blocks", "deep blocks" or one of `tiny_models`."""
    torch.manual_seed(0)
    if "blocks" in name:
        return Blocks(5 if "deep" in name else 2)
    model = BUILDERS[name]().eval()
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module.config, "use_cache"):
            module.config.use_cache = False
    return model


def step_of(
    name: str,
    stage: int = 3,
    num_microbatches: int = 1,
    precision: str | None = None,
    reduce: str = "step",
    **options: Any,
) -> tuple[Any, Any, Any]:
    """(a compiled step, its state, this rank's rows); `options` of `compile`."""
    model = model_of(name)
    params = {k: p.detach().clone() for k, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1))
    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=tx), stage=stage, precision=precision)

    @functools.partial(zerofn.compile, **options)
    def step(state: Any, rows: Any) -> Any:
        def loss_fn(p: Any, rows: Any) -> torch.Tensor:
            out = functional_call(model, {**p, **buffers}, kwargs=rows)
            logits = getattr(out, "logits", out).flatten(0, -2)
            return F.cross_entropy(logits.float(), torch.arange(len(logits)) % 3)

        vg = state.value_and_grad(loss_fn)
        loss, grads = (vg if num_microbatches == 1 else zerofn.accumulate(vg, num_microbatches, reduce=reduce))(rows)
        return state.apply_gradients(grads), loss

    rank = dist.get_rank() if dist.is_initialized() else 0
    ids = torch.arange(16).reshape(2, 8) * 7 % TOKENS
    rows = {"input_ids": ids} if "blocks" in name else batch_of(name)
    return step, state, {k: x.roll(rank, 0) for k, x in rows.items()}


def trained(name: str, *args: Any, **options: Any) -> tuple[Any, Any, list[Call]]:
    """(losses and parameters of two steps, the step's plan, its regions in order); arguments as of `step_of`."""
    step, state, rows = step_of(name, *args, **options)
    losses = []
    for _ in range(2):
        state, loss = step(state, rows)
        losses.append(loss)
    (entry,) = captures_of(step)
    found = [call for gm in graphs_of(entry.program.gm) for _, call in calls(gm) if is_region(call.body)]
    return (losses, zerofn.unshard(state.params)), step.lower(state, rows), found
