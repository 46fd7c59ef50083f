"""Adafactor: Adam whose second moments are stored as averages of rows and columns."""

from __future__ import annotations

from ..util.arguments import checked
from . import checks
from .base import GradientTransformation, Mask, ScalarOrSchedule, named
from .block_rms import clip_by_block_rms, scale_by_param_block_rms
from .chain import chain
from .decay import add_decayed_weights
from .ema import ema
from .factored_rms import scale_by_factored_rms
from .scale import scale, scale_by_learning_rate
from .torch_optimizers import told


@told
@checked()
def adafactor(
    learning_rate: ScalarOrSchedule | None = None,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    decay_offset: int = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    weight_decay_rate: float | None = None,
    eps: float = 1e-30,
    factored: bool = True,
    weight_decay_mask: Mask | None = None,
) -> GradientTransformation:
    """Adafactor (Shazeer and Stern 2018, Algorithm 4), with optax's arguments.

    A chain of `scale_by_factored_rms`, `clip_by_block_rms`, `scale_by_learning_rate`, `scale_by_param_block_rms`,
    `ema` and `add_decayed_weights`, in this order. The last five are left out if their argument
    (`clipping_threshold`, `learning_rate`, `multiply_by_parameter_scale`, `momentum`, `weight_decay_rate`) is None
    or False. As in optax, decayed weights are not multiplied by the learning rate.

    Shards are not gathered. A step has at most three small all-gathers: one of a number for each row and column,
    and two of one or two numbers for each leaf. Raises `ValueError` for hyperparameters out of range.

    >>> import torch
    >>> tx = adafactor(0.1)
    >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(params), params)[0]
    {'w': tensor([-0.1000, -0.1000])}
    """
    if learning_rate is not None:
        checks.learning_rate("adafactor", learning_rate)
    checks.mask("adafactor", weight_decay_mask)
    parts = [scale_by_factored_rms(factored, decay_rate, decay_offset, min_dim_size_to_factor, eps)]
    if clipping_threshold is not None:
        parts.append(clip_by_block_rms(clipping_threshold))
    if learning_rate is not None:
        parts.append(scale_by_learning_rate(learning_rate, flip_sign=False))
    if multiply_by_parameter_scale:
        parts.append(scale_by_param_block_rms())
    if momentum is not None:
        parts.append(ema(momentum, debias=False))
    if weight_decay_rate is not None:
        parts.append(add_decayed_weights(weight_decay_rate, weight_decay_mask))
    args = (learning_rate, min_dim_size_to_factor, decay_rate, decay_offset, multiply_by_parameter_scale)
    more = (clipping_threshold, momentum, weight_decay_rate, eps, factored, weight_decay_mask)
    return named(chain(*parts, scale(-1.0)), "adafactor", *args, *more)
