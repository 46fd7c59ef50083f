import pytest
import torch

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, fake_ranks, loss_of, state_of
from zerofn import random, tree

MODULE = build(3)
PLAIN = {k: v.detach() for k, v in MODULE.named_parameters()}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shards_are_parts_of_one_draw(stage, world):
    """Ranks' shards, laid side by side, are the plain tree's noise."""
    expected = zerofn.normal_like(PLAIN, random.key(5))
    found = {name: torch.full_like(x, float("nan")).flatten() for name, x in PLAIN.items()}
    for rank in range(world):
        with fake_ranks(world, rank):
            noise = zerofn.normal_like(state_of(MODULE, stage).params, random.key(5))
        for unit, shard in zip(noise.layout.units, noise.shards, strict=True):
            start, stop = noise.spec.bounds(unit)
            for leaf, a, b in unit.intervals(start, stop):
                first = start + a - leaf.offset
                found[leaf.name][first : first + b - a] = shard[a:b]
    assert_same_trees({k: v.view(PLAIN[k].shape) for k, v in found.items()}, expected)


def langevin(state, batch):
    loss, grads = state.value_and_grad(loss_of(MODULE))(batch)
    noise = zerofn.normal_like(grads, random.fold_in(state.rng_at(), 1))
    return state.apply_gradients(tree.tree_map(lambda g, n: g + 0.1 * n, grads, noise)), loss


def three_steps(stage):
    state, eager = state_of(MODULE, stage), state_of(MODULE, stage)
    run = zerofn.compile(langevin)
    for seed in range(3):
        state, _ = run(state, batch_of(0, seed=seed))  # the same batch everywhere, so that all worlds agree
        eager, _ = langevin(eager, batch_of(0, seed=seed))
    assert_same_trees(zerofn.unshard(state), zerofn.unshard(eager))
    return zerofn.unshard(state.params)


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_langevin_dynamics_do_not_depend_on_ranks_and_stages(ranks, size):
    plain = zerofn.TrainState.create(params=PLAIN, tx=zerofn.optim.adamw(1e-2, weight_decay=0.1))
    for seed in range(3):
        plain, _ = langevin(plain, batch_of(0, seed=seed))
    for stage in (0, 3):
        for params in ranks(size, three_steps, stage):
            assert_same_trees(params, plain.params)


def test_draws_on_a_shard_are_still_refused():
    def step(state, batch):
        loss, grads = state.value_and_grad(loss_of(MODULE))(batch)
        with random.randomness(state.rng_at()):
            grads = tree.tree_map(lambda g: g + torch.randn_like(g), grads)
        return state.apply_gradients(grads), loss

    with fake_ranks(2), pytest.raises(zerofn.CaptureError, match=r"zerofn.normal_like\(tree, key\)"):
        zerofn.compile(step).lower(state_of(MODULE, 3), batch_of())


def test_integers_and_other_keys_are_refused():
    with pytest.raises(TypeError, match="normal_like: expected floating-point tensors, got torch.int64"):
        zerofn.normal_like({"n": torch.tensor(1)}, random.key(0))
    with pytest.raises(TypeError, match="normal_like: the key must be an int64 scalar"):
        zerofn.normal_like(PLAIN, 3)
