"""Run update rules as early as possible."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..graph.alias import positions, roots, touches, with_writes, writes
from ..graph.edit import clean, raise_up
from ..graph.node_kinds import (
    UPDATE,
    argument,
    fetched,
    is_fetch,
    kept_by,
    place_of_store,
    stores_in_place,
    traits,
    wait_of,
)
from ..graph.program import Program, tensor_of

ops = torch.ops.zerofn


def raise_updates(program: Program) -> None:
    """Move every in-place update up to where its gradient is reduced, after the last read of the old values.

    A gradient then leaves memory early. Updates that need neither the finite check nor the norm run inside the backward
    pass. The others run in the order in which the next step uses the parameters. `donate` has made the updates
    in-place; later passes rely on this order.
    """
    gm = program.gm
    graph = gm.graph
    copies = {shard: whole for shard, whole, _ in program.copies()}
    rules = [n for n in graph.nodes if _is_update(n)]
    raise_up(graph, [*_reads(graph), *_scalars(graph, rules)])
    where, root = positions(graph), roots(graph)
    touched = touches(graph, root)
    writers: dict[Node, list[Node]] = {}
    for node, written in with_writes(graph.nodes):
        for x in written:
            writers.setdefault(root[x], []).append(node)

    makers = {root[x]: rule for rule in rules for x in writes(rule)}
    stores_of: dict[Node, list[Node]] = {rule: [] for rule in rules}  # rule -> the stores of its results
    for node in graph.nodes:
        if stores_in_place(node) and root[argument(node, "x")] in makers:
            stores_of[makers[root[argument(node, "x")]]].append(node)

    def memory(rule: Node) -> set[Node]:
        places = {root[x] for x in writes(rule)}
        places |= {root[place_of_store(store)] for store in stores_of[rule]}
        return places | {copies[x] for x in places if x in copies}  # a shard may be a view of its gathered copy

    reads = set(_reads(graph))
    checks = [n for n in graph.nodes if traits(n).checks]  # they raise before the first write

    def first_use(rule: Node) -> int:
        used = (n for place in memory(rule) for n in touched[place] if n.op == "call_function" and n not in reads)
        return min(where[n] for n in used)

    anchors = {}
    for rule in rules:
        before = checks + [n for place in memory(rule) for n in touched[place]]
        before += [n for x in rule.all_input_nodes for n in writers.get(root[x], ())]
        anchors[rule] = max(
            (n for n in [*before, *rule.all_input_nodes] if where[n] < where[rule]), key=where.__getitem__
        )
    for rule in sorted(rules, key=first_use, reverse=True):
        anchors[rule].append(rule)
    for rule, mine in stores_of.items():
        for store in mine:  # not above reads of the old value there
            place = root[place_of_store(store)]
            if not [n for n in touched[place] if where[rule] < where[n] < where[store]]:
                rule.append(store)
    clean(gm)


def _is_update(node: Node) -> bool:
    """Return whether a node is an in-place update rule of ours on the state."""
    return bool(kept_by(node)) and all(x.op == "placeholder" or fetched(x) for x in writes(node))


def _reads(graph: Graph) -> list[Node]:
    """Return the drive reads for updates, with their waits."""
    starts = [n for n in graph.nodes if is_fetch(n) and n.meta.get(UPDATE)]
    return [n for start in starts for n in (start, wait_of(start))]


def _scalars(graph: Graph, rules: list[Node]) -> list[Node]:
    """Return, in order, what computes the scalars that rules read: counts, rates, the finite check."""
    found: set[Node] = set()
    todo = [x for rule in rules for x in rule.all_input_nodes]
    while todo:
        node = todo.pop()
        value = tensor_of(node)
        if node not in found and node.op == "call_function" and value is not None and value.dim() == 0:
            if not writes(node):
                found.add(node)
                todo += node.all_input_nodes
    return [n for n in graph.nodes if n in found]
