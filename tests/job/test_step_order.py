"""Ranks that are out of step: every rank raises what each of them does, soon, and no state is written."""

import time

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, loss_of, state_of, step_with, train_step_of
from zerofn import optim
from zerofn.job import agreement
from zerofn.job.step_order import Meetings, meetings
from zerofn.util.process import instead, the

MODULE = build(2)
SECONDS = 10.0  # what is promised


def evaluate(state, batch):
    return {"loss": loss_of(MODULE)(zerofn.gather(state.params), batch)}


def _captured(step):
    run = zerofn.compile(step)
    return lambda state, batch: run(state, batch)


# What a rank may do instead of a step, and how the others name it.
OTHERS = {
    "evaluation": (lambda state, folder, evaluate: evaluate(state, batch_of()), "the step evaluate"),
    "gather": (lambda state, folder, evaluate: zerofn.gather(state.params), "all_gather of "),
    "unshard": (lambda state, folder, evaluate: zerofn.unshard(state), "agree on zerofn.unshard"),
    "save": (lambda state, folder, evaluate: zerofn.save(folder, state), "agree on "),
    "eager step": (lambda state, folder, evaluate: train_step_of(MODULE)(state, batch_of()), ""),
}


def shards(state):
    return zerofn.tree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)


def out_of_step(other, stage, size, folder):
    """All ranks train and evaluate; then the last one leaves the loop early."""
    agreement.PATIENCE = 60.0
    step, validate = zerofn.compile(train_step_of(MODULE), donate=stage != 1), _captured(evaluate)
    state = state_of(MODULE, stage, optim.adamw(1e-2))
    for k in range(2):
        state, _ = step(state, batch_of(dist.get_rank(), seed=k))
        validate(state, batch_of())
    before, began = shards(state), time.monotonic()
    try:
        if dist.get_rank() == size - 1:
            OTHERS[other][0](state, folder, validate)
        else:
            step(state, batch_of(dist.get_rank(), seed=9))
    except RuntimeError as error:
        assert time.monotonic() - began < SECONDS
        assert_same_trees(shards(state), before)
        return str(error)
    return "nothing was raised"


@pytest.mark.part(size=[2], stage=[3], other=["save", "evaluation"])
@pytest.mark.part(size=[3], stage=[1])
@pytest.mark.parametrize(
    ("size", "stage", "other"),
    [(2, 3, other) for other in OTHERS]
    + [(3, 3, "evaluation"), (3, 3, "save"), (4, 3, "gather"), (2, 0, "save"), (3, 1, "eager step"), (4, 2, "save")],
)
def test_a_rank_that_leaves_the_loop_early(ranks, tmp_path, size, stage, other):
    for told in ranks(size, out_of_step, other, stage, size, tmp_path, timeout=20):
        assert "ranks are out of step" in told and "zerofn.even(loader)" in told, told
        assert "the step train_step" in told and OTHERS[other][1] in told, told
    ranks.stop()


def other_signature():
    """Both signatures are captured; then ranks take different ones."""
    step, state = zerofn.compile(train_step_of(MODULE)), state_of(MODULE, 3)
    for dtype in (torch.float32, torch.float64):
        state, _ = step(state, batch_of(dist.get_rank(), dtype=dtype))
    with pytest.raises(RuntimeError) as caught:
        step(state, batch_of(dist.get_rank(), dtype=torch.float64 if dist.get_rank() else torch.float32))
    return str(caught.value)


def test_ranks_that_take_different_captures_of_a_step(ranks):
    for told in ranks(2, other_signature, timeout=20):
        assert "ranks are out of step" in told and "for another signature" in told
    ranks.stop()


def other_entries(needed):
    """The first steps are of one batch; then one rank's has another entry, or lacks one, which the step may need."""

    def loss(params, batch):
        y = batch["m"] if needed else batch.get("m", 1.0)
        return (params["w"] * batch["x"] * y).sum()

    train = step_with(loss)

    step = zerofn.compile(train)
    state = zerofn.shard(zerofn.TrainState.create(params={"w": torch.ones(8)}, tx=optim.sgd(0.1)))
    whole = {"x": torch.ones(8), "m": torch.full((8,), 1.0 + dist.get_rank())}
    for _ in range(2):
        state, _ = step(state, whole)
    with pytest.raises((RuntimeError, KeyError)) as caught:
        step(state, {"x": whole["x"]} if dist.get_rank() else whole)
    return str(caught.value)


@pytest.mark.part(needed=[True])
@pytest.mark.parametrize("needed", [False, True])
def test_an_entry_that_one_batch_lacks_is_named_in_later_steps_too(ranks, needed):
    for told in ranks(2, other_entries, needed, timeout=40):
        assert "'m'" in told or "batch.m" in told, told
    ranks.stop()


def collectives():
    """Outside a step, by name and shape."""
    x, rank = torch.ones(6), dist.get_rank()
    assert zerofn.collectives.all_gather(x).numel() == 12
    with pytest.raises(RuntimeError) as caught:
        if rank:
            zerofn.collectives.all_to_all(x.view(2, 3))
        else:
            zerofn.collectives.all_gather(x[:4])
    return str(caught.value)


def test_two_collectives_that_do_not_match(ranks):
    for told in ranks(2, collectives, timeout=20):
        assert "'all_gather'" in told and "'all_to_all'" in told and "out of step" in told
    ranks.stop()


def other_shapes():
    with pytest.raises(RuntimeError, match="'all_gather', for another signature"):
        zerofn.collectives.all_gather(torch.ones(4 + dist.get_rank()))


def test_a_collective_on_other_shapes(ranks):
    ranks(2, other_shapes, timeout=20)
    ranks.stop()


def in_step():
    """A loop of everything, in step, leaves nothing under way."""
    step, validate = zerofn.compile(train_step_of(MODULE)), zerofn.compile(evaluate)
    state = state_of(MODULE, 3)
    for k in range(3):
        state, _ = step(state, batch_of(dist.get_rank(), seed=k))
        validate(state, batch_of())
        zerofn.gather(state.params)
        agreement.agree("a round", "text")
    return len(the(Meetings)._open)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_in_step_meet_and_go_on(ranks, size):
    assert ranks(size, in_step) == [0] * size


def test_one_process_meets_nobody():
    with instead(Meetings()), meetings().lasting([], "a step", b""):
        meetings().settle()
        meetings().begin_round("x")
        meetings().end_round()
