"""0/1 Adam: momentum is sent as signs from the start, and the variance is updated ever more rarely."""

from __future__ import annotations

from collections.abc import Callable

from . import checks
from .base import GradientTransformation, Mask, ScalarOrSchedule
from .fused import LeafScale
from .onebit_adam import adam_of_signs
from .phases import CODED, EXACT, Phase
from .torch_optimizers import told


@told
def zero_one_adam(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
    lr_scale: LeafScale | None = None,
    *,
    var_freeze_step: int,
    var_update_scaler: int = 16,
) -> GradientTransformation:
    """0/1 Adam (Lu et al. 2022, arXiv:2202.06009, Algorithm 1) without local steps.

    It is `onebit_adam` without a warm-up. The variance is updated in the first `var_update_scaler` updates, then in as
    many updates at intervals of 2, then 4, 8, and so on, until update `var_freeze_step`. In these updates it
    is `adamw` with the exact mean of gradients; in all others, ranks send the signs of their parts of the momentum. v
    is bias-corrected by the number of its updates. State, memory, bytes and rules for a chain are those of
    `onebit_adam`.

    The paper's other policy, local steps whose sum is sent as signs, is not implemented: every step sends. (For
    replicas that train alone for some steps, see `zerofn.diloco`.) `mask`, `lr_scale`: as in `adamw`. Raises
    `ValueError` for hyperparameters out of range.

    >>> from zerofn import optim
    >>> tx = optim.zero_one_adam(1e-3, var_freeze_step=10_000)
    """
    name = "zero_one_adam"
    checks.count(name, 1, var_freeze_step=var_freeze_step, var_update_scaler=var_update_scaler)
    how, policy = (learning_rate, b1, b2, eps, weight_decay, mask, lr_scale), (var_freeze_step, var_update_scaler)
    return adam_of_signs(name, how, policy, variance_policy(*policy), warms_up=False)


def variance_policy(freeze_step: int, scaler: int) -> Callable[[int], Phase]:
    """Return the kinds of steps: exact behind k updates if k is k_j, with k_0 = 0 and k_j+1 = k_j + 2^floor(j /
    `scaler`), and below `freeze_step`.

    >>> kind = variance_policy(20, 2)
    >>> [k for k in range(30) if kind(k).kind == "exact"]
    [0, 1, 2, 4, 6, 10, 14]
    """

    def phase(count: int) -> Phase:
        if count >= freeze_step:
            return Phase(CODED)
        at, interval = 0, 1
        while count >= at + scaler * interval:  # `scaler` updates of v come in a row with one interval
            at, interval = at + scaler * interval, 2 * interval
        since = (count - at) % interval
        if since:
            return Phase(CODED, min(interval - since, freeze_step - count))
        return Phase(EXACT, 1)

    return phase
