"""What `csrc/attention.cpp` computes, by torch's operations: one block of queries after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_keys import Dropped, Keys

_WORD = (1 << 32) - 1


class _Block(NamedTuple):
    """A block of queries. `rows`: which; `columns`: the keys that some of them look at; `allowed` [batch or 1, heads or
    1, rows, columns].
    """

    rows: slice
    columns: Tensor
    allowed: Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, keys: Keys, scale: float, dropped: Dropped, out: Tensor, lse: Tensor
) -> None:
    """Write the values of attention [batch, heads, queries, width] and the logarithms of its sums."""
    for block in _blocks(q, k, keys):
        scores, values = _scores(q, k, block, scale), _of_heads(v, q, block)
        logs = torch.logsumexp(scores, -1)
        weights = _weights(scores, logs)
        if dropped.below:
            weights = weights * _factors(dropped, q, block).to(weights.dtype)
        lse[:, :, block.rows] = logs
        out[:, :, block.rows] = (weights @ values).to(out.dtype)


def backward(given: Mapping[str, Tensor], keys: Keys, scale: float, dropped: Dropped, grads: Sequence[Tensor]) -> None:
    """Write the gradient of the queries, and add those of keys and values, which come zeroed."""
    q, k, v, dtype = given["q"], given["k"], given["v"], given["lse"].dtype
    sums = [torch.zeros_like(x, dtype=dtype) for x in (k, v)]
    for block in _blocks(q, k, keys):
        mine = {x: given[x][:, :, block.rows].to(dtype) for x in ("q", "out", "grad_out", "lse", "grad_lse")}
        weights, values = _weights(_scores(q, k, block, scale), mine["lse"]), _of_heads(v, q, block)
        of_weights, used = mine["grad_out"] @ values.mT, weights
        if dropped.below:
            factors = _factors(dropped, q, block).to(dtype)
            of_weights, used = of_weights * factors, weights * factors
        delta = (mine["grad_out"] * mine["out"]).sum(-1) - mine["grad_lse"]
        slopes = weights * (of_weights - delta[..., None]) * scale
        grads[0][:, :, block.rows] = (slopes @ _of_heads(k, q, block)).to(q.dtype)
        for total, found in zip(sums, (slopes.mT @ mine["q"], used.mT @ mine["grad_out"]), strict=True):
            total.index_add_(2, block.columns, found.unflatten(1, (k.shape[1], -1)).sum(2))
    for grad, total in zip(grads[1:], sums, strict=True):
        grad.copy_(total)


def _scores(q: Tensor, k: Tensor, block: _Block, scale: float) -> Tensor:
    keys = _of_heads(k, q, block)
    scores = (q[:, :, block.rows].to(keys.dtype) @ keys.mT) * scale
    return scores.masked_fill(~block.allowed, float("-inf"))


def _weights(scores: Tensor, logs: Tensor) -> Tensor:
    """Rows without a key have no weights."""
    return (scores - logs.masked_fill(logs == float("-inf"), float("inf"))[..., None]).exp()


def _of_heads(x: Tensor, q: Tensor, block: _Block) -> Tensor:
    """Return a block's keys or values for each head of queries."""
    x = x.index_select(2, block.columns).to(torch.promote_types(x.dtype, torch.float32))
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _blocks(q: Tensor, k: Tensor, keys: Keys) -> Iterator[_Block]:
    for number, first in enumerate(range(0, q.shape[2], keys.block_q)):
        rows = slice(first, min(first + keys.block_q, q.shape[2]))
        allowed = _allowed(number, rows, k.shape[2], keys)
        columns = allowed.flatten(0, 2).any(0).nonzero()[:, 0]
        yield _Block(rows, columns.to(q.device), allowed[..., columns].to(q.device))


def _allowed(block: int, rows: slice, num_keys: int, keys: Keys) -> Tensor:
    """Return which of all keys each query of a block looks at [batch or 1, heads or 1, rows, keys]."""
    size = rows.stop - rows.start
    if keys.chosen is not None:
        named = keys.chosen[:, :, block].cpu()
        found = torch.zeros(*named.shape[:2], -(-num_keys // keys.block_k) + 1, dtype=torch.bool)
        found.scatter_(2, torch.where(named < 0, found.shape[2] - 1, named), True)
        spread = found[..., :-1].repeat_interleave(keys.block_k, 2)[..., :num_keys]
        allowed = spread[:, :, None].expand(-1, -1, size, -1)
    else:
        assert keys.starts is not None and keys.runs is not None
        allowed = torch.zeros(1, len(keys.starts), size, num_keys, dtype=torch.bool)
        for head, starts in enumerate(keys.starts):
            for first, num, row in keys.runs[starts[block] : starts[block + 1]].tolist():
                here = allowed[0, head, :, first : first + num]
                if row < 0:
                    here.fill_(True)
                    continue
                assert keys.bits is not None
                here |= (keys.bits[row, None, :num] >> torch.arange(size)[:, None] & 1).bool()
    at, queries = torch.arange(num_keys), torch.arange(rows.start, rows.stop)[:, None]
    if keys.spans is not None:
        spans = keys.spans[:, None, rows].cpu()
        allowed = allowed & (at >= spans[..., :1]) & (at < spans[..., 1:])
    if keys.there is not None:
        allowed = allowed & keys.there[:, None, None].cpu()
    return allowed & (at <= queries) if keys.causal else allowed


# --- dropout ---------------------------------------------------------------------------------------


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ x >> 16) * 0x85EBCA6B & _WORD
    x = (x ^ x >> 13) * 0xC2B2AE35 & _WORD
    return x ^ x >> 16


def _factors(dropped: Dropped, q: Tensor, block: _Block) -> Tensor:
    """Return what weights are multiplied by, of the same hashes as the library's [batch, heads, rows, columns]."""
    seed, rows = dropped.seed & (1 << 64) - 1, torch.arange(block.rows.start, block.rows.stop, device=q.device)
    heads = torch.arange(q.shape[0] * q.shape[1], device=q.device).view(*q.shape[:2], 1, 1)
    start = _mixed((seed & _WORD) + 0x9E3779B9 * heads & _WORD)
    of_row = _mixed(start ^ ((seed >> 32) + 0x85EBCA77 * rows[:, None] & _WORD))
    hashes = _mixed(of_row + 0x9E3779B9 * block.columns & _WORD)
    kept = torch.full_like(hashes, dropped.factor, dtype=torch.float64)
    return kept.masked_fill_(hashes < dropped.below, 0)
