"""Masks that hide most pairs of tokens, recognised by how they were made, and attention to what is left.

A mask is taken apart into the factors that it is the conjunction of:

| factor | recognised by | it becomes |
|---|---|---|
| a triangle, a window | a comparison of places of keys and queries, at any length | tiles of a layout |
| any other rule of places | its value, which follows from sizes alone | tiles of a layout |
| documents | `number[:, :, None] == number[:, None]` of a cumulative sum of booleans | each query's span of keys |
| a triangle, a window of positions | that comparison of positions, by one more in documents | tiles of a layout |
| padding | booleans [rows, 1, 1, keys] | keys that nobody looks at |

A cumulative sum of booleans never decreases, so tokens of one number stand side by side; of numbers that a batch brings
this is not known, and their masks stay with torch. In a document whose positions go on by one, the difference of two
positions is that of their places: what transformers compares (`masking_utils.py`) is a band of places.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from .._torch_compat import OpOverload, bind, current_trace, plain_dispatch, tensor_in_mode
from ..ops import native
from ..ops.block_attention import NUMBERS
from ..ops.registry import SAME, base_name
from ..sparse.attention import by_layout, known
from ..sparse.layout import Layout, layout
from ..sparse.patterns import Band, Everything, Given, Pattern, Sizes, booleans_of
from ..sparse.rows import spans_of
from . import known_values
from .known_values import Values, looked_at_once
from .moved_elements import elements_of, root_of

aten = torch.ops.aten
_ANDS = {"bitwise_and", "logical_and"}
_COUNTS = (torch.int32, torch.int64)
# Of key - query, by a comparison key `op` query + x: the least and the greatest. None is no bound.
_BANDS: dict[Any, Any] = {
    "le": lambda x: (None, x),
    "lt": lambda x: (None, x - 1),
    "ge": lambda x: (x, None),
    "gt": lambda x: (x + 1, None),
    "eq": lambda x: (x, x),
}
_SIGNS = {"add": 1, "sub": -1}
_TURNED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}


class Allowed(NamedTuple):
    """What a mask allows: tiles of a layout and, of them, the keys of a query's document that are not padding.
    `numbers`: the node of the documents' numbers [rows, tokens], which never decrease in a row. `padding`: nodes of
    booleans [rows or 1, .., keys]. `made`: what `by_layout` gets of both, made for a trace's first layer.
    """

    tiles: Layout
    numbers: Node | None
    padding: tuple[Node, ...]
    made: dict[str, Tensor]


class _Factor(NamedTuple):
    """A factor of a mask. `lifted`: [rows, queries, keys], to which a dimension of heads was added behind it."""

    node: Node
    lifted: bool

    def four(self, x: Tensor) -> Tensor:
        """Give something of its dimensions those of the mask."""
        x = x.unsqueeze(1) if self.lifted and x.dim() == 3 else x
        return x[(None,) * (4 - x.dim())]


class _Side(NamedTuple):
    """A side of a comparison: elements of a source, at places [..., queries, 1] or [..., 1, keys], plus a number."""

    source: Node
    at: Tensor
    more: int

    @property
    def of_queries(self) -> bool:
        return self.at.shape[-1] == 1 and self.at.shape[-2] > 1


class _Documents(NamedTuple):
    """Documents by their numbers. `positions`: (their source, its element of each token [rows, tokens]) if positions go
    on by one in each document.
    """

    numbers: Node
    positions: tuple[Node, Tensor] | None


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor | None:
    """Return attention to what a mask of a trace allows; None where torch's own is as fast, or more hidden."""
    if not _fits(q, k, v, mask):
        return None
    sizes = Sizes(1, q.shape[2], k.shape[2])  # a mask may have one row for all queries
    found = looked_at_once(
        mask, f"_zerofn_sparse_masks_{sizes.queries}", lambda values, node: _allowed(values, node, sizes)
    )
    if found is None:
        return None
    if found.numbers is not None and "spans" not in found.made:
        found.made["spans"] = spans_of(tensor_of(found.numbers))
    if found.padding and "there" not in found.made:
        rows = [x.reshape(-1, x.shape[-1]) for x in map(tensor_of, found.padding)]
        found.made["there"] = functools.reduce(torch.logical_and, rows)
    return by_layout(q, k, v, found.tiles, scale, **found.made)


def tensor_of(node: Node) -> Tensor:
    """Return a tensor that the trace knows by a node."""
    trace: Any = current_trace()
    note = node.meta["val"]
    with plain_dispatch():
        x = tensor_in_mode(note, note.shape, note.stride())
    bind(trace.tracer, x, node)
    return x


def _fits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> bool:
    """Return whether the operation takes these tensors."""
    if q.device.type != "cpu" or native.missing() is not None or q.dtype not in NUMBERS:
        return False
    if not q.dim() == k.dim() == v.dim() == 4 or not q.dtype == k.dtype == v.dtype:
        return False
    if mask.dtype not in (torch.bool, q.dtype):  # torch reads it as of that dtype
        return False
    of_rows = q.shape[0] == k.shape[0] == v.shape[0] and q.shape[1] % k.shape[1] == 0 and k.shape[1] == v.shape[1]
    if mask.dim() < 2 or mask.shape[-1] != k.shape[2] or mask.shape[-2] not in (1, q.shape[2]):
        return False
    wide = mask.shape[-4:-2]  # [..., heads]
    return of_rows and all(n in (1, own) for n, own in zip(reversed(wide), (q.shape[1], q.shape[0]), strict=False))


# --- what is worth it ----------------------------------------------------------------------------

# Forward and backward of 4,096 tokens, 4 heads of 32, float32, AVX-512: a plain triangle took 0.8 of torch's time in
# rows of 128 and 0.7 in rows of 512, documents of 64 tokens 0.4 and 0.2 of torch's time with their mask. So torch's
# kernel is not faster anywhere; it keeps what gains little, with its bits.
_SHORT = 64  # tokens of a row up to which a layout has one tile
_SHARE = 0.9  # of the tiles that torch's kernel computes


def _pays(tiles: Layout, hides_more: bool) -> bool:
    """Return whether attention to some tiles takes less time than torch's kernel with a mask, which computes all pairs
    or, beside a triangle that it is told of, about half of them. `hides_more`: documents or padding, tiles of each row.
    """
    heads, queries, keys = tiles.sizes
    if max(queries, keys) <= _SHORT:
        return False
    below = torch.ones(tiles.status.shape[1:], dtype=torch.bool).tril()
    within = queries == keys and not bool(tiles.status[:, ~below].any())
    torchs = float(below.sum()) / below.numel() if within else 1.0
    return hides_more or tiles.share <= _SHARE * torchs


# --- a mask's factors ----------------------------------------------------------------------------


def _allowed(values: Values, node: Node, sizes: Sizes) -> Allowed | None:
    _, queries, keys = sizes
    factors = _factors(values, node)
    if values.is_written(node) or any(values.is_written(x.node) for x in factors):
        return None
    documents = [(x, found) for x in factors if (found := _documents(values, x)) is not None]
    if len(documents) > 1 or documents and queries != keys:
        return None
    own = documents[0][1] if documents else None
    patterns: list[Pattern] = []
    padding: list[Node] = []
    for factor in factors:
        if documents and factor is documents[0][0]:
            continue
        pattern = _pattern(values, factor, own, (queries, keys))
        if pattern is not None:
            patterns.append(pattern)
        elif _is_padding(factor, keys):
            padding.append(factor.node)
        else:
            return None
    tiles = _tiles(patterns, sizes, own is not None)
    if tiles is None or not _pays(tiles, own is not None or bool(padding)):
        return None
    return Allowed(tiles, None if own is None else own.numbers, tuple(padding), {})


def is_conjunction(node: Node) -> bool:
    """Return whether a mask allows what two others both do."""
    is_and = isinstance(node.target, OpOverload) and base_name(node.target) in _ANDS
    return is_and and all(isinstance(x, Node) for x in node.args)


def _factors(values: Values, node: Node, lifted: bool = False) -> list[_Factor]:
    """Return what a mask is the conjunction of. What was written to is a factor as a whole."""
    while node.target in (*SAME, aten.expand.default) or node.target is aten.unsqueeze.default:
        if node.target is aten.unsqueeze.default:
            if lifted or node.args[1] not in (1, -3) or node.meta["val"].dim() != 4:
                break
            lifted = True
        node = node.args[0]  # type: ignore[assignment]
    if not is_conjunction(node) or values.is_written(node):
        return [_Factor(node, lifted)]
    return [x for arg in node.args for x in _factors(values, arg, lifted)]  # type: ignore[arg-type]


def _tiles(patterns: list[Pattern], sizes: Sizes, of_documents: bool) -> Layout | None:
    """Return the tiles that patterns allow; None if that leaves a query without a key, where torch gives other values
    than zeros.
    """
    bands = [x for x in patterns if isinstance(x, Band)]
    band = Band(max([1 - sizes.queries, *(x.low for x in bands)]), min([sizes.keys - 1, *(x.high for x in bands)]))
    given = [x for x in patterns if isinstance(x, Given)]
    if not given and not bands:
        return known(Everything(), sizes)
    if not given:
        return known(band, sizes) if sizes.queries == sizes.keys and band.low <= 0 <= band.high else None
    mask = given[0].mask
    for x in given[1:]:
        mask = mask & x.mask
    place = [torch.arange(n) for n in sizes[1:]]
    mask = mask & band.allowed(place[0], place[0][:, None], place[1], sizes)
    all_have = mask.diagonal(dim1=1, dim2=2).all() if of_documents else mask.any(2).all()
    return layout(Given(mask), *sizes[1:], heads=len(mask)) if bool(all_have) else None


def _pattern(values: Values, factor: _Factor, documents: _Documents | None, sizes: tuple[int, int]) -> Pattern | None:
    """Return which places a factor allows; None if that depends on more than places."""
    band = _band(values, factor, documents)
    if band is not None:
        return Band(
            *(x if bound is None else bound for x, bound in zip((1 - sizes[0], sizes[1] - 1), band, strict=True))
        )
    value = values.of(factor.node)
    mask = None if value is None else booleans_of(value)
    if mask is not None and bool(mask.all()):
        return Everything()
    if mask is None or math.prod(sizes) > known_values.MOST:
        return None
    mask = factor.four(mask).expand(-1, -1, *sizes)
    if len(mask) > 1 and not torch.equal(mask[1:], mask[:1].expand_as(mask[1:])):
        return None
    return Given(mask[0])


def _is_padding(factor: _Factor, keys: int) -> bool:
    """Return whether a factor hides some of a row's keys from all queries."""
    note = factor.node.meta["val"]
    return (
        note.dtype == torch.bool
        and note.dim() == 4 - factor.lifted
        and note.shape[1:] == (*[1] * (note.dim() - 2), keys)
    )


def _documents(values: Values, factor: _Factor) -> _Documents | None:
    """Return the documents of a factor that allows pairs of tokens with one number."""
    name, queries, keys = _compared(values, factor)
    if name != "eq" or queries is None or keys is None:
        return None
    numbers, source = _of_tokens(queries.source), queries.source
    if keys.source is not source or queries.more != keys.more or numbers is None:
        return None
    if not _is_count(values, source) or not _are_of(numbers, queries, keys):
        return None
    return _Documents(source, _positions(values, source))


def _is_count(values: Values, node: Node) -> bool:
    """Return whether numbers [rows, tokens] are a cumulative sum of booleans along tokens."""
    if node.target is not aten.cumsum.default or values.is_written(node):
        return False
    note, begins = node.meta["val"], _uncopied(values, node.args[0])
    if note.dtype not in _COUNTS or note.dim() > 2 or node.args[1] not in (-1, note.dim() - 1):
        return False
    return begins is not None and begins.meta["val"].dtype == torch.bool


def _uncopied(values: Values, node: Any) -> Node | None:
    """Return what a node is a copy of in other numbers, the node itself if of nothing; None if it was written to."""
    while isinstance(node, Node) and not values.is_written(node):
        if node.target is not aten._to_copy.default:
            return node
        node = node.args[0]
    return None


def _positions(values: Values, numbers: Node) -> tuple[Node, Tensor] | None:
    """Return (source, elements [rows, tokens]) of the positions that documents follow: a new one begins wherever a
    position is not that of the token before it and one more.
    """
    begins = _uncopied(values, numbers.args[0])
    if begins is None or begins.target is not aten.ne.Scalar or begins.args[1] != 1:
        return None
    steps = begins.args[0]
    if not isinstance(steps, Node) or steps.target is not aten.sub.Tensor or values.is_written(steps):
        return None
    if steps.kwargs or not all(isinstance(x, Node) for x in steps.args):
        return None
    here, before = steps.args
    source = root_of(here)  # type: ignore[arg-type]
    if source.target is aten.cat.default:  # what torch.diff(prepend=) makes
        source = root_of(source.args[0][-1])  # type: ignore[index, arg-type]
    own, last = (elements_of(values, x, source) for x in (here, before))  # type: ignore[arg-type]
    if own is None or last is None or source.meta["val"].dtype not in _COUNTS:
        return None
    if own.shape != numbers.meta["val"].shape or bool((own < 0).any()) or not torch.equal(last[..., 1:], own[..., :-1]):
        return None
    return source, own if own.dim() == 2 else own[None]


def _band(values: Values, factor: _Factor, documents: _Documents | None) -> tuple[int | None, int | None] | None:
    """Return the least and the greatest of key - query that a comparison of places, or of positions, allows."""
    name, queries, keys = _compared(values, factor)
    if queries is None or keys is None:
        return None
    more = 0
    if documents is not None and documents.positions is not None and queries.source is documents.positions[0]:
        if keys.source is not queries.source or not _are_of(documents.positions[1], queries, keys):
            return None
    else:
        of_queries, of_keys = (_first_place(values, x) for x in (queries, keys))
        if of_queries is None or of_keys is None:
            return None
        more = of_queries - of_keys
    found: tuple[int | None, int | None] = _BANDS[name](queries.more - keys.more + more)
    return found


def _first_place(values: Values, side: _Side) -> int | None:
    """Return the first of places that go on by one; None of others."""
    value = values.of(side.source)
    if value is None or value.dtype not in _COUNTS or not value.numel():
        return None
    places = value.flatten()[side.at]
    row = places.reshape(-1, max(places.shape[-2:]))
    first = int(row[0, 0])
    return first if torch.equal(row, (first + torch.arange(row.shape[1])).expand_as(row).to(row.dtype)) else None


# --- comparisons ---------------------------------------------------------------------------------


def _compared(values: Values, factor: _Factor) -> tuple[str, _Side | None, _Side | None]:
    """Return (comparison, queries, keys) of a factor that compares keys with queries; ("", None, None) of others."""
    node, none = factor.node, ("", None, None)
    name = base_name(node.target) if isinstance(node.target, OpOverload) else ""
    if name not in _BANDS or len(node.args) != 2:
        return none
    first, second = (_side(values, x, factor) for x in node.args)
    if first is None or second is None or first.of_queries == second.of_queries:
        return none
    return (_TURNED[name], first, second) if first.of_queries else (name, second, first)


def _side(values: Values, node: Any, factor: _Factor) -> _Side | None:
    more = 0
    while isinstance(node, Node) and isinstance(node.target, OpOverload) and base_name(node.target) in _SIGNS:
        x, number = node.args[:2]
        if type(number) is not int or len(node.args) > 2 or node.kwargs:
            break
        more += _SIGNS[base_name(node.target)] * number
        node = x
    if not isinstance(node, Node) or node.meta["val"].dtype not in _COUNTS:
        return None
    source = root_of(node)
    at = elements_of(values, node, source)
    if at is None or bool((at < 0).any()):
        return None
    at = factor.four(at)
    for dim in (-1, -2):  # expanded before the comparison
        at = at.narrow(dim, 0, 1) if at.stride(dim) == 0 and at.shape[dim] > 1 else at
    return _Side(source, at, more) if 1 in at.shape[-2:] and max(at.shape[-2:]) > 1 else None


def _of_tokens(source: Node) -> Tensor | None:
    """Return the number of each element of a source [rows, tokens]."""
    shape = source.meta["val"].shape
    if len(shape) not in (1, 2):
        return None
    return torch.arange(shape.numel()).view(-1, shape[-1])


def _are_of(tokens: Tensor, queries: _Side, keys: _Side) -> bool:
    """Return whether two sides are those of all pairs of tokens in a row, of elements [rows, tokens]."""
    sides = (queries.at, tokens[:, None, :, None]), (keys.at, tokens[:, None, None, :])
    for at, wanted in sides:
        if at.shape[-2:] != wanted.shape[-2:] or len(wanted) not in (1, len(at)) or not bool((at == wanted).all()):
            return False
    return True
