"""Per-example gradients of sharded parameters: `vmap(grad(loss(gather(params))))`, captured and eager."""

import pytest
import torch.distributed as dist
from torch.func import functional_call, grad, vmap

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, state_of
from zerofn import optim, tree
from zerofn.capture.capture import CaptureError

MODULE = build(2)


def per_example(state, batch):
    def one(params, x, y):
        return (functional_call(MODULE, zerofn.gather(params), (x[None],)) - y).square().mean()

    return vmap(grad(one), in_dims=(None, 0, 0))(state.params, batch["x"], batch["y"])


def of_means(state, batch):
    grads = tree.tree_map(lambda g: g.mean(0), per_example(state, batch))
    return state.apply_gradients(grads), zerofn.global_norm(grads)


def of_largest(state, batch):
    grads = tree.tree_map(lambda g: g.amax(0) + g.sum(0), per_example(state, batch))
    return state.apply_gradients(grads), zerofn.global_norm(grads)


def of_halves(state, batch):
    """A view of a shard that is no batch."""
    grads = tree.tree_map(lambda g: g.mean(0).view(2, -1).flip(0).reshape(-1), per_example(state, batch))
    return state.apply_gradients(grads), 0


def of_places(state, batch):
    """A sum over a shard's own elements."""
    return state, sum(g.sum(1).sum() for g in per_example(state, batch).shards)


def both(step, stage):
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = []
    for run in (zerofn.compile(step), step):
        state, norm = run(state_of(MODULE, stage, optim.sgd(0.1)), batch_of(rank))
        found.append((zerofn.unshard(state.params), norm))
    return found


@pytest.mark.part(size=[2], stage=[3])
@pytest.mark.parametrize("step", [of_means, of_largest])
@pytest.mark.parametrize(("size", "stage"), [(1, 0), (1, 3), (2, 1), (2, 3), (3, 2), (3, 3)])
def test_captured_is_eager(ranks, size, stage, step):
    for captured, eager in ranks(size, both, step, stage):
        assert_same_trees(captured, eager)


@pytest.mark.parametrize("step", [of_halves, of_places])
def test_what_mixes_a_shards_elements_is_still_refused(step):
    with pytest.raises(CaptureError, match="is applied to this rank's shard"):
        zerofn.compile(step)(state_of(MODULE, 3, optim.sgd(0.1)), batch_of())


def penalized(state, batch):
    def loss(params):
        out = functional_call(MODULE, zerofn.gather(params), (batch["x"],))
        return (out - batch["y"]).square().mean() + 0.1 * zerofn.global_norm(params)

    grads = grad(loss)(state.params)
    return state.apply_gradients(grads), zerofn.global_norm(grads)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_penalty_on_the_norm_of_the_parameters(ranks, stage):
    for captured, eager in ranks(2, both, penalized, stage):
        assert_same_trees(captured, eager)
