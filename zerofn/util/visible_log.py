"""The log of ZeroFn where nobody has set up logging: one line on standard error for each message."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

import torch.distributed as dist

LOG = logging.getLogger("zerofn")


class _Line(logging.StreamHandler[TextIO]):
    """A line on standard error. Other ranks than the first show warnings only: they capture the same."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("%(message)s"))

    def filter(self, record: logging.LogRecord) -> bool:
        """Leave out what other ranks say too."""
        return record.levelno >= logging.WARNING or _is_first_rank()

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line, on a terminal over a line of progress."""
        self.setStream(sys.stderr)  # which notebooks and tests replace
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
        super().emit(record)


def _is_first_rank() -> bool:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def show_log() -> None:
    """Show the messages of the logger `zerofn` from INFO on, unless it or the root logger has a handler.

    `ZEROFN_LOG=off` leaves logging as it is. Once the root logger gets a handler, that one shows the messages instead.
    Raises `ValueError` for another value of ZEROFN_LOG.
    """
    chosen = os.environ.get("ZEROFN_LOG", "")
    if chosen not in ("", "off"):
        raise ValueError(f"ZEROFN_LOG={chosen!r} is not known; write 'off' for no log lines, or leave it out.")
    if chosen or LOG.handlers or logging.getLogger().handlers:
        return
    LOG.addHandler(line := _Line())
    if sets_level := LOG.level == logging.NOTSET:
        LOG.setLevel(logging.INFO)

    def leave_to_root(record: logging.LogRecord) -> bool:
        root = logging.getLogger()
        if not root.handlers:
            return True
        LOG.removeHandler(line)
        LOG.removeFilter(leave_to_root)
        if sets_level:
            LOG.setLevel(logging.NOTSET)
        return LOG.isEnabledFor(record.levelno)

    LOG.addFilter(leave_to_root)
