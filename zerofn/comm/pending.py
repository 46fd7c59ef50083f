"""Transfers that were started and not yet waited for, and the thread that posts them."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from ..util.process import the
from .agreement import explained

Works = Callable[[], Sequence[Any]]  # `dist.Work` and its like: what to wait for, once all of it was posted
LEAVING = timedelta(seconds=10)  # at most, for other ranks that do not take what was sent to them


class Transfer(NamedTuple):
    """`works` are waited for, then `finish` is called; `kept` lives until then."""

    works: Works
    kept: tuple[Tensor, ...]
    finish: Callable[[], Any]


def _nothing() -> None:
    pass


class PendingTransfers:
    """What is under way. `generation`, from 1: what was under way in an earlier one never came."""

    def __init__(self) -> None:
        # By the address of the result, which the entry keeps alive: an address cannot be reused before its wait.
        self.transfers: dict[int, Transfer] = {}
        # By the group itself: one that is made anew, perhaps with other processes, begins anew.
        self._tags: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
        self.generation = 1
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] | None = None
        atexit.register(self._leave)

    def start(
        self, out: Tensor, works: Works, kept: tuple[Tensor, ...], finish: Callable[[], Any] = _nothing
    ) -> Tensor:
        """`out`, which `wait` makes good: it waits for `works`, then calls `finish`."""
        self.transfers[out.data_ptr()] = Transfer(works, (out, *kept), finish)
        return out

    def wait(self, tensor: Tensor) -> bool:
        """Wait for the transfer into `tensor`; -> whether one was under way."""
        transfer = self.transfers.pop(tensor.data_ptr(), None)
        if transfer is None:
            return False
        try:
            for work in transfer.works():
                work.wait()
        except RuntimeError as error:
            raise explained(error) from error
        transfer.finish()
        return True

    def wait_for_all(self) -> None:
        """Wait for every transfer that is under way: what the last step left of its end-of-step gather."""
        for transfer in list(self.transfers.values()):
            self.wait(transfer.kept[0])

    def forget(self) -> None:
        """Let go of transfers that will not be waited for: they would keep the connections of their group open, and
        other ranks waiting, when it is taken down. What they were to fill is of an earlier generation from here on."""
        self.generation += 1
        self.transfers.clear()

    def next_tag(self, group: dist.ProcessGroup) -> int:
        """The number of a group's next transfer."""
        tag = self._tags[group] = (self._tags.get(group, 0) + 1) % (1 << 30)
        return tag

    def post(self, task: Callable[[], Any]) -> Callable[[], Any]:
        """Have `task` called by a thread, after those that were given before, so that the step goes on computing
        meanwhile; -> the way to wait for its result."""
        if self._tasks is None:
            # An executor of `concurrent.futures` would refuse work as soon as the main thread has ended, though another
            # one may still train.
            self._tasks = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._tasks,), name="zerofn-transfers", daemon=True).start()
        done: Future[Any] = Future()
        self._tasks.put((done, task))
        return done.result

    def forked(self) -> None:
        """What is under way goes on in the process that started it, as does the thread."""
        self.forget()
        self._tasks = None

    def _leave(self) -> None:
        """At the end of the process: other ranks may wait for what this one has started to send."""
        with contextlib.suppress(RuntimeError):  # they may be gone
            for transfer in list(self.transfers.values()):
                for work in transfer.works():
                    work.wait(LEAVING)


def _work(tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]) -> None:
    while True:
        done, task = tasks.get()
        try:
            done.set_result(task())
        except BaseException as error:  # for whoever asks for the result
            done.set_exception(error)
        del done, task  # or what they hold would live until the next ones come


def pending() -> PendingTransfers:
    """The process's transfers."""
    return the(PendingTransfers)
