"""The decisions about a graph's values, which passes carry out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import NamedTuple

from torch.fx import GraphModule

_ORDER = "order"  # a key of a graph module's metadata


class Choice(NamedTuple):
    """Decisions about one graph. Nodes are given by name.

    `dropped`: activations that the backward pass recomputes. `cuts`: (gather, the last use before the unit is
    dropped and gathered again). `starts`: (gather, the node before which it starts); other gathers start at their
    first use. `offloaded`: activations that wait in host memory. `hoisted`: gathers of a loop's body that come once,
    before it. None leaves `cuts` or `starts` to the passes. `tiled`: the heads whose logits are never whole, by their
    log_softmax.
    """

    dropped: frozenset[str] = frozenset()
    cuts: frozenset[tuple[str, str]] | None = None
    starts: frozenset[tuple[str, str]] | None = None
    offloaded: frozenset[str] = frozenset()
    hoisted: frozenset[str] = frozenset()
    tiled: frozenset[str] = frozenset()


def order_of(gm: GraphModule) -> list[int] | None:
    """Return, for each gather of a graph, how many other transfers start before it; None if nothing says so."""
    return gm.meta.get(_ORDER)


def set_order(gm: GraphModule, order: list[int]) -> None:
    """Note the order that a graph's transfers have."""
    gm.meta[_ORDER] = order


def as_text(choices: list[Choice]) -> str:
    """Return decisions as a text that ranks exchange; `from_text` reads it."""
    return json.dumps([[None if names is None else sorted(names) for names in x] for x in choices])


def from_text(text: str) -> list[Choice]:
    """Return the decisions that `as_text` wrote."""
    return [
        Choice(
            frozenset(dropped), _pairs(cuts), _pairs(starts), frozenset(offloaded), frozenset(hoisted), frozenset(tiled)
        )
        for dropped, cuts, starts, offloaded, hoisted, tiled in json.loads(text)
    ]


def names_of(gms: Iterable[GraphModule]) -> str:
    """Return a text that two ranks have where every name means the same operation to both. It does not in a step with
    `zerofn.parallel.attention(method="ring")`, in which blocks of keys before a rank's own are other operations than
    those behind.
    """
    found = hashlib.sha256()
    for node in (node for gm in gms for node in gm.graph.nodes):
        found.update(f"{node.name} {getattr(node.target, '__name__', node.target)}\n".encode())
    return found.hexdigest()


def _pairs(found: list[list[str]] | None) -> frozenset[tuple[str, str]] | None:
    return None if found is None else frozenset((a, b) for a, b in found)
