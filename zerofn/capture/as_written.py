"""What the user has given to torch.compile runs as it was written while a step is captured."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..util.patches import Patches


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Inside, functions and modules that were compiled before run as they were written: a capture takes the operations
    themselves. torch's own (`cond`, `scan`, `flex_attention`), which compile what they are given, go on doing so.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"), _compiles:
        yield


def _compiled_inside(compile: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile)
    def make(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        made = compile(model, *args, **kwargs)
        if model is None or isinstance(made, nn.Module):
            return made

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.compiler.set_stance("default"):
                return made(*args, **kwargs)

        return run

    return make


_compiles = Patches(lambda: [(torch, "compile", _compiled_inside)])
