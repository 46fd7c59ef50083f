"""Run a command on several machines: ssh, or SLURM's srun, starts `zerofn.launch.node` on each."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from .node import FAILED, GRACE, READY

# What belongs to this login, and would be wrong on another machine.
_OWN = ("SSH_", "XDG_", "DBUS_", "SLURM_", "LC_")
_OWN_NAMES = ("HOME", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "USER", "_")
_REACHED = 60.0  # seconds until a machine has to answer


class LaunchError(RuntimeError):
    """A job could not be started on its machines, or one of them failed."""


def passed_on(environ: dict[str, str], folders: Sequence[Path]) -> dict[str, str]:
    """Return the variables that go to other machines: all but those of this login, and `.deepspeed_env`'s lines.

    `folders`: where that file may lie, the first one counts. Raises `ValueError` for a line that is none.
    """
    found = {k: v for k, v in environ.items() if not k.startswith(_OWN) and k not in _OWN_NAMES}
    for file in (folder / ".deepspeed_env" for folder in folders):
        if file.is_file():
            for number, line in enumerate(file.read_text().splitlines(), 1):
                name, is_given, value = line.strip().partition("=")
                if line.strip() and not line.startswith("#"):
                    if not is_given:
                        raise ValueError(f"{file}, line {number}: expected NAME=value, got {line!r}.")
                    found[name] = value
            break
    return found


def over_ssh(host: str, port: int | None = None) -> list[str]:
    """Return the command that runs a node's program on a machine; here, without ssh, if the name is this machine's."""
    program = [sys.executable, "-m", "zerofn.launch.node"]
    if host in ("localhost", "127.0.0.1", socket.gethostname()):
        return program
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=10"]
    search = os.environ.get("PYTHONPATH")
    remote = shlex.join([*(["env", f"PYTHONPATH={search}"] if search else []), *program])
    return ["ssh", *options, *(["-p", str(port)] if port else []), host, remote]


def over_slurm(host: str) -> list[str]:
    """Return the command that runs a node's program on a machine of SLURM's allocation."""
    step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--export=ALL"]
    return [*step, sys.executable, "-m", "zerofn.launch.node"]


class Node:
    """A machine, and what was started on it."""

    def __init__(self, host: str, command: list[str], order: dict[str, Any], out: TextIO) -> None:
        self.host, self.answer, self._out = host, "", out
        self.answered = threading.Event()
        self.last = ""  # the last line
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                bufsize=1, errors="replace", start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:
            raise LaunchError(
                f"{host}: cannot be reached, because the program {command[0]!r} is not installed here."
            ) from None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.tell(json.dumps(order))

    def tell(self, line: str) -> None:
        """Write a line to its input; nothing if it has ended."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass

    def end(self) -> None:
        """Close its input, which ends what it runs."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.close()
        except BrokenPipeError:
            pass

    def ended(self, seconds: float) -> int:
        """Return the exit code; kill what is not over in time."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join(5.0)
        if not self._reader.is_alive() and self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.rstrip("\n")
            if not self.answered.is_set() and text.startswith((READY, FAILED)):
                self.answer = text
                self.answered.set()
            else:
                self.last = text or self.last
                self._out.write(f"{self.host}: {text}\n")  # one write a line: other machines' threads write here, too
                self._out.flush()
        self.answered.set()


def run_on(orders: dict[str, dict[str, Any]], reach: Callable[[str], list[str]], out: TextIO = sys.stdout) -> int:
    """Run each machine's order, and return 0 once all have ended well, or EX_TEMPFAIL where they have saved and are to
    be started again. Nothing starts before every machine is ready.

    What they print comes out line by line behind their names. When one fails, or this process is interrupted, all
    end. Raises `LaunchError`, which names the machine.
    """
    nodes: list[Node] = []
    try:
        for host, order in orders.items():
            nodes.append(Node(host, reach(host), order, out))
        end = time.monotonic() + _REACHED
        for node in nodes:
            if not node.answered.wait(max(0.0, end - time.monotonic())):
                raise LaunchError(f"{node.host} did not answer within {_REACHED:g} s.")
            if node.answer.startswith(FAILED):
                raise LaunchError(f"{node.host}: {node.answer.removeprefix(FAILED)}")
            if node.answer != READY:
                raise LaunchError(f"{node.host} cannot be reached: {node.last or 'it sent no output'}")
        for node in nodes:
            node.tell("go")
        while any(node.process.poll() is None for node in nodes) and _first_failure(nodes) is None:
            time.sleep(0.1)
        if failure := _first_failure(nodes):
            raise LaunchError(failure)
        return os.EX_TEMPFAIL if any(node.process.returncode for node in nodes) else 0
    finally:
        for node in nodes:
            node.end()
        for node in nodes:
            node.ended(GRACE + 5.0)


def _first_failure(nodes: list[Node]) -> str | None:
    if nodes[0].process.poll() == os.EX_TEMPFAIL:
        return None  # the others' agents meet on the first machine, and fail once its agent has ended
    for node in nodes:
        code = node.process.poll()
        if code and code != os.EX_TEMPFAIL:
            return (
                f"{node.host} ended with exit code {code}. See its output above. The processes on all other "
                "machines were ended."
            )
    return None
