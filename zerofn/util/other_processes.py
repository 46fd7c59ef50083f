"""Other processes: whether one that has described itself runs on this machine, and still does.

Numbers of processes are used again, so when one was started belongs to what it is.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """Describe this process to others: `host`, `pid`, and when it was `started` in the system's own count."""
    return {"host": machine(), "pid": os.getpid(), "started": started(os.getpid())}


def gone(process: dict[str, Any]) -> bool:
    """Whether a process that has described itself ran on this machine and does not any more."""
    return process.get("host") == machine() and not here(process)


def here(process: dict[str, Any]) -> bool:
    """Whether a process that has described itself runs on this machine."""
    pid, began = process.get("pid"), process.get("started")
    return process.get("host") == machine() and bool(began) and isinstance(pid, int) and started(pid) == began


def machine() -> str:
    """Return this machine since it was started, or this container of it."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot[:8]} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def started(pid: int) -> int:
    """Return when a process was started, in the system's own count; 0 if it is not there, or has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if state in "ZX" else int(numbers[18])
    return 0
