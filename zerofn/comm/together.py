"""What ranks do together: all get through it, or all raise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from ..checkpoint.tensor_file import CheckpointError
from .agreement import exchange, fingerprint

T = TypeVar("T")
log = logging.getLogger("zerofn")


def rank_and_size() -> tuple[int, int]:
    """This rank among all of the job, and how many there are; a fake group has one."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def together(what: str, work: Callable[[], T]) -> T:
    """What `work()` returns, once it has succeeded on every rank.

    Where it raised, that rank raises the same and all others a `CheckpointError` with its message. Ranks that
    work longer than others call `agreement.alive`.
    """
    error: Exception | None = None
    try:
        result = work()
    except OSError as raised:
        name = raised.filename2 or raised.filename
        error = CheckpointError(f"{what}: {raised.strerror or raised}{f': {name}' if name else ''}.")
        error.__cause__ = raised
    except Exception as raised:
        error = raised
    replies = exchange(what, "" if error is None else _told(error).removeprefix(f"{what}: "))
    if error is not None:
        raise error
    for rank, reply in enumerate(replies):
        if reply:
            raise CheckpointError(f"{what}: rank {rank} failed: {reply}")
    return result


def _told(error: Exception) -> str:
    meant = isinstance(error, CheckpointError | ValueError | TypeError) and str(error)
    return str(error) if meant else repr(error)


def on_rank_0(what: str, work: Callable[[], None]) -> None:
    """`together`, with `work` on the first rank alone."""
    together(what, work if rank_and_size()[0] == 0 else lambda: None)


def first_difference(what: str, lines: Sequence[str]) -> tuple[int, str, str] | None:
    """(rank, line here, line there) of the first line that differs on another rank; None where none does."""
    text = "\n".join(lines)
    if len(set(exchange(what, fingerprint(text)))) == 1:
        return None
    for rank, other in enumerate(exchange(f"{what}, in full", text)):
        if other != text:
            there = other.split("\n")
            for k in range(max(len(lines), len(there))):
                pair = [x[k] if k < len(x) else "nothing" for x in (lines, there)]
                if pair[0] != pair[1]:
                    return rank, pair[0], pair[1]
    return 0, text, text
