"""The fingerprint that ranks compare before they run a step: its transfers, in order."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from .._torch_compat import OpOverload, schema_arguments
from .names import input_behind, input_names, names_inside, operation_name
from .nested import call_of
from .node_kinds import argument, is_gather, is_start, traits
from .program import Program, tensor_of

ops, aten = torch.ops.zerofn, torch.ops.aten


def fingerprint(program: Program) -> str:
    """Return the transfers, one line each, in the order that must be the same on every rank."""
    return _transfers(program.gm, input_names(program), {}, frozenset())


def between_slices(program: Program) -> str:
    """Return the transfers between ranks with different slices of leaves. Of the others, sizes and order may differ
    among these ranks.
    """
    assert program.mesh is not None
    slices = {axis.name for axis in program.mesh.slices}
    within = {group for group, axes in program.mesh.names_of_groups.items() if not axes & slices}
    return _transfers(program.gm, input_names(program), {}, frozenset(within))


def _transfers(gm: GraphModule, names: dict[Node, str], groups: dict[Any, int], without: frozenset[str]) -> str:
    """Return the transfers of a graph, one line each, except those of the groups `without`.

    `groups` maps process groups to numbers in order of first use: a group's own name may differ from rank to rank.
    """
    lines = []
    for node in gm.graph.nodes:
        if is_start(node):
            if argument(node, "group") not in without:
                lines.append(_transfer(node, names, groups))
        elif call := call_of(node):
            inside = _transfers(call.body, names_inside(call, names), groups, without)
            lines.append(f"{call.rounds} times: {inside}")
    return "\n".join(lines)


def _transfer(node: Node, names: dict[Node, str], groups: dict[Any, int]) -> str:
    # What one rank sends to others has no elements there, and on another line of ranks it is another slice.
    value: Any = None if traits(node).collective == "broadcast" else tensor_of(node.all_input_nodes[0])
    origin = names.get(input_behind(node), "") if is_gather(node) else ""
    assert isinstance(node.target, OpOverload)
    arguments = zip(schema_arguments(node.target), node.args, strict=False)
    static = [
        f"group {groups.setdefault(a, len(groups))}" if argument.name == "group" else a
        for argument, a in arguments
        if argument.name != "rank" and not isinstance(a, Node)
    ]
    shape = None if value is None else f"{list(value.shape)} {value.dtype}"
    return f"{operation_name(node)} {shape} {[a for a in static if not isinstance(a, list)]} {origin}".rstrip()
