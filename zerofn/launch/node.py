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
GRACE = 15.0  # seconds between SIGTERM, with which a run may save its state, and SIGKILL


def main() -> int:
    """Return the exit code of the command."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM sends it to all processes; it is for the ranks
    order: dict[str, Any] = json.loads(sys.stdin.readline() or "{}")
    fault = _fault(order) if order else "the launcher said nothing."
    print(FAILED + fault if fault else READY, flush=True)
    if fault or sys.stdin.readline().strip() != "go":
        return 1
    environ = os.environ | order["environ"]
    process = subprocess.Popen(
        order["command"], cwd=order["cwd"], env=environ, stdin=subprocess.DEVNULL, start_new_session=True
    )
    threading.Thread(target=_end_with_input, args=(process,), daemon=True).start()
    return process.wait()


def _fault(order: dict[str, Any]) -> str:
    """Return why a command cannot be started here, "" if it can."""
    if not Path(order["cwd"]).is_dir():
        return f"there is no folder {order['cwd']!r} here; the job needs the same files on every machine."
    if order["script"] and not Path(order["cwd"], order["script"]).is_file():
        return f"there is no script {order['script']!r} here; the job needs the same files on every machine."
    if order["port"]:
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("", order["port"]))
            except OSError as error:
                return f"port {order['port']} cannot be used: {error.strerror}; choose another with --port."
    return ""


def _end_with_input(process: subprocess.Popen[bytes]) -> None:
    while sys.stdin.readline():
        pass
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(patience)
            return


if __name__ == "__main__":
    sys.exit(main())
