"""What is made of signs between transfers, each in one pass over memory: `zerofn::sign_send` and `zerofn::sign_sum`,
which have forms that write over what was left out before; `zerofn::sign_codes` and `zerofn::sign_values`.

`block`, `gaps`: see `sign_rows.Signs`. `finite`: None or the finite check, a bool scalar. Where it is False, what was
left out stays, and what is sent is of no use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import sign_rows
from .registry import OnShard, Traits, define
from .sign_rows import Mix, Signs, row_bytes


def sign_codes(x: Tensor, block: int, gaps: Sequence[int]) -> Tensor:
    """fp32 [size] -> its row of signs, uint8 [bytes]."""
    signs = _rows(x, 1, block, gaps)
    sign_rows.encode(x, signs)
    return signs.rows.view(-1)


def sign_values(rows: Tensor, num: int, row: int, block: int, gaps: Sequence[int]) -> Tensor:
    """`num` rows of signs, of `row` elements each -> fp32 [num * row]."""
    return sign_rows.decoded(Signs(rows.view(num, -1), row, block, gaps))


def sign_send(
    left: Tensor,
    added: Tensor,
    before: Tensor,
    finite: Tensor | None,
    by: float,
    of_signs: float,
    num: int,
    block: int,
    gaps: Sequence[int],
    rest: Tensor,
) -> Tensor:
    """Return x as `num` rows of signs, uint8 [num, bytes], where x = added * by + s * of_signs + left, and s is
    `before` as signs. What signs leave out of it goes to `rest`, which may be `left`.

    `added`: fp32, bf16 or fp16 [size]. `before`: fp32 [size], or rows like the result's. `left`: fp32 [size].
    """
    sent = _rows(left, num, block, gaps)
    was = sent.like(before.view(num, -1)) if before.dtype is torch.uint8 else before
    sign_rows.mix(added, was, left, Mix(by, of_signs, 0.0), sent, rest, finite)
    return sent.rows


def sign_sum(
    left: Tensor,
    rows: Tensor,
    before: Tensor,
    finite: Tensor | None,
    of_rest: float,
    start: int,
    block: int,
    gaps: Sequence[int],
    rest: Tensor,
) -> Tensor:
    """Return x as a row of signs, uint8 [bytes], where x = sum of `rows` + (before - s) * of_rest + left, and s is
    `before` as signs. What signs leave out of it goes to `rest`, which may be `left`.

    `rows`: uint8 [num, bytes], one of each rank. `before`: fp32, from element `start` on. `left`: fp32 [size].
    """
    sent = _rows(left, 1, block, gaps)
    was = before[start : start + left.numel()]
    sign_rows.mix(sent.like(rows), was, left, Mix(1.0, 0.0, of_rest), sent, rest, finite)
    return sent.rows.view(-1)


def _rows(x: Tensor, num: int, block: int, gaps: Sequence[int]) -> Signs:
    return Signs(_empty(x, num, block), x.numel() // num, block, gaps)


def _empty(x: Tensor, num: int, block: int) -> Tensor:
    return x.new_empty(num, row_bytes(x.numel() // num, block), dtype=torch.uint8)


def _define(name: str, run: Callable[..., Tensor], given: str, fake: Callable[..., Tensor]) -> None:
    """Register both forms of `run(left, *given, rest)`, which write to `left`, and to new memory."""

    def pure(left: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        fresh = torch.empty_like(left)
        found = run(left, *rest, fresh)
        return fresh, found

    def in_place(left: Tensor, *rest: Any) -> Tensor:
        return run(left, *rest, left)

    traits = Traits(OnShard.KEEPS)
    define(f"{name}_(Tensor(a!) left, {given}) -> Tensor", in_place, fake, traits=traits)
    define(
        f"{name}(Tensor left, {given}) -> (Tensor, Tensor)",
        pure,
        lambda left, *rest: (torch.empty_like(left), fake(left, *rest)),
        traits=traits,
    )


define(
    "sign_codes(Tensor x, int block, int[] gaps) -> Tensor",
    sign_codes,
    lambda x, block, gaps: _empty(x, 1, block).view(-1),
    traits=Traits(OnShard.KEEPS),
)
define(
    "sign_values(Tensor rows, int num, int row, int block, int[] gaps) -> Tensor",
    sign_values,
    lambda rows, num, row, block, gaps: rows.new_empty(num * row, dtype=torch.float32),
    traits=Traits(OnShard.KEEPS),
)
_define(
    "sign_send",
    sign_send,
    "Tensor added, Tensor before, Tensor? finite, float by, float of_signs, int num, int block, int[] gaps",
    lambda left, added, before, finite, by, of_signs, num, block, gaps: _empty(left, num, block),
)
_define(
    "sign_sum",
    sign_sum,
    "Tensor rows, Tensor before, Tensor? finite, float of_rest, int start, int block, int[] gaps",
    lambda left, rows, before, finite, of_rest, start, block, gaps: _empty(left, 1, block).view(-1),
)
