"""Parameters whose class stores them quantised: refused where a model makes the first one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..util.constants import QUANTISED, stores_its_own_way
from ..util.patches import Patches
from ..util.user_line import user_place


def refuse_quantised(kind: type) -> None:
    """Raise `TypeError` for a class of parameters that stores its own way."""
    if stores_its_own_way(kind):
        raise TypeError(f"{user_place()}: a parameter {QUANTISED.format(kind.__name__)}.")


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(kind: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_quantised(kind)
        return original(kind, *args, **kwargs)

    return call


quantised_refused = Patches(lambda: [(type(nn.Parameter), "__call__", _call)])  # a context: inside, none is made
