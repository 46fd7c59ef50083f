"""What is predicted to be alive, beside what torch's allocator says was allocated."""

import pytest
import torch
from torch.func import functional_call
from torch.profiler import ProfilerActivity, profile

import zerofn
from tests.support import tiny_models
from tests.support.small_steps import ROWS, WIDTH, batch_of, build, captured, fake_ranks, state_of, train_step_of
from zerofn import Offload, Precision, optim
from zerofn.graph.liveness import KINDS, blocks, moments
from zerofn.graph.resident import resident

NORMED = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
NAMES = ("gpt2", "llama", "t5", "mixtral", "whisper")


def measured(step, state, batch):
    """The most bytes that a step has beside what was there before, by the events of the host's allocator; but for what
    an operation takes and gives back while it runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        state, aux = step(state, batch)
    events = sorted(prof.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    live = most = end = 0
    for event in events:
        if event.start_ns() > end:  # no operation is running
            most = max(most, live)
        if event.name() == "[memory]":
            live += event.nbytes()
        else:
            end = max(end, event.start_ns() + event.duration_ns())
        if event.start_ns() > end:
            most = max(most, live)
    return most


def compare(make_state, train_step, batch, **options):
    """(predicted, measured) peak of a step beyond what is there before; the first runs warm up."""
    state, step = make_state(), zerofn.compile(train_step, **options)
    for _ in range(2):
        state, _ = step(state, batch)
    plan = step.lower(state, batch)
    there = sum(resident(plan.program).device.values())
    return plan.memory().total - there, measured(step, state, batch)


def hf(name, stage, **options):
    torch.manual_seed(0)
    model, inputs = tiny_models.BUILDERS[name](), tiny_models.batch(name)

    def loss_fn(params, batch):
        return functional_call(model, params, (), batch).logits.float().square().mean()

    def train_step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), {"loss": loss}

    def make_state():
        params = dict(model.named_parameters())
        return zerofn.shard(zerofn.TrainState.create(params=params, tx=NORMED), stage=stage, **options)

    return compare(make_state, train_step, inputs)


@pytest.mark.part(name=["t5"])
@pytest.mark.parametrize("name", NAMES)
def test_models_at_one_rank(name):
    predicted, found = hf(name, 3)
    assert predicted == found


@pytest.mark.part(size=[2], stage=[3])
@pytest.mark.parametrize(("size", "stage"), [(2, 0), (2, 1), (2, 3), (3, 2), (3, 3)])
def test_models_at_several_ranks(ranks, size, stage):
    for name in ("gpt2", "t5")[: 4 - size]:
        for predicted, found in ranks(size, hf, name, stage):
            assert predicted == pytest.approx(found, rel=0.01)


def small(stage, num_microbatches, precision, num_layers=6):
    module = build(num_layers, dropout=0.1)
    return compare(
        lambda: state_of(module, stage, NORMED, precision=precision),
        train_step_of(module, num_microbatches),
        batch_of(rows=64),
    )


@pytest.mark.part(precision=["fp16"], stage=[3])
@pytest.mark.part(precision=["bf16"], stage=[2])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("num_microbatches", "precision"), [(1, "bf16"), (4, None), (4, "fp16")])
def test_precisions_and_loops(ranks, num_microbatches, precision, stage):
    for predicted, found in ranks(2, small, stage, num_microbatches, precision):
        assert predicted == pytest.approx(found, rel=0.01)


@pytest.mark.part(size=[2], stage=[1])
@pytest.mark.parametrize(("size", "stage"), [(2, 0), (2, 1), (3, 3)])
def test_what_is_encoded_and_received(ranks, size, stage):
    for predicted, found in ranks(size, small, stage, 1, Precision(wire="bf16"), 12):
        assert predicted == pytest.approx(found, rel=0.001)


@pytest.mark.whole  # test_precisions_and_loops compares what is measured
def test_of_gradients_that_wait_a_rank_holds_its_piece(ranks):
    for predicted, found in ranks(3, small, 3, 1, None, 24):
        assert predicted == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize("tiers", [{"optimizer": "nvme"}, {"optimizer": "nvme", "params": "nvme"}])
def test_what_goes_through_an_arena_is_there_all_the_time(tmp_path, tiers):
    """An arena is memory of its own, of which the allocator knows nothing."""
    module = build(6)
    predicted, found = compare(
        lambda: state_of(module, 3, NORMED, offload=Offload(**tiers, path=tmp_path)),
        train_step_of(module),
        batch_of(rows=64),
    )
    assert predicted == pytest.approx(found, rel=0.01)


def test_kinds_are_what_they_are_called():
    module = build(6)
    with fake_ranks(2):
        program = captured(train_step_of(module), state_of(module, 3), batch_of())
        zerofn.passes.run(program, donating=True)
    found = {kind: [b for b in blocks(program.gm.graph) if b.kind == kind] for kind in KINDS}
    units = state_sizes(module)
    assert {b.nbytes for b in found["gathered"]} == units
    assert len(found["gathered"]) == 6 + 2  # two units are gathered twice
    assert units <= {b.nbytes for b in found["gradients"]}
    assert {b.nbytes for b in found["activations"]} >= {ROWS * WIDTH * 4}


def state_sizes(module):
    """Bytes of the units, in full."""
    with fake_ranks(2):
        return {unit.size * 4 for unit in state_of(module, 3).params.layout.units}


def test_a_moment_has_what_is_born_and_has_not_died_beside_what_is_always_there():
    module = build(4)
    program = captured(train_step_of(module), state_of(module, 3), batch_of())
    zerofn.passes.run(program, donating=True)
    made = blocks(program.gm.graph)
    for k, moment in enumerate(moments(program.gm, {"state": 100})):
        alive = {kind: sum(x.nbytes for x in made if x.kind == kind and x.born <= k <= x.dies) for kind in KINDS}
        assert moment.live == {**alive, "state": 100, "reserved": 0}
