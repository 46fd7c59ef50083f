"""The numbers that meet the state in a captured step, for ranks to compare: they must be the same on all.

A Python number, or a tensor that the step closes over, is a constant of the graph, whatever it depends on: an
environment variable, a rank, a file. In the loss it may differ from rank to rank. Between the last transfer and the new
state it may not.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .._torch_compat import FakeTensor, OpOverload
from ..ops.same import digest
from .loop import body_of, given_to_body, run_loop
from .node_kinds import is_ours, traits
from .own_values import OwnValues, own_values
from .program import Program

MEETS = "meets the state, so it must be the same on all ranks: "


def state_arithmetic(program: Program) -> list[str]:
    """Return the operations between transfers and the new state with the numbers in them, one line for each kind."""
    lines = Counter(_line(node, _has_slices(program)) for node in _meeting(program))
    return [f"{MEETS}{text}{f', {n} times' if n > 1 else ''}" for text, n in sorted(lines.items())]


def line_of_number(program: Program, message: str) -> str:
    """Return the user's line of the number that `message` tells of, or "". `program`: captured with lines."""
    found = (node for node in _meeting(program) if f"{MEETS}{_line(node, _has_slices(program))}" in message)
    lines = (x.meta["line"] for node in found for x in (node, *node.users) if "line" in x.meta)
    return next((f"in this rank's step{line}" for line in lines), "")


def _meeting(program: Program) -> list[Node]:
    if program.mesh is None or program.new_state is None:
        return []
    outputs: Any = program.output.args[0]
    return list(_between(program.gm, set(outputs[: program.num_new]), own_values(program)))


def _between(gm: GraphModule, wanted: set[Any], own: OwnValues) -> Iterator[Node]:
    """Yield the nodes that `wanted` values are computed with, back to transfers. A rank's own values are left out: the
    state gets their mean.
    """
    seen = {x for x in wanted if isinstance(x, Node)}
    for node in reversed(gm.graph.nodes):
        if node not in seen or node in own.results or node.op == "placeholder" or traits(node).collective:
            continue
        if node.target is operator.getitem and node.args[0].target is run_loop:
            loop = node.args[0]
            result = next(iter(reversed(body_of(loop).graph.nodes))).args[0][node.args[1]]
            found = list(_between(body_of(loop), {result}, own))
            inputs = given_to_body(loop)
            seen |= {inputs[x] for each in (result, *found) for x in [each, *each.all_input_nodes] if x in inputs}
            yield from found
            continue
        if node.target is not run_loop:
            yield node
            # A rule of whole leaves runs on those of which this rank has a part, so its nodes differ by right.
            seen.update(() if traits(node).cuts else node.all_input_nodes)


def _has_slices(program: Program) -> bool:
    return program.mesh is not None and bool(program.mesh.slices)


def _line(node: Node, slices: bool) -> str:
    """Return what ranks compare. `slices`: ranks have slices of leaves, whose sizes may differ, so that whole numbers
    are left out.
    """
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(node.graph.owning_module)
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return "a constant"
        kind = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        number = value.item() if value.numel() == 1 else f"checksum {int(digest(value)[0]) % 2**64:016x}"
        return f"a constant {kind} ({number})"
    name = str(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", "")
    if is_ours(node):  # its whole numbers say where this rank's shard lies
        given = [str(x) for x in (*node.args, *node.kwargs.values()) if isinstance(x, float | bool)]
    else:
        given = [_shown(x, slices) for x in node.args]
        given += [f"{k}={_shown(v, slices)}" for k, v in node.kwargs.items()]
    return f"{name.removesuffix('.default')}({', '.join(given)})"


def _shown(value: Any, slices: bool) -> str:
    if isinstance(value, Node):
        return "x"
    if slices and isinstance(value, int) and not isinstance(value, bool):
        return "n"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(x, slices) for x in value)}]"
    return str(value) if isinstance(value, torch.dtype | torch.device) else repr(value)
