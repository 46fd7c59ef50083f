"""Operations that run graphs of their own, *bodies*: how often they do, and with which values.

A captured loop over microbatches is one node, `repeat`; a body that runs once, on values, is one node, `call`. What an
analysis asks of a node is asked of its body through `call_of`, so that it holds for every operation in `_NESTED`. Of
the graphs that other operations run it asks only whether they write, draw or communicate.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import HigherOrderOperator, OpOverload


def call(body: Callable[..., Sequence[Any]], *inputs: Any) -> list[Any]:
    """Call `body(*inputs)` once, and return its results.

    A result may be a view of an input. Two results share no memory: a body returns one, and a view of it is taken
    outside. The executor hands the inputs over, so that each is freed at its last use inside.
    """
    return list(body(*inputs))


class Parts(NamedTuple):
    """Which sums a loop returns in parts: of the `number` outputs of its body behind those that are summed over all
    rounds, a sum over each `every` rounds; the last may be over fewer.
    """

    number: int
    every: int

    def sizes(self, n: int) -> list[int]:
        """Return how many of `n` rounds are in each part."""
        return [min(self.every, n - k) for k in range(0, n, self.every)] if self.number else []


NO_PARTS = Parts(0, 1)


def repeat(
    body: Callable[..., Sequence[Any]],
    n: int,
    sequences: Sequence[Tensor],
    closed: Sequence[Tensor],
    num_sums: int,
    parts: tuple[int, int] = NO_PARTS,
) -> list[Any]:
    """Call `body(index, *slices, *closed)` for each of `n` rounds.

    Return the sums of the body's first `num_sums` outputs, then those of the next ones in `Parts`, one part after the
    other, then the stacks of the others, all in new memory. `closed`: the tensors that the body closes over.
    """
    several = Parts(*parts)

    def once(index: Tensor, *slices: Tensor) -> tuple[list[Tensor], list[Any]]:
        out, end = list(body(index, *slices, *closed)), num_sums + several.number
        return out[:end], out[end:]

    sums, rows = fold(once, n, sequences, several)
    return [*sums, *rows]


def fold(
    once: Callable[..., tuple[list[Tensor], list[Any]]], n: int, sequences: Sequence[Tensor], parts: Parts = NO_PARTS
) -> tuple[list[Tensor], list[Any]]:
    """Return the sums and stacks of `n` rounds, in new memory. The last terms of a round are summed in `parts`.

    It never writes to a round's tensors: they may be the caller's batch, the same tensor twice, an expanded scalar
    or, for rows, a buffer that the next round overwrites.
    """
    sums: list[Tensor] = []
    sizes = parts.sizes(n)
    several: list[list[Tensor]] = [[] for _ in sizes]
    rows: list[Any] = []
    for i in range(n):
        terms, row = once(torch.tensor(i), *(s[i] for s in sequences))
        first = len(terms) - parts.number
        _add(sums, terms[:first], i, n)
        if several:
            k, at = divmod(i, parts.every)
            _add(several[k], terms[first:], at, sizes[k])
        _store(rows, row, i, n)
        del terms, row  # otherwise they stay alive while the next round runs
    return [*sums, *itertools.chain(*several)], rows


def _add(sums: list[Tensor], terms: list[Tensor], i: int, n: int) -> None:
    """Add round i's terms to the sums.

    Round 0 stores its terms themselves, and round 1 allocates the sums: a copy of round 0's terms would be one more
    pass over memory. With a single round there is no addition, so its terms are cloned.
    """
    if i == 0:
        sums += [t.clone() for t in terms] if n == 1 else terms
        return
    for k, term in enumerate(terms):
        sums[k] = sums[k] + term if i == 1 else sums[k].add_(term)


def _store(rows: list[Any], row: list[Any], i: int, n: int) -> None:
    """Copy round i's rows into the stacks. Values that are not tensors go into lists."""
    if i == 0:
        rows += [stack_of(x, n) if isinstance(x, Tensor) else [None] * n for x in row]
    for stack, x in zip(rows, row, strict=True):
        if isinstance(x, Tensor) and x.shape != stack.shape[1:]:  # a copy would broadcast it
            raise ValueError(
                f"accumulate: an aux leaf has shape {tuple(x.shape)} in microbatch {i}, but shape "
                f"{tuple(stack.shape[1:])} in earlier ones; it must have one shape, because microbatches are stacked."
            )
        stack[i] = x.detach() if isinstance(x, Tensor) else x


def stack_of(x: Tensor, n: int) -> Tensor:
    """Return new memory for the rows `x` of `n` rounds."""
    return x.new_empty((n, *x.shape))


class Call(NamedTuple):
    """The body that a node runs. `name`: where the module around it has it. `given`: the body's inputs, except a
    round's index, and the values that the node passes for them: of the first `num_cut` a row in each round, the others
    whole. The node's results are the sums over `rounds` of the body's first `num_sums` results, those of the next ones
    in `parts`, then stacks of the others; of a body that is called once, they are the body's own.
    """

    name: str
    body: GraphModule
    given: dict[Node, Node]
    rounds: int = 1
    num_cut: int = 0
    num_sums: int = 0
    parts: Parts = NO_PARTS

    @property
    def whole(self) -> Sequence[Node]:
        """The inputs that are the same in every round, unless the body writes to them."""
        return list(self.given)[self.num_cut :]

    @property
    def results(self) -> Sequence[Any]:
        """What the body returns for each of the node's results, in order."""
        own = results_of(self.body)
        return [own[k] for k, _ in self.sources] if self.parts.number else own

    @property
    def sources(self) -> list[tuple[int, int]]:
        """Of each of the node's results, which of the body's it is made of, and which part of its sum it is."""
        own = results_of(self.body)
        end = self.num_sums + self.parts.number
        several = [(k, part) for part in range(len(self.parts.sizes(self.rounds))) for k in range(self.num_sums, end)]
        return [*((k, 0) for k in range(self.num_sums)), *several, *((k, 0) for k in range(end, len(own)))]


def results_of(gm: GraphModule) -> Sequence[Any]:
    """Return what a graph returns, in order."""
    results: Any = next(iter(reversed(gm.graph.nodes))).args[0]
    return results


def body_of(node: Node) -> GraphModule:
    """Return the body that a node runs."""
    body: Any = node.graph.owning_module.get_submodule(str(node.args[0].target))  # type: ignore[union-attr]
    return body


def _call_of_call(node: Node) -> Call:
    name, body, inputs = _body_of(node)
    return Call(name, body, dict(zip(inputs, node.args[1:], strict=True)))  # type: ignore[arg-type]


def _call_of_repeat(node: Node) -> Call:
    name, body, inputs = _body_of(node)
    _, rounds, sequences, closed, num_sums, *parts = node.args
    given = dict(zip(inputs[1:], [*sequences, *closed], strict=True))  # type: ignore[misc]
    several = Parts(*parts[0]) if parts else NO_PARTS  # type: ignore[misc]
    return Call(name, body, given, rounds, len(sequences), num_sums, several)  # type: ignore[arg-type]


def _body_of(node: Node) -> tuple[str, GraphModule, list[Node]]:
    """Return the name of a node's body, the body, and its inputs."""
    name, body = str(node.args[0].target), body_of(node)  # type: ignore[union-attr]
    # They come first, and `writes` asks at every pass: the rest of a large body is not looked at.
    return name, body, list(itertools.takewhile(lambda x: x.op == "placeholder", body.graph.nodes))


NAMES = "names"  # a meta key of a loop: for each of its stacks, where users find it in what they return
PIECE = "piece"  # a meta key of calls that have been one loop, with a number of that loop
REGION = "region"  # a meta key of a body that is compiled as it is, with its name: passes leave it alone
_WRITES_NOTHING = ("print", "out_dtype")  # higher-order operations without a graph
_OF_SIZES = ("_operator", "math", "torch")  # modules of the functions of numbers that a graph may call
_NESTED: dict[Any, Callable[[Node], Call]] = {call: _call_of_call, repeat: _call_of_repeat}
_IDS = frozenset(map(id, _NESTED))  # to hash an operation is a slow call in Python


def is_nested(node: Node) -> bool:
    """Return whether a node runs a body."""
    return id(node.target) in _IDS


def runs_once(node: Node) -> bool:
    """Return whether a node hands its inputs to a body that runs once, and returns the body's own results."""
    return node.target is call


def call_of(node: Node) -> Call | None:
    """Return the body that a node runs, and how; None for one without."""
    return _NESTED[node.target](node) if is_nested(node) else None


def insert_call(graph: Graph, name: str, inputs: Sequence[Node], results: Sequence[Node], meta: Any) -> list[Node]:
    """Call the body of a name where nodes are inserted; return a node for each of its results, which stand for the
    values of `results`. `meta`: what else the call's node has.
    """
    node = graph.call_function(call, (graph.get_attr(name), *inputs))
    node.meta.update(meta, val=[x.meta["val"] for x in results])
    return [graph.call_function(operator.getitem, (node, k)) for k in range(len(results))]


def calls(gm: GraphModule) -> Iterator[tuple[Node, Call]]:
    """Yield the nodes of a graph that run a body."""
    for node in gm.graph.nodes:
        if is_nested(node):
            yield node, _NESTED[node.target](node)


def graphs_of(gm: GraphModule) -> list[GraphModule]:
    """Return a graph and the bodies in it, nested ones included, each once: a recomputed loop shares its body.

    Regions are not among them: they stay as they were made.
    """
    found: dict[GraphModule, None] = {}
    _find_graphs(gm, found)
    return list(found)


def _find_graphs(gm: GraphModule, found: dict[GraphModule, None]) -> None:
    if gm not in found:  # a pipeline calls a piece for each microbatch
        found[gm] = None
        for _, call in calls(gm):
            if not is_region(call.body):
                _find_graphs(call.body, found)


def is_region(gm: GraphModule) -> bool:
    """Return whether a body is a region, which computes and does nothing else."""
    return REGION in gm.meta


def is_result(node: Node) -> bool:
    """Return whether a node is one of the results of a node that runs a body."""
    return node.target is operator.getitem and is_nested(node.args[0])  # type: ignore[arg-type]


def foreign_graphs(node: Node) -> list[GraphModule]:
    """Return the graphs that an operation of torch's or of another library runs, such as the branches of
    `torch.cond`. How often it runs them, and on what, only the operation knows.
    """
    if not isinstance(node.target, HigherOrderOperator):
        return []
    owner = node.graph.owning_module
    given = [operator.attrgetter(str(x.target))(owner) for x in node.all_input_nodes if x.op == "get_attr"]
    return [x for x in given if isinstance(x, GraphModule)]


def is_unknown(node: Node) -> bool:
    """Return whether nothing says what an operation does to its inputs: neither a schema nor a graph."""
    if node.op != "call_function" or isinstance(node.target, OpOverload) or is_nested(node):
        return False
    if isinstance(node.target, HigherOrderOperator):
        return node.target.name() not in _WRITES_NOTHING and not foreign_graphs(node)
    return getattr(node.target, "__module__", "") not in _OF_SIZES


def give(node: Node, old: Node, new: Node) -> None:
    """Replace the value `old` by `new` in what a node passes to its body."""
    node.args = tuple([new if x is old else x for x in a] if isinstance(a, list | tuple) else a for a in node.args)


def pass_in(node: Node, call: Call, value: Node) -> Node:
    """Pass one more value whole to a node's body, and return the body's input for it."""
    with call.body.graph.inserting_after([*call.given][-1]):
        inside = call.body.graph.placeholder(value.name)
    inside.meta["val"] = value.meta["val"]
    if runs_once(node):
        node.args = (*node.args, value)
    else:
        where, rounds, sequences, closed, *sums = node.args
        node.args = (where, rounds, sequences, [*closed, value], *sums)  # type: ignore[misc]
    return inside
