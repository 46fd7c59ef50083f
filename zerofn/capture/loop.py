"""A loop over microbatches: one node of a captured graph, whose body is a graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .. import tree
from .._torch_compat import (
    TorchDispatchMode,
    bind_outputs,
    bound_node,
    current_trace,
    outside_trace,
    proxies_of,
    trace_inner,
    without_names_of_calls,
)
from ..graph.nested import NAMES, NO_PARTS, Parts, fold, repeat, stack_of
from ..util.nested_arguments import tensors_in, with_tensors
from ..util.patches import autocast_cache

# body(index, slices) -> (terms to sum, a tree of rows to stack, static). `static` is not a tensor; it is the same in
# every round.
Body = Callable[[Tensor, list[Tensor]], tuple[list[Tensor], Any, Any]]
_Flat = Callable[[Tensor, list[Tensor]], tuple[list[Tensor], list[Any], tuple[tree.PyTreeSpec, Any]]]


def loop(body: Body, n: int, sequences: list[Tensor], parts: Parts = NO_PARTS) -> tuple[list[Tensor], Any, Any]:
    """Call `body(index, slices)` for each of the `n` rows of `sequences`; return (sums, stacks, static) of all rounds.

    `parts`: which of the sums are returned in parts. `index` is an int64 scalar tensor. A round sees what earlier
    rounds wrote to tensors that the body closes over.
    Under capture the loop is one node, `repeat`, which has the names of the stacks in its meta (`graph.nested.NAMES`).
    """

    def flat(index: Tensor, slices: list[Tensor]) -> tuple[list[Tensor], list[Any], tuple[tree.PyTreeSpec, Any]]:
        terms, rows, static = body(index, slices)
        leaves, treedef = tree.flatten(rows)
        return terms, leaves, (treedef, static)

    sums, stacks, (treedef, static) = _flat_loop(flat, n, sequences, parts)
    return sums, tree.unflatten(treedef, stacks), static


def _flat_loop(
    body: _Flat, n: int, sequences: list[Tensor], parts: Parts
) -> tuple[list[Tensor], list[Any], tuple[tree.PyTreeSpec, Any]]:
    if current_trace() is not None:
        return _captured(body, n, sequences, parts)
    static: Any = None

    def once(index: Tensor, *slices: Tensor) -> tuple[list[Tensor], list[Any]]:
        nonlocal static
        terms, row, static = body(index, list(slices))
        return list(terms), list(row)

    sums, rows = fold(once, n, sequences, parts)
    return sums, rows, static


def in_parts(what: str, x: Tensor, n: int) -> Tensor:
    """Return a batch leaf with a new dim 0, of its `n` equal parts. `what`: the function that the user calls.

    Raises `ValueError` for a leaf whose dim 0 `n` does not divide.
    """
    if n == 1:
        return x.unsqueeze(0)
    if x.dim() == 0 or x.shape[0] % n:
        raise ValueError(
            f"{what}: a batch leaf of shape {tuple(x.shape)} cannot be cut along dim 0 into {n} equal parts. Drop or "
            "pad a smaller last batch, and close over tensors without a batch dim."
        )
    shape = (n, x.shape[0] // n, *x.shape[1:])
    return x.view(shape) if x.is_contiguous() else x.reshape(shape)


class _OwnInputs(TorchDispatchMode):
    """Gives the body an input of its own for each tensor of the outer trace that it closes over, at its first use.

    It sees `torch.cond` and the like, and dynamo, which these run, works under it: it would skip their code for the
    rest of the process instead.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, outer: Any, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        trace = current_trace()
        assert trace is not None
        self.closed: list[Tensor] = []
        self._outer, self._tracer = outer, trace.tracer
        self._last = bound_node(self._tracer, inputs[-1])
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}  # id -> what has it, kept alive, and what stands for it
        self._made(inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*with_tensors(args, self._own), **with_tensors(kwargs or {}, self._own))
        self._made(tensors_in(out))
        return out

    def _made(self, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            self._seen.setdefault(id(x), (x, x))

    def _own(self, x: Tensor) -> Tensor:
        found = self._seen.get(id(x))
        if found is None:
            found = self._seen[id(x)] = x, self._input(x) if _is_traced(self._outer, x) else x
        return found[1]

    def _input(self, x: Tensor) -> Tensor:
        graph = self._tracer.graph
        with outside_trace():
            own = _empty_like(x)
        with graph.inserting_after(self._last):
            proxy = self._tracer.create_proxy("placeholder", "closed", (), {})
        self._last = proxy.node
        self._last.target = self._last.name  # of an argument, as it stands in a graph's code
        self.closed.append(x)
        bind_outputs(own, proxy, constant=None, tracer=self._tracer)
        return own


def _captured(body: _Flat, n: int, sequences: list[Tensor], parts: Parts) -> tuple[list[Tensor], list[Any], Any]:
    """Capture the loop as one node. Its body may not find weights that were cast elsewhere."""
    trace = current_trace()
    assert trace is not None
    casts_once = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    with outside_trace(), without_names_of_calls():  # dynamo gets on with one such mode: the body's
        index = torch.zeros((), dtype=torch.int64)
        slices = [_empty_like(s[0]) for s in sequences]
        closed: list[Tensor] = []
        made: tuple[list[Tensor], list[Any], Any] = [], [], None

        def flat(*inputs: Tensor) -> list[Any]:
            nonlocal closed, made
            with _OwnInputs(trace, inputs) as own, autocast_cache(casts_once):
                made = _detached(*body(inputs[0], list(inputs[1:])))
            closed = own.closed
            return [*made[0], *(x for x in made[1] if isinstance(x, Tensor))]

        gm = trace_inner(flat)(index, *slices)
        torch.clear_autocast_cache()
        terms, row, static = made
        num_sums = len(terms) - parts.number
        summed = [(t, n) for t in terms[:num_sums]] + [(t, k) for k in parts.sizes(n) for t in terms[num_sums:]]
        results = [t.clone() if k == 1 else t + t for t, k in summed]  # with the strides of the sums
        results += [stack_of(x, n) for x in row if isinstance(x, Tensor)]
    sums = (num_sums, tuple(parts)) if parts.number else (num_sums,)
    return _node(trace, gm, n, sequences, closed, sums, results, row, static)


def _detached(terms: list[Tensor], row: list[Any], static: Any) -> tuple[list[Tensor], list[Any], Any]:
    """Return a body's results, detached: then modes also see a closed-over tensor that the body only returns."""
    return [t.detach() for t in terms], [x.detach() if isinstance(x, Tensor) else x for x in row], static


def _is_traced(trace: Any, x: Tensor) -> bool:
    return not isinstance(proxies_of(trace, x), Tensor)


def _empty_like(x: Tensor) -> Tensor:
    """Return an empty tensor with exactly the strides of `x`: views in the trace may depend on them."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _node(
    trace: Any,
    gm: GraphModule,
    n: int,
    sequences: list[Tensor],
    closed: list[Tensor],
    sums: tuple[Any, ...],
    results: list[Tensor],
    row: list[Any],
    static: Any,
) -> tuple[list[Tensor], list[Any], Any]:
    """Attach the body `gm` to the traced module, and add the loop's node; return what `loop` returns.

    `sums`: the last arguments of `repeat`. `results`: fake tensors in the form of the node's results. `row`: the rows
    of one round, for those that are not tensors.
    """
    name = f"body_{sum(1 for k in vars(trace.tracer.root)['_modules'] if k.startswith('body_'))}"
    trace.tracer.root.register_module(name, gm)
    where = trace.tracer.create_proxy("get_attr", name, (), {})
    args = (where, n, proxies_of(trace, list(sequences)), proxies_of(trace, closed), *sums)
    out = trace.tracer.create_proxy("call_function", repeat, args, {}, name="repeat")
    accessors = static[0].accessors()
    out.node.meta[NAMES] = [a.codify("") for a, x in zip(accessors, row, strict=True) if isinstance(x, Tensor)]
    values = list(bind_outputs(results, out, constant=None, tracer=trace.tracer))
    num_sums = len(results) - sum(isinstance(x, Tensor) for x in row)
    stacks = iter(values[num_sums:])
    return values[:num_sums], [next(stacks) if isinstance(x, Tensor) else [x] * n for x in row], static
