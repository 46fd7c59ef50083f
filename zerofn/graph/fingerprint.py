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
_PARTS = "exchange of parts"
MESSAGES = ("send", "receive")  # kinds of transfers that two ranks know of


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


def between_stages(program: Program) -> str:
    """Return the transfers between all stages of a pipeline. Messages between two of them follow from its schedule, and
    all others are of the ranks of one stage.
    """
    assert program.mesh is not None
    stages = program.mesh.stages.name
    within = {group for group, axes in program.mesh.names_of_groups.items() if stages not in axes}
    return _transfers(program.gm, input_names(program), {}, frozenset(within), messages=False)


def _transfers(
    gm: GraphModule, names: dict[Node, str], groups: dict[Any, int], without: frozenset[str], messages: bool = True
) -> str:
    """Return the transfers of a graph, one line each, except those of the groups `without`, and messages between two
    ranks if these are not wanted.

    `groups` maps process groups to numbers in order of first use: a group's own name may differ from rank to rank.
    """
    lines = []
    for node in gm.graph.nodes:
        if is_start(node):
            if argument(node, "group") not in without and (messages or traits(node).collective not in MESSAGES):
                lines.append(_transfer(node, names, groups))
        elif call := call_of(node):
            inside = _transfers(call.body, names_inside(call, names), groups, without, messages)
            lines += [f"{call.rounds} times: {inside}"] if inside or messages else []
    return "\n".join(lines)


def _transfer(node: Node, names: dict[Node, str], groups: dict[Any, int]) -> str:
    # What one rank sends to others has no elements there, and on another line of ranks it is another slice. Parts have
    # sizes of their own, and all ranks know all of them.
    kind = traits(node).collective
    of_input, parts = kind not in ("broadcast", "receive", _PARTS), kind == _PARTS
    value: Any = tensor_of(node.all_input_nodes[0]) if of_input else None
    origin = names.get(input_behind(node), "") if is_gather(node) else ""
    assert isinstance(node.target, OpOverload)
    arguments = zip(schema_arguments(node.target), node.args, strict=False)
    static = [
        f"group {groups.setdefault(a, len(groups))}" if argument.name == "group" else a
        for argument, a in arguments
        if argument.name != "rank" and not isinstance(a, Node)
    ]
    shape = None if value is None else f"{list(value.shape)} {value.dtype}"
    return f"{operation_name(node)} {shape} {[a for a in static if parts or not isinstance(a, list)]} {origin}".rstrip()
