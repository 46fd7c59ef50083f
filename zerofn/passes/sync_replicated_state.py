"""Keep replicated state equal on all ranks."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..capture.capture import CaptureError
from ..graph.edit import clean
from ..graph.own_values import own_values
from ..graph.program import Program, tensor_of

ops, aten = torch.ops.zerofn, torch.ops.aten


def sync_replicated_state(program: Program) -> None:
    """Make every replicated state tensor that depends on a rank's own batch or random key, such as batch-norm
    statistics, the mean over ranks, or with `Program.broadcasts` the first rank's.

    It is done in one flat buffer for each dtype. The pass runs before `donate`, while the graph still returns every
    new value. Raises `CaptureError` for the mean of what is not floating-point.
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
        if not dtype.is_floating_point and not program.broadcasts:
            raise CaptureError(
                f"state entry {program.state.names[members[0]]!r} ({dtype}) is replicated, but its new value depends "
                "on this rank's batch or random key, and only floating-point numbers are averaged over ranks. Keep it "
                "out of the state, reduce it with zerofn.collectives.all_reduce, or take rank 0's: "
                "zerofn.compile(train_step, broadcast_buffers=True)."
            )
        synced = _Sync(program, [outputs[j] for j in members], dtype).parts()
        for j, value in zip(members, synced, strict=True):
            outputs[j] = value
    program.output.args = (outputs,)
    clean(gm)


class _Sync:
    """Writes what makes values of one dtype the same on all ranks."""

    def __init__(self, program: Program, values: list[Node], dtype: torch.dtype) -> None:
        assert program.mesh is not None
        self._program, self._values, self._dtype, self._axis = program, values, dtype, program.mesh.batch
        self._shapes = [tensor_of(v).shape for v in values]  # type: ignore[union-attr]

    def parts(self) -> list[Node]:
        """Return the values as all ranks have them."""
        sizes = [shape.numel() for shape in self._shapes]
        offsets = [sum(sizes[:k]) for k in range(len(sizes))]
        with self._program.gm.graph.inserting_before(self._program.output):
            flat = (self._first if self._program.broadcasts else self._mean)(offsets, sum(sizes))
            return [
                self._call(ops.part.default, flat, offset, list(shape), shape=tuple(shape))
                for offset, shape in zip(offsets, self._shapes, strict=True)
            ]

    def _mean(self, offsets: list[int], total: int) -> Node:
        n = self._axis.size
        flat = self._call(ops.ravel.default, self._values, offsets, total, self._dtype, shape=(total,))
        rows = self._gathered(flat, total)
        rows = self._call(aten.view.default, rows, [n, total], shape=(n, total))
        return self._call(aten.mean.dim, rows, [0], shape=(total,))

    def _first(self, offsets: list[int], total: int) -> Node:
        """Rank r gets part r of the first rank's, and all ranks all parts: large queues come with twice their bytes."""
        n = self._axis.size
        part = -(-total // n)
        flat = self._call(ops.ravel.default, self._values, offsets, n * part, self._dtype, shape=(n * part,))
        rows = self._call(aten.view.default, flat, [n, part], shape=(n, part))
        rows = self._call(ops.exchange.default, rows, n, self._axis.group, shape=(n, part))
        rows = self._call(ops.wait.default, rows, shape=(n, part))
        return self._gathered(self._call(aten.select.int, rows, 0, 0, shape=(part,)), part)

    def _gathered(self, x: Node, size: int) -> Node:
        whole = (self._axis.size * size,)
        full = self._call(ops.all_gather.default, x, self._axis.size, self._axis.group, "", shape=whole)
        return self._call(ops.wait.default, full, shape=whole)

    def _call(self, target: object, *args: object, shape: tuple[int, ...]) -> Node:
        node = self._program.gm.graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = tensor_of(self._values[0]).new_empty(shape)  # type: ignore[union-attr]
        return node
