"""What AdamW, SGD and Lion share: update rules with one operation for each unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .base import About, Fused, GradientTransformation, LeafInfo, Mask, ScalarOrSchedule, masks_of, rate_at
from .leaf_runs import map_runs, spread

LeafScale = Callable[[LeafInfo], float]
Call = Callable[[list[Tensor], tuple[Any, ...], int], Sequence[Tensor]]


class LeafConstants(NamedTuple):
    """The constants of an update rule that differ among leaves. An operation takes them as runs of its unit."""

    weight_decay: float
    mask: Mask | None  # which leaves decay; all by default
    lr_scale: LeafScale | None  # factor of the learning rate; 1 by default

    def decay(self, leaf: LeafInfo) -> float:
        """Return the weight decay of a leaf."""
        return float(self.weight_decay) if self.mask is None or self.mask(leaf) else 0.0

    def scale(self, leaf: LeafInfo) -> float:
        """Return the factor of a leaf's learning rate."""
        return 1.0 if self.lr_scale is None else float(self.lr_scale(leaf))

    def both(self, leaf: LeafInfo) -> tuple[float, float]:
        """Return the weight decay of a leaf, and the factor of its learning rate."""
        return self.decay(leaf), self.scale(leaf)

    def over(self, params: Any) -> tuple[Any, Any]:
        """Return weight decays and factors as trees of floats and tensors that match `params`."""
        return spread(params, self.decay), spread(params, self.scale)


def _fused_step(
    call: Call,
    learning_rate: ScalarOrSchedule,
    constants: LeafConstants,
    count: Tensor,
    trees: Sequence[Any],
    factor: Tensor | None,
    finite: Tensor | None,
) -> tuple[Tensor, list[Any]]:
    """Call `call(tensors, runs, offset)` on every unit; return the next count, the new parameters and the new moments.

    `trees`: parameters, gradients, then moments. `tensors`: those of one unit. `runs`: the arguments from `count`
    to `decays` of the operations in `ops.update_rule`. `offset`: the index of the shard's first element in its
    unit.
    """
    rate = rate_at(learning_rate, count)
    lr, base = (rate, 1.0) if isinstance(rate, Tensor) else (None, float(rate))
    after = count + (1 if finite is None else finite)

    def rule(tensors: list[Tensor], offset: int, starts: list[int], stops: list[int], found: list[Any]) -> Any:
        rates, decays = [base * scale for _, scale in found], [decay for decay, _ in found]
        return call(tensors, (after, lr, factor, finite, starts, stops, rates, decays), offset)

    fresh = map_runs(rule, constants.both, *trees)
    return after, fresh or [trees[0], *trees[2:]]


def fused_rule(
    name: str,
    args: tuple[Any, ...],
    init: Callable[[Any], Any],
    update: Callable[..., tuple[Any, Any]],
    call: Call,
    moments: Sequence[str],
    learning_rate: ScalarOrSchedule,
    constants: LeafConstants,
) -> GradientTransformation:
    """Return the transformation whose `apply` runs `call` once on every unit.

    Its state is a namedtuple with the field `count`. `moments`: the names of the fields with moments, in the order in
    which `call` takes and returns them.
    """

    def apply(grads: Any, state: Any, params: Any, factor: Tensor | None, finite: Tensor | None) -> tuple[Any, Any]:
        trees = [params, grads, *(getattr(state, name) for name in moments)]
        count, (p, *fresh) = _fused_step(call, learning_rate, constants, state.count, trees, factor, finite)
        return p, state._replace(count=count, **dict(zip(moments, fresh, strict=True)))

    label = constants.both if constants.mask or constants.lr_scale else None
    about = About(name, args, label, lambda state: rate_at(learning_rate, state.count))
    masks = masks_of(name, constants.mask)
    return GradientTransformation(init, update, about, masks, Fused(apply, by_runs=True))
