"""Starting the ranks of one run, waiting for them, and saying plainly what went wrong."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]  # benchmarks/
TIMEOUT_SECONDS = 900
TAIL_LINES = 25


class BenchmarkError(Exception):
    """A row is missing or wrong; the message says which and why."""


# A ZeroFn that is installed comes before the checkout that this file lies in, as the peers' packages do; but FairScale
# installs a package called benchmarks, too.
_LAUNCH = f"""
import runpy, sys
sys.path[0] = {str(HERE.parent)!r}
import benchmarks
sys.path.append(sys.path.pop(0))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def program(python: str, module: str) -> list[str]:
    """The command that runs a module of the benchmarks with another Python; arguments go behind it."""
    return [python, "-c", _LAUNCH, module]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(command: list[str], log: Path, stdin: int = subprocess.DEVNULL) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # A job of ours is not torchrun's: what a surrounding one set must not reach the ranks.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    with log.open("w") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=stdin, env=environment)


def _wait(label: str, processes: list[subprocess.Popen], logs: list[Path]) -> None:
    """Wait for every rank; the first that fails, or the limit, ends the others."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        while any(p.poll() is None for p in processes):
            if any(p.poll() for p in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        codes = [p.poll() for p in processes]
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    # All that failed: the first to be seen need not be the one that dragged the others down.
    failed = [
        f"{label}: rank {rank} ended with code {code}. {tail(logs[rank])}" for rank, code in enumerate(codes) if code
    ]
    if failed:
        raise BenchmarkError("\n".join(failed))
    if None in codes:
        rank = codes.index(None)
        raise BenchmarkError(f"{label}: rank {rank} had not ended after {TIMEOUT_SECONDS} s. {tail(logs[rank])}")


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return "The end of its log:\n" + "\n".join("    " + line[:400] for line in lines)


def last_words(error: Exception) -> str:
    """The line of a rank's log that says why it ended."""
    told = [x.strip() for x in str(error).splitlines() if "Error" in x]
    last = (told or str(error).splitlines())[-1].strip()
    return re.sub(r"^(\[rank\d+\])?:? *", "", last)[:200]


def results_in(log: Path) -> list[dict]:
    """What was printed behind RESULT, line by line; a line that is still being written is none yet."""
    lines = log.read_text(errors="replace").splitlines(keepends=True)
    found = [x for x in lines if x.startswith("RESULT ") and x.endswith("\n")]
    return [json.loads(x.removeprefix("RESULT ")) for x in found]


def result_of(label: str, log: Path) -> dict:
    found = results_in(log)
    if len(found) != 1:
        raise BenchmarkError(f"{label}: {len(found)} result lines instead of one. {tail(log)}")
    return found[0]


def run(label: str, commands: list[list[str]]) -> list[dict]:
    """Run the commands at the same time, one a rank; what each printed behind RESULT.

    Raises `BenchmarkError` with the rank's last lines if one fails or none ends in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{index}.log" for index in range(len(commands))]
        try:
            processes = [start(c, log) for c, log in zip(commands, logs, strict=True)]
        except OSError as error:
            raise BenchmarkError(f"{label}: {commands[0][0]} cannot be started: {error}.") from error
        _wait(label, processes, logs)
        return [result_of(label, log) for log in logs]
