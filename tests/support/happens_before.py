"""A checker of what happens before what: two accesses to the same bytes, one of them a write, must be ordered.

The executor's calls log which bytes they read and write, and so do the transfers between ranks, the requests of drives
and the jobs of the update thread. Each of these is an *actor* with a vector clock. Clocks meet where the runtime itself
waits: at a transfer's wait, a request's or a job's. Unlike a test run, this finds a missing wait whatever the timing.

`ZEROFN_RUNTIME=ordered pytest tests/...` checks any test so.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from zerofn._torch_compat import OpOverload, tree_leaves
from zerofn.comm import channels, transport
from zerofn.job import in_flight as pending
from zerofn.memory import pinned
from zerofn.memory.arena import Arenas
from zerofn.offload import host_tensor, host_worker
from zerofn.offload.disk.engine import Engine, Request
from zerofn.ops.registry import traits_of
from zerofn.runtime import executor
from zerofn.util.process import the

Actor = tuple[str, int]
Clock = dict[Actor, int]


class Access(NamedTuple):
    """`actor`, at its time `at`, reads or writes the bytes [start, stop)."""

    start: int
    stop: int
    writes: bool
    actor: Actor
    at: int
    what: str


class Order:
    """The clocks, and the accesses that later ones may conflict with.

    `found`: conflicts, in words. `open`: actors that may still be at work.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self.num_accesses = 0
        self._clocks: dict[Actor, Clock] = {}
        self._log: list[Access] = []
        self.open: set[Actor] = set()
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    def clock(self, actor: Actor) -> Clock:
        """The latest time of every actor that `actor` has heard of."""
        return self._clocks.setdefault(actor, {actor: 1})

    def told(self, actor: Actor) -> Clock:
        """What those learn who wait for `actor`, or whom it starts."""
        with self._lock:
            found = dict(self.clock(actor))
            self.clock(actor)[actor] += 1
            return found

    def hears(self, actor: Actor, clock: Clock | None) -> None:
        """`actor` has waited, and knows all that happened until then."""
        with self._lock:
            mine = self.clock(actor)
            for other, at in (clock or {}).items():
                mine[other] = max(mine.get(other, 0), at)

    def begin(self, kind: str, *heard: Clock) -> Actor:
        """A new actor that knows this."""
        with self._lock:
            actor = (kind, next(self._numbers))
            for clock in (self.told(thread()), *heard):
                self.hears(actor, clock)
            self.open.add(actor)
            return actor

    def end(self, actor: Actor) -> None:
        """An actor does nothing any more."""
        self.open.discard(actor)

    def access(self, actor: Actor, x: Tensor, writes: bool, what: str) -> None:
        """Log an access to a tensor's bytes."""
        if x.numel() and x.device.type == "cpu":
            last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            self.bytes(actor, x.data_ptr(), (last + 1) * x.element_size(), writes, what)

    def bytes(self, actor: Actor, start: int, nbytes: int, writes: bool, what: str) -> None:
        """Log an access to bytes, and note with what it conflicts."""
        with self._lock:
            self.num_accesses += 1
            clock = self.clock(actor)
            new = Access(start, start + nbytes, writes, actor, clock[actor], what)
            kept = []
            for old in self._log:
                meets = old.start < new.stop and new.start < old.stop
                before = old.actor == actor or clock.get(old.actor, 0) >= old.at
                if meets and (old.writes or writes) and not before:
                    self.found.append(f"{_said(new)} while {_said(old)}")
                # Who has heard of the new one has heard of the old one, too.
                inside = new.start <= old.start and old.stop <= new.stop
                if not (before and inside and (writes or not old.writes)):
                    kept.append(old)
            self._log = [*kept, new]

    def fresh(self, x: Tensor, what: str, started: Container[Actor]) -> None:
        """Memory was just allocated by what has `started` these actors: malloc orders it after all others that are not
        still at work.
        """
        storage = x.untyped_storage()
        start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        with self._lock:
            inside = [x for x in self._log if x.start < stop and start < x.stop and x.actor not in started]
            for old in inside:
                if old.actor in self.open:
                    self.found.append(f"{what} gets memory while {_said(old)}")
            self._log = [old for old in self._log if old not in inside]


def _said(x: Access) -> str:
    return f"{x.what} ({x.actor[0]}) {'writes' if x.writes else 'reads'} bytes {x.start:x} to {x.stop:x}"


def thread() -> Actor:
    """The calling thread, as an actor."""
    return threading.current_thread().name, 0


@contextlib.contextmanager
def ordered() -> Iterator[Order]:
    """Inside, check the order of all accesses of captured steps; raises `AssertionError` at the end for conflicts."""
    order = Order()
    with pytest.MonkeyPatch.context() as patch:
        _watch_executor(patch, order)
        _watch_transfers(patch, order)
        _watch_drives(patch, order)
        _watch_jobs(patch, order)
        yield order
    assert not order.found, "\n".join(dict.fromkeys(order.found[:5]))


def _watch_executor(patch: pytest.MonkeyPatch, order: Order) -> None:
    callable_of = executor.callable_of

    def logged(target: Any, *more: Any) -> Callable[..., Any]:
        function = callable_of(target, *more)
        if not isinstance(target, OpOverload) or _is_view(target):
            return function
        written = [x.alias_info is not None and x.alias_info.is_write for x in target._schema.arguments]
        names = [x.name for x in target._schema.arguments]

        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            me, what, inputs = thread(), str(target), _tensors(list(given.values()))
            for name, writes in zip(names, written, strict=True):
                for x in _tensors([given.get(name)]):
                    order.access(me, x, writes, what)
            before = set(order.open)
            out = function(*args, **kwargs)
            known = {x.untyped_storage().data_ptr() for x in inputs}
            for x in _tensors([out]):
                if x.device.type == "cpu" and x.untyped_storage().data_ptr() not in known and not _placed(x):
                    order.fresh(x, what, order.open - before)
                    if not traits_of(target).collective:  # which others write
                        order.access(me, x, True, what)
            return out

        return call

    patch.setattr(executor, "callable_of", logged)
    put = host_tensor.put_

    def put_(host: Tensor, x: Tensor) -> None:
        order.access(thread(), x, False, "put_")
        order.access(thread(), host, True, "put_")
        put(host, x)

    patch.setattr(host_tensor, "put_", put_)  # on the update thread


def _watch_transfers(patch: pytest.MonkeyPatch, order: Order) -> None:
    point_to_point, wait = transport.point_to_point, pending.PendingTransfers.wait
    begun = channels._begun

    def started(group: str, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Any:
        actor = order.begin("transfer")
        for peers, writes in ((sends, False), (receives, True)):
            for peer, x in peers.items():
                order.access(actor, x, writes, f"a transfer {'from' if writes else 'to'} rank {peer}")
        return by(actor, point_to_point(group, sends, receives))

    def message(x: Tensor, peer: int, group: str, *, sends: bool) -> Any:
        actor = order.begin("transfer")
        order.access(actor, x, not sends, f"a message {'to' if sends else 'from'} rank {peer}")
        return by(actor, begun(x, peer, group, sends=sends))

    def by(actor: Actor, works: Callable[[], Any]) -> Callable[[], Any]:
        """What to wait for, which tells who waits what an actor has done."""

        def found() -> Any:
            return works()

        found.actor = actor  # type: ignore[attr-defined]
        return found

    def waited(self: pending.PendingTransfers, x: Tensor) -> bool:
        transfer = self.transfers.get(x.data_ptr())
        there = wait(self, x)
        actor = getattr(transfer and transfer.works, "actor", None)
        if there and transfer is not None and actor is not None:
            order.end(actor)
            order.hears(thread(), order.told(actor))
            if transfer.finish is not pending._nothing:  # the sum over ranks
                for each in transfer.kept[1:]:
                    order.access(thread(), each, False, "a sum over ranks")
                order.access(thread(), transfer.kept[0], True, "a sum over ranks")
        return there

    patch.setattr(transport, "point_to_point", started)
    patch.setattr(channels, "_begun", message)
    patch.setattr(pending.PendingTransfers, "wait", waited)


def _watch_drives(patch: pytest.MonkeyPatch, order: Order) -> None:
    submit, wait, end, done = Engine.submit, Request.wait, Request.end, Request.done
    actors: dict[int, Actor] = {}
    regions: dict[int, list[Any]] = {}  # what its requests and its writes have told

    def submitted(self: Engine, request: Request) -> None:
        region = regions.setdefault(id(request.region), [request.region, {}, {}])
        actor = order.begin("drive", region[1] if request.writes else region[2])
        actors[id(request)] = actor
        verb = "is written to" if request.writes else "is read from"
        order.bytes(
            actor, request._address, request.region.nbytes, not request.writes, f"what {verb} {request.region.label}"
        )
        clock = order.told(actor)
        for each in region[1:] if request.writes else region[1:2]:
            each.update({k: max(v, each.get(k, 0)) for k, v in clock.items()})
        request._kept_for_order = region  # type: ignore[attr-defined]
        try:
            submit(self, request)
        except Exception:
            order.end(actor)
            raise

    def ended(self: Request, *args: Any) -> None:  # and its buffer may be freed
        if id(self) in actors:
            order.end(actors[id(self)])
        end(self, *args)

    def heard(request: Request) -> None:
        if id(request) in actors:
            order.hears(thread(), order.told(actors[id(request)]))

    def waited(self: Request) -> None:
        try:
            wait(self)
        finally:
            heard(self)

    def is_done(self: Request) -> bool:
        found = bool(done.fget(self))  # type: ignore[attr-defined]
        if found:
            heard(self)
        return found

    def allocated(*args: Any) -> Tensor:
        before = set(order.open)
        x = aligned(*args)
        order.fresh(x, "a buffer for drives", order.open - before)
        return x

    aligned = pinned.aligned
    for module in list(sys.modules.values()):
        if getattr(module, "aligned", None) is aligned:
            patch.setattr(module, "aligned", allocated)

    patch.setattr(Engine, "submit", submitted)
    patch.setattr(Request, "wait", waited)
    patch.setattr(Request, "end", ended)
    patch.setattr(Request, "done", property(is_done))


def _watch_jobs(patch: pytest.MonkeyPatch, order: Order) -> None:
    submit, wait = host_worker.HostWorker.submit, host_worker.wait
    told: dict[int, tuple[Future[Any], list[Clock]]] = {}

    def submitted(self: host_worker.HostWorker, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        before, after = order.told(thread()), list[Clock]()

        def job(*args: Any, **kwargs: Any) -> Any:
            order.hears(thread(), before)
            try:
                return function(*args, **kwargs)
            finally:
                after.append(order.told(thread()))

        future = submit(self, job, *args, **kwargs)
        told[id(future)] = future, after
        return future

    def waited(futures: Any) -> Any:
        futures = list(futures)
        found = wait(futures)
        for future in futures:
            for clock in told[id(future)][1] if id(future) in told else ():
                order.hears(thread(), clock)
        return found

    patch.setattr(host_worker.HostWorker, "submit", submitted)
    patch.setattr(host_worker, "wait", waited)


def _is_view(target: OpOverload) -> bool:
    """Whether an operation only makes a view, which reads nothing."""
    aliases = [x.alias_info for x in target._schema.returns]
    return bool(aliases) and all(x is not None and not x.is_write for x in aliases)


def _placed(x: Tensor) -> bool:
    """Whether a tensor is in an arena, whose places are not malloc's to order."""
    return any(arena.holds(x) for arena in list(the(Arenas).numbered.values()))


def _tensors(values: list[Any]) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
