"""`compile`: a pure step -> the same step, captured once per input signature, scheduled, and run in place."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import passes, tree
from ._torch_compat import OpOverload, storage_key
from .comm.agreement import abandon, agree_on, exchange
from .comm.pending import pending
from .cost.machine import Machine, machine_of
from .dry_run.script import rehearsing
from .graph.advice import no_leaf, note_dtypes
from .graph.capture import capture
from .graph.captured import captured, dry_result
from .graph.fingerprint import fingerprint
from .graph.program import Program, tensor_of
from .graph.source_lines import place_of
from .memory import donation
from .memory.host_allocator import keep_freed_memory
from .offload.host_worker import worker
from .ops import cpu, cuda
from .passes.budget.decision import Choice, as_text, from_text
from .planning.plan import Plan
from .planning.profile import Profile, profiled
from .runtime.buffers import Buffers
from .runtime.executor import Executor, failed_node
from .runtime.inputs import drive_tickets, params_among, refill_copies, signature_of_leaf
from .runtime.interrupts import deliver, whole_steps
from .sharding.allocate import keep_halves
from .sharding.sharded import is_sharded
from .sharding.state_tree import as_tensor
from .util.errors import note, said
from .util.sizes import num_bytes

log = logging.getLogger("zerofn")
MANY = 8  # captures of one step, after which it is said what keeps changing


def compile(
    train_step: Callable[[Any, Any], Any],
    *,
    donate: bool = True,
    memory: int | str | None = None,
    remat: str | None = None,
    machine: Machine | str | os.PathLike[str] | None = None,
    backend: str = "eager",
) -> Step:
    """A callable `(state, batch) -> (state, aux)` that runs `train_step` captured and scheduled.

    The step is captured at its first call and again for every new signature (structure, shapes, dtypes, ints and
    floats of the batch), each time with one log line that names what changed. With `donate` the new state is
    written into the old one's memory and using the old one afterwards raises `RuntimeError`. A step whose output
    is no pair beginning with a state of its argument's structure is an evaluation step: nothing is donated.
    Floating replicated state that depends on a rank's own batch (batch norm's running values in `extra`, say) is
    averaged over ranks at the end of the step. The step run eagerly does not: there each rank keeps its own.

    `memory`: bytes of the device, or a text such as "24GiB", that a step may take on a rank, its state included, but
    for what operations take for themselves while they run. Gathered units are kept, or dropped and gathered again, and
    activations kept, computed again, or sent to host memory and back, as that asks; the values are the same, bit for
    bit. `remat`: "full" computes every activation again but what crosses from one unit's part of the model to the next;
    "auto" those for which it costs least, until the kept ones take half of the memory. `machine`: by whose rates
    transfers are placed, and what costs least is told: what `zerofn.plan` was given; a usual one where it is None.

    Raises `graph.capture.CaptureError` for a step that is not a pure function, `MemoryError` below the least memory
    that any schedule takes, on every rank.
    """
    if remat not in (None, "full", "auto"):
        raise ValueError(f"compile: remat={remat!r} is not known; there are 'full', 'auto' and None.")
    if remat is not None and memory is not None:
        raise ValueError(f"compile(memory={memory!r}) decides what is computed again; leave remat={remat!r} out.")
    if backend != "eager":
        raise ValueError(f"compile: backend={backend!r} is not known; there is 'eager'.")
    choose = {"memory": None if memory is None else num_bytes(memory), "remat": remat}
    where = None if machine is None else machine_of(machine)
    return Step(train_step, donate, choose if any(choose.values()) else {}, where)


class _Entry:
    """One captured signature."""

    def __init__(self, program: Program, donating: bool, constants: list[tuple[Tensor, int]]) -> None:
        self.program, self.donating, self.constants = program, donating, constants
        self.buffers: Buffers | None = None  # None until it first runs: a plan allocates nothing
        self.executor: Executor | None = None

    def bound(self) -> tuple[Buffers, Executor]:
        """What was allocated for it, and what runs it. All ranks must ask."""
        if self.buffers is None:
            self.buffers = agree_on(f"zerofn.compile({self.program.name})", lambda: (Buffers(self.program), ""))
            self.buffers.bind(self.program.gm)
        if self.executor is None:
            self.executor = Executor(self.program.gm)
        return self.buffers, self.executor


class _Call(NamedTuple):
    """A step's arguments, flat, and what was captured for them."""

    entry: _Entry
    state_leaves: list[Any]
    state_def: tree.PyTreeSpec
    batch_leaves: list[Any]


class Step:
    """A compiled step. `timings`: seconds its last capture and passes took, and the number of nodes."""

    def __init__(
        self, train_step: Callable[[Any, Any], Any], donate: bool, choose: dict[str, Any], machine: Machine | None
    ) -> None:
        self._step, self._donate, self._choose, self._machine = train_step, donate, choose, machine
        self._entries: dict[Any, _Entry] = {}
        self._before: dict[str, str] = {}
        self._changes: Counter[str] = Counter()  # in how many captures an entry was another than in the one before
        self._num_captures = 0
        self.timings: dict[str, Any] = {}
        self.__name__ = getattr(train_step, "__name__", "step")

    def __call__(self, state: Any, batch: Any) -> Any:
        """Run one step."""
        if (rehearsal := rehearsing()) is not None:
            rehearsal.come_to(self._step, state, batch)
            return dry_result(self._step, state, batch)
        deliver()
        call = self._prepare(state, batch)
        entry, leaves = call.entry, call.state_leaves
        for constant, version in entry.constants:
            if constant._version != version:
                raise RuntimeError(
                    f"{self.__name__}: a tensor of shape {tuple(constant.shape)} that the step closes "
                    "over was changed since capture; pass it in the state or the batch."
                )
        tensors, places = self._tensors(leaves, entry.donating)
        copies = [t for k in entry.program.full for t in leaves[k].copies]
        given = [x for x in call.batch_leaves if is_sharded(x) or isinstance(x, Tensor)]
        batch_tensors = [t for x in given for t in (x.parts if is_sharded(x) else (x,))]
        if entry.donating:
            batch_tensors = self._apart(batch_tensors, {*places, *map(storage_key, copies)}, call.batch_leaves)
        inputs = [*tensors, *copies, *batch_tensors]
        entry.bound()[0].reserve(exactly=self._choose.get("memory") is not None)
        outputs = self._run(entry, inputs, leaves, lambda: (tree.unflatten(call.state_def, leaves), batch))
        return self._result(entry, outputs, tensors, copies, leaves)

    def lower(self, state: Any, batch: Any) -> Plan:
        """What a step on this state and batch will need and do, known before it runs: it is captured and scheduled, and
        the next call runs what was planned. All ranks must call it.
        """
        return Plan(self._prepare(state, batch).entry.program)

    def profile(
        self, state: Any, batch: Any, machine: Machine | str | os.PathLike[str] | None = None
    ) -> tuple[Any, Profile]:
        """Run two steps on this batch, -> (what the second returns, `Profile`). In the first every operation is timed,
        in the second memory is followed. `machine`: what `zerofn profile` wrote here, or `zerofn.this_machine()`; then
        times are predicted, too. All ranks must call it.
        """
        entry = self._prepare(state, batch).entry
        return profiled(self, Plan(entry.program), entry, state, batch, machine)

    def _prepare(self, state: Any, batch: Any) -> _Call:
        """The arguments, flat, and what was captured for their like."""
        state_leaves, state_def = tree.flatten(state, is_leaf=is_sharded)
        batch_leaves, batch_def = tree.flatten(batch, is_leaf=is_sharded)
        state_leaves = [as_tensor(x) if isinstance(x, int | float) else x for x in state_leaves]
        for x in state_leaves:
            if is_sharded(x):
                keep_halves(x)
        key = (
            state_def,
            batch_def,
            tuple(map(signature_of_leaf, state_leaves)),
            tuple(map(signature_of_leaf, batch_leaves)),
        )
        try:
            entry = self._entries.get(key)
        except TypeError:  # not hashable
            raise no_leaf(self.__name__, state, batch) from None
        refill_copies(state_leaves, params_among(state_def) if entry is None else entry.program.full)
        if entry is None:
            state = tree.unflatten(state_def, state_leaves)
            entry = self._entries[key] = self._capture(state, batch)
        return _Call(entry, state_leaves, state_def, batch_leaves)

    def _tensors(self, leaves: list[Any], donating: bool) -> tuple[list[Tensor], list[Any]]:
        """The state's tensors, and in which memory they lay where it is given away. Entries that share memory are
        parted before."""
        out: list[Tensor] = []
        fixed: list[int] = []  # positions of pieces that lie in a gathered copy, and must stay there
        for x in leaves:
            if is_sharded(x):
                parts = x.parts
                fixed += range(len(out), len(out) + len(parts)) if x.copies is not None else ()
                out += parts
            elif isinstance(x, Tensor):
                out.append(x)
        donation.check(out)
        places = list(map(storage_key, out)) if donating else []
        if len(set(places)) < len(places):
            seen = {places[j] for j in fixed}
            tickets = drive_tickets(leaves)
            for j in sorted(set(range(len(out))) - set(fixed)):
                if places[j] in seen:
                    self._refuse(out[j], tickets, "two entries of the state")
                    out[j] = out[j].clone()
                seen.add(places[j])
        return out, places

    def _apart(self, tensors: list[Tensor], given: set[Any], leaves: list[Any]) -> list[Tensor]:
        """The batch's tensors, with copies of those that lie in memory which is given away: it is written early."""
        shared = [storage_key(x) in given for x in tensors]
        if not any(shared):
            return tensors
        tickets = drive_tickets(leaves)
        for x in [x for x, is_shared in zip(tensors, shared, strict=True) if is_shared]:
            self._refuse(x, tickets, "the state and the batch")
        return [x.clone() if is_shared else x for x, is_shared in zip(tensors, shared, strict=True)]

    def _refuse(self, x: Tensor, tickets: dict[int, str], who: str) -> None:
        if id(x) in tickets:
            raise RuntimeError(
                f"{self.__name__}: {who} are one place on a drive, {tickets[id(x)]}, which the step "
                "would write to for one of them. Keep the other in an entry of its own, and fill it in "
                "a compiled step: state.replace(extra=state.params)."
            )

    def _capture(self, state: Any, batch: Any) -> _Entry:
        """Capture, on all ranks or on none: one that fails makes the others raise its message."""
        what, began = f"zerofn.compile({self.__name__})", time.perf_counter()

        def made(program: Program, constants: list[Tensor], choices: Sequence[Choice]) -> tuple[_Entry, str]:
            entry = self._scheduled(program, constants, choices, began)
            known = {**entry.program.describe(), "machine": self._machine}
            return entry, "\n".join([*(f"{k}: {v}" for k, v in known.items()), fingerprint(entry.program)])

        if not self._choose:
            return agree_on(what, lambda: made(*self._prepared(state, batch)))
        program, constants, mine = agree_on(what, lambda: (self._prepared(state, batch), ""))
        first, *_ = exchange(what, as_text(mine))
        return agree_on(what, lambda: made(program, constants, from_text(first)))

    def _prepared(self, state: Any, batch: Any) -> tuple[Program, list[Tensor], list[Choice]]:
        """The captured program, what it closes over, and what this rank would choose for it."""
        start = time.perf_counter()
        pending().wait_for_all()  # of another state, perhaps, that nobody will use again
        program, constants = captured(self._step, state, batch)
        program.name = self.__name__
        program.timings["capture"] = time.perf_counter() - start
        if any(x.device.type == "cpu" and x.dim() for x in map(tensor_of, program.placeholders) if x is not None):
            keep_freed_memory()
        program = passes.prepare(program, self._machine)
        if not self._choose:
            return program, constants, []
        return program, constants, passes.decide(program, donating=self._gives(program), **self._choose)

    def _gives(self, program: Program) -> bool:
        return self._donate and program.new_state is not None

    def _scheduled(self, program: Program, constants: list[Tensor], choices: Sequence[Choice], began: float) -> _Entry:
        donating = self._gives(program)
        program = passes.finish(program, donating=donating, choices=choices, budget=self._choose.get("memory"))
        entry = _Entry(program, donating, [(v, v._version) for v in constants])
        took = dict(program.timings)
        self.timings = {"capture": took.pop("capture"), "passes": took, "nodes": len(program.gm.graph.nodes)}
        self._report(program, constants, time.perf_counter() - began, donating)
        return entry

    def _report(self, program: Program, constants: list[Tensor], seconds: float, donating: bool) -> None:
        """The one log line: what changed, what was baked in, what it cost."""
        now = program.describe()
        pairs = {k: (self._before.get(k, "nothing"), now.get(k, "nothing")) for k in {**now, **self._before}}
        changes = {k: f"{k} {was} -> {is_now}" for k, (was, is_now) in pairs.items() if was != is_now}
        changed = list(changes.values())
        self._warn(changes, {f"batch.{name}" for name in program.batch.baked})
        why = "first call" if not self._before else "; ".join(changed[:3]) or "another structure"
        self._before = now
        kind = (
            "training step, state donated"
            if donating
            else ("training step" if program.new_state is not None else "evaluation step")
        )
        baked = (
            f"; {len(constants)} closed-over tensors baked in, shapes {[tuple(c.shape) for c in constants[:4]]}"
            if constants
            else ""
        )
        for device in {x.device.type for x in map(tensor_of, program.placeholders) if x is not None and x.dim()}:
            _tell_of_kernels(device)
        log.info(
            "%s: captured (%s): %s, %d nodes, %.2f s%s",
            self.__name__,
            why,
            kind,
            len(program.gm.graph.nodes),
            seconds,
            baked,
        )

    def _warn(self, changes: dict[str, str], baked: set[str]) -> None:
        """Once, after many captures, say which entry keeps changing and what to do about it."""
        self._num_captures += 1
        self._changes.update(changes.keys() if self._before else ())
        if self._num_captures != MANY or not self._changes:
            return
        key = self._changes.most_common(1)[0][0]
        advice = (
            "a number is part of what a step is captured for: pass torch.tensor(...) instead"
            if key in baked
            else "a step is captured for every new shape: pad to a few of them"
        )
        log.warning(
            "%s: captured %d times so far, %d of them because %s was another (%s); %s.",
            self.__name__,
            MANY,
            self._changes[key],
            key,
            changes.get(key, "not this time"),
            advice,
        )

    def _run(
        self, entry: _Entry, inputs: list[Tensor], leaves: list[Any], given: Callable[[], tuple[Any, Any]]
    ) -> list[Any]:
        try:
            with whole_steps():
                return entry.bound()[1](inputs)
        except BaseException as error:
            if isinstance(error, Exception):
                with contextlib.suppress(Exception):  # the other ranks wait to hear of it
                    self._explain(error, entry.program, *given())
            why = f"{self.__name__} failed: {said(error)}"
            if isinstance(error, Exception):
                pending().forget()
                worker().end()
                entry.bound()[0].renew()
                if entry.program.drive_space:  # its drive may have failed
                    self._entries = {key: kept for key, kept in self._entries.items() if kept is not entry}
                abandon(why)
            if entry.donating and entry.bound()[1].wrote:
                for x in leaves:
                    if is_sharded(x):
                        x.donate(f"This state was lost when {why}. Load the last checkpoint.")
            raise

    def _explain(self, error: Exception, program: Program, state: Any, batch: Any) -> None:
        """Note which operation of the user's failed, on which line. Ours say it themselves."""
        node = failed_node(error)
        if node is not None:
            if isinstance(node.target, OpOverload) and node.target.namespace == "zerofn":
                return
            place = place_of(node, program, lambda: capture(self._step, state, batch, traces=True))
            note(error, f"in {self.__name__}: {place}")
        note_dtypes(error, state, batch)

    def _result(
        self, entry: _Entry, outputs: list[Any], tensors: list[Tensor], copies: list[Tensor], leaves: list[Any]
    ) -> Any:
        program = entry.program
        if program.new_state is None:
            return program.aux.spread(outputs)
        if not entry.donating:
            new, aux = outputs[: program.num_new], outputs[program.num_new :]
            return program.new_state.spread(new), program.aux.spread(aux)
        fresh = iter(outputs)
        kept = set(program.kept)
        new = [next(fresh) if j in kept else t for j, t in enumerate(tensors)]
        why = (
            f"This state was given to {self.__name__} and its memory belongs to the state it returned; use that "
            "one, or compile(..., donate=False)."
        )
        for j, t in enumerate(tensors):
            if j not in kept:  # known by identity, so that others who hold the old one hear of it
                donation.give(t, why)
                new[j] = t.detach()
        full = {k: copies[a:b] for k, (a, b) in program.full.items()}
        state = program.new_state.spread(new, full, arriving=True)
        worker().owe(lambda: filter(is_sharded, tree.leaves(state, is_leaf=is_sharded)))
        for x in leaves:
            if is_sharded(x):
                x.donate(why)
        return state, program.aux.spread(fresh)


@functools.cache
def _tell_of_kernels(device: str) -> None:
    """Once, where update rules run in torch's operations for want of the kernels: why."""
    kernels = {"cpu": cpu, "cuda": cuda}.get(device)
    why = kernels.missing() if kernels is not None else None
    if why:
        log.info("%s torch's operations do the same, more slowly.", why)
