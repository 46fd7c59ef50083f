"""Every update rule against torch.optim, optax and itself: plain and on shards, `apply` and `update`."""

import numpy as np
import optax
import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support import optim_trees as trees
from tests.support.some import some_of
from zerofn import optim
from zerofn.ops import adamw as kernel

WARMUP = (0.01, 0.1, 2, 4)  # warmup_cosine_decay_schedule


def _sgd(**options):
    return lambda leaves: torch.optim.SGD(leaves, foreach=False, **options)


def _decaying_matrices(make, decay):
    """Torch's optimizer with `is_matrix` said as parameter groups."""

    def grouped(leaves):
        leaves = list(leaves)
        groups = [([p for p in leaves if (p.dim() > 1) == is_in], decay * is_in) for is_in in (True, False)]
        return make([{"params": group, "weight_decay": d} for group, d in groups])

    return grouped


TORCH = {
    "sgd": (optim.sgd(0.1), _sgd(lr=0.1)),
    "sgd, decay": (optim.sgd(0.1, weight_decay=0.01), _sgd(lr=0.1, weight_decay=0.01)),
    "sgd, momentum": (optim.sgd(0.1, momentum=0.9), _sgd(lr=0.1, momentum=0.9)),
    "sgd, nesterov": (
        optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        _sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adam": (optim.adam(1e-2), lambda leaves: torch.optim.Adam(leaves, lr=1e-2, fused=True)),
    "adamw": (
        optim.adamw(1e-2, 0.8, 0.99, 1e-6, 0.1),
        lambda leaves: torch.optim.AdamW(leaves, 1e-2, (0.8, 0.99), 1e-6, 0.1, fused=True),
    ),
    "sgd, masked decay": (
        optim.sgd(1e-2, 0.9, weight_decay=0.1, mask=trees.is_matrix),
        _decaying_matrices(_sgd(lr=1e-2, momentum=0.9), 0.1),
    ),
    "adamw, masked decay": (
        optim.adamw(1e-2, weight_decay=0.1, mask=trees.is_matrix),
        _decaying_matrices(lambda groups: torch.optim.AdamW(groups, 1e-2, fused=True), 0.1),
    ),
}


def _matrices(tree):
    """`is_matrix`, as optax takes masks."""
    return {k: v.ndim > 1 for k, v in tree.items()}


OPTAX = {
    "sgd": (optim.sgd(0.1), optax.sgd(0.1)),
    "sgd, nesterov": (optim.sgd(0.1, 0.9, True), optax.sgd(0.1, 0.9, True)),
    "sgd, schedule": (
        optim.sgd(optim.warmup_cosine_decay_schedule(*WARMUP), 0.9),
        optax.sgd(optax.warmup_cosine_decay_schedule(*WARMUP), 0.9),
    ),
    "adamw": (optim.adamw(1e-2, weight_decay=0.1), optax.adamw(1e-2, weight_decay=0.1)),
    "lion": (optim.lion(1e-2, weight_decay=0.1), optax.lion(1e-2, weight_decay=0.1)),
    "lion, mask": (
        optim.lion(1e-2, weight_decay=0.1, mask=trees.is_matrix),
        optax.lion(1e-2, weight_decay=0.1, mask=_matrices),
    ),
    "lamb": (optim.lamb(1e-2, weight_decay=0.1), optax.lamb(1e-2, weight_decay=0.1)),
    "lamb, mask": (
        optim.lamb(1e-2, weight_decay=0.1, mask=trees.is_matrix),
        optax.lamb(1e-2, weight_decay=0.1, mask=_matrices),
    ),
    "chain": (
        optim.chain(
            optim.clip(0.5),
            optim.trace(0.9, nesterov=True),
            optim.add_decayed_weights(0.1),
            optim.scale(0.5),
            optim.scale_by_schedule(optim.linear_schedule(0.1, 0.0, 3)),
            optim.scale_by_learning_rate(0.3),
        ),
        optax.chain(
            optax.clip(0.5),
            optax.trace(0.9, nesterov=True),
            optax.add_decayed_weights(0.1),
            optax.scale(0.5),
            optax.scale_by_schedule(optax.linear_schedule(0.1, 0.0, 3)),
            optax.scale_by_learning_rate(0.3),
        ),
    ),
    "scale_by_adam": (
        optim.chain(optim.scale_by_adam(0.8, 0.9, 1e-3, 1e-4), optim.scale(-0.1)),
        optax.chain(optax.scale_by_adam(0.8, 0.9, 1e-3, 1e-4), optax.scale(-0.1)),
    ),
    "trust ratio": (
        optim.chain(optim.scale_by_trust_ratio(0.5, 0.3, 0.1), optim.identity(), optim.scale(-0.1)),
        optax.chain(optax.scale_by_trust_ratio(0.5, 0.3, 0.1), optax.identity(), optax.scale(-0.1)),
    ),
    "rmsprop": (optim.rmsprop(0.01), optax.rmsprop(0.01)),
    "rmsprop, momentum": (
        optim.rmsprop(0.01, 0.8, 1e-4, 0.1, False, momentum=0.9, nesterov=True, bias_correction=True),
        optax.rmsprop(0.01, 0.8, 1e-4, 0.1, False, momentum=0.9, nesterov=True, bias_correction=True),
    ),
    "rmsprop, centered": (
        optim.rmsprop(0.01, eps=1e-4, initial_scale=0.1, centered=True, bias_correction=True),
        optax.rmsprop(0.01, eps=1e-4, initial_scale=0.1, centered=True, bias_correction=True),
    ),
    "adagrad": (optim.adagrad(0.1), optax.adagrad(0.1)),
    "nadamw": (optim.nadamw(0.01, 0.8, weight_decay=0.1), optax.nadamw(0.01, 0.8, weight_decay=0.1)),
    "radam": (optim.radam(0.01, b2=0.9), optax.radam(0.01, b2=0.9)),
    "adafactor": (
        optim.adafactor(0.1, 50, weight_decay_rate=0.01, momentum=0.9),
        optax.adafactor(0.1, 50, weight_decay_rate=0.01, momentum=0.9, dtype_momentum=np.float64),
    ),
    "adafactor, bare": (
        optim.adafactor(0.1, 128, 0.7, -2, False, None, eps=1e-8),
        optax.adafactor(0.1, 128, 0.7, -2, False, None, eps=1e-8),
    ),
    "adafactor, not factored": (optim.adafactor(0.1, factored=False), optax.adafactor(0.1, factored=False)),
    "ema": (
        optim.chain(optim.ema(0.9), optim.clip_by_block_rms(0.5), optim.ema(0.5, debias=False), optim.scale(-0.1)),
        optax.chain(optax.ema(0.9), optax.clip_by_block_rms(0.5), optax.ema(0.5, debias=False), optax.scale(-0.1)),
    ),
    "radam, nesterov": (optim.radam(0.01, nesterov=True), optax.radam(0.01, nesterov=True)),
}
RULES = {
    **{name: tx for name, (tx, _) in TORCH.items()},
    **{name: tx for name, (tx, _) in OPTAX.items()},
    "clipped sgd": optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1, 0.9)),
    "adaptive_grad_clip": optim.chain(optim.adaptive_grad_clip(0.01), optim.sgd(0.1)),
    "muon": optim.muon(0.1, weight_decay=0.1),
    "muon, adaptive": optim.muon(0.1, ns_steps=2, nesterov=False, adaptive=True, consistent_rms=0.2),
    "clipped lion": optim.chain(optim.scale(0.5), optim.chain(optim.clip_by_global_norm(1.0)), optim.lion(0.1)),
}


def with_torch(make, dtype, schedule=None):
    leaves = {k: torch.nn.Parameter(v) for k, v in trees.params(dtype).items()}
    optimizer = make(leaves.values())
    for step in range(trees.STEPS):
        for k, g in trees.grads(step, dtype).items():
            leaves[k].grad = g
        if schedule is not None:
            optimizer.param_groups[0]["lr"] = schedule(step)
        optimizer.step()
    return {k: p.detach() for k, p in leaves.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", TORCH)
def test_apply_is_torch_bit_for_bit(name, dtype):
    tx, make = TORCH[name]
    expected = with_torch(make, dtype)
    trees.assert_equal(trees.plain(tx, dtype).params, expected)
    if dtype is torch.bfloat16:
        return  # torch rounds the last elements of a bfloat16 tensor otherwise than those before them
    for stage in (0, 3):
        trees.assert_equal(zerofn.unshard(trees.sharded(tx, stage, dtype).params), expected, stage)


def _moments_at_ranks():
    """A kernel of torch rounds the last elements of a tensor otherwise; moments show it sooner than parameters."""
    leaves = {k: torch.nn.Parameter(v) for k, v in trees.params(torch.float32).items()}
    optimizer = torch.optim.AdamW(leaves.values(), 0.1, weight_decay=0.1, fused=True)
    for step in range(trees.STEPS):
        for k, g in trees.grads(step, torch.float32).items():
            leaves[k].grad = g
        optimizer.step()
    for stage in some_of(range(4), 0, 3):
        state = trees.sharded(optim.adamw(0.1, weight_decay=0.1), stage, torch.float32)
        for name, found in (("exp_avg", state.opt_state.mu), ("exp_avg_sq", state.opt_state.nu)):
            expected = {k: optimizer.state[p][name] for k, p in leaves.items()}
            trees.assert_equal(zerofn.unshard(found), expected, (name, stage))
        trees.assert_equal(zerofn.unshard(state.params), {k: p.detach() for k, p in leaves.items()}, stage)


@pytest.mark.parametrize("size", [1, 2])
def test_adamws_moments_are_torchs_bit_for_bit(ranks, size):
    ranks(size, _moments_at_ranks)


def test_a_schedule_gives_the_bits_of_rates_set_by_hand():
    schedule = optim.warmup_cosine_decay_schedule(*WARMUP)
    ours = trees.plain(optim.sgd(schedule, 0.9), torch.float32)
    trees.assert_equal(ours.params, with_torch(_sgd(lr=0.1, momentum=0.9), torch.float32, schedule))
    make = lambda leaves: torch.optim.AdamW(leaves, weight_decay=0.1, fused=True)  # noqa: E731
    ours = trees.plain(optim.adamw(schedule, weight_decay=0.1), torch.float32)
    trees.assert_equal(ours.params, with_torch(make, torch.float32, schedule))
    assert ours.learning_rate.item() == schedule(trees.STEPS)


SOME = [
    "sgd, schedule",
    "adamw",
    "lion",
    "lamb",
    "chain",
    "rmsprop, centered",
    "adagrad",
    "nadamw",
    "radam",
    "adafactor",
]


@pytest.mark.part(name=SOME)
@pytest.mark.parametrize("name", OPTAX)
def test_rules_are_those_of_optax(name):
    tx, other = OPTAX[name]
    tol = 1e-7 if "schedule" in name or "adafactor" in name else 1e-9  # whose rates are float32 in optax
    trees.assert_close(trees.plain(tx).params, trees.by_optax(other), tol=tol)


@pytest.mark.parametrize("name", RULES)
def test_update_agrees_with_apply_to_rounding(name):
    tx = RULES[name]
    trees.assert_close(trees.plain(tx).params, trees.by_updates(tx))


def _at_ranks(name, other):
    """At stage 3, and at one of the others, in turn."""
    tx = RULES[name]
    expected = trees.plain(tx).params
    first = None
    for stage in (other, 3):
        ours = zerofn.unshard(trees.sharded(tx, stage).params)
        trees.assert_close(ours, expected, stage)
        first = first or ours
        trees.assert_equal(ours, first, stage)
    updated = zerofn.unshard(trees.sharded(tx, 3, updates=True).params)
    trees.assert_close(updated, expected, "update")


@pytest.mark.part(size=[2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_are_the_plain_tree_at_every_stage(ranks, size):
    ranks(size, _all_at_ranks)


def _all_at_ranks():
    size = dist.get_world_size() if dist.is_initialized() else 1
    first, by = {1: (0, 2), 2: (0, 1), 3: (1, 2)}[size]  # at 1 and 3 ranks every other one
    for k, name in enumerate(list(RULES)[first::by]):
        _at_ranks(name, k % 2)


def test_lion_by_hand():
    p, g, m = 0.5, np.array([0.3, -0.2]), 0.0
    tx = optim.lion(0.1, b1=0.9, b2=0.99, weight_decay=0.01)
    params = {"w": torch.tensor([0.5], dtype=torch.float64)}
    state = tx.init(params)
    for gradient in g:
        p -= 0.1 * (np.sign(0.9 * m + 0.1 * gradient) + 0.01 * p)
        m = 0.99 * m + 0.01 * gradient
        gradient = {"w": torch.tensor([gradient], dtype=torch.float64)}
        params, state = tx.fused.apply(gradient, state, params, None, None)
    assert params["w"].item() == pytest.approx(p, rel=1e-14)
    assert state.mu["w"].item() == pytest.approx(m, rel=1e-14)


def test_the_first_step_of_lamb_in_closed_form():
    """Adam's first direction is sign(g) (eps = 0), so |u| = sqrt(n) and the step has length rate * |p|."""
    p = {"a": torch.tensor([3.0, 4.0], dtype=torch.float64), "zero": torch.zeros(2, dtype=torch.float64)}
    g = {k: torch.tensor([0.1, -7.0], dtype=torch.float64) for k in p}
    tx = optim.lamb(0.01, eps=0.0)
    updates, _ = tx.update(g, tx.init(p), p)
    length = 0.01 * 5 / 2**0.5
    torch.testing.assert_close(updates["a"], torch.tensor([-length, length], dtype=torch.float64))
    torch.testing.assert_close(updates["zero"], torch.tensor([-0.01, 0.01], dtype=torch.float64))


def test_non_contiguous_tensors_are_updated_like_any():
    p, g = torch.randn(5, 7).t(), torch.randn(7, 5)
    for tx in (optim.sgd(0.1, 0.9, weight_decay=0.1), optim.adamw(0.1), optim.lion(0.1)):
        expected, _ = tx.fused.apply({"w": g}, tx.init({"w": p.contiguous()}), {"w": p.contiguous()}, None, None)
        found, _ = tx.fused.apply({"w": g}, tx.init({"w": p}), {"w": p}, None, None)
        assert torch.equal(found["w"], expected["w"])
    runs = (torch.tensor(1), None, None, None, [0], [35], [0.1], [0.0], None, 0)
    written = p.clone()
    assert not written.is_contiguous()
    torch.ops.zerofn.sgd_([written], g, *runs)
    assert torch.equal(written, torch.ops.zerofn.sgd(p, g, *runs))


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lion"])
def test_an_expanded_gradient_is_that_number_everywhere(name):
    state = zerofn.TrainState.create(params={"w": torch.ones(5)}, tx=getattr(optim, name)(0.1))
    _, grads = state.value_and_grad(lambda p: p["w"].sum())()
    assert grads["w"].stride() == (0,)
    found = state.apply_gradients(grads).params["w"]
    dense = state.apply_gradients({"w": torch.ones(5)}).params["w"]
    assert torch.equal(found, dense) and found.unique().numel() == 1


@pytest.mark.parametrize("device, kind", [("cpu", float), ("meta", torch.float32)])
def test_adamws_kernel_gets_a_rate_it_can_read(monkeypatch, device, kind):
    """A schedule's is a float64 tensor: a number on the CPU, which keeps its bits, and float32 elsewhere."""
    rates = []
    monkeypatch.setattr(kernel, "fused_adamw_", lambda *args, lr, **rest: rates.append(lr))
    tensors = [torch.zeros(4, device=device) for _ in range(4)]
    count, lr = torch.tensor(1, device=device), torch.tensor(0.1, dtype=torch.float64, device=device)
    p, g, m, v = tensors
    kernel._update([p, m, v], g, count, lr, None, None, [0], [4], [2.0], [0.0], 0.9, 0.99, 1e-8, True)
    assert [x.dtype if isinstance(x, torch.Tensor) else type(x) for x in rates] == [kind]
    assert device == "meta" or rates == [0.2]


def test_a_buffer_of_no_leaves_at_all_is_refused():
    for device in ("cpu", "meta"):  # and what fake tensors run
        like = torch.zeros(3, device=device)
        flat = torch.ops.zerofn.ravel([None, like], [0, 32], 64, torch.float64)
        assert (flat.device.type, flat.dtype, flat.shape) == (device, torch.float64, (64,))
    with pytest.raises(ValueError, match="all leaves are None"):
        torch.ops.zerofn.ravel([None, None], [0, 32], 64, torch.float32)


@pytest.mark.parametrize("finite", [None, True, False])
@pytest.mark.parametrize("name", ["adamw", "sgd", "sgd_momentum", "lion"])
def test_the_two_forms_of_an_operation_agree(name, finite):
    torch.manual_seed(0)
    size = (1 << 16) + 37  # more than one block
    num_moments = {"adamw": 2, "sgd": 0}.get(name, 1)
    p, g, *moments = (torch.randn(size).abs() for _ in range(2 + num_moments))
    runs = (
        torch.tensor(3),
        torch.tensor(0.3, dtype=torch.float64),
        torch.tensor(0.7),
        None if finite is None else torch.tensor(finite),
        [0, 70],
        [64, size],
        [0.1, 0.2],
        [0.0, 0.1],
    )
    rest = {
        "adamw": (*runs, 0.9, 0.99, 1e-8, True),
        "sgd": runs,
        "sgd_momentum": (*runs, 0.9, True),
        "lion": (*runs, 0.9, 0.99),
    }[name] + (None, 0)
    fresh = getattr(torch.ops.zerofn, name)(p, g, *moments, *rest)
    fresh = [fresh] if isinstance(fresh, torch.Tensor) else fresh
    written = [x.clone() for x in (p, *moments)]
    getattr(torch.ops.zerofn, name + "_")(written[:1], g, *([x] for x in written[1:]), *rest)
    for new, same, old in zip(fresh, written, (p, *moments), strict=True):
        assert torch.equal(new, same)
        assert torch.equal(new[64:70], old[64:70])  # of no run
        assert torch.equal(new, old) == (finite is False)
