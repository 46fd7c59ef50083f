"""Graphs that call bodies, and the same graphs without calls."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from tests.support.small_steps import captured
from zerofn.graph.edit import copied
from zerofn.graph.nested import call, call_of


def body_of(fn: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    """The graph of `fn(*inputs)`."""
    return captured(lambda state, batch: fn(*batch), {}, list(inputs)).gm


def call_in(graph: Graph, where: Node, *inputs: Node) -> list[Node]:
    """Call the body that `where` reads, behind what a graph has; return the results."""
    node = graph.call_function(call, (where, *inputs))
    results = next(iter(reversed(graph.owning_module.get_submodule(where.target).graph.nodes))).args[0]
    node.meta["val"] = [x.meta["val"] for x in results]
    found = [graph.call_function(operator.getitem, (node, k)) for k in range(len(results))]
    for x, value in zip(found, node.meta["val"], strict=True):
        x.meta["val"] = value
    return found


def inlined(gm: GraphModule) -> GraphModule:
    """A copy of a graph that has the nodes of each body in place of its call."""
    new = copied(gm)
    for node in [x for x in new.graph.nodes if x.target is call]:
        each = call_of(node)
        found: dict[Node, Node] = dict(each.given)
        for x in each.body.graph.nodes:
            if x.op in ("placeholder", "output"):
                continue
            with new.graph.inserting_before(node):
                found[x] = new.graph.node_copy(x, found.__getitem__)
            if x.op == "get_attr":
                found[x].target = f"{each.name}_{x.target}".replace(".", "_")
                setattr(new, found[x].target, operator.attrgetter(str(x.target))(each.body))
        for user in list(node.users):
            user.replace_all_uses_with(found[each.results[user.args[1]]])
            new.graph.erase_node(user)
        new.graph.erase_node(node)
    new.recompile()
    return inlined(new) if any(x.target is call for x in new.graph.nodes) else new
