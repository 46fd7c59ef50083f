"""Backends: another one runs the same graph to the same bits, and is closed when nobody can use it any more."""

import gc

import pytest
import torch
from torch.fx import Interpreter

import zerofn
from tests.support.small_steps import batch_of, build, captures_of, state_of, train_step_of
from zerofn import Offload, optim, tree
from zerofn.lowering.backends import backend_of
from zerofn.runtime.backend import Backend, Eager, Runner
from zerofn.runtime.executor import Executor

MODULE = build(4)


class Interpreted:
    """Runs graphs through `torch.fx.Interpreter`, and counts what is asked of it."""

    def __init__(self):
        self.bound, self.runs, self.closed = [], 0, 0

    def bind(self, program):
        self.bound.append(program)
        return InterpretedRunner(self, program)


class InterpretedRunner:
    def __init__(self, backend, program):
        self.backend, self.interpreter = backend, Interpreter(program.gm)

    def run(self, inputs):
        self.backend.runs += 1
        with torch.no_grad():
            return self.interpreter.run(*inputs, enable_io_processing=False)

    def close(self):
        self.backend.closed += 1


class Failing(Interpreted):
    """Fails at its second run, before anything is written if `wrote` says so."""

    def __init__(self, wrote):
        super().__init__()
        self.wrote = wrote

    def bind(self, program):
        runner = super().bind(program)
        run = runner.run

        def failing(inputs):
            if self.runs == 1:
                raise RuntimeError("out of tape")
            return run(inputs)

        runner.run = failing
        if self.wrote is not None:
            runner.wrote = self.wrote
        return runner


def trained(backend, stage=3, num_microbatches=1, tx=None, **options):
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    state = state_of(MODULE, stage, tx, **options)
    step = zerofn.compile(train_step_of(MODULE, num_microbatches), backend=backend)
    losses = []
    for seed in range(3):
        state, aux = step(state, batch_of(rank, seed=seed))
        losses.append(aux["loss"])
    return [*losses, *tree.leaves(zerofn.unshard(state.params))]


def test_backends_are_what_the_protocol_says():
    assert isinstance(Eager(), Backend) and isinstance(Interpreted(), Backend)
    assert issubclass(InterpretedRunner, Runner) and issubclass(Executor, Runner)


@pytest.mark.part(stage=[3], num_microbatches=[2])
@pytest.mark.part(stage=[0, 1], num_microbatches=[1])
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_another_backend_has_the_same_bits(stage, num_microbatches):
    backend = Interpreted()
    ours, eager = (trained(b, stage, num_microbatches) for b in (backend, "eager"))
    assert all(map(torch.equal, ours, eager))
    assert len(backend.bound) == 1 and backend.runs == 3


def on_ranks(stage):
    ours, eager = (trained(b, stage) for b in (Interpreted(), "eager"))
    return [torch.equal(a, b) for a, b in zip(ours, eager, strict=True)]


def test_on_ranks(ranks):
    for found in ranks(2, on_ranks, 3):
        assert all(found), found


def test_with_a_state_on_drives(tmp_path):
    """Drive space and memory are allocated before a backend sees the graph."""
    tx = optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2))
    offload = Offload(optimizer="nvme", params="nvme", path=tmp_path)
    ours, eager = (trained(b, tx=tx, offload=offload) for b in (Interpreted(), "eager"))
    assert all(map(torch.equal, ours, eager))


def test_a_runner_for_each_signature_bound_when_it_first_runs_and_closed_with_the_step():
    backend = Interpreted()
    step = zerofn.compile(train_step_of(MODULE), backend=backend)
    step.lower(state_of(MODULE, 3), batch_of())
    assert not backend.bound
    for rows in (2, 3, 2):
        step(state_of(MODULE, 3), batch_of(rows=rows))
    assert len(backend.bound) == 2 and backend.runs == 3 and backend.closed == 0
    del step
    gc.collect()
    assert backend.closed == 2


@pytest.mark.parametrize(("wrote", "lost"), [(None, True), (True, True), (False, False)])
def test_a_run_that_fails_takes_the_state_with_it_unless_it_wrote_nothing(wrote, lost):
    step = zerofn.compile(train_step_of(MODULE), backend=Failing(wrote))
    state, _ = step(state_of(MODULE, 3), batch_of())
    with pytest.raises(RuntimeError, match="out of tape"):
        step(state, batch_of())
    if lost:
        with pytest.raises(RuntimeError, match="This state was lost"):
            zerofn.unshard(state.params)
    else:
        zerofn.unshard(state.params)


def test_a_capture_that_is_replaced_after_a_drive_failed_is_closed(tmp_path):
    tx = optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2))
    state = state_of(MODULE, 3, tx, offload=Offload(optimizer="nvme", params="nvme", path=tmp_path))
    backend = Failing(None)
    step = zerofn.compile(train_step_of(MODULE), backend=backend)
    state, _ = step(state, batch_of())
    with pytest.raises(RuntimeError, match="out of tape"):
        step(state, batch_of())
    assert backend.closed == 1 and not captures_of(step)


def test_a_bind_that_fails_is_tried_again():
    class Late(Interpreted):
        def bind(self, program):
            if not self.bound:
                self.bound.append(program)
                raise RuntimeError("not ready")
            return super().bind(program)

    backend = Late()
    step, state = zerofn.compile(train_step_of(MODULE), backend=backend), state_of(MODULE, 3)
    with pytest.raises(RuntimeError, match="not ready"):
        step(state, batch_of())
    step(state, batch_of())
    assert backend.runs == 1 and len(captures_of(step)) == 1


def test_backends_that_are_refused():
    with pytest.raises(ValueError, match="backend='fast' is not known; write 'eager', .*, or pass a Backend"):
        zerofn.compile(train_step_of(MODULE), backend="fast")
    with pytest.raises(ValueError, match="Did you mean 'graphs'"):
        backend_of("Graph")
    for wrong in (3, Interpreted, None):
        with pytest.raises(TypeError, match=r"is not a backend; write 'eager', .* with bind\(program\)"):
            backend_of(wrong)


def test_operations_are_timed_on_the_eager_backend_alone():
    step = zerofn.compile(train_step_of(MODULE), backend=Interpreted())
    with pytest.raises(ValueError, match=r"profile\(\) times every operation .* runs on Interpreted"):
        step.profile(state_of(MODULE, 3), batch_of())
