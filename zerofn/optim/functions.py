"""An optimizer in two functions of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import checks
from .base import GradientTransformation


def from_functions(
    init: Callable[[Any], Any], update: Callable[..., tuple[Any, Any]], name: str = ""
) -> GradientTransformation:
    """The transformation of a pair of pure functions on torch tensors, in optax's shape: `init(params) -> state`,
    `update(grads, state, params) -> (updates, state)`, where updates are added to the parameters.

    The state is any pytree of tensors. What is written with `zerofn.tree_map` and elementwise operations holds on
    `Sharded` trees as it stands; for what is not elementwise use `zerofn.global_norm`, `leaf_norms`, `vdot` or
    `gather`. Steps whose gradients are not finite change nothing: that is taken care of. `name` is for its repr. Raises
    `TypeError` for what is no function or does not take these arguments, and when `update` returns no pair.

        >>> import torch, zerofn
        >>> def init(params):
        ...     return zerofn.tree_map(torch.zeros_like, params)
        >>> def update(grads, state, params):
        ...     state = zerofn.tree_map(lambda m, g: 0.9 * m + g, state, grads)
        ...     return zerofn.tree_map(lambda m: -0.1 * m, state), state
        >>> zerofn.optim.from_functions(init, update, "momentum")
        momentum(init, update)
    """
    checks.takes("from_functions", "init", init, 1, "init(params) -> state")
    checks.takes("from_functions", "update", update, 3, "update(grads, state, params) -> (updates, state)")

    def checked(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        found = update(grads, state, params)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise TypeError(
                f"{name or 'from_functions'}: update must return the pair (updates, state), got a "
                f"{type(found).__name__}{f' of {len(found)}' if isinstance(found, tuple | list) else ''}."
            )
        return found

    return GradientTransformation(init, checked, name or "from_functions", (init, update))
