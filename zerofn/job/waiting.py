"""Whether the program waits for other ranks in a transfer, and where: seen from beside it.

A rank that waits in an agreement reads this of the others. If all that have not come are in transfers, nobody will.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from ..util.user_line import at_line, user_line

# Whose frame is the innermost one while the host waits: torch's collectives, and our transfers.
_TORCHS = tuple(f"{Path(dist.__file__).parent}/{x}" for x in ("distributed_c10d.py", "_functional_collectives.py"))
_OURS = tuple(f"{Path(__file__).parent.parent}/{x}" for x in ("job/in_flight.py", "comm/transport.py"))
_CALLS = f"{Path(dist.__file__).parent.parent}/_ops.py"  # an operation is called through it


class Wait(NamedTuple):
    """`seconds`: how long the program has been seen in this transfer, 0 if it is in none. `where`: its name, and the
    user's line.
    """

    seconds: float
    where: str


class Waiting:
    """Looks at the thread of the program, about once a second."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None  # a frame, and the instruction that it is at
        self._since = 0.0

    def look(self) -> Wait:
        """Return what the program waits for now."""
        frame = _transfer(sys._current_frames().get(threading.main_thread().ident or 0))
        seen = None if frame is None else (id(frame), frame.f_lasti)
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        if frame is None:
            return Wait(0.0, "")
        code, line = frame.f_code, user_line(frame)
        name = f"torch.distributed.{code.co_name}" if code.co_filename.startswith(_TORCHS) else "a transfer"
        return Wait(time.monotonic() - self._since, name + (at_line(line.file, line.number) if line else ""))


def _transfer(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame if the host waits for other ranks there."""
    while frame is not None and frame.f_code.co_filename == _CALLS:
        frame = frame.f_back
    return frame if frame is not None and frame.f_code.co_filename.startswith((*_TORCHS, *_OURS)) else None
