"""A model of torch's caching allocator, on a device whose host is infinitely far ahead.

Memory is free in the order of the host's calls, which is the order of the device's stream. Blocks are split and merged
within segments, and no segment is given back. What another stream was told to use (`record_stream`) is free once that
stream has come so far, which the host, so far ahead, does not see before the step's end. Sizes are those of
`c10/cuda/CUDACachingAllocator.cpp` divided by `SCALE`: small models have the fragments of large ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from zerofn.runtime import executor

SCALE = 512
ROUND, SMALL = 512 // SCALE, (1 << 20) // SCALE  # bytes: sizes are multiples; the largest that is small
SMALL_SEGMENT, SEGMENT, LARGE, STEP = 2 * SMALL, 20 * SMALL, 10 * SMALL, 2 * SMALL
RECORDED, END = "recorded at ", "the end of a step"


class Block:
    """Bytes of a segment, between its neighbours there."""

    def __init__(self, nbytes: int, small: bool, before: Block | None = None, after: Block | None = None) -> None:
        self.nbytes, self.small, self.free = nbytes, small, False
        self.before, self.after = before, after


class CachingAllocator:
    """`reserved`: bytes of segments. `kept`: blocks that another stream uses. `expandable`: one segment for small and
    one for other sizes, which grow at their ends, as with torch's `expandable_segments`.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.reserved, self.expandable = 0, expandable
        self._last: dict[bool, Block] = {}  # of expandable segments
        self.kept: list[Block] = []
        self._free: list[Block] = []

    def malloc(self, nbytes: int) -> Block:
        """Return the smallest free block that is large enough, or a new one."""
        size = max(-(-nbytes // ROUND), 1) * ROUND
        small = size <= SMALL
        fits = [x for x in self._free if x.small == small and x.nbytes >= size]
        if fits:
            block = min(fits, key=lambda x: x.nbytes)
        else:
            block = (self._grown if self.expandable else self._segment)(size, small)
        if block.free:
            self._free.remove(block)
            block.free = False
        rest = block.nbytes - size
        if rest >= ROUND if small or self.expandable else rest > SMALL:
            block.nbytes = size
            other = Block(rest, small, block, block.after)
            if block.after is not None:
                block.after.before = other
            else:
                self._last[small] = other
            block.after = other
            self.release(other)
        return block

    def _segment(self, size: int, small: bool) -> Block:
        nbytes = SMALL_SEGMENT if small else SEGMENT if size < LARGE else -(-size // STEP) * STEP
        self.reserved += nbytes
        return Block(nbytes, small)

    def _grown(self, size: int, small: bool) -> Block:
        """Return the last block of a segment, which is made large enough."""
        last, page = self._last.get(small), STEP if small else SEGMENT
        free = last is not None and last.free
        more = -(-(size - last.nbytes * free if last else size) // page) * page
        self.reserved += more
        if last is not None and free:
            last.nbytes += more
            return last
        block = self._last[small] = Block(more, small, last)
        if last is not None:
            last.after = block
        return block

    def release(self, block: Block) -> None:
        """Free a block, and make one of it and its free neighbours."""
        if block.before is not None and block.before.free:
            block = self._joined(block.before, block)
            self._free.remove(block)
        if block.after is not None and block.after.free:
            self._free.remove(block.after)
            block = self._joined(block, block.after)
        block.free = True
        self._free.append(block)

    def _joined(self, one: Block, other: Block) -> Block:
        one.nbytes, one.after = one.nbytes + other.nbytes, other.after
        if one.after is not None:
            one.after.before = one
        elif other is self._last.get(other.small):
            self._last[one.small] = one
        return one


def reserved(step: Callable[[], Any], times: int, expandable: bool = False) -> int:
    """Return the bytes that the allocator would reserve for what `step` allocates on this thread, run some times."""
    model = CachingAllocator(expandable)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        for _ in range(times):
            step()
            _say(END)
    blocks: dict[int, Block] = {}  # by address
    recorded: set[int] = set()
    tree = prof.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    for event in sorted(_events(tree), key=lambda x: x.start_time_ns):
        kind, what = event.typed
        if str(kind).endswith("Allocation") and what.alloc_size > 0:
            blocks[what.ptr] = model.malloc(what.alloc_size)
        elif str(kind).endswith("Allocation") and what.ptr in blocks:
            (model.kept.append if what.ptr in recorded else model.release)(blocks.pop(what.ptr))
            recorded.discard(what.ptr)
        elif event.name.startswith(RECORDED):
            recorded.add(int(event.name.removeprefix(RECORDED)))
        elif event.name == END:
            while model.kept:
                model.release(model.kept.pop())
    return model.reserved


def _events(events: Any) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _events(event.children)


def _say(what: str) -> None:
    with record_function(what):
        pass


def record_copies(patch: pytest.MonkeyPatch) -> None:
    """Let steps that are captured from now on tell the allocator of each copy between host and device: another stream
    uses what it reads and writes.
    """
    callable_of = executor.callable_of

    def recording(target: Any, *more: Any) -> Callable[..., Any]:
        function = callable_of(target, *more)
        if target is not torch.ops.zerofn.bring.default:
            return function

        def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            out: torch.Tensor = function(x, *args, **kwargs)
            for each in (x, out):
                _say(f"{RECORDED}{each.untyped_storage().data_ptr()}")
            return out

        return call

    patch.setattr(executor, "callable_of", recording)
