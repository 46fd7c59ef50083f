"""Sizes that depend on data, such as the rows that a mask chooses: passes and plans take their upper bounds.

The graph itself computes with the sizes of the moment. Only what is known of its values beforehand (`node.meta["val"]`)
is replaced, so a plan with such sizes is an upper bound, and nothing that ranks exchange may have one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .._torch_compat import bound_of, expression_of, tensor_in_mode
from ..graph.nested import graphs_of
from ..graph.node_kinds import BOUNDED, argument, traits
from ..graph.program import Program
from ..graph.source_lines import line_behind
from ..util.nested_arguments import with_tensors
from .capture import CaptureError


def bound_sizes(program: Program) -> None:
    """Replace sizes that depend on data by their upper bounds, in what is known of each node's value.

    Raises `CaptureError` if a transfer or an output of the step has such a size.
    """
    bounds: dict[Any, int] = {}
    for gm in graphs_of(program.gm):
        for node in gm.graph.nodes:
            value = node.meta.get("val")
            if value is None or node.op == "output":
                continue
            symbols = dict(_symbols(value))
            if not symbols:
                continue
            _check(node)
            bounds |= {x: _most(node, x, size) for x, size in symbols.items() if x not in bounds}
            node.meta.update({"val": _with_bounds(value, bounds), BOUNDED: True})


def _check(node: Node) -> None:
    collective = traits(node).collective
    if collective or any(user.op == "output" for user in node.users) and isinstance(node.meta["val"], Tensor):
        what = f"a transfer between ranks ({collective})" if collective else "a result of the step"
        raise CaptureError(
            f"{what} has a size that depends on data{line_behind(node)}. Pad it to a constant size, or put the part "
            "that depends on data inside zerofn.eager_region."
        )


def _most(node: Node, symbol: Any, size: torch.SymInt) -> int:
    """Return the most that a symbol in a size may be, which `node` has made.

    It is what torch knows: the elements of a mask for the rows that it chooses, the rows of which `unique(dim=0)`
    chooses, or what the step says by `torch._check`. Where torch knows nothing (the sum of what `repeat_interleave`
    is given, a number taken from a tensor), it is the number of elements of the largest input.
    """
    if node.target is torch.ops.aten.masked_select.default:  # torch takes the elements of `x`, and a mask may be larger
        x, mask = (argument(node, name).meta["val"] for name in ("self", "mask"))
        return math.prod(torch.broadcast_shapes(x.shape, mask.shape))
    known = bound_of(size, symbol)
    return max((_numel(x.meta.get("val")) for x in node.all_input_nodes), default=0) if known is None else known


def _symbols(value: Any) -> Any:
    """Yield (symbol, the size that it stands in) of the unknown sizes in a value."""
    for x in value if isinstance(value, list | tuple) else [value]:
        sizes = [*x.shape, *x.stride()] if isinstance(x, Tensor) and x.layout is torch.strided else [x]
        for size in sizes:
            if isinstance(size, torch.SymInt):
                yield from ((symbol, size) for symbol in expression_of(size).free_symbols)


def _numel(value: Any) -> int:
    tensors = [x for x in (value if isinstance(value, list | tuple) else [value]) if isinstance(x, Tensor)]
    return max((math.prod(x.shape) for x in tensors), default=0)


def _with_bounds(value: Any, bounds: dict[Any, int]) -> Any:
    def number(x: Any) -> Any:
        return int(expression_of(x).subs(bounds)) if isinstance(x, torch.SymInt) else x

    def tensor(x: Tensor) -> Tensor:
        return tensor_in_mode(x, list(map(number, x.shape)), list(map(number, x.stride())))

    return number(value) if isinstance(value, torch.SymInt) else with_tensors(value, tensor)
