"""What becomes of a state's `extra` in a step whose update may be skipped."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import tree
from ..optim.base import unless_skipped
from ..util.user_line import user_line


class _Same:
    def __repr__(self) -> str:
        return "the same"


SAME = _Same()


@dataclass(frozen=True)
class Update:
    """What a step knows of `extra`. `before`: at its start. `finite`: None before the update, and without a check.
    `left`: of each gradient that was taken of the state, what codes have left out of it; see `feedback`.

    A state carries it beside its fields, for `replace(extra=)`, and loses it where it is flattened, as every compiled
    step does at its start and end.
    """

    before: Any
    finite: Tensor | None = None
    left: tuple[Any, ...] = ()

    def select(self, new: Any) -> Any:
        """Return a new `extra`, with the old floating-point leaves if the update is skipped.

        A leaf that was not there, or had another shape or dtype, is new.
        """
        if self.finite is None or new is self.before:
            return new
        old = dict(zip(*tree.flatten_with_path(self.before)[:2], strict=True))
        paths, leaves, treedef = tree.flatten_with_path(new)

        def one(x: Any, before: Any) -> Any:
            same = isinstance(x, Tensor) and isinstance(before, Tensor) and x is not before
            if not same or (x.shape, x.dtype) != (before.shape, before.dtype):
                return x
            return unless_skipped(self.finite, x, before) if x.is_floating_point() or x.is_complex() else x

        return tree.unflatten(treedef, [one(x, old.get(p)) for p, x in zip(paths, leaves, strict=True)])


def warn_of_replace() -> None:
    """Warn, with the user's line, of a `replace(extra=)` beside an update that may be skipped."""
    line = user_line()
    where = ("zerofn", 0) if line is None else (line.file, line.number)
    text = (
        "state.replace(extra=...) in a step with apply_gradients: if the update is skipped, floating-point leaves of "
        "extra keep their old values. Pass the new value to apply_gradients instead: state.apply_gradients(grads, "
        "extra=new), or extra=lambda params: ... if it depends on the new parameters."
    )
    warnings.warn_explicit(text, DeprecationWarning, *where)
