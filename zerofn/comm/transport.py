"""How bytes move: each transfer is a *start* and a *wait*, two nodes in a captured graph.

On gloo a start posts `isend`/`irecv` pairs, and the wait sums what arrived in rank order (gloo's own reduce-scatter is
an all-reduce and a slice, which sends twice as much). Other backends use their own collectives, which take contiguous
tensors of few dtypes: what is only moved goes as bytes. They sum in an order of their own, unless `Sums` says
otherwise. A start returns the tensor that will hold the result; its contents are undefined until the wait.

[Note: order] Tags count the transfers of a group, so transfers match in the order of their starts: every rank must
start the same ones in the same order. `compile` compares fingerprints of that order over ranks, and `meetings` what
ranks do.

[Note: coded] Transfers of units may name a wire codec (`wire`). Of an all-gather in bfloat16, what is received lies in
the result's own memory until the wait decodes it there, this rank's part included; blocks of codes (`block_wire`) lie
in memory beside it. A reduce-scatter sends each rank its row, encoded once. The owner adds the decoded rows, its own
included, in float32 and in rank order on every backend. `start`: the element of the unit at which the transfer's part
of it begins, where it is not all of the unit. With a `key` codes are drawn: for one key the same ones, however the unit
is cut. Ranks have keys of their own, so that their errors are independent.

[Note: posting] gloo's `isend` and `irecv` take a lock that its own thread holds while it copies bytes, and a send
writes what fits into the socket before it returns. On two cores that stalled the caller for 2 to 4 % of a step. So one
thread does all the posting; the tag is assigned where the transfer starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch_compat import all_gather_single, reduce_scatter_single
from ..job.failures import Signs, backend_on, group_named
from ..job.in_flight import Works, pending
from ..job.step_order import meetings
from ..memory.arena import empty
from ..ops.registry import Lane, Moves, OnShard, Traits, define
from ..random.draws import seed_of_codes
from ..util.process import the
from .wire import codec_named, nbytes_on_wire, row_bytes

_MOVED_AS_THEY_ARE = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
)


class Sums:
    """`in_rank_order`: whether other backends than gloo, whose order is their own, also sum so."""

    in_rank_order = False


class SentBytes:
    """Bytes that this process has sent to other ranks, by the name of their group. Plans are compared with them."""

    def __init__(self) -> None:
        self.by_group: Counter[str] = Counter()


def count_sent(group: str, nbytes: int) -> None:
    """Count bytes that this process sends."""
    the(SentBytes).by_group[group] += nbytes


def wait_(tensor: Tensor) -> Tensor:
    """Wait for the transfer into `tensor`, if there is one. Raises `RanksOutOfStep` if other ranks do other things."""
    meetings().settle()
    if pending().wait(tensor):
        the(Signs).raise_if_aborted()  # it may have ended because it was aborted
    return tensor


def point_to_point(group: str, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Works:
    """Post transfers to and from ranks; see [Note: posting]. Every rank counts it, also one that takes no part."""
    pg = meetings().host_of(group_named(group))
    tag = meetings().next_tag(group_named(group))
    count_sent(group, sum(t.nbytes for t in sends.values()))
    if not any(t.numel() for t in (*sends.values(), *receives.values())):
        return list  # nothing to wait for: empty tensors all have one address
    # Each rank begins with its right neighbour, so that no rank is first for all.
    rank, size = pg.rank(), pg.size()
    peers = sorted(sends, key=lambda p: (p - rank) % size)

    def transfers() -> list[dist.Work]:
        works = [pg.recv([t], peer, tag) for peer, t in receives.items()]
        return works + [pg.send([sends[peer]], peer, tag) for peer in peers]

    return pending().post(transfers)


def group_for(group: str, tensor: Tensor) -> dist.ProcessGroup:
    """Return the group that moves a tensor: one of NCCL alone moves none of the host's."""
    named = group_named(group)
    return meetings().host_of(named) if tensor.device.type == "cpu" else named


def is_gloo(group: str, tensor: Tensor) -> bool:
    """Return whether gloo moves a tensor between the ranks of a group."""
    return tensor.device.type == "cpu" and backend_on(group_for(group, tensor)) == "gloo"


def as_bytes(flat: Tensor) -> Tensor:
    """Return the same memory in a dtype that every backend moves: NCCL knows no int16, for example."""
    return flat if flat.dtype in _MOVED_AS_THEY_ARE else flat.view(torch.uint8)


def _meet(group: str, what: str, x: Tensor, unit: str = "", codec: str = "") -> None:
    """Outside a captured step, tell the next rank what this one does."""
    if not meetings().captured or meetings().refused:
        named = f"{what} of {unit!r}" if unit else what
        meetings().begin(group, named, f"{tuple(x.shape)} {x.dtype}{codec and ' as '}{codec}")


def all_gather_start(
    shard: Tensor,
    size: int,
    group: str,
    unit: str,
    codec: str = "",
    own: Sequence[int] | None = None,
    place: Sequence[int] = (),
    kept: bool = True,
    start: int = 0,
) -> Tensor:
    """shard [s] on each rank -> [size * s], shards in rank order.

    `codec`, `start`: see [Note: coded]. `own`: copy only this interval of the local shard; other elements of it are not
    read. `place`: in an arena; memory of its own if empty. `kept`: a captured step keeps the result for its backward
    pass, or else gathers it again there.
    """
    _meet(group, "all_gather", shard, unit, codec)
    full = empty(size * shard.numel(), shard.dtype, shard.device, place)
    if not full.numel():  # of a unit of which these ranks have nothing
        return full
    if codec:
        how, rank = codec_named(codec), dist.get_rank(group_named(group))
        coded = how.rows_in(full, size, start)
        how.encode_row(shard.contiguous(), coded, rank, start)
        _fill_rows(full, coded, rank, group, partial(how.decode_rows, full, coded, start))
        return full
    shard = shard.contiguous()  # the gradient of what is frozen is one zero, repeated
    if not is_gloo(group, shard):
        count_sent(group, shard.nbytes * (size - 1))
        work = all_gather_single(as_bytes(full), as_bytes(shard), group=group_for(group, shard), async_op=True)
        return pending().start(full, lambda: [work], (shard,))
    rows, rank = full.view(size, -1), dist.get_rank(group_named(group))
    others = [r for r in range(size) if r != rank]
    works = point_to_point(group, dict.fromkeys(others, shard), {r: rows[r] for r in others})
    a, b = own or (0, shard.numel())
    rows[rank, a:b].copy_(shard[a:b])
    return pending().start(full, works, (shard,))


def all_gather_in_place_start(
    full: Tensor, rank: int, size: int, group: str, unit: str, codec: str = "", start: int = 0
) -> None:
    """All-gather in place: `full` [size * s] has this rank's current shard; the others are filled in. With a codec, see
    [Note: coded], this rank's shard in it is rounded, too.
    """
    _meet(group, "all_gather", full, unit, codec)
    if not full.numel():
        return
    if codec:
        how = codec_named(codec)
        coded = how.rows_of(full, size, rank, start)
        _fill_rows(full, coded, rank, group, partial(how.decode_rows, full, coded, start))
    else:
        _fill_rows(full, full.view(size, -1), rank, group)


def _fill_rows(full: Tensor, rows: Tensor, rank: int, group: str, finish: Callable[[], None] = lambda: None) -> None:
    """Start the all-gather of rows [size, s], of which this rank's is there; `finish` makes `full` of them."""
    if not is_gloo(group, full):
        count_sent(group, _to_others(rows, len(rows)))
        work = all_gather_single(
            as_bytes(rows.view(-1)), as_bytes(rows[rank]), group=group_for(group, rows), async_op=True
        )
        pending().start(full, lambda: [work], (), finish)
        return
    others = [r for r in range(len(rows)) if r != rank]
    works = point_to_point(group, dict.fromkeys(others, rows[rank]), {r: rows[r] for r in others})
    pending().start(full, works, (), finish)


def reduce_scatter_start(
    flat: Tensor,
    size: int,
    group: str,
    unit: str,
    codec: str = "",
    key: Tensor | None = None,
    number: int = 0,
    start: int = 0,
) -> Tensor:
    """flat [size * s] -> [s]: the sum over ranks, in rank order, of this rank's shard. `codec`, `start`: see [Note:
    coded]. `number`: among the transfers whose codes a key draws.
    """
    _meet(group, "reduce_scatter", flat, unit, codec)
    if not flat.numel():
        return flat.new_empty(0)
    if codec or the(Sums).in_rank_order or is_gloo(group, flat):
        drawn = None if key is None or not codec else seed_of_codes(key, number)
        return _summed(flat.contiguous().view(size, -1), group, codec, start, drawn)
    count_sent(group, _to_others(flat, size))
    flat, out = flat.contiguous(), flat.new_empty(flat.numel() // size)
    work = reduce_scatter_single(out, flat, group=group_for(group, flat), async_op=True)
    return pending().start(out, lambda: [work], (flat,))


def _summed(rows: Tensor, group: str, codec: str, start: int, key: int | None) -> Tensor:
    """rows [size, s] -> [s]: every rank gets its row of all ranks, and sums them in rank order."""
    how, rank = codec_named(codec) if codec else None, dist.get_rank(group_named(group))
    sent = rows if how is None else how.encode_all(rows, start, key)
    found, works = _exchanged(sent, group)
    out = rows.new_empty(rows.shape[1]) if how else found[1 if rank == 0 else 0]  # in a buffer that was received

    def finish() -> None:
        if how is not None:
            how.sum_(out, found, start + rank * out.numel())
            return
        torch.add(found[0], found[1], out=out)
        for row in found[2:]:
            out.add_(row)

    return pending().start(out, works, (sent, *found), finish)


def _exchanged(rows: Tensor, group: str, into: Tensor | None = None) -> tuple[list[Tensor], Works]:
    """Start to send row r of [size, s] to rank r. Return (this rank's row of every rank, what to wait for). On gloo,
    each lies in memory of its own, and one's own row where it was, unless all are to be in `into` [size, s].
    """
    size, rank = len(rows), dist.get_rank(group_named(group))
    if not is_gloo(group, rows):
        into = torch.empty_like(rows) if into is None else into
        count_sent(group, _to_others(rows, size))
        flat = (as_bytes(into.view(-1)), as_bytes(rows.view(-1)))
        work = dist.all_to_all_single(*flat, group=group_for(group, rows), async_op=True)
        return list(into), lambda: [work]
    found = [x if r == rank else torch.empty_like(x) for r, x in enumerate(rows)] if into is None else list(into)
    others = [r for r in range(size) if r != rank]
    works = point_to_point(group, {r: rows[r] for r in others}, {r: found[r] for r in others})
    if into is not None:
        into[rank].copy_(rows[rank])
    return found, works


def exchange_start(rows: Tensor, size: int, group: str, purpose: str = "") -> Tensor:
    """rows [size, s] -> [size, s]: row r goes to rank r, and row r of the result comes from rank r. `purpose`: a text
    that must be the same on all ranks.
    """
    _meet(group, f"all_to_all for {purpose}" if purpose else "all_to_all", rows)
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    _, works = _exchanged(rows, group, out)
    return pending().start(out, works, (rows,))


def permute_start(x: Tensor, sources: Sequence[int], group: str, purpose: str = "") -> Tensor:
    """Rank r receives the tensor of rank `sources[r]`. `purpose`: as for `exchange_start`."""
    _meet(group, f"permute for {purpose}" if purpose else f"permute from {list(sources)}", x)
    pg, x = group_for(group, x), x.contiguous()
    rank, out = pg.rank(), torch.empty_like(x)
    sends = {r: x for r, s in enumerate(sources) if s == rank and r != rank}
    receives = {} if sources[rank] == rank else {sources[rank]: out}
    if not is_gloo(group, x):
        count_sent(group, x.nbytes * len(sends))
        begun = _swapped(pg, sends, receives)
        if not receives:
            out.copy_(x)
        return pending().start(out, lambda: begun, (x,))
    works = point_to_point(group, sends, receives)
    if not receives:
        out.copy_(x)
    return pending().start(out, works, (x,))


def broadcast_start(x: Tensor, source: int, others: Sequence[int], group: str, what: str) -> Tensor:
    """Send the tensor of rank `source` into those of `others`; return `x`. Ranks that are neither keep what they have.
    `what`: its name, for errors.
    """
    _meet(group, "broadcast", x, what)
    pg = group_for(group, x)
    sends = dict.fromkeys(others, x) if pg.rank() == source else {}
    receives = {source: x} if pg.rank() in others else {}
    if not is_gloo(group, x):
        count_sent(group, x.nbytes * len(sends))
        begun = _swapped(pg, sends, receives)
        return pending().start(x, lambda: begun, ())
    return pending().start(x, point_to_point(group, sends, receives), ())


def _swapped(pg: dist.ProcessGroup, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> list[dist.Work]:
    """Start transfers to and from ranks on backends other than gloo, at once."""
    ends = ((dist.isend, sends), (dist.irecv, receives))
    ops = [dist.P2POp(f, as_bytes(t.view(-1)), group=pg, group_peer=r) for f, to in ends for r, t in to.items()]
    return dist.batch_isend_irecv(ops) if ops else []


def _to_others(whole: Tensor, size: int, codec: str = "", start: int = 0) -> int:
    """Return the bytes of a tensor without this rank's own part, as they are sent."""
    return row_bytes(whole.numel() // size, whole.itemsize, codec, size, start) * (size - 1)


define(
    "all_gather(Tensor shard, int size, str group, str unit, str codec='', *, int[]? own=None, int[] place=[], "
    "bool kept=True, int start=0) -> Tensor",
    all_gather_start,
    lambda shard, size, *_, **__: shard.new_empty(shard.numel() * size),
    traits=Traits(
        OnShard.LEAVES,
        Moves(
            Lane.LINK,
            lambda given, _: (
                nbytes_on_wire(given["shard"], given["codec"], given["size"], given["start"]) * (given["size"] - 1)
            ),
        ),
        "gather",
        replicated=True,
    ),
)
define(
    "reduce_scatter(Tensor flat, int size, str group, str unit, str codec='', Tensor? key=None, *, int number=0, "
    "int start=0) -> Tensor",
    reduce_scatter_start,
    lambda flat, size, *_, **__: flat.new_empty(flat.numel() // size),
    traits=Traits(
        OnShard.MAKES,
        Moves(Lane.LINK, lambda given, _: _to_others(given["flat"], given["size"], given["codec"], given["start"])),
        "scatter",
    ),
)
define(
    "all_gather_into_(Tensor(a!) full, int rank, int size, str group, str unit, str codec='', *, int start=0) -> ()",
    all_gather_in_place_start,
    lambda *_, **__: None,
    traits=Traits(
        OnShard.LEAVES,
        Moves(Lane.LINK, lambda given, _: _to_others(given["full"], given["size"], given["codec"], given["start"])),
        "gather in place",
    ),
)
define(
    "exchange(Tensor rows, int size, str group, str purpose='') -> Tensor",
    exchange_start,
    lambda rows, size, group, purpose="": torch.empty_like(rows),
    traits=Traits(
        OnShard.REFUSED,
        Moves(Lane.LINK, lambda given, _: _to_others(given["rows"], given["size"])),
        "exchange",
        rank_dependent=True,
    ),
)
define(
    "permute(Tensor x, int[] sources, str group, str purpose='') -> Tensor",
    permute_start,
    lambda x, sources, group, purpose="": torch.empty_like(x),
    traits=Traits(OnShard.REFUSED, Moves(Lane.LINK, lambda given, _: given["x"].nbytes), "permute"),
)
define("wait(Tensor(a) x) -> Tensor(a)", wait_, lambda x: x, traits=Traits(OnShard.KEEPS, passes_on=True, free=True))
