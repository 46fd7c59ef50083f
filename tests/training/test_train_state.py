"""TrainState: steps, skipped steps, loss scales and frozen parameters, against plain torch and GradScaler."""

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import step_with
from zerofn import DynamicLossScale, NoLossScale, TrainState, optim, shard, tree, unshard

STAGES = (0, 1, 2, 3)
SCHEDULE = optim.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
TRANSFORMATIONS = {
    "sgd": lambda: optim.sgd(0.1, momentum=0.9),
    "adamw": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(SCHEDULE, weight_decay=0.1)),
    "lion": lambda: optim.lion(0.01),
    "lamb": lambda: optim.lamb(0.01),
    "own": lambda: own(0.1),
}


def own(rate):
    """A transformation of a user's, with `tree_map` alone."""

    def init(params):
        return {"m": tree.tree_map(torch.zeros_like, params), "count": torch.zeros((), dtype=torch.int64)}

    def update(grads, state, params):
        m = tree.tree_map(lambda m, g: 0.9 * m + g, state["m"], grads)
        return tree.tree_map(lambda m: -rate * m, m), {"m": m, "count": state["count"] + 1}

    return optim.GradientTransformation(init, update)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(5, 300), nn.Linear(300, 300), nn.Linear(300, 2)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


NET = Net()


def params():
    return {k: v.detach().clone() for k, v in NET.named_parameters()}


def loss_fn(p, x, y):
    x = x.to(p["layers.0.weight"].dtype)
    return mse_loss(torch.func.functional_call(NET, p, (x,)).float(), y)


def batch(step, rank=0):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 5, generator=generator), torch.rand(6, 2, generator=generator)


def bits(tree_of):
    return [x.clone().contiguous().view(-1).view(torch.uint8) for x in tree.leaves(tree_of)]


def equal_bits(a, b):
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


# --- skipping


def skip(stage, precision, name, poison):
    state = shard(TrainState.create(params=params(), tx=TRANSFORMATIONS[name]()), stage=stage, precision=precision)
    rank = dist.get_rank()
    for i in range(2):
        _, grads = state.value_and_grad(loss_fn)(*batch(i, rank))
        state = state.apply_gradients(grads)
    before = (state.params, state.opt_state)
    x, y = batch(7, rank)
    if rank == 1:  # one element on one rank
        y[3, 1] = poison
    loss, grads = state.value_and_grad(loss_fn)(x, y)
    named = zerofn.first_nonfinite(grads)
    after = state.apply_gradients(grads)
    assert equal_bits(before, (after.params, after.opt_state)), "bit-unchanged"
    again = after.apply_gradients(after.value_and_grad(loss_fn)(*batch(8, rank))[1])
    assert not equal_bits(after.params, again.params), "and it goes on"
    scales = [s.loss_scale.loss_scale.item() for s in (state, after, again)] if precision == "fp16" else None
    counts = [(s.step.item(), s.skipped.item()) for s in (state, after, again)]
    ignoring = state.apply_gradients(grads, on_nonfinite="ignore")
    assert ignoring.skipped.item() == 0 and not zerofn.all_finite((ignoring.params, ignoring.opt_state))
    return counts, named, scales, loss.isfinite().item()


@pytest.mark.part(stage=[3])
@pytest.mark.part(stage=[0], name=["adamw"])
@pytest.mark.parametrize("name", list(TRANSFORMATIONS))
@pytest.mark.parametrize("stage", STAGES)
def test_a_nonfinite_gradient_changes_nothing(ranks, stage, name):
    precision = {0: None, 1: "fp16", 2: "bf16", 3: "fp16"}[stage]
    for poison in (float("nan"), float("inf")):
        for counts, named, scales, finite in ranks(2, skip, stage, precision, name, poison):
            assert counts == [(2, 0), (3, 1), (4, 1)]
            assert named == "layers.0.bias" and not finite
            assert scales in (None, [2.0**16, 2.0**15, 2.0**15])


def plain_skip():
    state = TrainState.create(params=params(), tx=optim.adamw(0.1))
    _, grads = state.value_and_grad(loss_fn)(*batch(0))
    grads["layers.1.bias"][7] = float("inf")
    after = state.apply_gradients(grads)
    return state, after, grads


def test_plain_states_skip_too():
    state, after, grads = plain_skip()
    assert equal_bits((state.params, state.opt_state), (after.params, after.opt_state))
    assert after.skipped.item() == 1 and zerofn.first_nonfinite(grads) == "layers.1.bias"
    with pytest.raises(ValueError, match="must be 'skip' or 'ignore', got 'raise'"):
        state.apply_gradients(grads, on_nonfinite="raise")


# --- loss scaling against torch


def grad_scaler(steps, bad):
    """fp32 parameters, fp16 arithmetic, torch's GradScaler and SGD: losses, scales, parameters."""
    p = {k: v.requires_grad_() for k, v in params().items()}
    optimizer = torch.optim.SGD(p.values(), 0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    scales = []
    for i in range(steps):
        x, y = batch(i)
        loss = loss_fn({k: v.half() for k, v in p.items()}, x * (1e9 if i in bad else 1), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, {k: v.detach() for k, v in p.items()}


def with_scale(steps, bad, stage):
    scale = DynamicLossScale(2.0**8, period=3, min_loss_scale=0.0)
    init = TrainState.create(params=params(), tx=optim.sgd(0.5, momentum=0.9), loss_scale=scale)
    state = shard(init, stage=stage, precision="fp16")
    scales = []
    for i in range(steps):
        x, y = batch(i)
        _, grads = state.value_and_grad(loss_fn)(x * (1e9 if i in bad else 1), y)
        state = state.apply_gradients(grads)
        scales.append(state.loss_scale.loss_scale.item())
    return scales, unshard(state.params), state.skipped.item()


@pytest.mark.parametrize("size, stage", [(1, 3), (2, 0), (2, 1), (2, 3)])
def test_equals_torchs_grad_scaler(ranks, size, stage):
    """Every rank has the same batch; the scale grows at steps 2, 7 and 10 and shrinks at 4."""
    scales, expected = grad_scaler(12, {4})
    assert scales[3] == 2.0**9 and scales[4] == 2.0**8 and scales[11] == 2.0**10
    for found, p, skipped in ranks(size, with_scale, 12, {4}, stage):
        assert found == scales and skipped == 1
        for key, want in expected.items():
            assert torch.isfinite(p[key]).all()
            torch.testing.assert_close(p[key], want, rtol=1e-5, atol=1e-6)


def growing():
    state = TrainState.create(params=params(), tx=optim.sgd(0.1), loss_scale=DynamicLossScale(2.0**6, period=1))
    state = shard(state, stage=3, precision="fp16")
    norms = []
    for _ in range(4):
        _, grads = state.value_and_grad(loss_fn)(*batch(0))
        norms.append(zerofn.global_norm(grads).item())
        state = state.replace(loss_scale=state.loss_scale.adjust(torch.tensor(True)))
    return norms, state.loss_scale.loss_scale.item()


def test_gradients_are_right_on_steps_where_the_scale_grows(ranks):
    """DeepSpeed's are half as large there."""
    gradients = torch.autograd.grad(mse_loss(NET(batch(0)[0]), batch(0)[1]), NET.parameters())
    expected = torch.nn.utils.get_total_norm(gradients).item()
    for norms, scale in ranks(2, growing):
        assert scale == 2.0**10
        assert norms == pytest.approx([expected] * 4, rel=2e-3)


def test_loss_scales_by_default():
    def scale_of(precision, given=None):
        state = TrainState.create(params=params(), tx=optim.sgd(0.1), loss_scale=given)
        return shard(state, precision=precision).loss_scale

    assert isinstance(scale_of("fp16"), DynamicLossScale)
    assert scale_of("bf16") is None and scale_of(None) is None
    assert isinstance(scale_of("fp16", NoLossScale()), NoLossScale)
    assert scale_of("fp16", zerofn.StaticLossScale(8.0)).loss_scale.item() == 8


@pytest.mark.parametrize("name", list(TRANSFORMATIONS))
def test_parameters_that_are_float16_themselves(name):
    half = {k: v.half() for k, v in params().items()}
    state = TrainState.create(params=half, tx=TRANSFORMATIONS[name](), loss_scale=DynamicLossScale(2.0**8))
    for s in (state, shard(state)):
        for i in range(2):
            s = s.apply_gradients(s.value_and_grad(loss_fn)(*batch(i))[1])
        assert s.skipped.item() == 0 and zerofn.all_finite(s.params)
        assert {x.dtype for x in tree.leaves(s.params)} == {torch.float16}


# --- frozen


def frozen_runs(stage, by_predicate):
    net = Net()
    net.layers[1].requires_grad_(by_predicate)
    tx = optim.adamw(0.1, weight_decay=0.1)
    frozen = (lambda name: "layers.1" in name) if by_predicate else None
    state = TrainState.create(params=dict(net.named_parameters()), tx=tx, frozen=frozen)
    state = state if stage is None else shard(state, stage=stage)
    moments = sum(x.numel() for x in tree.leaves(state.opt_state.mu))
    for i in range(3):
        _, grads = state.value_and_grad(loss_fn)(*batch(i))
        state = state.apply_gradients(grads)
    return unshard(state.params), moments, unshard(state.opt_state.mu)


@pytest.mark.parametrize("by_predicate", [True, False])
def test_frozen_parameters_stay_and_have_no_moments(ranks, by_predicate):
    net = Net()
    optimizer = torch.optim.AdamW(
        [p for n, p in net.named_parameters() if "layers.1" not in n], 0.1, weight_decay=0.1, fused=True
    )
    for i in range(3):
        optimizer.zero_grad()
        mse_loss(net(batch(i)[0]), batch(i)[1]).backward()
        optimizer.step()
    for stage in (None, *STAGES):
        for found, moments, mu in ranks(1 if stage is None else 2, frozen_runs, stage, by_predicate):
            for key, want in net.named_parameters():
                assert torch.equal(found[key], want), (stage, key)  # half of what two ranks agree about, twice
            assert torch.equal(found["layers.1.weight"], params()["layers.1.weight"])
            assert mu["layers.1.weight"] is None and moments < 300 * 300


def with_whole_numbers(stage, compiled):
    """Steps of parameters among which are a table of ids and a mask."""
    whole = {"ids": torch.arange(7), "layers.9.mask": torch.arange(5) > 2}
    init = TrainState.create(params=params() | whole, tx=TRANSFORMATIONS["adamw"]())
    moments = [x.dtype for x in tree.leaves(init.opt_state[1].mu)]
    state = init if stage is None else shard(init, stage=stage)

    def step(state, xy):
        learned = lambda p: {k: v for k, v in p.items() if k not in whole}  # noqa: E731
        _, grads = state.value_and_grad(lambda p, x, y: loss_fn(learned(p), x, y))(*xy)
        return state.apply_gradients(grads), {}

    step = zerofn.compile(step) if compiled else step
    for i in range(3):
        state, _ = step(state, batch(i))
    found = unshard(state.params)
    assert all(torch.equal(found.pop(k), v) for k, v in whole.items()) and set(moments) == {torch.float32}
    return found


@pytest.mark.part(compiled=[True])
@pytest.mark.parametrize("compiled", [False, True])
def test_whole_numbers_among_the_parameters_ride_along(ranks, compiled):
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.1, fused=True)
    for i in range(3):
        optimizer.param_groups[0]["lr"] = SCHEDULE(i)
        optimizer.zero_grad()
        mse_loss(net(batch(i)[0]), batch(i)[1]).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    for size, stage in ((1, None), (1, 3), *((2, stage) for stage in STAGES)):
        for found in ranks(size, with_whole_numbers, stage, compiled):
            for key, want in net.named_parameters():
                tol = {"rtol": 0.0, "atol": 0.0} if size == 1 else {"rtol": 1e-5, "atol": 1e-6}
                torch.testing.assert_close(found[key], want.detach(), **tol)


@pytest.mark.parametrize("compiled", [False, True])
def test_numbers_in_a_state_are_tensors(compiled):
    """Python's and NumPy's float64 alike; a number among the parameters is trained."""
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    torch_optimizer = torch.optim.AdamW([scale], lr=0.1)
    found = []
    for number in (2.0, np.float64(2.0)):
        given = {"a": torch.ones(3, dtype=torch.float64), "scale": number}
        state = TrainState.create(params=given, tx=optim.adamw(0.1, weight_decay=0.01), extra={"rate": number})
        step = step_with(lambda p, x: (p["a"].detach() * x).sum() * p["scale"] ** 2)

        step = zerofn.compile(step) if compiled else step
        state, _ = step(shard(state, stage=3), torch.ones(3, dtype=torch.float64))
        assert state.extra["rate"].dtype == torch.float64 and state.extra["rate"] == 2
        found.append(unshard(state.params)["scale"])
    (3 * scale**2).backward()
    torch_optimizer.step()
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], scale.detach(), rtol=1e-12, atol=0)


# --- extra, step, looks


def moving_average(stage):
    ema = params()
    state = TrainState.create(params=params(), tx=optim.sgd(0.5), extra={"ema": ema, "seen": 0, "position": [1, 2]})
    state = shard(state, stage=stage)
    size = dist.get_world_size() if stage else 1
    assert state.extra["ema"].shards[0].numel() == state.extra["ema"].layout.units[0].size // size
    for i in range(3):
        _, grads = state.value_and_grad(loss_fn)(*batch(i, dist.get_rank()))
        old = state.extra

        def extra(params, old=old):
            ema = tree.tree_map(lambda a, p: a.lerp(p, 0.25), old["ema"], params)
            return old | {"ema": ema, "seen": old["seen"] + 6}

        state = state.apply_gradients(grads, extra=extra)
    loss = zerofn.value_and_grad(loss_fn)(state.extra["ema"], *batch(9))[0]
    return unshard(state.extra), loss


@pytest.mark.parametrize("stage", STAGES)
def test_a_moving_average_in_extra(ranks, stage):
    net, ema = Net(), params()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for i in range(3):
        x, y = (torch.cat(t) for t in zip(batch(i, 0), batch(i, 1), strict=True))
        optimizer.zero_grad()
        mse_loss(net(x), y).backward()
        optimizer.step()
        ema = {k: ema[k].lerp(p.detach(), 0.25) for k, p in net.named_parameters()}
    for found, loss in ranks(2, moving_average, stage):
        for key, want in ema.items():
            torch.testing.assert_close(found["ema"][key], want, rtol=1e-5, atol=1e-6)
        assert found["seen"].item() == 18 and [x.item() for x in found["position"]] == [1, 2]
        torch.testing.assert_close(loss, loss_fn(ema, *batch(9)), rtol=1e-5, atol=0)


def _with_statistics(order, on_nonfinite):
    """A step that replaces `extra` by an average, a count and the inputs' mean, before, after or with the update."""

    def step(state, batch):
        (loss, mean), grads = state.value_and_grad(lambda p, x, y: (loss_fn(p, x, y), x.mean(0)), True)(*batch)
        kept, seen = state.extra["average"].lerp(loss, 0.5), state.extra["seen"] + len(batch[0])
        extra = {"average": kept, "seen": seen, "mean": mean, "ema": state.extra["ema"]}
        with_ema = lambda params: {  # noqa: E731
            **extra,
            "ema": tree.tree_map(lambda a, p: a.lerp(p, 0.5), extra["ema"], params),
        }
        if order == "with":
            return state.apply_gradients(grads, extra=with_ema, on_nonfinite=on_nonfinite), loss
        if order == "before":
            state = state.replace(extra=extra)
        checks = on_nonfinite == "skip"
        warned = pytest.warns(DeprecationWarning, match="apply_gradients.grads, extra=new") if checks else nullcontext()
        with warned as found:
            state = state.apply_gradients(grads, on_nonfinite=on_nonfinite)
            state = state if order == "before" else state.replace(extra=with_ema(state.params))
        assert not checks or found[0].filename == __file__
        return state, loss

    return step


def statistics_over_a_skipped_step(stage, order, compiled, on_nonfinite):
    extra = {"average": torch.zeros(()), "seen": 0, "mean": torch.zeros(5), "ema": params()}
    state = TrainState.create(params=params(), tx=optim.sgd(0.1), extra=extra)
    state = state if stage is None else shard(state, stage=stage)
    step = _with_statistics(order, on_nonfinite)
    step, found = zerofn.compile(step, donate=False) if compiled else step, []
    for k, bad in enumerate((False, True, False)):
        x, y = batch(k, 0)
        state, _ = step(state, (x * torch.inf if bad else x, y))
        found.append(unshard(state.extra) if stage is not None else state.extra)
    return found


@pytest.mark.part(stage=[3], order=["before", "with"])
@pytest.mark.part(stage=[0], order=["after"], compiled=[True])
@pytest.mark.parametrize("order", ["before", "after", "with"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("stage", [None, 0, 3])
def test_a_skipped_step_keeps_the_statistics_in_extra(ranks, stage, compiled, order):
    for found in ranks(1 if stage is None else 2, statistics_over_a_skipped_step, stage, order, compiled, "skip"):
        first, skipped, last = found
        for name in ("average", "mean", "ema"):
            assert_same_trees(skipped[name], first[name])
        assert [int(x["seen"]) for x in found] == [6, 12, 18]
        assert all(torch.as_tensor(x).isfinite().all() for x in tree.leaves(last))
        assert not torch.equal(last["average"], first["average"]) and not torch.equal(last["mean"], first["mean"])


def test_without_a_check_extra_is_what_the_step_says():
    for compiled in (False, True):
        _, second, _ = statistics_over_a_skipped_step(None, "with", compiled, "ignore")
        assert not second["mean"].isfinite().any() and not second["average"].isfinite()


def test_extra_may_change_its_structure_in_a_skipped_step():
    state = TrainState.create(params=params(), tx=optim.sgd(0.1), extra={"a": torch.zeros(2), "b": torch.zeros(3)})
    grads = tree.tree_map(lambda p: p * torch.nan, state.params)
    bad = state.apply_gradients(grads, extra={"a": torch.ones(2), "b": torch.ones(4), "c": torch.ones(())})
    assert bad.extra["a"].tolist() == [0, 0] and bad.extra["b"].tolist() == [1] * 4 and bad.extra["c"] == 1


def test_create():
    state = TrainState.create(params=dict(NET.named_parameters()), tx=optim.adamw(SCHEDULE), seed=4)
    assert (state.step.item(), state.skipped.item(), state.rng.item()) == (0, 0, 4)
    assert not any(p.requires_grad for p in tree.leaves(state.params))
    assert state.learning_rate == 0.0
    later = state.apply_gradients(tree.tree_map(torch.ones_like, state.params))
    assert later.learning_rate == pytest.approx(0.05) and state.step.item() == 0
    assert not torch.equal(later.rng_at(), state.rng_at()) and torch.equal(later.rng, state.rng)
    with pytest.raises(TypeError, match="tx must be a zerofn.optim.GradientTransformation .* got float"):
        TrainState.create(params=params(), tx=0.1)
    assert tree.structure(state) == tree.structure(TrainState.create(params=params(), tx=optim.adamw(SCHEDULE)))
    assert tree.structure(state) != tree.structure(TrainState.create(params=params(), tx=optim.adamw(0.2)))


def test_a_state_that_was_given_away_says_so():
    old = shard(TrainState.create(params=params(), tx=TRANSFORMATIONS["adamw"](), extra=params()))
    new, _ = zerofn.compile(lambda s, xy: (s.apply_gradients(s.value_and_grad(loss_fn)(*xy)[1]), {}))(old, batch(0))
    assert "params: Sharded(donated: This state was donated to" in repr(old)
    assert "opt_state: tuple with 2 Sharded trees, 2 donated, 0 bytes here" in repr(old)
    assert "donated" not in repr(new)


def looks():
    extra = {"position": 3, "buffers": {"mean": torch.zeros(7)}, "note": None}
    state = TrainState.create(params=params(), tx=TRANSFORMATIONS["adamw"](), extra=extra)
    return repr(state), repr(shard(state, precision="fp16"))


def test_the_repr_of_a_state_says_what_it_holds(ranks):
    for plain, cut in ranks(2, looks):
        for text in (plain, cut):
            assert text.startswith("TrainState(\n  step: 0\n  skipped: 0\n  params: ")
            shown = " ".join(text.split())
            assert "tx: chain(clip_by_global_norm(max_norm=1.0), adamw(learning_rate=warmup_cosine_decay_s" in shown
            assert "object at 0x" not in text
            assert len(text) < 1500 and max(map(len, text.splitlines())) < 150
        assert "holds" in cut and "layers.0" in cut and "loss_scale: DynamicLossScale(65536.0)\n" in cut
        assert "opt_state:" in cut and "bytes here" in cut


# --- a sharded state with other static fields


def linear_pair():
    return {k: torch.full((4, 4), 1.0 + i) for i, k in enumerate(("body.w", "head.w"))}


def two_layers(tx, frozen=None):
    return TrainState.create(params=linear_pair(), tx=tx, frozen=frozen)


def train_pair(state, compiled=True):
    step = step_with(lambda p, x: (x @ p["body.w"] @ p["head.w"]).sum())

    return (zerofn.compile(step) if compiled else step)(state, torch.ones(1, 4))[0]


def body(name):
    return name.startswith("body.")


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("before, after", [(None, body), (body, None), (body, lambda name: not body(name))])
def test_another_frozen_is_refused_with_the_way_out(stage, before, after):
    state = train_pair(shard(two_layers(optim.adamw(0.1), before), stage=stage))
    with pytest.raises(ValueError, match=r"the sharded parameters have .*, but `frozen` now .* again") as caught:
        state.replace(frozen=after)
    bare = dataclasses.replace(state, frozen=after)
    with pytest.raises(ValueError, match="the sharded parameters have"):
        train_pair(bare)
    same = state.replace(frozen=None if before is None else lambda name: before(name))  # the same choice, written anew
    way_out = str(caught.value).partition("new moments: ")[2].removesuffix(".")
    anew = eval(way_out, {"zerofn": zerofn, "state": state, "frozen": after})
    assert torch.equal(anew.step, torch.ones((), dtype=torch.int64))
    plain = two_layers(optim.adamw(0.1), after).replace(params=unshard(state.params))
    assert_same_trees(unshard(train_pair(anew).params), train_pair(plain, compiled=False).params)
    assert (unshard(train_pair(same).params)["body.w"] == 1).all() == (before is not None)


def test_parameters_with_other_frozen_units_are_refused():
    state = shard(two_layers(optim.sgd(0.1)))
    with pytest.raises(ValueError, match="the sharded parameters have 'body.w' as frozen, but `frozen` now"):
        state.replace(params=shard(two_layers(optim.sgd(0.1), body)).params)


def test_a_state_made_of_sharded_parameters_leaves_their_frozen_units():
    params = shard(two_layers(optim.sgd(0.1), body)).params
    after = unshard(train_pair(TrainState.create(params=params, tx=optim.adamw(0.1, weight_decay=0.5))).params)
    assert (after["body.w"] == 1).all() and (after["head.w"] != 2).all()


def test_moments_that_shard_alone_stores_are_refused_with_the_way_out():
    state, tx = train_pair(shard(two_layers(optim.adamw(0.1)))), optim.adamw(0.1, moments="8bit")
    with pytest.raises(ValueError, match="the new tx stores its moments 'mu' in 8-bit blocks") as caught:
        state.replace(tx=tx, opt_state=tx.init(state.params))
    way_out = str(caught.value).partition("new moments: ")[2].removesuffix(".")
    anew = eval(way_out, {"zerofn": zerofn, "state": state, "tx": tx})
    assert train_pair(anew).opt_state.mu.stored[0].storage.codec.note == " in 8-bit blocks"
    other = optim.lion(0.1)
    plain = TrainState.create(params=unshard(state.params), tx=other)
    assert_same_trees(
        unshard(train_pair(state.replace(tx=other, opt_state=other.init(state.params))).params),
        train_pair(plain, compiled=False).params,
    )
