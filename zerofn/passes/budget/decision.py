"""What is decided about the values of a graph before passes carry it out."""

from __future__ import annotations

import json
from typing import NamedTuple

from torch.fx import GraphModule

_KEY = "choice"  # among a graph module's meta


class Choice(NamedTuple):
    """`dropped`: names of activations that are computed again for the backward pass. `cuts`: (gather, the use before),
    by name, after which a gathered unit is dropped and gathered again. `starts`: (gather, the node before which it
    starts), by name; others start where they are used. None leaves these two to their passes. `stashed`: names of
    activations that wait in host memory.
    """

    dropped: frozenset[str] = frozenset()
    cuts: frozenset[tuple[str, str]] | None = None
    starts: frozenset[tuple[str, str]] | None = None
    offloaded: frozenset[str] = frozenset()


def choice_of(gm: GraphModule) -> Choice:
    """What was decided about a graph."""
    return gm.meta.get(_KEY, Choice())


def choose(gm: GraphModule, choice: Choice) -> None:
    """Decide about a graph."""
    gm.meta[_KEY] = choice


def as_text(choices: list[Choice]) -> str:
    """Choices as a text, from which `from_text` has them again: ranks tell each other."""
    return json.dumps([[None if names is None else sorted(names) for names in x] for x in choices])


def from_text(text: str) -> list[Choice]:
    """What `as_text` has written."""
    return [
        Choice(frozenset(dropped), _pairs(cuts), _pairs(starts), frozenset(offloaded))
        for dropped, cuts, starts, offloaded in json.loads(text)
    ]


def _pairs(found: list[list[str]] | None) -> frozenset[tuple[str, str]] | None:
    return None if found is None else frozenset((a, b) for a, b in found)
