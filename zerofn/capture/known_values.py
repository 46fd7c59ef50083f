"""Values that are known while a step is captured: those of tensors that no input has a part in.

Traced tensors have no values, so libraries do not look at them: a model that would see that its positions are a range
then masks all pairs of tokens. But what a step makes of sizes alone (`arange`, `ones`, comparisons of them) is the same
in every step. Its value is computed when somebody asks, by the nodes that it was made by.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from .._torch_compat import FakeTensor, OpOverload, current_trace, node_of, plain_dispatch
from ..graph.alias import sources, writes
from ..ops.registry import EMPTY, FILLS, OnShard, traits_of
from ..util.nested_arguments import tensors_in, with_tensors
from ..util.patches import Patches, Replacement
from .host_checks import passing_answer

MOST = 1 << 28  # elements of a value: a mask of 16,384 tokens
T = TypeVar("T")
_KEPT = 1 << 20  # elements of a value that is kept for the next question
_UNKNOWN_TAGS = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}


def known_value(x: Tensor) -> Tensor | None:
    """Return the value that a traced tensor has in every step, on the CPU; None if it depends on an input of the step,
    on a draw or on other ranks, if it is large, and without a trace. Not to be written to.
    """
    trace: Any = current_trace()
    node = node_of(trace.tracer, x) if trace is not None and type(x) is FakeTensor else None
    return None if node is None else values_of(trace.tracer).of(node)


def values_of(tracer: Any) -> Values:
    """Return the known values of a trace."""
    kept = vars(tracer)
    if "_zerofn_values" not in kept:
        kept["_zerofn_values"] = Values(tracer)
    values: Values = kept["_zerofn_values"]
    return values


def looked_at_once(x: Tensor, name: str, look: Callable[[Values, Node], T | None]) -> T | None:
    """Return what `look` finds of a traced tensor, which is asked once unless the tensor is written to; None of others.
    `name`: under which the trace keeps it.
    """
    trace: Any = current_trace()
    node = None if trace is None else node_of(trace.tracer, x)
    if node is None:
        return None
    values = values_of(trace.tracer)
    kept: dict[Node, T | None] = vars(trace.tracer).setdefault(name, {})
    if node not in kept or values.is_written(node):
        with plain_dispatch():
            kept[node] = look(values, node)
    return kept[node]


def answer(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return what an operation says of the values of its arguments, or what passes a check of a library's that asks;
    `NotImplemented` if they are not known.
    """
    values = {id(x): known_value(x) for x in tensors_in((args, kwargs))}
    if any(x is None for x in values.values()):
        is_truth = func is not torch.ops.aten._local_scalar_dense.default or args[0].dtype is torch.bool
        found = passing_answer() if is_truth else None
        return NotImplemented if found is None else found
    given = with_tensors((args, kwargs), lambda x: values[id(x)])
    with plain_dispatch():
        return func(*given[0], **given[1])


class Values:
    """The known values of one trace."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._place: dict[Node, int] = {}  # of the nodes that were seen, in the order of execution
        self._last: Node | None = None
        self._writers: dict[Node, list[Node]] = {}  # memory, by the node that made it -> what writes to it
        self._found: dict[Node, Any] = {}

    def of(self, node: Node) -> Any:
        """Return the value of a node after all nodes up to now; None if it is not known."""
        self._see()
        if self._is_found(node):
            return self._found[node]
        parts = self._parts(node)
        value = None if parts is None else self._computed(parts, node)
        if value is None:
            self._found[node] = None
        return value

    def is_written(self, node: Node) -> bool:
        """Return whether anything has written to a node's memory."""
        self._see()
        return _memory_of(node) in self._writers

    def _see(self) -> None:
        """Look at the nodes that are new."""
        node = next(iter(self._tracer.graph.nodes)) if self._last is None else self._last.next
        while node.op != "root":  # what follows the last one
            self._place[node] = len(self._place)
            for written in writes(node):
                self._writers.setdefault(_memory_of(written), []).append(node)
            self._last, node = node, node.next

    def _is_found(self, node: Node) -> bool:
        """Return whether a value was found, and is what it was. What is not known stays so."""
        return node in self._found and (self._found[node] is None or _memory_of(node) not in self._writers)

    def _parts(self, node: Node) -> list[Node] | None:
        """Return the nodes that a value is computed by, in order; None if it is not known."""
        todo, parts = [node], set()
        while todo:
            x = todo.pop()
            if x in parts:
                continue
            parts.add(x)
            if self._is_found(x):
                if self._found[x] is None:
                    return None
                continue
            writers = self._writers.get(_memory_of(x), [])
            if not self._is_constant(x, writers):
                return None
            todo += [*_read_by(x), *writers]
        return sorted(parts, key=self._place.__getitem__)

    def _is_constant(self, node: Node, writers: list[Node]) -> bool:
        """Return whether an operation has the same result in every step, if its inputs have."""
        target = node.target
        if node.op == "get_attr":
            return not writers and type(self._constant(node)) is Tensor and self._constant(node).numel() <= MOST
        if node.op != "call_function" or _numel(node) > MOST:
            return False
        if target is operator.getitem:
            return True
        if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
            return False
        if target in EMPTY:
            return bool(writers) and writers[0].target in FILLS and writers[0].args[0] is node
        return not _UNKNOWN_TAGS & set(target.tags)

    def _computed(self, parts: list[Node], wanted: Node) -> Any:
        """Return the value of one of some nodes after all of them; None if the CPU cannot compute it."""
        last_use = {used: node for node in parts for used in node.all_input_nodes} | {wanted: wanted}
        values: dict[Node, Any] = {}
        with plain_dispatch():
            for node in parts:
                try:
                    values[node] = self._found[node] if self._is_found(node) else self._run(node, values)
                except RuntimeError:
                    return None
                if _numel(node) <= _KEPT and _memory_of(node) not in self._writers:
                    self._found[node] = values[node]
                for used in node.all_input_nodes:
                    if last_use[used] is node:
                        values.pop(used, None)
        return values[wanted]

    def _run(self, node: Node, values: dict[Node, Any]) -> Any:
        if node.op == "get_attr":
            return self._constant(node).detach().cpu()

        def given(x: Any) -> Any:
            if isinstance(x, Node):
                return values[x] if x in values else _of_shape(x.meta["val"])
            return torch.device("cpu") if isinstance(x, torch.device) else x

        args, kwargs = map_aggregate((node.args, node.kwargs), given)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _constant(self, node: Node) -> Any:
        return operator.attrgetter(str(node.target))(self._tracer.root)


def _memory_of(node: Node) -> Node:
    """Return the node that made a node's memory."""
    while found := sources(node):
        node = found[0]
    return node


def _read_by(node: Node) -> list[Node]:
    """Return the inputs of an operation whose values it reads: of some, `ones_like(x)`, only the shape matters."""
    return [] if traits_of(node.target).on_shard is OnShard.SHAPE else node.all_input_nodes


def _of_shape(x: Tensor) -> Tensor:
    return torch.empty((), dtype=x.dtype).expand(x.shape)


def _numel(node: Node) -> int:
    """Return how many elements a node's results have, without sizes that depend on values: inputs bound those."""
    shapes = [x.shape for x in tensors_in(node.meta.get("val"))]
    return sum(math.prod(n for n in shape if isinstance(n, int)) for shape in shapes)


def _unless_known(is_tracing: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(is_tracing)
    def asked(tensor: Any = None) -> bool:
        return (not isinstance(tensor, Tensor) or known_value(tensor) is None) and is_tracing(tensor)

    return asked


@functools.lru_cache(maxsize=1)
def _modules_with(original: Any, _num_modules: int) -> list[Any]:
    """Return transformers' modules that have imported its `is_tracing`. Thousands may be loaded: they are looked
    through again when there are others.
    """
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.")]
    return [module for module in modules if vars(module).get("is_tracing") is original]


def _replacements() -> Iterator[Replacement]:
    """Replace transformers' `is_tracing(x)`, which keeps its models from looking at `x`, wherever it was imported."""
    original = getattr(sys.modules.get("transformers.utils.import_utils"), "is_tracing", None)
    for module in _modules_with(original, len(sys.modules)) if original is not None else ():
        yield module, "is_tracing", _unless_known


values_looked_at = Patches(_replacements)  # a context: inside, libraries look at the values that are known
