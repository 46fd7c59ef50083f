"""Processes that end when the one that started them has ended, however it has: no rank keeps a GPU for nobody.

python -m zerofn.launch.tied_processes PID FOLDER MODULE [arguments] runs a module so, like python -m MODULE.

The number of a process's parent changes when that parent is gone, and only then, so a thread asks for it. (The kernel
could send a signal, but it does so when the *thread* that has started the process ends.) Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import signal
import sys
import threading
import time

SECONDS = 0.2  # between two looks


def end_with(parent: int, folder: str = "", number: signal.Signals = signal.SIGKILL) -> None:
    """From now on, end this process, and all of its group if it leads one, soon after the process `parent`, which has
    started it. `folder`: what that one would have removed. `number`: the signal.
    """
    threading.Thread(target=_watch, args=(parent, folder, number), name="zerofn-tied", daemon=True).start()


def _watch(parent: int, folder: str, number: signal.Signals) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if os.getpgrp() == os.getpid() else os.kill)(os.getpid(), number)


def main() -> None:
    """Run a module as the main program of this process."""
    parent, folder, module, *sys.argv[1:] = sys.argv[1:]
    end_with(int(parent), folder)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
