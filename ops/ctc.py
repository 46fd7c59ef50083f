"""CTC loss of lengths that only a running step knows.

ATen's operation keeps a table for its backward pass, [rows, time, 2 * longest target + 1], whose size depends on the
lengths' values. This one pads the table to the widest that the targets' shape allows, and its backward pass cuts it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registry import OnShard, Traits, define

aten = torch.ops.aten


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (losses [rows], the padded table). The arguments and the losses are those of `aten::_ctc_loss`."""
    given = targets, input_lengths, target_lengths
    losses, table = aten._ctc_loss.Tensor(log_probs, *given, blank, zero_infinity)
    missing = _width(targets) - table.shape[-1]
    return losses, torch.nn.functional.pad(table, (0, missing)) if missing else table


def ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    losses: Tensor,
    table: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> Tensor:
    """Return the derivative by `log_probs`, as `aten::_ctc_loss_backward` does."""
    given = targets, input_lengths, target_lengths
    cut = table[..., : 2 * int(target_lengths.max()) + 1].contiguous()
    result: Tensor = aten._ctc_loss_backward.Tensor(grad, log_probs, *given, losses, cut, blank, zero_infinity)
    return result


def _width(targets: Tensor) -> int:
    """Return the width of the table for the longest target: one row's of [rows, length], or all in one dim."""
    return 2 * targets.shape[-1] + 1


def _fake(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    time, rows = log_probs.shape[:2]
    return log_probs.new_empty(rows), log_probs.new_empty(rows, time, _width(targets))


_LENGTHS = "Tensor input_lengths, Tensor target_lengths"
define(
    f"ctc_loss(Tensor log_probs, Tensor targets, {_LENGTHS}, int blank=0, bool zero_infinity=False) -> "
    "(Tensor, Tensor)",
    ctc_loss,
    _fake,
    traits=Traits(OnShard.REFUSED),
    replaces=aten._ctc_loss.Tensor,
)
define(
    f"ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, {_LENGTHS}, Tensor losses, Tensor table, "
    "int blank, bool zero_infinity=False) -> Tensor",
    ctc_loss_backward,
    lambda grad, log_probs, *_: log_probs.new_empty(log_probs.shape),
    traits=Traits(OnShard.REFUSED),
    replaces=aten._ctc_loss_backward.Tensor,
)
