"""`remat`: recompute a function's activations in the backward pass instead of saving them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import tree
from .._torch_compat import inside_functorch, is_functorch_tensor
from ..random.rng_state import is_virtual
from ..util.arguments import checked
from ..util.closures import closed_over

P = ParamSpec("P")
T = TypeVar("T")


@checked()
def remat(fn: Callable[P, T]) -> Callable[P, T]:
    """Return `fn` with its activations recomputed in the backward pass (Chen et al. 2016; `jax.checkpoint`).

    It works under `torch.autograd`, `torch.func.grad`, `vjp`, `jvp` and `vmap`, at higher orders and under capture.
    Random operations draw the same values again. Under `torch.func` transforms, everything that is differentiated
    must be an argument. Raises `ValueError` for a differentiated tensor in the closure of `fn`.

    >>> f = remat(lambda x: x.sin().sin())
    >>> bool(torch.func.grad(f)(torch.tensor(0.5)) == torch.func.grad(lambda x: x.sin().sin())(torch.tensor(0.5)))
    True
    """

    @functools.wraps(fn)
    def again(*args: Any, **kwargs: Any) -> Any:
        if not inside_functorch():
            return checkpoint(fn, *args, use_reentrant=False, **kwargs)
        _check_closure(fn)
        leaves, treedef = tree.flatten((args, kwargs))
        at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        call = _Call(fn, leaves, at, treedef)
        out = _Remat.apply(call, *(leaves[i] for i in at))
        return tree.unflatten(call.out, out)

    return again


class _Call:
    """`fn` as a function of its tensor arguments alone, which returns a tuple of tensors."""

    def __init__(self, fn: Callable[..., Any], leaves: list[Any], at: list[int], treedef: tree.PyTreeSpec) -> None:
        self.fn, self.at, self.treedef = fn, at, treedef
        self.static = [None if isinstance(x, Tensor) else x for x in leaves]
        self.out: Any = None
        self.states = _States([leaves[i] for i in at])  # read here: as an input of `_Remat`, a transform would wrap it

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self.static)
        for i, x in zip(self.at, tensors, strict=True):
            leaves[i] = x
        args, kwargs = tree.unflatten(self.treedef, leaves)
        out, self.out = tree.flatten(self.fn(*args, **kwargs))
        return tuple(out)

    def again(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run it again with the same random draws, and restore the generator's state afterwards."""
        before = _States(tensors)
        self.states.set()
        try:
            return self(*tensors)
        finally:
            before.set()


class _States:
    """The states of the generators of the host and of these tensors' devices; or the position that stands for all."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._host = torch.get_rng_state()
        self._devices = {} if is_virtual() else {x: _module(x).get_rng_state(x) for x in _devices(tensors)}

    def set(self) -> None:
        """Let the generators continue from here."""
        torch.set_rng_state(self._host)
        for device, state in self._devices.items():
            _module(device).set_rng_state(state, device)


def _devices(tensors: Sequence[Tensor]) -> set[torch.device]:
    return {x.device for x in tensors if x.device.type not in ("cpu", "meta")}


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type)


class _Remat(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        return call(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        learns = [x.is_floating_point() for x in ctx.saved_tensors]
        inputs = [x for x, ok in zip(ctx.saved_tensors, learns, strict=True) if ok]

        def run(*floats: Tensor) -> tuple[Tensor, ...]:
            fresh = iter(floats)
            return ctx.call.again(*(next(fresh) if ok else x for x, ok in zip(ctx.saved_tensors, learns, strict=True)))

        found = iter(torch.func.vjp(run, *inputs)[1](gradients))
        return None, *(next(found) if ok else None for ok in learns)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        return torch.func.jvp(ctx.call.again, tuple(ctx.saved_tensors), tangents)[1]


def _check_closure(fn: Callable[..., Any]) -> None:
    module = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    if isinstance(module, torch.nn.Module) and any(map(is_functorch_tensor, module.parameters())):
        raise ValueError(
            f"remat: the parameters of {type(module).__name__} need gradients, but are not arguments of the function. "
            "Write remat(lambda params, x: functional_call(module, params, x))."
        )
    for name, value in closed_over(fn).items():
        for x in tree.leaves(value):
            if isinstance(x, Tensor) and is_functorch_tensor(x):
                raise ValueError(
                    f"remat: the function closes over {name!r}, which needs a gradient. Pass {name!r} to the function "
                    "as an argument."
                )
