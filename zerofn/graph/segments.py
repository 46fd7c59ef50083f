"""Segments of the forward pass: which activations each saves for the backward pass, and how it recomputes the others.

A segment begins where a unit's parameters are first used, at a boundary that few bytes cross. In most models that is
a layer, even if a layer has several units. What crosses a boundary is always saved, so every other activation is
recomputed from its own segment's inputs, whatever else is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable
from typing import NamedTuple

import numpy as np
from torch.fx import Graph, Node

from ..ops.registry import COPIES
from .alias import is_given, positions, roots, touches, writes
from .liveness import memory_bytes
from .node_kinds import arguments, is_start
from .phase import BACKWARD, FORWARD, phase_of
from .program import tensor_of

RECEIVED = "received"  # a meta key of values of the forward pass that a stage of a pipeline receives


def is_not_kept(node: Node) -> bool:
    """Return whether a node gathers what the step asks to gather again in the backward pass."""
    return is_start(node) and arguments(node).get("kept") is False


class Segments:
    """The segments of a graph's forward pass.

    `activations`: memory that the forward pass makes, the backward pass reads, and a policy may drop, in order. Memory
    that crosses a boundary (`crossing`), that a stage of a pipeline receives, that the step returns or that cannot be
    recomputed is not among them.
    `gathered_again`: memory that is never kept, because the step asks for its gather to run again.

    If the last segment makes all of them, as in a model of one unit, segments begin where a leaf is first used instead.
    """

    def __init__(self, graph: Graph) -> None:
        self._root = roots(graph)
        self.touched = touches(graph, self._root)
        self.gathered_again = self._gathered_again(graph)
        self._written = {self._root[x] for n in graph.nodes if phase_of(n) for x in writes(n)}
        made = [n for n in graph.nodes if self._root[n] is n and phase_of(n) == FORWARD and n.op == "call_function"]
        for parameter in (self.memory, self._leaf):
            self._cut(self._segments(graph, parameter), made)
            if not all(map(self.is_last, self.activations)):
                break

    def _cut(self, segment: dict[Node, int], made: list[Node]) -> None:
        """Find the activations among the memory `made` in the forward pass, with these segments."""
        self._segment = self._joined(segment)
        self._last = max(self._segment.values(), default=0)
        self.crossing = {n for n in made if n not in self.gathered_again and self._crosses(n)}
        starts = {n for n in made if is_start(n) and n not in self.gathered_again}
        self._fixed = self.crossing | starts | {self._root[n] for n in segment if n.meta.get(RECEIVED)}
        free = (n for n in made if n not in self._fixed and n not in self.gathered_again)
        self.activations = [n for n in free if self._is_saved(n) and self._can_be_recomputed(n)]

    def memory(self, node: Node) -> Node:
        """Return the node that made the memory of a node's value."""
        return self._root[node]

    def gap(self, activation: Node) -> tuple[Node, Node]:
        """Return an activation's last use in the forward pass and its first use in the backward pass."""
        touched = self.touched[activation]
        first = next(k for k, n in enumerate(touched) if phase_of(n) == BACKWARD)
        return touched[first - 1], touched[first]

    def is_last(self, activation: Node) -> bool:
        """Return whether an activation is in the last segment, whose backward pass comes right after its forward."""
        return self._segment[activation] == self._last

    def missing(self, value: Node, dropped: Container[Node], there: Container[Node] = ()) -> list[Node]:
        """Return the forward operations that recompute `value`, if the activations `dropped` are not saved.

        `there`: operations that are recomputed already.
        """
        found: dict[Node, None] = {}
        todo = [value]
        while todo:
            node = todo.pop()
            if node in found or node in there or not self._must_rerun(node, dropped):
                continue
            found[node] = None
            todo += node.all_input_nodes
        return list(found)

    def _must_rerun(self, node: Node, dropped: Container[Node]) -> bool:
        """Return whether a forward node must run again to make its value available in the backward pass."""
        memory = self._root[node]
        if phase_of(node) != FORWARD or is_given(memory) or memory in self._fixed:
            return False
        return memory in self.gathered_again or memory in dropped or not self._is_saved(memory)

    def _gathered_again(self, graph: Graph) -> set[Node]:
        """Return the memory of gathers that the backward pass runs again, and of copies of it. What they send is read
        there, and so saved.
        """
        found: dict[Node, Node] = {}  # -> the memory that is sent
        for node in graph.nodes:
            if phase_of(node) != FORWARD or self._root[node] is not node:
                continue
            if is_not_kept(node):
                found[node] = self._root[node.all_input_nodes[0]]
            elif node.target in COPIES and self._root[node.all_input_nodes[0]] in found:
                found[node] = found[self._root[node.all_input_nodes[0]]]
        where = positions(graph) if found else {}
        for memory, sent in found.items():
            later = {x for x in self.touched[memory] if phase_of(x) == BACKWARD}
            self.touched[sent] = sorted({*self.touched[sent], *later}, key=where.__getitem__)
        return set(found)

    def _is_saved(self, memory: Node) -> bool:
        return any(phase_of(n) == BACKWARD for n in self.touched.get(memory, ()))

    def _can_be_recomputed(self, memory: Node) -> bool:
        """Return whether memory can be recomputed.

        Only the forward and the backward pass may use it, and the operations that recompute it must not touch memory
        that is written.
        """
        if any(phase_of(n) not in (FORWARD, BACKWARD) for n in self.touched[memory]):
            return False
        again = self.missing(memory, {memory})
        return not any(self._root[x] in self._written for n in again for x in (n, *n.all_input_nodes))

    def _is_parameter(self, memory: Node) -> bool:
        """Return whether memory is a parameter's: floating point, and neither computed in a phase nor closed over."""
        value = tensor_of(memory)
        return not phase_of(memory) and memory.op != "get_attr" and value is not None and value.is_floating_point()

    def _crosses(self, memory: Node) -> bool:
        own = self._segment[memory]
        return any(self._segment.get(n, own) > own for n in self.touched[memory])

    def _joined(self, segment: dict[Node, int]) -> dict[Node, int]:
        """Join the segments at boundaries that many bytes cross, and return each node's new segment."""
        made = {x: own for x, own in segment.items() if self._root[x] is x}
        spans = [
            LiveRange(
                own, max(segment.get(n, own) for n in self.touched[x]), memory_bytes(x.meta["val"]), self._is_saved(x)
            )
            for x, own in made.items()
        ]
        numbers = joined(spans, max(segment.values(), default=0) + 1)
        return {node: numbers[own] for node, own in segment.items()}

    def _leaf(self, node: Node) -> Node:
        """Return the first view of a part of a unit's memory that a view of a leaf is a view of."""
        part = memory = self._root[node]
        while node is not memory and _bytes_of(node) < _bytes_of(memory):
            part, node = node, node.all_input_nodes[0]
        return part

    def _segments(self, graph: Graph, parameter: Callable[[Node], Node]) -> dict[Node, int]:
        """Map each forward node to its segment, before any are joined: each first use of what `parameter` says that an
        input is part of begins one.
        """
        seen: set[Node] = set()
        out: dict[Node, int] = {}
        number = 0
        for node in graph.nodes:
            if phase_of(node) != FORWARD or node.op != "call_function":
                continue
            new = {parameter(x) for x in node.all_input_nodes if self._is_parameter(self._root[x])} - seen
            if new:
                number += 1
                seen |= new
            out[node] = number
        return out


def _bytes_of(node: Node) -> int:
    value = tensor_of(node)
    return 0 if value is None else value.nbytes


WIDE = 32  # the most segments that are joined into one: as many units as a layer may have
# `joined` takes the smallest segments that need at most this much times the least memory: the units of a smaller
# segment are gathered for a shorter time.
FINER = 1.25
STEP = 1.2  # the factor from one size of segments that `joined` tries to the next


class LiveRange(NamedTuple):
    """Memory that segment `made` makes and segment `used` uses last. `saved`: whether the backward pass reads it."""

    made: int
    used: int
    nbytes: int
    saved: bool


def joined(spans: Iterable[LiveRange], count: int) -> list[int]:
    """Return, for each of `count` segments, the number of the joined segment that it becomes part of.

    What crosses a boundary is saved, once, however many boundaries it crosses. Everything else is recomputed, one
    segment at a time. So the memory that a partition needs is the bytes that cross, plus those of the largest segment.
    Of the partitions that need little memory (`FINER`), take the one with the smallest segments.
    """
    crossing, inner = (np.cumsum(x, axis=1) for x in _bytes(spans, count))
    largest = int(inner[:-1, 0].max(initial=0))
    found: list[tuple[int, list[int]]] = []
    while not found or largest < min(found)[0]:
        saved, numbers = _least(crossing, inner, largest)
        found.append((saved + largest, numbers))
        largest = int(largest * STEP) + 1
    return next(numbers for total, numbers in found if total <= FINER * min(found)[0])


def _bytes(spans: Iterable[LiveRange], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays [k, w] of bytes made in segment k - w: those used after segment k, and other saved ones."""
    crossing, inner = np.zeros((2, count, WIDE), dtype=np.int64)
    for x in spans:
        for k in range(x.made, min(count, x.made + WIDE)):
            if k < x.used:
                crossing[k, k - x.made] += x.nbytes
            elif x.saved:
                inner[k, k - x.made] += x.nbytes
    return crossing, inner


def _least(crossing: np.ndarray, inner: np.ndarray, largest: int) -> tuple[int, list[int]]:
    """Join segments up to `largest` bytes so that the fewest bytes cross; return these bytes and the partition.

    The last segment is not recomputed, so it may be larger. `crossing` and `inner`: [k, w], the bytes that cross and
    those inside if segments k - w to k are joined. This is dynamic programming over the end of the last joined segment.
    """
    count = len(inner)
    saved = np.zeros(count + 1, dtype=np.int64)  # [k]: the fewest bytes that cross among the first k segments
    first = [0] * count
    for k in range(count):
        wide = min(k + 1, WIDE)
        limit = largest if k < count - 1 else max(largest, inner[k, 0])
        fits = int(np.searchsorted(inner[k, :wide], limit, side="right"))
        total = saved[k + 1 - fits : k + 1][::-1] + crossing[k, :fits]
        best = int(total.argmin())
        saved[k + 1], first[k] = total[best], k - best
    starts, end = set(), count
    while end := first[end - 1]:
        starts.add(end)
    return int(saved[count]), list(itertools.accumulate(int(k in starts) for k in range(count)))
