"""`compile`: capture a pure step once per input signature, schedule it, and run it in place."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from . import passes, tree
from .capture.advice import no_leaf
from .capture.between_ranks import NumberedStep
from .capture.checked_capture import captured, captured_with_outline, dry_result
from .cost.machine import Machine, machine_of
from .cost.op_cost import flops_of_step
from .dry_run.script import current_dry_run
from .graph.program import Program, tensor_of
from .graph.same_graph import Outline
from .job.agreement import agree_on, rank_and_size
from .job.failures import abandon
from .job.in_flight import pending
from .job.step_order import RanksOutOfStep, meetings
from .lowering.backends import BackendWord, backend_of
from .memory.host_allocator import keep_freed_memory
from .memory.turns import StepTurn, is_inside_step, outside_steps
from .offload.host_worker import worker
from .ops.same import RanksDiffer
from .passes import Pass
from .passes._captured import Captured
from .passes.budget.decision import Choice
from .passes.budget.shared import Decisions, orders_of, shared
from .planning.plan import Plan
from .planning.profile import Profile, profiled
from .planning.rounds import each_captured
from .runtime.agreed_captures import AgreedStep, AgreedSteps, Reading, first_change
from .runtime.backend import Backend
from .runtime.capture_log import CaptureLog, told_of, while_capturing
from .runtime.captured_step import CapturedStep, StepCall
from .runtime.equal_batches import compare_batches
from .runtime.errors import explain, users_frames
from .runtime.executor import Executor
from .runtime.guarded_captures import Captures, Checks, LeftOut
from .runtime.hooks import before_step
from .runtime.inputs import Inputs, collect, params_among, refill_copies, resolved, seen_of, signature_of
from .runtime.interrupts import whole_steps
from .runtime.kinds_of_steps import KindsOfSteps
from .runtime.options import Options, Remat
from .runtime.outputs import returned
from .runtime.rank_comparison import agree_among_slices, agreed_inputs, agreed_text, only_sums, refuse_differences
from .runtime.repeatable import arithmetic
from .runtime.typed_step import B, R, S, TypedStep
from .schedules.own import AsSchedule
from .sharding.allocate import keep_halves
from .sharding.sharded import is_sharded, mesh_among
from .sharding.state_tree import as_tensor
from .util.arguments import checked
from .util.errors import again, note, said
from .util.patches import uncollected
from .util.sizes import num_bytes

KEPT = 128  # signatures of a step, each about 1 MB: those used last


@checked("train_step", "donate", "deterministic", "broadcast_buffers")
def compile(
    train_step: Callable[[S, B], R],
    *,
    donate: bool = True,
    memory: int | str | None = None,
    remat: Remat | None = None,
    machine: Machine | str | os.PathLike[str] | None = None,
    backend: BackendWord | Backend = "eager",
    passes: Callable[[list[Pass]], list[Pass]] | Sequence[Pass] | None = None,
    deterministic: bool = False,
    broadcast_buffers: bool = False,
    watch: Sequence[Any] = (),
    schedule: AsSchedule | None = None,
) -> CompiledStep[S, B, R]:
    """Return a callable `(state, batch) -> (state, metrics)` that runs `train_step`, captured and scheduled.

    The step is captured at its first call, for every new signature (structure, shapes, dtypes, ints and floats of the
    batch) and after a change to a value that it reads (docs/sharp_bits.md), with one log line each. A step that does
    not return `(state, metrics)` is an evaluation, and may not create a `TrainState`. Unsharded state that each rank
    computes from its own rows, such as batch-norm statistics, is averaged over ranks if it is floating-point. A shard
    may be updated with one rank's value only after that value was reduced over ranks, or if `zerofn.same` declares it
    equal on all ranks. A step that is called without `compile` is not checked for this.

    - `donate`: write the new state into the old one's memory; using the old one afterwards raises `RuntimeError`.
    - `memory`: bytes of device memory that a step may use on a rank, or a string such as "24GiB". It counts state and
      values, not the workspace of operations. To stay below it, ZeroFn gathers units again, recomputes or offloads
      activations, and tiles logits. On CPUs the results have the same bits with any `memory`. torch's CUDA allocator is
      limited to `memory` plus an eighth (at least 1 GiB) for workspace; a step without `memory` lifts this limit.
    - `remat`: "full" recomputes all activations except those that one unit's part of the model passes to the next;
      "auto" recomputes the cheapest, until the saved activations take half as much memory as all of them would.
    - `machine`: the cost model for schedules; pass the same as to `zerofn.plan`. None is a typical machine.
    - `backend`: "eager" runs operation by operation; "inductor" compiles the operations between matrix products and
      transfers, with results that are equal up to rounding and the same at all stages; "auto" does so if it saves time;
      "graphs" runs the kernels of "eager" as CUDA graphs (docs/fast.md). Or your own, with `bind(program) -> Runner`.
    - `passes`: your own passes, `[zerofn.Pass(mine)]`, which run before the pass named "donate"; or a function that
      receives the list of all passes and returns the list to run (`zerofn.passes.before`). Each added pass is checked.
    - `deterministic`: also on GPUs, sum in rank order and use deterministic kernels; raise where torch has none.
    - `broadcast_buffers`: all ranks take rank 0's values of unsharded state, of any dtype, as under DDP.
    - `watch`: further values that the step depends on (docs/sharp_bits.md): objects, and functions without arguments,
      whose results are compared at every call.
    - `schedule`: the schedule of a pipeline; see `parallel.pipe`.

    >>> import torch, zerofn
    >>> def tanh_gelu(program):
    ...     for node in program.gm.graph.nodes:
    ...         if node.target is torch.ops.aten.gelu.default:
    ...             node.update_kwarg("approximate", "tanh")
    >>> step = zerofn.compile(lambda state, x: torch.nn.functional.gelu(state["w"] * x),
    ...                       passes=zerofn.passes.before("canonicalize", zerofn.Pass(tanh_gelu, "body")))
    >>> step({"w": torch.ones(2)}, torch.ones(2))  # exact GELU gives 0.8413
    tensor([0.8412, 0.8412])

    Raises at the first call, on every rank: `CaptureError` if the step is not a pure function, `MemoryError` if no
    schedule fits into `memory`, and `passes.PassError` if an added pass makes a graph that is invalid or impure, or has
    other inputs or results. Raises at once: `ValueError` for unknown or contradictory options.
    """
    budget = None if memory is None else num_bytes(memory, "compile")
    given = (backend_of(backend), passes, deterministic, broadcast_buffers, watch, schedule)
    options = Options(donate, budget, remat, None if machine is None else machine_of(machine), *given).checked()
    return each_captured(train_step, lambda step, meant: CompiledStep(step, options if meant else options.plain()))


_Make = Callable[[], tuple[Captured, str]]
_Made = tuple[CapturedStep, Sequence[Tensor]]  # what will run, and what it closes over


class CompiledStep(TypedStep[S, B, R]):
    """A compiled step. `timings`: seconds of its last capture and passes, and its number of nodes. `state`: the newest
    state that the step returned, in case Ctrl-C ends the function that held it; set it to None to free the memory.
    """

    def __init__(self, train_step: Callable[[S, B], R], options: Options) -> None:
        self._step, self._options = train_step, options
        self.__wrapped__ = train_step  # a step that calls this one is guarded by what its function reads
        self._captures: dict[Any, Captures] = {}  # by signature; the longest unused first
        self._agreed_steps, self._checks, self._kinds = AgreedSteps(), Checks(), KindsOfSteps()
        self._last: Captures | None = None
        self.timings: dict[str, Any] = {}
        self.__name__ = getattr(train_step, "__name__", "step")
        self._log, self._left_out = CaptureLog(self.__name__), LeftOut(self.__name__, train_step)

    def __repr__(self) -> str:
        told = told_of(len(self._captures), [*self._entries.values()], self.timings, self._options)
        return f"<compiled {self.__name__}: {told}>"

    @property
    def _entries(self) -> dict[Any, CapturedStep]:  # by (signature, number among the signature's captures)
        return {(key, k): x for key, captures in self._captures.items() for k, x in enumerate(captures.entries)}

    @property
    def flops(self) -> int:
        """A rank's FLOPs in matrix products in the last call, without recomputed ones; 0 before the first call."""
        return flops_of_step(self._last.entries[-1].program).model if self._last and self._last.entries else 0

    def called(self, state: Any, batch: Any) -> Any:
        """Run one step, or call the function if this is inside another step."""
        if is_inside_step():
            return self._step(state, batch)
        if (dry_run := current_dry_run()) is not None:
            dry_run.come_to(self._step, state, batch)
            return dry_result(self._step, state, batch)
        before_step()
        return self.going_on(state, batch)

    def going_on(self, state: Any, batch: Any) -> Any:
        """Run a step as a part of one that has begun: no hook, and no interrupt, comes before it."""
        with StepTurn(self.__name__):
            return self._in_turn(state, batch)

    def _in_turn(self, state: Any, batch: Any) -> Any:
        call = self._entry_for(self._kinds.turned(state), batch)
        entry, leaves = call.entry, call.state_leaves
        worker().serve(entry)
        inputs = collect(self.__name__, leaves, call.batch_leaves, entry.program.full, entry.donating)
        entry.bind()
        entry.buffers.reserve(exactly=self._options.memory is not None)
        with whole_steps():  # the old state is spent where the new one is made
            outputs = self._run(call, inputs, batch)
            result = returned(self.__name__, entry.program, entry.donating, outputs, inputs, leaves)
            if entry.program.new_state is not None:
                self.state = result[0]
                self._kinds.went(self.state)
        return result

    @users_frames("_entry_for")
    @outside_steps("step.lower")
    def lower(self, state: S, batch: B) -> Plan:
        """Return the `Plan` of a step on this state and batch: what the step will need and send.

        The step is captured and scheduled; the next call runs it. Nothing is allocated. All ranks must call it.
        """
        return Plan(self._planned(state, batch).program)

    @outside_steps("step.profile")
    def profile(self, state: S, batch: B, machine: Machine | str | os.PathLike[str] | None = None) -> tuple[R, Profile]:
        """Run two steps on this batch. Return (the result of the second step, a `Profile`).

        The first step measures every operation, the second one follows memory. `machine`: the profile that
        `zerofn profile` wrote here, or `zerofn.this_machine()`; then times are predicted, too. All ranks must
        call it. Raises `ValueError` for any backend but "eager": only that backend shows when each operation
        begins.
        """
        entry = self._planned(state, batch)
        return profiled(self, Plan(entry.program), entry, state, batch, machine)

    def _planned(self, state: Any, batch: Any) -> CapturedStep:
        """Return what will run, before it does. A dry run has come to the step then."""
        if (dry_run := current_dry_run()) is not None:
            dry_run.come_to(self._step, state, batch)
        return self._entry_for(KindsOfSteps().turned(state), batch).entry

    def _entry_for(self, state: Any, batch: Any) -> StepCall:
        """Return the flat arguments, and the entry for their signature, captured now if it is new."""
        orders = tree.orders(state), tree.orders(batch)
        (state_leaves, state_def), (batch_leaves, batch_def) = (tree.flatten(x, is_sharded) for x in (state, batch))
        state_leaves = [as_tensor(x) if isinstance(x, int | float) else x for x in state_leaves]
        for x in state_leaves:
            if is_sharded(x):
                keep_halves(x)
        try:
            batch, batch_leaves = resolved(batch, batch_leaves, batch_def)
            leaves = signature_of(state_leaves), signature_of(batch_leaves), seen_of(batch_leaves)
            signature = (state_def, batch_def, leaves, orders)
            captures = self._captures.get(signature)
        except TypeError:  # no constant, not hashable, or of no shape
            raise no_leaf(self.__name__, state, batch) from None
        captures = captures or Captures(self._step, state, self._left_out, self._options.watch)
        again = lambda lines: self._again(tree.unflatten(state_def, state_leaves), batch, lines)  # noqa: E731
        entry = found = captures.find(again, lambda entry: refill_copies(state_leaves, entry.program.full))
        if entry is None:
            refill_copies(state_leaves, params_among(state_def))
            state = tree.unflatten(state_def, state_leaves)
            of_state = state_def, leaves[0], orders[0]
            try:
                entry = captures.captured(lambda: self._made(captures.reading(of_state), state, batch, captures.why))
            except Exception as error:
                if captures.why:
                    advice = "change it in the same way on every rank."
                    note(error, f"This rank captures again, because {captures.why}: {advice}")
                raise
            if entry.step is not None:
                self._agreed_steps.add(entry.step, captures.reading(of_state))
            self._captures[signature] = captures
            self._forget_old()
        elif captures is not self._last:
            self._captures[signature] = self._captures.pop(signature)  # the last used is the last
        self._last = captures
        if self._checks.due():
            captures.check(again if found else None)
        return StepCall(entry, state_leaves, state_def, batch_leaves)

    def _again(self, state: Any, batch: Any, lines: bool) -> Outline:
        """Capture on this rank alone, to see whether the graph is another one by now."""
        with arithmetic(self._options.deterministic, tree.leaves(state, is_leaf=is_sharded)):
            found = captured_with_outline(self._step, state, batch, lines)[0].outline
        assert found is not None
        return found

    def _forget_old(self) -> None:
        while len(self._captures) > KEPT:
            for entry in self._captures.pop(next(iter(self._captures))).entries:
                entry.close()

    @while_capturing
    def _made(self, reading: Reading, state: Any, batch: Any, why: str) -> _Made:
        """Capture on this rank alone if that may be, or on all. `why`: what changed outside the arguments since."""
        make: _Make = lambda: self._captured(state, batch)  # noqa: E731
        because = why
        known = list(self._agreed_steps.of(reading, self._left_out.paths)) if rank_and_size()[1] > 1 else []
        if known:
            try:
                found = make()
                known = known if only_sums(found[0].program.mesh) else []
                apart = [x.difference(found[1], found[0].numbered) for x in known]
                if "" in apart:
                    alone, because = self._alone(found[0], known[apart.index("")], why)
                    if alone is not None:
                        return alone
                else:
                    make, because = lambda: found, "; ".join(apart[:1])
            except Exception as error:  # perhaps of all ranks, and others hear of it
                make = functools.partial(again, error)
        return self._agreed(make, state, batch, why, because)

    def _alone(self, mine: Captured, agreed: AgreedStep, why: str) -> tuple[_Made | None, str]:
        """Schedule a capture as the others have scheduled theirs. Return None, and why, if its transfers differ."""
        mine.pipeline.prepare(mine.program, self._options.machine)
        if not agreed.first.fits(mine.program):
            return None, "its operations differ"
        (entry, constants), text = self._scheduled(mine, agreed.first, why)
        entry.alone, entry.step = True, None
        differs = first_change(agreed.text, text)
        return (None, differs) if differs else ((entry, constants), "")

    def _agreed(self, make: _Make, state: Any, batch: Any, why: str, because: str) -> _Made:
        """Capture and schedule on all ranks or on none; if one fails, the others raise its message."""
        what = f"zerofn.compile({self.__name__})"
        mine = agree_on(what, make, because and f"all ranks must capture it anew, because {because}")
        again = lambda: NumberedStep(captured(self._step, state, batch, traces=True)[0])  # noqa: E731  (with lines)
        differ = refuse_differences(what, mine.numbered, mine.program.mesh, again)
        prepare, first = functools.partial(self._prepared, mine), None
        if differ or mine.pipeline.chooses(mine.program, **self._options.search):
            order = functools.partial(mine.pipeline.orders, mine.program) if differ else None
            first = shared(what, mine.program, prepare, order)
        found = agree_on(what, lambda: self._scheduled(mine, first or Decisions(prepare()), why))
        agree_among_slices(what, mine.program)
        if mine.program.new_state is not None:
            compare_batches(self.__name__, batch, mesh_among(tree.leaves(state, is_leaf=is_sharded)))
        return found

    @uncollected()
    def _captured(self, state: Any, batch: Any) -> tuple[Captured, str]:
        """Return (the captured step, what must be the same on all ranks)."""
        began = time.perf_counter()
        pending().wait_for_all()  # perhaps of another state that nobody will use again
        with arithmetic(self._options.deterministic, tree.leaves(state, is_leaf=is_sharded)):
            program, constants = captured_with_outline(self._step, state, batch)
        program.name, program.broadcasts = self.__name__, self._options.broadcast_buffers
        program.schedule, numbered = self._options.schedule, NumberedStep(program, None if self._captures else state)
        program.timings["capture"] = time.perf_counter() - began
        if any(x.device.type == "cpu" and x.dim() for x in map(tensor_of, program.placeholders) if x is not None):
            keep_freed_memory()
        pipeline = passes.pipeline(self._donates(program), self._options.edits)
        inputs = agreed_inputs(program, self._options)
        return Captured(program, constants, numbered, inputs, pipeline, began), inputs

    @uncollected()
    def _prepared(self, captured: Captured) -> list[Choice]:
        """Run the passes that stand before any decision about memory, and return this rank's decisions."""
        captured.pipeline.prepare(captured.program, self._options.machine)
        return captured.pipeline.decide(captured.program, **self._options.search)

    def _donates(self, program: Program) -> bool:
        return self._options.donate and program.new_state is not None

    @uncollected()
    def _scheduled(self, captured: Captured, first: Decisions, why: str) -> tuple[_Made, str]:
        """Return (what was made, what must be the same on all ranks)."""
        program, donating = captured.program, self._donates(captured.program)
        captured.pipeline.finish(program, choices=first.choices, budget=self._options.memory, orders=first.orders)
        took = dict(program.timings)
        self.timings = {"capture": took.pop("capture"), "passes": took, "nodes": len(program.gm.graph.nodes)}
        self._log.report(program, captured.constants, time.perf_counter() - captured.began, donating, why)
        text = agreed_text(program, captured.inputs)
        entry = CapturedStep(program, donating, self._options.backend, text)
        orders = orders_of(program)
        entry.step = AgreedStep(captured.inputs, text, captured.numbered.told(), first._replace(orders=orders))
        return (entry, captured.constants), text

    def _run(self, call: StepCall, inputs: Inputs, batch: Any) -> list[Any]:
        entry = call.entry
        try:
            with (
                arithmetic(self._options.deterministic, call.state_leaves),
                meetings().lasting(entry.groups, f"the step {self.__name__}", entry.digest),
            ):
                if not isinstance(entry.runner, Executor):  # which settles before its first write
                    meetings().settle()
                return entry.runner.run(inputs.flat())
        except RanksOutOfStep:  # raised by every rank, and no state was written
            self._recover(entry)
            raise
        except RanksDiffer:  # raised by every rank, so they can all go on with the state as it was
            pending().wait_for_all()
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                with contextlib.suppress(Exception):  # the other ranks wait to hear of it
                    state = tree.unflatten(call.state_def, call.state_leaves)
                    explain(error, self._step, self.__name__, entry.program, state, batch)
            why = f"{self.__name__} failed: {said(error)}"
            if isinstance(error, Exception):
                self._recover(entry)
                abandon(why)
            if entry.donating and entry.wrote:
                for x in call.state_leaves:
                    if is_sharded(x):
                        x.donate(f"This state was lost when {why}. Load the last checkpoint.")
            raise

    def _recover(self, entry: CapturedStep) -> None:
        """Clean up the transfers and jobs that a failed step has left."""
        pending().forget()
        meetings().forget()
        worker().end()
        entry.buffers.renew()
        if entry.program.drive_space:  # its drive may have failed
            for captures in self._captures.values():
                captures.drop(entry)
            self._captures = {key: x for key, x in self._captures.items() if x.entries}
            entry.close()
