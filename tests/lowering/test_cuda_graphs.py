"""Steps that are recorded and replayed: the host's half of CUDA graphs, with a stand-in for the device's."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.capture import test_loop
from tests.support.replayed import record, replayed
from tests.support.same import assert_same_trees
from tests.support.small_steps import captures_of
from zerofn import optim
from zerofn.lowering import cuda_graphs, segments
from zerofn.lowering.cuda_graphs import MOST, Graphs
from zerofn.memory.arena import Arenas
from zerofn.runtime.backend import Eager
from zerofn.util.process import the

STEPS = 6


def recorded(inner=None):
    return Graphs(inner or Eager(), record, "cpu")


class Model(nn.Module):
    def __init__(self, dropout=0.0, of_batch=True):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(12) if of_batch else nn.LayerNorm(12), nn.Dropout(dropout)

    def forward(self, x):
        x = x.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return self.norm(x)


def schedule(step):
    return 0.1 / (1 + step)


TX = {
    "sgd": lambda: optim.sgd(0.1, momentum=0.9),
    "clipped adamw": lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, weight_decay=0.1)),
    "scheduled": lambda: optim.adamw(schedule),
}


def started(tx="clipped adamw", dropout=0.0, n=1, on_nonfinite="skip", stage=3, backend="eager", **options):
    """(state, step)"""
    model = Model(dropout, options.get("precision") is None)
    plain = zerofn.TrainState.create(
        params={k: p.detach().clone() for k, p in model.named_parameters()},
        tx=TX[tx](),
        extra={k: x.clone() for k, x in model.named_buffers()},
        seed=3,
    )
    state = zerofn.shard(plain, stage=stage, **options)

    def train_step(state, batch):
        def loss_fn(params, rows):
            buffers = {k: x.clone() for k, x in state.extra.items()}
            y = functional_call(model, {**params, **buffers}, (rows["x"],))
            return (y.float() - rows["y"]).square().mean() * rows["weight"].mean(), buffers

        vg = state.value_and_grad(loss_fn, has_aux=True)
        (loss, buffers), grads = (vg if n == 1 else zerofn.accumulate(vg, n))(batch)
        buffers = buffers if n == 1 else {k: x[-1] for k, x in buffers.items()}
        return state.apply_gradients(grads, extra=buffers, on_nonfinite=on_nonfinite), {
            "loss": loss.nan_to_num(),
            "rate": schedule(state.step),
            "step": state.step,
            "skipped": state.skipped,
        }

    return state, zerofn.compile(train_step, backend=backend)


def batch_of(k, nan=False):
    draws = torch.Generator().manual_seed(k)
    rows = {name: torch.randn(8, 12, generator=draws) for name in "xy"}
    return {**rows, "weight": torch.full((8,), float("nan") if nan else 1.0)}


def trained(state, step, steps=STEPS, nan_at=()):
    found = []
    for k in range(steps):
        state, aux = step(state, batch_of(k, k in nan_at))
        found.append(aux)
    return state, found


def runner_of(step):
    (entry,) = captures_of(step)
    return entry.runner


CASES = {
    **{f"{tx}": {"tx": tx} for tx in TX},
    "dropout": {"dropout": 0.3},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "ignore": {"on_nonfinite": "ignore"},
    "microbatches": {"n": 2},
}


@pytest.mark.part(case=["fp16", "dropout", "microbatches", "clipped adamw"])
@pytest.mark.parametrize("case", CASES)
def test_replays_have_the_bits_of_the_step(case):
    state, found = trained(*started(**CASES[case]), nan_at=(4,) if case == "clipped adamw" else ())
    mine, step = started(**CASES[case], backend=recorded())
    mine, ours = trained(mine, step, nan_at=(4,) if case == "clipped adamw" else ())
    runner = runner_of(step)
    assert runner._segments and runner._recordings == 1, runner._why
    assert len(runner._segments) == 1 or case == "microbatches"  # whose counter is the host's here
    assert_same_trees(ours, found)
    assert_same_trees(zerofn.unshard(mine), zerofn.unshard(state))


def same(ours, theirs):
    """Whether two runs are equal, bit for bit."""
    try:
        assert_same_trees(ours, theirs)
    except AssertionError:
        return False
    return True


def forgets(patch, what):
    """Leave out one of the things that a replay needs."""
    recording = cuda_graphs._Recording
    if what == "seeds":
        patch.setattr(cuda_graphs.Draws, "seed", lambda self: None)
    elif what == "copies of inputs":
        patch.setattr(recording, "replay", lambda self, inputs: self._again() or self._out)
    elif what == "addresses":
        patch.setattr(cuda_graphs.Replayed, "_holds", lambda self, inputs: self._arenas is not None)
        patch.setattr(recording, "holds", lambda self, inputs: True)
    elif what == "clones of results":
        kept, forget = [], cuda_graphs.Replayed._forget  # results lie in memory that is somebody's, wrong as they are

        def keeping(self):
            kept.append([x.recording for x in self._segments])
            forget(self)

        patch.setattr(segments._Cutter, "_leaves", lambda self, node: False)
        patch.setattr(cuda_graphs.Replayed, "_forget", keeping)
    elif what == "scalars":
        patch.setattr(segments, "_is_scalar_of_host", lambda node: False)


@pytest.mark.part(what=["", "seeds", "copies of inputs", "addresses"])
@pytest.mark.parametrize("what", ["", "seeds", "copies of inputs", "addresses", "clones of results", "scalars"])
def test_what_a_replay_needs_is_missed_where_it_is_left_out(monkeypatch, what):
    """Two states, one after the other and the first again, with a schedule and dropout."""

    def turns(backend):
        (a, step), (b, _) = (started("scheduled", 0.3, backend=backend) for _ in range(2))
        a, first = trained(a, step)
        b, second = trained(b, step, 3)
        return [*first, *second, *trained(a, step, 3)[1]], step

    expected, _ = turns("eager")
    with monkeypatch.context() as patch:
        forgets(patch, what)
        found, step = turns(recorded())
    assert same(found, expected) == (not what)
    assert what or runner_of(step)._recordings == 3


def test_another_state_is_recorded_again_up_to_a_limit(caplog):
    caplog.set_level("INFO", "zerofn")
    state, step = started(backend=recorded())
    _, expected = started()
    for k in range(2 * MOST):
        other, _ = started()
        plain, _ = started()
        other, ours = step(other, batch_of(k))
        _, theirs = expected(plain, batch_of(k))
        assert_same_trees(ours, theirs)
    runner = runner_of(step)
    assert not runner._segments and f"was recorded {MOST} times" in caplog.text


def test_static_buffers_that_grow_are_recorded_again():
    state, step = started(backend=recorded())
    state, _ = trained(state, step, 4)
    assert runner_of(step)._recordings == 1
    for arena in list(the(Arenas).shared.values()):
        arena.renew()
    plain, expected = trained(*started(), 6)
    for k in (4, 5):
        state, aux = step(state, batch_of(k))
        assert_same_trees(aux, expected[k])
    assert_same_trees(zerofn.unshard(state), zerofn.unshard(plain))


def refused(make, inputs):
    step = zerofn.compile(make, backend=recorded())
    state = {"w": torch.ones(4)}
    for _ in range(3):
        state, _ = step(state, inputs)
    return runner_of(step)._why


def test_what_cannot_be_recorded_runs_as_without(caplog):
    caplog.set_level("INFO", "zerofn")

    def asks(state, x):
        return {"w": state["w"] * 2}, torch.nonzero(x).sum()

    def of_host(state, x):
        return {"w": (state["w"].bfloat16() * x["scale"]).float()}, x["scale"]

    assert "asks the device for a value" in refused(asks, torch.ones(4))
    assert "computes 16-bit values with a number from the host" in refused(of_host, {"scale": torch.tensor(0.3)})
    assert "CUDA graph" in caplog.text


def test_a_recording_that_fails_loses_nothing(caplog):
    def fails(*args):
        raise RuntimeError("operation not permitted when stream is capturing")

    state, step = started(backend=Graphs(Eager(), fails, "cpu"))
    state, found = trained(state, step)
    assert_same_trees(found, trained(*started())[1])
    assert "not permitted when stream is capturing" in runner_of(step)._why


def test_on_the_host_there_is_no_graph(caplog):
    state, step = started(backend="graphs")
    assert_same_trees(trained(state, step)[1], trained(*started())[1])
    assert "must all lie on one cuda device" in runner_of(step)._why


def test_a_counter_that_a_loop_writes_to():
    """It is cloned on the host, and counted in each microbatch."""
    with replayed():
        test_loop.test_batch_norms_running_values_go_from_microbatch_to_microbatch()
