"""Masks of attention, recognised by their values while a step is captured: before torch chooses a kernel.

A mask takes the choice away from kernels that know of none, costs the half of the work that a triangle leaves out, and
is saved for the backward pass. Most masks follow from sizes alone, or are a triangle and the padding of each row: then
`torch.nn.functional.scaled_dot_product_attention` is called with what they stand for. On the CPU that gives the bits
of the mask. On CUDA other kernels are taken, so what is dropped there stays with the mask.

| mask | CPU | CUDA |
|---|---|---|
| hides nothing | none | none |
| triangle | `is_causal` | `is_causal` |
| triangle and padding | `is_causal`, and the padding [B, 1, 1, L] | the same, by the memory-efficient kernel |
| padding | the padding [B, 1, 1, L] | the same |
| window, up to a token itself | `is_causal`, and one mask [1, 1, L, L] | flash attention's window |
| within the triangle | `is_causal`, and the mask | as it is |
| the same for all rows | one mask [1, 1, L, L] | the same |
| documents, padding, and all but plain triangles, of long rows | see `sparse_masks` | as above |

Both operations of CUDA's have run by themselves on an H200 with torch 2.11, in bfloat16: outputs and gradients are
those of the mask. That a step calls them has been seen on fake tensors alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from .._torch_compat import FakeTensor, fused_attention, plain_dispatch
from ..sparse.patterns import booleans_of
from ..sparse.use import in_use
from ..util.patches import Patches
from . import known_values, sparse_masks
from .known_values import Values, looked_at_once
from .sparse_masks import is_conjunction, tensor_of

aten = torch.ops.aten
_ALIGNED = 16  # elements: rows of a bias begin at multiples, for kernels of CUDA


class Shape(NamedTuple):
    """What pairs of tokens a mask [..., Lq, Lk] allows, the same in all rows.

    `triangle`: no token looks at one behind it. `full`: all pairs are allowed, of the triangle if there is one.
    `window`: how many tokens each token attends to, itself and those before it; 0 for another mask.
    """

    triangle: bool
    full: bool
    window: int = 0


class _Mask(NamedTuple):
    """A mask: the pairs of `shape` without those that `keys` [B, 1, 1, Lk] hide. `rows`: it hides others, too. `made`:
    the tensors that stand for it in a trace, made for its first layer.
    """

    shape: Shape
    made: dict[torch.dtype, Tensor]
    keys: tuple[Node, ...] = ()
    rows: bool = False

    @property
    def is_shape(self) -> bool:
        """Whether it allows all pairs, or all of a triangle."""
        return self.shape.full and not self.keys and not self.rows

    def least(self, mask: Tensor) -> Tensor:
        """Return the mask, or a smaller one in its place."""

        def make() -> Tensor:
            if self.keys:
                return functools.reduce(torch.logical_and, map(tensor_of, self.keys))
            several = not self.rows and mask.dim() == 4 and mask.shape[:2] != (1, 1)
            return mask.narrow(0, 0, 1).narrow(1, 0, 1) if several else mask

        return self._once(torch.bool, make)

    def added(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Return it as torch adds it to scores of a dtype."""
        least = self.least(mask)
        if least.dtype != torch.bool:
            return least
        return self._once(dtype, lambda: torch.where(least, 0.0, float("-inf")).to(dtype))

    def _once(self, key: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
        made = self.made[key] if key in self.made else make()
        if type(made) is FakeTensor:  # no transform of functions has wrapped it
            self.made[key] = made
        return made


def shape_of(mask: Tensor) -> Shape | None:
    """Return the shape of a mask by its value: booleans, or numbers to add, 0 where a pair is allowed and the least or
    -inf where not; None if rows differ, or other numbers are added.
    """
    found = booleans_of(mask)
    if found is None:
        return None
    mask = found
    while mask.dim() > 2:
        if mask.stride(0) and not torch.equal(mask[1:], mask[:1].expand_as(mask[1:])):
            return None
        mask = mask[0]
    if bool(mask.all()):
        return Shape(triangle=False, full=True)
    num_queries, num_keys = mask.shape
    if num_queries != num_keys or bool(mask.triu(1).any()):
        return Shape(triangle=False, full=False)
    window = int(mask[-1].sum())
    windowed = window > 0 and torch.equal(mask, torch.ones_like(mask).tril_().triu_(1 - window))
    return Shape(True, windowed and window == num_queries, window if windowed else 0)


def shape_known(mask: Tensor) -> Shape | None:
    """Return the shape of a mask that is a real tensor, or has a value in a trace; None of others."""
    if type(mask) is FakeTensor:
        found = _found(mask)
        return None if found is None or found.keys or found.rows else found.shape
    with plain_dispatch():
        return shape_of(mask.detach().cpu())


def _found(mask: Tensor) -> _Mask | None:
    """Return what is known of a traced mask; None if that does not help."""
    return looked_at_once(mask, "_zerofn_masks", _look)


def _look(values: Values, node: Node) -> _Mask | None:
    sizes = node.meta["val"].shape[-2:]
    if math.prod(sizes) > known_values.MOST:
        return None
    while node.target is aten.expand.default and not values.is_written(node):
        node = node.args[0]  # type: ignore[assignment]
    value = values.of(node)
    if value is not None:
        shape = shape_of(_spread(value, sizes))
        return None if shape is None else _Mask(shape, {})
    factors = _factors(node)
    known = [x for x in map(values.of, factors) if x is not None]
    rest = [x for x in factors if values.of(x) is None]
    if any(values.is_written(x) or x.meta["val"].dtype != torch.bool for x in (node, *rest)):
        return None
    shape = shape_of(_spread(functools.reduce(torch.logical_and, known, torch.ones((), dtype=torch.bool)), sizes))
    if shape is None:
        return None
    if shape.full and all(x.meta["val"].dim() == 4 and x.meta["val"].shape[2:] == (1, sizes[1]) for x in rest):
        return _Mask(shape, {}, tuple(rest))
    return _Mask(shape, {}, rows=True) if shape.triangle else None


def _factors(node: Node) -> list[Node]:
    """Return what a mask is the conjunction of."""
    if not is_conjunction(node):
        return [node]
    return [x for arg in node.args for x in _factors(arg)]  # type: ignore[arg-type]


def _spread(value: Tensor, sizes: Any) -> Tensor:
    return value.expand(torch.broadcast_shapes(value.shape, sizes))


class _Attention(NamedTuple):
    """One call of attention, without its mask."""

    attend: Callable[..., Tensor]
    q: Tensor
    k: Tensor
    v: Tensor
    dropout_p: float
    scale: float | None
    enable_gqa: bool

    def plainly(self, mask: Tensor | None, causal: bool = False) -> Tensor:
        """As torch does it."""
        given = {"attn_mask": mask, "dropout_p": self.dropout_p, "is_causal": causal}
        return self.attend(self.q, self.k, self.v, **given, scale=self.scale, enable_gqa=self.enable_gqa)

    def without_mask(self, mask: Tensor, causal: bool) -> Tensor:
        """Attention to all tokens, or to those before one."""
        if self._fused(mask, False) != self._fused(None, causal):
            return self.plainly(mask)
        return self.plainly(None, causal)

    def sparsely(self, mask: Tensor) -> Tensor | None:
        """Attention at the cost of what a mask allows; None where torch's kernel with the mask is as fast, drops
        weights, or is another one.
        """
        same_heads = self.enable_gqa or self.q.shape[-3] == self.k.shape[-3]
        if self.dropout_p or not same_heads or not self._fused(None, False):
            return None
        return sparse_masks.attended(self.q, self.k, self.v, mask, self.scale)

    def masked(self, mask: Tensor, found: _Mask) -> Tensor:
        """Attention with a mask of which something is known."""
        if found.is_shape:
            return self.without_mask(mask, found.shape.triangle)
        return self._beside_triangle(mask, found) if found.shape.triangle else self.plainly(found.least(mask))

    def _beside_triangle(self, mask: Tensor, found: _Mask) -> Tensor:
        """Attention to the tokens before one that a mask allows. torch's own function takes no mask beside a triangle,
        and its kernels do.
        """
        if self.q.device.type == "cpu" and self._fused(mask, False):
            given = {"attn_mask": found.added(mask, self.q.dtype), "scale": self.scale}
            fused = aten._scaled_dot_product_flash_attention_for_cpu
            return fused(self.q, self.k, self.v, self.dropout_p, True, **given)[0]
        out = None
        if self.q.device.type == "cuda" and self.q.dim() == 4 and not (self.enable_gqa or found.rows):
            out = self._of_keys(found.added(mask, self.q.dtype)) if found.keys else self._windowed(found.shape.window)
        if out is None:
            return self.plainly(mask if found.keys else found.least(mask))
        return out

    def _windowed(self, size: int) -> Tensor | None:
        """Attention by CUDA's flash kernel, which knows windows; None where it cannot."""
        params = torch.backends.cuda.SDPAParams(self.q, self.k, self.v, None, 0.0, True, False)
        if not size or self.q.shape[-1] % 8 or not torch.backends.cuda.can_use_flash_attention(params):
            return None
        rows = [x.transpose(1, 2) for x in (self.q, self.k, self.v)]
        window = {"window_size_left": size - 1, "window_size_right": 0}
        given = *rows, None, None, rows[0].shape[1], rows[1].shape[1], 0.0, True, False
        return aten._flash_attention_forward(*given, scale=self.scale, **window)[0].transpose(1, 2)

    def _of_keys(self, bias: Tensor) -> Tensor | None:
        """Attention by CUDA's memory-efficient kernel, which takes a triangle and a bias, here one of a row of numbers
        for all queries; None where it cannot.
        """
        num_keys = bias.shape[-1]
        bias = torch.nn.functional.pad(bias, (0, -num_keys % _ALIGNED)).narrow(-1, 0, num_keys)
        bias = bias.expand(*self.q.shape[:3], -1)
        params = torch.backends.cuda.SDPAParams(self.q, self.k, self.v, bias, 0.0, True, False)
        if not torch.backends.cuda.can_use_efficient_attention(params):
            return None
        efficient = aten._scaled_dot_product_efficient_attention
        return efficient(self.q, self.k, self.v, bias, True, 0.0, True, scale=self.scale)[0]

    def _fused(self, mask: Tensor | None, causal: bool) -> int:
        """Return the number of the kernel that torch takes on the CPU, 0 for none."""
        if self.q.device.type != "cpu":
            return 0
        options: Any = {"scale": self.scale, "enable_gqa": self.enable_gqa}
        with plain_dispatch():
            q, k, v = map(_memoryless, (self.q, self.k, self.v))
            given = None if mask is None else _memoryless(mask)
            return int(fused_attention(q, k, v, given, self.dropout_p, causal, **options))


def _memoryless(x: Tensor) -> Tensor:
    """Return a real tensor of the shape of a fake one: its rows are one."""
    last = x.stride(-1)
    row = torch.empty(1 + max(0, x.shape[-1] - 1) * last, dtype=x.dtype)
    return row.as_strided(x.shape, [0] * (x.dim() - 1) + [last]).requires_grad_(x.requires_grad)


def _is_plain(x: Tensor) -> bool:
    """Whether no transform of functions has wrapped a traced tensor, and all of its sizes are known."""
    return type(x) is FakeTensor and all(type(n) is int for n in x.shape)


def _recognising(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(attend)
    def attended(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        call = _Attention(attend, query, key, value, dropout_p, scale, enable_gqa)
        drawn = dropout_p and query.device.type != "cpu"  # another kernel draws otherwise
        if attn_mask is None or is_causal or drawn or not all(map(_is_plain, (query, key, value, attn_mask))):
            return call.plainly(attn_mask, is_causal)
        with_layout = in_use()
        if not with_layout and (out := call.sparsely(attn_mask)) is not None:
            return out
        found = _found(attn_mask)
        if found is None:
            return call.plainly(attn_mask)
        if with_layout:  # beside a layout there may be a triangle alone: what else there is, is refused
            return call.plainly(None, found.shape.triangle) if found.is_shape else call.plainly(attn_mask)
        return call.masked(attn_mask, found)

    return attended


# A context: inside, attention is called with what its masks stand for.
masks_recognised = Patches(lambda: [(torch.nn.functional, "scaled_dot_product_attention", _recognising)])
