"""The forward pass of a graph in segments, what each keeps for the backward pass, and what it takes to make that again.

A segment begins where a unit's parameters are used for the first time, and little crosses: for most models it is a
layer, also where a layer has several units. What crosses from one segment to the next is kept; so what is made again is
made from its own segment's inputs, whatever else is not kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable
from typing import NamedTuple

import numpy as np
from torch.fx import Graph, Node

from .alias import is_given, roots, touches, writes
from .liveness import memory_bytes
from .node_kinds import is_start
from .phase import BACKWARD, FORWARD, phase_of
from .program import tensor_of


class Segments:
    """`activations`: memory that the forward pass makes and the backward pass reads, in order of making, but for what
    crosses segments, what leaves the step, and what cannot be made again. `crossing`: the former of these.
    """

    def __init__(self, graph: Graph) -> None:
        self._root = roots(graph)
        self.touched = touches(graph, self._root)
        self._segment = self._joined(self._segments(graph))
        self._last = max(self._segment.values(), default=0)
        self._written = {self._root[x] for n in graph.nodes if phase_of(n) for x in writes(n)}
        made = [n for n in graph.nodes if self._root[n] is n and phase_of(n) == FORWARD and n.op == "call_function"]
        self.crossing = {n for n in made if self._crosses(n)}
        self._fixed = self.crossing | {n for n in made if is_start(n)}
        self.activations = [n for n in made if n not in self._fixed and self._is_kept(n) and self._can_be_made(n)]

    def memory(self, node: Node) -> Node:
        """Whose memory a node's value is in."""
        return self._root[node]

    def gap(self, activation: Node) -> tuple[Node, Node]:
        """(its last use in the forward pass, its first one in the backward pass)."""
        touched = self.touched[activation]
        first = next(k for k, n in enumerate(touched) if phase_of(n) == BACKWARD)
        return touched[first - 1], touched[first]

    def is_last(self, activation: Node) -> bool:
        """Whether it is of the last segment, whose backward pass comes right after its forward pass."""
        return self._segment[activation] == self._last

    def missing(self, value: Node, dropped: Container[Node], there: Container[Node] = ()) -> list[Node]:
        """The forward operations that make `value` again, from what is kept and what is already `there`."""
        found: dict[Node, None] = {}
        todo = [value]
        while todo:
            node = todo.pop()
            if node in found or node in there or not self._is_made(node, dropped):
                continue
            found[node] = None
            todo += node.all_input_nodes
        return list(found)

    def _is_made(self, node: Node, dropped: Container[Node]) -> bool:
        """Whether a node has to run again for its value to be there in the backward pass."""
        memory = self._root[node]
        if phase_of(node) != FORWARD or is_given(memory) or memory in self._fixed:
            return False
        return memory in dropped or not self._is_kept(memory)

    def _is_kept(self, memory: Node) -> bool:
        return any(phase_of(n) == BACKWARD for n in self.touched.get(memory, ()))

    def _can_be_made(self, memory: Node) -> bool:
        """Whether nobody but forward and backward passes reads it, and none of what makes it writes to anything."""
        if any(phase_of(n) not in (FORWARD, BACKWARD) for n in self.touched[memory]):
            return False
        again = self.missing(memory, {memory})
        return not any(self._root[x] in self._written for n in again for x in (n, *n.all_input_nodes))

    def _is_parameter(self, memory: Node) -> bool:
        """Whether memory is there for the forward pass: a shard, or what is gathered."""
        value = tensor_of(memory)
        return not phase_of(memory) and memory.op != "get_attr" and value is not None and value.is_floating_point()

    def _crosses(self, memory: Node) -> bool:
        own = self._segment[memory]
        return any(self._segment.get(n, own) > own for n in self.touched[memory])

    def _joined(self, segment: dict[Node, int]) -> dict[Node, int]:
        """Fewer segments: those that end where much crosses go on."""
        made = {x: own for x, own in segment.items() if self._root[x] is x}
        spans = [
            Span(own, max(segment.get(n, own) for n in self.touched[x]), memory_bytes(x.meta["val"]), self._is_kept(x))
            for x, own in made.items()
        ]
        numbers = joined(spans, max(segment.values(), default=0) + 1)
        return {node: numbers[own] for node, own in segment.items()}

    def _segments(self, graph: Graph) -> dict[Node, int]:
        """Forward node -> its segment."""
        seen: set[Node] = set()
        out: dict[Node, int] = {}
        number = 0
        for node in graph.nodes:
            if phase_of(node) != FORWARD or node.op != "call_function":
                continue
            new = {m for m in map(self._root.__getitem__, node.all_input_nodes) if self._is_parameter(m)} - seen
            if new:
                number += 1
                seen |= new
            out[node] = number
        return out


WIDE = 32  # segments that are joined at most: what a layer may have of units


FINER = 1.25  # times the least memory, for segments as small as they can be: their units are gathered for less long


STEP = 1.2  # from one size of segments that is tried to the next


class Span(NamedTuple):
    """Memory that is made in one segment and used until another; `kept`: whether the backward pass reads it."""

    made: int
    used: int
    nbytes: int
    kept: bool


def joined(spans: Iterable[Span], count: int) -> list[int]:
    """For each of `count` segments the number of that which it becomes a part of.

    What is made before the end of a segment and used behind it is kept, once, however many ends it crosses; all else
    is made again, a segment at a time. Segments are so large that both together take little memory, and no larger.
    """
    crossing, inner = (np.cumsum(x, axis=1) for x in _bytes(spans, count))
    largest = int(inner[:-1, 0].max(initial=0))
    found: list[tuple[int, list[int]]] = []
    while not found or largest < min(found)[0]:
        kept, numbers = _least(crossing, inner, largest)
        found.append((kept + largest, numbers))
        largest = int(largest * STEP) + 1
    return next(numbers for total, numbers in found if total <= FINER * min(found)[0])


def _bytes(spans: Iterable[Span], count: int) -> tuple[np.ndarray, np.ndarray]:
    """[k, w]: bytes made in segment k - w that are used behind k, and those that are not but kept."""
    crossing, inner = np.zeros((2, count, WIDE), dtype=np.int64)
    for x in spans:
        for k in range(x.made, min(count, x.made + WIDE)):
            if k < x.used:
                crossing[k, k - x.made] += x.nbytes
            elif x.kept:
                inner[k, k - x.made] += x.nbytes
    return crossing, inner


def _least(crossing: np.ndarray, inner: np.ndarray, largest: int) -> tuple[int, list[int]]:
    """The least that is kept between segments of `largest` bytes at most, and these; the last one, which is not made
    again, may be larger. Arguments: [k, w], bytes when segments k - w to k are one."""
    count = len(inner)
    kept = np.zeros(count + 1, dtype=np.int64)  # [k]: between the segments before k
    first = [0] * count
    for k in range(count):
        wide = min(k + 1, WIDE)
        limit = largest if k < count - 1 else max(largest, inner[k, 0])
        fits = int(np.searchsorted(inner[k, :wide], limit, side="right"))
        total = kept[k + 1 - fits : k + 1][::-1] + crossing[k, :fits]
        best = int(total.argmin())
        kept[k + 1], first[k] = total[best], k - best
    starts, end = set(), count
    while end := first[end - 1]:
        starts.add(end)
    return int(kept[count]), list(itertools.accumulate(int(k in starts) for k in range(count)))
