"""Operations with a derivative, for kernels inside models: either direction is one node of a captured step."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import inside_functorch, takes_forward_derivative
from .registry import Traits, define, library


@dataclass(frozen=True)
class Derivative:
    """The derivative of an operation.

    `run(*gradients, *saved)`: the gradients by the arguments `by`, a tensor, or for several a tuple. `gradients` has
    one for each result, zeros for a result that is not used. `saves`: the names in the schema of the arguments and
    results that `run` needs. `traits`: of the backward operation. `fake`: `run` for fake tensors; by default a gradient
    is a new tensor of its argument's shape, dtype and device.
    """

    run: Callable[..., Any]
    by: Sequence[str]
    saves: Sequence[str]
    traits: Traits
    fake: Callable[..., Any] | None = None


def define_differentiable(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], derivative: Derivative, *, traits: Traits
) -> Callable[..., Any]:
    """Register `zerofn::schema` and `zerofn::name_backward`, as `registry.define` does, and connect them for autograd.
    Return the operation as a function of its arguments by position, which `torch.func.grad` differentiates, too: torch
    refuses to differentiate `torch.ops.zerofn.name` there.

        gated = "swiglu(Tensor gate, Tensor up) -> Tensor"
        by = ["gate", "up"]
        gate = define_differentiable(gated, swiglu, lambda gate, up: gate.new_empty(gate.shape),
                                     Derivative(swiglu_backward, by=by, saves=by, traits=traits), traits=traits)

    There is no second derivative, and none in forward mode (`torch.func.jvp`), where torch would take zeros: asking for
    one raises `NotImplementedError`. Raises `ValueError` for a name that is not in the schema, and without `fake` for
    an argument of `by` that is not saved.
    """
    name, arguments, results = _names_of(schema)
    by, saves = derivative.by, derivative.saves
    declared = {**arguments, **results}
    for x in [x for x in (*by, *saves) if x not in declared]:
        raise ValueError(f"define_differentiable: zerofn::{name} has no {x!r}; it has {', '.join(declared)}.")
    if derivative.fake is None and not {*by} <= {*saves}:
        missing = ", ".join(sorted({*by} - {*saves}))
        raise ValueError(
            f"define_differentiable: save {missing} of zerofn::{name}, whose shape its gradient has, or say fake=."
        )

    def alike(*values: Any) -> Any:
        saved = dict(zip(saves, values[len(results) :], strict=True))
        fresh = tuple(saved[x].new_empty(saved[x].shape) for x in by)
        return fresh if len(by) > 1 else fresh[0]

    takes = ", ".join([*(f"Tensor grad{k}" for k in range(len(results))), *(declared[x] for x in saves)])
    gives = f"({', '.join(['Tensor'] * len(by))})" if len(by) > 1 else "Tensor"
    define(schema, _in_reverse(name, run), _in_reverse(name, fake), traits=traits)
    backward = [_in_reverse(name, x) for x in (derivative.run, derivative.fake or alike)]
    define(f"{name}_backward({takes}) -> {gives}", *backward, traits=derivative.traits)
    return _connect(name, arguments, results, derivative)


def _in_reverse(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which refuses to be called while a forward-mode derivative is taken."""

    @functools.wraps(run)
    def called(*args: Any, **kwargs: Any) -> Any:
        if takes_forward_derivative():
            raise NotImplementedError(
                f"zerofn::{name} has no forward-mode derivative; use torch.func.vjp or grad in place of jvp."
            )
        return run(*args, **kwargs)

    return called


def _names_of(schema: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """Return an operation's name, and its arguments and results: name -> declaration. Results without a name are
    `result0`, `result1` and so on.
    """
    found = re.fullmatch(r"(\w+)\((.*)\) -> \(?(.*?)\)?", schema)
    assert found is not None, schema
    arguments = [x.partition("=")[0] for x in found[2].split(", ") if x != "*"]
    results = [x if " " in x else f"{x} result{k}" for k, x in enumerate(found[3].split(", "))]
    return found[1], {x.split()[-1]: x for x in arguments}, {x.split()[-1]: x for x in results}


def _connect(
    name: str, arguments: Mapping[str, str], results: Mapping[str, str], derivative: Derivative
) -> Callable[..., Any]:
    by, saves = derivative.by, derivative.saves
    forward, backward = (getattr(torch.ops.zerofn, x).default for x in (name, f"{name}_backward"))

    def save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        values = dict(zip(arguments, inputs, strict=True))
        values |= zip(results, output if isinstance(output, tuple) else [output], strict=True)
        saved = [values[x] for x in saves]
        ctx.save_for_backward(*(x for x in saved if isinstance(x, Tensor)))
        ctx.others = [() if isinstance(x, Tensor) else (x,) for x in saved]

    def differentiate(ctx: Any, *gradients: Any) -> Any:
        tensors = iter(ctx.saved_tensors)
        found = gradients_of(*gradients, *(x[0] if x else next(tensors) for x in ctx.others))
        by_name = dict(zip(by, found if len(by) > 1 else [found], strict=True))
        return tuple(by_name.get(x) for x in arguments)

    def refuse(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(f"zerofn::{name} has no second derivative.")

    torch.library.register_autograd(f"zerofn::{name}", differentiate, setup_context=save, lib=library)
    torch.library.register_autograd(f"zerofn::{name}_backward", refuse, lib=library)
    gradients_of = _transformed(backward, lambda *_: None, refuse)
    return _transformed(forward, save, differentiate)


def _transformed(op: Any, save: Callable[..., None], differentiate: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation as a function that `torch.func` differentiates. torch registers derivatives in a form that
    its transforms refuse.
    """

    class Transformed(torch.autograd.Function):
        """The operation, with `setup_context`."""

        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            return op(*args)

        setup_context = staticmethod(save)
        backward = staticmethod(differentiate)

    def called(*args: Any) -> Any:
        if not inside_functorch():
            return op(*args)
        return Transformed.apply(*args, *(x.default_value for x in op._schema.arguments[len(args) :]))

    return called
