"""A loop over microbatches that is one node of a captured graph, its body a graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ._torch_compat import (
    TorchDispatchMode,
    bind_outputs,
    current_trace,
    outside_trace,
    proxies_of,
    trace_inner,
    tree_leaves,
    tree_map,
)

# body(index, slices) -> (terms of the sums, rows to stack, static), the same static in every round
Body = Callable[[Tensor, list[Tensor]], tuple[list[Tensor], list[Any], Any]]


def loop(body: Body, n: int, sequences: list[Tensor]) -> tuple[list[Tensor], list[Any], Any]:
    """Run `body` for each of the `n` rows of `sequences`: (sums over rounds, stacks over rounds, static).

    `index` is an int64 scalar. Tensors the body closes over are read anew in each round, and what it writes to
    them is there in the next one. Under capture this is one node, `run_loop`.
    """
    if current_trace() is not None:
        return _captured(body, n, sequences)
    static: Any = None

    def once(index: Tensor, *slices: Tensor) -> list[Any]:
        nonlocal static
        terms, row, extra = body(index, list(slices))
        static = (len(terms), extra)
        return [*terms, *row]

    first = once(torch.tensor(0), *(s[0] for s in sequences))
    num_sums, extra = static
    out = _fold(once, first, n, sequences, num_sums)
    return out[:num_sums], out[num_sums:], extra


def run_loop(body: Callable[..., Sequence[Any]], n: int, sequences: Sequence[Tensor], closed: Sequence[Tensor],
             num_sums: int) -> list[Any]:
    """What the node does: `body(index, *slices, *closed)`, summed over the first `num_sums` outputs, stacked over
    the others."""
    def once(index: Tensor, *slices: Tensor) -> Sequence[Any]:
        return body(index, *slices, *closed)

    return _fold(once, once(torch.tensor(0), *(s[0] for s in sequences)), n, sequences, num_sums)


def _fold(once: Callable[..., Sequence[Any]], first: Sequence[Any], n: int, sequences: Sequence[Tensor],
          num_sums: int) -> list[Any]:
    # Sums start from the first round's terms, in their memory: a body returns fresh tensors there.
    sums, rows = list(first[:num_sums]), [[x] for x in first[num_sums:]]
    for i in range(1, n):
        out = once(torch.tensor(i), *(s[i] for s in sequences))
        for total, term in zip(sums, out[:num_sums], strict=True):
            total.add_(term)
        for column, x in zip(rows, out[num_sums:], strict=True):
            column.append(x)
        del out
    return [*sums, *(torch.stack(c) if isinstance(c[0], Tensor) else c for c in rows)]


class _Reads(TorchDispatchMode):
    """Notes the tensors that come from outside."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.made = {id(x): x for x in given}
        self.found: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and id(x) not in self.made:
                self.found[id(x)] = x
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and id(x) not in self.found:
                self.made[id(x)] = x  # kept alive, so that no other tensor gets this id
        return out


class _Replaced(TorchDispatchMode):
    """Puts the body's own inputs in place of the tensors it closes over."""

    def __init__(self, pairs: dict[int, Tensor]) -> None:
        super().__init__()
        self.pairs = pairs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def mine(x: Any) -> Any:
            return self.pairs.get(id(x), x) if isinstance(x, Tensor) else x

        return func(*tree_map(mine, args), **tree_map(mine, kwargs or {}))


def _captured(body: Body, n: int, sequences: list[Tensor]) -> tuple[list[Tensor], list[Any], Any]:
    trace = current_trace()
    assert trace is not None
    with outside_trace():
        index = torch.zeros((), dtype=torch.int64)
        slices = [s[0].clone() for s in sequences]
        reads = _Reads([index, *slices])
        with reads:
            terms, row, static = body(index, slices)
        known = [x for x in reads.found.values() if _is_traced(trace, x)]
        shapes = [*(torch.empty_like(t) for t in terms), *(_stacked(x, n) for x in row)]
        num_slices = len(slices)

        def flat(index: Tensor, *rest: Tensor) -> list[Any]:
            pairs = {id(x): y for x, y in zip(known, rest[num_slices:], strict=True)}
            with _Replaced(pairs):
                sums, rows, _ = body(index, list(rest[:num_slices]))
            return [*sums, *(x for x in rows if isinstance(x, Tensor))]

        gm = trace_inner(flat)(index, *slices, *(torch.empty_like(x) for x in known))
    return _node(trace, gm, n, sequences, known, len(terms), shapes, row, static)


def _is_traced(trace: Any, x: Tensor) -> bool:
    return not isinstance(proxies_of(trace, x), Tensor)


def _stacked(x: Any, n: int) -> Any:
    return x.new_empty((n, *x.shape)) if isinstance(x, Tensor) else x


def _node(trace: Any, gm: GraphModule, n: int, sequences: list[Tensor], closed: list[Tensor], num_sums: int,
          shapes: list[Any], row: list[Any], static: Any) -> tuple[list[Tensor], list[Any], Any]:
    """Put the body on the traced module, the node into the graph."""
    name = f"body_{sum(1 for k in vars(trace.tracer.root)['_modules'] if k.startswith('body_'))}"
    trace.tracer.root.register_module(name, gm)
    where = trace.tracer.create_proxy("get_attr", name, (), {})
    args = (where, n, proxies_of(trace, list(sequences)), proxies_of(trace, closed), num_sums)
    out = trace.tracer.create_proxy("call_function", run_loop, args, {}, name="run_loop")
    values = bind_outputs([x for x in shapes if isinstance(x, Tensor)], out, constant=None, tracer=trace.tracer)
    fresh = iter(values)
    results: list[Any] = [next(fresh) if isinstance(x, Tensor) else [x] * n for x in shapes]
    return results[:num_sums], results[num_sums:], static
