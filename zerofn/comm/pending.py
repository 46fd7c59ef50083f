"""One thread that posts transfers, one after another, so that the step goes on computing meanwhile."""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def post(task: Callable[[], Any]) -> Callable[[], Any]:
    """Have `task` called by the thread, after those that were given before; -> the way to wait for its result."""
    done: Future[Any] = Future()
    _tasks().put((done, task))
    return done.result


@functools.cache
def _tasks() -> queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]:
    """What is to be done. An executor of `concurrent.futures` would refuse work as soon as the main thread has ended,
    though another one may still train."""
    tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
    threading.Thread(target=_work, args=(tasks,), name="zerofn-transfers", daemon=True).start()
    return tasks


def _work(tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]) -> None:
    while True:
        done, task = tasks.get()
        try:
            done.set_result(task())
        except BaseException as error:  # for whoever asks for the result
            done.set_exception(error)
        del done, task  # or what they hold would live until the next ones come


os.register_at_fork(after_in_child=_tasks.cache_clear)  # a forked process has no such thread
