"""Ranks agree through the rendezvous store, and a rank that fails tells the others why.

A collective cannot be used for this: the rank that never arrives is exactly the case to report.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from ..util.errors import CheckpointError, said
from ..util.process import the
from .failures import (
    LAST_TEXT,
    Signs,
    abandon,
    apart,
    backend_on,
    last_text,
    published_failure,
    store_of_job,
    tell_others,
)
from .meetings import meetings


def _patience(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"ZEROFN_PATIENCE: expected a number of seconds above 0, got {text!r}.")
    return seconds


PATIENCE = _patience(os.environ.get("ZEROFN_PATIENCE", "30"))  # seconds until a missing rank is reported
_RAISED = "\1"  # begins the text of a rank that failed


T = TypeVar("T")


def agree(what: str, text: str) -> None:
    """Raise `RuntimeError` on every rank unless all ranks call this with the same `what` and `text`.

    Waits up to `PATIENCE` seconds for missing ranks, then names them. If a rank fails meanwhile, its message ends
    the wait.
    """
    for r, other in enumerate(_round(what, text)):
        if other != f"{what}\0{text}":
            raise RuntimeError(_difference(what, text, r, other))


def exchange(what: str, text: str) -> list[str]:
    """Return every rank's `text`, by rank. Waits and raises as `agree` does, but texts may differ."""
    theirs = _round(what, text)
    for r, other in enumerate(theirs):
        if not other.startswith(f"{what}\0"):
            raise RuntimeError(_difference(what, text, r, other))
    return [other[len(what) + 1 :] for other in theirs]


def agree_on(what: str, make: Callable[[], tuple[T, str]]) -> T:
    """Return the value of `make() -> (value, text)` once every rank has come here with the same text.

    If `make` raises on some ranks, they raise that, and the others `RuntimeError` with its message. No rank is left
    waiting, and every rank can go on with its old state.
    """
    error: Exception | None = None
    try:
        value, text = make()
    except Exception as caught:
        error, text = caught, f"{_RAISED}{said(caught)}"
    theirs = _round(what, text)
    if error is not None:
        raise error
    for r, other in enumerate(theirs):
        if other.startswith(f"{what}\0{_RAISED}"):
            raise RuntimeError(f"{what}: stopped, because rank {r} failed. {other.partition(_RAISED)[2]}")
        if other != f"{what}\0{text}":
            raise RuntimeError(_difference(what, text, r, other))
    return value


def alive() -> None:
    """Tell the other ranks that this one is at work, which restarts their patience. At most once a second."""
    signs = the(Signs)
    if time.monotonic() - signs.last < 1.0:
        return
    signs.last = time.monotonic()
    store = store_of_job()
    if store is not None:
        store.set(f"zerofn/alive/{dist.get_rank()}", str(signs.last))


def _round(what: str, text: str) -> list[str]:
    """Exchange one text with every rank; return all, by rank: `what`, a zero byte, `text`."""
    mine = f"{what}\0{text}"
    store = store_of_job()
    if store is None:
        return [mine]
    tell_others()
    _raise_published(what)  # the others may have given up on this rank
    rank, size = dist.get_rank(), dist.get_world_size()
    number = store.add(f"zerofn/rounds/{rank}", 1)  # counted in the store, so that a new group starts again
    store.set(f"zerofn/agree/{number}/{rank}", mine)
    store.set(f"{LAST_TEXT}{rank}", mine)
    meetings().begin_round(what)
    theirs = [_await(store, number, r, what, text) for r in range(size)]
    meetings().end_round()
    return theirs


def _await(store: dist.Store, number: int, rank: int, what: str, text: str) -> str:
    key, deadline = f"zerofn/agree/{number}/{rank}", time.monotonic() + PATIENCE
    sign = None
    while not _arrives(store, key, 0.5):
        _raise_published(what)
        before, sign = sign, _sign_of(store, rank)
        if sign != before:
            deadline = time.monotonic() + PATIENCE
        if time.monotonic() > deadline:
            seen = last_text(store, rank)
            mine = f"{what}: {text}"
            message = (
                f"{what}: rank {rank} did not come within {PATIENCE:g} s. Every rank must call with the same "
                "structure, shapes and dtypes. If it was only late, preparing data, say: have ranks meet in "
                "torch.distributed.barrier() before, or set ZEROFN_PATIENCE to more seconds.\n"
                f"  here: {apart(mine, seen)}\n  rank {rank} last had: {apart(seen, mine)}"
            )
            abandon(message)
            raise RuntimeError(message)
    return store.get(key).decode()


def _raise_published(what: str) -> None:
    failed = published_failure()
    if failed is not None:
        abandon(failed)  # others may wait for this rank alone
        raise RuntimeError(f"{what}: stopped, because another rank failed. {failed}")


def _arrives(store: dist.Store, key: str, seconds: float) -> bool:
    """Whether a key is set within `seconds`. Asks now and then: `Store.wait` logs a warning when it times out."""
    end, pause = time.monotonic() + seconds, 0.001
    while not store.check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


def _sign_of(store: dist.Store, rank: int) -> str:
    """Return a rank's last sign of life."""
    key = f"zerofn/alive/{rank}"
    return store.get(key).decode() if store.check([key]) else ""


def _difference(what: str, text: str, rank: int, other: str) -> str:
    other_what, _, other_text = other.partition("\0")
    if other_what != what:
        return f"{what}: rank {rank} is at another point of the program, {other_what!r}. Ranks must do the same."
    here, there = text.split("\n"), other_text.split("\n")
    for a, b in zip(here, there, strict=False):
        if a != b:
            return f"{what}: ranks differ.\n  rank {dist.get_rank()}: {a}\n  rank {rank}: {b}"
    own, shorter = dist.get_rank(), min(len(here), len(there))
    longest, last = (own, here) if len(here) > len(there) else (rank, there)
    return (
        f"{what}: ranks differ. Rank {own} has {len(here)} lines, rank {rank} {len(there)}; rank {longest} goes on "
        f"with: {last[shorter]}"
    )


def fingerprint(text: str) -> str:
    """Return a short hash of a long description.

    >>> fingerprint("a") == fingerprint("a") != fingerprint("b")
    True
    """
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rank_and_size() -> tuple[int, int]:
    """Return this rank, and the number of ranks, of the whole job; a fake group has one rank."""
    if not dist.is_initialized() or backend_on(dist.group.WORLD) == "fake":
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def together(what: str, work: Callable[[], T]) -> T:
    """Return the result of `work()` once it has succeeded on every rank.

    If it raises, that rank raises the same, and all others raise `CheckpointError` with its message. Ranks that
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
    """Run `work` on the first rank alone, as `together` does."""
    together(what, work if rank_and_size()[0] == 0 else lambda: None)


def first_difference(what: str, lines: Sequence[str]) -> tuple[int, str, str] | None:
    """Return (rank, line here, line there) of the first line that differs on another rank; None if all are equal."""
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
