"""What a rank sends as signs, and what these lack of it: one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import wire_codes
from ..ops.registry import OnShard, Traits, define
from ..ops.wire_codes import Mix
from .block_wire import BlockWire, block_wire


def sign_mix(
    added: Tensor, before: Tensor, left: Tensor, by: float, of_signs: float, of_rest: float, codec: str, start: int = 0
) -> tuple[Tensor, Tensor]:
    """Return (x as it arrives, what that lacks of x), fp32 [size], where x is the sum of what `ops.wire_codes.mix`
    says. `codec`: signs of the whole unit; `start`: from which element of it on these are.
    """
    how, mix = block_wire(codec), Mix(by, of_signs, of_rest)
    sent, rest = wire_codes.mix(added, before, left, mix, how.block)
    for a, b in how.cut_by_gaps(start, start + len(before)):
        here = slice(a - start, b - start)
        sent[here], rest[here] = _operations(how, a, added[here], before[here], left[here], mix)
    return sent, rest


def _operations(
    how: BlockWire, first: int, added: Tensor, before: Tensor, left: Tensor, mix: Mix
) -> tuple[Tensor, Tensor]:
    """The same for blocks from element `first` on, whose gaps count in no scale."""
    x = wire_codes.mixed(added, before, how.rounded(before, first), left, mix)
    sent = how.rounded(x, first)
    return sent, x - sent


define(
    "sign_mix(Tensor added, Tensor before, Tensor left, float by, float of_signs, float of_rest, str codec, "
    "int start=0) -> (Tensor, Tensor)",
    sign_mix,
    lambda added, before, left, *how: (torch.empty_like(before), torch.empty_like(before)),
    traits=Traits(OnShard.KEEPS),
)
