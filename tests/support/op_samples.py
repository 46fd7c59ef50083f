"""Samples of torch's operations, from its own database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

OPERATIONS = [info for info in op_db if torch.float32 in info.dtypes]


def samples(info: Any, requires_grad: bool = False) -> Iterator[Any]:
    """Arguments of an operation, in float32.

    Not by `info.sample_inputs`: that reads its callers' sources, which takes minutes below pytest and beside many
    imported modules.
    """
    torch.manual_seed(0)
    return iter(info.sample_inputs_func(info, "cpu", torch.float32, requires_grad))
