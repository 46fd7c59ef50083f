"""The memory that is alive while each node of a scheduled graph runs, in bytes, by kind."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import FakeTensorMode, dense_parts, tree_leaves
from ..comm.wire import codec_named, row_bytes
from ..dry_run.fake_machine import is_host
from ..ops.ravel import ops
from .alias import is_given, is_lent, positions, roots, touches
from .nested import Call, call_of, is_nested, is_region, is_result, runs_once
from .node_kinds import (
    argument,
    arguments,
    casts,
    decodes,
    gathers_parameters,
    is_fetch,
    is_gather,
    makes_bucket,
    reduces,
    traits,
    wait_of,
)
from .phase import BACKWARD, FORWARD, phase_of

# "gathered": units. "staging": what drives and the host transfer through. "reserved": free bytes of static buffers.
KINDS = ("state", "gathered", "gradients", "activations", "staging", "other", "reserved")
AGAIN = "again"  # a meta key of nodes that are recomputed, or copied back, for the backward pass
Live = dict[str, int]  # kind -> bytes
_NO_BLOCKS: Sequence[Any] = ()


class Allocation(NamedTuple):
    """Memory that an operation makes. It is alive from when node `born` starts until node `dies` has run.

    `placed`: it has a place in a static buffer.
    """

    node: Node
    nbytes: int
    kind: str
    born: int
    dies: int
    placed: bool = False


Handed = Mapping[Allocation, list[Node]]  # memory that a caller gives up -> the inputs of the body that lie in it


class Moment(NamedTuple):
    """The bytes alive by kind while one node runs, its result included."""

    node: Node
    live: Live

    @property
    def nbytes(self) -> int:
        """The bytes of all kinds together."""
        return sum(self.live.values())


def moments(
    gm: GraphModule, base: Live, handed: Handed | None = None, known: dict[Graph, _Made] | None = None
) -> Iterator[Moment]:
    """Yield what is alive while each node runs, in the order of execution. `base`: bytes that are alive before; all but
    `handed` stay. `known`: of bodies that have run, since they run again.

    A node that runs a body yields the body's moments once, in a round after the first.
    """
    known = {} if known is None else known
    made = known.get(gm.graph)
    if made is None:
        made = known[gm.graph] = _made(gm.graph)
    ends: dict[int, list[Allocation]] = defaultdict(list)
    for block in _received(made, handed):
        ends[block.dies].append(block)
    live = {kind: base.get(kind, 0) for kind in KINDS}
    now: Live | None = None  # `live` as it is: most operations change nothing
    for k, node in enumerate(gm.graph.nodes):
        call, born, dying = made.calls.get(k), made.born.get(k), made.dying.get(k, _NO_BLOCKS)
        if k in ends:
            dying = [*dying, *ends[k]]
        if call and runs_once(node):  # it makes its results inside, and frees there what ends with it
            yield from moments(call.body, live, _handed(call, dying, made.root), known)
            if not is_region(call.body):  # compiled, it reads all inputs and writes all results at once
                _count(live, dying, -1)
                dying = _NO_BLOCKS
            _count(live, born or _NO_BLOCKS)
            now = None
        elif born or call:
            before = dict(live) if call else live
            _count(live, born or _NO_BLOCKS)
            if call:
                yield from _moments_inside(node, call, before, live, known)
            now = None
        if now is None:
            now = dict(live)
        yield Moment(node, now)
        if dying:
            _count(live, dying, -1)
            now = None


def _count(live: Live, alive: Sequence[Allocation], times: int = 1) -> None:
    for block in alive:
        live[block.kind] += block.nbytes * times
        live["reserved"] -= block.nbytes * block.placed * times


def _handed(call: Call, dying: Sequence[Allocation], root: dict[Node, Node]) -> Handed:
    """Return the memory that nobody but a body needs any more, and the body's inputs that lie in it."""
    found: dict[Allocation, list[Node]] = {}
    for inside, outer in call.given.items():
        for block in dying:
            if block.node is root[outer]:
                found.setdefault(block, []).append(inside)
    return found


def _moments_inside(node: Node, call: Call, before: Live, after: Live, known: dict[Graph, _Made]) -> Iterator[Moment]:
    """Yield the moments of a body's round: beside the sums and stacks of earlier rounds, then the addition.

    The largest addition is in the second round, which makes new memory for each sum, one after the other.
    """
    yield from moments(call.body, after if call.rounds > 1 else before, None, known)
    sums = [x.nbytes for x in tensors_of(node.meta["val"])[: call.num_sums + call.parts.number]]
    if sums:
        terms = sum(sums) + max(sums) if call.rounds > 1 else max(sums)
        yield Moment(node, {**after, "gradients": after["gradients"] + terms})


class _Made(NamedTuple):
    """The memory that a graph makes; positions of its nodes, the memory of each, and the nodes that touch memory. By
    position: what is born and what dies there, and the body that runs there.
    """

    blocks: list[Allocation]
    where: dict[Node, int]
    root: dict[Node, Node]
    touched: dict[Node, list[Node]]
    born: dict[int, list[Allocation]]
    dying: dict[int, list[Allocation]]
    calls: dict[int, Call]


def blocks(graph: Graph, handed: Handed | None = None) -> list[Allocation]:
    """Return the memory that the operations of a graph make on the device where models compute, in order, with what
    they say that they have beside their results, and behind it what is `handed` to the graph.
    """
    made = _made(graph)
    return [*made.blocks, *_received(made, handed)]


def _received(made: _Made, handed: Handed | None) -> Iterator[Allocation]:
    for block, inputs in (handed or {}).items():
        if block.nbytes:
            dies = max(made.where[made.touched[x][-1]] for x in inputs)
            yield block._replace(node=inputs[0], born=-1, dies=dies)


def _made(graph: Graph) -> _Made:
    complete_values(graph)
    where, root = positions(graph), roots(graph)
    touched = touches(graph, root)
    out: list[Allocation] = []
    accelerated = not all(map(_on_host, where))
    for node, at in where.items():
        beside = traits(node).workspace
        if beside is not None:
            out.append(Allocation(node, beside(named_values(node), node.meta["val"]), "other", at, at))
        if node.op != "call_function" or root[node] is not node or is_lent(node) or accelerated and _on_host(node):
            continue
        born = where[node.args[0]] if node.target is operator.getitem else at  # type: ignore[index]
        dies, placed = where[touched[node][-1]], node.target is ops.bucket.default or bool(node.kwargs.get("place"))
        out.append(Allocation(node, _nbytes(node), _kind(node, touched[node], root), born, dies, placed))
        received = _transfer_buffers(node)
        if received and traits(node).collective == "gather in place":  # which the next step waits for
            waits = [where[x] for x in touched[root[node.all_input_nodes[0]]] if x.target is ops.wait.default]
            out.append(Allocation(node, received, "gathered", at, len(where) - 1))
            out += [Allocation(node, received, "gathered", -1, until) for until in waits[:1] if until < at]
        elif received:
            kind = "gradients" if reduces(node) else "gathered"
            out.append(Allocation(node, received, kind, at, where[wait_of(node)]))
    out = [block for block in out if block.nbytes]
    births: dict[int, list[Allocation]] = defaultdict(list)
    deaths: dict[int, list[Allocation]] = defaultdict(list)
    for block in out:
        births[block.born].append(block)
        deaths[block.dies].append(block)
    bodies = {at: body for node, at in where.items() if (body := call_of(node))}
    return _Made(out, where, root, touched, dict(births), dict(deaths), bodies)


def _kind(node: Node, touched: list[Node], root: dict[Node, Node]) -> str:
    """Return the kind of the memory that `node` makes. `touched`: the nodes that touch it."""
    sources = [root[x] for x in node.all_input_nodes]
    if is_gather(node):
        return "gathered" if gathers_parameters(node, root) else "gradients"
    if (casts(node) or decodes(node)) and not phase_of(node) and all(is_given(x) or is_fetch(x) for x in sources):
        return "gathered"
    if _makes_gradient(node) or is_result(node) and not runs_once(node.args[0]):  # type: ignore[arg-type]
        return "gradients"
    if is_fetch(node) or node.target is ops.bring.default and not node.meta.get(AGAIN):
        return "staging"
    if node.meta.get(AGAIN) or phase_of(node) == FORWARD and any(phase_of(x) == BACKWARD for x in touched):
        return "activations"
    if phase_of(node) == BACKWARD and _takes_gradients(touched[-1]):
        return "gradients"
    return "other"


def _makes_gradient(node: Node) -> bool:
    """Return whether a node makes a unit's gradient: its bucket, or this rank's shard of the reduced gradient."""
    return makes_bucket(node) or reduces(node)


def _takes_gradients(node: Node) -> bool:
    return _makes_gradient(node) or traits(node).fills_bucket or is_nested(node)


def _on_host(node: Node) -> bool:
    """Return whether all tensors of a node's value are in host memory, except scalars, which may be anywhere."""
    return all(is_host(x.device) or not x.dim() for x in tensors_of(node.meta.get("val")))


def _nbytes(node: Node) -> int:
    """Return the bytes that a node makes. Of several results, those with a `getitem` count at that node instead."""
    value = node.meta["val"]
    if isinstance(value, list | tuple):
        taken = {user.args[1] for user in node.users if user.target is operator.getitem}
        value = [x for k, x in enumerate(value) if k not in taken]
    return memory_bytes(value)


def _transfer_buffers(node: Node) -> int:
    """Return the bytes that a transfer among N ranks holds beside its result until its wait. A reduce-scatter: with a
    codec all encoded shards, and those that it receives; otherwise gloo's receive buffers, N - 2 shards. A gather: all
    encoded shards, if they do not lie in its result.
    """
    collective = traits(node).collective
    if collective not in ("gather", "gather in place", "scatter"):
        return 0
    codec, size = argument(node, "codec"), argument(node, "size")
    whole = node.meta["val"] if collective == "gather" else node.all_input_nodes[0].meta["val"]
    row = row_bytes(whole.numel() // size, whole.itemsize, codec, size, argument(node, "start"))
    if collective != "scatter":
        return size * row if codec and codec_named(codec).beside else 0
    on_host = is_host(whole.device)
    return (size + size - on_host) * row if codec else max(0, size - 2) * row * on_host


def complete_values(graph: Graph) -> None:
    """Give a fake value to each node without one: constants, and nodes that passes added."""
    known = [x for node in graph.nodes for x in tensors_of(node.meta.get("val"))]
    mode = next((x.fake_mode for x in known if hasattr(x, "fake_mode")), None) or FakeTensorMode()
    with mode:
        for node in graph.nodes:
            if "val" in node.meta:
                continue
            if node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(graph.owning_module)
                node.meta["val"] = mode.from_tensor(value) if isinstance(value, Tensor) else None
            elif (call := call_of(node)) and runs_once(node):
                complete_values(call.body.graph)
                node.meta["val"] = [x.meta["val"] if isinstance(x, Node) else x for x in call.results]
            elif node.op == "call_function":
                args, kwargs = values_of(node)
                node.meta["val"] = node.target(*args, **kwargs)


def values_of(node: Node) -> tuple[Any, Any]:
    """Return a node's arguments with fake values in place of nodes."""
    args: Any = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    return args


def named_values(node: Node) -> dict[str, Any]:
    """Return the values of a node's arguments, by name."""
    return {name: x.meta["val"] if isinstance(x, Node) else x for name, x in arguments(node).items()}


def memory_bytes(value: Any) -> int:
    """Return the bytes of the storages of all tensors in a node's value."""
    return sum(part.untyped_storage().nbytes() for x in tensors_of(value) for part in dense_parts(x))


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a node's value."""
    if isinstance(value, Tensor):
        return [value]
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]
