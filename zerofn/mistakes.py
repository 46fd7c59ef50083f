"""What other libraries say of common mistakes in a step -> what to write instead."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from . import tree
from .errors import note
from .sharding import is_sharded

_DTYPES = re.compile(r"to have the same dtype|must have the same dtype|expected scalar type|should be the same")


def note_dtypes(error: BaseException, state: Any, batch: Any) -> None:
    """Where dtypes met that do not fit: which one the parameters are computed in, and what of the batch is not."""
    if not _DTYPES.search(str(error)):
        return
    sharded = [x for x in tree.leaves(state, is_leaf=is_sharded) if is_sharded(x)]
    dtypes = {x.spec.precision.computes(u.dtype) for x in sharded for u in x.layout.units if u.dtype.is_floating_point}
    if len(dtypes) != 1:
        return
    (dtype,) = dtypes
    paths, leaves, _ = tree.flatten_with_path(batch, is_leaf=is_sharded)
    odd = [f"{tree.name_of(p)!r} ({_name(x.dtype)})" for p, x in zip(paths, leaves, strict=True)
           if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != dtype]
    if odd:
        note(error, f"parameters are computed in {_name(dtype)}; cast floating inputs of the batch to it, here "
                    f"{', '.join(odd[:4])}: batch[...].to({dtype}).")


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
