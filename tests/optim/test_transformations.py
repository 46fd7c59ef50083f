"""The contract every transformation keeps: skipping, scaling, equality, errors; and ones that users write."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch

import zerofn
from tests.support import optim_trees as trees
from zerofn import optim

INF = float("inf")
SGD = optim.sgd(0.1, 0.9)
FUSED = {
    "sgd": optim.sgd(0.1),
    "momentum": optim.sgd(0.1, 0.9, weight_decay=0.1, mask=trees.is_matrix),
    "adamw": optim.adamw(optim.linear_schedule(0.1, 0.0, 10)),
    "lion": optim.lion(0.1),
    "lamb": optim.lamb(0.1),
    "clipped": optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1, 0.9)),
    "multi": optim.multi_transform({True: optim.adamw(0.1), False: optim.lamb(0.1)}, trees.is_matrix),
    "masked": optim.masked(optim.sgd(0.1, 0.9), trees.is_matrix),
}


class RmsState(NamedTuple):
    nu: Any


def rmsprop(rate, decay=0.9, eps=1e-8):
    """As a user would write it: optree's or torch's tree_map would do as well."""

    def init(params):
        return RmsState(zerofn.tree_map(torch.zeros_like, params))

    def update(grads, state, params=None):
        nu = zerofn.tree_map(lambda v, g: decay * v + (1 - decay) * g * g, state.nu, grads)
        return zerofn.tree_map(lambda g, v: -rate * g / (v.sqrt() + eps), grads, nu), RmsState(nu)

    return optim.GradientTransformation(init, update)


MORE = {
    "rmsprop, centered": optim.rmsprop(0.01, centered=True, bias_correction=True, momentum=0.9),
    "adagrad": optim.adagrad(0.1),
    "nadamw": optim.nadamw(0.01, mask=trees.is_matrix, weight_decay=0.1),
    "radam": optim.radam(optim.linear_schedule(0.1, 0.0, 10), b2=0.9),
    "adafactor": optim.adafactor(0.1, 50, momentum=0.9),
    "adafactor, not factored": optim.adafactor(0.1, factored=False),
    "muon": optim.muon(0.1, weight_decay=0.1),
    "adaptive_grad_clip": optim.chain(optim.adaptive_grad_clip(0.01), optim.ema(0.9), optim.sgd(0.1)),
    "lookahead": optim.lookahead(optim.adamw(0.1), 2, 0.5),
    "lookahead, reset": optim.lookahead(optim.radam(0.1), 2, 0.5, reset_state=True),
    "params_ema": optim.params_ema(optim.multi_transform({True: optim.muon(0.1), False: SGD}, trees.is_matrix), 0.9),
    "inject_hyperparams": optim.inject_hyperparams(optim.adamw)(optim.linear_schedule(0.1, 0.0, 10)),
    "inject_hyperparams of one's own": optim.inject_hyperparams(rmsprop)(0.01),
    "from_functions": optim.from_functions(rmsprop(0.01).init, rmsprop(0.01).update),
}


def bits(tree):
    return [x.clone().reshape(-1).view(torch.uint8) for x in zerofn.tree.leaves(tree)]


@pytest.mark.parametrize("name", [*FUSED, *MORE])
def test_a_gradient_that_is_not_finite_changes_no_bit(name):
    state = trees.plain((FUSED | MORE)[name], torch.float32, 2)
    g = trees.grads(2, torch.float32)
    g["norm"][3] = INF
    after = state.apply_gradients(g)
    for a, b in zip(bits((state.params, state.opt_state)), bits((after.params, after.opt_state)), strict=True):
        assert torch.equal(a, b)
    assert (after.step.item(), after.skipped.item()) == (3, 1)
    resumed = after.apply_gradients(trees.grads(2, torch.float32))
    straight = state.apply_gradients(trees.grads(2, torch.float32))
    trees.assert_equal(resumed.params, straight.params)


@pytest.mark.parametrize("finite", [None, torch.tensor(True), torch.tensor(False)])
@pytest.mark.parametrize("name", [*FUSED, *MORE])
def test_apply_multiplies_by_the_factor_and_skips_nonfinite_steps(name, finite):
    tx = (FUSED | MORE)[name]
    params, g = trees.params(), trees.grads(0)
    state = tx.init(params)
    ours, fresh = optim.base.step(tx, g, state, params, torch.tensor(0.5), finite)
    halved = {k: v * 0.5 for k, v in g.items()}
    expected, after = optim.base.step(tx, halved, state, params)
    if finite is not None and not finite:
        expected, after = params, state
    trees.assert_close(ours, expected)
    for a, b in zip(zerofn.tree.leaves(fresh), zerofn.tree.leaves(after), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [-1.0, -1e-4, 0.5])
def test_clipping_after_a_scale_of_either_sign(size):
    """On the fused path the norm is that of the gradients times what came before."""
    tx = optim.chain(optim.scale(size), optim.clip_by_global_norm(1.0), optim.sgd(1.0))
    params, g = trees.params(), trees.grads(0)
    state = tx.init(params)
    expected = optim.apply_updates(params, tx.update(g, state, params)[0])
    assert tx.fused.apply is not None
    trees.assert_close(tx.fused.apply(g, state, params, None, None)[0], expected)


@pytest.mark.parametrize("scale", [1.0, 1e-7])  # of which the small one shows the 1e-6 that is added to the norm
@pytest.mark.parametrize("room", [0.1, 10.0])
def test_clipping_is_torchs(scale, room):
    """Above and below the norm."""
    leaves = {k: torch.nn.Parameter(torch.zeros_like(v)) for k, v in trees.params().items()}
    g = {k: scale * v for k, v in trees.grads(0).items()}
    for k, p in leaves.items():
        p.grad = g[k].clone()
    norm = zerofn.global_norm(g).item()
    max_norm = room * norm
    assert torch.nn.utils.clip_grad_norm_(leaves.values(), max_norm).item() == pytest.approx(norm, rel=1e-12)
    torch.optim.SGD(leaves.values(), 1.0).step()
    tx, params = optim.chain(optim.clip_by_global_norm(max_norm), optim.sgd(1.0)), trees.params()
    params = {k: torch.zeros_like(v) for k, v in params.items()}
    for ours in (
        tx.fused.apply(g, tx.init(params), params, None, None)[0],
        optim.apply_updates(params, tx.update(g, tx.init(params), params)[0]),
    ):
        trees.assert_close(ours, {k: p.detach() for k, p in leaves.items()}, tol=1e-12 * scale)


def _rmsprop_at_ranks():
    leaves = {k: torch.nn.Parameter(v) for k, v in trees.params().items()}
    optimizer = torch.optim.RMSprop(leaves.values(), lr=0.01, alpha=0.9, foreach=False)
    for step in range(trees.STEPS):
        for k, g in trees.grads(step).items():
            leaves[k].grad = g
        optimizer.step()
    for stage in (0, 2, 3):
        state = trees.sharded(rmsprop(0.01), stage)
        trees.assert_close(zerofn.unshard(state.params), {k: p.detach() for k, p in leaves.items()}, stage)
        trees.assert_close(
            zerofn.unshard(trees.sharded(optim.chain(optim.scale(1.0), rmsprop(0.01)), stage).params),
            {k: p.detach() for k, p in leaves.items()},
            stage,
        )


@pytest.mark.parametrize("size", [1, 2])
def test_an_elementwise_rule_of_a_users_own_works_on_shards(ranks, size):
    ranks(size, _rmsprop_at_ranks)


COMPILED = {
    "momentum": FUSED["momentum"],
    "lion": optim.lion(optim.linear_schedule(0.1, 0.0, 10), lr_scale=lambda leaf: 1.0 + len(leaf.shape)),
    "lamb": optim.lamb(0.1, weight_decay=0.1, mask=trees.is_matrix),
    "multi": FUSED["multi"],
    "adam by hand": optim.chain(
        optim.scale_by_adam(),
        optim.add_decayed_weights(0.1, trees.is_matrix),
        optim.scale_by_learning_rate(optim.linear_schedule(0.1, 0.0, 10)),
    ),
    "masked": optim.chain(optim.masked(optim.trace(0.9), trees.is_matrix), optim.scale(-0.1)),
    "rmsprop": rmsprop(0.01),
}


def _loss(params, batch):
    return sum((p * batch["x"]).square().sum() for p in zerofn.tree.leaves(params))


def _step(state, batch):
    loss, grads = state.value_and_grad(_loss)(batch)
    return state.apply_gradients(grads), {"loss": loss}


COMPILED |= MORE


def _compiled_at_ranks(names, stages=(3,)):
    for name, stage in itertools.product(names, stages):
        tx = COMPILED[name]
        state = zerofn.TrainState.create(params=trees.params(torch.float32), tx=tx)
        eager, compiled = (zerofn.shard(state, stage=stage, unit=trees.unit_of) for _ in range(2))
        step = zerofn.compile(_step)
        for k in range(3):
            batch = {"x": torch.tensor(float("nan") if k == 1 else 0.1 * (k + 1))}
            before = bits((eager.params, eager.opt_state))
            eager, _ = _step(eager, batch)
            stayed = map(torch.equal, before, bits((eager.params, eager.opt_state)))
            assert k != 1 or all(stayed), (name, stage)
            compiled, _ = step(compiled, batch)
        trees.assert_equal(zerofn.unshard(compiled.params), zerofn.unshard(eager.params), (name, stage))
        for a, b in zip(zerofn.tree.leaves(compiled.opt_state), zerofn.tree.leaves(eager.opt_state), strict=True):
            assert torch.equal(a, b), (name, stage)


@pytest.mark.part(size=[1])
@pytest.mark.parametrize("size", [1, 2])
def test_captured_steps_are_the_eager_ones(ranks, size):
    ranks(size, _compiled_at_ranks, list(COMPILED), timeout=300.0)


@pytest.mark.whole  # one process has all of them in test_captured_steps_are_the_eager_ones
@pytest.mark.part(size=[3], stages=[(3,)])
@pytest.mark.parametrize(("size", "stages"), [(2, (0, 1, 2)), (3, (1,)), (3, (3,))])
def test_captured_steps_are_the_eager_ones_at_every_stage(ranks, size, stages):
    ranks(size, _compiled_at_ranks, ["adafactor", "muon", "adaptive_grad_clip", "lookahead"], stages, timeout=300.0)


def test_transformations_are_equal_by_name_and_arguments():
    for make in (
        lambda: optim.sgd(0.1, 0.9),
        lambda: optim.lamb(0.1),
        lambda: optim.chain(optim.scale(2.0)),
        lambda: optim.multi_transform({True: optim.lion(0.1)}, trees.is_matrix),
        lambda: optim.masked(optim.trace(0.9), trees.is_matrix),
    ):
        assert make() == make() and hash(make()) == hash(make())
    assert optim.sgd(0.1) != optim.sgd(0.2)
    assert optim.masked(optim.trace(0.9), trees.is_matrix) != optim.masked(optim.trace(0.8), trees.is_matrix)
    assert rmsprop(0.1) != rmsprop(0.2)  # nameless: only the same functions are the same


def is_matrix(leaf):
    return len(leaf.shape) > 1


def test_a_transformation_is_shown_as_code_that_makes_it():
    assert repr(optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1))) == (
        "chain(clip_by_global_norm(max_norm=1.0), sgd(learning_rate=0.1, nesterov=False, weight_decay=0.0))"
    )
    several = {**vars(optim), "is_matrix": is_matrix}
    warm_up = optim.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100, exponent=2.0)
    cycle = {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 10, "decay_steps": 100}
    for x in (
        optim.adam(0.1, 0.8, 0.9, moments="bf16"), optim.adamw(warm_up, weight_decay=0.1, mask=is_matrix),
        optim.onebit_adam(0.1, weight_decay=0.2, freeze_step=7), optim.muon(0.1, ns_steps=4, matrices=is_matrix),
        optim.onebit_lamb(0.1, weight_decay=0.2, mask=is_matrix, freeze_step=7, max_coeff=9.0, factor_min=0.4),
        optim.zero_one_adam(0.1, var_freeze_step=9), optim.lookahead(optim.lion(0.1, lr_scale=is_matrix), 3, 0.5),
        optim.adafactor(0.1, momentum=0.9, weight_decay_mask=is_matrix), optim.rmsprop(0.1, centered=True),
        optim.exponential_decay(1.0, 10, 0.5, end_value=0.1), optim.warmup_decay_lr(100, warmup_type="linear"),
        optim.cosine_onecycle_schedule(10, 0.1), optim.linear_schedule(1.0, 0.0, 10), optim.constant_schedule(0.1),
    ):  # fmt: skip
        assert eval(repr(x), several) == x and ("=" in repr(x)), repr(x)
    assert repr(optim.sgdr_schedule([cycle])).startswith("sgdr_schedule(cosine_kwargs=((('decay_steps', 100), ")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: optim.sgd(-0.1), ValueError, "sgd: learning_rate must be zero or more, got -0.1"),
        (lambda: optim.sgd("0.1"), TypeError, "sgd: learning_rate must be a number or a schedule"),
        (lambda: optim.sgd(torch.tensor(0.1)), TypeError, "learning_rate must be a number or a schedule"),
        (lambda: optim.sgd(0.1, nesterov=True), ValueError, "nesterov=True needs momentum, such as momentum=0.9"),
        (lambda: optim.sgd(0.1, -0.9), ValueError, "sgd: momentum must be zero or more"),
        (lambda: optim.sgd(0.1, weight_decay=float("nan")), ValueError, "weight_decay must be zero or more, got nan"),
        (lambda: optim.adamw(0.1, b1=1.0), ValueError, r"adamw: b1 must lie in \[0, 1\), got 1.0"),
        (lambda: optim.adamw(0.1, eps=-1e-8), ValueError, "adamw: eps must be zero or more"),
        (lambda: optim.adamw(0.1, mask=["w"]), TypeError, "adamw: mask must be a function of one logical leaf"),
        (lambda: optim.lion(0.1, b2=-0.1), ValueError, r"lion: b2 must lie in \[0, 1\)"),
        (lambda: optim.lamb(0.1, b2=2), ValueError, r"lamb: b2 must lie in \[0, 1\)"),
        (lambda: optim.clip_by_global_norm(0.0), ValueError, "max_norm must be positive, got 0.0"),
        (lambda: optim.clip(-1.0), ValueError, "clip: max_delta must be positive"),
        (lambda: optim.scale("x"), TypeError, "scale: step_size must be a number"),
        (lambda: optim.scale_by_schedule(0.1), TypeError, r"For a constant, write scale\(0.1\)"),
        (lambda: optim.chain(optim.sgd(0.1), 3), TypeError, "chain: expected a gradient transformation"),
        (lambda: optim.rmsprop(0.1, decay=1.0), ValueError, r"rmsprop: decay must lie in \[0, 1\), got 1.0"),
        (lambda: optim.rmsprop(0.1, nesterov=True), ValueError, "rmsprop: nesterov=True needs momentum"),
        (lambda: optim.scale_by_stddev(eps=-1.0), ValueError, "scale_by_stddev: eps must be zero or more"),
        (lambda: optim.adagrad(0.1, -0.1), ValueError, "adagrad: initial_accumulator_value must be zero or more"),
        (lambda: optim.nadamw(0.1, b1=1), ValueError, r"nadamw: b1 must lie in \[0, 1\), got 1"),
        (lambda: optim.radam("0.1"), TypeError, "radam: learning_rate must be a number or a schedule"),
        (lambda: optim.radam(0.1, threshold=3), ValueError, "radam: threshold must be at least 4, got 3"),
        (lambda: optim.radam(0.1, b2=0.5), ValueError, "radam: b2 must be more than 0.6, got 0.5"),
        (lambda: optim.adafactor(-0.1), ValueError, "adafactor: learning_rate must be zero or more"),
        (lambda: optim.adafactor(min_dim_size_to_factor=0), ValueError, "min_dim_size_to_factor must be at least 1"),
        (lambda: optim.adafactor(clipping_threshold=0.0), ValueError, "clip_by_block_rms: threshold must be positive"),
        (lambda: optim.adafactor(momentum=1.0), ValueError, r"ema: decay must lie in \[0, 1\), got 1.0"),
        (lambda: optim.muon(0.1, beta=1.0), ValueError, r"beta must lie in \[0, 1\), got 1.0"),
        (lambda: optim.muon(0.1, (1.0, 2.0)), ValueError, "ns_coeffs must be three numbers, or three for each step"),
        (lambda: optim.muon(0.1, "dion"), ValueError, "ns_coeffs must be three numbers, .* got 'dion'"),
        (lambda: optim.muon(0.1, [(1.0, 2.0, 3.0)]), ValueError, "ns_coeffs has 1 triples, but ns_steps=5"),
        (lambda: optim.muon(0.1, ns_steps=0), ValueError, "ns_steps must be at least 1, got 0"),
        (lambda: optim.muon(0.1, matrices=["w"]), TypeError, "matrices must be a function of one logical leaf"),
        (lambda: optim.muon(0.1, adam_learning_rate=-1.0), ValueError, "muon: adam: learning_rate must be zero"),
        (lambda: optim.adaptive_grad_clip(0.0), ValueError, "adaptive_grad_clip: clipping must be positive"),
        (lambda: optim.lookahead(optim.sgd(0.1), 0, 0.5), ValueError, "lookahead: sync_period must be at least 1"),
        (lambda: optim.lookahead(optim.sgd(0.1), 2, 1.5), ValueError, "slow_step_size must be at most 1, got 1.5"),
        (lambda: optim.lookahead(0.1, 2, 0.5), TypeError, "lookahead: expected a gradient transformation"),
        (lambda: optim.params_ema(optim.sgd(0.1), 1.0), ValueError, r"params_ema: decay must lie in \[0, 1\)"),
        (lambda: optim.scale_by_trust_ratio(min_norm=-1.0), ValueError, "min_norm must be zero or more"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_what_update_needs_is_told():
    g = {"w": torch.ones(2)}
    needy = [optim.add_decayed_weights(0.1), optim.scale_by_trust_ratio(), optim.scale_by_param_block_rms()]
    for tx in (*needy, optim.adaptive_grad_clip(0.1)):
        with pytest.raises(ValueError, match=r"update needs the parameters. Write tx.update\(grads, state, params\)"):
            tx.update(g, tx.init(g))
    tx = optim.adamw(0.1)
    with pytest.raises(ValueError, match="the gradients do not have the shapes of the parameters"):
        tx.fused.apply({"w": torch.ones(3)}, tx.init(g), g, None, None)
    with pytest.raises(ValueError, match="the state's moments do not have the shapes"):
        tx.fused.apply(g, tx.init({"w": torch.ones(3)}), g, None, None)


def _norms_where_a_rank_has_nothing():
    values = {"w": torch.ones(9, dtype=torch.float64), "h": torch.ones(4, dtype=torch.bfloat16)}
    params = zerofn.shard({"params": values}, stage=3)["params"]
    return {k: v.item() for k, v in zerofn.leaf_norms(params).items()}


@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_that_has_nothing_of_any_leaf_agrees_about_the_dtype(ranks, size):
    assert ranks(size, _norms_where_a_rank_has_nothing) == [{"h": 2.0, "w": 3.0}] * size


def test_norms_of_parts_are_named_apart():
    """Two `Sharded` parts of one tree: their leaves have the names they have in the plain tree."""
    values = {"g": {"w": torch.ones(4)}, "d": {"w": torch.full((9,), 2.0)}}
    params = zerofn.shard({"params": values}, stage=3, unit=lambda name: name[0])["params"]
    parts = {"g": params["g"], "d": params["d"]}
    norms = {k: v.item() for k, v in zerofn.leaf_norms(parts).items()}
    assert norms == {"d.w": 6.0, "g.w": 2.0}
    tx = optim.lamb(0.1, mask=lambda leaf: leaf.name == "d.w", weight_decay=0.5)
    updates, _ = tx.update(zerofn.tree_map(torch.ones_like, parts), tx.init(parts), parts)
    plain = tx.update(zerofn.tree_map(torch.ones_like, values), tx.init(values), values)[0]
    trees.assert_close(zerofn.gather(updates["d"]), plain["d"], tol=1e-6)
    trees.assert_close(zerofn.gather(updates["g"]), plain["g"], tol=1e-6)
