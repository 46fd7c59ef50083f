"""What keeps a gate from using few experts, and its logits from growing."""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives import all_reduce
from ..comm.current_mesh import axis_of
from ..comm.mesh import Axis
from ..util.arguments import checked


@checked()
def load_balance_loss(
    logits: Tensor, expert: Tensor, *, used: Tensor | None = None, axis: str | Axis | None = None
) -> Tensor:
    """Return E times the sum over experts of (mean gate) x (fraction of the choices). It is 1 for a uniform load.

    `logits` [S, E]: floating; the gates are their softmax, in float32 or float64. `expert` int64 [n, S]: the choices
    that count, from `Routing.expert`: `[:1]` for first choices (GShard; DeepSpeed for k = 2), or all k (Switch
    Transformers with k = 1; DeepSpeed for k > 2). `used` bool [S]: choices of tokens with False do not count. `axis`:
    take means over the tokens of all its ranks, which must have the same number of tokens; None for this rank's tokens
    only.

    -> a 0-d tensor, differentiable in `logits`. With `axis` all ranks must call it. Raises `ValueError` for shapes that
    do not fit, and for an axis that does not exist.

    >>> load_balance_loss(torch.zeros(2, 2), torch.tensor([[0, 1]]))
    tensor(1.)
    """
    num_tokens, num_experts = logits.shape if logits.dim() == 2 else (-1, -1)
    if (
        num_tokens < 0
        or expert.dim() != 2
        or expert.shape[1] != num_tokens
        or (used is not None and tuple(used.shape) != (num_tokens,))
    ):
        of_used = "" if used is None else f", used {list(used.shape)}"
        raise ValueError(
            f"moe.load_balance_loss: expected logits [tokens, experts] and choices [n, tokens], got "
            f"{list(logits.shape)} and {list(expert.shape)}{of_used}."
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = expert.unsqueeze(-1) == torch.arange(num_experts, device=logits.device)
    if used is not None:
        chosen = chosen & used.unsqueeze(-1)
    means = torch.stack([torch.softmax(logits, -1).mean(0), chosen.to(logits.dtype).mean((0, 1))])
    if axis is not None:
        where = axis_of(axis)
        means = all_reduce(means, where) / where.size
    return num_experts * (means[0] * means[1]).sum()


@checked()
def z_loss(logits: Tensor) -> Tensor:
    """Return the mean over tokens of the squared log-sum-exp of a gate's logits (ST-MoE).

    `logits` [S, E]: floating, taken in float32 at least. -> a 0-d tensor, differentiable in `logits`.

    >>> z_loss(torch.zeros(2, 1))
    tensor(0.)
    """
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1).square().mean()
