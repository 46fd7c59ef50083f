"""Put what a compiler may fuse between two products or transfers into a body of its own, a *region*."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import LazyGraphModule, OpOverload
from ..graph.alias import is_view, roots, touches, writes
from ..graph.edit import clean
from ..graph.liveness import complete_values, tensors_of
from ..graph.nested import REGION, insert_call
from ..graph.node_kinds import BOUNDED, argument, set_argument
from ..graph.phase import BACKWARD, FORWARD, phase_of
from ..graph.source_lines import OUTLINED
from ..ops.registry import EXACT, FUSIBLE, OUT_GRADIENT
from ..passes import Context

aten = torch.ops.aten


def outline_regions(gm: GraphModule, context: Context) -> None:
    """Replace each run of operations that a compiler may fuse by one call of a body.

    A run ends before an operation that is none of these and needs one of its results. What needs none of them, such as
    the next product of a layer or the gather of its weights, stays in front of it. So runs follow from the mathematics
    alone, and not from where transfers lie: their bodies are the same at every stage.

    To a run belong elementwise operations, reductions, copies and lookups of the forward and the backward pass, and
    views of what they make. Products, convolutions, attention, what draws, what writes, what is sent and what may be
    computed in a bucket do not. Equal runs, as those of a model's layers, have one body.
    """
    complete_values(gm.graph)
    _split_batch_norms(gm.graph)
    made: dict[str, GraphModule] = {}
    for region in _runs(gm.graph):
        _outline(gm, region, made)
    clean(gm)


def _split_batch_norms(graph: Graph) -> None:
    """Let batch norms that write to running values return them instead. They are copied before they are next read."""
    for node in graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if argument(node, "train"):  # then it reads none
            set_argument(node, "running_mean", None)
            set_argument(node, "running_var", None)
    root = roots(graph)
    touched = touches(graph, root)
    for node in graph.find_nodes(op="call_function", target=aten.native_batch_norm.default):
        running = [argument(node, "running_mean"), argument(node, "running_var")]
        if not writes(node) or None in running:
            continue
        with graph.inserting_before(node):
            new = graph.call_function(aten._native_batch_norm_legit_functional.default, node.args)
        new.meta.update(node.meta, val=[*node.meta["val"], *(x.meta["val"] for x in running)])
        for k, x in enumerate(running, start=3):
            readers = touched[root[x]]
            output = next(iter(reversed(graph.nodes)))  # in a loop, the next round reads it
            with graph.inserting_before(next(iter(readers[readers.index(node) + 1 :]), output)):
                made = graph.call_function(operator.getitem, (new, k))
                made.meta.update(node.meta, val=x.meta["val"])
                graph.call_function(aten.copy_.default, (x, made)).meta.update(node.meta, val=x.meta["val"])
        node.replace_all_uses_with(new)
        graph.erase_node(node)


class _Run:
    """Operations for one body, in order. `inside`: they, and what follows from them. `at`: what ends the run."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.inside: set[Node] = set()
        self.at: Node | None = None

    def add(self, node: Node) -> None:
        """Take an operation in, with the parts of its result, wherever they are."""
        for x in [node, *(y for y in node.users if y.target is operator.getitem)]:
            if x not in self.inside:
                self.nodes.append(x)
                self.inside.add(x)

    def needs(self, node: Node) -> bool:
        return not self.inside.isdisjoint(node.all_input_nodes)


def _runs(graph: Graph) -> list[_Run]:
    found, run = [], _Run()
    for node in graph.nodes:
        if node in run.inside:
            continue
        if _is_fusible(node) or is_view(node) and run.needs(node):
            run.add(node)
        elif run.needs(node) or node.op == "output" or writes(node):
            run.at = node
            found.append(run)
            run = _Run()
    return list(filter(_is_worth_it, found))


def _is_worth_it(run: _Run) -> bool:
    """Return whether a run is more than one operation whose bits do not depend on the compiler. Another one alone is
    compiled, too, as it may be recomputed among others.
    """
    made = [x for x in run.nodes if x.target is not operator.getitem and not is_view(x)]
    return len(made) > 1 or any(x.target not in EXACT or "alpha" in x.kwargs for x in made)


def _is_fusible(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or phase_of(node) not in (FORWARD, BACKWARD):
        return False
    tags = target.tags
    if target not in FUSIBLE and torch.Tag.pointwise not in tags and torch.Tag.reduction not in tags:
        return False
    if torch.Tag.nondeterministic_seeded in tags or target._schema.is_mutable or is_view(node):
        return False
    around = (node, *node.all_input_nodes)
    values = [x for n in around for x in tensors_of(n.meta.get("val"))]
    return not any(BOUNDED in n.meta for n in around) and _all_known(values) and not _makes_gradient(node)


def _all_known(values: Sequence[Tensor]) -> bool:
    """Return whether values lie on one device, dense, with sizes that are numbers."""
    if len({x.device for x in values}) != 1:
        return False
    return all(
        x.layout == torch.strided and all(type(n) is int for n in x.shape) and not x.is_quantized for x in values
    )


def _makes_gradient(node: Node) -> bool:
    """Return whether an operation may compute a leaf's gradient in a bucket, see `gradients_as_bucket_views`."""
    if node.target not in OUT_GRADIENT or phase_of(node) != BACKWARD:
        return False
    while len(node.users) == 1 and is_view(user := next(iter(node.users))):
        node = user
    return bool(node.users) and all(not phase_of(x) or not _of_aten(x) for x in node.users)


def _of_aten(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten"


def _outline(gm: GraphModule, run: _Run, made: dict[str, GraphModule]) -> None:
    graph, inside = gm.graph, run.inside
    again = _views_outside(run)
    results = [x for x in run.nodes if _makes(x) and any(u not in inside or u in again for u in x.users)]
    if not results:
        return
    inputs = list(dict.fromkeys(y for x in run.nodes for y in x.all_input_nodes if y not in inside))
    body, text = _body(run.nodes, inputs, results)
    name = f"{REGION}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if name not in made:
        body.meta[REGION] = name
        made[name] = body
        setattr(gm, name, body)
    assert run.at is not None
    with graph.inserting_before(run.at):
        parts = insert_call(graph, name, inputs, results, run.nodes[0].meta)
        new: dict[Node, Node] = dict(zip(results, parts, strict=True))
        for x, part in new.items():
            part.meta.update(x.meta)
        for x in again:
            new[x] = graph.node_copy(x, lambda y: new.get(y, y))
    for old, value in new.items():
        for user in [u for u in old.users if u not in inside and u is not value]:
            user.replace_input_with(old, value)
    for x in reversed(run.nodes):
        if not x.users:
            graph.erase_node(x)


def _makes(node: Node) -> bool:
    """Return whether a node's value is a tensor in memory that the run makes."""
    if not isinstance(node.meta.get("val"), Tensor):
        return False
    return not is_view(node)


def _views_outside(run: _Run) -> dict[Node, None]:
    """Return, in order, the views of the run's memory that are read outside of it, and those between."""
    found: dict[Node, None] = {}
    for x in reversed(run.nodes):
        if is_view(x) and any(u not in run.inside or u in found for u in x.users):
            found[x] = None
    return dict.fromkeys(reversed(found))


def _body(nodes: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node]) -> tuple[GraphModule, str]:
    """Return a run as a graph, and a text that says all that its results depend on."""
    graph, new = Graph(), dict[Node, Node]()
    lines: list[str] = []
    for k, x in enumerate(inputs):
        new[x] = graph.placeholder(f"i{k}")
        new[x].meta["val"] = x.meta["val"]
        lines.append(f"i{k}: {_like(x)}")
    for k, x in enumerate(nodes):
        new[x] = graph.create_node("call_function", x.target, *_mapped(x, new), name=f"n{k}")
        new[x].meta.update(x.meta, **{OUTLINED: x.name})
        lines.append(f"{phase_of(x)} n{k} = {x.target}{new[x].args} {new[x].kwargs}")
    graph.output([new[x] for x in results])
    lines += [f"return {new[x].name}: {_like(x)}" for x in results]
    return LazyGraphModule({}, graph), "\n".join(lines)


def _mapped(node: Node, new: dict[Node, Node]) -> tuple[Any, Any]:
    return torch.fx.node.map_arg((node.args, node.kwargs), new.__getitem__)


def _like(node: Node) -> str:
    return ", ".join(f"{tuple(x.shape)} {x.stride()} {x.dtype} {x.device}" for x in tensors_of(node.meta["val"]))
