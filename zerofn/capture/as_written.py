"""What the user gives to torch.compile runs as it was written while a step is captured."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .._torch_compat import compiles_for_itself
from ..util.patches import Patches
from .changing_constants import draws_noted


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Inside, functions and modules that are compiled, here or before, run as they were written: a capture takes the
    operations themselves. torch's own (`cond`, `scan`, `flex_attention`), which compile what they are given, go on
    doing so.
    """
    loaded = "torch._dynamo" in sys.modules  # else nothing was compiled
    with torch.compiler.set_stance(_AS_WRITTEN) if loaded else contextlib.nullcontext(), _compiles:
        try:
            yield
        finally:
            if not loaded and "torch._dynamo" in sys.modules:  # the step compiles, which sets the stance
                torch.compiler.set_stance("default")


def _compiled_inside(compile: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile)
    def make(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        made = compile(model, *args, **kwargs)
        if not compiles_for_itself():
            torch.compiler.set_stance(_AS_WRITTEN)
            return made
        if model is None or isinstance(made, nn.Module):
            return made

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.compiler.set_stance("default"), draws_noted.lifted():  # Dynamo knows functions by identity
                return made(*args, **kwargs)

        return run

    return make


_AS_WRITTEN = "force_eager"
_compiles = Patches(lambda: [(torch, "compile", _compiled_inside)])
