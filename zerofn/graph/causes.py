"""What each value of a microbatch is computed from: parameters, the batch, or both.

A pipeline cuts a microbatch by the values that depend on both. What depends on the batch alone, such as masks, labels
and random draws, is computed on every stage that reads it. So is what depends on parameters alone, where these are
there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch.fx import Graph, Node

from .alias import is_given, roots, with_writers, with_writes

# FREE: of no parameter. PARAM: of parameters alone, the same in every microbatch. ACT: of both, an activation.
FREE, PARAM, ACT = "free", "param", "act"


class Causes:
    """The causes of every value of a graph. `leaves`: the values that are parameters, with their names. `varying`: the
    inputs that differ between microbatches.

    `kind`: of every value, see above. `leaves`: the parameters that a `PARAM` value is computed from. `inputs`: what a
    node reads, with the last node before it that writes to each memory that it reads: writers need not have users.
    `constant`: the values that are the same in every microbatch, of no parameter and never written, such as positions
    and masks. `root`: see `alias.roots`. `written`: memory -> what writes to it, in order; `written_by`: the inverse.

    Memory that an activation is written to is one itself, and so is memory from outside that is written at all: both
    have one place, and what touches them runs once.
    """

    def __init__(self, graph: Graph, leaves: Mapping[Node, str], varying: Collection[Node]) -> None:
        self.root = roots(graph)
        self.inputs = _with_writers(graph, self.root)
        self.written_by = {x: {self.root[y] for y in ys} for x, ys in with_writes(graph.nodes) if ys}
        self.written: dict[Node, list[Node]] = {}
        for node, memories in self.written_by.items():
            for memory in memories:
                self.written.setdefault(memory, []).append(node)
        self.kind: dict[Node, str] = {}
        self.leaves: dict[Node, frozenset[str]] = {}
        fixed: set[Node] = set()
        while True:
            self._follow(graph, leaves, varying, fixed)
            acts = {m for m, by in self.written.items() if is_given(m) or any(self.kind[w] == ACT for w in by)}
            if acts == fixed:
                break
            fixed = acts
        self.fixed = fixed
        free = (x for x in graph.nodes if x.op == "call_function" and self.kind[x] == FREE)
        self.constant = {x for x in free if x not in self._varies and self.root[x] not in self.written}

    def _follow(
        self, graph: Graph, leaves: Mapping[Node, str], varying: Collection[Node], fixed: Collection[Node]
    ) -> None:
        """Find the kinds of all values, if the memory `fixed` holds activations."""
        varies: set[Node] = set()
        for node in graph.nodes:
            inputs = self.inputs[node]
            own = frozenset([leaves[node]]) if node in leaves else self._union(inputs)
            if node in varying or node not in leaves and any(x in varies for x in inputs):
                varies.add(node)
            is_act = self.root[node] in fixed or node not in leaves and any(self.kind[x] == ACT for x in inputs)
            self.kind[node] = ACT if is_act or own and node in varies else PARAM if own else FREE
            self.leaves[node] = own if self.kind[node] == PARAM else frozenset()
        self._varies = varies

    def _union(self, nodes: Iterable[Node]) -> frozenset[str]:
        sets = {self.leaves[x] for x in nodes}
        return next(iter(sets)) if len(sets) == 1 else frozenset().union(*sets)


def _with_writers(graph: Graph, root: Mapping[Node, Node]) -> dict[Node, list[Node]]:
    """Map each node to what it reads, with the last writer before it to the memory of each of its inputs."""
    found: dict[Node, list[Node]] = {}
    for node, last in with_writers(graph, root):
        inputs = node.all_input_nodes
        found[node] = list(dict.fromkeys([*inputs, *(last[root[x]] for x in inputs if root[x] in last)]))
    return found
