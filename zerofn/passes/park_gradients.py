"""Gradients that wait for a verdict wait on the drive, where the state they belong to lies."""

from __future__ import annotations

from typing import cast

import torch
from torch.fx import Graph, GraphModule, Node

from ..disk import Region, Store, pages
from ..graph.alias import roots, touches
from ..graph.edit import ASIDE, UPDATE, clean, fetched, from_drive, kept_by
from ..graph.program import Cut, Program, tensor_of
from ..tickets import HOST, ticket_of

ops = torch.ops.zerofn
HELD = 2  # gradients that stay in memory: those of the first updates, which were made last


def park_gradients(gm: GraphModule, program: Program) -> GraphModule:
    """Write a reduced gradient out once its norm is taken, and read it again with the state it updates: of the
    gradients that wait, as of the state, no more than three units' are in memory.
    """
    rules = [n for n in gm.graph.nodes if _waits(n)][HELD:]
    root = roots(gm.graph)
    touched = touches(gm.graph, root)
    # Who else reads a gradient after its norm was taken needs it in memory.
    rules = [n for n in rules if touched[root[_gradient(n)]][-1] is n and root[_gradient(n)].op != "placeholder"]
    if rules:
        program.scratch = _regions(program, rules)
        for rule, region in zip(rules, program.scratch, strict=True):
            _park(gm.graph, rule, touched[root[_gradient(rule)]][-2], region)
    return clean(gm)


def _gradient(rule: Node) -> Node:
    return rule.args[1]  # type: ignore[return-value]


def _waits(node: Node) -> bool:
    """Whether a node is an update in place of what was read from a drive, and its gradient waits for a verdict."""
    kept = kept_by(node)
    if not any(from_drive(x) for parts in kept for x in parts):
        return False
    factor, finite = node.args[len(kept) + 3 : len(kept) + 5]  # after the gradient, the moments, count and lr
    return isinstance(factor, Node) or isinstance(finite, Node)


def _regions(program: Program, rules: list[Node]) -> list[Region]:
    kinds = [kind for cut in program.state.nodes if isinstance(cut, Cut) for kind in cut.kinds]
    sizes = [tensor_of(_gradient(rule)).nbytes for rule in rules]  # type: ignore[union-attr]
    paths = next(kind.away.paths for kind in kinds if kind.away and kind.away.paths)
    store = Store(paths, sum(map(pages, sizes)), name="offload")
    return [store.allocate(size, f"the gradient of {_name(program, rule)}")
            for rule, size in zip(rules, sizes, strict=True)]


def _name(program: Program, rule: Node) -> str:
    """What a rule updates."""
    first = cast(list[Node], rule.args[0])[0]
    place = cast(Node, cast(Node, first.args[0]).args[0]) if fetched(first) else first
    return program.state.names[program.placeholders.index(place)]


def _park(graph: Graph, rule: Node, after: Node, region: Region) -> None:
    gradient = _gradient(rule)
    value = tensor_of(gradient)
    assert value is not None
    with graph.inserting_after(after):
        ticket = graph.call_function(ops.ticket.default, (int(ticket_of(region)),))
    with graph.inserting_after(ticket):
        spill = graph.call_function(ops.spill_.default, (ticket, gradient))
    with graph.inserting_before(rule):
        fetch = graph.call_function(ops.fetch.default, (ticket, value.numel(), value.dtype, [], HOST))
        wait = graph.call_function(ops.wait.default, (fetch,))
    fetch.meta[UPDATE] = True
    for node in (spill, fetch, wait) if rule.meta.get(ASIDE) else ():
        node.meta[ASIDE] = True
    rule.replace_input_with(gradient, wait)
