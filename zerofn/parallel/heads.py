"""How to slice weights in modules that the library does not know: at whole heads of attention, and, in experts with a
gate, through both matrices of the weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from ..util.errors import some
from ..util.patterns import matches, pattern_of
from .plan import Slice, did_you_mean

Attributes = Mapping[str, Mapping[str, Callable[[Any, int], Any]]]

# What modules of attention call the size of a head.
_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "d_head", "dim_head")


def size_of_head(attention: nn.Module | None) -> int:
    """Return the number of features in a head, within which the module's layers may not be sliced; 1 without heads."""
    found = [getattr(attention, name, None) for name in _SIZES]
    return next((x for x in found if isinstance(x, int)), 1)


def is_one_a_head(size: int, unit: int, features: int, groups: int) -> bool:
    """Return whether `size` entries along a dim are one number for each query head, instead of heads of `unit` entries.

    `features`: the number that the layer after attention takes, over all heads; 0 if it is not known. `groups`: the
    number of query heads for each key head.
    """
    heads = features // unit
    return size < unit or size == heads and size != heads // groups * unit


def check_numbers(name: str, part: nn.Module, attributes: Attributes, layers: Collection[str]) -> None:
    """Raise `ValueError` if a module, of which `layers` are sliced, would compute with the number of all heads.

    Modules with `head_dim`, or another name for the size of a head, derive the number of heads from the features.
    """
    told = {x for key, changes in attributes.items() if matches(key, name) for x in changes}
    for attribute, value in vars(part).items() if size_of_head(part) == 1 else ():
        counts = re.search("heads?$", attribute) and isinstance(value, int) and value > 1
        if counts and attribute not in told:
            raise ValueError(
                f"{name}.{attribute} is {value}, but the plan slices layers of {name or 'the model'} ({some(layers)}). "
                "If these are attention layers, divide the heads among the ranks: "
                f"attributes={{{pattern_of(name)!r}: {{{attribute!r}: lambda heads, ranks: heads // ranks}}}}. If they "
                "are not, as in an MLP, keep the number: lambda heads, ranks: heads."
            )


def check_matrices(name: str, part: nn.Module, how: Slice) -> None:
    """Raise `ValueError` if the plan slices gates and the matrix that they multiply as one matrix, in a module of
    transformers' experts that stores one after the other.
    """
    both = getattr(part, "has_gate", False) and getattr(part, "is_concatenated", False)
    if both and re.search(r"\bgate_up_proj(_bias)?$", name) and how.dim is not None and how.parts != 2:
        raise ValueError(
            f"{name} stores two matrices, one after the other, but the plan slices it as one matrix. Write "
            f"'packed_colwise' for it: model.tp_plan | {{...}}."
        )


def change_numbers(model: nn.Module, attributes: Attributes, size: int) -> None:
    """Change numbers that modules store to those of one of `size` ranks. Raises `ValueError` for a key that matches no
    module, and for a number that ranks cannot divide.
    """
    for key, changes in attributes.items():
        found = [part for name, part in model.named_modules() if matches(key, name)]
        if not found:
            raise ValueError(f"attributes[{key!r}] matches no module{did_you_mean(key, dict(model.named_modules()))}")
        for part in found:
            for attribute, change in changes.items():
                value = getattr(part, attribute)
                changed = change(value, size)
                if isinstance(value, int) and changed != value and value > size and value % size:
                    raise ValueError(
                        f"attributes[{key!r}]: {attribute} is {value}, which {size} ranks cannot divide equally."
                    )
                setattr(part, attribute, changed)
