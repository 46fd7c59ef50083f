"""The cost of one node: arithmetic operations, bytes of memory, bytes over links and drives."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .._torch_compat import OpOverload, packet_of
from ..comm.mesh import Mesh
from ..comm.wire import row_bytes
from ..dry_run.fake_machine import is_host
from ..graph.alias import is_view, roots, written_memory
from ..graph.edit import frozen
from ..graph.liveness import AGAIN, complete_values, named_values, tensors_of, values_of
from ..graph.nested import call_of, foreign_graphs
from ..graph.node_kinds import argument, reduces, traits
from ..graph.phase import BACKWARD, phase_of
from ..graph.program import Program, tensor_of
from ..ops.registry import Lane, argument_places, base_name
from .links import SENT, axis_of

READ, WRITTEN, DOWN, UP = "read", "written", "to the host", "to the device"
_ATTENTION = frozenset(
    f"_scaled_dot_product_{kind}_attention{end}"
    for kind in ("flash", "efficient", "cudnn")
    for end in ("", "_for_cpu", "_backward", "_for_cpu_backward")
)
_GROUPED = (("self", "mat2"), ("input", "weight"))  # names of torch's grouped product, and of transformers'
_Number = TypeVar("_Number", int, float)
_HOW = {Lane.LINK: SENT, Lane.READ: READ, Lane.WRITE: WRITTEN}


class Traffic(NamedTuple):
    """Bytes that a node moves: `SENT` to other ranks (which send as many), `READ` from or `WRITTEN` to drives, `DOWN`
    to the host or `UP` to the device.

    `what`: the operation. `unit`: the unit of a gather or reduce-scatter. `axis`: of the mesh, that it is sent along,
    where `traffic` was asked for it; several are "replicate x data".
    """

    how: str
    what: str
    unit: str
    nbytes: int
    axis: str = ""


def flops(node: Node) -> int:
    """Return the operations of matrix products, convolutions, attention and what says its own; 0 for everything else.

    An operation of somebody's says so by `torch.utils.flop_counter.register_flop_formula`, one of ours by its traits.
    What runs graphs of its own, such as `torch.cond`, takes what they take.
    """
    if not isinstance(node.target, OpOverload):
        formula = flop_registry.get(node.target) if foreign_graphs(node) else None  # torch has one of flex_attention
        return of_graphs(node, flops) if formula is None else _by(formula, node)
    own = traits(node).flops
    if own is not None:
        return int(own(named_values(node), node.meta["val"]))
    if base_name(node.target) in _ATTENTION:
        return _of_attention(node)
    formula = flop_registry.get(packet_of(node.target))
    groups = groups_of(node)
    if groups is not None:
        return 2 * groups.rows * groups.products * len(tensors_of(node.meta["val"]))
    return 0 if formula is None else _by(formula, node)


class Flops(NamedTuple):
    """Operations of matrix products. `model`: what the model needs; `again`: what is computed once more, to save
    memory. Attention's backward pass computes the scores again by itself, a fifth of its operations.
    """

    model: int
    again: int


def flops_of(gm: GraphModule) -> Flops:
    """Return the operations of a graph and of its bodies, as often as they run."""
    complete_values(gm.graph)
    repeated, model, again = _repeated(gm.graph), 0, 0
    for node in gm.graph.nodes:
        if call := call_of(node):
            inside = flops_of(call.body)
            model, again = model + call.rounds * inside.model, again + call.rounds * inside.again
        elif node.op == "call_function":
            all_ = flops(node)
            twice = all_ if node.meta.get(AGAIN) or node in repeated else _computed_again(node, all_)
            model, again = model + all_ - twice, again + twice
    return Flops(model, again)


def _repeated(graph: Graph) -> set[Node]:
    """Return the operations of the backward pass that compute what was computed before, as in a step's own
    checkpointing: the same operation on the same values. Memory that is written to has other values each time.
    """
    root = roots(graph)
    written = written_memory(root)
    first: dict[Node, Node] = {}  # node -> the first one with its value
    seen: dict[Any, Node] = {}
    for node in graph.nodes:
        first[node] = node
        known = isinstance(node.target, OpOverload) or node.target is operator.getitem
        if known and root[node] not in written:
            args = map_arg((node.args, node.kwargs), first.__getitem__)
            first[node] = seen.setdefault((node.target, frozen(args)), node)
    return {node for node, one in first.items() if one is not node and phase_of(node) == BACKWARD}


def flops_of_step(program: Program) -> Flops:
    """Return the operations of a step on one rank; they are counted once."""
    if program.flops is None:
        program.flops = flops_of(program.gm)
    return program.flops


def _computed_again(node: Node, all_: int) -> int:
    """Return how many of its operations a node repeats by itself."""
    return all_ // 5 if _is_backward(node) else int(all_ * traits(node).again)


def _is_backward(node: Node) -> bool:
    """Return whether a node is the backward pass of attention."""
    name = base_name(node.target) if isinstance(node.target, OpOverload) else ""
    return "attention" in name and "backward" in name


def _of_attention(node: Node) -> int:
    """By torch's formulas, which say nothing of the host's kernel, of one that draws from a key, of grouped heads."""
    tensors = [x for x in map(tensor_of, [a for a in node.args if isinstance(a, Node)]) if x is not None and x.dim()]
    backward = _is_backward(node)
    shapes = [x.shape for x in tensors[: 4 if backward else 3]]
    heads = shapes[-3][1]
    shapes = [torch.Size((x[0], heads, *x[2:])) for x in shapes]
    return int(sdpa_backward_flop_count(*shapes) if backward else sdpa_flop_count(*shapes))


def _by(formula: Callable[..., Any], node: Node) -> int:
    args, kwargs = values_of(node)
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def of_graphs(node: Node, cost: Callable[[Node], _Number]) -> _Number:
    """Return the costs of all nodes in the graphs that an operation of torch's or of another library runs; 0 for other
    operations. Of `torch.cond` the dearest branch counts; `scan` runs as often as it has rows, and all else once.
    """
    graphs = foreign_graphs(node)
    for gm in graphs:
        complete_values(gm.graph)
    costs: list[Any] = [sum(cost(x) for x in gm.graph.nodes if x.op == "call_function") for gm in graphs]
    kind = node.target.name() if costs else ""  # type: ignore[union-attr]
    if kind == "cond":
        return max(costs)
    rows = tensors_of([x.meta["val"] for x in node.args[2]]) if kind == "scan" else []  # type: ignore[union-attr]
    return sum(costs) * (len(rows[0]) if rows else 1)


class GroupedProduct(NamedTuple):
    """The inputs of a grouped product (mixture of experts), in which each group of rows meets its own matrix: number
    of groups, rows, products for each row, and the argument that says where groups end.
    """

    number: int
    rows: int
    products: int
    at: int


def groups_of(node: Node) -> GroupedProduct | None:
    """Return the groups of a grouped matrix product, forward or backward; None for other nodes."""
    if not isinstance(node.target, OpOverload):
        return None
    names = argument_places(node.target)
    inputs = next((x for x in _GROUPED if {*x, "offs"} <= names.keys()), None)
    if inputs is None:
        return None
    a, b, ends = (tensor_of(argument(node, x)) for x in (*inputs, "offs"))
    if a is None or b is None or ends is None:
        return None
    if b.dim() == 3:  # rows of `a`, each group by its matrix
        rows, products = a.shape[0], b[0].numel()
    elif a.dim() == 3:  # the same for columns of `b`
        rows, products = b.shape[1], a[0].numel()
    else:  # gradients of the matrices: groups are cut out of the dim that is summed over
        rows, products = a.shape[1], a.shape[0] * b.shape[1]
    return GroupedProduct(ends.shape[0], rows, products, names["offs"][0])


def touched_bytes(node: Node) -> int:
    """Return the bytes of memory that a node reads and writes: what its traits say, or each element of its tensors
    once.
    """
    if node.op != "call_function" or is_view(node):
        return 0
    own = traits(node).touches
    if own is not None:
        return own(named_values(node), node.meta["val"])
    return sum(map(_dense, [x for n in (*node.all_input_nodes, node) for x in tensors_of(n.meta.get("val"))]))


def _dense(x: Tensor) -> int:
    """Return the bytes of a tensor, repeated elements (stride 0) once."""
    numel = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        numel *= size if stride else 1
    return numel * x.element_size()


def moved(node: Node) -> Traffic | None:
    """Return what a node sends to other ranks, reads from or writes to drives, or copies between host and device."""
    moves = traits(node).moves
    if moves is None:
        return None
    given = named_values(node)
    how = _HOW.get(moves.lane) if moves.to is None else DOWN if is_host(moves.to(given)) else UP
    assert how is not None and isinstance(node.target, OpOverload)
    nbytes = moves.nbytes(given, node.meta.get("val"))
    return Traffic(how, base_name(node.target).rstrip("_"), given.get("unit", ""), nbytes)


def coded_bytes(start: Node) -> tuple[int, int]:
    """Return the bytes of memory that a transfer with a wire codec reads and writes at its start, which encodes, and at
    its wait, which decodes; none for other nodes.
    """
    if not isinstance(start.target, OpOverload) or "codec" not in argument_places(start.target):
        return 0, 0
    codec, size, x = argument(start, "codec"), argument(start, "size"), tensor_of(start.all_input_nodes[0])
    if not codec or x is None:
        return 0, 0
    shard = x.numel() if traits(start).collective == "gather" else x.numel() // size
    sent = row_bytes(shard, x.itemsize, codec, size, argument(start, "start"))
    one = shard * x.itemsize + sent
    if reduces(start):  # the wait adds a rank's row of every rank: on the host in one pass, else one by one
        passes = 1 if is_host(x.device) else 2 * size - 1
        return size * one, size * sent + passes * shard * x.itemsize
    return one, size * one


def traffic(gm: GraphModule, mesh: Mesh | None = None) -> Counter[Traffic]:
    """Return what a scheduled graph and its bodies move -> how often, in order of first use. `mesh`: whose axes are
    named.
    """
    complete_values(gm.graph)
    found: Counter[Traffic] = Counter()
    for node in gm.graph.nodes:
        if call := call_of(node):
            for x, times in traffic(call.body, mesh).items():
                found[x] += times * call.rounds
        elif (moves := moved(node)) is not None:
            found[moves._replace(axis=axis_of(node, mesh))] += 1
    return found
