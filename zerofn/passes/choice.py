"""What is decided about the values of a graph before passes carry it out."""

from __future__ import annotations

import json
from typing import NamedTuple

from torch.fx import GraphModule

_KEY = "choice"  # among a graph module's meta


class Choice(NamedTuple):
    """`dropped`: names of activations that are computed again for the backward pass. `cuts`: (gather, the use before),
    by name, after which a gathered unit is dropped and gathered again. `ahead`: how many gathers may start before the
    one that is used next. None leaves it to the pass. `stashed`: names of activations that wait in host memory.
    """

    dropped: frozenset[str] = frozenset()
    cuts: frozenset[tuple[str, str]] | None = None
    ahead: int | None = None
    stashed: frozenset[str] = frozenset()


def choice_of(gm: GraphModule) -> Choice:
    """What was decided about a graph."""
    return gm.meta.get(_KEY, Choice())


def choose(gm: GraphModule, choice: Choice) -> None:
    """Decide about a graph."""
    gm.meta[_KEY] = choice


def as_text(choices: list[Choice]) -> str:
    """Choices as a text, from which `from_text` has them again: ranks tell each other."""
    return json.dumps([[sorted(x.dropped), None if x.cuts is None else sorted(x.cuts), x.ahead, sorted(x.stashed)]
                       for x in choices])


def from_text(text: str) -> list[Choice]:
    """What `as_text` has written."""
    return [Choice(frozenset(dropped), None if cuts is None else frozenset(map(tuple, cuts)), ahead, frozenset(stashed))
            for dropped, cuts, ahead, stashed in json.loads(text)]
