"""The load-balance loss that transformers' models add to theirs (`output_router_logits`), on the global batch.

It is a product of means over tokens, so that the mean over ranks of what each finds for its own tokens is another
number. Here every rank gets the routers' logits of all, and finds the same loss.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from torch import nn

from ..collectives import all_gather
from ..comm.mesh import Mesh


def of_whole_batch(model: nn.Module, mesh: Mesh) -> None:
    """Let the part of a model that has the layers return the routers' logits of the tokens of all ranks.

    Models whose head adds no such loss are left as they are.
    """
    base: Any = getattr(model, "base_model", model)
    if base is model or not hasattr(model, "router_aux_loss_coef") or mesh.batch.size == 1:
        return
    axis, forward, name = mesh.batch, base.forward, type(model).__name__
    _record_from_now_on(base)

    @functools.wraps(forward)
    def run(*args: Any, **inputs: Any) -> Any:
        out = forward(*args, **inputs)
        logits = getattr(out, "router_logits", None)
        if logits is None:
            return out
        if inputs.get("attention_mask") is not None:
            raise ValueError(
                f"moe.experts: with output_router_logits, the load-balance loss of {name} weighs tokens of all ranks "
                "by attention_mask, but this rank has the mask of its own rows only. Leave attention_mask out: with a "
                "causal mask, padding at the end needs no mask."
            )
        out.router_logits = tuple(all_gather(x, axis) for x in logits)
        return out

    base.forward = run


def _record_from_now_on(base: Any) -> None:
    """Let transformers add its hooks now, and not in the first call: a captured step writes nothing."""
    with contextlib.suppress(ImportError):  # before 5.0 it had none
        from transformers.utils.output_capturing import maybe_install_capturing_hooks

        maybe_install_capturing_hooks(base)
