"""Layers of attention with masks, on the weights of the perceptron of `small_steps`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.small_steps import WIDTH, batch_of

LENGTH = 12


def masked_batch() -> dict[str, Tensor]:
    """Two rows of tokens [2, LENGTH, WIDTH], targets, and a mask that allows about half of all pairs."""
    rows = batch_of(rows=2 * LENGTH)
    x, y = (rows[k].view(2, LENGTH, WIDTH) for k in "xy")
    mask = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.5
    return {"x": x, "y": y, "mask": mask | torch.eye(LENGTH, dtype=torch.bool)}


def heads(x: Tensor, num: int = 4) -> Tensor:
    """[B, L, W] -> [B, H, L, W / H]."""
    return x.unflatten(-1, (num, -1)).transpose(1, 2)


def loss_with(
    masks: Callable[[Any], list[Tensor | None]],
    num_layers: int = 4,
    layer: Callable[..., Tensor] | None = None,
    **options: Any,
) -> Callable[[Any, Any], Tensor]:
    """A loss behind layers of attention. `masks(batch)`: of the layers, in turn. `layer(one, *args)`: runs one."""

    def one(p: Any, k: int, x: Tensor, mask: Tensor | None) -> Tensor:
        x = torch.nn.functional.linear(x, p[f"{3 * k}.weight"], p[f"{3 * k}.bias"])
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(heads(x), heads(x.sin()), heads(x.cos()), mask, **options)
        return out.transpose(1, 2).reshape(x.shape)

    def loss_fn(p: Any, batch: Any) -> Tensor:
        x, given = batch["x"].to(p["0.weight"].dtype), masks(batch)
        for k in range(num_layers):
            mask = given[k % len(given)]
            x = one(p, k, x, mask) if layer is None else layer(one, p, k, x, mask)
        return (x - batch["y"]).square().mean()

    return loss_fn


def checkpointed(one: Callable[..., Tensor], *args: Any) -> Tensor:
    """A layer that is recomputed in the backward pass."""
    out: Tensor = torch.utils.checkpoint.checkpoint(one, *args, use_reentrant=False)  # type: ignore[no-untyped-call]
    return out
