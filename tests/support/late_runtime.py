"""An adversarial runtime: what runs aside runs as late as it may, and memory that nobody owns is overwritten.

Transfers between ranks are posted, jobs of the update thread run, and drives read and write when somebody waits for
them, and not before. What they will write is overwritten when they start. malloc overwrites what is freed and what is
allocated, and arenas what they hand out. A program that declares what it depends on gives the same bits.

`ZEROFN_RUNTIME=late pytest tests/...` runs any test so.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from zerofn.comm import channels, transport
from zerofn.job import step_order as meetings
from zerofn.job.in_flight import PendingTransfers, pending
from zerofn.memory.arena import Arena
from zerofn.offload import host_worker
from zerofn.offload.disk.engine import Engine, Request

M_PERTURB = -6  # mallopt: freed memory gets this byte, new memory its complement
POISON = 0xA5
PATIENCE = 1.0  # seconds: ranks may wait for two transfers in either order, so who waits longer posts the others, too


def poison(x: torch.Tensor) -> None:
    """Overwrite a tensor's bytes."""
    if x.numel():
        x.view(-1).view(torch.uint8).fill_(POISON)


class LatePosts:
    """Transfers that are posted by the first who waits for them."""

    def __init__(self) -> None:
        self.waiting: deque[Post] = deque()
        self.lock = threading.RLock()

    def post(self, task: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that posts `task`; stands in for `PendingTransfers.post`."""
        found = Post(self, task)
        self.waiting.append(found)
        return found.works

    def begin_all(self) -> None:
        """Post everything."""
        with self.lock:
            while self.waiting:
                self.waiting[0].begin()


class Post:
    """One task, and the works that it returned."""

    def __init__(self, late: LatePosts, task: Callable[[], Any]) -> None:
        self._late, self._task, self._works = late, task, None

    def begin(self) -> None:
        with self._late.lock:
            if self._works is None:
                self._works = list(self._task())
                self._late.waiting.remove(self)

    def works(self) -> list[Any]:
        self.begin()
        return [Patient(self._late, work) for work in self._works]


class Patient:
    """A work whose wait posts what else was started, if other ranks seem to need that first."""

    def __init__(self, late: LatePosts, work: Any) -> None:
        self._late, self._work = late, work

    def wait(self, *timeout: Any) -> Any:
        alarm = threading.Timer(PATIENCE, self._late.begin_all)
        alarm.start()
        try:
            return self._work.wait(*timeout)
        finally:
            alarm.cancel()


class LateThread:
    """Stands in for the update thread's executor: jobs run where somebody waits for them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.jobs: deque[tuple[LateFuture, Any]] = deque()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future = LateFuture(self)
        self.jobs.append((future, lambda: function(*args)))
        return future

    def run_up_to(self, future: LateFuture) -> None:
        """Run the jobs up to this one, in order."""
        while not future.over:
            each, job = self.jobs.popleft()
            each.over = True
            try:
                each.set_result(job())
            except BaseException as error:
                each.set_exception(error)


class LateFuture(Future[Any]):
    """A job's result."""

    over = False

    def __init__(self, thread: LateThread) -> None:
        super().__init__()
        self.thread = thread

    def result(self, timeout: float | None = None) -> Any:
        self.thread.run_up_to(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.thread.run_up_to(self)
        return super().exception(timeout)


def _wait(futures: Any) -> None:
    for future in list(futures):
        future.thread.run_up_to(future)


class LateDrives:
    """Requests that threads get when somebody waits for them, or for a later one on their region."""

    def __init__(self, submit: Callable[..., None]) -> None:
        self._submit = submit
        self._waiting: list[tuple[Engine, Request]] = []

    def submit(self, engine: Engine, request: Request) -> None:
        """Stand in for `Engine.submit`."""
        if not request.writes:
            torch.frombuffer(request._memory, dtype=torch.uint8)[: request.region.nbytes].fill_(POISON)
        self._waiting.append((engine, request))

    def begin(self, request: Request) -> None:
        """Submit a request after the earlier ones on its region."""
        mine = [x for x in self._waiting if x[1].region is request.region]
        for pair in mine[: next((k + 1 for k, x in enumerate(mine) if x[1] is request), 0)]:
            self._waiting.remove(pair)
            self._submit(*pair)

    def begin_all(self) -> None:
        """Submit everything."""
        while self._waiting:
            self._submit(*self._waiting.pop(0))


@contextlib.contextmanager
def late() -> Iterator[None]:
    """Inside, everything is as late as it may be."""
    _settle()
    with pytest.MonkeyPatch.context() as patch:
        posts, drives = LatePosts(), LateDrives(Engine.submit)
        at_once = PendingTransfers.post

        def post(self: PendingTransfers, task: Callable[[], Any]) -> Callable[[], Any]:
            is_message = task.__module__ == meetings.__name__  # which no memory depends on, and others wait for
            return at_once(self, task) if is_message else posts.post(task)

        patch.setattr(PendingTransfers, "post", post)
        patch.setattr(host_worker, "ThreadPoolExecutor", LateThread)
        patch.setattr(host_worker, "wait", _wait)
        patch.setattr(Engine, "submit", lambda self, request: drives.submit(self, request))
        _before(patch, PendingTransfers, "forget", lambda _: posts.waiting.clear())
        _before(patch, Request, "wait", drives.begin)
        _after(patch, Arena, "part", poison)
        _receives_are_overwritten(patch)
        thread, host_worker.worker()._thread = host_worker.worker()._thread, None
        libc = ctypes.CDLL(None)
        libc.mallopt(M_PERTURB, POISON)
        try:
            yield
        finally:
            libc.mallopt(M_PERTURB, 0)
            posts.begin_all()
            drives.begin_all()
            _settle()
            host_worker.worker()._thread = thread


def _settle() -> None:
    host_worker.worker().finish()
    pending().wait_for_all()


def _before(patch: pytest.MonkeyPatch, owner: Any, name: str, hook: Callable[[Any], None]) -> None:
    function = getattr(owner, name)

    def wrapped(self: Any, *args: Any) -> Any:
        hook(self)
        return function(self, *args)

    patch.setattr(owner, name, wrapped)


def _after(patch: pytest.MonkeyPatch, owner: Any, name: str, hook: Callable[[Any], None]) -> None:
    function = getattr(owner, name)

    def wrapped(self: Any, *args: Any) -> Any:
        found = function(self, *args)
        hook(found)
        return found

    patch.setattr(owner, name, wrapped)


def _receives_are_overwritten(patch: pytest.MonkeyPatch) -> None:
    begin = transport.point_to_point

    def wrapped(group: str, sends: Any, receives: Any) -> Any:
        for x in receives.values():
            poison(x)
        return begin(group, sends, receives)

    patch.setattr(transport, "point_to_point", wrapped)
    message = channels._begun

    def of_message(x: torch.Tensor, peer: int, group: str, *, sends: bool) -> Any:
        if not sends:
            poison(x.as_strided((x.numel(),), (1,)))
        return message(x, peer, group, sends=sends)

    patch.setattr(channels, "_begun", of_message)
