"""Keep replicated state equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..capture.capture import CaptureError
from ..collectives import broadcast
from ..collectives.over_ranks import rows_over
from ..graph.edit import clean, recorded
from ..graph.own_values import own_values
from ..graph.program import Program, tensor_of

ops = torch.ops.zerofn


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
        with gm.graph.inserting_before(program.output):
            synced = recorded(partial(_synced, program, dtype), [outputs[j] for j in members])
        for j, value in zip(members, synced, strict=True):
            outputs[j] = value
    program.output.args = (outputs,)
    clean(gm)


def _synced(program: Program, dtype: torch.dtype, values: Sequence[Tensor]) -> list[Tensor]:
    """Return values of one dtype as all ranks are to have them."""
    assert program.mesh is not None
    axis, sizes = program.mesh.batch, [x.numel() for x in values]
    offsets = [sum(sizes[:k]) for k in range(len(sizes))]
    flat = ops.ravel(values, offsets, sum(sizes), dtype)
    flat = broadcast(flat, axis) if program.broadcasts else rows_over(flat, axis).mean(0)
    return [ops.part(flat, offset, list(x.shape)) for x, offset in zip(values, offsets, strict=True)]
