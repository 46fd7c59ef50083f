"""The part of a microbatch that a pipeline cuts: between the parameters that are read and their gradients.

What lies before a parameter (gathers, views of units) and behind a gradient (flat buffers, reductions) differs between
the ranks of a pipeline, since each has its own units. What lies between is the same everywhere, in the same order: all
that ranks must agree on is computed from it alone.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node, map_arg

from .._torch_compat import OpOverload
from .alias import is_view, sources, writes
from .causes import ACT, Causes
from .edit import frozen
from .liveness import AGAIN
from .nested import results_of
from .node_kinds import argument, start_of, traits
from .phase import BACKWARD, FORWARD, phase_of
from .program import tensor_of
from .source_lines import line_behind


class Seams(NamedTuple):
    """Where the region begins and ends. `leaves`: the values that are parameters, with their names; on a stage that has
    the parameter, each is the first input of its node, or of the transfer that the node waits for. `gradients`: the
    nodes that pass gradients on, which are their first inputs; with the parameters' names. `varying`: the body's inputs
    that differ between microbatches. `names`: what users call inputs.
    """

    leaves: Mapping[Node, str]
    gradients: Mapping[Node, str]
    varying: Collection[Node]
    names: Mapping[Node, str] = {}


def seams_of(body: GraphModule, lends: OpOverload, returns: OpOverload, varying: Collection[Node]) -> Seams:
    """Return where the region begins and ends in a body whose parameters pass through the operation `lends`, and whose
    gradients pass through `returns`; both have an argument `leaf`, the name. `varying`: see `Seams`.
    """
    leaves: dict[Node, str] = {}
    gradients: dict[Node, str] = {}
    for node in body.graph.nodes:
        if node.target is lends:
            ends = [x for x in node.users if start_of(x) is node] or [node]
            leaves.update(dict.fromkeys(ends, argument(node, "leaf")))
        elif node.target is returns:
            gradients[node] = argument(node, "leaf")
    return Seams(leaves, gradients, varying)


class Needs(NamedTuple):
    """What a value needs: values that have a stage, and parameters by name."""

    values: frozenset[Node]
    leaves: frozenset[str]


class Region:
    """The region of a body, and which of its nodes have a stage.

    The others *float*: they are computed again wherever they are read. Nodes float that depend on no activation; views
    that are no smaller than what they view, so that the view of a value is not sent beside it; and nodes of the
    backward pass that do not depend on a gradient, such as what is recomputed.

    `forward`, `backward`: the nodes with a stage, in order; `backward`: those computed from the seed, which are
    gradients. `ordinal`: the number of each among all nodes with a stage, equal on all ranks. `order`: the same, but
    nodes that cannot be apart have one number: an operation and its results, a transfer and its wait, memory and the
    gradients that are written to it. `needs`: of every value. `tail`: the gradients' seams, and what is computed from
    these. `originals`: what is computed again -> the value of the forward pass. On another stage than that it is the
    value itself, which was received there: so a cut is the same, whatever is computed again.
    """

    def __init__(self, body: GraphModule, seams: Seams) -> None:
        graph = body.graph
        self.body, self.seams = body, seams
        self.causes = Causes(graph, seams.leaves, seams.varying)
        self.nodes = [x for x in graph.nodes if x.op == "call_function"]
        self.results = results_of(body)
        self.tail = self._behind(seams.gradients, self.nodes)
        self.gradients = self._find_gradients()
        self.together = {node: self._with(node) for node in self.nodes}
        fixed = [x for x in self.nodes if self._has_stage(x)]
        self.forward = [x for x in fixed if x not in self.gradients]
        self.backward = [x for x in fixed if x in self.gradients]
        for node in self.backward:
            if phase_of(node) == FORWARD:
                raise ValueError(
                    f"pipe: the loss is computed{line_behind(node)} from gradients, but a pipeline has only one "
                    "backward pass. Use a mesh without 'pipe'."
                )
        self.ordinal = {node: k for k, node in enumerate(fixed)}
        number: dict[Node, int] = {}
        self.order = {x: number.setdefault(self.together[x], len(number)) for x in fixed}
        # A writer with a stage runs where its memory is, before what reads it there: it has not to be sent.
        self.inputs = {
            node: [x for x in inputs if x not in self.order or x in node.all_input_nodes]
            for node, inputs in self.causes.inputs.items()
        }
        self.originals = self._find_originals()
        self.needs: dict[Node, Needs] = {}
        self._find_needs(graph.nodes)
        self.where = {node: k for k, node in enumerate(graph.nodes)}

    def reads(self, nodes: Iterable[Node]) -> Needs:
        """Return what some nodes need beside each other."""
        own = set(nodes)
        found = [self.of(x) for node in own for x in self.inputs[node] if x not in own]
        return Needs(_union(x.values for x in found) - own, _union(x.leaves for x in found))

    def of(self, value: Node) -> Needs:
        """Return what has to be there for a value: itself, if it has a stage."""
        return Needs(frozenset([value]), frozenset()) if value in self.order else self.needs[value]

    def _behind(self, first: Collection[Node], nodes: Iterable[Node]) -> set[Node]:
        """Return nodes with all that follows from them."""
        found = set(first)
        for node in nodes:
            if not found.isdisjoint(self.causes.inputs[node]):
                found.add(node)
        return found

    def _find_gradients(self) -> set[Node]:
        """Return what is computed from the seed, the backward pass's first node, and the memory it is written to."""
        late = [x for x in self.nodes if phase_of(x) == BACKWARD and not x.meta.get(AGAIN)]
        found = set([x for x in late if traits(x).constant_fill][:1])
        size = -1
        while len(found) > size:
            size = len(found)
            found |= self._behind(found, self.nodes) - self.tail
            memory = {self.causes.root[x] for node in found for x in writes(node)}
            found |= {x for x in late if self.causes.root[x] in memory and x not in self.tail}
        return found

    def _with(self, node: Node) -> Node:
        """Return the first of the nodes that stay together with one."""
        memory = self.causes.root[node]
        if node.target is operator.getitem:
            return self._with(node.args[0])  # type: ignore[arg-type]
        if node in self.gradients and memory in self.gradients and memory in self.causes.written:
            return memory
        start = start_of(node)
        return start if start is not None and start.op == "call_function" else node

    def _has_stage(self, node: Node) -> bool:
        first = self.together[node]
        if node in self.tail or is_large_view(node):
            return False
        if first in self.gradients:
            return True
        return self.causes.kind[first] == ACT and phase_of(first) == FORWARD and not first.meta.get(AGAIN)

    def _find_originals(self) -> dict[Node, Node]:
        """Return which values of the forward pass, with a stage, the backward pass computes again."""
        known: dict[Any, Node] = {}
        same: dict[Node, Node] = {}
        for node in self.nodes:
            memory = (node, *node.all_input_nodes)
            if node in self.gradients or any(self.causes.root[x] in self.causes.written for x in memory):
                continue
            args = map_arg((node.args, node.kwargs), lambda x: same.get(x, x))
            key = node.target, *map(frozen, args)
            if phase_of(node) == BACKWARD and key in known:
                same[node] = known[key]
            elif phase_of(node) != BACKWARD:
                known[key] = node
        return {node: first for node, first in same.items() if first in self.order}

    def _find_needs(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node in self.seams.leaves:
                self.needs[node] = Needs(frozenset(), frozenset([self.seams.leaves[node]]))
            elif node in self.originals:
                self.needs[node] = self.of(self.originals[node])
            else:
                found = [self.of(x) for x in self.inputs[node]]
                self.needs[node] = Needs(_union(x.values for x in found), _union(x.leaves for x in found))


def is_large_view(node: Node) -> bool:
    """Return whether a node is a view that is no smaller than what it views. The end of a transfer is none: where it
    was read, and not where the transfer is, a handle would be sent that only its own rank can wait for.
    """
    value, start = tensor_of(node), start_of(node)
    ends = start is not None and start.op == "call_function"
    if value is None or ends or node.target is operator.getitem or not is_view(node):
        return False
    viewed = tensor_of(sources(node)[0])
    return viewed is not None and value.nbytes >= viewed.nbytes


def _union(sets: Iterable[frozenset[Any]]) -> frozenset[Any]:
    distinct = {id(x): x for x in sets if x}
    if len(distinct) < 2:
        return next(iter(distinct.values()), frozenset())
    return frozenset().union(*distinct.values())
