"""When a run is to save and end: a signal came, or its time is over. All ranks learn of it after the same step."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist

from ..job.agreement import rank_and_size
from ..job.failures import explained
from ..job.step_order import meetings
from ..util.process import the
from .signals import Handlers

log = logging.getLogger("zerofn")

AGAIN = 75  # EX_TEMPFAIL of sysexits.h: "try again later"
SLURM_MARGIN = 120.0  # seconds before the end of a SLURM job
_ASK = 0.5  # seconds between two questions to the other ranks, where steps are shorter
_MOST_STEPS = 1000
_SIGNAL, _TIME = 1.0, 2.0


class Stopped(SystemExit):
    """The state is saved, and the run should continue in another process: `SystemExit` with status 75, EX_TEMPFAIL."""

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
        self._warned = False
        self._signals = tuple(signals)
        self._steps, self._next, self._apart = 0, 1, 1  # `_apart`: steps from one question to the next

    def listen(self) -> None:
        """Hear the signals from now on. Raises `ValueError` outside of the main thread, where none arrives."""
        if self._signals:
            the(Handlers).listen(self, self._signals)

    def hear(self, number: signal.Signals) -> None:
        """Note a first signal."""
        self._came = number
        with contextlib.suppress(RuntimeError):  # the stream may be in the middle of a write
            log.warning("%s: after this step, the run is saved and ends. A second signal ends it at once.", number.name)

    def close(self) -> signal.Signals | None:
        """Hear no more. Returns a signal that no step has answered, for the caller to answer. While an error is on its
        way, the next run of the process answers it.
        """
        the(Handlers).leave(self)
        came, self._came = self._came, None
        if came is not None and sys.exc_info()[0] is not None:
            the(Handlers).leave_to_next(came)
            return None
        return came

    def answer(self) -> None:
        """The run is saved, and ends."""
        the(Handlers).leave(self)
        self._came = None

    def due(self) -> str:
        """Return why the run is to end after this step, "" if it continues: the same on all ranks. To be called by each
        after every step.
        """
        self._steps += 1
        self._warn_if_replaced()
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

    def _warn_if_replaced(self) -> None:
        for number in the(Handlers).replaced_for(self) if not self._warned else ():
            self._warned = True
            log.warning(
                "%s: the program set another signal handler after restore_or. Unless that handler calls the previous "
                "one, the run is not saved when %s arrives. Call restore_or after the code that sets handlers.",
                number.name,
                number.name,
            )


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
    log.info(
        "the SLURM job ends in %.0f s. The run is saved %g s before its end.", int(end) - time.time(), SLURM_MARGIN
    )
    return time.monotonic() + int(end) - time.time() - SLURM_MARGIN
