"""Live ranks behind a notebook: engines of ipyparallel that share one process group."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ipyparallel
import numpy as np
import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from IPython.core.getipython import get_ipython

from . import engine
from .cells import CellFailed, Interrupted, Shown, counted_interrupts, first_error, ranks_in_words

_GRACE = 5.0  # seconds that ranks have to end by themselves when one has failed, has died, or was interrupted
_HEAR = 10.0  # seconds that waiting ranks have to hear of it, at a beat of their hearts
_ENGINE = "ipyparallel.engine"  # the module that a rank's process runs
_LAST = 12  # lines of a process that has ended, in an error
_LOOK, _SELDOM = 0.02, 0.2  # seconds between looks at what ranks print, in a short cell and in a long one


class Pool:
    """`size` processes of this machine. `tell`: called with what is being done while they start."""

    def __init__(self, size: int, tell: Callable[[str], None] = lambda text: None) -> None:
        self.size, self._tell = size, tell
        self.broken = ""  # why the ranks share no group any more
        self.saved: tuple[list[str], dict[str, bytes | str]] = ([], {})  # see `engine.described`
        self._names: list[str] = []  # of variables, after the last cell
        self._asked: Any = None
        self._results: list[Any] = []  # of the last cell
        self._folder = tempfile.mkdtemp(prefix="zerofn-ranks-")
        counts = str(Path(self._folder) / "steps")
        self._steps = np.memmap(counts, np.int64, "w+", shape=(size + 1,))
        self._store = _local_store()
        self._cluster = ipyparallel.Cluster(
            controller_ip="127.0.0.1",
            log_level=logging.ERROR,
            profile_dir=_profile_in(self._folder),
            shutdown_atexit=False,  # which a forked process would do, too
        )
        try:
            self._views = self._start()
            self.pids = self._joined([(self._variables(r), counts) for r in range(size)])
        except BaseException:
            self.stop()
            raise

    def _start(self) -> list[Any]:
        own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": _threads(self.size)}
        tied = [sys.executable, "-m", "zerofn.launch.tied_processes", str(os.getpid()), self._folder]
        self._tell("starting")
        self._cluster.start_controller_sync(environment=own, controller_cmd=[*tied, "ipyparallel.controller"])
        self._cluster.start_engines_sync(self.size, environment=own, engine_cmd=[*tied, _ENGINE])
        client = self._cluster.connect_client_sync()
        while (there := len(client.ids)) < self.size:
            self._tell(f"{there} of {self.size} processes run")
            self._check_started()
            time.sleep(_LOOK)
        return [client[i] for i in sorted(client.ids)]

    def _joined(self, given: Sequence[tuple[Any, ...]]) -> list[int]:
        """Let all processes import ZeroFn and join the process group, and return their ids."""
        asked = [view.apply_async(engine.become_rank, *x) for view, x in zip(self._views, given, strict=True)]
        while not all(x.done() for x in asked):
            self._tell(f"{sum(x.done() for x in asked)} of {self.size} ranks have imported torch and ZeroFn")
            self._check_started()
            time.sleep(_LOOK)
        return _results_of(asked)

    def _check_started(self) -> None:
        """Raise `RuntimeError` if a process has ended before it was a rank, with the last lines that it wrote."""
        started = [x for engines in self._cluster.engines.values() for x in engines.launchers.values()]
        for x in started:
            if not _lives(x.pid):
                told = Path(x.output_file).read_text(errors="replace").strip() if Path(x.output_file).exists() else ""
                last = "\n".join(told.splitlines()[-_LAST:])
                raise RuntimeError(f"%ranks {self.size}: a process ended before it was a rank.\n{last}".rstrip())

    def _variables(self, rank: int) -> dict[str, str]:
        """What torchrun would set; the store is this process's."""
        number = str(rank)
        return {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), number),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.size)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_RUN_ID": Path(self._folder).name,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def _on_all(self, function: Any, *args: Any, each: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a function on all ranks, and return what it returns on each."""
        calls = each or [args] * self.size
        asked = [view.apply_async(function, *x) for view, x in zip(self._views, calls, strict=True)]
        while not all(x.done() for x in asked):
            self._check_alive()
            time.sleep(_LOOK)
        return _results_of(asked)

    @property
    def dead(self) -> list[int]:
        """Ranks whose process has ended."""
        return [rank for rank, pid in enumerate(getattr(self, "pids", ())) if not _lives(pid)]

    def _check_alive(self) -> None:
        if dead := self.dead:
            self.broken = f"{ranks_in_words(dead)} has ended: it was killed, ran out of memory, or exited"
        if self.broken:
            raise CellFailed(f"{self.broken}. {self._restart()}")

    def _restart(self) -> str:
        """Return what a restart keeps and loses, in a sentence."""
        if not self.saved[0]:
            return "There is no checkpoint: %ranks restart starts new ranks, without any of your variables."
        return (
            f"%ranks restart continues from the last checkpoint, {self.saved[0][-1]}; later steps and all variables "
            "that are not in it are lost."
        )

    def state(self) -> str:
        """Return how the ranks are, in a sentence."""
        dead = self.dead
        if dead or self.broken:
            return f"{self.broken or ranks_in_words(dead) + ' has ended'}. {self._restart()}"
        return f"{self.size} ranks, processes {', '.join(map(str, self.pids))}, ready for %%ranks cells."

    def show(self, rank: int) -> None:
        """Show what a rank has printed and displayed in the last cell."""
        if self._results:
            Shown([self._results[rank]], 0).end()

    def run(self, code: str) -> None:
        """Run a cell on all ranks, and show what rank 0 prints and displays as it comes.

        Raises `CellFailed` for the first error of a rank, and `KeyboardInterrupt` if the cell was interrupted.
        """
        self._look_at_saves()
        self._check_alive()
        self._steps[:] = 0
        with counted_interrupts() as interrupts:
            self._run(code, interrupts)

    def _run(self, code: str, interrupts: list[int]) -> None:
        shell: Any = get_ipython()
        number = len(shell.history_manager.input_hist_parsed) - 1  # of the cell that is running
        for view in self._views:
            view.apply_async(engine.number_cells, number)
        results = [view.execute(code, silent=False, block=False) for view in self._views]
        shown = Shown(results, 0)
        self._results = results
        start, stopped = time.monotonic(), 0
        while not self._ended(results, shown):
            # What comes early is shown at once; in a long cell the ranks need the processors.
            pause = min(_SELDOM, max(_LOOK, (time.monotonic() - start) / 8))
            for x in results:
                if not x.done():
                    x.wait(pause)
                    break
            if len(interrupts) > stopped:
                stopped = self._interrupt(results, shown, interrupts, at_once=stopped > 0)
        shown.end()
        self._asked = self._views[0].apply_async(engine.described, self.saved[0])
        failed = first_error(results)
        if interrupts and (failed is None or "KeyboardInterrupt" in str(failed)):
            steps = self._steps[: self.size].tolist()
            where = f"before step {steps[0] + 1} of the cell, on all ranks" if any(steps) else "where each rank was"
            raise Interrupted(f"{where}. Their states are intact.")
        if failed is not None:
            raise failed

    def _ended(self, results: Sequence[Any], shown: Shown) -> bool:
        """Show what has come, and return whether all ranks are done. Ends those that wait for one that has failed."""
        shown.show()
        if dead := self.dead:
            _all_done([x for r, x in enumerate(results) if r not in dead], _GRACE)  # they hear of it
            shown.end()
            self._check_alive()
        failed = [r for r, x in enumerate(results) if x.done() and not x.successful()]
        if failed and not all(x.done() for x in results):
            self._end_waiting(results, failed[0])
        return all(x.done() for x in results)

    def _end_waiting(self, results: Sequence[Any], failed: int) -> None:
        if _all_done(results, _GRACE):
            return
        text = str(first_error([results[failed]]))
        self._views[failed].apply_async(engine.fail, text)
        self.broken = f"rank {failed} failed alone, and ended the others' process group ({text.splitlines()[0]})"
        _all_done(results, _HEAR)
        for x, pid in zip(results, self.pids, strict=True):
            if not x.done():
                os.kill(pid, signal.SIGKILL)  # it hears nothing

    def _interrupt(self, results: Sequence[Any], shown: Shown, interrupts: list[int], *, at_once: bool) -> int:
        """Stop all ranks before the same step, or, where none begins in `_GRACE` seconds, wherever they are.

        So does another interrupt while one waits. Returns how many interrupts have been followed.
        """
        came = len(interrupts)
        if not at_once:
            before = self._steps[: self.size].max()
            self._steps[engine.STOP] = before + 2  # the fastest rank may be about to begin the next
            end = time.monotonic() + _GRACE
            while not all(x.done() for x in results):
                shown.show()
                if self._steps[: self.size].max() > before:
                    end = time.monotonic() + _GRACE
                    before = self._steps[: self.size].max()
                if time.monotonic() > end or len(interrupts) > came:
                    break
                time.sleep(_LOOK)
        for x, pid in zip(results, self.pids, strict=True):
            if not x.done():
                os.kill(pid, signal.SIGINT)
        return len(interrupts)

    def _look_at_saves(self) -> None:
        """Take what rank 0 has said, after the last cell, about its saves."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.wait(_GRACE)
            if asked.done() and asked.successful():
                saved, self._names = asked.get()
                self.saved = saved or self.saved

    def give(self, folder: str) -> tuple[list[str], dict[str, bytes], list[str]]:
        """Save what can go on to other ranks. Returns (paths, states by name, sentences about what is lost)."""
        self._look_at_saves()
        self._check_alive()
        states, others = self._on_all(engine.variables)[0]
        kept = self._on_all(engine.save_states, folder, states)[0]
        return [str(Path(folder) / name) for name in kept], *_kept_and_lost(kept, others)

    def last_saves(self) -> tuple[list[str], dict[str, bytes], list[str]]:
        """Return the same as `give`, of what was saved before."""
        self._look_at_saves()
        paths, states = self.saved
        kept, lost = _kept_and_lost(states, [name for name in self._names if name not in states])
        return paths, kept, lost

    def take(self, paths: Sequence[str], states: Mapping[str, bytes]) -> dict[str, str]:
        """Load states of other ranks. Returns where each was found, "" for nowhere."""
        found: dict[str, str] = self._on_all(engine.load_states, dict(states), list(paths))[0]
        return found

    def stop(self) -> None:
        """End all processes."""
        for pid in getattr(self, "pids", ()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(Exception):  # of engines that are dead already
            self._cluster.stop_cluster_sync()
        shutil.rmtree(self._folder, ignore_errors=True)


def _results_of(asked: Sequence[Any]) -> list[Any]:
    """Return what a call has returned on each rank. Raises the first error."""
    failed = first_error(asked)
    if failed is not None:
        raise failed
    return [x.get() for x in asked]


def _local_store() -> dist.TCPStore:
    """Return a store that this machine alone reaches: torch's own would listen on all its networks."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _all_done(results: Sequence[Any], seconds: float) -> bool:
    """Wait until all calls are done, `seconds` at most, and return whether they are."""
    end = time.monotonic() + seconds
    while not all(x.done() for x in results):
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK)
    return True


def _kept_and_lost(states: Mapping[str, bytes | str], others: Sequence[str]) -> tuple[dict[str, bytes], list[str]]:
    kept = {name: x for name, x in states.items() if isinstance(x, bytes)}
    return kept, [*(f"{name} ({x})" for name, x in states.items() if isinstance(x, str)), *others]


def _profile_in(folder: str) -> str:
    from IPython.core.profiledir import ProfileDir

    return str(ProfileDir.create_profile_dir_by_name(folder, "ranks").location)


def _threads(size: int) -> str:
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // size))


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def check_size(size: int) -> None:
    """Raise `ValueError` for a number of ranks that cannot be."""
    gpus = torch.cuda.device_count()
    if size < 1:
        raise ValueError(f"%ranks {size}: expected 1 or more. To end the ranks, write %ranks stop.")
    if 0 < gpus < size:
        raise ValueError(f"%ranks {size}: this machine has {gpus} GPUs, and each rank needs one.")


def check_machine() -> None:
    """Raise `RuntimeError` in a process that is a rank itself."""
    if dist.is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ:
        raise RuntimeError(
            "%ranks: this kernel has joined a process group as a rank itself, so it cannot start other ranks. Restart "
            "the kernel, and write %ranks before anything makes a process group."
        )
