"""Functions that return no state, and gathered copies that were dropped."""

import pytest
import torch
from torch.func import functional_call

import zerofn
from tests.support.captured_steps import TX, rank, tiny_gpt2
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, captures_of, loss_of, state_of, train_step_of
from zerofn import tree


def evaluations(stage, precision):
    module = build(3)
    loss_fn = loss_of(module)
    of_state = zerofn.compile(lambda state, batch: loss_fn(zerofn.gather(state.params), batch))
    of_params = zerofn.compile(lambda params, batch: {"loss": loss_fn(zerofn.gather(params), batch)})
    of_pair = zerofn.compile(lambda pair, batch: loss_fn(zerofn.gather(pair[0]), batch) * pair[1])
    train = zerofn.compile(train_step_of(module))
    eager = train_step_of(module)
    state, other = (state_of(module, stage, precision=precision) for _ in range(2))
    for k in range(3):
        batch = batch_of(rank(), seed=k)
        expected = loss_fn(zerofn.gather(state.params), batch)
        state = tree.tree_map(lambda x: x, state) if k == 1 else state
        params = tree.tree_map(lambda x: x, state.params) if k == 2 else state.params
        assert params.full is None or k < 2
        for call, value in ((of_state, state), (of_params, params), (of_pair, (params, 2))):
            out = call(value, batch)
            out = out["loss"] if isinstance(out, dict) else out / (2 if call is of_pair else 1)
            assert_same_trees(out, expected, f"{stage=}, {precision=}, step {k}")
        state, ours = train(tree.tree_map(lambda x: x, state) if k else state, batch)
        other, theirs = eager(other, batch)
        assert_same_trees(ours, theirs, f"{stage=}, {precision=}, step {k}")
        assert (state.params.full is not None) == (stage in (1, 2))
        for shard, full, unit in zip(
            state.params.shards, state.params.full or [], state.params.layout.units, strict=stage in (1, 2)
        ):
            first = full[state.params.spec.bounds(unit)[0] :].data_ptr()
            assert (shard.data_ptr() == first) == (shard.dtype == full.dtype)
    assert_same_trees(state, other, f"{stage=}, {precision=}")
    return [len(captures_of(step)) for step in (of_state, of_params, of_pair, train)]


@pytest.mark.part(stage=[1], precision=["bf16"])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_evaluation_and_training_with_and_without_the_gathered_copy(ranks, stage, precision):
    assert ranks(2, evaluations, stage, precision) == [[1, 1, 1, 1]] * 2  # nothing is captured twice


def count_refills():
    """A copy that was dropped is gathered once, not at every evaluation."""
    module = build(3)
    evaluate = zerofn.compile(lambda state, batch: loss_of(module)(zerofn.gather(state.params), batch))
    state = tree.tree_map(lambda x: x, state_of(module, 2))
    shards = [p.clone() for p in state.params.shards]
    assert state.params.full is None
    evaluate(state, batch_of(rank()))
    full = state.params.full
    evaluate(state, batch_of(rank()))
    assert state.params.full is full
    assert_same_trees(list(state.params.shards), shards)


def test_a_dropped_copy_is_made_once(ranks):
    ranks(2, count_refills)


def test_generating_from_a_state():
    module = tiny_gpt2().eval()
    state = zerofn.shard(zerofn.TrainState.create(params=dict(module.named_parameters()), tx=TX))

    def next_token(params, ids):
        return functional_call(module, zerofn.gather(params), (), {"input_ids": ids}).logits[:, -1].argmax(-1, True)

    step, ids = zerofn.compile(next_token), torch.tensor([[1, 2, 3, 4]])
    for _ in range(3):
        ids = torch.cat([ids, step(state.params, ids)], 1)
    with torch.no_grad():
        expected = torch.tensor([[1, 2, 3, 4]])
        for _ in range(3):
            expected = torch.cat([expected, module(input_ids=expected).logits[:, -1].argmax(-1, True)], 1)
    assert torch.equal(ids, expected) and len(captures_of(step)) == 3
