"""Which nodes share memory, and which nodes write to it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import OpOverload, aliased_arguments
from ..ops.registry import UNDECLARED_VIEWS, argument_places, may_write, traits_of, written_arguments
from .nested import body_of, call_of, calls, foreign_graphs, is_nested, is_unknown, results_of, runs_once

# Both caches are keyed by id, because hashing an operation is a slow call in Python. Their values hold the operation,
# so that no other object gets its id.
# Operation -> the arguments, by position and name, whose memory its results share.
_views: dict[int, tuple[OpOverload, list[tuple[int, str]]]] = {}
_pure: dict[int, OpOverload] = {}  # operations that write nothing


def sources(node: Node, bodies: Bodies | None = None) -> list[Node]:
    """Return the nodes whose memory `node`'s value shares; an empty list if it has memory of its own. `bodies`: those
    that were looked at already.
    """
    if node.op != "call_function":
        return []
    target = node.target
    known = _views.get(id(target))
    if known is None:
        if target is operator.getitem:
            first = node.args[0]
            if not isinstance(first, Node):
                return []
            if not runs_once(first):
                return sources(first, bodies)
            return (bodies or Bodies()).shared(first, node.args[1])  # type: ignore[arg-type]
        if not isinstance(target, OpOverload):
            return []
        known = _views[id(target)] = target, [(0, "self")] if target in UNDECLARED_VIEWS else aliased_arguments(target)
    if not known[1]:
        return []
    args = node.args
    if len(known[1]) == 1 and known[1][0][0] == 0 and args:  # nearly always
        return [args[0]] if isinstance(args[0], Node) else []
    found = [args[i] if i < len(args) else node.kwargs.get(name) for i, name in known[1]]
    return [x for x in found if isinstance(x, Node)]


def is_given(memory: Node) -> bool:
    """Return whether memory exists before the graph runs: that of an input or a constant."""
    return memory.op in ("placeholder", "get_attr")


def is_lent(memory: Node) -> bool:
    """Return whether memory belongs to an arena, which the next step uses again."""
    return traits_of(memory.target).lends


def is_view(node: Node) -> bool:
    """Return whether `node` is a view of another node's memory."""
    return bool(sources(node)) and not writes(node)


def writes(node: Node, bodies: Bodies | None = None) -> list[Node]:
    """Return the arguments that `node` writes to. A node that runs a body writes what the body writes; of
    an operation that tells nothing, all of its inputs count as written. `bodies`: as for `sources`."""
    target = node.target
    if id(target) in _pure:  # nearly always
        return []
    if is_nested(node):
        return (bodies or Bodies()).written(node)
    if node.op != "call_function" or target is operator.getitem:
        return []
    if not isinstance(target, OpOverload):
        return _written_by_foreign(node)
    if not may_write(target):
        _pure[id(target)] = target
        return []
    found = written_arguments(target, node.args, node.kwargs)
    several = [x if isinstance(x, list | tuple) else [x] for x in found]
    return [x for each in several for x in each if isinstance(x, Node)]


class Bodies:
    """What the bodies that nodes run write, and which inputs they return. Each body is looked at once: a pipeline calls
    a piece for each microbatch. An object is valid for as long as no graph changes.
    """

    def __init__(self) -> None:
        self._written: dict[GraphModule, list[Node]] = {}
        self._returned: dict[tuple[GraphModule, int], Node | None] = {}

    def written(self, node: Node) -> list[Node]:
        """Return the inputs of a node that its body writes to."""
        call = call_of(node)
        assert call is not None
        if call.body not in self._written:
            self._written[call.body] = [x for x in call.given if is_written(x)]
        return [call.given[x] for x in self._written[call.body]]

    def shared(self, node: Node, k: int) -> list[Node]:
        """Return the input whose memory result `k` of a body is."""
        body = body_of(node)
        if (body, k) not in self._returned:
            result = results_of(body)[k]
            memory = memory_of(result) if isinstance(result, Node) else None
            self._returned[body, k] = memory if memory is not None and memory.op == "placeholder" else None
        memory = self._returned[body, k]
        if memory is None:  # nearly always: the inputs are not looked at
            return []
        call = call_of(node)
        assert call is not None
        return [call.given[memory]]


def with_writes(nodes: Iterable[Node]) -> Iterator[tuple[Node, list[Node]]]:
    """Yield each node with the arguments that it writes to, as `writes` does. No graph may change meanwhile."""
    bodies = Bodies()
    for node in nodes:
        yield node, writes(node, bodies)


def is_written(node: Node) -> bool:
    """Return whether a later node of its graph writes to a value, also through views of it."""
    todo = [node]
    while todo:
        value = todo.pop()
        for user in value.users:
            if value in writes(user):
                return True
            if value in sources(user):
                todo.append(user)
    return False


def check_results(gm: GraphModule) -> None:
    """Raise `ValueError` if a body that is called once returns one memory twice: `sources` knows nothing of that."""
    for node, call in calls(gm):
        made = [memory_of(x) for x in call.results if isinstance(x, Node)] if runs_once(node) else []
        made = [x for x in made if x not in call.given]
        if len(set(made)) < len(made):
            twice = next(x for k, x in enumerate(made) if x in made[:k])
            raise ValueError(f"{call.name} returns the memory of {twice.name} twice; return it once.")


def _written_by_foreign(node: Node) -> list[Node]:
    """All inputs of an operation without a schema, unless it is known to write to none."""
    bodies = [written_memory(roots(gm.graph)) for gm in foreign_graphs(node)]
    if not is_unknown(node) and not any(map(is_given, set().union(*bodies))):
        return []
    return [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]


def roots(graph: Graph) -> dict[Node, Node]:
    """Map every node to the node that made its memory."""
    found: dict[Node, Node] = {}
    bodies = Bodies()
    for node in graph.nodes:
        known = _views.get(id(node.target))
        source = sources(node, bodies) if known is None or known[1] else None
        found[node] = found[source[0]] if source else node
    return found


def memory_of(node: Node) -> Node:
    """Return the node that made the memory of `node`."""
    while source := sources(node):
        node = source[0]
    return node


def positions(graph: Graph) -> dict[Node, int]:
    """Map every node to its position in the order of execution."""
    return {node: i for i, node in enumerate(graph.nodes)}


def touches(graph: Graph, root: dict[Node, Node]) -> dict[Node, list[Node]]:
    """Map memory to the nodes that make, read or write it, through any view, in order of execution.

    Memory is named by the node that makes it. `root`: the result of `roots`.
    """
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for memory in {root[used]: None for used in (node, *reads(node))}:
            found.setdefault(memory, []).append(node)
    return found


def reads(node: Node) -> list[Node]:
    """Return the values that a node reads; that of a wait are also those which the transfer reads until then."""
    sent = _sent(node.all_input_nodes[0]) if node.target is torch.ops.zerofn.wait.default else []
    return [*node.all_input_nodes, *sent]


def _sent(start: Node) -> list[Node]:
    """Return what a transfer reads until it is waited for: its inputs, unless it sends an encoded copy of them."""
    if isinstance(start.target, OpOverload) and (found := argument_places(start.target).get("codec")):
        return [] if any(start.args[found[0] :][:1]) else start.all_input_nodes
    return start.all_input_nodes


def last_uses(graph: Graph, where: dict[Node, int], root: dict[Node, Node]) -> dict[Node, int]:
    """Map memory to the position of the last node that touches it, through any view."""
    return {memory: where[nodes[-1]] for memory, nodes in touches(graph, root).items()}


def overwritten(graph: Graph) -> dict[tuple[Node, Node], Node]:
    """Return (reader, value) -> the node that has written to the value's memory since it was computed. A reader that
    writes there itself means the memory, as it is then.
    """
    where, root = positions(graph), roots(graph)
    found: dict[tuple[Node, Node], Node] = {}
    for node, writer in with_writers(graph, root):
        for value in reads(node):
            last = writer.get(root[value])
            if last is not None and where[value] < where[last] and root[value] not in map(root.get, writes(node)):
                found[node, value] = last
    return found


def written_before(graph: Graph, where: dict[Node, int], root: dict[Node, Node]) -> dict[Node, Node]:
    """Map each node to the last earlier node that writes to the memory of one of its inputs, through any view.

    The node cannot move above that writer. Nodes without one are left out.
    """
    found: dict[Node, Node] = {}
    for node, writer in with_writers(graph, root):
        earlier = [writer[root[x]] for x in node.all_input_nodes if root[x] in writer]
        if earlier:
            found[node] = max(earlier, key=where.__getitem__)
    return found


def with_writers(graph: Graph, root: Mapping[Node, Node]) -> Iterator[tuple[Node, dict[Node, Node]]]:
    """Yield each node with the last writers before it, by memory."""
    writer: dict[Node, Node] = {}
    for node, written in with_writes(graph.nodes):
        yield node, writer
        writer.update((root[x], node) for x in written)


def last_writers(root: dict[Node, Node]) -> dict[Node, Node]:
    """Map memory to the last node that writes to it, through any view. `root`: the result of `roots`."""
    return {root[x]: node for node, written in with_writes(root) for x in written}


def written_memory(root: dict[Node, Node]) -> set[Node]:
    """Return the memory that a graph writes to. `root`: the result of `roots`."""
    return set(last_writers(root))
