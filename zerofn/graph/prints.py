"""Tensors that are printed while a step is captured: they have no values then, and are not printed again."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from .._torch_compat import TENSOR_TEXT, FakeTensor
from ..util.patches import Patches, Replacement
from ..util.user_line import OURS, frames, library_prefixes

log = logging.getLogger("zerofn")


def _warns(text_of: Callable[..., str]) -> Callable[..., str]:
    told: set[Any] = set()

    def text(x: Any, *args: Any, **kwargs: Any) -> str:
        libraries = library_prefixes()
        caller = next((f for f in frames(sys._getframe(1)) if not f.file.startswith(libraries)), None)
        if isinstance(x, FakeTensor) and caller is not None and not caller.file.startswith(OURS) and caller not in told:
            told.add(caller)
            log.warning(
                "%s:%d: a tensor is printed while the step is captured. It has no value yet, and the captured step "
                "does not print. Return it in aux, and print that outside the step.",
                caller.file,
                caller.number,
            )
        return text_of(x, *args, **kwargs)

    return text


def _replacements() -> list[Replacement]:
    return [(*TENSOR_TEXT, _warns)]


warned_prints = Patches(_replacements)  # a context: inside, a user's line that prints a fake tensor is told once
