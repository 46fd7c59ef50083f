"""Rows of signs, as ranks send them: a bit an element, and a mean magnitude for each block (`csrc/wire.h`).

On the CPU the library encodes, decodes, adds and mixes in one pass over memory. Elsewhere the operations of
`wire_codes` do it one after the other, with the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cuda, native, wire_codes
from .kernel_args import GRADIENTS, check_tensor
from .wire_codes import Codes, on_cpu, on_gpu

_ALIGNED = 16  # bytes: every row begins at a multiple
_ROWS = 4  # zf_number of rows that are added up


def row_bytes(size: int, block: int) -> int:
    """Return the bytes of a row of this number of elements.

    >>> row_bytes(4096, 2048)
    528
    """
    return -(-(size // 8 + size // block * 2) // _ALIGNED) * _ALIGNED


class Signs(NamedTuple):
    """Elements as rows of signs. `rows`: uint8 [num, `row_bytes`]; a row has the codes of its blocks, then their
    scales, bfloat16. `size`: elements of a row. `gaps`: a, b, a, b, .., in order: elements [a, b) of all that are in no
    leaf. They count in no scale, and arrive as zeros.
    """

    rows: Tensor
    size: int
    block: int
    gaps: Sequence[int] = ()

    @property
    def numel(self) -> int:
        """The number of elements."""
        return len(self.rows) * self.size

    def check(self, what: str, numel: int, device: torch.device) -> None:
        """Raise `TypeError` or `ValueError` unless these can be the signs of this number of elements."""
        if self.block not in wire_codes.BLOCKS or self.size % self.block or self.numel != numel:
            raise ValueError(
                f"{what}: {len(self.rows)} rows of {self.size} elements, in blocks of {self.block}, for {numel} "
                f"elements; a block of {', '.join(map(str, wire_codes.BLOCKS))} elements divides a row."
            )
        size = len(self.rows) * row_bytes(self.size, self.block)
        check_tensor(f"{what}: rows", self.rows, (torch.uint8,), size, device)

    def like(self, rows: Tensor) -> Signs:
        """Other rows of the same kind."""
        return self._replace(rows=rows)

    def codes(self) -> list[Codes]:
        """The codes of each row."""
        num, end = self.size // 8, self.size // 8 + self.size // self.block * 2
        return [Codes(row[:num], row[num:end].view(torch.bfloat16), "sign", self.block) for row in self.rows]

    def clear(self, x: Tensor) -> None:
        """Write zeros to the gaps of elements."""
        for a, b in _pairs(self.gaps):
            x[a:b].zero_()

    def filled(self) -> dict[int, int]:
        """How many elements of a block are in no gap, of those blocks that gaps fill in part."""
        left: dict[int, int] = {}
        for a, b in _pairs(self.gaps):
            for k in range(a // self.block, -(-b // self.block)):
                inside = min(b, (k + 1) * self.block) - max(a, k * self.block)
                left[k] = left.get(k, self.block) - inside
        return {k: n for k, n in left.items() if 0 < n < self.block}


def encode(x: Tensor, out: Signs) -> None:
    """fp32 [size] -> the rows of `out`."""
    check_tensor("signs: x", x, (torch.float32,), out.numel, x.device)
    out.check("signs", out.numel, x.device)
    if on_cpu(x):
        how, function = _how(out), native.kernel("sign_encode")
        to = (x.data_ptr(), out.rows.data_ptr(), ctypes.byref(how))
        native.in_parts(out.numel, lambda a, b: function(*to, a // out.block, b // out.block), out.block)
        return
    if parts := out.filled():  # means are of what is there
        x = x.clone()
        for k, num in parts.items():
            x[k * out.block : (k + 1) * out.block] *= out.block / num
    for codes, row in zip(out.codes(), x.view(-1, out.size), strict=True):
        wire_codes.encode(row, codes)


def decode(given: Signs, out: Tensor) -> None:
    """Rows -> fp32 [size]."""
    check_tensor("signs: out", out, (torch.float32,), given.numel, out.device)
    given.check("signs", given.numel, out.device)
    if on_cpu(out):
        how, function = _how(given), native.kernel("sign_decode")
        to = (given.rows.data_ptr(), ctypes.byref(how), out.data_ptr())
        native.in_parts(given.numel, lambda a, b: function(*to, a // given.block, b // given.block), given.block)
        return
    for codes, row in zip(given.codes(), out.view(-1, given.size), strict=True):
        wire_codes.decode(codes, row)
    given.clear(out)


class Mix(NamedTuple):
    """The factors of what `mix` adds up."""

    by: float
    of_signs: float
    of_rest: float


def mix(
    added: Tensor | Signs,
    before: Tensor | Signs,
    left: Tensor,
    how: Mix,
    sent: Signs,
    rest: Tensor,
    finite: Tensor | None = None,
) -> None:
    """Write x as signs to `sent`, and what these lack of x to `rest`, fp32 [size]; it may be `left`. Where `finite`, a
    bool scalar, is False, `left` goes to `rest`, and what is sent is of no use.

    x = added * by + ((s * of_signs + (before - s) * of_rest) + left), where s is `before` as signs; in gaps it is zero.
    `added`: fp32, bf16 or fp16 [size], or the sum of rows, which are those of several ranks, in float32 and in their
    order. `before`: fp32 [size], or rows like those of `sent`. `left`: fp32 [size].
    """
    numel, device = sent.numel, left.device
    sent.check("signs: sent", numel, device)
    for what, x in (("left", left), ("rest", rest), ("before", before)):
        if isinstance(x, Tensor):
            check_tensor(f"signs: {what}", x, (torch.float32,), numel, device)
    if isinstance(added, Tensor):
        check_tensor("signs: added", added, GRADIENTS, numel, device)
    for x in (added, before):
        if isinstance(x, Signs):
            x.check("signs: rows", len(x.rows) * x.size, device)
    if finite is not None and finite.device.type == "cpu":
        if not finite:
            sent.rows.zero_()
            rest.copy_(left)
            return
        finite = None
    if on_cpu(left):
        _mix(added, before, left, how, sent, rest)
        return
    if on_gpu(left):
        _mix_on_gpu(added, before, left, how, sent, rest, finite)
        return
    was, total = before if isinstance(before, Tensor) else decoded(before), _total(added, sent)
    signs = _rounded(was, sent)
    x = total * how.by + ((signs * how.of_signs + (was - signs) * how.of_rest) + left)
    sent.clear(x)
    encode(x, sent)
    found = x - decoded(sent)
    rest.copy_(found if finite is None else torch.where(finite, found, left))


def _given(added: Tensor | Signs) -> tuple[Tensor, int, int]:
    """What is added, its zf_number, and how many rows."""
    if isinstance(added, Signs):
        return added.rows, _ROWS, len(added.rows)
    return added, GRADIENTS.index(added.dtype), 0


def _was(before: Tensor | Signs) -> tuple[Tensor, bool]:
    """What was before, and whether it came in rows."""
    return (before.rows, True) if isinstance(before, Signs) else (before, False)


def _total(added: Tensor | Signs, like: Signs) -> Tensor:
    if isinstance(added, Tensor):
        return added.float()
    total, *others = (decoded(like.like(row[None])) for row in added.rows)
    for x in others:
        total = total + x
    return total


def decoded(given: Signs) -> Tensor:
    """Rows -> fp32 [size], in new memory."""
    out = torch.empty(given.numel, device=given.rows.device)
    decode(given, out)
    return out


def _rounded(x: Tensor, like: Signs) -> Tensor:
    held = like.like(torch.empty_like(like.rows))
    encode(x, held)
    return decoded(held)


def _pairs(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(ends[::2], ends[1::2], strict=True))


# --- the library -------------------------------------------------------------------------------


class _Rows(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("bytes", "blocks", "block")]
    _fields_ += [("gaps", ctypes.POINTER(ctypes.c_int64)), ("num_gaps", ctypes.c_int64)]


class _Mix(ctypes.Structure):
    _fields_ = [
        ("rows", _Rows),
        ("added_number", ctypes.c_int32),
        ("before_came", ctypes.c_int32),
        ("added", ctypes.c_void_p),
        ("num_added", ctypes.c_int64),
        ("before", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("rest", ctypes.c_void_p),
        ("sent", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in Mix._fields),
    ]


def _how(given: Signs) -> _Rows:
    gaps = (ctypes.c_int64 * len(given.gaps))(*given.gaps)
    num = given.size // given.block
    return _Rows(row_bytes(given.size, given.block), num, given.block, gaps, len(given.gaps) // 2)


def _mix(added: Tensor | Signs, before: Tensor | Signs, left: Tensor, how: Mix, sent: Signs, rest: Tensor) -> None:
    (given, *number), (was, came) = _given(added), _was(before)
    a = _Mix(_how(sent), number[0], came, given.data_ptr(), number[1], was.data_ptr(), **how._asdict())
    a.left, a.rest, a.sent = left.data_ptr(), rest.data_ptr(), sent.rows.data_ptr()
    function, block = native.kernel("sign_mix"), sent.block
    native.in_parts(sent.numel, lambda x, y: function(ctypes.byref(a), x // block, y // block), block)


def decoding_update(update: Any, given: Signs) -> Callable[[int, int], None]:
    """Return what decodes elements [a, b), whole blocks, to the place of the gradient of an update of `cpu`, and
    updates them.
    """
    how, function, rows = _how(given), native.kernel("update_signs"), given.rows.data_ptr()
    to = (ctypes.byref(update), rows, ctypes.byref(how))
    return lambda a, b: function(*to, a // given.block, b // given.block)


# --- the GPU -----------------------------------------------------------------------------------


def _mix_on_gpu(
    added: Tensor | Signs,
    before: Tensor | Signs,
    left: Tensor,
    how: Mix,
    sent: Signs,
    rest: Tensor,
    finite: Tensor | None,
) -> None:
    given, was = _given(added), _was(before)
    rows = (row_bytes(sent.size, sent.block), sent.size // sent.block, sent.block)
    gaps = (cuda.table_of(left.device, tuple(sent.gaps)), len(sent.gaps) // 2)
    num = sent.numel // sent.block
    cuda.launch("sign_mix", left.device, num, *given, *was, left, rest, sent.rows, finite, num, *rows, *gaps, *how)
