"""`masked` and `multi_transform`: each leaf its own rule, on plain trees and on shards that hold several."""

import optax
import pytest
import torch

import zerofn
from tests.support import optim_trees as trees
from zerofn import optim


def label(leaf):
    """Three labels, mixed in either unit."""
    return "bias" if leaf.name.endswith(".b") else "norm" if leaf.name == "norm" else "body"


def tree_labels(tree):
    return {k: label(optim.LeafInfo(k, v.shape, None)) for k, v in tree.items()}


def is_bias(leaf):
    return label(leaf) == "bias"


def in_first_unit(leaf):
    return leaf.name.startswith("h.0")


WARM = optim.linear_schedule(0.0, 0.1, 3)
TX = {
    "multi": optim.multi_transform(
        {"body": optim.adamw(1e-2, weight_decay=0.1), "bias": optim.sgd(0.1, 0.9), "norm": optim.set_to_zero()}, label
    ),
    "rates": optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.multi_transform({"body": optim.adamw(1e-2), "bias": optim.adamw(WARM), "norm": optim.adamw(0.0)}, label),
    ),
    "inner chains": optim.multi_transform(
        {
            "body": optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1, mask=in_first_unit, weight_decay=0.1)),
            "bias": optim.lamb(0.1),
            "norm": optim.chain(optim.trace(0.9), optim.scale(-0.1)),
        },
        label,
    ),
    "masked": optim.chain(optim.masked(optim.trace(0.9), is_bias), optim.scale(-0.1)),
    "masked last": optim.chain(optim.scale(-0.1), optim.masked(optim.adamw(0.01), is_bias)),
    "masked units": optim.chain(optim.masked(optim.scale_by_adam(), in_first_unit), optim.sgd(0.1)),
    "nested": optim.multi_transform(
        {
            True: optim.multi_transform({True: optim.sgd(0.1, 0.9), False: optim.lion(0.01)}, is_bias),
            False: optim.masked(optim.set_to_zero(), lambda leaf: True),
        },
        in_first_unit,
    ),
}


def test_learning_rates_per_group_are_torchs_bit_for_bit():
    tx = optim.multi_transform(
        {
            "body": optim.adamw(1e-2, weight_decay=0.1),
            "bias": optim.adamw(3e-2, weight_decay=0.0),
            "norm": optim.adamw(1e-3, weight_decay=0.2),
        },
        label,
    )
    leaves = {k: torch.nn.Parameter(v) for k, v in trees.params(torch.float32).items()}
    groups = {"body": (1e-2, 0.1), "bias": (3e-2, 0.0), "norm": (1e-3, 0.2)}
    labels = tree_labels(leaves)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for k, p in leaves.items() if labels[k] == name], "lr": lr, "weight_decay": decay}
            for name, (lr, decay) in groups.items()
        ],
        fused=True,
    )
    for step in range(trees.STEPS):
        for k, g in trees.grads(step, torch.float32).items():
            leaves[k].grad = g
        optimizer.step()
    expected = {k: p.detach() for k, p in leaves.items()}
    trees.assert_equal(trees.plain(tx, torch.float32).params, expected)
    for stage in (0, 3):
        state = trees.sharded(tx, stage, torch.float32)
        trees.assert_equal(zerofn.unshard(state.params), expected, stage)
    assert state.learning_rate == {"body": 1e-2, "bias": 3e-2, "norm": 1e-3}


def scale_of(leaf):
    return {"body": 1.0, "bias": 3.0, "norm": 0.1}[label(leaf)]


@pytest.mark.parametrize("make", [optim.adamw, optim.adam, optim.lion, lambda r, **k: optim.sgd(r, 0.9, **k)])
@pytest.mark.parametrize("rate", [0.01, WARM])
def test_scaled_learning_rates_are_those_of_groups(make, rate):
    def grouped(scale):
        return make(optim.Schedule("scaled", (scale,), lambda n: scale * rate(n)) if callable(rate) else scale * rate)

    groups = {"body": grouped(1.0), "bias": grouped(3.0), "norm": grouped(0.1)}
    tx, expected = make(rate, lr_scale=scale_of), trees.plain(optim.multi_transform(groups, label)).params
    trees.assert_close(trees.plain(tx).params, expected)
    trees.assert_close(trees.by_updates(tx), expected)
    trees.assert_close(zerofn.unshard(trees.sharded(tx, 3).params), expected)
    trees.assert_close(zerofn.unshard(trees.sharded(tx, 3, updates=True).params), expected)


OTHERS = {
    "multi": optax.multi_transform(
        {"body": optax.adamw(1e-2, weight_decay=0.1), "bias": optax.sgd(0.1, 0.9), "norm": optax.set_to_zero()},
        tree_labels,
    ),
    "masked": optax.chain(
        optax.masked(optax.trace(0.9), lambda tree: {k: v == "bias" for k, v in tree_labels(tree).items()}),
        optax.scale(-0.1),
    ),
    "masked last": optax.chain(
        optax.scale(-0.1),
        optax.masked(
            optax.adamw(0.01, weight_decay=1e-4), lambda tree: {k: v == "bias" for k, v in tree_labels(tree).items()}
        ),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_masked_transformations_are_those_of_optax(name):
    trees.assert_close(trees.plain(TX[name]).params, trees.by_optax(OTHERS[name]), tol=1e-9)


@pytest.mark.parametrize("name", TX)
def test_update_agrees_with_apply(name):
    trees.assert_close(trees.plain(TX[name]).params, trees.by_updates(TX[name]))


def _at_ranks():
    for k, (name, tx) in enumerate(TX.items()):
        full = trees.plain(tx)
        first = None
        for stage in (k % 2, 3):
            state = trees.sharded(tx, stage)
            ours = zerofn.unshard(state.params)
            trees.assert_close(ours, full.params, (name, stage))
            first = first or ours
            trees.assert_equal(ours, first, (name, stage))
        moments = zerofn.tree_map(lambda x: x, zerofn.unshard(state.opt_state))
        for ours, expected in zip(zerofn.tree.leaves(moments), zerofn.tree.leaves(full.opt_state), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
        updated = trees.sharded(tx, 3, updates=True)
        trees.assert_close(zerofn.unshard(updated.params), full.params, (name, "update"))
        by_hand = tx.init(zerofn.shard({"params": trees.params()}, stage=3, unit=trees.unit_of)["params"])
        nodes = zerofn.tree.leaves(by_hand, is_leaf=zerofn.sharding.sharded.is_sharded)
        assert len(nodes) == len(zerofn.tree.leaves(state.opt_state, is_leaf=zerofn.sharding.sharded.is_sharded))


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_are_the_plain_tree(ranks, size):
    ranks(size, _at_ranks)


def test_leaves_that_no_mask_orders_are_left_alone_too():
    """Here units are laid out without knowing of the mask, so what is selected lies between what is not."""
    tx = optim.masked(optim.sgd(1.0, 0.5, weight_decay=0.1), lambda leaf: leaf.name in ("a", "c", "e"))
    values = {k: torch.arange(5.0) + i for i, k in enumerate("abcde")}
    params = zerofn.shard({"params": values}, stage=3, unit=lambda name: "all")["params"]
    assert len(params.shards) == 1
    g = zerofn.scatter({k: torch.ones(5) for k in values}, like=params)
    ours, _ = tx.fused.apply(g, tx.init(params), params, None, None)
    expected, _ = tx.fused.apply({k: torch.ones(5) for k in values}, tx.init(values), values, None, None)
    trees.assert_equal(zerofn.gather(ours), expected)
    assert torch.equal(expected["b"], values["b"] + 1)  # as in optax: what is not selected passes through


def test_moments_are_held_only_where_a_leaf_is_selected():
    state = trees.sharded(optim.chain(optim.masked(optim.scale_by_adam(), in_first_unit), optim.sgd(0.1)), 3)
    moments = state.opt_state[0].inner_state.mu
    assert [unit.name for unit in moments.layout.units] == ["first"]
    assert set(moments.layout.where) == {"h.0.w", "h.0.b"}
    plain = trees.plain(optim.masked(optim.adamw(0.1), is_bias)).opt_state.inner_state.mu
    assert {k: v is None for k, v in plain.items()} == {k: not k.endswith(".b") for k in plain}


def test_frozen_parameters_may_have_any_label():
    tx = optim.multi_transform({"body": optim.adamw(0.1)}, lambda leaf: "body" if leaf.name == "w" else "other")
    values = {"w": torch.ones(3), "fixed": torch.ones(2)}
    state = zerofn.TrainState.create(params=values, tx=tx, frozen=lambda name: name == "fixed")
    for s in (state, zerofn.shard(state, stage=3)):
        g = {"w": torch.ones(3), "fixed": torch.ones(2)}
        g = g if s is state else zerofn.scatter(g, like=s.params)
        after = zerofn.gather(s.apply_gradients(g).params)
        assert torch.equal(after["fixed"], values["fixed"])
        assert torch.allclose(after["w"], torch.tensor(0.9), atol=1e-3)


def test_mistakes_are_told():
    with pytest.raises(
        ValueError,
        match=r"leaf 'w' has label 'head', but transforms has no entry for it. Add .* or return one of \['body'\]",
    ):
        optim.multi_transform({"body": optim.sgd(0.1)}, lambda leaf: "head").init({"w": torch.ones(2)})
    with pytest.raises(TypeError, match="masked: mask must be a function of one logical leaf"):
        optim.masked(optim.sgd(0.1), {"w": True})
    with pytest.raises(TypeError, match="labels must be a function of one logical leaf"):
        optim.multi_transform({"body": optim.sgd(0.1)}, {"w": "body"})
    with pytest.raises(TypeError, match="label 'body': expected a gradient transformation"):
        optim.multi_transform({"body": 0.1}, label)
    with pytest.raises(TypeError, match="transforms must be a dict"):
        optim.multi_transform([optim.sgd(0.1)], label)
