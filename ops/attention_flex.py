"""What `csrc/attention.cpp` computes, on a GPU: torch's FlexAttention, which compiles a kernel for each kind of call.

FlexAttention works in blocks of 128 queries x 128 keys. For each block of queries it gets a list of the blocks of keys
that are attended as a whole, and a list of those that are attended in part; in these it asks a function about every
pair of tokens. Lists and function are made from `Keys` on the device, so the host never waits for it. Lists of a layout
that is known before the step are made once.

The backward pass runs the forward kernel once more: torch's kernel for gradients is part of its autograd, and one
operation cannot hand a graph of autograd to another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch_compat import above_autograd, assert_on_device, compiler_missing, without_autocast, without_dispatch_modes
from ..util.process import the
from .attention_keys import Keys

BLOCK = 128  # queries and keys of a block: torch's kernels for gradients take no smaller ones
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_WIDTH = 16  # of a product in Triton
_NONE, _ALL = -2, -1  # of a tile; other numbers are rows of bits


class _Tiles(NamedTuple):
    """Which tiles of `block_q` queries x `block_k` keys are attended. `table` int32 [batch or 1, heads or 1, tiles of
    queries, tiles of keys]: `_NONE`, `_ALL`, or a row of `bits`, int64 [rows, 64]: for each key a bit for each query.
    """

    table: Tensor
    bits: Tensor | None


def reason_against(dropout: float) -> str:
    """Return why attention does not run on a GPU, in a sentence; "" if it does."""
    if dropout:
        return f"dropout={dropout}, which is computed on the CPU only; expected 0 on a GPU."
    return _without_compiler()


@functools.cache
def _without_compiler() -> str:
    missing = compiler_missing("cuda") if torch.cuda.is_available() else ""  # else it is planned, not run
    return f"attention on a GPU is compiled by Triton, and {missing}" if missing else ""


def computed(attended: Tensor, tile: int, num_q: int, num_k: int) -> int:
    """Return the pairs of tokens in blocks that are computed. `attended` bool [heads, tiles of queries, of keys]."""
    rows, columns = (torch.arange(0, num, BLOCK).neg().add(num).clamp(max=BLOCK) for num in (num_q, num_k))
    return int((pooled(attended, tile, tile, num_q, num_k) * rows[:, None] * columns).sum())


def most_keys(chosen: int, block_q: int, block_k: int) -> int:
    """Return the most keys that are computed for a query, where each block of `block_q` queries chooses some of
    `block_k` keys.
    """
    return _touched(BLOCK, block_q) * chosen * _touched(block_k, BLOCK) * BLOCK


def _touched(size: int, by: int) -> int:
    """Return how many blocks of `by` tokens a block of `size` shares tokens with, at most."""
    return 1 if by % size == 0 else -(-size // by) + (size % by != 0)


def forward(q: Tensor, k: Tensor, v: Tensor, keys: Keys, scale: float) -> tuple[Tensor, Tensor]:
    """Return the values of attention [batch, heads, queries, value width] and the logarithms of its sums [batch, heads,
    queries]. Raises on the device for a block of keys that does not exist, and for ends of documents out of order.
    """
    if not (q.numel() and k.numel()):
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    with without_dispatch_modes(), without_autocast(), torch.no_grad():
        out, lse = _attended(_wide(q), _wide(k), _wide(v), _mask(keys, q, k), keys, scale)
    return out[..., : v.shape[3]], lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, grad_lse: Tensor, keys: Keys, scale: float
) -> Sequence[Tensor]:
    """Return the gradients of q, k and v."""
    if not (q.numel() and k.numel()):
        return [torch.zeros_like(x) for x in (q, k, v)]
    mask = _mask(keys, q, k)
    with without_dispatch_modes(), without_autocast(), above_autograd(), torch.enable_grad():
        inputs = tuple(_wide(x).requires_grad_() for x in (q, k, v))
        results = _attended(inputs[0], inputs[1], inputs[2], mask, keys, scale)
        grads = torch.autograd.grad(results, inputs, (_wide(grad_out), grad_lse))
    return [grad[..., : x.shape[3]] for grad, x in zip(grads, (q, k, v), strict=True)]


def _wide(x: Tensor) -> Tensor:
    """Return queries, keys or values, with zeros behind each up to the least width of a product in Triton."""
    x = x.detach()
    return pad(x, (0, _LEAST_WIDTH - x.shape[3])) if x.shape[3] < _LEAST_WIDTH else x


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Any, keys: Keys, scale: float) -> tuple[Tensor, Tensor]:
    sizes = (q.shape[1], *k.shape[1::2], v.shape[3], *mask.kv_num_blocks.shape[:2])
    return _compiled((q.dtype, q.device, sizes, scale, _kind(keys)), scale)(q, k, v, mask)


def _kind(keys: Keys) -> tuple[object, ...]:
    """Return what the function that is asked about pairs depends on, beside the sizes of tensors."""
    given = (keys.starts, keys.bits, keys.chosen, keys.spans, keys.there)
    rows = [None if x is None else len(x) == 1 for x in (keys.starts, keys.spans, keys.there)]
    return (*(x is None for x in given), *rows, keys.block_q, keys.block_k, keys.causal)


@functools.cache
def _compiled(kind: tuple[object, ...], scale: float) -> Callable[..., Any]:
    """Return `attend_by(scale)`, compiled for one kind of call. A function that torch has compiled eight times it
    compiles no more, so each kind has a function of its own.
    """
    attend: Any = attend_by(scale)
    attend.__code__ = attend.__code__.replace(co_name=f"attend_{abs(hash(kind))}")
    return torch.compile(attend, fullgraph=True)


def attend_by(scale: float) -> Callable[..., Any]:
    """Return FlexAttention as a function of q, k, v and a `BlockMask`: -> (values, logarithms of sums)."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    # Not the kernel for a few queries, which has no backward pass.
    given: Any = {"scale": scale, "enable_gqa": True, "kernel_options": {"BACKEND": "TRITON"}}

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Any:
        out, more = flex_attention(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True), **given)
        return out, more.lse

    return attend


# --- the blocks ----------------------------------------------------------------------------------


def _mask(keys: Keys, q: Tensor, k: Tensor) -> Any:
    """Return a `BlockMask`."""
    sizes = (q.shape[2], k.shape[2])
    if keys.starts is None or keys.runs is None or keys.spans is not None or keys.there is not None:
        return _made(_tiles(keys, *sizes, q.device), keys, *sizes)
    known = _known_of(keys.runs)
    name = ("mask", q.device, keys.causal, sizes)
    if name not in known:
        known[name] = _made(_tiles(keys, *sizes, q.device), keys, *sizes)
    return known[name]


def _made(tiles: _Tiles, keys: Keys, num_q: int, num_k: int) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    some, whole = _blocks(tiles, keys, num_q, num_k)
    some = some & ~whole
    lists = [x for flags in (some, whole, some.mT, whole.mT) for x in _listed(flags)]
    make: Any = BlockMask
    return make((num_q, num_k), *lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=_asked(tiles, keys))


def _listed(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of a row have the flag, and the row's blocks: first those that have it."""
    order = flags.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return flags.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _blocks(tiles: _Tiles, keys: Keys, num_q: int, num_k: int) -> tuple[Tensor, Tensor]:
    """Return which blocks may have an attended pair, and which are attended as a whole, bool [batch or 1, heads or 1,
    blocks of queries, blocks of keys].
    """
    device = tiles.table.device
    some = pooled(tiles.table > _NONE, keys.block_q, keys.block_k, num_q, num_k)
    whole = ~pooled(tiles.table != _ALL, keys.block_q, keys.block_k, num_q, num_k)
    query, key = (torch.arange(0, num, BLOCK, device=device) for num in (num_q, num_k))
    query, last_query = query[:, None], (query + BLOCK - 1).clamp(max=num_q - 1)[:, None]
    last_key = (key + BLOCK - 1).clamp(max=num_k - 1)
    if keys.causal:
        some, whole = some & (key <= last_query), whole & (last_key <= query)
    if keys.spans is not None:
        first, end = (_in_blocks(x, x[:, -1:])[:, None, :, None, :] for x in keys.spans.to(device).unbind(2))
        some = some & (key < end.amax(-1)) & (last_key >= first.amin(-1))
        whole = whole & (key >= first.amax(-1)) & (last_key < end.amin(-1))
    if keys.there is not None:
        there = keys.there.to(device)
        some = some & _in_blocks(there, False).any(-1)[:, None, None]
        whole = whole & _in_blocks(there, True).all(-1)[:, None, None]
    return some, whole


def pooled(flags: Tensor, block_q: int, block_k: int, num_q: int, num_k: int) -> Tensor:
    """Return which blocks share a token pair with a tile with the flag. `flags` [..., tiles of queries, of keys]."""
    rows, columns = (_overlaps(num, block, flags.device) for num, block in ((num_q, block_q), (num_k, block_k)))
    return rows @ flags.to(torch.float32) @ columns.mT > 0


def _overlaps(num: int, size: int, device: torch.device) -> Tensor:
    """Return which blocks of `BLOCK` tokens share some with which of `size` tokens, as 0 and 1 [blocks, those]."""
    first = torch.arange(0, num, size, device=device)
    last = (first + size - 1).clamp(max=num - 1)
    block = torch.arange(-(-num // BLOCK), device=device)[:, None]
    return ((first // BLOCK <= block) & (block <= last // BLOCK)).to(torch.float32)


def _in_blocks(x: Tensor, more: Tensor | bool) -> Tensor:
    """Return values of tokens [rows, tokens] as [rows, blocks, BLOCK]; the last block is filled up with `more`, one
    value or one of each row [rows, 1].
    """
    rest = torch.as_tensor(more, device=x.device).expand(len(x), -x.shape[1] % BLOCK)
    return torch.cat([x, rest], 1).unflatten(1, (-1, BLOCK))


# --- pairs of tokens -----------------------------------------------------------------------------


def _asked(tiles: _Tiles, keys: Keys) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return a function of a row, a head, a query and a key, which torch compiles into its kernel. Its indices must all
    be tensors, so the one row of a table that serves all is number `0 * row`.
    """
    (table, bits), device = tiles, tiles.table.device
    of_row, of_head = (int(n > 1) for n in table.shape[:2])
    block_q, block_k, causal = keys.block_q, keys.block_k, keys.causal
    there = None if keys.there is None else keys.there.to(device)
    first, end = (None, None) if keys.spans is None else (x.contiguous() for x in keys.spans.to(device).unbind(2))
    row_of_span, row_of_there = (0 if x is None else int(len(x) > 1) for x in (keys.spans, keys.there))

    def allowed(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        tile = table[row * of_row, head * of_head, query // block_q, key // block_k]
        found = tile == _ALL
        if bits is not None:
            word = bits[tile.clamp(min=0), key % block_k]
            found = found | (tile >= 0) & ((word >> (query % block_q)) & 1 == 1)
        if causal:
            found = found & (key <= query)
        if first is not None and end is not None:
            at = row * row_of_span
            found = found & (key >= first[at, query]) & (key < end[at, query])
        return found if there is None else found & there[row * row_of_there, key]

    return allowed


def _tiles(keys: Keys, num_q: int, num_k: int, device: torch.device) -> _Tiles:
    if keys.spans is not None:
        assert_on_device(
            (keys.spans >= 0).all(),
            "sparse.documents: a row's cu_seqlens must start at 0, never decrease, and end at most at the number of "
            "tokens.",
        )
    if keys.chosen is not None:
        return _Tiles(_chosen(keys.chosen.to(device), -(-num_k // keys.block_k)), None)
    if keys.starts is None or keys.runs is None:
        size = (-(-num_q // keys.block_q), -(-num_k // keys.block_k))
        return _Tiles(torch.full((1, 1, *size), _ALL, dtype=torch.int32, device=device), None)
    known = _known_of(keys.runs)
    if ("tiles", device) not in known:
        bits = None if keys.bits is None else keys.bits.to(device)
        table = _of_runs(keys.starts, keys.runs, keys.block_k, -(-num_k // keys.block_k))
        known["tiles", device] = _Tiles(table.to(device), bits)
    return known["tiles", device]


def _chosen(index: Tensor, num: int) -> Tensor:
    """Return the table of an index of blocks [batch, heads, blocks of queries, k]."""
    assert_on_device(
        ((index >= -1) & (index < num)).all(), f"sparse.attention: the index names a block beyond -1 to {num - 1}."
    )
    index = index.to(torch.int64)
    table = index.new_full((*index.shape[:3], num + 1), _NONE, dtype=torch.int32)
    return table.scatter_(3, torch.where(index < 0, num, index), _ALL)[..., :-1].contiguous()


def _of_runs(starts: Tensor, runs: Tensor, tile: int, columns: int) -> Tensor:
    """Return the table of runs of keys, each of whole tiles."""
    starts, runs = starts.cpu(), runs.cpu()
    heads, num = starts.shape[0], starts.shape[1] - 1
    block = torch.repeat_interleave(torch.arange(heads * num), starts.diff(dim=1).flatten())
    first, tiles = runs[:, 0] // tile, (runs[:, 1] + tile - 1) // tile
    run = torch.repeat_interleave(torch.arange(len(runs)), tiles)
    column = first[run] + torch.arange(len(run)) - (tiles.cumsum(0) - tiles)[run]
    table = torch.full((heads * num, columns), _NONE, dtype=torch.int32)
    table[block[run], column] = runs[run, 2]
    return table.view(1, heads, num, columns)


class _Known(WeakTensorKeyDictionary):
    """A layout's runs -> what was made from them, by name."""


def _known_of(runs: Tensor) -> dict[Any, Any]:
    """Return what was made from a layout's runs, as long as these live."""
    made = the(_Known)
    if runs not in made:
        made[runs] = {}
    return made[runs]
