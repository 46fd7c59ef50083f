"""`eager_region`: a call inside a captured step that is not captured, the way out for what cannot be traced.

The graph has one node for the call and one for its derivative. Each runs the function as plain torch does, so the
function may branch on data and have intermediate results of any shape; only its outputs have shapes that are known
before. The derivative runs it once more, with the same random numbers, and keeps nothing between the two.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from .. import tree
from .._torch_compat import FakeTensor, above_autograd, current_trace, inside_functorch
from ..capture.advice import not_constant
from ..job.step_order import meetings
from ..memory.turns import plain_python
from ..ops.registry import OnShard, Traits, define
from ..random import fold_in
from ..random.mode import current_draw, randomness
from ..random.rng_state import is_virtual
from ..util.arguments import checked
from ..util.closures import closed_over
from ..util.process import the

ops = torch.ops.zerofn
_DEVICES = ("cpu", "cuda", "xpu", "mps")  # whose autocast a region keeps, which runs when that has ended


P = ParamSpec("P")
T = TypeVar("T")


@checked()
def eager_region(fn: Callable[P, T], *, like: Callable[..., Any]) -> Callable[P, T]:
    """Return `fn` as a function that a captured step calls without looking into it.

    `fn(*args)`: a pure function of its arguments, which are trees of tensors and constants and must include all
    parameters that it uses. It returns a tree of tensors. `like(*args)` receives fake arguments, which have shapes but
    no values, and returns a tree with the shapes and dtypes that `fn` always returns, such as `x.new_empty(len(x))`.

    It is differentiable once: the backward pass runs `fn` again. Random operations inside draw from the step's key.
    Plans do not include the memory and time that `fn` takes. In a loss function that is not captured, the region runs
    in the same way, so gradients have the same bits; elsewhere it simply calls `fn`.

    In a captured step, raises `TypeError` for an argument that is neither tensor nor constant, `ValueError` for an
    argument or closure that contains a differentiated tensor, and at run time `RuntimeError` if `fn` returns another
    structure, shape or dtype than `like`, writes to an argument or communicates.

    >>> top = eager_region(lambda x: x[x > x.mean()].sum(), like=lambda x: x.new_empty(()))
    >>> top(torch.tensor([1.0, 2.0, 6.0]))
    tensor(6.)
    """

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        draw = current_draw()
        key = (
            None if draw is None else fold_in(*draw)
        )  # both passes draw the same, and so does a step that is not captured
        leaves, treedef = tree.flatten(args)
        if current_trace() is not None and (error := not_constant(_name(fn), "an argument's", args)) is not None:
            raise error
        captured = any(isinstance(x, FakeTensor) for x in leaves)
        learns = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        if not captured and (inside_functorch() or not (learns and is_virtual())):
            with contextlib.nullcontext() if draw is None else randomness(key):
                return fn(*args)  # type: ignore[call-arg]
        if inside_functorch():
            raise RuntimeError(
                f"{_name(fn)}: torch.func cannot differentiate an eager_region. Write zerofn.value_and_grad instead."
            )
        _check_closure(fn)
        at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        region = _Region(fn, like, [None if isinstance(x, Tensor) else x for x in leaves], at, treedef)
        given = [leaves[i] for i in at]
        if captured:
            out = _Opaque.apply(the(_Regions).add(region), key, *given)
        else:
            region.fake(given)
            out = _Now.apply(region, key, *given)
        return tree.unflatten(region.out, out)

    return cast(Callable[P, T], call)


class _Region:
    """`fn` as a function of its tensor arguments alone. `out`: the structure of its result, known once it was faked."""

    def __init__(self, fn: Any, like: Any, static: list[Any], at: list[int], treedef: tree.PyTreeSpec) -> None:
        self.fn, self.like, self.static, self.at, self.treedef = fn, like, static, at, treedef
        self.out: Any = None
        self.kinds: list[tuple[Any, Any]] = []
        self.grad_mode = torch.is_grad_enabled()
        self.autocasts = [
            (x, torch.get_autocast_dtype(x), torch.is_autocast_enabled(x))
            for x in _DEVICES
            if torch.amp.is_autocast_available(x)
        ]

    def args(self, tensors: Sequence[Tensor]) -> Any:
        leaves = list(self.static)
        for i, x in zip(self.at, tensors, strict=True):
            leaves[i] = x
        return tree.unflatten(self.treedef, leaves)

    def fake(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what `like` makes of fake tensors."""
        with torch.no_grad():
            out, self.out = tree.flatten(self.like(*self.args(tensors)))
        if not out or not all(isinstance(x, Tensor) for x in out):
            raise TypeError(
                f"{_name(self.fn)}: the function `like` of an eager_region must return a tree of tensors, "
                "such as x.new_empty(3)."
            )
        self.kinds = [(tuple(x.shape), x.dtype) for x in out]
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in out]

    def run(self, tensors: Sequence[Tensor], key: Tensor | None) -> list[Tensor]:
        """Return what `fn` makes of real tensors."""
        versions = [x._version for x in tensors]
        with meetings().none_inside(_name(self.fn)), plain_python(), randomness(key), contextlib.ExitStack() as stack:
            for settings in self.autocasts:
                stack.enter_context(torch.autocast(*settings))
            out, structure = tree.flatten(self.fn(*self.args(tensors)))
        if [x._version for x in tensors] != versions:
            raise RuntimeError(
                f"{_name(self.fn)} wrote to an argument, which an eager_region may not. Write to a "
                "clone, x.clone(), and return it."
            )
        found = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x).__name__ for x in out]
        if structure != self.out or found != self.kinds:
            raise RuntimeError(
                f"{_name(self.fn)} returned {_shown(found)}, but the function `like` of its eager_region announced "
                f"{_shown(self.kinds)}. Shapes must not depend on data: pad to the largest shape, and also return how "
                "many elements are valid."
            )
        return out


class _Regions:
    """The process's regions. A graph knows a region by its number, so they live as long as the process."""

    def __init__(self) -> None:
        self.all: list[_Region] = []

    def add(self, region: _Region) -> int:
        self.all.append(region)
        return len(self.all) - 1


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(number: int, key: Tensor | None, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(ops.eager_region(list(xs), number, key))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.number, key, *xs = inputs
        ctx.has_key = key is not None
        ctx.save_for_backward(*([key] if ctx.has_key else []), *xs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = list(ctx.saved_tensors)
        key = saved.pop(0) if ctx.has_key else None
        wanted = list(ctx.needs_input_grad[2:])
        found = iter(ops.eager_region_backward(saved, list(grads), ctx.number, key, wanted))
        return None, None, *(next(found) if needs else None for needs in wanted)


class _Now(torch.autograd.Function):
    """A region in a loss function that is not captured."""

    @staticmethod
    def forward(ctx: Any, region: _Region, key: Tensor | None, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.region, ctx.key = region, key
        ctx.save_for_backward(*xs)
        return tuple(_forward(region, [x.detach() for x in xs], key))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        wanted = list(ctx.needs_input_grad[2:])
        found = iter(_backward(ctx.region, list(ctx.saved_tensors), list(grads), ctx.key, wanted))
        return None, None, *(next(found) if needs else None for needs in wanted)


def _run(xs: list[Tensor], number: int, key: Tensor | None) -> list[Tensor]:
    return _forward(the(_Regions).all[number], xs, key)


def _run_backward(
    xs: list[Tensor], grads: list[Tensor], number: int, key: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    return _backward(the(_Regions).all[number], xs, grads, key, wanted)


def _forward(region: _Region, xs: list[Tensor], key: Tensor | None) -> list[Tensor]:
    with above_autograd(), torch.set_grad_enabled(region.grad_mode):  # which some kernels ask for
        out = [x.detach() for x in region.run(xs, key)]
        places = {x.untyped_storage().data_ptr() for x in xs}
        return [x.clone() if x.untyped_storage().data_ptr() in places else x.contiguous() for x in out]


def _backward(
    region: _Region, xs: list[Tensor], grads: list[Tensor], key: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    with above_autograd(), torch.enable_grad():
        leaves = [x.detach().requires_grad_() if needs else x for x, needs in zip(xs, wanted, strict=True)]
        out = region.run(leaves, key)
        pairs = [(x, g) for x, g in zip(out, grads, strict=True) if x.requires_grad]
        inputs = [x for x, needs in zip(leaves, wanted, strict=True) if needs]
        if not pairs:
            return [torch.zeros_like(x) for x in inputs]
        found = torch.autograd.grad([x for x, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g.contiguous() for x, g in zip(inputs, found, strict=True)]


def _fake(xs: list[Tensor], number: int, key: Tensor | None) -> list[Tensor]:
    return the(_Regions).all[number].fake(xs)


def _fake_backward(
    xs: list[Tensor], grads: list[Tensor], number: int, key: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x, w in zip(xs, wanted, strict=True) if w]


def _check_closure(fn: Any) -> None:
    """Raise `ValueError` for values of the capture that `fn` reads without being given them."""
    for name, value in [("self", getattr(fn, "__self__", None)), *closed_over(fn).items()]:
        inside = [*value.parameters(), *value.buffers()] if isinstance(value, torch.nn.Module) else tree.leaves(value)
        if any(isinstance(x, FakeTensor) for x in inside):
            raise ValueError(
                f"{_name(fn)} closes over {name!r}, which holds tensors of the step. Pass it to the region as an "
                "argument. For a module, write eager_region(lambda params, x: functional_call(module, params, (x,)), "
                "like=...)."
            )


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _shown(kinds: Sequence[Any]) -> str:
    return ", ".join(f"{list(x[0])} {x[1]}" if isinstance(x, tuple) else str(x) for x in kinds)


define(
    "eager_region(Tensor[] xs, int number, Tensor? key) -> Tensor[]",
    _run,
    _fake,
    traits=Traits(OnShard.REFUSED, opaque=True),
)
define(
    "eager_region_backward(Tensor[] xs, Tensor[] grads, int number, Tensor? key, bool[] wanted) -> Tensor[]",
    _run_backward,
    _fake_backward,
    traits=Traits(OnShard.REFUSED, opaque=True),
)
