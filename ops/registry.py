"""How an operation becomes one node of a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_lib = torch.library.Library("zerofn", "FRAGMENT")

implementations: dict[str, Callable[..., Any]] = {}  # by name, for an executor that needs no dispatcher


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register `zerofn::schema` with one implementation for every device, and one for fake tensors.

    No autograd formula: the operations run below autograd or under `no_grad`.
    """
    name = schema.split("(")[0]
    implementations[name] = run
    _lib.define(schema)
    _lib.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zerofn::{name}", fake, lib=_lib)
