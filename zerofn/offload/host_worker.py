"""The thread that updates state on the host (*aside*), while the caller continues to launch kernels."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor

from .._torch_compat import below_autograd
from ..job.in_flight import pending
from ..util.errors import said
from ..util.process import the
from .copy_engine import Landed, copies

BEHIND = 12  # jobs that may queue while more gradients are sent: two or three units' updates


class HostWorker:
    """One thread that runs jobs in order. After a job fails, later ones do not run."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self.jobs: deque[Future[Any]] = deque()  # jobs that are not known to be done
        self._failed: list[BaseException] = []  # what a job has raised, until `tell` raises it
        self._owed: WeakSet[Any] = WeakSet()  # the `Sharded`s that jobs write to
        self._last: Callable[[], Any] = _nobody  # whose jobs these are

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function on the thread, after earlier jobs. Their results may be arguments."""
        while self.jobs and self.jobs[0].done() and not self.jobs[0].exception():
            self.jobs.popleft()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="zerofn update")
        self.jobs.append(self._thread.submit(self._call, function, args, kwargs, _caller_stream()))
        return self.jobs[-1]

    def submit_for(self, place: Tensor, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Submit a job, and let the next user of `place` wait for it."""
        future = self.submit(function, *args)
        pending().start(place, lambda: [_Job(self, future, place)], tuple(x for x in args if x is not place))
        return future

    def hold_back(self) -> None:
        """Block the caller while the thread is far behind: each gradient in the queue takes memory."""
        while len(self.jobs) > BEHIND and not self._failed:
            wait([self.jobs.popleft()])

    def serve(self, user: Any) -> None:
        """Note whose jobs come next, and finish those of another one: a captured step waits for its own jobs only."""
        if self._last() is not user:
            self.finish()
            self._last = ref(user)

    def finish(self) -> None:
        """Wait for all jobs and for their copies. Raises what a job raised."""
        while self.jobs:
            self.tell(self.jobs.popleft())
        self._owed.clear()
        copies().wait_for_all()

    def owe(self, states: Callable[[], Iterable[Any]]) -> None:
        """Note the `Sharded`s, returned by a step, that jobs write to: they are lost if a job fails. `Sharded`
        asks here.
        """
        if self.jobs:
            self._owed.update(states())

    def end(self) -> None:
        """Finish the previous step's updates, so that its state is complete, and the copies of a failed step.

        The next step may get the memory of such a copy. Raises nothing: after a failure, later jobs did not
        run, and the states are lost.
        """
        wait(self.jobs)
        self.jobs.clear()
        copies().end()
        for state in list(self._owed) if self._failed else ():
            why = f"This state was lost when its update failed: {said(self._failed[0])}. Load the last checkpoint."
            state.donate(why)
        self._owed.clear()
        self._failed.clear()

    def wait_for(self, future: Future[Any]) -> None:
        """Wait for a job, which may have failed."""
        wait([future])

    def tell(self, future: Future[Any]) -> None:
        """Wait for a job, and raise the first failure, once."""
        self.wait_for(future)
        if self._failed:
            error = self._failed[0]
            self.end()
            raise error
        future.result()

    def _call(
        self, function: Callable[..., Any], args: Any, kwargs: Any, stream: contextlib.AbstractContextManager[Any]
    ) -> Any:
        if self._failed:
            return None
        try:
            with below_autograd(), stream:
                return function(*map(_value, args), **{k: _value(x) for k, x in kwargs.items()})
        except BaseException as error:
            self._failed.append(error)
            raise


class _Job:
    """A job, and the tensor that it writes last."""

    def __init__(self, worker: HostWorker, future: Future[Any], written: Tensor) -> None:
        self._worker, self._future, self._written = worker, future, written

    def wait(self, timeout: Any = None) -> None:
        """Wait until it is done; raise what it raised."""
        self._worker.tell(self._future)
        event = copies().landing.pop(self._written.data_ptr(), None)
        if event is not None:
            Landed(event, self._written.device).wait()


def _caller_stream() -> contextlib.AbstractContextManager[Any]:
    """Return what makes a thread use the caller's stream; a new thread has the default one of the first device."""
    if not torch.cuda.is_initialized():
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.current_stream())


def _nobody() -> None:
    return None


def _value(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [_value(y) for y in x]
    x = x.result() if isinstance(x, Future) else x
    if isinstance(x, Tensor) and x.device.type == "cpu":
        copies().left(x)
    return x


def worker() -> HostWorker:
    """Return the process's worker."""
    return the(HostWorker)


def aside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Run a function on the process's worker. Generated code calls this."""
    return worker().submit(function, *args, **kwargs)
