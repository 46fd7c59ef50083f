"""Let a captured step check that an input has the same value on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..collectives.maps import ops
from ..comm.mesh import Axis
from ..graph.edit import behind
from ..graph.program import Program, owners, tensor_of
from ..ops.same import WORDS


def share_batch(program: Program) -> None:
    """Let the step check that ranks which share the work on a batch have the same one."""
    axis = None if program.mesh is None else program.mesh.same_batch
    if axis is None or axis.size == 1:
        return
    pairs = zip(program.batch_placeholders, owners(program.batch.nodes), program.batch.names, strict=True)
    for entry, (spec, _), name in pairs:
        if spec is None and entry.users and tensor_of(entry) is not None:
            declare_same(program, entry, f"batch entry {name!r}, which ranks of {axis.name!r} share,", axis)


def declare_same(program: Program, entry: Node, name: str, axis: Axis | None = None) -> None:
    """Compare digests of an input over ranks at the start of the step, and let every user read the checked value.

    The step then raises `RanksDiffer` on all ranks, before the first write, if the values differ. `axis`: all ranks by
    default.
    """
    like = tensor_of(entry)
    assert program.mesh is not None and like is not None
    axis = axis or program.mesh.all
    graph, users = program.gm.graph, list(entry.users)
    at = behind(entry)

    def call(target: Any, args: tuple[Any, ...], value: Tensor) -> Node:
        nonlocal at
        with graph.inserting_after(at):
            at = graph.call_function(target, args)
        at.meta["val"] = value
        return at

    def words(n: int) -> Tensor:
        return like.new_empty(n * WORDS, dtype=torch.int64)

    digest = call(ops.digest.default, (entry,), words(1))
    rows = call(ops.all_gather.default, (digest, axis.size, axis.group, ""), words(axis.size))
    rows = call(ops.wait.default, (rows,), words(axis.size))
    checked = call(ops.check_same.default, (entry, rows, name, axis.name), like)
    for user in users:
        user.replace_input_with(entry, checked)
