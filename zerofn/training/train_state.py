"""`TrainState`: everything that a step carries from one call to the next, as one pytree."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Concatenate, Literal, TypeVar, cast, overload

import torch
from torch import Tensor

from .. import tree
from ..geometry.leaf_choices import ask_names, check_effect
from ..optim.base import GradientTransformation, step, unless_skipped
from ..optim.leaf_runs import leaf_info
from ..optim.phases import takes_apart, turned
from ..optim.torch_optimizers import advice, is_torchs
from ..random import fold_in
from ..sharded_math.reductions import all_finite
from ..sharding.precision import Precision
from ..sharding.sharded import Sharded, is_sharded
from ..sharding.state_tree import as_tensor
from ..util.arguments import checked, known_fields, told
from ..util.constants import QUANTISED, stores_its_own_way
from ..util.html import table
from ..util.names import attribute_of
from .extra import SAME, Update, warn_of_replace
from .feedback import Feedback, check_one, zeros
from .grad import A, P, ValueAndGrad, value_and_grad
from .learned import learning, whole, with_unlearned
from .loss_errors import check_gradients
from .loss_scale import DynamicLossScale, StaticLossScale, check_loss_scale

_ANEW = (
    "To shard the state again, with new moments: "
    "zerofn.shard(zerofn.TrainState.create(params=zerofn.unshard(state.params), tx={tx}, "
    "frozen={frozen}).replace(step=state.step, rng=state.rng))."
)

Self = TypeVar("Self", bound="TrainState")


@known_fields
@dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer state and counters: the first argument and the first result of a training step.

    `step`: number of calls of `apply_gradients`, int64 scalar. `skipped`: how many of them were skipped because of
    non-finite gradients, int64 scalar. `params`: `Sharded` or a plain tree. `opt_state`: the state of `tx`.
    `loss_scale`: None or a loss scale. `rng`: the key of all random draws, int64 scalar. `extra`: any other state
    (buffers, a moving average, the loader's position). `tx` and `frozen` are static: they are part of the treedef.
    `feedback`: None, or the rounding errors of gradients that were sent, which `shard` adds for
    `zerofn.Wire(feedback=True)`.
    """

    step: Tensor
    skipped: Tensor
    params: Any
    opt_state: Any
    loss_scale: Any
    rng: Tensor
    extra: Any
    tx: GradientTransformation
    frozen: Callable[[str], bool] | None = None
    feedback: Feedback | None = None

    if not TYPE_CHECKING:
        __getattr__ = attribute_of

    @staticmethod
    @checked("seed", "frozen")
    def create(
        *,
        params: Any,
        tx: GradientTransformation,
        loss_scale: Any = None,
        seed: int = 0,
        extra: Any = None,
        frozen: Callable[[str], bool] | None = None,
    ) -> TrainState:
        """Return a state at step 0.

        `params`: a tree of tensors; a number becomes a tensor, int64 or float64. `tx`: the optimizer. `loss_scale`:
        None or a loss scale. `seed`: the initial value of `rng`. `frozen(leaf name) -> bool`: which parameters have
        neither gradients nor moments. An `nn.Parameter` with `requires_grad=False` and integers are frozen, too.

        Raises `TypeError` if `tx` is not a gradient transformation or `params` is not a tree of tensors, and
        `ValueError` if `frozen` or a mask in `tx` selects no leaf.
        """
        if is_torchs(tx):
            raise TypeError(f"TrainState.create: tx must be a zerofn.optim.GradientTransformation, got {advice(tx)}")
        if not isinstance(tx, GradientTransformation):
            raise TypeError(
                f"TrainState.create: tx must be a zerofn.optim.GradientTransformation such as "
                f"optim.adamw(3e-4), got {type(tx).__name__}."
            )
        _check_params(params)
        params = tree.tree_map(lambda p: as_tensor(p) if isinstance(p, int | float) else p, params)
        check_loss_scale(loss_scale, "TrainState.create: loss_scale")
        _check_choices(params, tx, frozen)
        frozen = with_unlearned(params, frozen)
        params = tree.tree_map(lambda p: p.detach() if isinstance(p, Tensor) else p, params)
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"TrainState.create: seed must be an integer of at most 64 bits, got {told(seed)}.")
        zero = torch.zeros((), dtype=torch.int64)
        key = torch.full((), seed, dtype=torch.int64)
        return TrainState(
            zero, zero.clone(), params, tx.init(learning(params, frozen)), loss_scale, key, extra, tx, frozen
        )

    @overload
    def value_and_grad(
        self, loss_fn: Callable[Concatenate[Any, P], Any], has_aux: Literal[False] = False, *, rng: Tensor | None = None
    ) -> Callable[P, tuple[Tensor, Any]]: ...
    @overload
    def value_and_grad(
        self,
        loss_fn: Callable[Concatenate[Any, P], tuple[Any, A]],
        has_aux: Literal[True],
        *,
        rng: Tensor | None = None,
    ) -> Callable[P, tuple[tuple[Tensor, A], Any]]: ...
    @checked()
    def value_and_grad(self, loss_fn: Callable[..., Any], has_aux: bool = False, *, rng: Tensor | None = None) -> Any:
        """Return `f(*args) -> (loss, grads)`: `zerofn.value_and_grad` at this state.

        It uses the state's parameters, loss scale, `frozen`, and the random key of this step (or another key, `rng`).
        If `tx` averages gradients over ranks itself, as `optim.onebit_adam` does after its freeze step, `grads` are
        each rank's own gradients: leaves [ranks, *shape], of which a rank holds its own entry.
        """
        _check_frozen(self.params, self.frozen)
        update: Update | None = getattr(self, "_update", None)
        object.__setattr__(self, "_update", Update(self.extra, left=update.left if update else ()))
        key = self.rng_at() if rng is None else rng
        vg = cast(ValueAndGrad, value_and_grad(loss_fn, cast(Any, has_aux), self.loss_scale, key, self.frozen))
        if self.tx.about.phase is not None:
            vg = replace(vg, apart=takes_apart(self.tx, turned(self.tx, self.opt_state)[0]))
        return _AtState(self, vg if self.feedback is None else replace(vg, errors=self.feedback.errors))

    def rng_at(self) -> Tensor:
        """Return the random key of this step, an int64 scalar: a function of `rng` and `step`."""
        return fold_in(self.rng, self.step)

    @checked()
    def apply_gradients(
        self: Self, grads: Any, *, extra: Any = SAME, on_nonfinite: Literal["skip", "ignore"] = "skip"
    ) -> Self:
        """Return the next state: one update of the parameters and the optimizer state, unless it is skipped.

        `grads`: unscaled, as `value_and_grad` returns them. `extra`: the new `state.extra`, or a function of the new
        parameters that returns it; by default it does not change. If `on_nonfinite` is "skip" and a gradient on any
        rank is not finite, parameters, optimizer state and the floating-point leaves of `extra` stay unchanged, bit for
        bit, and `skipped` counts the step; integers in `extra` advance. A dynamic loss scale adjusts by this finite
        check. "ignore" always updates, without the check. Raises `ValueError` for another word, `TypeError` if `grads`
        is not a tree of gradients of the parameters.
        """
        if on_nonfinite not in ("skip", "ignore"):
            raise ValueError(f"apply_gradients: on_nonfinite must be 'skip' or 'ignore', got {on_nonfinite!r}.")
        check_gradients(self.params, grads)
        began: Update | None = getattr(self, "_update", None)
        feedback = self.feedback
        left = check_one(began.left if began else ())
        _check_opt_state(self.tx, self.opt_state)
        if self.tx.about.phase is not None and (began is None or began.finite is not None):
            raise ValueError(
                f"apply_gradients: {self.tx!r} needs gradients from this state's value_and_grad, which from its freeze "
                "step on are not averaged over ranks. Write loss, grads = state.value_and_grad(loss_fn)(batch)."
            )
        params, grads = learning(self.params, self.frozen), learning(grads, self.frozen)
        finite = all_finite(grads) if on_nonfinite == "skip" else None
        params, opt_state = step(self.tx, grads, turned(self.tx, self.opt_state)[0], params, None, finite)
        skipped = self.skipped if finite is None else self.skipped + finite.logical_not()
        scale = self.loss_scale
        if finite is not None and scale is not None:
            scale = scale.adjust(finite)
        if feedback is not None and left is not None:
            feedback = Feedback(unless_skipped(finite, left, feedback.errors))
            object.__setattr__(self, "_update", Update(self.extra))
        new = dataclasses.replace(
            self,
            step=self.step + 1,
            skipped=skipped,
            params=whole(self.params, params),
            opt_state=opt_state,
            loss_scale=scale,
            feedback=feedback,
        )
        before = self.extra
        if began is not None and began.finite is None and began.before is not before:  # by `replace`, in this step
            warn_of_replace()
            before = began.before
        update = Update(before, finite)
        if extra is not SAME:
            new = dataclasses.replace(new, extra=extra(new.params) if callable(extra) else extra)
        return new._after(update)

    def replace(self: Self, **changes: Any) -> Self:
        """Return a copy with some fields changed.

        For `extra` in a step with an update, see `apply_gradients(extra=)`.

        Raises `ValueError` for a sharded state if a new `frozen` changes which parameters are trained, or if a new `tx`
        needs another format of moments. Both need another `shard`.
        """
        if not isinstance(changes.get("tx", self.tx), GradientTransformation):
            raise TypeError(f"TrainState.replace: tx must be a GradientTransformation, got {told(changes['tx'])}.")
        for name in changes.keys() & {"step", "skipped", "rng"}:
            if not isinstance(changes[name], Tensor | int):
                raise TypeError(f"TrainState.replace: {name} must be a scalar tensor, got {told(changes[name])}.")
        check_loss_scale(changes.get("loss_scale"), "TrainState.replace: loss_scale")
        new = dataclasses.replace(self, **changes)
        if not changes.keys().isdisjoint(("frozen", "params")):
            _check_frozen(new.params, new.frozen)
        if new.tx != self.tx:
            _check_formats(new.opt_state)
        update: Update | None = getattr(self, "_update", None)
        if update is not None and update.finite is not None and "extra" in changes:
            warn_of_replace()
        return new if update is None else new._after(update)

    def _after(self: Self, update: Update) -> Self:
        new = dataclasses.replace(self, extra=update.select(self.extra))
        object.__setattr__(new, "_update", update)
        return new

    @property
    def learning_rate(self) -> float | Tensor | None:
        """The learning rate of the next applied update, a float or a scalar tensor; None if `tx` has none.

        For `optim.multi_transform` it is a dict by label.
        """
        rate = self.tx.about.learning_rate
        return None if rate is None else rate(self.opt_state)

    def with_precision(self: Self, precision: Precision) -> Self:
        """Return the state for a precision. For fp16 without a loss scale, it gets a `DynamicLossScale`. `feedback` is
        set to zeros if the precision has error feedback, else to None.
        """
        new = self
        if precision.compute is torch.float16 and self.loss_scale is None:
            new = new.replace(loss_scale=DynamicLossScale())
        if precision.feeds_back != (self.feedback is not None):
            new = new.replace(feedback=zeros(learning(self.params, self.frozen)) if precision.feeds_back else None)
        return new

    def __repr__(self) -> str:
        lines = [f"  {k}: {_short(v)}" for k, v in self._shown().items()]
        return "TrainState(\n" + "\n".join(lines) + "\n)"

    def _repr_html_(self) -> str:
        shown = self._shown()
        rows = [(name, "a table below" if is_sharded(x) else _short(x)) for name, x in shown.items()]
        below = "".join(x._repr_html_() for x in shown.values() if is_sharded(x))
        return table(f"{type(self).__name__} at step {_short(self.step)}", ("", ""), rows, left=(0, 1)) + below

    def _shown(self) -> dict[str, Any]:
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "frozen"}
        return shown if self.feedback is not None else {k: x for k, x in shown.items() if k != "feedback"}


tree.register_dataclass(TrainState, static=("tx", "frozen"))


@dataclass(frozen=True)
class _AtState:
    """`vg` with the parameters of a state, so that `accumulate` can reach `vg`."""

    state: TrainState
    vg: ValueAndGrad

    def __call__(self, *args: Any) -> tuple[Any, Any]:
        value, grads, left = self.vg.with_errors(self.state.params, *args)
        if left is not None:
            update: Update = getattr(self.state, "_update")  # noqa: B009
            object.__setattr__(self.state, "_update", replace(update, left=(*update.left, left)))
        return value, grads

    def with_microbatches(self, n: int, reduce: str | None) -> _AtState:
        """Return the same function over `n` times as many microbatches."""
        return _AtState(self.state, self.vg.with_microbatches(n, reduce))


def _check_params(params: Any) -> None:
    """Raise `TypeError` unless `params` is a tree of tensors and numbers."""
    paths, leaves, _ = tree.flatten_with_path(params)
    for path, x in zip(paths, leaves, strict=True):
        if not isinstance(x, Tensor | int | float):
            where = f" at {tree.name_of(path)!r}" if path else ""
            raise TypeError(
                f"TrainState.create: params must be a tree of tensors, got a {type(x).__name__}{where}; "
                "write params=dict(model.named_parameters())."
            )
        if stores_its_own_way(type(x)):
            raise TypeError(f"TrainState.create: {tree.name_of(path)!r} {QUANTISED.format(type(x).__name__)}.")


def _check_choices(params: Any, tx: GradientTransformation, frozen: Callable[[str], bool] | None) -> None:
    """Raise `ValueError` if `frozen` or a mask selects no leaf: a name may be misspelt."""
    paths, nodes, _ = tree.flatten_with_path(params, is_leaf=is_sharded)
    leaves = [
        leaf_info(p, x)
        for p, node in zip(paths, nodes, strict=True)
        for x in (node.layout.leaves if is_sharded(node) else [node])
        if hasattr(x, "shape")
    ]
    if frozen is not None:
        check_effect("TrainState.create: frozen", frozen, ask_names("frozen", frozen, [x.name for x in leaves]))
    for name, mask in tx.masks:
        check_effect(f"{name}: mask", mask, {x.name: mask(x) for x in leaves})


def _check_frozen(params: Any, frozen: Callable[[str], bool] | None) -> None:
    """Raise `ValueError` if `frozen` selects other leaves than are frozen where sharded parameters lie."""
    paths, nodes, _ = tree.flatten_with_path(params, is_leaf=is_sharded)
    for path, x in zip(paths, nodes, strict=True):
        for unit in x.layout.units if is_sharded(x) else ():
            for leaf in unit.leaves if unit.dtype.is_floating_point else ():
                name = tree.name_of((*path, leaf.name))
                asked = frozen is not None and bool(frozen(name))
                if asked == unit.trainable:
                    raise ValueError(
                        f"TrainState: the sharded parameters have {name!r} as {'trained' if asked else 'frozen'}, but "
                        f"`frozen` now {'says otherwise' if frozen else 'is None'}. "
                        f"{_ANEW.format(tx='state.tx', frozen='frozen')}"
                    )


def _check_formats(opt_state: Any) -> None:
    """Raise `ValueError` if moments are not stored as the type of their state asks."""

    def asks(x: Any) -> bool:
        return hasattr(type(x), "moment_storage")

    for node in filter(asks, tree.flatten(opt_state, is_leaf=asks)[0]):
        for field, (codec, _) in type(node).moment_storage.items():
            moments = getattr(node, field)
            if is_sharded(moments) and any(x.codec != codec for x in moments.storages):
                raise ValueError(
                    f"TrainState.replace: the new tx stores its moments {field!r}{codec.note}, in a format that is not "
                    "the state's, and only zerofn.shard can convert them. "
                    f"{_ANEW.format(tx='tx', frozen='state.frozen')}"
                )


def _check_opt_state(tx: GradientTransformation, opt_state: Any) -> None:
    """Raise `TypeError` if a state of another transformation was left in its place."""

    def differs(a: Any, b: Any) -> bool:
        if type(a) is tuple and type(b) is tuple:
            return len(a) != len(b) or any(map(differs, a, b))
        return hasattr(a, "_fields") and type(a) is not type(b)

    try:
        empty = tx.init({})
    except Exception:  # somebody's own, which needs parameters
        return
    if differs(empty, opt_state):
        raise TypeError(
            f"apply_gradients: opt_state is {_kinds(opt_state)}, but {tx!r} needs {_kinds(empty)}. For another "
            "optimizer, start from its own state: state.replace(tx=tx, opt_state=tx.init(state.params))."
        )


def _kinds(x: Any) -> str:
    return f"({', '.join(map(_kinds, x))})" if type(x) is tuple else type(x).__name__


def _short(x: Any) -> str:
    if isinstance(x, Sharded):
        return repr(x).replace("\n", "\n  ")
    if isinstance(x, GradientTransformation):
        return textwrap.fill(repr(x), 110, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False)
    if isinstance(x, StaticLossScale):
        return f"{type(x).__name__}({_short(x.loss_scale)})"
    if isinstance(x, Tensor):
        return f"{x.item()}" if x.numel() == 1 and x.device.type != "meta" else f"tensor{list(x.shape)}"
    nodes, _ = tree.flatten(x, is_leaf=is_sharded)
    trees = [n for n in nodes if is_sharded(n)]
    if trees:
        present = [n for n in trees if n.lost is None]
        donated = f", {len(trees) - len(present)} donated" if len(present) < len(trees) else ""
        shards = [shard for n in present for shard in n.stored]
        here, on_drives = sum(p.nbytes for p in shards), sum(p.on_drives for p in shards)
        drives = f", {on_drives:,} on drives" if on_drives else ""
        return f"{type(x).__name__} with {len(trees)} Sharded trees{donated}, {here:,} bytes here{drives}"
    return f"{type(x).__name__} of {len(nodes)} leaves" if len(nodes) > 3 else repr(x)
