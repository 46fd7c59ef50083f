"""Attention of blocks of queries to the keys that a layout names, as one operation with a derivative.

On the CPU the library does it (`csrc/attention.cpp`), in float32, float64, and bfloat16 with sums in float32. For
float16, and without the library, `attention_reference` does, with torch's operations, block by block and more slowly.
On a GPU it is torch's FlexAttention (`attention_flex`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import attention_flex, attention_reference, native
from .attention_keys import Dropped, Keys
from .differentiable import Derivative, define_differentiable
from .registry import OnShard, Traits

TILE = 64  # queries and keys of a tile, whose bits are a word for each key
NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 3}  # zf_number
_P, _N = ctypes.c_void_p, ctypes.c_int64


# --- the library ---------------------------------------------------------------------------------


class _Rows(ctypes.Structure):
    _fields_ = [("data", _P), ("batch", _N), ("head", _N), ("row", _N)]


_TENSORS = ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v")
_SIZES = ("batch", "heads", "groups", "num_q", "num_k", "width", "value_width")
_BLOCKS = ("block_q", "block_k", "layout_heads", "per_block", "most_runs")


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, _Rows) for name in _TENSORS),
        ("lse", _P),
        ("grad_lse", _P),
        *((name, _N) for name in (*_SIZES, *_BLOCKS)),
        *((name, _P) for name in ("starts", "runs", "bits", "index", "spans")),
        ("span_rows", _N),
        ("there", _P),
        ("there_rows", _N),
        ("scale", ctypes.c_double),
        ("factor", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("drop_below", ctypes.c_uint32),
        ("number", ctypes.c_int32),
        ("causal", ctypes.c_int32),
    ]


def _described(tensors: Mapping[str, Tensor], keys: Keys, scale: float, dropped: Dropped) -> _Attention:
    """The library's description of a call. Whoever has it must hold the tensors."""
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    a = _Attention(number=NUMBERS[q.dtype], scale=scale, causal=keys.causal)
    a.seed, a.drop_below, a.factor = dropped.seed & (1 << 64) - 1, dropped.below, dropped.factor
    for name in {*_TENSORS} & tensors.keys():
        x = tensors[name]
        setattr(a, name, _Rows(x.data_ptr(), *x.stride()[:3]))
    for name in {"lse", "grad_lse"} & tensors.keys():
        setattr(a, name, tensors[name].data_ptr())
    a.batch, a.heads, a.num_q, a.width = q.shape
    a.groups, a.num_k, a.value_width = v.shape[1:]
    a.block_q, a.block_k = keys.block_q, keys.block_k
    if keys.chosen is not None:
        a.index, a.per_block = keys.chosen.data_ptr(), keys.chosen.shape[3]
        a.most_runs = max(1, a.per_block)
    else:
        assert keys.starts is not None and keys.runs is not None
        a.starts, a.runs, a.layout_heads = keys.starts.data_ptr(), keys.runs.data_ptr(), len(keys.starts)
        assert keys.starts.shape[1] == -(-a.num_q // a.block_q) + 1  # the library reads as many
        a.most_runs = max([1, *keys.starts.diff().flatten().tolist()])
        a.bits = None if keys.bits is None else keys.bits.data_ptr()
    if keys.spans is not None:
        a.spans, a.span_rows = keys.spans.data_ptr(), len(keys.spans)
    if keys.there is not None:
        a.there, a.there_rows = keys.there.data_ptr(), len(keys.there)
    assert k.shape[2] == a.num_k
    return a


def _run(name: str, a: _Attention, items: int, work: int) -> None:
    """Call the library on all items, several on each thread."""
    function, parts = native.kernel(name), max(1, min(items, 4 * torch.get_num_threads()))
    ends = [items * i // parts for i in range(parts + 1)]
    calls = [functools.partial(function, ctypes.byref(a), i, j) for i, j in zip(ends, ends[1:], strict=False)]
    native.in_parallel(calls, work)


def _prepared(keys: Keys, q: Tensor, k: Tensor) -> Keys:
    """The parts as the library reads them. Raises `ValueError` for a block that is not there, and for documents whose
    ends do not increase.
    """
    if keys.chosen is not None:
        check_index(keys.chosen, -(-k.shape[2] // keys.block_k))
        keys = keys._replace(chosen=keys.chosen.to(torch.int64).contiguous())
    elif keys.starts is None:  # every key
        blocks = -(-q.shape[2] // keys.block_q)
        runs = torch.tensor([[0, k.shape[2], -1]], dtype=torch.int32).expand(blocks, 3).contiguous()
        keys = keys._replace(starts=torch.arange(blocks + 1, dtype=torch.int32)[None], runs=runs)
    if keys.spans is not None:
        if keys.spans.numel() and int(keys.spans.amin()) < 0:
            raise ValueError(
                "sparse.documents: in this step's batch, a row's cu_seqlens must start at 0, never decrease, and end "
                "at most at the number of tokens. They are the positions where documents begin, and where the last one "
                "ends."
            )
        keys = keys._replace(spans=keys.spans.to(torch.int32).contiguous())
    if keys.there is not None:
        keys = keys._replace(there=keys.there.to(torch.bool).contiguous())
    return keys


def check_index(index: Tensor, blocks: int) -> None:
    """Raise `ValueError` for numbers of blocks that are not there."""
    if index.numel():
        low, high = (int(x) for x in torch.aminmax(index))
        if low < -1 or high >= blocks:
            raise ValueError(
                f"sparse.attention: the index names block {low if low < -1 else high} of keys, and blocks are numbered "
                f"from 0 to {blocks - 1}; -1 stands for none."
            )


def _is_readable(x: Tensor) -> bool:
    """Return whether the library, which takes no stride of the last dim, can read a tensor, or write to it."""
    return x.stride(-1) == 1 or x.shape[-1] == 1


def _readable(x: Tensor) -> Tensor:
    return x if _is_readable(x) else x.contiguous()


def _like(x: Tensor) -> Tensor:
    """Return memory for the gradient of `x`: in its order of dims, if the library can write it."""
    found = torch.empty_like(x)
    return found if _is_readable(found) else torch.empty_like(x, memory_format=torch.contiguous_format)


def _by_library(q: Tensor) -> bool:
    return q.device.type == "cpu" and native.missing() is None and q.dtype in NUMBERS


def _by_flex(q: Tensor) -> bool:
    return q.device.type == "cuda"


def _forward(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, keys: Keys, pairs: int, scale: float, dropout: float
) -> tuple[Tensor, Tensor]:
    if _by_flex(q):
        return _laid_out(attention_flex.forward(q, k, v, keys, scale), _fake(*map(_without_memory, (q, k, v))))
    out, lse = _fake(q, k, v)
    keys, dropped = _prepared(keys, q, k), Dropped.make(seed, dropout)
    q, k, v = map(_readable, (q, k, v))
    if not _by_library(q):
        attention_reference.forward(q, k, v, keys, scale, dropped, out, lse)
        return out, lse
    a = _described({"q": q, "k": k, "v": v, "out": out, "lse": lse}, keys, scale, dropped)
    _run("attention_forward", a, q.shape[0] * q.shape[1] * _tiles(q.shape[2], keys.block_q), pairs)
    return out, lse


def _without_memory(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _laid_out(results: Sequence[Tensor], promised: Sequence[Tensor]) -> Any:
    """Return results with the strides that a capture has noted of them."""
    strides = [x.stride() for x in promised]
    return tuple(
        x if x.stride() == wanted else x.new_empty_strided(x.shape, wanted).copy_(x)
        for x, wanted in zip(results, strides, strict=True)
    )


def _tiles(num_q: int, block_q: int) -> int:
    """Return the tiles of a head, in blocks of some queries."""
    return -(-num_q // block_q) * -(-block_q // TILE)


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: Tensor | None,
    keys: Keys,
    pairs: int,
    scale: float,
    dropout: float,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    if _by_flex(q):
        found = attention_flex.backward(q, k, v, grad_out, grad_lse, keys, scale)
        return _laid_out(found, [_like(_without_memory(x)) for x in (q, k, v)])
    grads = _like(q), _like(k).zero_(), _like(v).zero_()
    keys, dropped = _prepared(keys, q, k), Dropped.make(seed, dropout)
    q, k, v, out, grad_out = map(_readable, (q, k, v, out, grad_out))
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "grad_out": grad_out, "grad_lse": grad_lse.contiguous()}
    if not _by_library(q):
        attention_reference.backward(given, keys, scale, dropped, grads)
        return grads
    given |= {"grad_q": grads[0], "grad_k": grads[1], "grad_v": grads[2]}
    _run("attention_backward", _described(given, keys, scale, dropped), k.shape[0] * k.shape[1], pairs)
    return grads


# --- the operation -------------------------------------------------------------------------------


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """New results; memory has a row's heads side by side, as the layer behind reads them."""
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    return out, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


def _with_keys(run: Callable[..., Any], before: int) -> Callable[..., Any]:
    """`run` with one argument, at number `before`, for those of the schema that make up `Keys`."""

    @functools.wraps(run)
    def called(*args: Any) -> Any:
        after = before + len(Keys._fields)
        return run(*args[:before], Keys(*args[before:after]), *args[after:])

    return called


def _flops(of_width: int, of_values: int) -> Callable[[Mapping[str, Any], Any], int]:
    """Products of the width of keys and of that of values, for each pair of tokens in the blocks."""
    return lambda given, result: 2 * given["pairs"] * (of_width * given["k"].shape[3] + of_values * given["v"].shape[3])


_KEYS = (
    "Tensor? starts, Tensor? runs, Tensor? bits, Tensor? chosen, Tensor? spans, Tensor? there, "
    "int block_q, int block_k, bool causal"
)
_SAVED = "q k v seed starts runs bits chosen spans there block_q block_k causal pairs scale dropout out lse"
# `pairs`: of a query and a key in the blocks that are computed, of all heads and rows.
block_attention = define_differentiable(
    f"block_attention(Tensor q, Tensor k, Tensor v, Tensor? seed, {_KEYS}, int pairs, float scale, float dropout) -> "
    "(Tensor out, Tensor lse)",
    _with_keys(_forward, 4),
    _fake,
    Derivative(
        _with_keys(_backward, 6),
        by=["q", "k", "v"],
        saves=_SAVED.split(),
        traits=Traits(OnShard.REFUSED, flops=_flops(3, 2), again=0.2),
        fake=lambda grad_out, grad_lse, q, k, v, *_: tuple(map(_like, (q, k, v))),
    ),
    traits=Traits(OnShard.REFUSED, flops=_flops(1, 1)),
)
