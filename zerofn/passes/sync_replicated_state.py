"""Keep replicated state equal on all ranks."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..graph.capture import CaptureError
from ..graph.edit import clean
from ..graph.own_values import own_values
from ..graph.program import Program, tensor_of

ops, aten = torch.ops.zerofn, torch.ops.aten


def sync_replicated_state(program: Program) -> None:
    """Average over ranks every replicated state tensor that depends on a rank's own batch or random key, such as
    batch-norm statistics.

    There is one transfer for each dtype. The pass runs before `donate`, while the graph still returns every new value.
    Raises `CaptureError` for dtypes that are not floating-point: they have no mean.
    """
    gm = program.gm
    if program.mesh is None or program.mesh.batch.size == 1 or program.new_state is None:
        return
    own = own_values(program).results
    outputs = list(program.output.args[0])  # type: ignore[arg-type]
    groups: dict[torch.dtype, list[int]] = {}
    for j, ((spec, _), value) in enumerate(zip(program.owners, outputs[: program.num_new], strict=True)):
        if spec is None and value in own:
            groups.setdefault(tensor_of(value).dtype, []).append(j)  # type: ignore[union-attr]
    for dtype, members in groups.items():
        if not dtype.is_floating_point:
            raise CaptureError(
                f"state entry {program.state.names[members[0]]!r} ({dtype}) is replicated, but its new value depends "
                "on this rank's batch or random key. Keep it out of the state, or reduce it with "
                "zerofn.collectives.all_reduce."
            )
        for j, mean in zip(members, _means(gm.graph, program, [outputs[j] for j in members], dtype), strict=True):
            outputs[j] = mean
    program.output.args = (outputs,)
    clean(gm)


def _means(graph: Graph, program: Program, values: list[Node], dtype: torch.dtype) -> list[Node]:
    """Return the means over ranks of `values`, computed in one flat buffer."""
    shapes = [tensor_of(v).shape for v in values]  # type: ignore[union-attr]
    offsets = [sum(s.numel() for s in shapes[:k]) for k in range(len(shapes))]
    total = sum(s.numel() for s in shapes)
    assert program.mesh is not None
    axis = program.mesh.batch
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
