"""The noise of gates: functions of a key, or of the step's own."""

from __future__ import annotations

import torch
from torch import Tensor

from ..random.draws import check_scalar, fill
from ..util.arguments import checked


def uniform(key: Tensor | None, like: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Return uniform draws from [low, high) in the shape, dtype and on the device of `like`.

    Without a key it is torch's own draw, for which a loss function has the step's key.
    """
    if key is None:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device).uniform_(low, high)
    check_scalar(key, "moe", "the key")
    return fill("uniform", key, 0, like.shape, (low, high), like.dtype, like.device)


@checked("logits")
def gumbel(logits: Tensor, key: Tensor | None = None) -> Tensor:
    """Return noise for `route`: the k largest of `logits + noise` are k experts drawn by their probabilities.

    `logits` [...]: floating. `key`: see `zerofn.random.key`; without a key, torch draws, and inside a loss function
    these draws depend on the step's key, as those of dropout do.

    -> Gumbel(0, 1) draws, in the shape, dtype and on the device of `logits` (Gumbel-max trick; DeepSpeed's RSample).
    Raises `TypeError` for anything but a key.

    >>> import zerofn
    >>> gumbel(torch.zeros(2, 3), zerofn.random.key(0)).shape
    torch.Size([2, 3])
    """
    tiny = torch.finfo(logits.dtype).tiny  # a draw may be 0, whose logarithm is infinite
    return -(-uniform(key, logits).clamp_min(tiny).log()).clamp_min(tiny).log()


@checked("x", "epsilon")
def jitter(x: Tensor, key: Tensor | None = None, epsilon: float = 1e-2) -> Tensor:
    """Return `x` times uniform draws from [1 - epsilon, 1 + epsilon): the input of a gate (Switch Transformers).

    `x` [...]: floating. `key`: see `gumbel`. Raises `ValueError` unless 0 <= epsilon < 1, and `TypeError`
    for anything but a key.

    >>> import zerofn
    >>> jitter(torch.ones(2), zerofn.random.key(0), epsilon=0.0)
    tensor([1., 1.])
    """
    if not 0 <= epsilon < 1:
        raise ValueError(f"moe.jitter: epsilon={epsilon} must be at least 0 and less than 1, such as 0.01.")
    return x * uniform(key, x, 1 - epsilon, 1 + epsilon) if epsilon else x
