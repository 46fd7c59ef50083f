"""A loader's `state_dict()` as JSON: nothing is pickled, so nothing that is read can run."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import torch

from ..util.errors import CheckpointError
from .tensor_file import CODES, DTYPES, MALFORMED, as_bytes

_KINDS = ("array", "bytes", "dict", "tensor", "tuple")


def dumps(value: Any, what: str) -> str:
    """Return the JSON of nested dicts, lists and tuples of numbers, strings, bytes, tensors and arrays.

    Raises `TypeError`, with the place in `what`, for anything else.
    """
    return json.dumps(_plain(value, what))


def loads(text: str, what: str) -> Any:
    """Return what `dumps` was given. Raises `CheckpointError` for a text of something else."""
    try:
        return _value(json.loads(text))
    except MALFORMED as error:
        raise CheckpointError(f"{what} cannot be read: {type(error).__name__}: {error}.") from error


def _plain(x: Any, at: str) -> Any:
    if x is None or type(x) in (bool, int, float, str):
        return x
    if isinstance(x, list):
        return [_plain(v, f"{at}[{k}]") for k, v in enumerate(x)]
    if isinstance(x, tuple):
        return {"tuple": [_plain(v, f"{at}[{k}]") for k, v in enumerate(x)]}
    if isinstance(x, dict):
        return {"dict": [[_plain(k, at), _plain(v, f"{at}[{k!r}]")] for k, v in x.items()]}
    if isinstance(x, bytes):
        return {"bytes": base64.b64encode(x).decode()}
    if isinstance(x, torch.Tensor) and x.dtype in CODES:
        return {"tensor": [CODES[x.dtype], list(x.shape), base64.b64encode(as_bytes(x.reshape(-1))).decode()]}
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "biufc":
        flat = np.ascontiguousarray(x)
        return {"array": [flat.dtype.str, list(np.shape(x)), base64.b64encode(flat.tobytes()).decode()]}
    raise TypeError(
        f"{at} is a {type(x).__name__}, which cannot be saved with a state. state_dict() may return dicts, lists, "
        "tuples, numbers, strings, bytes, tensors and arrays of numbers."
    )


def _value(x: Any) -> Any:
    if isinstance(x, list):
        return [_value(v) for v in x]
    if not isinstance(x, dict):
        return x
    (kind, inner), *more = x.items()
    if more or kind not in _KINDS:
        raise ValueError(f"an object must have one of the keys {', '.join(_KINDS)}, got {list(x)}")
    if kind == "tuple":
        return tuple(map(_value, inner))
    if kind == "dict":
        return {_value(k): _value(v) for k, v in inner}
    if kind == "bytes":
        return base64.b64decode(inner, validate=True)
    dtype, shape, data = inner[0], inner[1], bytearray(base64.b64decode(inner[2], validate=True))
    if kind == "array":
        found = np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)
        return found if shape else found[()]
    flat = torch.frombuffer(data, dtype=DTYPES[dtype]) if data else torch.empty(0, dtype=DTYPES[dtype])
    return flat.reshape(shape)
