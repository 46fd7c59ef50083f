"""A piece of a pipeline that adds its gradients to those of earlier microbatches.

Added behind the piece, the gradients of all its units would be in memory together, and would be written and read once
more. Inside, a leaf's gradient is added where it was just made, and then freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from .alias import is_lent, is_view, last_writers, memory_of, positions, roots, sources
from .edit import behind, clean, copied
from .liveness import complete_values
from .nested import results_of
from .node_kinds import argument, is_batched
from .pieces import Piece
from .program import alike, tensor_of

ops, aten = torch.ops.zerofn, torch.ops.aten
SUM = "running sum"  # a meta key of an input: the caller gives its memory up


def summed_inside(piece: Piece, num_sums: int) -> list[int]:
    """Return which of the body's results a piece can add to sums in place: of the first `num_sums`, those whose memory
    the piece has made, for them alone.
    """
    outputs = results_of(piece.graph)
    times = Counter([*piece.kept.values(), *piece.sent.values(), *piece.results.values()])
    return [k for k, i in piece.results.items() if k < num_sums and times[i] == 1 and _fills_own_memory(outputs[i])]


def _fills_own_memory(value: Node) -> bool:
    memory, x = memory_of(value), tensor_of(value)
    made = memory.op == "call_function" and not is_lent(memory)
    return made and x is not None and x.untyped_storage().nbytes() == x.nbytes


def adding(body: GraphModule, numbers: Sequence[int]) -> GraphModule:
    """Return a copy of a graph that takes, behind its other inputs, a sum for each of some of its results, and returns
    the sums of both instead. `numbers`: which results, each once.
    """
    gm = copied(body)
    graph, results = gm.graph, list(results_of(gm))
    output = next(iter(reversed(graph.nodes)))
    last = [x for x in graph.nodes if x.op == "placeholder"][-1]
    for k in numbers:
        with graph.inserting_after(last):
            last = graph.placeholder(f"sum_{k}")
        last.meta.update({SUM: True, "val": results[k].meta["val"]})
        with graph.inserting_before(output):
            total = graph.call_function(aten.add.Tensor, (last, results[k]))
        total.meta.update(results[k].meta)
        results[k] = total
    output.args = (results,)
    return clean(gm)


def add_in_place(graph: Graph) -> None:
    """Add to the memory of sums that were given up, each value where it is made. A flat gradient is added leaf by leaf,
    and never made. The bits are the same.
    """
    sums = [x for x in graph.nodes if x.op == "placeholder" and x.meta.get(SUM)]
    where, writers = (positions(graph), last_writers(roots(graph))) if sums else ({}, {})
    for total in sums:
        node, *others = total.users
        if others or node.target is not aten.add.Tensor or node.args[0] is not total:
            continue
        term = node.args[1]
        leaves = list(_leaves(term))
        made = [max(x, writers.get(memory_of(x), x), key=where.__getitem__) for x, _ in leaves]
        if any(where[x] > where[node] for x in made):
            continue
        for (x, offset), after in zip(leaves, made, strict=True):
            _add(node, total, x, offset, after)
        node.replace_all_uses_with(total)
        graph.erase_node(node)
        while is_view(term) and not term.users:
            view, term = term, sources(term)[0]
            graph.erase_node(view)
        if term.target is ops.ravel.default and not term.users:  # else a bucket would be made and filled for it
            graph.erase_node(term)
    if sums:
        complete_values(graph)


def _leaves(term: Node) -> Iterator[tuple[Node, int | None]]:
    """Yield what a term consists of: the leaves of a flat gradient, with where they begin in it, or the term itself."""
    ravel = term
    while is_view(ravel) and len(ravel.users) == 1 and alike(tensor_of(ravel), tensor_of(sources(ravel)[0])):
        ravel = sources(ravel)[0]
    if ravel.target is not ops.ravel.default or is_batched(ravel) or len(ravel.users) > 1:
        yield term, None
        return
    for x, offset in zip(argument(ravel, "leaves"), argument(ravel, "offsets"), strict=True):
        if x is not None:
            yield x, offset


def _add(whole: Node, total: Node, x: Node, offset: int | None, after: Node) -> None:
    """Add a value to a sum, or to the part of it that begins at `offset`, behind the node `after`. `whole`: the
    addition that this is a part of.
    """
    graph, value, dtype = whole.graph, x.meta["val"], total.meta["val"].dtype
    meta = {k: v for k, v in whole.meta.items() if k != "val"}
    after = behind(after)
    with graph.inserting_after(after):
        if value.dtype != dtype:  # rounded before it is added, as it would be by a copy into a flat gradient
            x = after = graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
            x.meta.update(meta)
    with graph.inserting_after(after):
        if offset is not None:
            total = after = graph.call_function(ops.part.default, (total, offset, list(value.shape)))
            total.meta.update(meta)
    with graph.inserting_after(after):
        graph.call_function(aten.add_.Tensor, (total, x)).meta.update(meta)
