"""Cut a scheduled graph into *segments*, runs of operations that a device repeats alone; the host does the rest.

A transfer's start and wait, a read from host memory or a drive, a question about a value and the like end a segment. No
operation changes its place, except for scalars in host memory, which are computed first: keys, the step's number,
schedules. They come into a segment as inputs. A loop that such operations stand in is cut inside.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import LazyGraphModule, OpOverload
from ..graph.alias import is_view, is_written, roots, writes
from ..graph.edit import copied, copy_of
from ..graph.liveness import complete_values, tensors_of
from ..graph.nested import REGION, call_of, insert_call, is_nested, is_region
from ..graph.node_kinds import ASIDE, BOUNDED, arguments, is_ours, traits
from ..graph.program import tensor_of
from ..graph.source_lines import OUTLINED
from ..ops.registry import ASKS_VALUES
from ..random.draws import is_draw

ops = torch.ops.zerofn
SEGMENT = "segment"  # a meta key of a segment's body, with its `Segment`
FEW = 4  # operations: a segment of fewer is not launched faster than they are
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
_SHORT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Segment:
    """Which of a segment's inputs keep their address from call to call (`fixed`), which are keys that only draws read,
    and how many draws are in it.
    """

    at: torch.device
    fixed: frozenset[int]
    keys: frozenset[int]
    num_draws: int


@dataclass(frozen=True)
class Cut:
    """A graph whose segments are bodies, which are called once. `inside`: the operations in them, those of loops once.
    `between`: the others, but for scalars of the host -> why.
    """

    gm: GraphModule
    between: dict[str, str]
    inside: int
    segments: int


def cut(gm: GraphModule, at: torch.device, fixed: Collection[int]) -> Cut:
    """Return a copy of a graph, cut into segments on a device. `fixed`: inputs that keep their address, by number.

    What leaves a segment for the graph's results is cloned, as the next call overwrites it.
    """
    complete_values(gm.graph)
    cutter = _Cutter(copied(gm), at, fixed)
    for x in cutter.gm.graph.nodes:
        x.meta.setdefault(OUTLINED, x.name)
    between = dict(cutter.between)
    below = [_cut_inside(cutter, node) for node in cutter.between if is_nested(node) and not is_region(_body(node))]
    for node in [x for x in between if x.target is operator.getitem or is_nested(x) and not is_region(_body(x))]:
        del between[node]
    cutter.outline()
    said = {f"{x.name} ({x.target})": why for x, why in between.items()}
    return Cut(
        cutter.gm,
        {k: why for each in (said, *(x.between for x in below)) for k, why in each.items()},
        sum(map(len, cutter.runs)) + sum(x.inside for x in below),
        len(cutter.runs) + sum(x.segments for x in below),
    )


def _body(node: Node) -> GraphModule:
    found = call_of(node)
    assert found is not None
    return found.body


def _cut_inside(cutter: _Cutter, node: Node) -> Cut:
    """Cut the body of a node, which gets a copy for itself: its addresses are those of this node's values."""
    called = call_of(node)
    assert called is not None
    inputs = [x for x in called.body.graph.nodes if x.op == "placeholder"]
    fixed = [inputs.index(x) for x in called.whole if cutter.is_fixed(called.given[x])]
    below = cut(called.body, cutter.at, fixed)
    name = f"{called.name}_of_{node.name}"
    setattr(cutter.gm, name, below.gm)
    with cutter.gm.graph.inserting_before(node):
        node.args = (cutter.gm.graph.get_attr(name), *node.args[1:])
    return below


class _Cutter:
    """Finds the segments of a graph. `runs`: their operations. `between`: the others -> why."""

    def __init__(self, gm: GraphModule, at: torch.device, fixed: Collection[int]) -> None:
        self.gm, self.at = gm, at
        self._root = roots(gm.graph)
        self._given = {x for k, x in enumerate(gm.graph.find_nodes(op="placeholder")) if k in fixed}
        self._on_host = _on_host(gm.graph)
        nodes = [x for x in gm.graph.nodes if x.op == "call_function" and x not in self._on_host]
        self._written = {self._root[x] for node in nodes for x in writes(node)}
        self.between: dict[Node, str] = {}
        for x in nodes:
            if why := self._why_not(x):
                self._leave_out(x, why)
        while True:  # an operation less in a segment may be the reason for another one less
            self.runs = list(self._runs(nodes))
            more = [found for run in self.runs for found in self._not_worth_it(run)]
            if not more:
                break
            for x, why in more:
                self._leave_out(x, why)

    def is_fixed(self, node: Node) -> bool:
        """Return whether a value of the device has one address in all calls."""
        memory, value = self._root[node], tensor_of(node)
        if value is None or value.device != self.at or memory in self._on_host:
            return False
        if memory.op == "placeholder":
            return memory in self._given
        if memory not in self.between:
            return True
        known = arguments(memory) if isinstance(memory.target, OpOverload) else {}
        return bool(known.get("place")) and not traits(memory).lends

    def _leave_out(self, node: Node, why: str) -> None:
        parts = [x for x in node.users if x.target is operator.getitem]
        self.between.update(dict.fromkeys([node, *parts], why))

    def outline(self) -> None:
        """Put each run into a body. What the host computes goes to the front."""
        graph = self.gm.graph
        early = [x for x in graph.nodes if x in self._on_host or x.op == "get_attr"]
        first = next(x for x in graph.nodes if x.op != "placeholder" and x not in early)
        for x in early:
            first.prepend(x)
        output = next(iter(reversed(graph.nodes)))
        leaving = [x for x in output.all_input_nodes if self._leaves(x)]
        with graph.inserting_before(output):
            clones = {x: copy_of(x) for x in leaving}
        output.args = torch.fx.node.map_arg(output.args, lambda x: clones.get(x, x))
        for k, run in enumerate(self.runs):
            self._outline(run, f"{SEGMENT}_{k}")
        for x in [x for x in graph.nodes if x.op == "get_attr" and not x.users]:
            graph.erase_node(x)
        self.gm.recompile()

    def _leaves(self, node: Node) -> bool:
        """Return whether a result lies in memory of a segment."""
        inside = [x for x in (node, self._root[node]) if x.op == "call_function"]
        in_segment = any(x not in self.between and x not in self._on_host for x in inside)
        return in_segment and self._root[node] not in self._given

    def _runs(self, nodes: Sequence[Node]) -> Iterator[list[Node]]:
        """Yield the segments' operations in order, each list of results with the parts of it that are read."""
        run: list[Node] = []
        for node in nodes:
            if node in self.between:
                if run:
                    yield run
                run = []
            elif node.target is not operator.getitem:
                run += [node, *(x for x in node.users if x.target is operator.getitem)]
        if run:
            yield run

    def _not_worth_it(self, run: Sequence[Node]) -> Iterator[tuple[Node, str]]:
        few = sum(map(_launches, run)) < FEW
        for node in run:
            if few:
                yield node, "is one of too few between two others."
            elif not all(map(self.is_fixed, writes(node))):
                yield node, "writes to memory that has a different address in each call."
            elif self._root[node] in self._written and not self.is_fixed(node) and not set(run).issuperset(node.users):
                # A segment has a copy of such memory: a view of the copy would take what is written through it.
                yield node, "is a view of memory that has a different address in each call and is written to."

    def _outline(self, run: Sequence[Node], name: str) -> None:
        inside, graph, new = set(run), Graph(), dict[Node, Node]()
        given = dict.fromkeys(y for x in run for y in x.all_input_nodes if y not in inside)
        bodies = {x.args[0] for x in run if is_nested(x)}
        inputs = [x for x in given if x not in bodies]
        for k, x in enumerate(inputs):
            new[x] = graph.placeholder(f"given_{k}_{x.name}")
            new[x].meta.update(x.meta)
        for x in [x for x in given if x in bodies]:
            new[x] = graph.get_attr(str(x.target))
        for x in run:
            new[x] = graph.node_copy(x, new.__getitem__)
        results = [x for x in run if tensor_of(x) is not None and any(u not in inside for u in x.users)]
        graph.output([new[x] for x in results])
        body = LazyGraphModule(self.gm, graph)
        body.meta.update({REGION: name, SEGMENT: self._how(inputs, inside)})
        setattr(self.gm, name, body)
        outer = self.gm.graph
        with outer.inserting_before(run[0]):
            for x, part in zip(results, insert_call(outer, name, inputs, results, run[0].meta), strict=True):
                part.meta.update(x.meta)
                self._root[part] = self._root[x]
                x.replace_all_uses_with(part, lambda user: user not in inside)
        for x in reversed(run):
            outer.erase_node(x)

    def _how(self, inputs: Sequence[Node], inside: set[Node]) -> Segment:
        of_draws = [k for k, x in enumerate(inputs) if all(_is_key(x, u) for u in x.users if u in inside)]
        fixed = [k for k, x in enumerate(inputs) if self.is_fixed(x)]
        return Segment(self.at, frozenset(fixed), frozenset(of_draws), sum(is_draw(x.target) for x in inside))

    def _why_not(self, node: Node) -> str:
        """Return why the host runs an operation, in words; "" if it can be in a segment."""
        if node in self.between or node.target is operator.getitem:  # it goes with what it is a part of
            return self.between.get(node, "")
        if why := _unrecordable(node, inside=False):
            return why
        scalars = [x for x in node.all_input_nodes if self._is_scalar(x)]
        values = [x.meta.get("val") for x in (node, *node.all_input_nodes) if x not in scalars]
        if any(x.layout != torch.strided for value in values for x in tensors_of(value)):
            return "is a sparse tensor, or reads one."
        if any(x.device != self.at for value in values for x in tensors_of(value)):
            return "is computed in host memory, or reads it."
        if any(BOUNDED in x.meta for x in (node, *node.all_input_nodes)):
            return "has sizes that depend on data."
        if scalars and not is_ours(node) and any(x.dtype in _SHORT for x in tensors_of(node.meta["val"])):
            return "computes 16-bit values with a number from the host, which the device would round differently."
        if scalars and is_nested(node) and not is_region(_body(node)):
            return "passes a number from the host to its body."
        return ""

    def _is_scalar(self, node: Node) -> bool:
        """Return whether an input is a number of the host, which comes to a segment in memory of the device."""
        value = tensor_of(node)
        if value is None or value.dim() or value.device.type != "cpu":
            return False
        return node in self._on_host or node.op != "call_function" or self.at.type != "cpu"


def _is_key(node: Node, user: Node) -> bool:
    return is_draw(user.target) and user.args[0] is node


def _launches(node: Node) -> int:
    """Return how many operations a device is asked for."""
    found = call_of(node)
    if found is not None and not is_region(found.body):
        return found.rounds * sum(map(_launches, found.body.graph.nodes))
    return node.op == "call_function" and node.target is not operator.getitem and not is_view(node)


def _unrecordable(node: Node, inside: bool) -> str:
    """Return why only the host can run an operation, whatever its values are. `inside`: of a body."""
    if any(x.layout != torch.strided for x in tensors_of(node.meta.get("val"))):
        return "is a sparse tensor."
    if node.op != "call_function" or node.target is operator.getitem:
        return ""
    if node.meta.get(ASIDE):
        return "runs on the host's own thread."
    if is_nested(node):
        return next((why for x in _body(node).graph.nodes if (why := _unrecordable(x, inside=True))), "")
    if not isinstance(node.target, OpOverload):
        return "runs graphs or functions of its own."
    if node.target in ASKS_VALUES or any(tag in node.target.tags for tag in _TAGS):
        return "asks the device for a value, or draws from torch's global generator."
    if is_ours(node):
        known = traits(node)
        of_host = known.moves or known.opaque or known.checks or known.stores or known.lends
        if of_host or node.target is ops.wait.default:
            return "is done by the host."
        if is_draw(node.target) and (inside or not is_draw(node.target, seeds=True)):
            return "draws in a loop, or from torch's default generator."
        return "makes a key in a loop." if inside and "fold_in" in str(node.target) else ""
    return ""


def _on_host(graph: Graph) -> dict[Node, None]:
    """Return, in order, the operations that compute scalars in host memory of nothing but such scalars."""
    found: dict[Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
            continue
        given = node.all_input_nodes
        scalars = all(x in found or x.op != "call_function" and _is_scalar_of_host(x) for x in given)
        if scalars and _is_scalar_of_host(node) and not is_draw(node.target) and not is_written(node):
            found[node] = None
    return found


def _is_scalar_of_host(node: Node) -> bool:
    value = tensor_of(node)
    return value is not None and not value.dim() and value.device.type == "cpu"
