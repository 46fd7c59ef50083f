"""`compile(deterministic=True)`: bits on devices that do not depend on how the kernels of a run happen to be ordered.

On the host all this holds anyway: sums over ranks are taken in rank order, and torch's kernels repeat their results.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .._torch_compat import repeatable_cudnn
from ..comm.transport import Sums
from ..sharding.sharded import is_sharded
from ..util.process import the

WORKSPACES = (":4096:8", ":16:8")  # of cuBLAS, with which its sums repeat


@contextlib.contextmanager
def repeatable(devices: Sequence[torch.device]) -> Iterator[None]:
    """Inside, sums over ranks are in rank order, and torch takes kernels that repeat their results, for attention, too,
    or raises `RuntimeError` for an operation that has none. `devices`: of the state; if all is on the host, do nothing.

    Raises `ValueError` if cuBLAS was not told to repeat its sums.
    """
    if all(map(_is_host, devices)):
        yield
        return
    if any(x.type == "cuda" for x in devices) and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in WORKSPACES:
        raise ValueError(
            "compile(deterministic=True): cuBLAS returns the same bits in each run only if "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 is in the environment before its first use. Set this variable when you "
            "start the script."
        )
    sums, fill = the(Sums), cast(Any, torch.utils.deterministic)
    before, filled = sums.in_rank_order, fill.fill_uninitialized_memory
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    sums.in_rank_order, fill.fill_uninitialized_memory = True, False
    torch.use_deterministic_algorithms(True)
    try:
        with repeatable_cudnn():
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        sums.in_rank_order, fill.fill_uninitialized_memory = before, filled


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def arithmetic(deterministic: bool, state_leaves: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Return what a step is captured and runs in. `state_leaves`: of which devices are told."""
    if not deterministic:
        return contextlib.nullcontext()
    return repeatable([x.device for x in state_leaves if isinstance(x, Tensor) or is_sharded(x)])
