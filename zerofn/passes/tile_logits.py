"""Let a head and its cross entropy have a tile of logits at a time."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from ..graph.alias import roots, written_memory
from ..graph.edit import clean
from ..graph.liveness import complete_values
from ..graph.node_kinds import casts
from ..graph.program import tensor_of
from ..ops.head_loss import Sizes, sizes_of
from ..ops.registry import VIEWS
from ._context import Context

aten, ops = torch.ops.aten, torch.ops.zerofn
DTYPES = torch.float32, torch.bfloat16, torch.float16  # of log-probabilities
_IGNORED = -100  # of the labels that stand for places in log-probabilities [T, 1]: 0, or this


class Head(NamedTuple):
    """A head whose logits are read by a cross entropy alone, and their gradient by products alone.

    `x` [T, H] and `weight` [V, H] make the logits, with `bias` [V] or None; `logs` are their logarithms, `loss` the
    `nll_loss_forward` of them and of `labels` [T]. `given` and `back`: the gradients of `logs` and of the logits, which
    `of_x`, `of_weight` and `of_bias` read; None where nothing is learned.
    """

    x: Node
    weight: Node
    bias: Node | None
    labels: Node
    logs: Node
    loss: Node
    given: Node
    back: Node
    of_x: Node | None
    of_weight: Node | None
    of_bias: Node | None
    sizes: Sizes


def tile_logits(gm: GraphModule, context: Context) -> None:
    """Replace the heads that a decision about memory names by operations that have a tile of logits at a time.

    The bits are those of whole logits: no sum is cut. The operations compute logits three times: for the loss, for the
    gradient of the head's input, and for that of its weight. The memory search makes the choice.
    """
    if context.choice.tiled:
        for name, head in heads_of(gm.graph).items():
            if name in context.choice.tiled:
                _tile(gm.graph, head)
        complete_values(clean(gm).graph)


def heads_of(graph: Graph) -> dict[str, Head]:
    """Return the heads of a graph whose logits may come in tiles, by the name of their log_softmax."""
    logs = [node for node in graph.nodes if node.target is aten._log_softmax.default]
    written = written_memory(root := roots(graph)) if logs else set()
    found = ((node.name, _head_of(node)) for node in logs)
    return {
        name: head
        for name, head in found
        if head is not None and not any(root[x] in written for x in (head.x, head.weight, head.labels, head.logs))
    }


def _head_of(logs: Node) -> Head | None:
    value = tensor_of(logs)
    dim, half_to_float = logs.args[1:3]
    if value is None or value.dtype not in DTYPES or value.dim() != 2 or dim not in (1, -1) or half_to_float:
        return None
    sizes = sizes_of(*value.shape) if all(type(n) is int for n in value.shape) else None
    loss = _user(logs, aten.nll_loss_forward.default)
    given = _user(logs, aten.nll_loss_backward.default)
    back = _user(logs, aten._log_softmax_backward_data.default)
    if sizes is None or loss is None or given is None or back is None or len(logs.users) > 3:
        return None
    made, gradient = _made_by(logs), _gradient(back)
    if made is None or not _belong_together(logs, loss, given, back):
        return None
    x, weight, bias = made
    of = _readers(gradient, x, weight)
    if torch.promote_types(tensor_of(x).dtype, value.dtype) != value.dtype:  # type: ignore[union-attr]
        return None  # a product takes more than tiles of log-probabilities are counted to take
    values = [tensor_of(y) for y in (gradient, x, weight)]
    if of is None or values[0].shape != value.shape or len({y.dtype for y in values}) > 1:  # type: ignore[union-attr]
        return None
    learned = of.get("x"), of.get("weight"), of.get("bias")
    return Head(x, weight, bias, loss.args[1], logs, loss, given, back, *learned, sizes)  # type: ignore[arg-type]


def _user(node: Node, target: object) -> Node | None:
    """Return the first user of a node that is this operation."""
    return next((user for user in node.users if user.target is target), None)


def _belong_together(logs: Node, loss: Node, given: Node, back: Node) -> bool:
    """Return whether a loss without weights of classes is followed by its own backward pass."""
    labels, weight, reduction, ignored = loss.args[1:]
    total = given.args[6]
    own_total = isinstance(total, Node) and total.target is operator.getitem and total.args == (loss, 1)
    same = given.args[1:6] == (logs, labels, None, reduction, ignored)
    only = list(given.users) == [back] and back.args[:2] == (given, logs)
    return weight is None and isinstance(labels, Node) and own_total and same and only


def _made_by(logs: Node) -> tuple[Node, Node, Node | None] | None:
    """Return the tokens, weight and bias of the product that nothing but `logs` reads, through casts and views."""
    node, num_casts = logs.args[0], 0
    while isinstance(node, Node) and len(node.users) == 1 and _is_alike(node, num_casts):
        node, num_casts = node.all_input_nodes[0], num_casts + casts(node)
    if not isinstance(node, Node) or len(node.users) != 1 or node.kwargs:
        return None
    if node.target is aten.mm.default:
        bias, (x, turned) = None, node.args
    elif node.target is aten.addmm.default:
        bias, x, turned = node.args
    else:
        return None
    weight: Any = turned.args[0] if isinstance(turned, Node) and turned.target is aten.t.default else None
    shapes = [tuple(tensor_of(y).shape) for y in (x, weight) if isinstance(y, Node)]  # type: ignore[union-attr]
    num_rows, num_columns = tensor_of(logs).shape  # type: ignore[union-attr]
    if not isinstance(x, Node) or not isinstance(weight, Node) or shapes[0][0] != num_rows:
        return None
    dense = all(tensor_of(y).is_contiguous() for y in (x, weight))  # type: ignore[union-attr]
    whole = not isinstance(bias, Node) or tuple(tensor_of(bias).shape) == (num_columns,)  # type: ignore[union-attr]
    return (x, weight, bias) if dense and whole and shapes[1][0] == num_columns else None  # type: ignore[return-value]


def _is_alike(node: Node, num_casts: int) -> bool:
    """Return whether a node's value is that of its input, in another shape or dtype. Tiles are cast once: a second cast
    would be to another dtype, as in `logits.bfloat16().float()`.
    """
    return node.target in VIEWS or casts(node) and not num_casts


def _gradient(back: Node) -> Node:
    """Return the gradient of logits in the shape and dtype in which products read it."""
    num_casts = 0
    while len(back.users) == 1 and _is_alike(user := next(iter(back.users)), num_casts):
        back, num_casts = user, num_casts + casts(user)
    return back


def _readers(node: Node, x: Node, weight: Node) -> dict[str, Node] | None:
    """Return what reads the gradient of logits: "x", "weight" and "bias" are computed of it; None if more is."""
    found: dict[str, Node] = {}
    for user in node.users:
        kind, made = _kind_of(node, user, x, weight)
        if kind in found or made is None:
            return None
        found[kind] = made
    learned = "weight" if "bias" in found else "x"  # the gradient of a bias comes with that of the weight
    return found if found.keys() & {learned, "weight"} else None


def _kind_of(node: Node, user: Node, x: Node, weight: Node) -> tuple[str, Node | None]:
    """Return what a reader of the gradient of logits computes, "x", "weight" or "bias", and the node that does."""
    if user.target is aten.mm.default and user.args == (node, weight):
        return "x", user
    if user.target is aten.sum.dim_IntList and user.args == (node, [0], True) and not user.kwargs:
        return "bias", user
    readers = list(user.users)
    if user.target is aten.t.default and len(readers) == 1 and readers[0].target is aten.mm.default:
        return "weight", readers[0] if readers[0].args == (user, x) else None
    return "", None


def _tile(graph: Graph, head: Head) -> None:
    dtype, (labels, _, reduction, ignored) = tensor_of(head.logs).dtype, head.loss.args[1:]  # type: ignore[union-attr]
    of, rows = (head.x, head.weight, head.bias, labels), head.sizes.rows
    logs = _before(head.logs, ops.head_loss.default, *of, ignored, dtype, rows)
    places = _before(head.loss, aten.mul.Scalar, _before(head.loss, aten.eq.Scalar, labels, ignored), _IGNORED)
    loss = _before(head.loss, aten.nll_loss_forward.default, logs, places, None, reduction, _IGNORED)
    grad, total = head.given.args[0], head.given.args[6]
    head.loss.replace_all_uses_with(loss)
    both = _before(head.back, ops.head_loss_backward.default, grad, *of, total, reduction, ignored, dtype, rows)
    of_x, numbers = (_before(head.back, operator.getitem, both, k) for k in range(2))
    if head.of_x is not None:
        _replace(head.of_x, of_x)
    given = (numbers, *of, ignored, dtype, head.sizes.columns)
    if head.of_bias is not None and head.of_weight is not None:
        first = min(head.of_bias, head.of_weight, key=list(graph.nodes).index)
        several = _before(first, ops.head_gradients.default, *given)
        for k, old in enumerate((head.of_weight, head.of_bias)):
            _replace(old, _before(first, operator.getitem, several, k))
    elif head.of_weight is not None:
        _replace(head.of_weight, _before(head.of_weight, ops.head_gradient.default, *given))


def _before(node: Node, target: Any, *args: Any) -> Node:
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args)
    made.meta.update({k: x for k, x in node.meta.items() if k != "val"})
    return made


def _replace(old: Node, new: Node) -> None:
    old.replace_all_uses_with(new)
    new.meta["val"] = old.meta["val"]
