"""Whether two captures of one step are the same graph, and in words where they differ."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..ops.registry import traits_of


class Outline(NamedTuple):
    """A captured graph as text, a line for each operation, with the tensors that it closes over.

    `places`: the user's line of each operation, if lines were recorded.
    """

    lines: tuple[str, ...]
    places: tuple[str, ...]
    constants: tuple[Tensor, ...]


def outline(gm: GraphModule, numbers: Mapping[str, Any]) -> Outline:
    """Return the outline of a graph that no pass has changed yet. `numbers`: results that are not tensors, by name."""
    constants: list[Tensor] = []
    pairs = [*_described(gm, constants), *((f"returns {k} = {x!r}", "") for k, x in numbers.items())]
    lines, places = zip(*pairs, strict=True)
    return Outline(tuple(map(without_addresses, lines)), places, tuple(constants))


def difference(before: Outline, now: Outline) -> str:
    """Return how a graph differs from an earlier one: '' if it does not."""
    for k, (a, b) in enumerate(zip(before.lines, now.lines, strict=False)):
        if a != b:
            return f"{a} is now {b}{now.places[k]}"
    if len(before.lines) != len(now.lines):
        return f"{len(before.lines)} operations are now {len(now.lines)}"
    for a_, b_ in zip(before.constants, now.constants, strict=True):
        if not _same(a_, b_):
            return f"a constant of shape {list(b_.shape)} holds other values"
    return ""


def _described(gm: GraphModule, constants: list[Tensor]) -> Iterator[tuple[str, str]]:
    numbers: dict[Node, int] = {}
    regions: dict[int, int] = {}

    def name(x: Any) -> Any:
        return f"%{numbers[x]}" if isinstance(x, Node) else constant(x) if isinstance(x, Tensor) else x

    def constant(x: Tensor) -> str:
        constants.append(x)
        return f"a constant {list(x.shape)} {x.dtype}"

    for node in gm.graph.nodes:
        numbers[node], place = len(numbers), node.meta.get("line", "")
        value = node.meta.get("val")
        shape = (
            ""
            if not isinstance(value, Tensor) or value.layout is not torch.strided
            else f" {list(value.shape)} {value.stride()} {value.dtype} {value.device}"
        )
        if node.op == "get_attr":
            held: Any = operator.attrgetter(str(node.target))(gm)
            if isinstance(held, GraphModule):
                yield from _described(held, constants)
            else:
                yield name(held) if isinstance(held, Tensor) else repr(held), place
        elif node.op == "placeholder":
            yield f"input {len(numbers)}{shape}", place
        else:
            args = torch.fx.node.map_aggregate((_with_regions(node, regions), dict(node.kwargs)), name)
            yield f"{node.target if node.op == 'call_function' else node.op}{args}{shape}", place


def _with_regions(node: Node, regions: dict[int, int]) -> tuple[Any, ...]:
    """Return a node's arguments. Regions of plain Python have numbers of the process: here by first occurrence."""
    if not traits_of(node.target).opaque:
        return node.args
    return tuple(regions.setdefault(x, len(regions)) if type(x) is int else x for x in node.args)


def without_addresses(text: str) -> str:
    """Return a repr that is the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two constants are one tensor, or hold the same."""
    if a is b or a.layout is not torch.strided or b.layout is not torch.strided:
        return a is b or a.layout == b.layout
    if a.device.type == "meta" or a.shape != b.shape:
        return a.shape == b.shape
    return a.data_ptr() == b.data_ptr() or bool(((a == b) | ((a != a) & (b != b))).all())
