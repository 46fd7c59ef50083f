"""Update state in host memory on the host: gradients are copied down, parameters up."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Graph, Node

from ..cost.host_share import share_of
from ..dry_run.fake_machine import host, is_host
from ..graph.alias import positions, roots, touches
from ..graph.edit import clean
from ..graph.node_kinds import (
    ASIDE,
    argument,
    brings_input,
    from_drive,
    kept_by,
    lies_at,
    set_argument,
    start_of,
    stores_in_place,
)
from ..graph.program import Program, ShardedInput, tensor_of

ops = torch.ops.zerofn


def update_on_host(program: Program) -> None:
    """Move updates of state in host memory from the device to the host, for a share of the units.

    As captured, the device updates, and state is streamed to it and back. The share follows from the policy or from
    measured rates; the host takes the first units in the order of `raise_updates`, and all units on drives, because
    drives read into host memory. An update whose new value the step reads stays on the device. `donate` has made the
    updates in-place.
    """
    gm = program.gm
    graph = gm.graph
    rules = [n for n in graph.nodes if _streamed(n)]
    if not rules:
        return
    number = round(_share(program, rules[0]) * len(rules))
    where, root = dict[Node, float](positions(graph)), roots(graph)
    touched = touches(graph, root)
    for k, rule in enumerate(rules):
        drive = any(from_drive(x) for parts in kept_by(rule) for x in parts)
        after = [n for parts in kept_by(rule) for x in parts for n in touched[root[x]] if where[n] > where[rule]]
        if not all(map(stores_in_place, after)):  # the step reads the new value, which the host would not have yet
            continue
        if k < number or (drive and _on_device(rule)):  # drive reads arrive in host memory
            before = [n for n in touched[root[argument(rule, "g")]] if where[n] < where[rule]]
            _move(graph, rule, before[-1], where, not drive)
    clean(gm)


def _share(program: Program, rule: Node) -> float:
    """Return the share of units that the host updates, from the bytes that a rule reads and writes for each element."""
    placement = next(
        storage.placement
        for cut in program.state.nodes
        if isinstance(cut, ShardedInput)
        for storage in cut.storages
        if storage.placement is not None
    )
    gradient, parts = _bytes(argument(rule, "g")), [x for parts in kept_by(rule) for x in parts]
    size = tensor_of(parts[0]).numel()  # type: ignore[union-attr]
    moved = sum(_bytes(x) for x in parts if _brought(x))
    on_host = gradient + 2 * sum(map(_bytes, parts))
    return share_of(placement.update, torch.device(placement.device), on_host / size, moved / size)


def _bytes(node: Any) -> int:
    return tensor_of(node).nbytes  # type: ignore[union-attr]


def _brought(node: Node) -> bool:
    """Return whether a node waits for a state tensor that is copied from the host."""
    start = start_of(node)
    return start is not None and brings_input(start)


def _streamed(node: Node) -> bool:
    """Return whether a node updates what is stored in host memory, or read from a drive to there."""
    parts = [x for parts in kept_by(node) for x in parts]
    return any(map(_brought, parts)) or (any(map(from_drive, parts)) and _on_device(node))


def _on_device(rule: Node) -> bool:
    return not is_host(tensor_of(argument(rule, "g")).device)  # type: ignore[union-attr]


def _move(graph: Graph, rule: Node, ready: Node, where: dict[Node, float], aside: bool) -> None:
    """Turn an update on the device into one on the host, on the thread for updates unless later reads use its buffers.

    `ready`: the node after which its gradient is complete. `where`: positions, to which new users of state are
    added.
    """
    gradient = cast(Node, argument(rule, "g"))
    with graph.inserting_after(ready):
        begun = _node(graph, ops.bring.default, (gradient, host()), gradient)  # as soon as it is reduced
    with graph.inserting_after(begun):  # at once: a gradient that waits on a drive must leave before the next one
        given = {gradient: _node(graph, ops.wait.default, (begun,), begun)}
    parts = [x for parts in kept_by(rule) for x in parts]
    for x in [*parts, *(x for x in rule.args if isinstance(x, Node) and x is not gradient)]:  # counts, rates, checks
        if _brought(x):
            given[x] = lies_at(cast(Node, start_of(x)))
        elif from_drive(x):
            set_argument(cast(Node, start_of(x)), "device", host())
        else:
            with graph.inserting_before(rule):
                begun = _node(graph, ops.bring.default, (x, host()), x)
                given[x] = _node(graph, ops.wait.default, (begun,), x)
            where[begun] = where[rule] - 0.5
    ends = [_end(graph, rule, part, given[part], where) for part in parts if part in given]
    rule.args = tuple(_swap(x, given) for x in rule.args)
    if aside:
        for node in [rule, *ends, *(x for x in given.values() if x.target is ops.wait.default)]:
            if node is not None:
                node.meta[ASIDE] = True


def _end(graph: Graph, rule: Node, part: Node, place: Node, where: dict[Node, float]) -> Node | None:
    """End the host's update of a part: signal that it is done, or hand out its result."""
    for put in [u for u in part.users if _brought(part) and u.target is ops.put_.default]:
        graph.erase_node(put)
    if _brought(part) and len(place.users) == 1:  # it has no other user
        return None
    with graph.inserting_after(rule):
        end = (
            graph.call_function(ops.updated_.default, (place,))
            if _brought(part)
            else graph.call_function(ops.put_.default, (part, place))
        )
    where[end] = where[rule] + 0.5
    written = place if _brought(part) else part
    with graph.inserting_before(min(written.users, key=where.__getitem__)):  # the next step waits for this copy
        _node(graph, ops.wait.default, (written,), written)
    return end


def _node(graph: Graph, target: Any, args: tuple[Any, ...], like: Any) -> Node:
    node = graph.call_function(target, args)
    value = like.meta.get("val")
    node.meta["val"] = value.to(args[1]) if target is ops.bring.default and value is not None else value
    return node


def _swap(x: Any, given: dict[Node, Node]) -> Any:
    if isinstance(x, list | tuple):
        return [_swap(y, given) for y in x]
    return given.get(x, x) if isinstance(x, Node) else x
