"""torch's elastic agent, which ends as its ranks do: python -m zerofn.launch.agent [torchrun's arguments]."""

from __future__ import annotations

import os
import signal
import sys

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from .node import NODE
from .tied_processes import end_with


def main() -> int:
    """Return 0, or EX_TEMPFAIL where ranks have saved and ask to be started again; raise torch's error otherwise."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM sends it to all processes; it is for the ranks
    if node := os.environ.pop(NODE, ""):
        end_with(int(node), number=signal.SIGTERM)  # with which it ends its ranks
    try:
        torchrun.main(sys.argv[1:])
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        if os.EX_TEMPFAIL in codes <= {os.EX_TEMPFAIL, -signal.SIGTERM}:  # once one has ended, torch ends the others
            return os.EX_TEMPFAIL
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
