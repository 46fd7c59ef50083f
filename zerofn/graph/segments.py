"""Segments of the forward pass, what each saves for the backward pass, and what recomputes the rest.

A segment begins where a unit's parameters are first used, and where few bytes cross. For most models it is a layer,
also if a layer has several units. What crosses from one segment to the next is saved. So anything else is recomputed
from its own segment's inputs, whatever other segments drop.
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
    """`activations`: memory that the forward pass makes and the backward pass reads, in order. Excluded are
    `crossing`, what crosses segments, what leaves the step, and what cannot be recomputed.
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
        """Return the memory of a node's value."""
        return self._root[node]

    def gap(self, activation: Node) -> tuple[Node, Node]:
        """Return (last use in the forward pass, first use in the backward pass)."""
        touched = self.touched[activation]
        first = next(k for k, n in enumerate(touched) if phase_of(n) == BACKWARD)
        return touched[first - 1], touched[first]

    def is_last(self, activation: Node) -> bool:
        """Return whether it belongs to the last segment, whose backward pass directly follows its forward pass."""
        return self._segment[activation] == self._last

    def missing(self, value: Node, dropped: Container[Node], there: Container[Node] = ()) -> list[Node]:
        """Return the forward operations that recompute `value` from saved values and from what is already `there`."""
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
        """Return whether a node must run again to have its value in the backward pass."""
        memory = self._root[node]
        if phase_of(node) != FORWARD or is_given(memory) or memory in self._fixed:
            return False
        return memory in dropped or not self._is_kept(memory)

    def _is_kept(self, memory: Node) -> bool:
        return any(phase_of(n) == BACKWARD for n in self.touched.get(memory, ()))

    def _can_be_made(self, memory: Node) -> bool:
        """Return whether only forward and backward passes read it, and no operation that makes it writes to
        anything.
        """
        if any(phase_of(n) not in (FORWARD, BACKWARD) for n in self.touched[memory]):
            return False
        again = self.missing(memory, {memory})
        return not any(self._root[x] in self._written for n in again for x in (n, *n.all_input_nodes))

    def _is_parameter(self, memory: Node) -> bool:
        """Return whether memory exists throughout the forward pass: a shard, or a gathered unit."""
        value = tensor_of(memory)
        return not phase_of(memory) and memory.op != "get_attr" and value is not None and value.is_floating_point()

    def _crosses(self, memory: Node) -> bool:
        own = self._segment[memory]
        return any(self._segment.get(n, own) > own for n in self.touched[memory])

    def _joined(self, segment: dict[Node, int]) -> dict[Node, int]:
        """Join segments at boundaries where many bytes cross."""
        made = {x: own for x, own in segment.items() if self._root[x] is x}
        spans = [
            Span(own, max(segment.get(n, own) for n in self.touched[x]), memory_bytes(x.meta["val"]), self._is_kept(x))
            for x, own in made.items()
        ]
        numbers = joined(spans, max(segment.values(), default=0) + 1)
        return {node: numbers[own] for node, own in segment.items()}

    def _segments(self, graph: Graph) -> dict[Node, int]:
        """Map each forward node to its segment."""
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


WIDE = 32  # segments to join at most: the units that one layer may have


FINER = 1.25  # times the least memory: smaller segments gather their units for a shorter time


STEP = 1.2  # factor between sizes of segments that are tried


class Span(NamedTuple):
    """Memory that is made in one segment and used until another. `kept`: whether the backward pass reads it."""

    made: int
    used: int
    nbytes: int
    kept: bool


def joined(spans: Iterable[Span], count: int) -> list[int]:
    """Return, for each of `count` segments, the number of the joined segment that it is part of.

    What is made before a boundary and used behind it is saved, once for all boundaries it crosses. Everything else
    is recomputed, one segment at a time. Segments are chosen so that both together take little memory, and no
    larger than that needs.
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
    """Return [k, w]: bytes made in segment k - w that are used behind k, and bytes saved but not used there."""
    crossing, inner = np.zeros((2, count, WIDE), dtype=np.int64)
    for x in spans:
        for k in range(x.made, min(count, x.made + WIDE)):
            if k < x.used:
                crossing[k, k - x.made] += x.nbytes
            elif x.kept:
                inner[k, k - x.made] += x.nbytes
    return crossing, inner


def _least(crossing: np.ndarray, inner: np.ndarray, largest: int) -> tuple[int, list[int]]:
    """Return the least that is saved between segments of at most `largest` bytes, and these segments.

    The last segment is not recomputed and may be larger. Arguments: [k, w], bytes if segments k - w to k are one.
    """
    count = len(inner)
    kept = np.zeros(count + 1, dtype=np.int64)  # [k]: saved between the segments before k
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
