"""What travels between a program and the ranks it starts: functions by cloudpickle, tensors by value, errors."""

from __future__ import annotations

import dataclasses
import io
import linecache
import os
import pickle
import traceback
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch

import zerofn


def _code(args: tuple[Any, ...], filename: str, lines: list[str]) -> types.CodeType:
    """Make a code object whose tracebacks show the user's lines, those of a notebook's cell too."""
    if lines:
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    return types.CodeType(*args).replace(co_filename=filename)


class _Pickler(cloudpickle.Pickler):
    """Tensors travel as they are on the host, and code with the file that it is from, which cloudpickle drops. `what`:
    begins the sentence for what cannot travel.
    """

    def __init__(self, file: io.BytesIO, what: str) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.what = what

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, zerofn.Sharded) and not obj.is_abstract:
            raise TypeError(
                f"{self.what} contains a Sharded, which is one rank's part of a tree. Pass zerofn.unshard(state), or "
                "the path of a checkpoint from zerofn.save, with zerofn.abstract(state) to load it."
            )
        if isinstance(obj, zerofn.optim.GradientTransformation):  # whose functions pickle cannot write
            return type(obj), tuple(getattr(obj, x.name) for x in dataclasses.fields(obj))
        if obj is torch.ops:
            return getattr, (torch, "ops")
        if isinstance(obj, type(torch.ops.aten)):
            return getattr, (torch.ops, obj.name)
        if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, types.CodeType):
            _, args = self.dispatch_table[types.CodeType](obj)
            name = obj.co_filename
            return _code, (args, name, [] if os.path.exists(name) else linecache.getlines(name))
        return super().reducer_override(obj)


def packed(value: Any, what: str) -> bytes:
    """Return a value as bytes. Raises `TypeError`, which begins with `what`, for a value that cannot travel."""
    file = io.BytesIO()
    try:
        _Pickler(file, what).dump(value)
    except TypeError as error:
        if str(error).startswith(what):
            raise
        raise TypeError(f"{what} cannot be sent to another process: {error}.") from error
    except pickle.PicklingError as error:
        raise TypeError(f"{what} cannot be sent to another process: {error}.") from error
    return file.getvalue()


unpacked: Callable[[bytes], Any] = pickle.loads


def packed_error(error: BaseException, skip: int) -> bytes:
    """Return an error with its traceback as text. `skip`: the first frames that are not the user's."""
    trace = error.__traceback__
    for _ in range(skip):
        trace = trace and trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    try:
        whole = packed(error, "the error")
        unpacked(whole)  # an error whose class takes other arguments cannot be made again
    except Exception:
        whole = b""
    return pickle.dumps((whole, f"{type(error).__name__}: {error}", text))


def unpacked_error(data: bytes, who: str) -> BaseException:
    """Return the error, with a note of where it was raised; a `RuntimeError` where its class cannot be had here."""
    whole, said, text = pickle.loads(data)
    try:
        error: BaseException = unpacked(whole) if whole else RuntimeError(said)
    except Exception:
        error = RuntimeError(said)
    note = f"Raised by {who}:\n{text}"
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):  # before Python 3.11
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
    return error
