"""What wraps an optimizer, or makes one: lookahead, an average, injected hyperparameters, two functions."""

import jax
import numpy as np
import optax
import pytest
import torch

import zerofn
from tests.support import optim_trees as trees
from zerofn import optim


@pytest.mark.whole
@pytest.mark.parametrize("reset", [False, True])
def test_lookahead_is_that_of_optax(reset):
    tx = optim.lookahead(optim.adam(0.1), 2, 0.3, reset)
    other = optax.lookahead(optax.adam(0.1), 2, 0.3, reset)
    with jax.enable_x64(True):
        values = optax.LookaheadParams.init_synced({k: np.asarray(v) for k, v in trees.params().items()})
        state = other.init(values)
        for step in range(5):
            g = {k: np.asarray(v) for k, v in trees.grads(step).items()}
            updates, state = other.update(g, state, values)
            values = optax.apply_updates(values, updates)
        fast, slow = ({k: torch.from_numpy(np.array(v)) for k, v in x.items()} for x in (values.fast, values.slow))
    ours = trees.plain(tx, steps=5)
    trees.assert_close(ours.params, fast, tol=1e-9)
    trees.assert_close(ours.opt_state.slow, slow, tol=1e-9)
    assert ours.opt_state.steps_since_sync.item() == 1


@pytest.mark.parametrize("name", ["lookahead", "params_ema", "inject_hyperparams"])
def test_update_agrees_with_apply(name):
    tx = {
        "lookahead": optim.lookahead(optim.adamw(0.1), 2, 0.5),
        "params_ema": optim.params_ema(optim.lion(0.1), 0.9),
        "inject_hyperparams": optim.inject_hyperparams(optim.adamw)(optim.linear_schedule(0.1, 0.0, 10)),
    }[name]
    state = trees.plain(tx)
    trees.assert_close(state.params, trees.by_updates(tx))
    trees.assert_close(zerofn.unshard(trees.sharded(tx, 3)).params, state.params)


def test_the_average_of_parameters_by_hand():
    tx = optim.params_ema(optim.adamw(0.1), 0.8)
    expected = trees.params(torch.float32)
    for step in range(1, trees.STEPS + 1):
        inner = trees.plain(optim.adamw(0.1), torch.float32, step)
        expected = {k: 0.8 * e + 0.2 * inner.params[k] for k, e in expected.items()}
    state = trees.sharded(tx, 3, torch.float32)
    trees.assert_equal(zerofn.gather(state.params), inner.params)  # training is that of the optimizer
    trees.assert_close(zerofn.gather(state.opt_state.ema), expected, tol=1e-6)
    evaluated = state.replace(params=state.opt_state.ema)
    trees.assert_close(zerofn.gather(evaluated.params), expected, tol=1e-6)


def test_injected_rates_are_those_of_the_optimizer():
    schedule = optim.linear_schedule(0.1, 0.0, 10)
    injected = trees.plain(optim.inject_hyperparams(optim.adamw)(schedule, weight_decay=0.1), torch.float32)
    trees.assert_equal(injected.params, trees.plain(optim.adamw(schedule, weight_decay=0.1), torch.float32).params)
    assert {k: v.item() for k, v in injected.opt_state.hyperparams.items()} == {"learning_rate": schedule(3)}
    assert injected.learning_rate.item() == schedule(4)
    fixed = trees.plain(optim.inject_hyperparams(optim.adamw)(0.1), torch.float64)
    trees.assert_close(fixed.params, trees.plain(optim.adamw(0.1)).params)


def sgd_of_ones_own(rate, decay=0.0, *, nesterov=False):
    """As optax would have it: arithmetic on numbers or tensors."""

    def update(grads, state, params=None):
        return zerofn.tree_map(lambda g, p: -rate * (g + decay * p), grads, params), state

    return optim.from_functions(lambda params: (), update)


def test_injected_hyperparameters_are_those_of_optax():
    other = optax.inject_hyperparams(lambda rate, decay: optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate)))
    ours = optim.inject_hyperparams(sgd_of_ones_own)
    rate = optim.linear_schedule(0.1, 0.0, 10)
    with jax.enable_x64(True):
        tx = other(rate=optax.linear_schedule(0.1, 0.0, 10), decay=0.5)
        values = {k: np.asarray(v) for k, v in trees.params().items()}
        state = tx.init(values)
        for step in range(trees.STEPS):
            updates, state = tx.update({k: np.asarray(v) for k, v in trees.grads(step).items()}, state, values)
            values = optax.apply_updates(values, updates)
        expected = {k: torch.from_numpy(np.array(v)) for k, v in values.items()}
    found = trees.plain(ours(rate, decay=0.5))
    trees.assert_close(found.params, expected, tol=1e-7)
    assert {k: v.item() for k, v in found.opt_state.hyperparams.items()} == {"rate": rate(3), "decay": 0.5}


def _loss(params, batch):
    return sum((p * batch["x"]).square().sum() for p in zerofn.tree.leaves(params))


def test_a_rate_is_changed_between_steps_without_another_capture():
    captures = []

    def train_step(state, batch):
        captures.append(1)
        loss, grads = state.value_and_grad(_loss)(batch)
        return state.apply_gradients(grads), loss

    tx = optim.inject_hyperparams(optim.sgd)(0.5)
    state = zerofn.shard(zerofn.TrainState.create(params={"w": torch.ones(3)}, tx=tx), stage=3)
    step, batch = zerofn.compile(train_step), {"x": torch.ones(())}
    state, _ = step(state, batch)
    assert torch.equal(zerofn.gather(state.params)["w"], torch.zeros(3))  # 1 - 0.5 * 2
    state = zerofn.shard(zerofn.TrainState.create(params={"w": torch.ones(3)}, tx=tx), stage=3)
    state = state.replace(opt_state=state.opt_state.with_hyperparams(learning_rate=0.25))
    before = len(captures)
    state, _ = step(state, batch)
    assert torch.equal(zerofn.gather(state.params)["w"], torch.full((3,), 0.5))
    assert state.learning_rate.item() == 0.25 and len(captures) == before


@pytest.mark.parametrize("compiled", [False, True])
def test_a_rate_from_the_batch_needs_one_capture(compiled):
    captures = []

    def train_step(state, batch):
        captures.append(1)
        state = state.replace(opt_state=state.opt_state.with_hyperparams(learning_rate=batch["lr"]))
        loss, grads = state.value_and_grad(_loss)(batch)
        return state.apply_gradients(grads), loss

    tx = optim.inject_hyperparams(optim.sgd)(0.5)
    state = zerofn.shard(zerofn.TrainState.create(params={"w": torch.ones(3)}, tx=tx), stage=3)
    step = zerofn.compile(train_step) if compiled else train_step
    w = torch.ones(3)
    for rate in (0.25, 0.125, 0.5):
        batch = {"x": torch.ones(()), "lr": torch.tensor(rate)}
        w = w - rate * torch.func.grad(lambda w: _loss({"w": w}, batch))(w)  # noqa: B023
        state, _ = step(state, batch)
        assert torch.equal(zerofn.unshard(state.params)["w"], w)
    assert not compiled or len(captures) == 1
    with pytest.raises(TypeError, match="learning_rate: value must be a number, got tensor"):
        state.opt_state.with_hyperparams(learning_rate=torch.ones(2))


def test_what_cannot_be_injected_is_told():
    with pytest.raises(ValueError, match=r"static_args has \['rates'\], which are not arguments of sgd"):
        optim.inject_hyperparams(optim.sgd, "rates")
    with pytest.raises(TypeError, match="b1 of adamw is a constant of the optimizer's kernel, so it cannot be"):
        optim.inject_hyperparams(optim.adamw)(0.1, b1=optim.constant_schedule(0.9))
    with pytest.raises(ValueError, match="sgd: learning_rate must be zero or more, got -0.1"):
        optim.inject_hyperparams(optim.sgd)(-0.1)
    state = optim.inject_hyperparams(optim.sgd)(0.1, mask=trees.is_matrix).init({"w": torch.ones(2, 2)})
    with pytest.raises(
        KeyError, match=r"'momentum' is not an injected hyperparameter; expected one of \['learning_rate'\]"
    ):
        state.with_hyperparams(momentum=0.9)


def test_two_functions_make_an_optimizer():
    def init(params):
        return zerofn.tree_map(torch.zeros_like, params)

    def update(grads, state, params):
        state = zerofn.tree_map(lambda m, g: 0.9 * m + g, state, grads)
        return zerofn.tree_map(lambda m: -0.1 * m, state), state

    tx = optim.from_functions(init, update, "momentum")
    assert repr(tx).startswith("momentum(") and tx == optim.from_functions(init, update, "momentum")
    assert optim.from_functions(init, update) != optim.from_functions(init, lambda g, s, p: (g, s))
    trees.assert_close(trees.plain(tx).params, trees.plain(optim.sgd(0.1, 0.9)).params)
    trees.assert_close(zerofn.unshard(trees.sharded(tx, 3).params), trees.plain(tx).params)
    with pytest.raises(TypeError, match=r"update must be a function update\(grads, state, params\)"):
        optim.from_functions(init, lambda grads, state: (grads, state))
    with pytest.raises(TypeError, match=r"init must be a function init\(params\) -> state; got 3"):
        optim.from_functions(3, update)
    with pytest.raises(TypeError, match=r"mine: update must return the pair \(updates, state\), got a dict"):
        optim.from_functions(init, lambda g, s, p: g, "mine").update({"w": torch.ones(1)}, (), None)


def decayed_sgd(rate, decay, mask):
    """Somebody's pair: plain SGD that decays some leaves."""

    def update(grads, state, params):
        decays = {k: decay * mask(optim.LeafInfo(k, tuple(p.shape), p.dtype)) for k, p in params.items()}
        return zerofn.tree_map(lambda g, p, d: -rate * (g + d * p), grads, params, decays), state

    return optim.from_functions(lambda params: (), update, "decayed_sgd", masks=[mask])


def only(inner, mask):
    """Somebody's combinator: `inner`, whose updates count for some leaves."""
    masked = optim.masked(optim.set_to_zero(), lambda leaf: not mask(leaf))

    def update(grads, state, params):
        updates, state = inner.update(grads, state, params)
        return masked.update(updates, masked.init(params), params)[0], state

    masks = (*inner.masks, ("only", mask))
    return optim.GradientTransformation(inner.init, update, optim.About("only", (inner, mask)), masks)


def no_leaf(leaf):
    return leaf.ndim > 7


def every_leaf(leaf):
    return True


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: tx,
        lambda tx: optim.chain(optim.clip(1.0), tx),
        lambda tx: optim.masked(tx, every_leaf),
        lambda tx: optim.multi_transform({True: tx, False: optim.set_to_zero()}, trees.is_matrix),
        lambda tx: optim.params_ema(optim.lookahead(tx, 2, 0.5), 0.9),
        lambda tx: only(tx, every_leaf),
        lambda tx: optim.inject_hyperparams(lambda rate: tx)(0.1),
    ],
    ids=["alone", "chain", "masked", "multi_transform", "average", "own", "injected"],
)
@pytest.mark.parametrize(
    ("tx", "name"),
    [
        (decayed_sgd(0.1, 0.1, no_leaf), "decayed_sgd"),
        (only(optim.sgd(0.1), no_leaf), "only"),
        (only(optim.adamw(0.1, mask=no_leaf), trees.is_matrix), "adamw"),
        (optim.adafactor(0.1, weight_decay_rate=0.1, weight_decay_mask=no_leaf), "adafactor"),
    ],
    ids=["a pair's", "a combinator's", "inside a combinator", "ours"],
)
def test_a_mask_of_anybodys_is_found_wherever_it_is(tx, name, around):
    with pytest.raises(ValueError, match=f"{name}: mask selects none of the {len(trees.SHAPES)} leaves"):
        zerofn.TrainState.create(params=trees.params(), tx=around(tx))


def test_anybodys_masks_that_select_leaves_train_as_ours_do():
    ours = optim.sgd(0.1, weight_decay=0.2, mask=trees.is_matrix)
    trees.assert_close(trees.plain(decayed_sgd(0.1, 0.2, trees.is_matrix)).params, trees.plain(ours).params)
    expected = {k: v if v.ndim > 1 else trees.params()[k] for k, v in trees.plain(optim.sgd(0.1)).params.items()}
    matrices = only(optim.sgd(0.1), trees.is_matrix)
    trees.assert_close(trees.plain(matrices).params, expected)
    trees.assert_close(zerofn.unshard(trees.sharded(matrices, 3).params), expected)


def test_a_pair_of_another_library_is_told_how_it_becomes_ours():
    with pytest.raises(TypeError, match=r"chain: .* such as optim.from_functions\(tx.init, tx.update\), got"):
        optim.chain(optim.clip(1.0), optax.sgd(0.1))
    with pytest.raises(TypeError, match="from_functions: masks must be a function of one logical leaf"):
        optim.from_functions(lambda p: (), lambda g, s, p: (g, s), masks=[3])


LEAF = [torch.nn.Parameter(torch.ones(2, 2))]
INSTEAD = {
    "AdamW": (
        torch.optim.AdamW(LEAF, 3e-4, weight_decay=0.0),
        "optim.adamw(0.0003, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0)",
    ),
    "Adam": (
        torch.optim.Adam(LEAF, 1e-3, weight_decay=0.1),
        "optim.chain(optim.add_decayed_weights(0.1), optim.adam(0.001, b1=0.9, b2=0.999, eps=1e-08))",
    ),
    "SGD": (torch.optim.SGD(LEAF, 0.1, 0.9), "optim.sgd(0.1, momentum=0.9, weight_decay=0)"),
    "RMSprop": (
        torch.optim.RMSprop(LEAF, centered=True),
        "optim.rmsprop(0.01, decay=0.99, eps=1e-08, centered=True, eps_in_sqrt=False)",
    ),
    "NAdam": (torch.optim.NAdam, "optim.nadamw(learning_rate)"),
    "LBFGS": (torch.optim.LBFGS, "optim.from_functions(init, update)"),
}


@pytest.mark.parametrize("name", INSTEAD)
def test_optimizers_of_torch_are_told_their_counterparts(name):
    given, instead = INSTEAD[name]
    for call in (
        lambda: zerofn.TrainState.create(params={"w": torch.ones(2)}, tx=given),
        lambda: optim.chain(optim.clip(1.0), given),
        lambda: optim.masked(given, trees.is_matrix),
        lambda: optim.multi_transform({"all": given}, lambda leaf: "all"),
        lambda: optim.params_ema(given, 0.9),
    ):
        with pytest.raises(TypeError, match=f"got torch.optim.{name}, which changes parameters in place") as error:
            call()
        assert instead in str(error.value)
    if not isinstance(given, type):  # what is advised can be written
        assert eval(instead, {"optim": optim})


def test_counterparts_take_the_same_steps():
    leaves = {k: torch.nn.Parameter(v) for k, v in trees.params().items() if k != "h.0.b"}
    kinds = [
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    ]
    for kind, options in kinds:
        leaves = {k: torch.nn.Parameter(v) for k, v in trees.params().items()}
        optimizer = kind(leaves.values(), **options)
        tx = eval(optim.torch_optimizers.advice(optimizer).partition("Write ")[2].removesuffix(" instead."))
        for step in range(trees.STEPS):
            for k, g in trees.grads(step).items():
                leaves[k].grad = g
            optimizer.step()
        trees.assert_close(trees.plain(tx).params, {k: p.detach() for k, p in leaves.items()}, kind, tol=1e-9)
