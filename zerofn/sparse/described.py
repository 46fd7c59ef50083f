"""Layouts as texts, by which ranks compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor

from .._torch_compat import plain_dispatch
from .outside import read_outside

_SIMPLE = (int, float, complex, bool, str, bytes, type(None))


def described(layout: Any) -> str:
    """Return a short text that is equal on ranks whose layouts are equal: its arguments if they are numbers, else the
    layout's class and a digest of all that it depends on. Values of tensors count in host memory alone; those of a
    captured step, and on a device, do not.

    >>> from zerofn.sparse import sliding_window, sinks
    >>> described(sliding_window(3))
    'Window(window=3)'
    >>> described(sinks(1) | sliding_window(3)) == described(sinks(1) | sliding_window(3))
    True
    """
    if is_dataclass(layout) and all(isinstance(getattr(layout, x.name), _SIMPLE) for x in fields(layout)):
        return repr(layout)
    with plain_dispatch():  # the tensors that a capture finds outside the step have values
        text = "\n".join(_lines(layout))
    return f"{type(layout).__name__} {hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def _lines(x: Any) -> Iterator[str]:
    if isinstance(x, Tensor):
        yield f"{x.dtype} {list(x.shape)}"
        if type(x) is Tensor and x.device.type == "cpu":
            yield hashlib.blake2b(x.contiguous().numpy().tobytes()).hexdigest()
    elif isinstance(x, FunctionType):
        yield from _lines(x.__code__)
        yield from (repr(fact) for fact in read_outside(x).facts if isinstance(fact, tuple))  # objects have no text
    elif isinstance(x, CodeType):
        yield f"{x.co_code!r} {x.co_names} {x.co_varnames}"
        yield from _lines(x.co_consts)
    elif isinstance(x, tuple | list):
        yield f"{type(x).__name__} {len(x)}"
        for each in x:
            yield from _lines(each)
    elif is_dataclass(x):
        yield type(x).__name__
        for field in fields(x):
            yield from _lines(getattr(x, field.name))
    else:
        yield repr(x) if isinstance(x, _SIMPLE) else type(x).__name__
