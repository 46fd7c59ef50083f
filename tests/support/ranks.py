"""Real gloo ranks for tests: a pool of worker processes that lives as long as the test session.

    def sum_of_ranks(offset):                       # module level: workers import it by name
        x = torch.tensor(float(dist.get_rank() + offset))
        dist.all_reduce(x)
        return x

    def test_sum(ranks):
        assert ranks(2, sum_of_ranks, 1) == [3.0, 3.0]

Workers are forked from a process in which everything that tests import is imported (`fork_server`), so that one costs
milliseconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import beforehand, runtimes
from tests.support.fork_server import Forked, ForkServer
from zerofn.comm.known_meshes import Meshes
from zerofn.util.process import instead

SERVER, FILTERS = pytest.StashKey[ForkServer | None](), pytest.StashKey[list[str]]()
# What ranks other than the first to fail get for saying why, before all are killed.
GRACE_SECONDS = 1.0
LOG_LINES = 40
_OF_PYTEST = re.compile(r"/_?(pytest|pluggy)/").search  # a frame below all ranks' own


class RankError(AssertionError):
    """A rank raised, died or did not finish in time; the message holds its traceback."""


@dataclass(frozen=True)
class RankFailure:
    """Why one rank returned nothing. `type` is the exception's name, "Died" or "TimedOut"."""

    rank: int
    type: str
    message: str
    traceback: str


@dataclass(frozen=True)
class Group:
    """The process group a call runs in; workers keep theirs while `generation` is the same. `made`: before the call."""

    generation: int
    rank: int
    size: int
    port: int
    made: bool


@dataclass(frozen=True)
class Call:
    group: Group
    payload: bytes
    sys_path: list[str]
    warning_filters: tuple[str, ...]


# --- values between processes: tensors travel as bytes, never as shared-memory descriptors ------


def _rebuild_tensor(data, dtype, shape, requires_grad, parameter):
    if data:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


class _Pickler(pickle.Pickler):
    """Pickles tensors by value: the elements of the view, not of the storage under it."""

    def __init__(self, file, keep_grad: bool):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.keep_grad = keep_grad

    def reducer_override(self, obj):
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        parameter = isinstance(obj, torch.nn.Parameter)
        if not parameter and type(obj) not in (torch.Tensor, torch.nn.Buffer):
            raise TypeError(
                f"a {type(obj).__name__} cannot travel between ranks and the test; return a plain tensor made from it"
            )
        plain = obj.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        requires_grad = self.keep_grad and obj.requires_grad
        args = (data, obj.dtype, tuple(obj.shape), requires_grad, self.keep_grad and parameter)
        return _rebuild_tensor, args


def _dumps(value, keep_grad: bool = False) -> bytes:
    file = io.BytesIO()
    _Pickler(file, keep_grad).dump(value)
    return file.getvalue()


# --- in the worker -------------------------------------------------------------------------------


def _work(connection: Connection) -> None:
    """A worker's life: answer calls until the test session closes its end."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the parent's question to a rank that hangs
    torch.set_num_threads(1)
    generation = None
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if call is None or call.group.generation != generation:
            generation = None
            if dist.is_initialized():
                dist.destroy_process_group()
        if call is None:
            continue
        reply = _answer(call, join=generation is None)
        _keep_coverage()
        generation = call.group.generation
        connection.send_bytes(reply)


def _keep_coverage() -> None:
    """Where lines are counted: what a call has run counts, although ranks are killed."""
    if "coverage" in sys.modules and (counting := sys.modules["coverage"].Coverage.current()):
        counting.save()


def _answer(call: Call, join: bool) -> bytes:
    """The pickled result of one call, or the `RankFailure` that took its place."""
    rank = call.group.rank
    try:
        if join:
            _join(call.group)
        sys.path[:] = call.sys_path
        torch.manual_seed(0)
        with warnings.catch_warnings():
            for line in call.warning_filters:
                # the grammar of pytest's own `filterwarnings`, read by its own reader
                from _pytest.config import parse_warning_filter

                warnings.filterwarnings(*parse_warning_filter(line, escape=False))
            function, args = pickle.loads(call.payload)
            with runtimes.asked(), instead(Meshes()):  # a group may serve several tests
                return _dumps(function(*args))
    except BaseException as error:  # SystemExit too: the test decides what it means
        text = traceback.format_exc()
        return _dumps(RankFailure(rank, type(error).__name__, str(error), text))


def _join(group: Group) -> None:
    """Become rank `group.rank` of a fresh default group, or of one that is to be made, with torchrun's variables."""
    variables = {
        "RANK": group.rank,
        "LOCAL_RANK": group.rank,
        "WORLD_SIZE": group.size,
        "LOCAL_WORLD_SIZE": group.size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": group.port,
    }
    if not group.made:
        variables["TORCHELASTIC_USE_AGENT_STORE"] = True
    os.environ.update({name: str(value) for name, value in variables.items()})
    if not group.made:
        return
    server = dist.TCPStore("127.0.0.1", group.port, is_master=False)
    store = dist.PrefixStore(f"group{group.generation}", server)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)


# --- in the test session -------------------------------------------------------------------------


class RankPool:
    """Calls a function on n ranks at once. Workers start at the first call that needs them.

    `pool(n, function, *args)` returns the n results in rank order; tensors come back detached, on
    the CPU. The default group of size n is kept between calls and remade when n changes. The
    generator is seeded with 0 before each call; `warning_filters` are pytest's.

    A rank that raises, dies or takes longer than `timeout` seconds ends the call on all ranks:
    workers are killed (the next call starts new ones) and `RankError` carries what it said.
    With `expect_errors=True` ranks that raised or died have a `RankFailure` in place of a result;
    a rank that does not finish is an error there too. With `group=False` ranks are new and have no
    process group, as torchrun starts them; afterwards they are ended.
    """

    def __init__(self, server: ForkServer, warning_filters: Sequence[str] = ()):
        self.warning_filters = warning_filters
        self._server = server
        self._logs = tempfile.TemporaryDirectory(prefix="ranks-")
        self._workers: list[Forked] = []
        self._group_size = 0
        self._generation = 0
        self._num_started = 0
        self._store: dist.TCPStore | None = None

    def __call__(
        self,
        num_ranks: int,
        function: Callable,
        *args: Any,
        timeout: float = 120.0,
        expect_errors: bool = False,
        group: bool = True,
    ) -> list[Any]:
        deadline = time.monotonic() + timeout
        payload = self._payload(function, args)
        if not group:
            self.stop()
        try:
            self._start(num_ranks, group)
            self._send(num_ranks, payload, group)
            replies, order = self._collect(num_ranks, deadline, patient=expect_errors)
            hung = self._stacks([rank for rank in range(num_ranks) if rank not in replies])
        except BaseException:  # an interrupt as well: half-done calls must not be answered later
            self.stop()
            raise
        failures = [replies[rank] for rank in order if isinstance(replies[rank], RankFailure)]
        if failures or hung or not group:
            self.stop()
        if hung or (failures and not expect_errors):
            raise RankError(_report(num_ranks, failures, hung, timeout))
        return [replies[rank] for rank in range(num_ranks)]

    def stop(self) -> None:
        """Kill every worker; the next call starts new ones."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join(GRACE_SECONDS)
            worker.connection.close()
        self._workers.clear()
        self._group_size = 0

    def close(self) -> None:
        self.stop()
        self._store = None
        self._server.close()
        self._logs.cleanup()

    @staticmethod
    def _payload(function: Callable, args: tuple) -> bytes:
        try:
            return _dumps((function, args), keep_grad=True)
        except (AttributeError, pickle.PicklingError) as error:
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(
                f"{name} or an argument of it cannot be sent to the ranks ({error}); write the "
                "function at the top of the test module and bind values with arguments"
            ) from error

    def _start(self, num_ranks: int, made: bool) -> None:
        if self._store is None or not made:
            # The session holds the rendezvous store, as torchrun's agent does: it outlives ranks.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._workers) < num_ranks:
            self._num_started += 1
            self._workers.append(self._server.start(Path(self._logs.name) / f"worker{self._num_started}.log"))

    def _send(self, num_ranks: int, payload: bytes, made: bool) -> None:
        if num_ranks != self._group_size:
            for worker in self._workers[num_ranks : self._group_size]:
                worker.connection.send_bytes(pickle.dumps(None))  # leave the group of before
            self._group_size = num_ranks
            self._generation += 1
        for rank in range(num_ranks):
            group = Group(self._generation, rank, num_ranks, self._store.port, made)
            call = Call(group, payload, sys.path, tuple(self.warning_filters))
            with contextlib.suppress(BrokenPipeError):  # found dead when its answer is awaited
                self._workers[rank].connection.send_bytes(pickle.dumps(call))

    def _collect(self, num_ranks: int, deadline: float, patient: bool):
        """`{rank: result or RankFailure}` of those that answered in time, and their order."""
        pending = {self._workers[rank].connection: rank for rank in range(num_ranks)}
        replies: dict[int, Any] = {}
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), left):
                rank = pending.pop(connection)
                try:
                    replies[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    replies[rank] = self._died(rank)
                if isinstance(replies[rank], RankFailure) and not patient:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return replies, list(replies)

    def _died(self, rank: int) -> RankFailure:
        worker = self._workers[rank]
        message = f"the process ended with exit code {worker.join(GRACE_SECONDS)}"
        return RankFailure(rank, "Died", message, _log_tail(worker))

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """What each of `ranks` has printed last, and where all its threads stand now, from faulthandler."""
        before = {rank: _lines(self._workers[rank]) for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._workers[rank].pid, signal.SIGUSR1)
        if ranks:
            time.sleep(0.2)
        stacks = {rank: _lines(self._workers[rank])[len(before[rank]) :] for rank in ranks}
        tails = {rank: before[rank][-LOG_LINES:] for rank in ranks}
        return {r: "\n".join([*tails[r], *(x for x in stacks[r] if not _OF_PYTEST(x))]) for r in ranks}


def _lines(worker: Forked) -> list[str]:
    return worker.log.read_text(errors="replace").splitlines()


def _log_tail(worker: Forked) -> str:
    return "\n".join(_lines(worker)[-LOG_LINES:])


def _report(num_ranks: int, failures: list[RankFailure], hung: dict[int, str], timeout) -> str:
    parts = []
    for failure in failures:
        verb = failure.message if failure.type == "Died" else f"raised {failure.type}"
        parts.append(f"rank {failure.rank} of {num_ranks}: {verb}\n{failure.traceback}")
    for rank, stack in hung.items():
        when = "when another had failed" if failures else f"in {timeout:g} s"
        parts.append(f"rank {rank} of {num_ranks}: had not finished {when}\n{stack}")
    return "\n\n".join(parts)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    option = session.config.option
    if not option.collectonly and _needed(session):
        beforehand.bring(whole=bool(option.workers))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Fork the server where a test needs it, before any has run in this process."""
    if SERVER not in item.config.stash:
        item.config.stash[SERVER] = ForkServer(_work) if _needed(item.session) else None
    return (yield)


def _needed(session):
    return any("ranks" in getattr(x, "fixturenames", ()) for x in session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Warnings are on ranks what they are in the test."""
    marks = [line for mark in item.iter_markers("filterwarnings") for line in mark.args]
    item.config.stash.setdefault(FILTERS, [])[:] = [*item.config.getini("filterwarnings"), *marks]


@pytest.fixture(scope="session")
def ranks(pytestconfig):
    """`ranks(n, function, *args, timeout=120.0, expect_errors=False, group=True)`: see `RankPool`."""
    pool = RankPool(pytestconfig.stash[SERVER], pytestconfig.stash[FILTERS])
    yield pool
    pool.close()
