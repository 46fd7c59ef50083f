"""Rules that look at whole leaves: torch's weights have outputs first, optax's last, so optax is given transposes."""

import jax
import numpy as np
import optax
import pytest
import torch

import zerofn
from tests.support import optim_trees as trees
from zerofn import optim

OPTAX = {
    "adaptive_grad_clip": (
        optim.chain(optim.adaptive_grad_clip(0.01), optim.sgd(0.1)),
        optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    ),
    "muon": (
        optim.muon(0.1, weight_decay=0.1, adam_learning_rate=0.01, adam_weight_decay=0.1),
        optax.contrib.muon(0.1, weight_decay=0.1, adam_learning_rate=0.01, adam_weight_decay=0.1),
    ),
    "muon, plain momentum": (
        optim.muon(0.1, (2.0, -1.5, 0.5), 3, 0.8, nesterov=False, adaptive=True, consistent_rms=0.2),
        optax.contrib.muon(0.1, (2.0, -1.5, 0.5), 3, 0.8, nesterov=False, adaptive=True, consistent_rms=0.2),
    ),
    "muon, coefficients of each step": (
        optim.muon(0.1, [(2.0, -1.5, 0.5), (3.0, -4.0, 2.0)], 2, adam_eps_root=1e-4),
        optax.contrib.muon(0.1, [(2.0, -1.5, 0.5), (3.0, -4.0, 2.0)], 2, adam_eps_root=1e-4),
    ),
}


@pytest.mark.part(name=["muon", "adafactor"])
@pytest.mark.parametrize("name", OPTAX)
def test_rules_are_those_of_optax_on_transposes(name):
    tx, other = OPTAX[name]
    with jax.enable_x64(True):
        values = {k: np.asarray(v).T for k, v in trees.params().items()}
        state = other.init(values)
        for step in range(trees.STEPS):
            g = {k: np.asarray(v).T for k, v in trees.grads(step).items()}
            updates, state = other.update(g, state, values)
            values = optax.apply_updates(values, updates)
        expected = {k: torch.from_numpy(np.array(v).T) for k, v in values.items()}
    trees.assert_close(trees.plain(tx).params, expected, tol=1e-9)


def with_torch(make, names, dtype=torch.float64):
    """Some of the leaves after torch's steps."""
    leaves = {k: torch.nn.Parameter(v) for k, v in trees.params(dtype).items() if k in names}
    optimizer = make(leaves.values())
    for step in range(trees.STEPS):
        for k, g in trees.grads(step, dtype).items():
            if k in leaves:
                leaves[k].grad = g
        optimizer.step()
    return {k: p.detach() for k, p in leaves.items()}


TORCH = {
    "rmsprop": (
        optim.rmsprop(0.01, 0.9, eps_in_sqrt=False, momentum=0.9),
        lambda leaves: torch.optim.RMSprop(leaves, lr=0.01, alpha=0.9, momentum=0.9),
    ),
    "rmsprop, centered": (
        optim.rmsprop(0.01, 0.99, eps_in_sqrt=False, centered=True),
        lambda leaves: torch.optim.RMSprop(leaves, lr=0.01, centered=True),
    ),
    "adagrad": (
        optim.adagrad(0.1, 0.1, eps=0.0),
        lambda leaves: torch.optim.Adagrad(leaves, lr=0.1, initial_accumulator_value=0.1, eps=0.0),
    ),
    "radam": (
        optim.radam(0.01, b2=0.9, eps=0.0),
        lambda leaves: torch.optim.RAdam(leaves, lr=0.01, betas=(0.9, 0.9), eps=0.0),
    ),
    "adafactor": (
        optim.adafactor(0.01, min_dim_size_to_factor=1),
        lambda leaves: torch.optim.Adafactor(leaves, lr=0.01),
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_rules_are_those_of_torch(name):
    tx, make = TORCH[name]
    names = {"h.0.w", "h.1.w", "h.1.b", "norm"}  # none with zeros among its gradients
    ours = trees.plain(tx).params
    trees.assert_close({k: ours[k] for k in names}, with_torch(make, names), tol=1e-12)


def test_muon_is_torchs_to_the_bfloat16_in_which_torch_iterates():
    names = {"h.0.w", "h.1.w"}
    make = lambda leaves: torch.optim.Muon(leaves, lr=0.1, weight_decay=0.1, nesterov=False)  # noqa: E731
    ours = trees.plain(optim.muon(0.1, weight_decay=0.1, nesterov=False)).params
    trees.assert_close({k: ours[k] for k in names}, with_torch(make, names), tol=5e-3)


def test_singular_values_come_near_one():
    x = torch.randn(13, 29, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tx = optim.scale_by_muon(nesterov=False)
    updates, _ = tx.update({"w": x}, tx.init({"w": x}))
    values = torch.linalg.svdvals(updates["w"])
    assert 0.6 < values.min() and values.max() < 1.3
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    assert torch.linalg.matrix_norm(updates["w"] - left @ right, 2) < 0.4


def test_units_are_clipped_by_hand():
    p = {"w": torch.tensor([[3.0, 4.0], [0.0, 0.0]]), "b": torch.tensor([3.0, 4.0])}
    g = {"w": torch.tensor([[6.0, 8.0], [0.3, 0.4]]), "b": torch.tensor([0.03, 0.04])}
    found, _ = optim.adaptive_grad_clip(0.1, eps=0.5).update(g, (), p)
    torch.testing.assert_close(found["w"], torch.tensor([[0.3, 0.4], [0.03, 0.04]]))
    assert torch.equal(found["b"], g["b"])


def test_dims_that_are_not_there_are_told():
    w = {"w": torch.ones(3, 2)}
    with pytest.raises(ValueError, match=r"axis=\(2,\) has a dim that leaf 'w' of shape \[3, 2\] does not have"):
        optim.adaptive_grad_clip(0.1, axis=2).update(w, (), w)
    with pytest.raises(ValueError, match=r"scale_by_muon: leaf 'b' has shape \[3\] and is not a matrix"):
        optim.scale_by_muon().init({"b": torch.ones(3)})


@pytest.mark.parametrize("params", [{}, {"b": torch.ones(3), "none": torch.ones(0, 4)}, {"s": torch.ones(())}])
def test_trees_without_matrices(params):
    for tx in (optim.muon(0.1), optim.adafactor(0.1), optim.chain(optim.adaptive_grad_clip(0.1), optim.sgd(0.1))):
        state = zerofn.TrainState.create(params=params, tx=tx)
        grads = zerofn.tree_map(torch.ones_like, params)
        after = state.apply_gradients(grads).params
        assert all(x.isfinite().all() and (x < 1).all() for x in after.values())
        if params:
            sharded = zerofn.shard(state, stage=3)
            trees.assert_equal(
                zerofn.gather(sharded.apply_gradients(zerofn.scatter(grads, like=sharded.params)).params), after
            )


@pytest.mark.parametrize("make", [optim.muon, optim.adafactor])
def test_states_of_shards_are_shards_of_states(make):
    start = zerofn.TrainState.create(params=trees.params(), tx=make(0.1))
    state = zerofn.shard(start, stage=3, unit=trees.unit_of)
    fresh = state.tx.init(state.params)
    assert zerofn.tree.structure(fresh) == zerofn.tree.structure(state.opt_state)
    pairs = zip(zerofn.tree.leaves(fresh), zerofn.tree.leaves(state.opt_state), strict=True)
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


def test_adafactor_keeps_rows_and_columns():
    params = {"w": torch.ones(70, 61), "b": torch.ones(5)}
    state = optim.scale_by_factored_rms(min_dim_size_to_factor=61).init(params)
    assert state.v.shape == (70 + 61 + 5 + 1,)
    assert optim.scale_by_factored_rms().init(params).v.numel() == 70 * 61 + 5 + 1
    assert optim.scale_by_factored_rms(factored=False).init(params).v["w"].shape == (70, 61)
