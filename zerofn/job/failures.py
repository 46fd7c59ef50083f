"""A rank that fails says why through the rendezvous store, and takes its process group down, which ends the transfers
that other ranks wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .._torch_compat import abort_groups, default_store, groups_of_process, resolve_process_group
from ..util.arguments import checked
from ..util.errors import said
from ..util.other_processes import here
from ..util.process import the
from .signed_store import SignedStore

log = logging.getLogger("zerofn")

LAST_TEXT = "zerofn/last/"  # and a rank: what it had to agree on last
RAISED = "\1"  # begins the text of a rank that failed
GIVEN_UP = "zerofn/given up"  # which process was silent for too long
_FAILED = "zerofn/failed"
_SHOWN = 3  # lines of a long text
_END_BY_THEMSELVES = ("", "gloo", "fake")  # backends


def _never_destroyed(*things: Any) -> None:
    """Keep objects from being destroyed as the interpreter ends: torch's groups and stores would wait for threads that
    a forked process does not have, or crash.
    """
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class Signs:
    """What this rank has told the others.

    `heard`: what another rank has said when it failed. `mute`: whether the store does not answer. `taken_down`: why
    this one has taken its process group down, if it has; `leaving` is held while it does. `aborted`: why transfers were
    aborted that may seem to have ended. `before_leaving`: what drops
    references to the group, which would keep its connections open, and the other ranks waiting. `inherited`: in a
    forked process, the group of the rank that it was forked from.
    """

    def __init__(self) -> None:
        self.heard: str | None = None
        self.mute = False
        self.taken_down: str | None = None
        self.aborted: str | None = None
        self.leaving = threading.RLock()
        self.before_leaving: list[Callable[[], object]] = []
        self.inherited: dist.ProcessGroup | None = None

    def forked(self) -> None:
        """A forked process is not a rank: how it ends does not concern the job."""
        self.heard, self.mute, self.leaving = None, False, threading.RLock()
        if dist.is_initialized():
            self.inherited = dist.group.WORLD
            _never_destroyed(*groups_of_process(), default_store())

    def let_go(self) -> None:
        """Drop what refers to the group."""
        for drop in self.before_leaving:
            drop()

    def raise_if_aborted(self) -> None:
        """Raise `RuntimeError` if transfers were aborted: what they left is not a result."""
        if self.aborted is not None:
            self.let_go()
            raise RuntimeError(f"stopped, because another rank failed. {self.aborted}")


def backend_on(group: dist.ProcessGroup | None, device: str = "cpu") -> str:
    """Return the backend of a group for a device type, "" without one. A group that was made without a backend's name
    has one for each device type.
    """
    pairs = (x.partition(":") for x in dist.get_backend_config(group).split(","))
    return next((backend for kind, _, backend in pairs if kind == device), "")


def ends_by_itself(group: dist.ProcessGroup | None) -> bool:
    """Whether a group's transfers end when a rank is gone. A kernel of NCCL goes on waiting, and the host for it."""
    return backend_on(group, "cuda") in _END_BY_THEMSELVES


def refuse_after_failure() -> None:
    """Raise `RuntimeError` if this process has taken its group down: alone it is not part of the job."""
    taken_down = the(Signs).taken_down
    if taken_down is not None and not dist.is_initialized():
        raise RuntimeError(
            f"the process group was destroyed, because {taken_down}\n"
            "Restart the processes and load the last checkpoint."
        )


def is_rank() -> bool:
    """Whether this process is one of the job's ranks now: it has a group, and was not forked from a process that had
    that group before.
    """
    return dist.is_initialized() and dist.group.WORLD is not the(Signs).inherited


def refuse_in_fork() -> None:
    """Raise `RuntimeError` in a process that was forked from a rank."""
    if dist.is_initialized() and not is_rank():
        raise RuntimeError(
            f"this process was forked from rank {dist.get_rank()} and is not a rank itself. Steps, collectives and "
            "saves must run in the process that it was forked from. In a worker of a data loader, only read and return "
            "data."
        )


def group_named(name: str) -> dist.ProcessGroup:
    """Return the process group of an axis. Raises `RuntimeError`, with the reason, if it was taken down, and in a
    process that was forked from a rank.
    """
    refuse_in_fork()
    try:
        return resolve_process_group(name)
    except (RuntimeError, KeyError):
        refuse_after_failure()
        raise


def is_there(group: dist.ProcessGroup) -> bool:
    """Return whether a group was not taken down."""
    try:
        return resolve_process_group(group.group_name) is group
    except (RuntimeError, KeyError):
        return False


def store_of_job() -> SignedStore | None:
    """Return the rendezvous store; None for one rank or a fake group.

    torchrun keeps the store of a process group that the user made when it starts the ranks again; its keys say which
    attempt they are of.
    """
    refuse_after_failure()
    refuse_in_fork()
    if not dist.is_initialized() or dist.get_world_size() == 1 or backend_on(dist.group.WORLD) == "fake":
        return None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    return SignedStore(dist.PrefixStore(f"attempt {attempt}", default_store()))


def publish_failure(message: str) -> None:
    """Leave `message` for the other ranks, if the store is there still. The first one stays."""
    store = store_of_job() if is_rank() else None
    if store is not None and not the(Signs).mute:
        with contextlib.suppress(dist.DistError):
            store.set_first(_FAILED, f"rank {dist.get_rank()}: {message}")


def published_failure(store: SignedStore | None = None) -> str | None:
    """Return the message of a rank that failed, or None. `store`: a connection to the job's store."""
    if the(Signs).mute:
        return the(Signs).heard
    store = store or store_of_job()
    try:
        return None if store is None else store.get(_FAILED)
    except dist.DistError:  # the store went down with the rank that held it
        return the(Signs).heard


def abandon(message: str) -> None:
    """Leave `message` for the other ranks, and take this rank's process group down, which ends their transfers."""
    if not is_rank():
        return
    publish_failure(message)
    store = store_of_job()
    if store is not None:
        published = published_failure(store)
        the(Signs).taken_down = published or message
        if published is not None and not the(Signs).mute:
            kill_given_up(store)
        the(Signs).let_go()
        if backend_on(dist.group.WORLD, "cuda") == "nccl":  # to destroy a group, one waits for its kernels
            abort_groups()
        else:
            dist.destroy_process_group()


@checked()
def abort(message: str) -> None:
    """Tell the other ranks that this one cannot continue, and leave the process group.

    Ranks that wait for this one raise a `RuntimeError` with `message`, instead of waiting until this process ends. For
    programs that continue after an error, such as notebooks and servers; a program that ends tells the other ranks by
    itself. Afterwards no rank has a process group: start the processes again. Does nothing without a group.

    >>> import zerofn
    >>> zerofn.abort("rank 0 found no rows")  # without a group it does nothing
    """
    abandon(message)


def kill_given_up(store: SignedStore) -> None:
    """Kill the process that a rank has given up, if it is on this machine and torchrun would wait for it to end.

    Says why before: torchrun ends this process at once when it sees that the other has ended.
    """
    with contextlib.suppress(dist.DistError):
        process = json.loads(store.get(GIVEN_UP) or "{}")
        if "TORCHELASTIC_RUN_ID" in os.environ and here(process):
            log.error("%s Process %d is killed.", published_failure(store), process["pid"])
            with contextlib.suppress(ProcessLookupError):  # another rank was faster
                os.kill(process["pid"], signal.SIGKILL)


def explained(error: BaseException) -> BaseException:
    """Return the failed rank's message if a transfer ended because of it; otherwise `error`.

    In the first case this rank's group is taken down, too: others may wait for this rank alone.
    """
    try:
        with the(Signs).leaving:
            message = published_failure() if is_rank() else the(Signs).taken_down
    except (RuntimeError, dist.DistStoreError):  # the store went down with the rank that held it
        message = None
    message = message or the(Signs).heard
    if message is not None:
        with contextlib.suppress(RuntimeError, dist.DistStoreError):
            abandon(message)
        the(Signs).let_go()
        return RuntimeError(f"stopped, because another rank failed. {message}")
    if "closed by peer" in str(error) or "reset by peer" in str(error):
        return RuntimeError(
            "stopped, because another rank has ended: its program finished, was killed, or took fewer steps than this "
            "one. See the last output of that rank."
        )
    return error


def _is_of_transfer(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


@functools.cache
def tell_others(until_heard: Callable[[], None]) -> None:
    """From now on, leave a message for the other ranks when any error ends this process, and say what they left where
    a transfer of torch's own has failed. `until_heard` waits for them on rank 0, which may hold the store.
    """
    before = sys.excepthook

    def leave(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        with contextlib.suppress(RuntimeError, dist.DistStoreError):  # the store may be gone
            publish_failure(said(error))
        before(kind, error, trace)
        if _is_of_transfer(error) and (told := explained(error)) is not error:  # torch's own, such as a barrier
            before(type(told), told, None)
        with contextlib.suppress(RuntimeError, dist.DistStoreError):
            if is_rank() and dist.get_rank() == 0:
                until_heard()

    sys.excepthook = leave


def last_text(store: SignedStore, rank: int) -> str:
    """Return what a rank had to agree on last."""
    return (
        (store.get(f"{LAST_TEXT}{rank}") or "nothing yet")
        .replace("\0", ": ")
        .replace(f": {RAISED}", ": failed with ")
        .replace(RAISED, ": ")
    )


def apart(text: str, other: str) -> str:
    """Return the first lines of a text that the other lacks; its first lines if it lacks none. Of the arguments of two
    steps, the entries come first that only one of them has; then lines of names that the other has, too.
    """
    mine, theirs = text.split("\n"), other.split("\n")
    names, others = set(map(_name, mine)), set(map(_name, theirs))
    lines = [x for x in mine if is_argument(x) and _name(x) not in others]
    lines += [f"no entry {_name(x)}" for x in theirs if is_argument(x) and _name(x) not in names]
    if not lines or not all(any(map(is_argument, x)) for x in (mine, theirs)):
        lines = [x for x in mine if x not in theirs] or mine
        lines = [x for x in lines if ": " in x and _name(x) in others] or lines
    more = [f"(and {len(lines) - _SHOWN} lines more)"] if len(lines) > _SHOWN else []
    return "\n    ".join([*lines[:_SHOWN], *more])


def is_argument(line: str) -> bool:
    """Whether a line of a text that ranks compare is about an argument of a step."""
    return line.startswith(("batch.", "state."))


def _name(line: str) -> str:
    return line.partition(": ")[0]
