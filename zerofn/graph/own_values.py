"""Values of a step that differ from rank to rank: they depend on a rank's own batch, random key or place.

A loss and its gradients do, until they are reduced. Shards differ by design and count as parts of one whole, so what
is computed from shards alone is not a rank's own.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from ..ops.registry import OnShard
from .alias import sources, writes
from .loop import body_of, given_to_body, run_loop
from .node_kinds import argument, traits
from .program import Program, owners

ops = torch.ops.zerofn
# What a difference between ranks comes from: inputs of the step, and words for keys and places. Empty: no difference.
Origins = frozenset[Node | str]
_NONE: Origins = frozenset()
_WORDS = {
    "fold_in_rank": "its random key",
    "exchange": "its place in all_to_all",
    "reduce_scatter": "its part of a reduce_scatter",
}


class OwnValues(NamedTuple):
    """`results`: value -> its origins, at the end. `read`: node -> the inputs that were a rank's own when it read them,
    with their origins. Both leave out what is the same everywhere, and include the bodies of loops.
    """

    results: dict[Node, Origins]
    read: dict[Node, dict[Node, Origins]]


def own_values(program: Program, same: frozenset[Node] = frozenset()) -> OwnValues:
    """Return the values of a step that differ from rank to rank. `same`: batch entries that do not."""
    pairs = zip(program.batch_placeholders, owners(program.batch.nodes), strict=True)
    given: dict[Node, Origins] = {x: frozenset([x]) for x, (spec, _) in pairs if spec is None and x not in same}
    found = OwnValues({}, {})
    _follow(program.gm.graph, given, found)
    return found


def _follow(graph: Graph, given: dict[Node, Origins], found: OwnValues) -> dict[Node, Origins]:
    """Add a graph's values to `found`. Return the origins of its memory at the end, which includes what was written."""
    memory = _memory(graph)
    origins = dict(given)  # of memory, by the node that made it
    of_loops: dict[Node, list[Origins]] = {}
    for node in graph.nodes:
        read = {x: origins[memory[x]] for x in node.all_input_nodes if origins.get(memory[x])}
        if read:
            found.read[node] = read
        if node.target is run_loop:
            of_loops[node] = _through(node, origins, memory, found)
            continue
        if node.target is operator.getitem and node.args[0] in of_loops:
            mine = of_loops[node.args[0]][node.args[1]]
        else:
            mine = _of_result(node, _NONE.union(*read.values()))
        if mine:
            for x in (node, *writes(node)):
                origins[memory[x]] = origins.get(memory[x], _NONE) | mine
    for node in graph.nodes:
        if mine := origins.get(memory[node], _NONE):
            found.results[node] = mine
    return origins


def _of_result(node: Node, read: Origins) -> Origins:
    """Return the origins of a node's result. `read`: those of its inputs."""
    known = traits(node)
    if known.equal or known.on_shard is OnShard.SHAPE:
        return _NONE
    if known.collective == "scatter":
        return _NONE if argument(node, "unit") else frozenset([_WORDS["reduce_scatter"]])
    if known.on_shard is OnShard.MAKES and not known.cuts:
        return _NONE
    return read | {_WORDS[node.target._schema.name.split("::")[1]]} if known.own else read  # type: ignore[union-attr]


def _memory(graph: Graph) -> dict[Node, Node]:
    """Map every node to the node that made its memory. What a transfer or a mark makes of a value counts as new."""
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        source = sources(node)
        known = traits(node)
        anew = known.equal or known.on_shard is OnShard.MAKES
        found[node] = found[source[0]] if source and not anew else node
    return found


def _through(loop: Node, origins: dict[Node, Origins], memory: dict[Node, Node], found: OwnValues) -> list[Origins]:
    """Return the origins of a loop's results, and add those of what it writes to `origins`."""
    inputs, graph = given_to_body(loop), body_of(loop).graph
    inside = {x: origins.get(memory[outer], _NONE) for x, outer in inputs.items()}
    while True:  # the next round reads what a round writes
        after = _follow(graph, inside, found)
        grown = {x: after.get(x, _NONE) for x in inputs}
        if grown == inside:
            break
        inside = grown
    for x, outer in inputs.items():
        if inside[x]:
            origins[memory[outer]] = origins.get(memory[outer], _NONE) | inside[x]
    results = next(iter(reversed(graph.nodes))).args[0]
    return [found.results.get(x, _NONE) for x in results]
