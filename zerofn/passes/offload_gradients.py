"""Let gradients that wait for the norm or the finite check wait on drives, if their state is stored there."""

from __future__ import annotations

from typing import cast

import torch
from torch.fx import Graph, Node

from ..dry_run.fake_machine import host, is_host
from ..graph.alias import roots, touches
from ..graph.buffers import DriveSpec
from ..graph.edit import clean, made_by
from ..graph.node_kinds import ASIDE, UPDATE, argument, fetched, from_drive, is_batched, kept_by, lies_at, start_of
from ..graph.program import Program, ShardedInput, tensor_of

ops = torch.ops.zerofn
HELD = 2  # gradients that stay in memory: those of the first updates, which the backward pass makes last


def offload_gradients(program: Program) -> None:
    """Write each reduced gradient to a drive after its norm is taken, and read it back with the state that it updates.

    At most three units' gradients are in memory at a time, as many as of the state. The pass only requests the space,
    in `program.drive_space`. `fuse_norms` has taken each norm early, so no later node but the update reads the
    gradient. `raise_updates` has ordered the updates: the gradients of the first `HELD` ones stay in memory.
    """
    gm = program.gm
    rules = [n for n in gm.graph.nodes if _waits(n)][HELD:]
    root = roots(gm.graph)
    touched = touches(gm.graph, root)
    for rule in rules:
        memory = root[_gradient(rule)]
        # Any other reader after the norm needs the gradient in memory.
        if touched[memory][-1] is rule and memory.op != "placeholder":
            program.drive_space.append(_space_for(program, rule))
            _offload(gm.graph, rule, memory, touched[memory][-2], len(program.drive_space) - 1)
    clean(gm)


def _gradient(rule: Node) -> Node:
    return cast(Node, argument(rule, "g"))


def _waits(node: Node) -> bool:
    """Return whether a node updates, in place, what was read from a drive, with a gradient that waits for the finite
    check or the clipping factor.
    """
    kept = kept_by(node)
    if not any(from_drive(x) for parts in kept for x in parts):
        return False
    return any(isinstance(argument(node, name), Node) for name in ("factor", "finite"))


def _space_for(program: Program, rule: Node) -> DriveSpec:
    """Request space for a gradient, on the drives of the state."""
    storages = [storage for cut in program.state.nodes if isinstance(cut, ShardedInput) for storage in cut.storages]
    paths = next(storage.placement.paths for storage in storages if storage.placement and storage.placement.paths)
    names = dict(zip(program.placeholders, program.state.names, strict=False))
    nbytes = tensor_of(_gradient(rule)).nbytes  # type: ignore[union-attr]
    return DriveSpec(paths, nbytes, f"the gradient of {names[_updated(rule)]}")


def _updated(rule: Node) -> Node:
    """Return the input that a rule updates."""
    first = cast(list[Node], argument(rule, "p"))[0]
    return lies_at(cast(Node, start_of(first))) if fetched(first) else first


def _offload(graph: Graph, rule: Node, memory: Node, after: Node, space: int) -> None:
    """Write a rule's gradient, which is in `memory`, to a drive right after `after`, and read it for the rule."""
    value, then = tensor_of(_gradient(rule)), after.next
    assert value is not None
    in_buffer = _make_in_drive_buffer(_gradient(rule), memory)
    gradient = held = _gradient(rule)
    written = []
    with graph.inserting_before(then):
        if not in_buffer:
            held = graph.call_function(ops.drive_buffer.default, (value.numel(), value.dtype, []))
            written.append(graph.call_function(torch.ops.aten.copy_.default, (held, gradient)))
        handle = graph.call_function(ops.drive_handle.default, (space,))
        written.append(graph.call_function(ops.write_drive_.default, (handle, held)))
    start = start_of(gradient)
    if start is not None and start.target is ops.bring.default:  # the thread for updates waits for the device
        for node in (gradient, *written):
            node.meta[ASIDE] = True
    with graph.inserting_before(rule):
        fetch = graph.call_function(ops.fetch.default, (handle, value.numel(), value.dtype, [], host()))
        wait = graph.call_function(ops.wait.default, (fetch,))
    fetch.meta[UPDATE] = True
    rule.replace_input_with(gradient, wait)


def _make_in_drive_buffer(gradient: Node, memory: Node) -> bool:
    """Compute a gradient directly in the buffer that drives write from. Return whether that is possible."""
    value, whole = tensor_of(gradient), tensor_of(memory)
    if value is None or whole is None or not is_host(value.device) or value.numel() != whole.numel():
        return False
    if memory.target is not ops.flat.default and (memory.target is not ops.ravel.default or is_batched(memory)):
        return False
    made_by(memory, ops.drive_buffer.default, whole.numel(), whole.dtype, [])
    return True
