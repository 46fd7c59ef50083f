"""What a capture depends on outside its arguments: facts, each a path with a value that can be compared and told."""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch

from ..util.by_identity import ByIdentity
from ..util.constants import EQUAL, TOLD_BY, NotConstant

Facts = dict[str, Any]  # path -> a hashable token


class _Nothing:
    """The token of a name that is not there."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()


def plain(value: Any) -> Any:
    """Return the token of a constant, such as a number, which tells 1, 1.0 and True apart; None for others.

    >>> plain(1) == plain(1.0), plain((1, "a")) == plain((1, "a")), plain([1])
    (False, True, None)
    """
    kind = type(value)
    if kind in EQUAL:
        return kind, value
    if kind not in TOLD_BY:
        return None
    try:
        return kind, TOLD_BY[kind](value), repr(value)
    except (NotConstant, RecursionError):  # tuples in tuples
        return None


def without(facts: Facts, paths: Iterable[str]) -> Facts:
    """Return facts without those at some paths, and below them.

    >>> without({"m": 1, "m.n": 2, "m.n[0]": 3, "m.no": 4}, ["m.n"])
    {'m': 1, 'm.no': 4}
    """
    left_out = set(paths)
    below = tuple(f"{path}{mark}" for path in left_out for mark in ".[:")
    return {path: x for path, x in facts.items() if path not in left_out and not path.startswith(below)}


def changed_paths(before: Facts, now: Facts) -> list[str]:
    """Return the paths whose facts differ, those of the facts before first."""
    if before == now:
        return []
    gone = [path for path, token in before.items() if now.get(path, NOTHING) != token]
    return gone + [path for path in now if path not in before]


def told(before: Facts, now: Facts, path: str) -> str:
    """Say how a fact has changed.

    >>> told({"global lr": plain(0.1)}, {"global lr": plain(0.2)}, "global lr")
    'global lr 0.1 -> 0.2'
    """
    was, is_now = before.get(path, NOTHING), now.get(path, NOTHING)
    if was is NOTHING or is_now is NOTHING or was[0] != is_now[0] or isinstance(was[0], type):
        return f"{path} {_word(was)} -> {_word(is_now)}"
    if was[0] == "function":
        return f"{path} was redefined"
    if was[0] == "tensor" and was[1] == is_now[1]:
        return f"{path} was written to"
    if was[0] == "value":
        return f"{path} {was[2]} -> {is_now[2]}"
    if was[0] == "of length":
        if was[1] == is_now[1]:
            return f"{path} has other entries, or in another order"
        return f"{path} has {is_now[1]} entries instead of {was[1]}"
    return f"{path} is another object"


def _word(token: Any) -> str:
    if token is NOTHING:
        return "nothing"
    if isinstance(token[0], type):
        text = token[2] if len(token) > 2 else repr(token[1])
        return text if len(text) <= 60 else f"{text[:57]}..."
    if token[0] == "function" and isinstance(token[1], CodeType):
        return f"a function ({token[1].co_name})"
    value = next((x.value for x in token if isinstance(x, ByIdentity)), NOTHING)
    if value is NOTHING:
        return str(token[0])
    return "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
