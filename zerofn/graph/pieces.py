"""The pieces of one stage of a pipeline, as graphs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import LazyGraphModule
from .alias import is_view, sources
from .liveness import memory_bytes
from .node_kinds import start_of
from .program import alike, tensor_of
from .region import Region
from .source_lines import line_behind
from .stages import Addend, Crossing, Stages

aten = torch.ops.aten


class Edge(NamedTuple):
    """A value that one stage sends to another. `kind`: "F", sent behind the forward pass of a microbatch, or "I",
    behind the gradients of what the stage received. What arrives has this shape and these strides. `name`: the same on
    all ranks; a value that is sent to two stages has one.
    """

    name: str
    source: int
    target: int
    kind: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class Piece(NamedTuple):
    """A part of what a stage computes for a microbatch. `graph` takes, in this order: `given`, inputs of the body by
    name; `received`, of other stages; and `taken`, what an earlier piece of the stage received (an edge's name) or
    kept. No two of the results share memory; they are, by number: `kept` by name, for later pieces; `sent` by edge; and
    `results`, by the number of the body's result that each is, or is a term of.
    """

    graph: GraphModule
    given: tuple[str, ...]
    received: tuple[Edge, ...]
    taken: tuple[str, ...]
    kept: Mapping[str, int]
    sent: Mapping[Edge, int]
    results: Mapping[int, int]
    kept_bytes: int


class Plan:
    """What the pieces of one stage compute, receive and keep. `kinds`: of pieces, in order.

    A value without a stage is computed in the first piece that reads it, and kept for later ones; but views are taken
    again, what lies before the parameters (a unit may be gathered for each piece), and what is the same in every
    microbatch: kept, each microbatch under way would have its own.
    """

    def __init__(self, stages: Stages, stage: int, kinds: Mapping[str, set[Node]]) -> None:
        self.stages, self.region, self.stage = stages, stages.region, stage
        self.before = _before(self.region.seams.leaves) | self.region.causes.constant
        self.incoming = {x.value for x in stages.crossings if x.target == stage}
        self.outgoing = [x for x in stages.crossings if x.source == stage]
        self.made: dict[Node, str] = {}  # value -> the piece that makes or receives it
        self.parts = {kind: Part(self, kind, kinds) for kind in kinds}

    def kept(self, kind: str) -> list[Node]:
        """Return what a piece makes and later ones take, in order."""
        later = {x for part in self.parts.values() for x in part.taken if self.made[x] == kind}
        return sorted(later - self.incoming, key=self.region.where.__getitem__)

    def taken_of(self, received: Iterable[Node]) -> list[Node]:
        """Return which of the values that a piece received later ones take."""
        return [x for x in received if any(x in part.taken for part in self.parts.values())]

    def name(self, value: Node) -> str:
        """Return the name under which a stage has a value."""
        return edge_name(self.stages, value) if value in self.incoming else value.name


class Part:
    """What one piece computes (`computed`), is given, receives and takes of earlier ones."""

    def __init__(self, plan: Plan, kind: str, kinds: Mapping[str, set[Node]]) -> None:
        self._plan, self._kind = plan, kind
        self.computed: set[Node] = set()
        self.given: set[Node] = set()
        self.received: set[Node] = set()
        self.taken: set[Node] = set()
        self._seen: set[Node] = set()
        region, stages = plan.region, plan.stages
        self._own = own = kinds[kind]
        self.results = {
            k: x
            for k, x in enumerate(region.results)
            if isinstance(x, Node) and plan.stage in stages.homes[k] and self._makes(x)
        }
        late = next((k for k in kinds if k != "F"), "F")
        self.sent = [x for x in plan.outgoing if (x.value in own if _is_plain(x, region) else kind == late)]
        self._visit([*own, *self.results.values(), *(x.value for x in self.sent)])
        for x in self.computed:
            plan.made.setdefault(x, kind)
        self._check_versions()

    def _makes(self, result: Node) -> bool:
        """Return whether this is the piece that returns a result of the body."""
        plan = self._plan
        late = result in plan.region.tail or bool(plan.region.of(result).values & plan.region.gradients)
        return self._kind in ("WB" if late else "F")

    def source(self, value: Node) -> Node | None:
        """Return the value that one is, or is a seam of, in this stage; None if it is a value of its own."""
        seams = self._plan.region.seams
        if value in seams.leaves:
            return (start_of(value) or value).all_input_nodes[0]
        if value in self.taken or value in self.received:
            return None
        if self._is_elsewhere(value):
            return self._plan.region.originals[value]
        is_old = self._plan.made.get(value, self._kind) != self._kind
        return memory if is_old and (memory := _shared(value)) and not is_view(value) else None

    def _is_elsewhere(self, value: Node) -> bool:
        """Return whether a value is computed again, and the first time on another stage."""
        original = self._plan.region.originals.get(value)
        return original is not None and self._plan.stages.at[original] != self._plan.stage

    def _visit(self, values: Iterable[Node]) -> None:
        todo = list(values)
        while todo:
            x = todo.pop()
            if x not in self._seen:
                self._seen.add(x)
                todo += self._add(x)

    def _add(self, x: Node) -> list[Node]:
        """Find how this piece gets a value; return what that needs."""
        plan, region = self._plan, self._plan.region
        if x.op == "placeholder":
            self.given.add(x)
            return []
        if x.op == "get_attr":
            return []
        if x in region.seams.leaves:
            return [self.source(x)]  # type: ignore[list-item]
        if x in region.seams.gradients:
            inputs = {y for each in self.term(x) for node in each.chain for y in node.all_input_nodes}
            return [
                *(each.value for each in self.term(x)),
                *sorted(inputs - region.gradients, key=region.where.__getitem__),
            ]
        if x in plan.incoming:
            (self.taken if plan.made.setdefault(x, self._kind) != self._kind else self.received).add(x)
            return []
        if self._is_elsewhere(x):
            return [region.originals[x]]
        if plan.made.get(x, self._kind) != self._kind and x not in plan.before:
            if is_view(x) and _shared(x):
                self.computed.add(x)
                return list(x.all_input_nodes)
            if found := self.source(x):
                return [found]
            if x.meta.get("val") is not None:
                self.taken.add(x)
            return []
        assert x not in region.order or x in self._own, (x, self._kind, plan.stage)
        self.computed.add(x)
        return region.inputs[x]

    def _check_versions(self) -> None:
        """Raise `ValueError` if this piece reads memory that an earlier one has written later in the program."""
        plan, region = self._plan, self._plan.region
        root, where, writers = region.causes.root, region.where, region.causes.written
        for memory in {root[x] for x in self.taken} & writers.keys():
            done = [w for w in writers[memory] if plan.made.get(w, self._kind) != self._kind]
            for x in self.computed if done else ():
                reads = not is_view(x) and any(root[y] is memory for y in x.all_input_nodes)
                if reads and where[x] < where[done[-1]]:
                    raise ValueError(
                        f"pipe: the line{line_behind(done[-1])} overwrites a tensor whose old values the backward pass "
                        "needs. Make a new tensor instead: x = x + y."
                    )

    def term(self, seam: Node) -> list[Addend]:
        """Return what is summed on this stage for the gradient of a parameter."""
        plan = self._plan
        return plan.stages.terms[plan.region.seams.gradients[seam]].get(plan.stage, [])


def _is_plain(crossing: Crossing, region: Region) -> bool:
    """Return whether a value is sent by the piece that makes it: no value of the forward pass, sent with gradients."""
    return crossing.backward == (crossing.value in region.gradients)


def _shared(node: Node) -> Node | None:
    """Return the value whose memory a node shares, unless that is the memory of a transfer that has not ended."""
    found, start = sources(node), start_of(node)
    return found[0] if found and (start is None or start.op != "call_function") else None


def _before(leaves: Iterable[Node]) -> set[Node]:
    """Return what parameters are made of: gathers of units, and their views."""
    found: set[Node] = set()
    todo = [x for leaf in leaves for x in leaf.all_input_nodes]
    while todo:
        x = todo.pop()
        if x not in found and x.op == "call_function":
            found.add(x)
            todo += x.all_input_nodes
    return found


def edge_name(stages: Stages, value: Node) -> str:
    """Return a name for a value that is the same on all ranks."""
    return f"{'I' if value in stages.region.gradients else 'F'}{stages.region.ordinal[value]}"


class Writer:
    """Makes the graph of one piece."""

    def __init__(self, plan: Plan, kind: str, edges: Mapping[tuple[Node, int], Edge]) -> None:
        self._plan, self._part, self._kind = plan, plan.parts[kind], kind
        self._edges = edges
        self._graph = Graph()
        self._found: dict[Node, Node] = {}
        self._parts: dict[str, Any] = {}  # constants and bodies
        self._outputs: list[Node] = []
        self._numbers: dict[Node, int] = {}  # value in the new graph -> which of the outputs it is
        self._memory: set[Node] = set()  # of the outputs

    def piece(self) -> Piece:
        """Return the piece."""
        plan, part = self._plan, self._part
        where = plan.region.where
        given, received, taken = (sorted(x, key=where.__getitem__) for x in (part.given, part.received, part.taken))
        for x in (*given, *received, *taken):
            self._found[x] = self._input(x, x in plan.incoming)
        for x in sorted(part.computed, key=where.__getitem__):
            self._found[x] = self._graph.node_copy(x, self._value)
        kept = plan.kept(self._kind)
        kept_at = {plan.name(x): self._output(x) for x in kept}
        sent = {self._edges[x.value, x.target]: self._output(x.value, sent=True) for x in part.sent}
        results = {k: self._output(x) for k, x in part.results.items()}
        self._graph.output(self._outputs)
        gm = LazyGraphModule(self._parts, self._graph)
        gm.meta.update(plan.region.body.meta)
        return Piece(
            gm,
            tuple(x.name for x in given),
            tuple(self._edges[x, plan.stage] for x in received),
            tuple(map(plan.name, taken)),
            kept_at,
            sent,
            results,
            sum(memory_bytes(x.meta["val"]) for x in [*kept, *plan.taken_of(received)]),
        )

    def _value(self, x: Node) -> Node:
        """Return a value of the body in the new graph."""
        if x in self._found:
            return self._found[x]
        if x.op == "get_attr":
            self._parts[str(x.target)] = operator.attrgetter(str(x.target))(self._plan.region.body)
            made = self._graph.node_copy(x)
        elif x in self._plan.region.seams.gradients:
            made = self._term(x)
        else:
            source = self._part.source(x)
            assert source is not None, (x, self._kind, self._plan.stage)
            if x not in self._plan.region.seams.leaves and not alike(tensor_of(x), tensor_of(source)):
                raise ValueError(
                    f"pipe: {x.target}{line_behind(x)} changes the shape of its input in place. Use an operation that "
                    "returns a new tensor."
                )
            made = self._value(source)
        self._found[x] = made
        return made

    def _term(self, seam: Node) -> Node:
        """Return this stage's part of a parameter's gradient: zeros, if the parameter is not read here."""
        by_chain: dict[tuple[Node, ...], list[Node]] = {}
        for each in self._part.term(seam):
            by_chain.setdefault(each.chain, []).append(self._value(each.value))
        value = seam.all_input_nodes[0].meta["val"]
        if not by_chain:
            like = {"dtype": value.dtype, "device": value.device}
            by_chain[()] = [self._graph.call_function(aten.zeros.default, (list(value.shape),), like)]
            by_chain[()][0].meta.update(seam.meta, val=value)
        sums = []
        for chain, terms in by_chain.items():
            total = self._sum(terms, seam)
            for node in chain:
                found = {x: total if x in self._plan.region.gradients else self._value(x) for x in node.all_input_nodes}
                total = self._graph.node_copy(node, found.__getitem__)
            sums.append(total)
        return self._sum(sums, seam)

    def _sum(self, terms: Sequence[Node], seam: Node) -> Node:
        total = terms[0]
        for x in terms[1:]:
            total, value = self._graph.call_function(aten.add.Tensor, (total, x)), x.meta["val"]
            total.meta.update(seam.meta, val=value)
        return total

    def _input(self, node: Node, received: bool) -> Node:
        made = self._graph.placeholder(node.name)
        made.meta["val"] = as_sent(node) if received else node.meta["val"]
        return made

    def _output(self, value: Node, sent: bool = False) -> int:
        """Return which of the piece's outputs a value is. What shares memory with an earlier one is copied; so is what
        is sent of larger memory.
        """
        x = self._value(value)
        if x in self._numbers:
            return self._numbers[x]
        out, memory = x, self._memory_of(value)
        if memory in self._memory or sent and (_shared(value) or as_sent(value) is not value.meta["val"]):
            out = memory = self._graph.call_function(aten.clone.default, (x,))
            out.meta.update(x.meta, val=as_sent(value))
        self._memory.add(memory)
        self._outputs.append(out)
        self._numbers[x] = len(self._outputs) - 1
        return self._numbers[x]

    def _memory_of(self, value: Node) -> Node:
        """Return what made the memory of a value, or the value that came in."""
        while value not in self._part.taken and value not in self._part.received:
            if value in self._plan.region.seams.gradients:
                terms = self._part.term(value)
                if len(terms) != 1 or not all(map(is_view, terms[0].chain)):
                    return self._value(value)
                value = terms[0].value
            elif found := self._part.source(value) or _shared(value):
                value = found
            else:
                break
        return value


def as_sent(node: Node) -> Any:
    """Return the value as it arrives: without gaps between its elements."""
    value = node.meta["val"]
    dense = torch.empty_like(value)
    return value if dense.stride() == value.stride() else dense
