"""Make an optimizer of two functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..util.arguments import known_arguments
from . import checks
from .base import About, GradientTransformation, Mask


@known_arguments
def from_functions(
    init: Callable[[Any], Any], update: Callable[..., tuple[Any, Any]], name: str = "", masks: Sequence[Mask] = ()
) -> GradientTransformation:
    """Return the transformation that consists of two pure functions of yours, as in optax.

    They are `init(params) -> state` and `update(grads, state, params) -> (updates, state)`. The state is any pytree
    of tensors. Updates are added to the parameters. `name` is shown by `repr`. `masks`: functions of a logical leaf
    by which `update` selects leaves; `TrainState.create` raises if one of them selects none.

    Functions that use `zerofn.tree_map` and elementwise operations work on `Sharded` trees as they are. For anything
    else use `zerofn.global_norm`, `leaf_norms`, `vdot` or `gather`. A step whose gradients are not finite changes
    nothing; your functions need no code for it. Raises `TypeError` for an argument that is not a function of these
    arguments, and if `update` does not return a pair. A transformation around others is a `GradientTransformation`,
    whose field `masks` also contains their masks.

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
    for mask in masks:
        checks.leaf_function("from_functions", "masks", mask)
    shown = name or "from_functions"

    def checked(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        found = update(grads, state, params)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise TypeError(
                f"{shown}: update must return the pair (updates, state), got a "
                f"{type(found).__name__}{f' of {len(found)}' if isinstance(found, tuple | list) else ''}."
            )
        return found

    return GradientTransformation(init, checked, About(shown, (init, update)), tuple((shown, mask) for mask in masks))
