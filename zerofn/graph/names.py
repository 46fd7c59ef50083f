"""What errors call nodes: inputs by their key paths, operations by their names, and the line of the user's code."""

from __future__ import annotations

import torch
from torch.fx import Node

from .._torch_compat import OpOverload
from .nested import Call
from .program import Program

ops = torch.ops.zerofn


def input_names(program: Program) -> dict[Node, str]:
    """Return what errors call each input of the graph."""
    nodes = program.placeholders
    out = {n: f"the gathered copy of a parameter unit ({n.name})" for n in nodes}
    state = zip(nodes, program.state.names, strict=False)  # copies of units have no names
    out.update((n, _entry("state", name)) for n, name in state)
    batch = zip(program.batch_placeholders, program.batch.names, strict=True)
    out.update((n, _entry("batch", name)) for n, name in batch)
    return out


def _entry(what: str, name: str) -> str:
    return f"{what} entry {name!r}" if name else f"the {what}"


def names_inside(call: Call, names: dict[Node, str]) -> dict[Node, str]:
    """Return the names of a body's inputs. `names`: those of the nodes around it."""
    found = {x: input_behind(value) if value.target is ops.join.default else value for x, value in call.given.items()}
    return {x: names[value] for x, value in found.items() if value in names}


def input_behind(node: Node) -> Node:
    """Follow a node's first inputs back to a placeholder or constant, and return that."""
    while node.op != "placeholder" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def operation_name(node: Node) -> str:
    """Return the name of the operation that a node calls."""
    return node.target.name() if isinstance(node.target, OpOverload) else str(node.target)


def line_of(node: Node) -> str:
    """Return ' at file:line (code)', the user's line of a node, or "" if lines were not recorded."""
    return node.meta.get("line", "")


def operation_at(node: Node) -> str:
    """Return the name of the operation that a node calls, and the user's line."""
    return operation_name(node) + line_of(node)
