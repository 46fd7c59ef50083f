"""`zerofn.run`: a function on several ranks of this machine, from a notebook, a script or a test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .payload import packed, unpacked, unpacked_error

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # torch's agent sets handlers for these


T = TypeVar("T")


def run(fn: Callable[..., T], /, *args: Any, ranks: int = 2, **kwargs: Any) -> T:
    """Call `fn(*args, **kwargs)` on all ranks, each in a new process, and return rank 0's result.

    `fn` may be defined in a notebook or inside another function: it is sent by value. `args`, `kwargs`: plain data,
    plain tensors and modules; each rank gets its own copy. `ranks`: number of processes on this machine. On a machine
    with GPUs, each rank needs its own GPU. The result consists of tensors, on the host, or plain data. Output of the
    ranks is shown at once.

    Raises the first error of a rank, with its traceback as a note; `RuntimeError` if a rank was killed, or if it is
    called inside a rank; `TypeError` for arguments or a result that cannot be sent; `ValueError` for an impossible
    number of ranks. No process stays running, even if this process is killed.

    The ranks are workers of torch's elastic agent, with the variables that torchrun sets.

        losses = zerofn.run(train, 100, ranks=2)  # train(100) on two ranks
    """
    _check(fn, ranks)
    call = packed((fn, args, kwargs), f"zerofn.run: {getattr(fn, '__name__', 'the function')}, with its arguments,")
    folder = Path(tempfile.mkdtemp(prefix="zerofn-run-"))  # a TemporaryDirectory is removed by forked processes, too
    try:
        (folder / "call").write_bytes(call)
        (folder / "path").write_text("\n".join(sys.path))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        )
        with _own_signals():
            try:
                elastic_launch(config, sys.executable)("-m", "zerofn.launch.worker", str(folder), os.getpid())
            except SignalException as error:
                if error.sigval is signal.SIGINT:
                    raise KeyboardInterrupt from None
                raise
            except ChildFailedError as error:
                raise _first_error(folder, error, ranks) from None
        return unpacked((folder / "result").read_bytes())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check(fn: Callable[..., Any], ranks: int) -> None:
    if not callable(fn):
        raise TypeError(f"zerofn.run: expected a function, got {type(fn).__name__}; write zerofn.run(f, x, ranks=2).")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"zerofn.run: ranks must be a whole number of 1 or more, got {ranks!r}.")
    gpus = torch.cuda.device_count()
    if 0 < gpus < ranks:
        raise ValueError(f"zerofn.run: ranks={ranks}, but this machine has {gpus} GPUs, and each rank needs one.")
    if dist.is_initialized() and dist.get_world_size() > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        raise RuntimeError("zerofn.run: this process is already a rank. Call the function directly.")


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Put back the handlers of signals: the agent leaves its own, and an interrupt would end in them for ever."""
    here = threading.current_thread() is threading.main_thread()
    before = {x: signal.getsignal(x) for x in _SIGNALS} if here else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_error(folder: Path, failed: ChildFailedError, ranks: int) -> BaseException:
    """Return what ended the run: other errors follow from the first."""
    ended = {rank: -x.exitcode for rank, x in failed.failures.items() if x.exitcode < 0}
    for rank, number in ended.items():  # others raise that it has ended, and may do so before the agent sees it
        if number != signal.SIGTERM:
            return RuntimeError(f"zerofn.run: rank {rank} of {ranks} was killed by {signal.Signals(number).name}.")
    raised = sorted((x.stat().st_mtime_ns, int(x.suffix[1:])) for x in folder.glob("error.*"))
    if raised:
        rank = raised[0][1]
        return unpacked_error((folder / f"error.{rank}").read_bytes(), f"rank {rank} of {ranks}")
    rank, failure = min(failed.failures.items())
    return RuntimeError(
        f"zerofn.run: rank {rank} of {ranks} ended with exit code {failure.exitcode}. See its output above."
    )
