"""A loop over microbatches: one node of a captured graph, whose body is a graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .._torch_compat import TorchDispatchMode, bind_outputs, current_trace, outside_trace, proxies_of, trace_inner
from ..util.nested import tensors_in, with_tensors

# body(index, slices) -> (terms of the sums, rows to stack, static), the same static in every round
Body = Callable[[Tensor, list[Tensor]], tuple[list[Tensor], list[Any], Any]]


def loop(body: Body, n: int, sequences: list[Tensor]) -> tuple[list[Tensor], list[Any], Any]:
    """Run `body` for each of the `n` rows of `sequences`; return (sums over rounds, stacks over rounds, static).

    `index` is an int64 scalar. Tensors that the body closes over are read again in each round, and the next round
    sees what it writes to them. Under capture this is one node, `run_loop`.
    """
    if current_trace() is not None:
        return _captured(body, n, sequences)
    static: Any = None

    def once(index: Tensor, *slices: Tensor) -> tuple[list[Tensor], list[Any]]:
        nonlocal static
        terms, row, static = body(index, list(slices))
        return list(terms), list(row)

    sums, rows = _fold(once, n, sequences)
    return sums, rows, static


def run_loop(
    body: Callable[..., Sequence[Any]], n: int, sequences: Sequence[Tensor], closed: Sequence[Tensor], num_sums: int
) -> list[Any]:
    """Run the node: `body(index, *slices, *closed)`, summed over its first `num_sums` outputs, stacked over the
    others.

    All results are new memory.
    """

    def once(index: Tensor, *slices: Tensor) -> tuple[list[Tensor], list[Any]]:
        out = list(body(index, *slices, *closed))
        return out[:num_sums], out[num_sums:]

    sums, rows = _fold(once, n, sequences)
    return [*sums, *rows]


def _fold(
    once: Callable[..., tuple[list[Tensor], list[Any]]], n: int, sequences: Sequence[Tensor]
) -> tuple[list[Tensor], list[Any]]:
    """Return the sums and stacks of `n` rounds, in memory of their own.

    A round's tensors are only read. They may be the caller's batch, one tensor twice, one expanded number, or
    (rows) a buffer that the next round writes.
    """
    sums: list[Tensor] = []
    rows: list[Any] = []
    for i in range(n):
        terms, row = once(torch.tensor(i), *(s[i] for s in sequences))
        _add(sums, terms, i, n)
        _store(rows, row, i, n)
        del terms, row  # otherwise they stay alive while the next round runs
    return sums, rows


def _add(sums: list[Tensor], terms: list[Tensor], i: int, n: int) -> None:
    """Add round i's terms. The first addition allocates the sums, one term at a time: copying the first round's terms
    would be another pass over memory.
    """
    if i == 0:
        sums += [t.clone() for t in terms] if n == 1 else terms
        return
    for k, term in enumerate(terms):
        sums[k] = sums[k] + term if i == 1 else sums[k].add_(term)


def _store(rows: list[Any], row: list[Any], i: int, n: int) -> None:
    """Copy round i's rows into the stacks. What is no tensor goes to a list."""
    if i == 0:
        rows += [_stack_of(x, n) if isinstance(x, Tensor) else [None] * n for x in row]
    for stack, x in zip(rows, row, strict=True):
        if isinstance(x, Tensor) and x.shape != stack.shape[1:]:  # a copy would broadcast it
            raise ValueError(
                f"accumulate: an aux leaf has shape {tuple(x.shape)} in microbatch {i}, in those before "
                f"{tuple(stack.shape[1:])}; what is stacked must have one shape."
            )
        stack[i] = x.detach() if isinstance(x, Tensor) else x


def _stack_of(x: Tensor, n: int) -> Tensor:
    return x.new_empty((n, *x.shape))


class _Reads(TorchDispatchMode):
    """Records the tensors that come from outside."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.made = {id(x): x for x in given}
        self.found: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tensors_in((args, kwargs)):
            if id(x) not in self.made:
                self.found[id(x)] = x
        out = func(*args, **(kwargs or {}))
        for x in tensors_in(out):
            if id(x) not in self.found:
                self.made[id(x)] = x  # kept alive, so that no other tensor gets its id
        return out


class _Replaced(TorchDispatchMode):
    """Puts the body's own inputs in place of the tensors it closes over."""

    def __init__(self, pairs: dict[int, Tensor]) -> None:
        super().__init__()
        self.pairs = pairs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def mine(x: Tensor) -> Tensor:
            return self.pairs.get(id(x), x)

        return func(*with_tensors(args, mine), **with_tensors(kwargs or {}, mine))


def _captured(body: Body, n: int, sequences: list[Tensor]) -> tuple[list[Tensor], list[Any], Any]:
    trace = current_trace()
    assert trace is not None
    with outside_trace():
        index = torch.zeros((), dtype=torch.int64)
        slices = [_like(s[0]) for s in sequences]
        reads = _Reads([index, *slices])
        with reads:
            terms, row, static = _seen(*body(index, slices))
        known = [x for x in reads.found.values() if _is_traced(trace, x)]
        results = [t.clone() if n == 1 else t + t for t in terms]  # with the strides of the sums
        results += [_stack_of(x, n) for x in row if isinstance(x, Tensor)]
        num_slices = len(slices)

        def flat(index: Tensor, *rest: Tensor) -> list[Any]:
            pairs = {id(x): y for x, y in zip(known, rest[num_slices:], strict=True)}
            with _Replaced(pairs):
                sums, rows, _ = _seen(*body(index, list(rest[:num_slices])))
            return [*sums, *(x for x in rows if isinstance(x, Tensor))]

        gm = trace_inner(flat)(index, *slices, *map(_like, known))
    return _node(trace, gm, n, sequences, known, len(terms), results, row, static)


def _seen(terms: list[Tensor], row: list[Any], static: Any) -> tuple[list[Tensor], list[Any], Any]:
    """Return a body's results after one more operation, so that a closed-over tensor that is returned unread is
    recorded, too.
    """
    return [t.detach() for t in terms], [x.detach() if isinstance(x, Tensor) else x for x in row], static


def _is_traced(trace: Any, x: Tensor) -> bool:
    return not isinstance(proxies_of(trace, x), Tensor)


def _like(x: Tensor) -> Tensor:
    """Return a tensor with exactly the strides of `x`: views in the trace may depend on them."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _node(
    trace: Any,
    gm: GraphModule,
    n: int,
    sequences: list[Tensor],
    closed: list[Tensor],
    num_sums: int,
    results: list[Tensor],
    row: list[Any],
    static: Any,
) -> tuple[list[Tensor], list[Any], Any]:
    """Attach the body to the traced module, and add the node. `results` stand for its results."""
    name = f"body_{sum(1 for k in vars(trace.tracer.root)['_modules'] if k.startswith('body_'))}"
    trace.tracer.root.register_module(name, gm)
    where = trace.tracer.create_proxy("get_attr", name, (), {})
    args = (where, n, proxies_of(trace, list(sequences)), proxies_of(trace, closed), num_sums)
    out = trace.tracer.create_proxy("call_function", run_loop, args, {}, name="run_loop")
    values = list(bind_outputs(results, out, constant=None, tracer=trace.tracer))
    stacks = iter(values[num_sums:])
    return values[:num_sums], [next(stacks) if isinstance(x, Tensor) else [x] * n for x in row], static


class LoopCall(NamedTuple):
    """The arguments of a loop's node: see `run_loop`."""

    body: Node
    num_rounds: int
    sequences: list[Node]
    closed: list[Node]
    num_sums: int

    @staticmethod
    def of(node: Node) -> LoopCall:
        """Those of a node."""
        return LoopCall(*node.args)  # type: ignore[arg-type]

    @property
    def given(self) -> list[Node]:
        """What the body gets after the index, whole or row by row."""
        return [*self.sequences, *self.closed]


def body_of(node: Node) -> GraphModule:
    """Return the graph that a loop's node repeats."""
    module = node.graph.owning_module
    return module.get_submodule(str(LoopCall.of(node).body.target))  # type: ignore[union-attr,return-value]


def given_to_body(node: Node) -> dict[Node, Node]:
    """Map the inputs of a loop's body to what the loop passes, whole or row by row. The index is not among them."""
    inputs = [x for x in body_of(node).graph.nodes if x.op == "placeholder"]
    return dict(zip(inputs[1:], LoopCall.of(node).given, strict=True))
