"""optax's contract: a gradient transformation is a pair of pure functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import tree
from ..geometry.layout import LeafInfo as LeafInfo
from ..util.arguments import check_fields
from .as_code import as_code

ScalarOrSchedule = float | Callable[[Tensor], Any]


Mask = Callable[[LeafInfo], bool]


class Apply(Protocol):
    """A whole step in one call: `(grads, state, params, factor, finite) -> (params, state)`.

    It unscales, clips, updates and skips in one pass over memory. `factor`: None, or a float scalar tensor that
    multiplies every gradient. `finite`: the finite check, None or a bool scalar tensor. If it is False, parameters
    and state stay unchanged, bit for bit.
    """

    def __call__(
        self, grads: Any, state: Any, params: Any, factor: Tensor | None, finite: Tensor | None
    ) -> tuple[Any, Any]:
        """Return the next parameters and state."""


@dataclass(frozen=True)
class Fused:
    """How a transformation is fused with others into one pass over memory.

    `apply`: a whole step in one call, see `Apply`. `factor(grads, factor so far) -> factor`: for a transformation that
    only multiplies by a scalar. `by_runs`: whether `apply` leaves the padding between a shard's leaves unchanged.

    >>> from zerofn import optim
    >>> tx, params = optim.sgd(0.5), {"w": torch.ones(2)}
    >>> tx.fused.apply({"w": torch.ones(2)}, tx.init(params), params, None, None)[0]  # the new parameters
    {'w': tensor([0.5000, 0.5000])}
    """

    apply: Apply | None = None
    factor: Callable[[Any, Tensor | None], Tensor | None] | None = None
    by_runs: bool = False


@dataclass(frozen=True)
class About:
    """Description of a transformation.

    `name` and `args`: for its repr; two transformations are equal if both are. `label(leaf)`: a hashable; leaves with
    equal labels are neighbours in a unit. `learning_rate(state)`: the rate of the next update. `phase(count)`: for a
    transformation with several phases, the phase after `count` applied updates, see `phases`.

    >>> from zerofn import optim
    >>> tx = optim.sgd(0.5)
    >>> tx.about.name, tx.about.learning_rate(tx.init({"w": torch.zeros(2)}))
    ('sgd', 0.5)
    """

    name: str = ""
    args: tuple[Any, ...] = ()
    label: Callable[[LeafInfo], Hashable] | None = field(default=None, compare=False)
    learning_rate: Callable[[Any], Any] | None = field(default=None, compare=False)
    phase: Callable[[int], Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class GradientTransformation:
    """optax's pair: `init(params) -> state` and `update(grads, state, params) -> (updates, state)`.

    `apply_updates` adds updates to parameters. Two transformations are equal if their names and arguments are.
    Without a name, they are equal if their functions are.

    The other fields are optional. `about`: name, arguments, label and learning rate, see `About`. `masks`: (name of
    the transformation, mask) for every mask inside; one that selects no leaf is an error. `fused`: see `Fused`.

    >>> def update(grads, state, params=None):
    ...     return {name: -0.5 * g for name, g in grads.items()}, state
    >>> tx = GradientTransformation(lambda params: (), update)
    >>> tx.update({"w": torch.ones(2)}, tx.init({"w": torch.ones(2)}))[0]
    {'w': tensor([-0.5000, -0.5000])}
    """

    is_value: ClassVar[bool] = True  # for `zerofn.tree`, which looks at a state's at every step
    init: Callable[[Any], Any] = field(compare=False)
    update: Callable[..., tuple[Any, Any]] = field(compare=False)
    about: About = About()
    masks: tuple[tuple[str, Mask], ...] = field(default=(), compare=False)
    fused: Fused | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.about.name:
            object.__setattr__(self, "about", replace(self.about, args=(self.init, self.update)))

    def __reduce__(self) -> Any:
        raise TypeError(
            "a TrainState holds the functions of its optimizer, which cannot be pickled. Write zerofn.save(folder, "
            "state), and later zerofn.load(folder, like=state) with a state made by the same code."
        )

    def __copy__(self) -> GradientTransformation:
        return self

    def __deepcopy__(self, memo: Any) -> GradientTransformation:
        return self

    def __repr__(self) -> str:
        name, args = self.about.name, self.about.args
        return as_code(name, args) if name else "GradientTransformation(...)"


def masks_of(name: str, mask: Mask | None) -> tuple[tuple[str, Mask], ...]:
    """Return an optional mask of the transformation `name` as a value of the field `masks`."""
    return () if mask is None else ((name, mask),)


def named(tx: GradientTransformation, name: str, *args: Any) -> GradientTransformation:
    """Return `tx` under another name, for its repr, for comparisons and for errors about its masks."""
    about = replace(tx.about, name=name, args=args)
    return replace(tx, about=about, masks=tuple((name, mask) for _, mask in tx.masks))


def rate_inside(tx: GradientTransformation, state_of: Callable[[Any], Any]) -> Callable[[Any], Any] | None:
    """Return the learning rate of `tx` as a function of the state around it, of which `state_of` takes that of `tx`."""
    rate = tx.about.learning_rate
    return None if rate is None else lambda state: rate(state_of(state))


class EmptyState(NamedTuple):
    """The state of a transformation that stores nothing.

    >>> from zerofn import optim
    >>> optim.scale(2.0).init({"w": torch.zeros(2)})
    EmptyState()
    """


def no_state(params: Any) -> EmptyState:
    """Return the `EmptyState`: the `init` of a transformation that stores nothing."""
    return EmptyState()


def apply_updates(params: Any, updates: Any) -> Any:
    """Return `params + updates`, leaf by leaf, in the parameters' dtypes.

    >>> from zerofn import optim
    >>> optim.apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([0.5, 1.0])})
    {'w': tensor([1.5000, 2.0000])}
    """
    return tree.tree_map(lambda p, u: (p + u).to(p.dtype), params, updates)


def step(
    tx: GradientTransformation,
    grads: Any,
    state: Any,
    params: Any,
    factor: Tensor | None = None,
    finite: Tensor | None = None,
) -> tuple[Any, Any]:
    """Run one step with the semantics of `Apply`, and return the next parameters and state.

    It uses the transformation's own `apply`, if there is one. Otherwise it uses `update` and `apply_updates`, and
    selects old or new values by `finite`.
    """
    if tx.fused is not None and tx.fused.apply is not None:
        return tx.fused.apply(grads, state, params, factor, finite)
    updates, fresh = tx.update(scaled(grads, factor), state, params)
    return unless_skipped(finite, apply_updates(params, updates), params), unless_skipped(finite, fresh, state)


def scaled(grads: Any, factor: Tensor | None) -> Any:
    """Return every gradient times `factor`, in its own dtype; unchanged for None."""
    return grads if factor is None else tree.tree_map(lambda g: g * factor.to(g.dtype), grads)


def unless_skipped(finite: Tensor | None, new: Any, old: Any) -> Any:
    """Return the tree `new`, or `old` where the finite check failed. `finite`: None or a bool scalar tensor."""
    if finite is None:
        return new
    chosen = lambda a, b: torch.where(finite, a, b) if isinstance(a, Tensor) and a is not b else a  # noqa: E731
    return tree.tree_map(chosen, new, old)


def rate_at(learning_rate: ScalarOrSchedule, count: Tensor) -> float | Tensor:
    """Return the learning rate after `count` applied updates: a float, or a schedule's float64 scalar tensor."""
    return learning_rate(count) if callable(learning_rate) else learning_rate


def count_zero(params: Any) -> Tensor:
    """Return a zero counter of applied updates: int64 scalar, on the parameters' device."""
    device = next((p.device for p in tree.leaves(params)), None)
    return torch.zeros((), dtype=torch.int64, device=device)
