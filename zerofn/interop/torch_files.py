"""What files of torch.save hold, looked at before it is used: their size before they are read, then every value's kind.

A shape of values is written as a type, or several; `Each(shape)` for lists; `Named(shape)` and `Numbered(shape)` for
dicts by texts or whole numbers; a dict for one of these fields, of which those that end in "?" may be None or missing.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

import zerofn

_MOST = (1 << 63) - 1


class Each(NamedTuple):
    """A list or tuple of values of one shape."""

    of: Any


class Named(NamedTuple):
    """A dict of values of one shape, by texts."""

    of: Any


class Numbered(NamedTuple):
    """A dict of values of one shape, by whole numbers."""

    of: Any


class Count:
    """A whole number of 0 or more, of 64 bits."""


class FlatTensor:
    """A tensor of one dim, in memory."""


def check_size(opened: IO[bytes], nbytes: int, what: str) -> None:
    """Raise `zerofn.CheckpointError`, which begins with `what`, unless the `nbytes` bytes are a file of torch.save.

    That is a zip archive without compression, so what is read of it needs no more memory than the file has bytes.
    """
    try:
        with zipfile.ZipFile(opened) as archive:
            records = archive.infolist()
    except Exception as error:  # of which zipfile has many
        raise zerofn.CheckpointError(f"{what} is damaged, or was not written by torch.save: {error}") from error
    packed = next((x for x in records if x.compress_type != zipfile.ZIP_STORED or x.compress_size != x.file_size), None)
    if packed is not None:
        raise zerofn.CheckpointError(
            f"{what} is not read: its entry {packed.filename!r} is compressed, {packed.compress_size:,} bytes for "
            f"{packed.file_size:,}, but torch.save compresses nothing. Save it again with torch.save."
        )
    if sum(x.file_size for x in records) > nbytes:
        raise zerofn.CheckpointError(
            f"{what} is not read: its records claim {sum(x.file_size for x in records):,} bytes, but the file has "
            f"{nbytes:,}."
        )


def check_file(file: Path, what: str) -> None:
    """Do so for a whole file, which must be one: a named pipe would be waited for."""
    if not file.is_file():
        raise zerofn.CheckpointError(f"{what}: {file} does not exist, or is not a file. Copy it again.")
    with file.open("rb") as opened:
        check_size(opened, file.stat().st_size, f"{what}: {file}")


def check_values(value: Any, shape: Any, what: str, at: str = "") -> None:
    """Raise `zerofn.CheckpointError`, which begins with `what` and says where, unless a value has this shape."""
    if isinstance(shape, Each):
        _check(isinstance(value, list | tuple), "a list", value, what, at)
        for k, x in enumerate(value):
            check_values(x, shape.of, what, f"{at}[{k}]")
    elif isinstance(shape, Named | Numbered):
        key, kind = ("a string", str) if isinstance(shape, Named) else ("a whole number", int)
        _check(isinstance(value, Mapping), "a dict", value, what, at)
        for name, x in value.items():
            _check(isinstance(name, kind), f"{key} as a key", name, what, at)
            check_values(x, shape.of, what, f"{at}[{name!r}]")
    elif isinstance(shape, dict):
        _check(isinstance(value, Mapping), "a dict", value, what, at)
        for name, inner in shape.items():
            key = name.removesuffix("?")
            if value.get(key) is not None:
                check_values(value[key], inner, what, f"{at}.{key}" if at else key)
            elif key == name:
                raise zerofn.CheckpointError(f"{what}: {at or 'the file'} has no {key!r}.")
    elif shape is Count:
        is_one = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST
        _check(is_one, "a whole number of 0 or more", value, what, at)
    elif shape is FlatTensor:
        is_one = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta and value.ndim == 1
        _check(is_one, "a tensor of one dim", value, what, at)
    else:
        kinds = shape if isinstance(shape, tuple) else (shape,)
        _check(isinstance(value, kinds), " or ".join(f"a {x.__name__}" for x in kinds), value, what, at)


def _check(good: bool, expected: str, value: Any, what: str, at: str) -> None:
    if not good:
        got = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
        got = got if len(got) <= 80 else f"{got[:77]}..."
        raise zerofn.CheckpointError(f"{what}: {at or 'the file'}: expected {expected}, got {got}.")
