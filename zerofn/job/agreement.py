"""Ranks agree through the rendezvous store, and a rank that fails tells the others why.

A collective cannot be used for this: the rank that never arrives is exactly the case to report.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .._torch_compat import default_group
from ..memory.turns import refuse_while_capturing
from ..util.errors import CheckpointError, said
from ..util.process import the
from ..util.user_line import at_line, user_line
from .failures import (
    LAST_TEXT,
    RAISED,
    Signs,
    abandon,
    apart,
    backend_on,
    is_argument,
    last_text,
    publish_failure,
    published_failure,
    refuse_after_failure,
    store_of_job,
    tell_others,
)
from .heartbeat import PATIENCE, Sign, channel_now, heartbeat, wait_until_heard
from .reasons import reason
from .signed_store import PART, SignedStore
from .step_order import meetings

log = logging.getLogger("zerofn")


SILENCE = 20.0  # seconds without a sign of life until a rank is taken for frozen or gone; PATIENCE if that is less
ELSEWHERE = 25.0  # seconds until ranks that wait in a transfer are taken for waiting for this one
FIRST_WORD = 10.0  # seconds until a rank that waits says for whom
_LEFT = 1.0  # seconds until a rank that has ended is believed not to come
_BY_ALL = (
    "Every rank must make this call, with the same structure, shapes and dtypes. Do not write it under `if "
    "zerofn.rank() == 0:`."
)
_ONE_DTYPE = "Every rank's batch must have the same dtypes: write x.to(dtype) where the batch is made."
_ONE_SHAPE = "Every rank's batch must have the same shapes: drop_last=True in the loader, rows padded to one length."
_UNTIL_HEARD = 3.0  # seconds that rank 0 stays to tell why it failed
_LATE = 1 / 32  # of a wait: how much later than it could a wait ends, up to 50 ms
_OF_CALLS = (ValueError, TypeError, ImportError)  # what `together` raises of a call that is wrong itself


T = TypeVar("T")


def agree(what: str, text: str) -> None:
    """Raise `RuntimeError` on every rank unless all ranks call this with the same `what` and `text`.

    Waits for missing ranks: `SILENCE` seconds for one that gives no sign of life, `PATIENCE` for one that runs and
    does something else, and as long as it takes for one inside `together`; then names them. If a rank fails meanwhile,
    its message ends the wait.
    """
    for r, other in enumerate(_round(what, text)):
        if other != f"{what}\0{text}":
            raise RuntimeError(_difference(what, text, r, other))


def agree_among(what: str, part: str, text: str) -> None:
    """Raise `RuntimeError` on every rank unless ranks that give the same `part` give the same `text`. All ranks must
    call it. Waits as `agree` does.
    """
    told = [other.partition("\0")[::2] for other in exchange(what, f"{part}\0{text}")]
    first: dict[str, int] = {}
    for rank, (name, found) in enumerate(told):
        k = first.setdefault(name, rank)
        if told[k][1] != found:
            raise RuntimeError(_unequal(what, (k, told[k][1]), (rank, found)))


def exchange(what: str, text: str) -> list[str]:
    """Return every rank's `text`, by rank. Waits and raises as `agree` does, but texts may differ."""
    theirs = _round(what, text)
    for r, other in enumerate(theirs):
        if not other.startswith(f"{what}\0"):
            raise RuntimeError(_difference(what, text, r, other))
    return [other[len(what) + 1 :] for other in theirs]


def agree_on(what: str, make: Callable[[], tuple[T, str]], because: str = "") -> T:
    """Return the value of `make() -> (value, text)` once every rank has come here with the same text. `because`: why
    this rank comes here, for ranks that do something else.

    If `make` raises on some ranks, they raise that, and the others `RuntimeError` with its message. No rank is left
    waiting, and every rank can go on with its old state.
    """
    error: Exception | None = None
    try:
        value, text = make()
    except Exception as caught:
        error, text = caught, f"{RAISED}{said(caught)}"
    try:
        theirs = _round(what, text, because if error is None else "")
    except RuntimeError as ended:  # such as that others do something else, perhaps because of this rank's error
        if error is not None:
            raise error from ended
        raise
    if error is not None:
        raise error
    for r, other in enumerate(theirs):
        if other.startswith(f"{what}\0{RAISED}"):
            raise RuntimeError(f"{what}: stopped, because rank {r} failed. {other.partition(RAISED)[2]}")
        if other != f"{what}\0{text}":
            raise RuntimeError(_difference(what, text, r, other))
    return value


def exchange_on(what: str, make: Callable[[], str]) -> list[str]:
    """Return what `exchange` does of `make()`. If it raises on some ranks, all raise, as in `agree_on`."""
    return exchange(what, agree_on(what, lambda: (make(), "")))


def _round(what: str, text: str, because: str = "") -> list[str]:
    """Exchange one text with every rank; return all, by rank: `what`, a zero byte, `text`."""
    refuse_while_capturing(what)
    mine = f"{what}\0{text}"
    store = store_of_job()
    if store is None:
        return [mine]
    tell_others(_until_heard)
    heartbeat().start()
    because = because or reason()
    try:
        return _meet(store, what, text, f"{what}\0{because}" if because else mine)
    except dist.DistError as error:
        raise RuntimeError(
            f"{what}: stopped, because the job's store does not answer: rank 0, which hosts it, or the launcher has "
            f"ended. {the(Signs).heard or 'See the last output of rank 0.'}"
        ) from error
    except ValueError:  # there is no group: the watch, or the thread for signs of life, has just taken it down
        refuse_after_failure()
        raise


class _Rounds:
    """How many rounds this rank has been in, by group and channel. The store has it, too, for a next group on it."""

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = WeakKeyDictionary()

    def next(self, store: SignedStore, channel: str) -> int:
        """Return the number of a round that begins."""
        key = f"zerofn/rounds{channel}/{dist.get_rank()}"
        numbers = self._numbers.setdefault(default_group(), {})
        numbers[channel] = (numbers[channel] if channel in numbers else int(store.get(key) or 0)) + 1
        store.set(key, str(numbers[channel]))
        return numbers[channel]


def _meet(store: SignedStore, what: str, text: str, last: str) -> list[str]:
    _raise_published(what)  # the others may have given up on this rank
    rank, size, channel = dist.get_rank(), dist.get_world_size(), channel_now()
    number = the(_Rounds).next(store, channel)
    keys = [f"zerofn/agree{channel}/{number}/{r}" for r in range(size)]
    store.set(keys[rank], f"{what}\0{text}")
    if not channel:  # what a thread beside the program does is in step with nothing else
        store.set(f"{LAST_TEXT}{rank}", last[:PART])
        meetings().begin_round(what)
    try:
        theirs = [_await(store, keys, r, what, text) for r in range(size)]
    except KeyboardInterrupt:  # others may come to this round, or never have: ranks are out of step
        _leave(f"{what}: rank {rank} was interrupted while it waited for the other ranks.")
        raise
    if not channel:
        meetings().end_round()
    store.delete(f"zerofn/agree{channel}/{number - 1}/{rank}")  # every rank is here, so it has read all of those
    return theirs


def _await(store: SignedStore, keys: list[str], rank: int, what: str, text: str) -> str:
    start, word, key = time.monotonic(), FIRST_WORD, keys[rank]
    idle = start  # when it was last known to work at what takes long
    sign = Sign(store, rank)
    while (found := _arrives(store, key, 0.5)) is None:
        _raise_published(what)
        sign.look()
        now, silence = time.monotonic(), min(SILENCE, PATIENCE)
        idle = now if sign.doing else idle
        if sign.left and now - start > _LEFT and store.get(key) is None:
            _give_up(f"{what}: rank {rank} has ended without making this call. {reason() or _BY_ALL}")
        if sign.silent > silence:
            _give_up(f"{what}: {sign.give_up(silence)}{f' It was at {sign.doing}.' if sign.doing else ''}")
        if now - start > ELSEWHERE and (places := _elsewhere(store, keys)):
            line = None if reason() else user_line()
            at = at_line(line.file, line.number) if line else ""
            _give_up(f"{what}{at}: not all ranks make this call. {places}{reason() or _BY_ALL}")
        if now - idle > PATIENCE:
            seen, here = last_text(store, rank), f"{what}: {text}"
            _give_up(
                f"{what}: rank {rank} did not arrive within {PATIENCE:g} s. {reason() or _BY_ALL} If the rank was only "
                "late, because it prepared data for example, call torch.distributed.barrier() on all ranks before, or "
                "set ZEROFN_PATIENCE to more seconds.\n"
                f"  here: {apart(here, seen)}\n"
                f"  rank {rank} last had: {apart(seen, here)}"
            )
        if now - start > word:
            doing = f", which is at {sign.doing}" if sign.doing else ""
            if store.has_foreign(key):
                doing = ", whose messages have a different secret. ZEROFN_SECRET must be the same on all ranks"
            log.warning("%s: waited %.0f s for rank %d%s.", what, now - start, rank, doing)
            word *= 2
    return found


def _elsewhere(store: SignedStore, keys: list[str]) -> str:
    """Return where the ranks are that have not come, if all of them wait for others in a transfer; otherwise ""."""
    found = {rank: Sign(store, rank).waits for rank, key in enumerate(keys) if store.get(key) is None}
    if any(x.seconds < ELSEWHERE for x in found.values()):
        return ""
    return "".join(f"Rank {rank} has waited in {x.where} for {x.seconds:.0f} s. " for rank, x in found.items())


def _give_up(message: str) -> None:
    _leave(message)
    raise RuntimeError(message)


def _leave(message: str) -> None:
    """Tell the others, and take the group down. A thread beside the program leaves that to the program, which may be
    waiting for a transfer; the thread for signs of life ends those.
    """
    (publish_failure if channel_now() else abandon)(message)


def _until_heard() -> None:
    wait_until_heard(_UNTIL_HEARD)


def _raise_published(what: str) -> None:
    failed = published_failure()
    if failed is not None:
        _leave(failed)  # others may wait for this rank alone
        raise RuntimeError(f"{what}: stopped, because another rank failed. {failed}")


def _arrives(store: SignedStore, key: str, seconds: float) -> str | None:
    """Return what is set within `seconds`. Asks now and then: `Store.wait` logs a warning when it times out."""
    start = now = time.monotonic()
    while (found := store.get(key)) is None and now < start + seconds:
        time.sleep(min(0.001 + (now - start) * _LATE, 0.05))
        now = time.monotonic()
    return found


def _difference(what: str, text: str, rank: int, other: str) -> str:
    other_what, _, other_text = other.partition("\0")
    if other_what != what:
        why = [reason(), *_reason_of(rank, other_what, other_text)]
        return " ".join([
            f"{what}: rank {rank} is at a different point in the program, {other_what!r}. All ranks must make the same "
            "calls in the same order.",
            *filter(None, why),
        ])  # fmt: skip
    return _unequal(what, (dist.get_rank(), text), (rank, other_text))


def _reason_of(rank: int, what: str, text: str) -> list[str]:
    """Return why another rank has come to a round, if it told more than the text to agree on."""
    store = store_of_job()
    told, _, seen = ("", "", "") if store is None else last_text(store, rank).partition(": ")
    return [seen] if told == what and seen != text[: len(seen)] else []


def _unequal(what: str, one: tuple[int, str], other: tuple[int, str]) -> str:
    """Return the sentence about two ranks, each with its text."""
    (own, text), (rank, other_text) = one, other
    here, there = text.split("\n"), other_text.split("\n")
    for one_rank, lines, another, others in ((own, here, rank, there), (rank, there, own, here)):
        known = {x.partition(": ")[0] for x in others}
        missing = [x for x in lines if is_argument(x) and x.partition(": ")[0] not in known]
        if missing:
            return (
                f"{what}: ranks differ.\n"
                f"  rank {one_rank}: {missing[0]}\n"
                f"  rank {another}: no entry of that name\n"
                "Pass a state and a batch of the same structure on every rank."
            )
    for a, b in zip(here, there, strict=False):
        if a != b:
            of_batch = a.startswith("batch") and b.startswith("batch")
            shapes = [x.rpartition("]")[0] for x in (a, b)]  # of "batch.x: [3, 4] float32"
            advice = f"\n{_ONE_DTYPE if shapes[0] and shapes[0] == shapes[1] else _ONE_SHAPE}" if of_batch else ""
            if a.startswith("zerofn::") and re.sub(r"\d+", "", a) == re.sub(r"\d+", "", b):  # transfers
                advice = f"\n{_ONE_SHAPE}"
            return f"{what}: ranks differ.\n  rank {own}: {a}\n  rank {rank}: {b}{advice}"
    shorter = min(len(here), len(there))
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

    If it raises on some ranks, all raise an error of one type: `ValueError`, `TypeError` or `ImportError` if the first
    of these did, which is a mistake in the call, and `CheckpointError` for all else, such as a disk, a network, or
    memory that is full. Ranks wait for those that work longer.
    """
    return with_texts(what, lambda: (work(), ""))[0]


def with_texts(what: str, work: Callable[[], tuple[T, str]]) -> tuple[T, list[str]]:
    """Return the value of `work() -> (value, text)` and the texts of all ranks. Raises as `together` does."""
    error: Exception | None = None
    text = ""
    try:
        with heartbeat().at_work(what):
            value, text = work()
    except Exception as raised:
        error = raised if isinstance(raised, (CheckpointError, *_OF_CALLS)) else _as_checkpoint_error(what, raised)
        text = f"{RAISED}{_type_of(error).__name__}{RAISED}{str(error).removeprefix(f'{what}: ')}"
    replies = exchange(what, text)
    for rank, reply in enumerate(replies):
        if reply.startswith(RAISED):
            name, said_there = reply[1:].split(RAISED, 1)
            kind = next((x for x in _OF_CALLS if x.__name__ == name), CheckpointError)
            if error is None:
                raise kind(f"{what}: rank {rank} failed: {said_there}")
            if isinstance(error, kind):
                raise error
            raise kind(str(error)) from error
    return value, replies


def _type_of(error: Exception) -> type[Exception]:
    """Return the type by which all ranks raise an error."""
    return next((kind for kind in _OF_CALLS if isinstance(error, kind)), CheckpointError)


def _as_checkpoint_error(what: str, error: Exception) -> CheckpointError:
    if isinstance(error, OSError) and error.strerror:
        name = error.filename2 or error.filename
        text = f"{what}: {error.strerror}{f': {name}' if name else ''}."
    elif isinstance(error, RuntimeError) and str(error):
        text = str(error)
    else:
        text = f"{what}: {'out of memory' if isinstance(error, MemoryError) else said(error)}"
    found = CheckpointError(text)
    found.__cause__ = error
    return found


def on_rank_0(what: str, work: Callable[[], None]) -> None:
    """Run `work` on the first rank alone, as `together` does."""
    together(what, work if rank_and_size()[0] == 0 else lambda: None)


def first_difference(what: str, lines: Sequence[str]) -> tuple[int, str, str] | None:
    """Return (rank, line here, line there) of the first line that differs on another rank; None if all are equal."""
    if len(set(exchange(what, fingerprint("\n".join(lines))))) == 1:
        return None
    return difference_in_full(what, lines)


def difference_in_full(what: str, lines: Sequence[str]) -> tuple[int, str, str]:
    """Return what `first_difference` does, of lines that differ somewhere."""
    text = "\n".join(lines)
    for rank, other in enumerate(exchange(f"{what}, in full", text)):
        if other != text:
            there = other.split("\n")
            for k in range(max(len(lines), len(there))):
                pair = [x[k] if k < len(x) else "nothing" for x in (lines, there)]
                if pair[0] != pair[1]:
                    return rank, pair[0], pair[1]
    return 0, text, text
