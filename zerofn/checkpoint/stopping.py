"""When a run is to save and end: a signal came, or its time is over. All ranks learn of it after the same step."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..comm.agreement import rank_and_size
from ..comm.failures import explained
from ..comm.meetings import meetings

log = logging.getLogger("zerofn")

AGAIN = 75  # EX_TEMPFAIL of sysexits.h: "try again later"
SLURM_MARGIN = 120.0  # seconds before the end of a SLURM job
_ASK = 0.5  # seconds between two questions to the other ranks, where steps are shorter
_MOST_STEPS = 1000
_SIGNAL, _TIME = 1.0, 2.0


class Stopped(SystemExit):
    """The state is saved, and the run is to go on in another process. As an exit it has status 75, EX_TEMPFAIL."""

    def __init__(self, message: str) -> None:
        super().__init__(AGAIN)
        self.message = message

    def __str__(self) -> str:
        return self.message


class Stopping:
    """Whether the run is to end. `limit`: the seconds that it may train from now on."""

    def __init__(self, signals: Iterable[signal.Signals], limit: float | None) -> None:
        self._start = self._asked = time.monotonic()
        self._end = self._start + limit if limit is not None else _end_of_slurm_job()
        self._came: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._signals = tuple(signals)
        self._steps, self._next, self._apart = 0, 1, 1  # `_apart`: steps from one question to the next

    def listen(self) -> None:
        """Handle the signals from now on. Raises `ValueError` outside of the main thread, where none arrives."""
        if not self._signals or self._before:
            return
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "zerofn.Checkpoints: signals are handled in the main thread alone; call restore_or there, or pass "
                "signals=()."
            )
        self._before = {s: signal.signal(s, self._handle) for s in self._signals}

    def close(self) -> None:
        """Put the handlers back that were there before."""
        for s, handler in self._before.items():
            if signal.getsignal(s) == self._handle:
                signal.signal(s, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def due(self) -> str:
        """Return why the run is to end after this step, "" if it goes on: the same on all ranks. To be called by each
        after every step.
        """
        self._steps += 1
        if rank_and_size()[1] == 1:
            return self._said(self._wish())
        if self._steps < self._next:
            return ""
        each = (time.monotonic() - self._asked) / self._apart
        wish, each = _largest(self._wish(), each)
        self._asked = time.monotonic()
        self._apart = max(1, min(_MOST_STEPS, int(_ASK / max(each, 1e-6))))
        self._next = self._steps + self._apart
        return self._said(wish)

    def _wish(self) -> float:
        if self._came is not None:
            return _SIGNAL
        return _TIME if self._end is not None and time.monotonic() > self._end else 0.0

    def _said(self, wish: float) -> str:
        if wish == _SIGNAL:
            return self._came.name if self._came is not None else "a signal to another rank"
        return f"its time is over after {time.monotonic() - self._start:.0f} s" if wish == _TIME else ""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Note a first signal; a second one does what it did before."""
        self._came = signal.Signals(number)
        self.close()
        log.warning("%s: the run is saved after this step, and ends. Another one ends it at once.", self._came.name)


def _largest(*values: float) -> list[float]:
    """Return the largest of every rank's values."""
    group = dist.group.WORLD
    meetings().begin(group.group_name, "zerofn.Checkpoints.after_step")  # type: ignore[union-attr]
    found = torch.tensor(values, dtype=torch.float64)
    try:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=meetings().host_of(group))  # type: ignore[arg-type]
    except RuntimeError as error:
        raise explained(error) from error
    meetings().settle()
    return [float(x) for x in found]


def _end_of_slurm_job() -> float | None:
    """Return when to end in a job of SLURM that says when it ends, on the monotonic clock."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if not end.isdigit():
        return None
    log.info("the SLURM job ends in %.0f s; the run is saved %g s before.", int(end) - time.time(), SLURM_MARGIN)
    return time.monotonic() + int(end) - time.time() - SLURM_MARGIN
