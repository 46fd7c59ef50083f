"""Processes that stay and wait for their turn: several systems can then be timed seconds apart."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common import processes
from benchmarks.common.processes import BenchmarkError

T = TypeVar("T")


def in_turn(rows: Sequence[T], number: int, rounds: int = 0) -> list[T]:
    """Return rows in the order of round `number`. Each round begins with another row, and every second one runs
    backwards, so that no row always runs behind the same other one. `rounds`: if they are few, how many there are.
    """
    shift = number * (max(1, len(rows) // rounds) if rounds else 1) % len(rows)
    order = [*rows[shift:], *rows[:shift]]
    return order[::-1] if number % 2 else order


class Ranks:
    """The ranks of one system. Each reads a line of JSON, does it, and prints RESULT and a line of JSON."""

    def __init__(self, label: str, commands: list[list[str]]) -> None:
        self.label, self._num_results = label, 0
        self._folder = tempfile.TemporaryDirectory()
        self._logs = [Path(self._folder.name) / f"rank{k}.log" for k in range(len(commands))]
        pairs = zip(commands, self._logs, strict=True)
        self._ranks = [processes.start(c, log, stdin=subprocess.PIPE) for c, log in pairs]

    def ask(self, do: str, **what: Any) -> list[dict[str, Any]]:
        """Have every rank do something at the same time; what each answered. Raises `BenchmarkError` if one ends."""
        line = json.dumps({"do": do} | what) + "\n"
        for rank in self._ranks:
            try:
                rank.stdin.write(line.encode())
                rank.stdin.flush()
            except BrokenPipeError:
                break  # it has ended, which is said below
        self._num_results += 1
        deadline = time.monotonic() + processes.TIMEOUT_SECONDS
        while True:
            # Asked before the logs are read: what a rank that has ended printed is all there.
            ended = [k for k, rank in enumerate(self._ranks) if rank.poll() is not None]
            found = [processes.results_in(log) for log in self._logs]
            if all(len(results) == self._num_results for results in found):
                return [results[-1] for results in found]
            if ended or time.monotonic() > deadline:
                raise BenchmarkError("\n".join(self._complaints(ended, do)))
            time.sleep(0.02)

    def _complaints(self, ended: list[int], do: str) -> Iterator[str]:
        for k in ended or range(len(self._ranks)):
            what = f"ended with code {self._ranks[k].poll()}" if ended else "had not answered in time"
            yield f"{self.label}: rank {k} {what}, asked to {do}. {processes.tail(self._logs[k])}"

    def close(self) -> None:
        """End the processes, whatever they are at."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()
            with contextlib.suppress(BrokenPipeError):  # it had ended before it was asked
                rank.stdin.close()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
