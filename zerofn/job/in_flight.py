"""Transfers under way, and the thread that posts them."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

from torch import Tensor

from ..util.process import the
from .failures import Signs, explained

Works = Callable[[], list[Any]]  # `dist.Work` and the like: what to wait for once everything was posted
LEAVING = timedelta(seconds=10)  # seconds, at most, for ranks that do not take what was sent to them


class Transfer(NamedTuple):
    """`wait` waits for `works`, then calls `finish`. `kept` stays alive until then."""

    works: Works
    kept: tuple[Tensor, ...]
    finish: Callable[[], Any]


def _nothing() -> None:
    pass


class PendingTransfers:
    """The transfers under way. `generation`, from 1, grows when a failed step drops its transfers: what they should
    have filled is invalid.
    """

    def __init__(self) -> None:
        # By the address of the result, which the entry keeps alive: an address cannot be reused before its wait.
        self.transfers: dict[int, Transfer] = {}
        self.generation = 1
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] | None = None
        atexit.register(self._leave)
        the(Signs).before_leaving.append(self.forget)

    def start(
        self, out: Tensor, works: Works, kept: tuple[Tensor, ...], finish: Callable[[], Any] = _nothing
    ) -> Tensor:
        """Return `out` at once. `wait` on it waits for `works`, then calls `finish`."""
        self.transfers[out.data_ptr()] = Transfer(works, (out, *kept), finish)
        return out

    def wait(self, tensor: Tensor) -> bool:
        """Wait for the transfer into `tensor`, and return whether there was one."""
        transfer = self.transfers.pop(tensor.data_ptr(), None)
        if transfer is None:
            return False
        ended(transfer.works)
        transfer.finish()
        return True

    def wait_for_all(self) -> None:
        """Wait for every transfer under way, such as the last step's all-gather of parameters."""
        for transfer in list(self.transfers.values()):
            self.wait(transfer.kept[0])

    def forget(self) -> None:
        """Drop transfers that nobody will wait for, and begin a new generation.

        Otherwise they would keep their group's connections open when it is taken down, and other ranks waiting.
        """
        self.generation += 1
        self.transfers.clear()

    def post(self, task: Callable[[], Any]) -> Callable[[], Any]:
        """Call `task` on a thread, after earlier tasks, and return a function that waits for its result."""
        if self._tasks is None:
            # An executor of `concurrent.futures` would refuse work as soon as the main thread has ended, though another
            # one may still train.
            self._tasks = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._tasks,), name="zerofn-transfers", daemon=True).start()
        done: Future[Any] = Future()
        self._tasks.put((done, task))
        return done.result

    def forked(self) -> None:
        """Drop everything in a forked process: the parent has the transfers and the thread."""
        self.forget()
        self._tasks = None

    def _leave(self) -> None:
        """At the end of the process, finish what other ranks may wait for."""
        with contextlib.suppress(RuntimeError):  # they may be gone
            for transfer in list(self.transfers.values()):
                for work in transfer.works():
                    work.wait(LEAVING)


def ended(works: Works) -> None:
    """Wait for transfers. Raises `RuntimeError` if they cannot end, and lets go of them then: a transfer, and a frame
    that failed to post one, keep the connections open that end what other ranks wait for.
    """
    begun: list[Any] = []
    try:
        begun = works()
        for work in begun:
            work.wait()
    except RuntimeError as error:
        work = None
        begun.clear()
        error.__traceback__ = None
        raise explained(error) from error


def _work(tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]) -> None:
    while True:
        done, task = tasks.get()
        try:
            done.set_result(task())
        except BaseException as error:  # raised where the result is asked for
            done.set_exception(error)
        del done, task  # otherwise their tensors would live until the next task


def pending() -> PendingTransfers:
    """Return the process's transfers."""
    return the(PendingTransfers)
