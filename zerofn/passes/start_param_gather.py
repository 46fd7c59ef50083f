"""Stages 1 and 2, and hpZ: all-gather updated parameters at the end of a step, for the next one."""

from __future__ import annotations

import torch

from ..graph.alias import last_writers, roots
from ..graph.edit import clean
from ..graph.node_kinds import ASIDE
from ..graph.program import Program, tensor_of
from ..sharding.transfers import refresh_copy

ops, aten = torch.ops.zerofn, torch.ops.aten


def start_param_gather(program: Program) -> None:
    """Insert an all-gather of each shard after its update, into the copy of the unit that the parameters hold. With hpZ
    the copy is a part of the unit, which is gathered again before each use.

    If the dtypes agree, the shard is a view of that copy and nothing is copied; otherwise it is cast into its place.
    The next step waits for the all-gather (`wait_param_gather`). `donate` has made the updates write the shards in
    place; where `update_on_host` has moved one to the host's thread, the gather waits for it.
    """
    gm = program.gm
    graph = gm.graph
    writers = last_writers(roots(graph))
    owners = dict(zip(program.placeholders, program.owners, strict=False))
    for shard, whole, aliased in program.copies():
        writer = writers.get(shard)
        if writer is None:
            continue
        spec, unit = owners[shard]
        start, stop, _ = spec.in_copy(unit)
        after = writer.next
        if writer.meta.get(ASIDE):
            with graph.inserting_before(after):
                graph.call_function(ops.wait.default, (shard,))
        if not aliased:
            with graph.inserting_before(after):
                part = graph.call_function(aten.slice.Tensor, (whole, 0, start, stop))
                value = tensor_of(whole)
                part.meta["val"] = None if value is None else value[start:stop]
                graph.call_function(aten.copy_.default, (part, shard))
        with graph.inserting_before(after):
            refresh_copy(spec, unit, whole, unit.dtype, call=graph.call_function)
    clean(gm)
