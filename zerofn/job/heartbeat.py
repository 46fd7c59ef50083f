"""Every rank says once a second that it runs, and what takes it long; who waits for it reads that.

A thread does, with a connection of its own to the job's store. So a rank that writes to a slow drive is told from one
that is frozen or gone. The same thread hears of failures: a message is known here before the rank that holds the
store, and failed, has ended. Transfers of gloo end when the other rank's connections close; where they do not, as
NCCL's, the thread aborts the groups, and the failure is raised at the next wait and at the end of the step.

It also looks after the next rank. A process that is stopped, or whose machine is, keeps its connections, so whoever
waits for a transfer from it would wait for half an hour: after `PATIENCE` seconds without a sign the threads end all
transfers, and every rank raises. The store may be what is silent, so another thread looks after the first. Under
torchrun, which would wait for the silent rank to end, ranks on the same machine kill it as they stop.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from .._torch_compat import abort_groups, groups_of_process
from ..util.other_processes import this_process
from ..util.process import the
from .failures import (
    GIVEN_UP,
    Signs,
    backend_on,
    ends_by_itself,
    kill_given_up,
    publish_failure,
    published_failure,
    store_of_job,
)
from .signed_store import SignedStore
from .waiting import Wait, Waiting


def _patience(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"ZEROFN_PATIENCE: expected a number of seconds above 0, got {text!r}.")
    return seconds


PATIENCE = _patience(os.environ.get("ZEROFN_PATIENCE", "120"))  # seconds to wait for a rank that does something else
SECONDS = 1.0
_GRACE = 5.0  # seconds in which transfers should have ended by themselves after a failure
_HEARING = 2.0  # seconds in which others hear of it, before the rank that may hold the store raises
_NO_TAG = 1 << 30  # of a transfer that nobody sends
_ALIVE, _HEARD = "zerofn/alive/", "zerofn/heard/"  # and a rank


@contextlib.contextmanager
def beside(channel: str) -> Iterator[None]:
    """Inside, this thread agrees with the same threads of other ranks, beside what the program agrees on."""
    threads = the(Heartbeat).threads
    before, threads.channel = channel_now(), channel
    try:
        yield
    finally:
        threads.channel = before


def channel_now() -> str:
    """Return the channel of this thread: "" is the program's own."""
    return str(getattr(the(Heartbeat).threads, "channel", ""))


class Heartbeat:
    """This rank's. `threads`: the channel of each thread."""

    def __init__(self) -> None:
        self.threads = threading.local()
        self._doing: dict[str, list[str]] = {}  # what it works at that others may wait for, by channel
        self._store: SignedStore | None = None
        self._group: weakref.ref[dist.ProcessGroup] | None = None  # a group with references keeps its connections
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._waits, self._waiting = Wait(0.0, ""), Waiting()
        self._beats, self._last = 0, 0.0  # `_last`: when the store has answered last
        self._beating = threading.Lock()

    def start(self) -> None:
        """Begin, if this rank has a job and the thread does not run yet."""
        if self._is_of_this_job():
            return
        store, group = store_of_job(), dist.group.WORLD
        if store is None or group is None:  # after a failure, the watch may take the group down at any moment
            return
        self.stop()
        self._store, self._over = store.connected_again(), threading.Event()
        self._group = weakref.ref(group)
        the(Signs).mute, the(Signs).aborted, self._last = False, None, time.monotonic()
        self.beat()
        for work, name in ((self._go_on, "zerofn-heartbeat"), (self._guard, "zerofn-guard")):
            self._threads.append(threading.Thread(target=work, args=(self._over,), name=name, daemon=True))
            self._threads[-1].start()
        atexit.register(self.stop)

    def _is_of_this_job(self) -> bool:
        group = None if self._group is None else self._group()
        return group is not None and dist.is_initialized() and group is dist.group.WORLD

    def stop(self) -> None:
        """End the threads: one that runs while the interpreter ends may crash it. A rank that leaves is not frozen."""
        self._over.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * SECONDS)
        if self._threads and self._is_of_this_job() and not the(Signs).mute:
            with self._beating, contextlib.suppress(RuntimeError):
                self._store.set(f"{_ALIVE}{dist.get_rank()}", "")  # type: ignore[union-attr]
        self._threads, self._group = [], None

    def forked(self) -> None:
        """A forked process is not a rank."""
        self.__init__()  # type: ignore[misc]

    @contextlib.contextmanager
    def at_work(self, what: str) -> Iterator[None]:
        """Inside, ranks that wait for this one wait as long as it takes."""
        self.start()
        channel = channel_now()
        with self._beating:
            self._doing.setdefault(channel, []).append(what)
        self.beat()
        try:
            yield
        finally:
            with self._beating:
                self._doing[channel].pop()
                if not self._doing[channel]:
                    del self._doing[channel]
            self.beat()

    def beat(self) -> None:
        """Say that this rank runs, now."""
        with self._beating, contextlib.suppress(RuntimeError):  # the store may be gone
            if self._store is not None and dist.is_initialized():
                self._beats += 1
                doing = {channel: what[-1] for channel, what in self._doing.items()}
                said = [self._beats, doing, this_process(), self._waits]
                self._store.set(f"{_ALIVE}{dist.get_rank()}", json.dumps(said))

    def _go_on(self, over: threading.Event) -> None:
        store = self._store
        if store is None:
            return
        rank, size = dist.get_rank(), dist.get_world_size()
        after, waits = Sign(store, (rank + 1) % size), 0.0
        while not over.wait(SECONDS) and self._is_of_this_job():
            self._waits = self._waiting.look()
            self.beat()
            with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone, or the group
                after.look()
                if after.silent > PATIENCE:
                    publish_failure(after.give_up(PATIENCE))
                message = published_failure(store)
                if message is not None and the(Signs).heard is None:
                    the(Signs).heard = message
                    store.set(f"{_HEARD}{rank}", "")
                if message is not None and not all(map(ends_by_itself, groups_of_process())):
                    with the(Signs).leaving:
                        the(Signs).taken_down = the(Signs).aborted = message
                        abort_groups()
                waits = 0.0 if message is None else waits + SECONDS
                if waits > (_HEARING if after.silent > PATIENCE else _GRACE):
                    end_transfers()
                    kill_given_up(store)
                self._last = time.monotonic()

    def _guard(self, over: threading.Event) -> None:
        silent, seen = 0.0, self._last
        while not over.wait(SECONDS) and silent <= PATIENCE:
            silent, seen = (0.0 if self._last != seen else silent + SECONDS), self._last
        if not over.is_set():
            the(Signs).heard = the(Signs).heard or (
                f"the job's store did not answer for {PATIENCE:g} s: rank 0, which holds it, or the launcher is "
                "frozen, has ended, or its machine is gone."
            )
            the(Signs).mute = True
            end_transfers()


def end_transfers() -> None:
    """Let transfers on the host fail that wait for a rank which is there and does nothing.

    gloo closes the connections of a group when one of its transfers has waited too long; this begins one for that.
    """
    for group in groups_of_process():
        for other in range(group.size() if backend_on(group) == "gloo" else 0):
            with contextlib.suppress(RuntimeError):  # it has waited, or that connection is closed already
                if other != group.rank():
                    group.recv([torch.empty(1)], other, _NO_TAG).wait(timedelta(milliseconds=1))


class Sign:
    """What is known of another rank while this one waits for it. `silent`: seconds without a sign of life, of those in
    which this process ran; 0 for a rank that has never given one, or has left the program. `left`: whether it has.
    """

    def __init__(self, store: SignedStore, rank: int) -> None:
        self._store, self.rank = store, rank
        self._text, self._looked, self.silent, self.left = "", time.monotonic(), 0.0, False
        self.look()

    def look(self) -> None:
        """See whether it has given another sign of life."""
        found, now = self._store.get(f"{_ALIVE}{self.rank}"), time.monotonic()
        text, self.left = found or "", found == ""
        since, self._looked = min(now - self._looked, 2 * SECONDS), now  # a job that was stopped as a whole goes on
        self.silent = 0.0 if text != self._text or not text else self.silent + since
        self._text = text

    def give_up(self, seconds: float) -> str:
        """Name its process as one to kill; return what to tell all ranks. `seconds`: how long it was waited for."""
        with contextlib.suppress(RuntimeError):
            self._store.set(GIVEN_UP, json.dumps(json.loads(self._text)[2] if self._text else {}))
        silent = f"rank {self.rank} gave no sign of life for {seconds:g} s."
        return f"{silent} It is frozen, was killed, or its machine is gone."

    @property
    def waits(self) -> Wait:
        """What its program waited for when it gave this sign."""
        return Wait(*json.loads(self._text)[3]) if self._text else Wait(0.0, "")

    @property
    def doing(self) -> str:
        """What it works at, in the channel of this thread."""
        return str(json.loads(self._text)[1].get(channel_now(), "")) if self._text else ""


def wait_until_heard(seconds: float) -> None:
    """Wait until all ranks that run have heard of this one's failure: the store may end with this process."""
    store = store_of_job()
    if store is None:
        return
    own, end = dist.get_rank(), time.monotonic() + seconds
    others = [r for r in range(dist.get_world_size()) if r != own and store.get(f"{_ALIVE}{r}") is not None]
    while time.monotonic() < end and any(store.get(f"{_HEARD}{r}") is None for r in others):
        time.sleep(0.05)


def heartbeat() -> Heartbeat:
    """Return the process's."""
    return the(Heartbeat)
