"""Recurrent networks while a step is captured: the list of parameters that they keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from .._torch_compat import LEND_PARAMETERS, list_parameters_again
from ..util.patches import Patches


def _listed(lend: Callable[..., Any]) -> Callable[..., Any]:
    """Return what lends parameters to a module for a call, after which recurrent networks list their own again."""

    @contextmanager
    @wraps(lend)
    def listed(module: Any, parameters: dict[str, Any], **options: Any) -> Iterator[None]:
        try:
            with lend(module, parameters, **options):
                yield
        finally:
            list_parameters_again(module)

    return listed


recurrent = Patches(lambda: [(*LEND_PARAMETERS, _listed)])
