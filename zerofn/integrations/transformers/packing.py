"""Documents packed into one row, as transformers' `DataCollatorWithFlattening` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_OF_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def packed_by_positions(inputs: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return inputs whose documents are said by `position_ids` alone, for a model whose attention is not flash
    attention's, which alone reads where they begin: a row without positions gets them. The longest document's length is
    a number of each batch's own, with which a step would be captured anew.
    """
    found = dict(inputs)
    ends, tokens = found.get("cu_seq_lens_q"), found.get("input_ids")
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not isinstance(ends, Tensor) or not isinstance(tokens, Tensor) or "flash" in str(kind):
        return found
    if len(tokens) != 1:
        raise ValueError(
            "Trainer: cu_seq_lens_q has the positions of documents in a single row, but input_ids is "
            f"{list(tokens.shape)}. Pass position_ids that start again with each document instead."
        )
    if "position_ids" not in found:
        place = torch.arange(tokens.shape[1], device=ends.device, dtype=ends.dtype)
        last = torch.searchsorted(ends, place, right=True) - 1
        found["position_ids"] = (place - ends[last]).long()[None]
    return {name: x for name, x in found.items() if name not in _OF_FLASH}
