"""A plain torch step and a ZeroFn step for the same tiny model and data, to be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call

import zerofn
from tests.support import tiny_models
from zerofn import optim

STEPS, ROWS = 5, 12  # rows divide among 1, 2, 3 and 4 ranks


def build(name: str, dtype: torch.dtype) -> torch.nn.Module:
    """The model, seeded; dropout off, batch norm on."""
    torch.manual_seed(0)
    model = tiny_models.BUILDERS[name]().to(dtype)
    if name == "mixtral" and dtype is torch.float64:
        model.set_experts_implementation("batched_mm")  # torch has no grouped matmul in float64
    return model.train() if name == "resnet" else model.eval()


def batches(name: str, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """STEPS batches of ROWS rows."""
    out = []
    for k in range(STEPS):
        generator = torch.Generator().manual_seed(k)
        b = {}
        for key, value in tiny_models.batch(name).items():
            shape = (ROWS, *value.shape[1:])
            if value.is_floating_point():
                b[key] = torch.randn(shape, generator=generator, dtype=dtype)
            else:
                b[key] = torch.randint(3, 96, shape, generator=generator)
        out.append(b)
    return out


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    """A smooth scalar of every logit."""
    targets = torch.arange(logits.shape[-1], dtype=logits.dtype).sin()
    return (logits.softmax(-1) - targets).square().mean() + logits.square().mean() * 0.1


def part(b: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """This rank's rows."""
    return {k: v[rank * ROWS // size : (rank + 1) * ROWS // size] for k, v in b.items()}


def plain(name: str, dtype: torch.dtype, make_optimizer: Any, size: int = 1) -> tuple[list[float], dict[str, Any]]:
    """STEPS steps of plain torch on the global batch: losses, parameters.

    Batch norm's statistics are local to a rank, so there the reference is the mean of per-rank gradients.
    """
    model = build(name, dtype)
    parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(parameters.values())
    losses = []
    shares = size if name == "resnet" else 1
    for b in batches(name, dtype):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(shares):
            loss = loss_of(model(**part(b, rank, shares)).logits)
            (loss / shares).backward()
            total += loss.item() / shares
        for p in parameters.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
        losses.append(total)
    return losses, {k: p.detach() for k, p in parameters.items()}


def sharded(
    name: str, dtype: torch.dtype, tx: optim.GradientTransformation, stage: int, compiled: bool = True
) -> tuple[list[float], dict[str, Any]]:
    """The same with ZeroFn on this rank's rows."""
    model = build(name, dtype)
    buffers = {k: v.clone() for k, v in model.named_buffers()}
    norm = name == "resnet"
    axis = zerofn.Mesh.of(None).axis()

    def init() -> Any:
        return zerofn.TrainState.create(
            params=dict(build(name, dtype).named_parameters()), tx=tx, extra=buffers if norm else None
        )

    def loss_fn(params: Any, b: Any, extra: Any) -> Any:
        inside = {} if extra is None else {k: v.clone() for k, v in extra.items()}
        out = functional_call(model, (params, inside), (), b)
        return loss_of(out.logits), (inside if norm else None)

    def train_step(state: Any, b: Any) -> Any:
        (loss, extra), grads = state.value_and_grad(loss_fn, has_aux=True)(b, state.extra)
        return state.apply_gradients(grads, extra=extra), {"loss": loss}

    state = zerofn.shard(init(), stage=stage, unit=unit_of)
    step = zerofn.compile(train_step) if compiled else train_step
    losses = []
    for b in batches(name, dtype):
        state, aux = step(state, part(b, axis.rank, axis.size))
        losses.append(aux["loss"].item())
    return losses, zerofn.unshard(state.params)


def unit_of(name: str) -> str:
    """Small units, so that tiny models have several."""
    numbers = [i for i, p in enumerate(name.split(".")) if p.isdecimal()]
    parts = name.split(".")
    return ".".join(parts[: numbers[0] + 1]) if numbers else ".".join(parts[:-1])
