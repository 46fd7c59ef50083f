"""What functions of a user's choose among leaves: by name, and with an effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from ..util.errors import nearest, note, some, words_of


def ask_names(option: str, function: Callable[[str], Any], names: Iterable[str]) -> dict[str, Any]:
    """Map each leaf's name to the answer of a user's function. One that expects a name gets an error that says what it
    is given.
    """
    out = {}
    for name in names:
        try:
            out[name] = function(name)
        except AttributeError as error:
            if isinstance(error.obj, str):
                note(error, f"{option} receives names: its argument is a str such as {name!r}.")
            raise
    return out


def check_effect(what: str, function: Callable[..., Any], answers: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a function that should select leaves selects none. `answers`: leaf name -> its answer."""
    if not answers or any(answers.values()):
        return
    near = [name for word in words_of(function) for name in nearest(word.strip("."), with_prefixes(answers))]
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(
        f"{what} selects none of the {len(answers)} leaves, so it has no effect{hint} The leaves are {some(answers)}. "
        "Leave it out to select nothing."
    )


def with_prefixes(names: Iterable[str]) -> list[str]:
    """Return leaf names, and the dotted names of what contains them."""
    parts = [name.split(".") for name in names]
    return list(dict.fromkeys(".".join(p[:k]) for p in parts for k in range(len(p), 0, -1)))


def by_levels(prefix: str, path: Iterable[object]) -> str:
    """Return the code that takes out `prefix` level by level. `path`: the key path of a leaf below it.

    >>> by_levels("h.0", ("h", "0", "w"))
    "['h']['0']"
    """
    keys, rest = list[str](), prefix
    for key in map(str, path):
        if not rest.startswith(f"{key}."):
            break
        keys.append(key)
        rest = rest[len(key) + 1 :]
    return "".join(f"[{key!r}]" for key in [*keys, rest])


def is_learned(name: str, leaf: Tensor, trainable: Callable[[str], bool]) -> bool:
    """Return whether a parameter gets a gradient: it is floating, and `trainable(name)` is true.

    Raises `TypeError` for a complex one with `trainable(name)`: a step would not change it.
    """
    if leaf.is_complex() and trainable(name):
        raise TypeError(
            f"parameter {name!r} is {str(leaf.dtype).removeprefix('torch.')}, and complex parameters cannot be "
            "trained. Store torch.view_as_real(w) in params, and write torch.view_as_complex(w) in the loss, or freeze "
            f"the parameter: TrainState.create(..., frozen=lambda name: name == {name!r})."
        )
    return leaf.is_floating_point() and trainable(name)
