"""What a node is, by the traits of its operation and by its arguments' names."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Node

from .._torch_compat import OpOverload
from ..ops.codecs import DECODES
from ..ops.registry import Traits, argument_places, base_name, traits_of
from .alias import writes

ops = torch.ops.zerofn
_DECODERS = {encode: decode for decode, encode in DECODES.items()}
ASIDE = "aside"  # among the meta of what the host does on the updates' own thread
UPDATE = "update"  # among the meta of a read from a drive: it is for an update rule


def argument(node: Node, name: str) -> Any:
    """A node's argument by its name in the operation's schema, or its default. Raises `KeyError` for another name."""
    place, default = argument_places(cast(OpOverload, node.target))[name]
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[place] if place < len(node.args) else default


def set_argument(node: Node, name: str, value: Any) -> None:
    """Give a node another argument, by its name in the schema."""
    place, _ = argument_places(cast(OpOverload, node.target))[name]
    if place < len(node.args):
        node.args = (*node.args[:place], value, *node.args[place + 1 :])
    else:
        node.kwargs = {**node.kwargs, name: value}


def arguments(node: Node) -> dict[str, Any]:
    """All of a node's arguments, by their names in the operation's schema."""
    return {name: argument(node, name) for name in argument_places(cast(OpOverload, node.target))}


def traits(node: Node) -> Traits:
    """What is known of a node's operation."""
    return traits_of(node.target)


def is_ours(node: Node) -> bool:
    """Whether a node's operation is one of ZeroFn's."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "zerofn"


def is_start(node: Node) -> bool:
    """Whether `node` starts a transfer between ranks."""
    return bool(traits(node).collective)


def is_gather(node: Node) -> bool:
    """Whether `node` starts the gather of a unit (transfers of small values carry no unit)."""
    return traits(node).collective == "gather" and bool(argument(node, "unit"))


def is_scatter(node: Node) -> bool:
    """Whether `node` starts the reduce-scatter of a unit."""
    return reduces(node) and bool(argument(node, "unit"))


def reduces(node: Node) -> bool:
    """Whether `node` starts a reduce-scatter, of a unit or of small values."""
    return traits(node).collective == "scatter"


def casts(node: Node) -> bool:
    """Whether `node` gives the same numbers in another dtype."""
    return traits(node).casts


def decodes(node: Node) -> bool:
    """Whether `node` makes a shard of what stores it."""
    return isinstance(node.target, OpOverload) and node.target in DECODES


def encodes(node: Node) -> bool:
    """Whether `node` makes of a shard what stores it."""
    return isinstance(node.target, OpOverload) and node.target in _DECODERS


def codec_operations() -> set[OpOverload]:
    """What decodes and encodes shards."""
    return {*DECODES, *_DECODERS}


def decoder_of(node: Node) -> OpOverload:
    """What decodes what `node` encodes."""
    return _DECODERS[cast(OpOverload, node.target)]


def stores(node: Node) -> bool:
    """Whether `node` puts a new value where the old one lies, on a drive or the host."""
    return traits(node).stores == "new"


def stores_in_place(node: Node) -> bool:
    """Whether `node` writes out what was changed in place, once the state is donated."""
    return traits(node).stores == "in place"


def place_of_store(store: Node) -> Node:
    """Where a value is put that `stores`: a handle on a drive, or a tensor of the host."""
    return cast(
        Node, argument(store, "handle" if "handle" in argument_places(cast(OpOverload, store.target)) else "host")
    )


def makes_bucket(node: Node) -> bool:
    """Whether `node` makes the flat buffer of a unit's gradient."""
    return traits(node).bucket


def is_batched(node: Node) -> bool:
    """Whether `node` ravels leaves with batch dimensions, of a `vmap`."""
    return node.target is ops.ravel.default and bool(argument(node, "num_batch_dims"))


def in_place_of(target: object) -> OpOverload | None:
    """`zerofn::rule_` for `zerofn::rule`: it writes, in order, the arguments the pure one returns anew."""
    if not isinstance(target, OpOverload) or target.namespace != "zerofn":
        return None
    packet = getattr(ops, base_name(target) + "_", None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def is_source(node: Node) -> bool:
    """Whether a unit that is computed with begins to be there with `node`: its gather, or its read from a drive where
    nothing is gathered."""
    if not is_fetch(node) or node.meta.get(UPDATE):
        return is_gather(node)
    readers = list(wait_of(node).users)
    while readers and all(decodes(x) or casts(x) for x in readers):
        readers = [user for x in readers for user in x.users]
    return not any(map(is_gather, readers))


def is_fetch(node: Node) -> bool:
    """Whether `node` starts to read from a drive, or to bring what lies in host memory."""
    return node.target is ops.fetch.default or brings_input(node)


def brings_input(node: Node) -> bool:
    """Whether `node` starts to bring an input that lies in host memory."""
    return node.target is ops.bring.default and argument(node, "x").op == "placeholder"


def start_of(node: Node) -> Node | None:
    """What starts the transfer that `node` waits for; None for another node."""
    if node.target is not ops.wait.default:
        return None
    return cast(Node, argument(node, "x"))


def fetched(node: Node) -> bool:
    """Whether `node` waits for what is read from a drive or brought from host memory."""
    start = start_of(node)
    return start is not None and is_fetch(start)


def from_drive(node: Node) -> bool:
    """Whether `node` waits for what is read from a drive."""
    start = start_of(node)
    return start is not None and start.target is ops.fetch.default


def lies_at(fetch: Node) -> Node:
    """The input from which a fetch reads: a handle on a drive, or a tensor of the host."""
    return cast(Node, argument(fetch, "handle" if fetch.target is ops.fetch.default else "x"))


def kept_by(node: Node) -> list[list[Node]]:
    """What keeps the tensors that an update rule in place writes, tensor by tensor; nothing for another node."""
    if not node.args or not isinstance(node.args[0], list | tuple) or not writes(node):
        return []
    lists = [x for x in node.args if isinstance(x, list | tuple) and x and isinstance(x[0], Node)]
    return [cast(list[Node], list(x)) for x in lists]


def wait_of(start: Node) -> Node:
    """The node that waits for `start`."""
    return next(user for user in start.users if user.target is ops.wait.default)
