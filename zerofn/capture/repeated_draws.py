"""Random numbers that a step draws twice."""

from __future__ import annotations

import logging
from typing import Any

from torch.fx import Node

from ..graph.nested import graphs_of
from ..graph.node_kinds import argument, is_ours
from ..graph.phase import FORWARD, phase_of
from ..graph.program import Program
from ..ops.registry import argument_places

log = logging.getLogger("zerofn")


def warn_of_equal_draws(program: Program, name: str) -> None:
    """Log that two gradients of a step are taken with the same random numbers.

    A backward pass that computes a segment again draws the same numbers again, which is right.
    """
    for gm in graphs_of(program.gm):
        seen: set[Any] = set()
        for node in gm.graph.nodes:
            if phase_of(node) != FORWARD or not is_ours(node) or "position" not in argument_places(node.target):
                continue
            draw = _origin(argument(node, "key")), argument(node, "position")
            if draw in seen:
                log.warning(
                    "%s: two calls of value_and_grad draw the same random numbers (%s), because both use the key of "
                    "this state and step. Use a different key for one of them: zerofn.value_and_grad(loss_fn, "
                    "rng=zerofn.random.fold_in(state.rng_at(), 1))(state.params, batch).",
                    name,
                    node.target,
                )
                return
            seen.add(draw)


def _origin(x: Any) -> Any:
    """Return how a key is made, as something to compare."""
    if not isinstance(x, Node):
        return x
    return x.name if x.op == "placeholder" else (str(x.target), *map(_origin, x.args))
