"""Keep replicated state equal on all ranks."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from ..graph.alias import roots, writes
from ..graph.capture import CaptureError
from ..graph.edit import clean
from ..graph.loop import body_of, given_to_body, run_loop
from ..graph.node_kinds import traits
from ..graph.program import Program, tensor_of

ops, aten = torch.ops.zerofn, torch.ops.aten


def sync_replicated_state(program: Program) -> None:
    """Average over ranks every replicated state tensor that depends on a rank's own batch, such as batch-norm
    statistics.

    There is one transfer for each dtype. The pass runs before `donate`, while the graph still returns every new value.
    Raises `CaptureError` for dtypes that are not floating-point: they have no mean.
    """
    gm = program.gm
    axis = program.axis
    if axis is None or axis.size == 1 or program.new_state is None:
        return
    root = roots(gm.graph)
    own = _depends(gm.graph, set(program.batch_placeholders), root)
    outputs = list(program.output.args[0])  # type: ignore[arg-type]
    groups: dict[torch.dtype, list[int]] = {}
    for j, ((spec, _), value) in enumerate(zip(program.owners, outputs[: program.num_new], strict=True)):
        if spec is None and root[value] in own:
            groups.setdefault(tensor_of(value).dtype, []).append(j)  # type: ignore[union-attr]
    for dtype, members in groups.items():
        if not dtype.is_floating_point:
            raise CaptureError(
                f"state entry {program.state.names[members[0]]!r} ({dtype}) is replicated, but its new value depends "
                "on this rank's batch. Keep it out of the state, or reduce it with zerofn.collectives.all_reduce."
            )
        for j, mean in zip(members, _means(gm.graph, program, [outputs[j] for j in members], dtype), strict=True):
            outputs[j] = mean
    program.output.args = (outputs,)
    clean(gm)


def _depends(graph: Graph, given: set[Node], root: dict[Node, Node]) -> set[Node]:
    """Return the memory whose contents depend on that of `given`, except through values that are equal on all ranks."""
    own = set(given)
    of_loops: dict[Node, set[int]] = {}  # the outputs of a loop that depend on it
    for node in graph.nodes:
        if node.target is run_loop:
            written, of_loops[node] = _through(node, {x for x in node.all_input_nodes if root[x] in own})
            own.update(root[x] for x in written)
        elif node.target is operator.getitem and node.args[0] in of_loops:
            own.update([node] if node.args[1] in of_loops[node.args[0]] else [])
        elif not traits(node).equal and any(root[x] in own for x in node.all_input_nodes):
            own.update(root[x] for x in (node, *writes(node)))
    return own


def _through(loop: Node, given: set[Node]) -> tuple[list[Node], set[int]]:
    """Return (inputs, outputs) of a loop that hold values which differ by rank, if the inputs `given` do."""
    inputs, graph = given_to_body(loop), body_of(loop).graph
    root = roots(graph)
    inside = {x for x, outer in inputs.items() if outer in given}
    while True:  # the next round reads what a round writes
        own = _depends(graph, inside, root)
        written = [x for x in inputs if x in own and x not in inside]
        if not written:
            break
        inside.update(written)
    results = next(iter(reversed(graph.nodes))).args[0]
    return [inputs[x] for x in inside], {i for i, x in enumerate(results) if root[x] in own}


def _means(graph: Graph, program: Program, values: list[Node], dtype: torch.dtype) -> list[Node]:
    """Return the means over ranks of `values`, computed in one flat buffer."""
    shapes = [tensor_of(v).shape for v in values]  # type: ignore[union-attr]
    offsets = [sum(s.numel() for s in shapes[:k]) for k in range(len(shapes))]
    total, axis = sum(s.numel() for s in shapes), program.axis
    assert axis is not None
    like = tensor_of(values[0])
    assert like is not None

    def call(target: object, *args: object, shape: tuple[int, ...]) -> Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = like.new_empty(shape)
        return node

    with graph.inserting_before(program.output):
        flat = call(ops.ravel.default, values, offsets, total, dtype, shape=(total,))
        rows = call(ops.all_gather.default, flat, axis.size, axis.group, "", shape=(axis.size * total,))
        rows = call(ops.wait.default, rows, shape=(axis.size * total,))
        rows = call(aten.view.default, rows, [axis.size, total], shape=(axis.size, total))
        mean = call(aten.mean.dim, rows, [0], shape=(total,))
        return [
            call(ops.part.default, mean, offset, list(shape), shape=tuple(shape))
            for offset, shape in zip(offsets, shapes, strict=True)
        ]
