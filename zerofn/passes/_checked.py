"""Check the graph after each of a user's own passes; the library's passes are checked by their tests."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import OpOverload
from ..capture.capture import CaptureError
from ..capture.verify import check_purity
from ..graph.alias import is_given, is_view, overwritten, positions, roots, touches, written_memory
from ..graph.edit import clean
from ..graph.fingerprint import MESSAGES
from ..graph.liveness import complete_values, memory_bytes, tensors_of
from ..graph.nested import graphs_of, is_nested
from ..graph.node_kinds import is_fetch, is_gather, is_start, start_of, traits
from ..graph.phase import continue_phases
from ..graph.program import Program, alike, tensor_of
from ..util.errors import note
from ._packing import Lifetime
from ._pass import Pass

_KINDS = ("placeholder", "get_attr", "call_function", "output")


class PassError(RuntimeError):
    """A pass made a graph that cannot be used. The message names the pass.

    >>> import torch, zerofn
    >>> step = zerofn.compile(lambda state, x: (state, 2 * x), passes=[zerofn.Pass(repr)])
    >>> try:
    ...     step({}, torch.ones(2))
    ... except zerofn.passes.PassError as error:
    ...     print(error)
    the pass 'repr' cannot be used: its function returned a value. Change program.gm, and return None.
    """


def apply_checked(program: Program, each: Pass) -> None:
    """Apply a user's pass, and check the graph that it leaves.

    - The graph passes FX's lint, and calls overloads of `torch.ops` only.
    - The step takes and returns tensors of the same shapes, dtypes and devices as before.
    - It writes only to its own memory, or where it wrote before. The state, the batch, constants and gathered units are
      not its own, except where the state is donated.
    - Every transfer is waited for before its result is read.
    - Messages between stages of a pipeline stay in their order, and no wait for one comes before one that stood above:
      a channel delivers in order, so another order could keep ranks waiting for each other.
    - No value is read after its memory was written to, as the state's is behind `donate`, but where it was before.
    - Behind `assign_buffers`, no value is read after its place in a static buffer has gone to another.
    - Before donation and scheduling, the step is still a pure function, and no shard enters an operation that needs the
      whole tensor (`graph.verify.check_purity`).

    The order of transfers, which must be the same on all ranks, is compared after the last pass, as always. Raises
    `PassError`, or what the pass raised with a note that names it.
    """
    before = _Facts(program)
    try:
        returned = each(program)
    except Exception as error:
        note(error, f"in the pass {each.name!r}, given to zerofn.compile(passes=)")
        raise
    try:
        if any(x is not None for x in returned):
            raise _Unsound("its function returned a value. Change program.gm, and return None")
        _check(program, before)
    except _Unsound as error:
        raise PassError(f"the pass {each.name!r} cannot be used: {error}.") from error.__cause__


class _Unsound(Exception):
    """The reason, as the end of a sentence."""


class _Facts:
    """What a pass must not change."""

    def __init__(self, program: Program) -> None:
        self.graphs = {gm: _GraphFacts(gm.graph) for gm in graphs_of(program.gm)}
        self.gm = program.gm
        self.pure = _impurity(program) is None


class _GraphFacts:
    def __init__(self, graph: Graph) -> None:
        self.calls = {n: _call(n) for n in graph.nodes}
        self.targets = {n.target for n in graph.nodes if n.op == "call_function"}
        self.inputs = [_signature(n) for n in graph.nodes if n.op == "placeholder"]
        self.outputs = [_signature(x) for x in _outputs(graph)]
        self.written = _written(graph)
        self.unwaited = _unwaited(graph)
        self.overwritten = _overwritten(graph)
        self.messages, self.waits = order_of_messages(graph)


def _impurity(program: Program) -> CaptureError | None:
    try:
        check_purity(program)
    except CaptureError as error:
        return error
    return None


def _check(program: Program, before: _Facts) -> None:
    if program.gm is not before.gm:  # the decisions about memory are in its metadata
        raise _Unsound("it assigned another module to program.gm. Change program.gm.graph in place")
    for gm, facts in before.graphs.items():
        _check_inputs(gm.graph, facts)
    for gm in graphs_of(program.gm):
        _check_nodes(gm, before.graphs.get(gm))
        _complete(gm, before.graphs.get(gm))
    for gm in graphs_of(program.gm):
        was, now = before.graphs.get(gm), _GraphFacts(gm.graph)
        if was is not None:
            _check_signature(was, now)
        if new := now.written - (was.written if was is not None else set()):
            raise _Unsound(
                f"it adds a write to {min(new)!r}, which belongs to the state, the batch, a constant or a gathered "
                f"unit. Let the new operation write to a clone of {min(new)!r}"
            )
        if new := now.unwaited - (was.unwaited if was is not None else set()):
            raise _Unsound(
                f"the result of the transfer {min(new)!r} is read without torch.ops.zerofn.wait. Read the value that "
                "torch.ops.zerofn.wait returns"
            )
        if was is not None:
            _check_overwritten(was, now)
            _check_messages(was, now)
        _check_places(gm.graph)
    error = _impurity(program) if before.pure else None
    if error is not None:
        raise _Unsound(f"capture would refuse the changed step: {str(error).rstrip('.')}") from error


def _check_inputs(graph: Graph, before: _GraphFacts) -> None:
    """Raise if an operation stands before an input."""
    first = None
    for node in graph.nodes:
        if node.op != "placeholder":
            first = first or node
        elif first is not None and node in before.calls:
            raise _Unsound(f"it put {first.name!r} before the input {node.name!r}. Put {first.name!r} after all inputs")


def _overwritten(graph: Graph) -> dict[tuple[str, str], str]:
    """Return (reader, value) -> the node that has written to the value's memory in between. Of memory that the graph
    makes itself, results and new views may mean what is in it by then, as may what is handed to a body.
    """
    root, found = roots(graph), {}
    for (reader, value), writer in overwritten(graph).items():
        means_memory = not is_given(root[value]) and (is_view(reader) or reader.op == "output")
        if not means_memory and not is_nested(reader):
            found[reader.name, value.name] = writer.name
    return found


def _check_overwritten(was: _GraphFacts, now: _GraphFacts) -> None:
    """Raise for a value that is read after its memory was written to, which it was not before the pass."""
    for (reader, value), writer in now.overwritten.items():
        if (reader, value) not in was.overwritten:
            raise _Unsound(
                f"{reader!r} reads {value!r} after {writer!r} has overwritten the memory of {value!r}. Read it "
                "earlier, or run the pass before updates are in place: "
                'zerofn.passes.before("donate", ...), as compile(passes=[mine]) does'
            )


def order_of_messages(graph: Graph) -> tuple[list[str], dict[str, int]]:
    """Return the sends and receives of messages, and for each wait for one how many of them stand before it."""
    posted: list[str] = []
    waits: dict[str, int] = {}
    for node in graph.nodes:
        begun = start_of(node)
        if traits(node).collective in MESSAGES:
            posted.append(node.name)
        elif begun is not None and traits(begun).collective in MESSAGES:
            waits[node.name] = len(posted)
    return posted, waits


def _check_messages(was: _GraphFacts, now: _GraphFacts) -> None:
    kept = [x for x in was.messages if x in now.messages]
    moved = [b for a, b in zip(kept, [x for x in now.messages if x in was.messages], strict=True) if a != b]
    moved += [x for x, before in was.waits.items() if now.waits.get(x, before) < before and kept == was.messages]
    if moved:
        raise _Unsound(
            f"it moved {moved[0]!r}, a message between pipeline stages or the wait for one. Ranks could then wait for "
            "each other forever. Leave messages in their order, and move the operations that compute instead"
        )


def _check_places(graph: Graph) -> None:
    """Raise for two values that are needed at one time, and have the same place in a static buffer."""
    spans = sorted(_placed(graph), key=lambda x: x[1].start)
    for k, (place, span) in enumerate(spans):
        for other_place, other in spans[k + 1 :]:
            if other.start > span.stop:
                break
            same = place[0] == other_place[0]
            if same and place[1] < other_place[1] + other.nbytes and other_place[1] < place[1] + span.nbytes:
                raise _Unsound(
                    f"{span.node.name!r} is read after {other.node.name!r} has overwritten it in a static buffer. Run "
                    'the pass before memory is assigned: zerofn.passes.before("assign_buffers", ...)'
                )


def _placed(graph: Graph) -> Iterator[tuple[list[int], Lifetime]]:
    """Yield ([buffer, first byte], span) of each value that has a place."""
    where, root = positions(graph), roots(graph)
    touched = touches(graph, root)
    for node, at in where.items():
        place = node.args[3] if node.target is torch.ops.zerofn.bucket.default else node.kwargs.get("place")
        if place:
            yield place, Lifetime(node, at, where[touched[node][-1]], memory_bytes(node.meta["val"]))  # type: ignore[misc]


def _check_nodes(gm: GraphModule, before: _GraphFacts | None) -> None:
    try:
        gm.graph.lint()
    except Exception as error:
        raise _Unsound(f"torch.fx finds an error in the changed graph: {str(error).rstrip('.')}") from error
    for node in gm.graph.nodes:
        if node.op not in _KINDS:
            raise _Unsound(f"{node.name!r} is a {node.op}. Use graph.call_function with an overload of torch.ops")
        if node.op == "get_attr":
            _check_attribute(gm, node)
        elif node.op == "call_function" and (before is None or node.target not in before.targets):
            _check_target(node)


def _check_attribute(gm: GraphModule, node: Node) -> None:
    try:
        operator.attrgetter(str(node.target))(gm)
    except AttributeError:
        raise _Unsound(f"{node.name!r} reads {node.target!r}, which program.gm does not have") from None


def _check_target(node: Node) -> None:
    """Accept overloads only: their schema tells other passes what they read and write."""
    if not isinstance(node.target, OpOverload) and node.target is not operator.getitem and not is_nested(node):
        packet = isinstance(node.target, type(torch.ops.aten.add))
        name = f"{node.target}.default" if packet else getattr(node.target, "__name__", node.target)
        raise _Unsound(
            f"{node.name!r} calls {name if not packet else node.target}, which is not an overload of torch.ops. Write "
            + (f"torch.ops.{name}" if packet else "an overload, such as torch.ops.aten.gelu.default")
        )


def _complete(gm: GraphModule, before: _GraphFacts | None) -> None:
    """Give new nodes the metadata that other passes read: the shape of their value, and their phase."""
    clean(gm)
    known = before.calls if before is not None else {}
    changed = {n for n in gm.graph.nodes if n.op == "call_function" and known.get(n) != _call(n)}
    try:
        _update_values(gm.graph, changed)
    except Exception as error:
        raise _Unsound(f"an operation does not accept its inputs: {str(error).rstrip('.')}") from error
    continue_phases(gm.graph, known)


def _call(node: Node) -> tuple[Any, ...]:
    return node.target, node.args, node.kwargs


def _update_values(graph: Graph, changed: set[Node]) -> None:
    """Compute the fake values of new and changed nodes, and of those that read a value whose kind has changed.

    Other values stay, because views recognise their memory by its storage.
    """
    complete_values(graph)
    while changed:
        before = {node: node.meta.pop("val") for node in changed}
        complete_values(graph)
        same = {node for node, value in before.items() if _alike(value, node.meta["val"])}
        for node in same:
            node.meta["val"] = before[node]
        changed = {user for node in changed - same for user in node.users if user.op == "call_function"}


def _alike(a: Any, b: Any) -> bool:
    ours, theirs = tensors_of(a), tensors_of(b)
    return len(ours) == len(theirs) and all(map(alike, ours, theirs))


def _check_signature(was: _GraphFacts, now: _GraphFacts) -> None:
    for what, old, new in (("takes", was.inputs, now.inputs), ("returns", was.outputs, now.outputs)):
        if len(old) != len(new):
            raise _Unsound(
                f"the graph {what} {len(new)} values, but must take and return as many as before: {len(old)}"
            )
        for k, (a, b) in enumerate(zip(old, new, strict=True)):
            if a != b and a is not None:
                raise _Unsound(f"the graph {what} {b} as value {k}, which must stay as it was: {a}")


def _signature(x: Any) -> str | None:
    """Return a value's type in words; None if no pass has set it yet."""
    value = tensor_of(x) if isinstance(x, Node) else None
    if value is None:
        return repr(x) if not isinstance(x, Node) else None
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"


def _outputs(graph: Graph) -> list[Any]:
    found = next(iter(reversed(graph.nodes))).args
    return list(found[0]) if found and isinstance(found[0], list | tuple) else list(found)


def _written(graph: Graph) -> set[str]:
    """Return the memory that a graph writes to and does not own."""
    return {x.name for x in written_memory(roots(graph)) if is_given(x) or is_gather(x)}


def _unwaited(graph: Graph) -> set[str]:
    """Return the starts of transfers that have no wait, or whose result is read without it."""
    wait = torch.ops.zerofn.wait.default
    starts = [n for n in graph.nodes if (is_start(n) or is_fetch(n)) and isinstance(n.meta.get("val"), Tensor)]
    return {n.name for n in starts if not n.users or any(user.target is not wait for user in n.users)}
