"""A process that forks others: itself forked when all tests are imported and none has run. So whoever is forked begins
at once, with what tests import and without what they leave behind."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

Work = Callable[[Connection], None]


@dataclass(frozen=True)
class Forked:
    """A process of the server's. `connection`: to it; it should end when that is closed."""

    server: ForkServer
    pid: int
    connection: Connection
    log: Path

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def join(self, seconds: float) -> int | None:
        """The exit code, negative for a signal; None if it has not ended by then."""
        answer = self.server.ask(f"join {self.pid} {seconds}")
        return None if answer == "runs" else int(answer)


class ForkServer:
    """`start(log)` forks a process that calls `work(connection)`, which gets the other end of its connection, and
    writes what it prints into the file `log`."""

    def __init__(self, work: Work) -> None:
        gc.freeze()  # whoever collects garbage writes to every page of it, which all share
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            _as_a_process(_serve, theirs, work)
        theirs.close()

    def start(self, log: Path) -> Forked:
        ours, theirs = multiprocessing.Pipe()
        pid = int(self.ask(f"fork {log}", theirs.fileno()))
        theirs.close()  # so that a process that has ended reads as end of file
        return Forked(self, pid, ours, log)

    def ask(self, request: str, *handles: int) -> str:
        socket.send_fds(self._requests, [request.encode()], handles)
        return self._requests.recv(64).decode()

    def close(self) -> None:
        self._requests.close()
        os.waitpid(self._pid, 0)


def _as_a_process(function: Callable[..., None], *args: object) -> None:
    """Call it and end, with nothing of what the process that forked this one would do at its end."""
    try:
        function(*args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _serve(requests: socket.socket, work: Work) -> None:
    _let_go(requests.fileno())
    codes: dict[int, str] = {}  # of those that have ended
    while True:
        message, handles, *_ = socket.recv_fds(requests, 4096, 1)
        if not message:
            return
        kind, *words = message.decode().split(" ", 1 if message.startswith(b"fork") else -1)
        if kind == "fork":
            pid = os.fork()
            if pid == 0:
                requests.close()
                _as_a_process(_begin, work, handles[0], *words)
            os.close(handles[0])
            codes.pop(pid, None)
            requests.send(str(pid).encode())
        else:
            pid = int(words[0])
            codes[pid] = codes.get(pid) or _ended(pid, float(words[1]))
            requests.send((codes[pid] or "runs").encode())


def _begin(work: Work, handle: int, log: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _print_into(log)
    work(Connection(handle))


def _ended(pid: int, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return str(os.waitstatus_to_exitcode(status))
        if time.monotonic() > deadline:
            return ""
        time.sleep(0.001)


def _let_go(keep: int) -> None:
    """Of what pytest holds: their pipes, of which somebody waits for the end, files, handlers and filters."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.disable()
    logging.getLogger().handlers.clear()
    warnings.resetwarnings()
    _print_into(os.devnull)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)
    for handle in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if handle > 2 and handle != keep and os.readlink(f"/proc/self/fd/{handle}").startswith(("pipe", "socket")):
                os.close(handle)


def _print_into(path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
