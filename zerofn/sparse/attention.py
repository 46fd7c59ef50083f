"""Attention to the keys that a pattern, a layout or an index tensor names."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from .._torch_compat import current_trace, plain_dispatch
from ..ops import attention_flex
from ..ops.attention_keys import Keys
from ..ops.block_attention import NUMBERS, block_attention
from ..util.arguments import checked
from .blocks import Blocks
from .layout import Layout, layout
from .part import OfPart, Part, places
from .patterns import NONE, Both, Causal, Everything, Function, Pattern, Sizes, cached_by_reads
from .rows import Documents, Padding, Spans

What = Pattern | Layout | Blocks | Callable[[Tensor, Tensor, Tensor], Tensor]


@checked("q", "k", "v", "is_causal", "scale", "dropout")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: What,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of each query to the keys that a layout allows. Only tiles with allowed pairs are computed.

    `q` [B, H, L, D], `k` [B, G, S, D], `v` [B, G, S, E]: all float32, bfloat16, float16 (slow on the CPU) or float64
    (on the CPU only); H, the number of query heads, is a multiple of G, that of key heads. `layout`: a pattern
    (`sliding_window`, `documents`, ..., combined with `&` and `|`); the result of `sparse.layout`; blocks that the step
    chooses (`chosen`); or a function (head, query, key) -> booleans, of int64 tensors that broadcast, which is
    evaluated once, tile by tile. `is_causal`: also forbid keys after the query. `scale`: factor of the scores, by
    default D ** -0.5. `dropout`: the fraction of weights that is dropped (on the CPU only); the others are scaled by 1
    / (1 - dropout). Inside a loss function, draws come from the step's key.

    -> [B, H, L, E] in the dtype of `q`. A query without an allowed key gets zeros, and has no gradient. Differentiable
    once, in q, k and v; a second derivative raises `NotImplementedError`. Raises `TypeError` and `ValueError` for
    tensors that do not fit each other, and for a layout whose sizes do not match.

    >>> from zerofn import sparse
    >>> x = torch.randn(1, 2, 100, 8)
    >>> sparse.attention(x, x, x, sparse.sliding_window(10), is_causal=True).shape
    torch.Size([1, 2, 100, 8])
    """
    return with_logsumexp(q, k, v, layout, is_causal=is_causal, scale=scale, dropout=dropout)[0]


def by_layout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    what: Layout,
    scale: float | None,
    *,
    spans: Tensor | None = None,
    there: Tensor | None = None,
) -> Tensor:
    """Return what `attention` does with a layout of all tokens and, if they are given, of each query the keys of
    `spans`, int32 [batch or 1, queries, 2], and of all queries those of `there`, bool [batch or 1, keys].
    """
    keys, pairs = _of_layout(what, q)
    return _run(q, k, v, None, keys._replace(spans=spans, there=there), pairs, scale, 0.0)[0]


def with_logsumexp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: What,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    part: Part | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `attention` does, and the logarithm of each query's sum of exp(score), [B, H, L] in float32, or in
    float64: by it, attention to other keys is added to this. -inf of a query without a key. `part`: what q, k and v are
    of a whole attention, if they are not all of it; the layout is of the whole.
    """
    q, k, v = _by_autocast(q, k, v)
    sizes = _check(q, k, v, scale, dropout)
    keys, pairs = _keys(layout, q, sizes, is_causal, part)
    seed = torch.randint((1 << 63) - 1, (), dtype=torch.int64, device="cpu") if dropout else None
    return _run(q, k, v, seed, keys, pairs, scale, dropout)


def _run(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, keys: Keys, pairs: int, scale: float | None, dropout: float
) -> tuple[Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = block_attention(q, k, v, seed, *keys, pairs, scale, dropout)
    return out, lse


def _by_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors as torch's own attention casts them under autocast."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, dropout: float = 0.0) -> Sizes:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"sparse.attention: {name} must be [batch, heads, tokens, width], got {list(x.shape)}.")
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"sparse.attention: expected q on the CPU or on a CUDA device, and it is on {q.device}.")
    dtypes = (*NUMBERS, torch.float16) if q.device.type == "cpu" else attention_flex.DTYPES
    if not q.dtype == k.dtype == v.dtype or q.dtype not in dtypes:
        raise TypeError(
            f"sparse.attention: on {q.device}, q, k and v must be of one dtype, {', '.join(map(str, dtypes))}; got "
            f"{q.dtype}, {k.dtype} and {v.dtype}."
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"sparse.attention: q, k and v must be on one device, got {q.device}, {k.device} and {v.device}."
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "sparse.attention: expected q [B, H, L, D], k [B, G, S, D] and v [B, G, S, E], got "
            f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}."
        )
    if 0 in (q.shape[1], k.shape[1], q.shape[3]):
        raise ValueError(
            f"sparse.attention: q, k and v need at least one head and a width of 1, got {list(q.shape)} and "
            f"{list(k.shape)}."
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            "sparse.attention: the number of query heads must be a multiple of the number of key heads; "
            f"got {q.shape[1]} and {k.shape[1]}."
        )
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"sparse.attention: scale must be a finite number, got {scale}.")
    if not 0 <= dropout < 1:
        raise ValueError(f"sparse.attention: dropout={dropout} must be at least 0 and less than 1.")
    if q.device.type == "cuda" and (reason := attention_flex.reason_against(dropout)):
        raise ValueError(f"sparse.attention: {reason}")
    return Sizes(q.shape[1], q.shape[2], k.shape[2])


def _keys(what: What, q: Tensor, sizes: Sizes, is_causal: bool, part: Part | None) -> tuple[Keys, int]:
    """Return the operation's arguments, and the pairs of tokens in the tiles that it computes."""
    batch = q.shape[0]
    if isinstance(what, Blocks):
        return _of_blocks(what, batch, sizes, is_causal, part)
    if not isinstance(what, Layout):
        what = pattern_of(what)
    spans: list[Tensor] = []
    there: list[Tensor] = []
    if isinstance(what, Pattern):
        rest, said = known_part(what, is_causal, _is_static)
        spans = [_spans(x, batch, sizes, part) for x in said if not isinstance(x, Padding)]
        there = [_there(x, batch, sizes, part) for x in said if isinstance(x, Padding)]
        what, is_causal = known(rest if part is None else OfPart(rest, part), sizes), False
    if what.sizes.heads not in (1, sizes.heads) or what.sizes[1:] != sizes[1:]:
        raise ValueError(
            f"sparse.attention: the layout was made for {what.sizes.heads} heads, {what.sizes.queries} queries and "
            f"{what.sizes.keys} keys, but q and k have {sizes.heads}, {sizes.queries} and {sizes.keys}."
        )
    keys, pairs = _of_layout(what, q)
    narrow = functools.reduce(_narrower, spans) if spans else None
    found = functools.reduce(torch.logical_and, there) if there else None
    return keys._replace(spans=narrow, there=found, causal=is_causal), pairs


def _of_layout(what: Layout, q: Tensor) -> tuple[Keys, int]:
    computed = what.computed if q.device.type == "cpu" else _computed_on_gpu(what)
    pairs = q.shape[0] * computed * (q.shape[1] // what.sizes.heads)
    return Keys(what.starts, what.runs, what.bits, None, None, None, what.tile, what.tile, False), pairs


@functools.lru_cache(maxsize=64)
def _computed_on_gpu(what: Layout) -> int:
    """Return the pairs of tokens of a layout in the larger blocks that a GPU computes."""
    with plain_dispatch():  # a step may ask: it depends on numbers alone
        return attention_flex.computed(what.status > NONE, what.tile, *what.sizes[1:])


def pattern_of(what: object) -> Pattern:
    """Return a pattern, or a function as one. Raises `TypeError` for anything else."""
    if isinstance(what, Pattern):
        return what
    if isinstance(what, Layout | Blocks):
        raise TypeError(
            "sparse: layout must be a pattern or a function of (head, query, key) here, since only these are known by "
            f"positions; got {type(what).__name__}."
        )
    if not callable(what):
        raise TypeError(
            "sparse: layout must be a pattern, a Layout, Blocks or a function of (head, query, key), got "
            f"{type(what).__name__}. {_instead_of(what)}"
        )
    return Function(what)


def _instead_of(what: object) -> str:
    """Return a sentence that says what to write in place of something that is not a pattern."""
    if isinstance(what, Tensor) and what.dtype == torch.bool:
        return "For a mask [queries, keys], write sparse.pattern(lambda head, query, key: mask[query, key])."
    if isinstance(what, Tensor):
        return "For an index tensor, write sparse.chosen(index, block)."
    return "Write sparse.causal, for example."


def known_part(
    what: Pattern, is_causal: bool, is_known: Callable[[Documents], bool]
) -> tuple[Pattern, list[Documents | Spans | Padding]]:
    """Return (what of a pattern is known before the step, documents and padding that are not): it allows what all of
    these do.

    `is_causal`: whether that is one factor more. `is_known`: whether documents are.
    """
    known: list[Pattern] = [Everything(), *([Causal()] if is_causal else [])]
    said: list[Documents | Spans | Padding] = []
    for factor in _factors(what):
        if isinstance(factor, Spans | Padding) or isinstance(factor, Documents) and not is_known(factor):
            said.append(factor)
        else:
            known.append(factor)
    return functools.reduce(Both, known), said


def _factors(x: Pattern) -> list[Pattern]:
    return [*_factors(x.a), *_factors(x.b)] if isinstance(x, Both) else [x]


@cached_by_reads(64)
def known(pattern: Pattern, sizes: Sizes) -> Layout:
    """Return a pattern's layout."""
    return layout(pattern, sizes.queries, sizes.keys, heads=sizes.heads)


def are_numbers(documents: Documents) -> bool:
    """Return whether the ends of documents are there, and the same for all rows."""
    return type(documents.ends) is Tensor and documents.ends.dim() == 1


def _is_static(documents: Documents) -> bool:
    """Return whether a capture may take documents as a constant; without one, their spans are less work."""
    return are_numbers(documents) and current_trace() is not None


def _narrower(a: Tensor, b: Tensor) -> Tensor:
    """Return the keys that both spans have. Where one is -1, so is the end."""
    return torch.stack([torch.maximum(a[..., 0], b[..., 0]), torch.minimum(a[..., 1], b[..., 1])], -1)


def _spans(of: Documents | Spans, batch: int, sizes: Sizes, part: Part | None) -> Tensor:
    """Return of each query the first key and the one behind the last, int32 [batch or 1, queries, 2]."""
    spans = of.ends if isinstance(of, Spans) else _of_ends(of, batch, sizes if part is None else part.sizes)
    if part is None:
        return spans
    spans = spans.index_select(1, places(part.queries).to(spans.device))
    here = torch.searchsorted(places(part.keys).to(spans.device), spans.long(), out_int32=True)
    return torch.where(spans < 0, spans, here)


def _there(of: Padding, batch: int, sizes: Sizes, part: Part | None) -> Tensor:
    """Return which keys are not padding, bool [batch or 1, keys]."""
    num = sizes.keys if part is None else part.sizes.keys
    _check_padding(of, batch, num)
    return of.there if part is None else of.there.index_select(1, places(part.keys).to(of.there.device))


def _check_padding(of: Padding, batch: int, num: int) -> None:
    if of.there.shape[0] not in (1, batch) or of.there.shape[1] != num:
        raise ValueError(
            f"sparse.padding: expected a mask [{batch} or 1, {num}], one element for each key, got "
            f"{list(of.there.shape)}."
        )


def _of_ends(of: Documents, batch: int, sizes: Sizes) -> Tensor:
    if sizes.queries != sizes.keys:
        raise ValueError(
            "sparse.documents: expected as many queries as keys, those of the same row; got "
            f"{sizes.queries} and {sizes.keys}."
        )
    _check_documents(of, batch, sizes.queries)
    return of.spans(sizes.queries)


def check_part(q: Tensor, k: Tensor, v: Tensor, what: What, num: int) -> None:
    """Raise, before anything is sent, what attention by a layout raises of parts of rows of `num` tokens."""
    _check(q, k, v)
    if not isinstance(what, Layout | Blocks):
        for factor in _factors(pattern_of(what)):
            if isinstance(factor, Documents):
                _check_documents(factor, q.shape[0], num)
            elif isinstance(factor, Padding):
                _check_padding(factor, q.shape[0], num)


def _check_documents(of: Documents, batch: int, num: int) -> None:
    ends = of.ends
    if ends.dim() == 2 and len(ends) not in (1, batch):
        raise ValueError(f"sparse.documents: cu_seqlens has {len(ends)} rows, but the batch has {batch}.")
    of.check_end(num)


def _of_blocks(what: Blocks, batch: int, sizes: Sizes, is_causal: bool, part: Part | None) -> tuple[Keys, int]:
    index, num = what.numbers, -(-sizes.queries // what.block_q)
    if not index.shape[-1]:  # no block for any query
        index = torch.nn.functional.pad(index, (0, 1), value=-1)
    if part is not None and index.shape[1] == part.sizes.heads:
        index = index.narrow(1, part.first_head, sizes.heads)
    if index.shape[0] not in (1, batch) or index.shape[1] not in (1, sizes.heads) or index.shape[2] != num:
        raise ValueError(
            f"sparse.attention: the index must be [{batch} or 1, {sizes.heads} or 1, {num}, k] for {sizes.queries} "
            f"queries in blocks of {what.block_q}, got {list(index.shape)}."
        )
    index = index.expand(batch, sizes.heads, num, index.shape[3])
    keys = index.shape[3] * what.block_k
    if index.device.type == "cuda":
        keys = attention_flex.most_keys(index.shape[3], what.block_q, what.block_k)
    per_query = min(keys, sizes.keys)
    pairs = batch * sizes.heads * sizes.queries * per_query
    return Keys(None, None, None, index, None, None, what.block_q, what.block_k, is_causal), pairs
