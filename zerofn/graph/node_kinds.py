"""Questions about one node, answered by its operation's traits and by its arguments, which are read by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.fx import Node

from .._torch_compat import OpOverload
from ..ops.codecs import DECODES
from ..ops.registry import Traits, argument_places, base_name, traits_of
from .alias import writes
from .nested import is_result, runs_once

ops = torch.ops.zerofn
_DECODERS = {encode: decode for decode, encode in DECODES.items()}
ASIDE = "aside"  # meta key of nodes that run on the host's update thread
BOUNDED = "bounded"  # meta key of values with sizes that depend on data: what is known of them are upper bounds
UPDATE = "update"  # meta key of reads from drives for an update rule


def argument(node: Node, name: str) -> Any:
    """Return a node's argument, or its default, by its name in the operation's schema.

    Raises `KeyError` for a name that is not in the schema.
    """
    place, default = argument_places(cast(OpOverload, node.target))[name]
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[place] if place < len(node.args) else default


def set_argument(node: Node, name: str, value: Any) -> None:
    """Set a node's argument by its name in the schema."""
    place, _ = argument_places(cast(OpOverload, node.target))[name]
    if place < len(node.args):
        node.args = (*node.args[:place], value, *node.args[place + 1 :])
    else:
        node.kwargs = {**node.kwargs, name: value}


def arguments(node: Node) -> dict[str, Any]:
    """Return all of a node's arguments by their names in the schema."""
    return {name: argument(node, name) for name in argument_places(cast(OpOverload, node.target))}


def traits(node: Node) -> Traits:
    """Return the traits of a node's operation."""
    return traits_of(node.target)


def is_ours(node: Node) -> bool:
    """Return whether a node's operation is one of ZeroFn's."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "zerofn"


def is_start(node: Node) -> bool:
    """Return whether `node` starts a transfer between ranks."""
    return bool(traits(node).collective)


def is_gather(node: Node) -> bool:
    """Return whether `node` starts the all-gather of a unit. Transfers of small values have an empty `unit`."""
    return traits(node).collective == "gather" and bool(argument(node, "unit"))


def gathers_parameters(node: Node, root: Mapping[Node, Node]) -> bool:
    """Return whether `node` starts the all-gather of a unit's parameters. Others gather its gradient, which some ranks
    have reduced, in each of several microbatches perhaps. `root`: see `alias.roots`.
    """
    source = node
    while is_gather(source):
        source = root[source.all_input_nodes[0]]
    of_microbatches = is_result(source) and not runs_once(source.args[0])  # type: ignore[arg-type]
    return source is not node and not reduces(source) and not of_microbatches


def is_scatter(node: Node) -> bool:
    """Return whether `node` starts the reduce-scatter of a unit."""
    return reduces(node) and bool(argument(node, "unit"))


def reduces(node: Node) -> bool:
    """Return whether `node` starts a reduce-scatter, of a unit or of small values."""
    return traits(node).collective == "scatter"


def makes_one(node: Node) -> bool:
    """Return whether `node` makes one value of what ranks have: the same on all of an axis, or shards of it."""
    return traits(node).replicated or reduces(node) or node.target is ops.as_shard.default


def casts(node: Node) -> bool:
    """Return whether `node` casts: its result is the same numbers in another dtype."""
    return traits(node).casts


def decodes(node: Node) -> bool:
    """Return whether `node` decodes a shard from the parts that store it."""
    return isinstance(node.target, OpOverload) and node.target in DECODES


def encodes(node: Node) -> bool:
    """Return whether `node` encodes a shard as the parts that store it."""
    return isinstance(node.target, OpOverload) and node.target in _DECODERS


def codec_operations() -> set[OpOverload]:
    """Return the operations that decode and encode shards."""
    return {*DECODES, *_DECODERS}


def decoder_of(node: Node) -> OpOverload:
    """Return the operation that decodes what `node` encodes."""
    return _DECODERS[cast(OpOverload, node.target)]


def stores(node: Node) -> bool:
    """Return whether `node` overwrites a value on a drive or in host memory with a new one."""
    return traits(node).stores == "new"


def stores_in_place(node: Node) -> bool:
    """Return whether `node` writes a value back to a drive or host memory that an update changed in place."""
    return traits(node).stores == "in place"


def place_of_store(store: Node) -> Node:
    """Return the input that a store overwrites: a drive's handle, or a tensor in host memory."""
    on_drive = "handle" in argument_places(cast(OpOverload, store.target))
    return cast(Node, argument(store, "handle" if on_drive else "host"))


def makes_bucket(node: Node) -> bool:
    """Return whether `node` makes a unit's gradient bucket: the flat buffer that the reduce-scatter sends."""
    return traits(node).bucket


def is_batched(node: Node) -> bool:
    """Return whether `node` ravels leaves that have batch dimensions, inside `vmap`."""
    return node.target is ops.ravel.default and bool(argument(node, "num_batch_dims"))


def in_place_of(target: object) -> OpOverload | None:
    """Return the in-place form `zerofn::rule_` of an operation `zerofn::rule`, or None if it has none.

    It writes the arguments whose new values the pure form returns, in the same order.
    """
    if not isinstance(target, OpOverload) or target.namespace != "zerofn":
        return None
    packet = getattr(ops, base_name(target) + "_", None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def is_source(node: Node) -> bool:
    """Return whether `node` starts to fetch a unit for computation.

    That is the unit's all-gather or, if it is not gathered, its read from a drive or the host.
    """
    if not is_fetch(node) or node.meta.get(UPDATE):
        return is_gather(node)
    readers = list(wait_of(node).users)
    while readers and all(decodes(x) or casts(x) for x in readers):
        readers = [user for x in readers for user in x.users]
    return not any(map(is_gather, readers))


def is_fetch(node: Node) -> bool:
    """Return whether `node` starts a read of an input from a drive, or its copy from host memory."""
    return node.target is ops.fetch.default or brings_input(node)


def brings_input(node: Node) -> bool:
    """Return whether `node` starts the copy of an input from host memory."""
    return node.target is ops.bring.default and argument(node, "x").op == "placeholder"


def start_of(node: Node) -> Node | None:
    """Return the node that starts the transfer that `node` waits for, or None if `node` is not a wait."""
    if node.target is not ops.wait.default:
        return None
    return cast(Node, argument(node, "x"))


def fetched(node: Node) -> bool:
    """Return whether `node` waits for a read from a drive, or for an input's copy from host memory."""
    start = start_of(node)
    return start is not None and is_fetch(start)


def only_moves(node: Node) -> bool:
    """Return whether `node` brings a part of the state to where the model computes, or takes a new value back: the
    value, its last input, stays what it is.
    """
    return is_fetch(node) or fetched(node) or stores(node)


def from_drive(node: Node) -> bool:
    """Return whether `node` waits for a read from a drive."""
    start = start_of(node)
    return start is not None and start.target is ops.fetch.default


def lies_at(fetch: Node) -> Node:
    """Return the input that a fetch reads: a drive's handle, or a tensor in host memory."""
    return cast(Node, argument(fetch, "handle" if fetch.target is ops.fetch.default else "x"))


def kept_by(node: Node) -> list[list[Node]]:
    """Return, for each tensor that an in-place update rule writes, the parts that store it.

    Return an empty list for any other node.
    """
    if not node.args or not isinstance(node.args[0], list | tuple) or not writes(node):
        return []
    lists = [x for x in node.args if isinstance(x, list | tuple) and x and isinstance(x[0], Node)]
    return [cast(list[Node], list(x)) for x in lists]


def wait_of(start: Node) -> Node:
    """Return the node that waits for `start`."""
    return next(user for user in start.users if user.target is ops.wait.default)
