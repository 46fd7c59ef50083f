"""What was computed of a graph, which holds for as long as the graph stays as it is."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

from torch.fx import GraphModule, Node

from ..dry_run.fake_machine import fake_machine

T = TypeVar("T")
_KEY = "_zerofn_record"
_parts = operator.attrgetter("target", "args", "kwargs")


def recorded(compute: Callable[[GraphModule], T]) -> Callable[[GraphModule], T]:
    """Let a function of a graph run once. Its result stays with the graph, in one record of all such functions.

    A graph has no version that its edits count. So whoever asks compares: a record begins anew when a node of the
    graph, or of a body in it, was added, erased, moved or given another operation or other arguments, or when an input
    or a constant has another value. That costs about 0.15 us a node. Beside the graph a result may depend on the fake
    machine of a dry run, and on nothing else, such as phases.
    """

    @functools.wraps(compute)
    def asked(gm: GraphModule) -> T:
        values, key = _record_of(gm).values, (compute, fake_machine())
        if key not in values:
            values[key] = compute(gm)
        return values[key]

    return asked


class _Record:
    """`values`: (function, machine) -> its result. The rest is the graph as it was."""

    def __init__(self, gm: GraphModule) -> None:
        self.values: dict[Any, Any] = {}
        self._nodes = list(gm.graph.nodes)
        self._parts = list(map(_parts, self._nodes))
        given = [x for x in self._nodes if x.op in ("placeholder", "get_attr")]
        self._given = [(x, value, _inside(value)) for x in given for value in [_value(gm, x)]]

    def holds(self, gm: GraphModule) -> bool:
        """Return whether the graph is as it was."""
        nodes = list(gm.graph.nodes)
        if nodes != self._nodes or list(map(_parts, nodes)) != self._parts:
            return False
        return all(_value(gm, x) is value and _inside(value) is inside for x, value, inside in self._given)


def _record_of(gm: GraphModule) -> _Record:
    record: _Record | None = vars(gm).get(_KEY)
    if record is None or not record.holds(gm):
        record = vars(gm)[_KEY] = _Record(gm)
    return record


def _inside(value: Any) -> _Record | None:
    return _record_of(value) if isinstance(value, GraphModule) else None


def _value(gm: GraphModule, node: Node) -> Any:
    return node.meta.get("val") if node.op == "placeholder" else operator.attrgetter(str(node.target))(gm)
