"""One machine of a job that `zerofn launch` has started on several: python -m zerofn.launch.node.

The launcher talks to it over ssh's standard input, so that nothing of the environment is seen in lists of processes:
a line of JSON, which says what to run; then "go", once all machines are ready. The end of the input, for whatever
reason, ends what runs here. Nothing here imports torch: a machine answers at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

READY, FAILED = "zerofn: ready", "zerofn: cannot start: "
NODE = "ZEROFN_NODE"  # the variable with this process's number, for what ends with it
GRACE = 15.0  # seconds between SIGTERM, with which a run may save its state, and SIGKILL


def main() -> int:
    """Return the exit code of the command."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM sends it to all processes; it is for the ranks
    order: dict[str, Any] = json.loads(sys.stdin.readline() or "{}")
    fault = _fault(order) if order else "the launcher sent nothing."
    print(FAILED + fault if fault else READY, flush=True)
    if fault or sys.stdin.readline().strip() != "go":
        return 1
    environ = os.environ | order["environ"] | {NODE: str(os.getpid())}
    process = subprocess.Popen(
        order["command"], cwd=order["cwd"], env=environ, stdin=subprocess.DEVNULL, start_new_session=True
    )
    threading.Thread(target=_end_with_input, args=(process,), daemon=True).start()
    return process.wait()


def _fault(order: dict[str, Any]) -> str:
    """Return why a command cannot be started here, "" if it can."""
    if not Path(order["cwd"]).is_dir():
        return (
            f"the folder {order['cwd']!r} does not exist on this machine. The job needs the same files on every "
            "machine."
        )
    if order["script"] and not Path(order["cwd"], order["script"]).is_file():
        return (
            f"the script {order['script']!r} does not exist on this machine. The job needs the same files on every "
            "machine."
        )
    if order["port"]:
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("", order["port"]))
            except OSError as error:
                return f"port {order['port']} cannot be used: {error.strerror}. Choose another with --port."
    return ""


def _end_with_input(process: subprocess.Popen[bytes]) -> None:
    while sys.stdin.readline():
        pass
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(GRACE)
        return
    for pid in reversed(_descendants(process.pid)):  # ranks have groups of their own
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Return a process, and those that it and they have started: parents first."""
    children: dict[str, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = stat.read_text().rpartition(")")[2].split()[1]
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(str(each), [])
    return found


if __name__ == "__main__":
    sys.exit(main())
