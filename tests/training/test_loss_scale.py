"""Loss scales against jmp's rules in closed form, torch's GradScaler and DeepSpeed's loop."""

import pytest
import torch

from zerofn import DynamicLossScale, NoLossScale, StaticLossScale, tree

TREE = {"a": torch.tensor([1.0, -2.0]), "b": (torch.tensor(3.0, dtype=torch.float64), None)}


def after(scale, finites):
    """The scales after each finite check."""
    out = []
    for finite in finites:
        scale = scale.adjust(torch.tensor(finite))
        out.append(scale.loss_scale.item())
    return out


@pytest.mark.parametrize("scale", [StaticLossScale(1024.0), DynamicLossScale(1024.0)])
def test_scale_and_unscale(scale):
    scaled = scale.scale(TREE)
    assert torch.equal(scaled["a"], TREE["a"] * 1024) and scaled["b"][0].dtype == torch.float64
    back = scale.unscale(scaled)
    assert torch.equal(back["a"], TREE["a"]) and torch.equal(back["b"][0], TREE["b"][0])
    assert scale.loss_scale.dtype == torch.float32 and scale.loss_scale.shape == ()


def test_no_scale():
    scale = NoLossScale()
    assert scale.scale(TREE) is TREE and scale.unscale(TREE) is TREE and scale.loss_scale == 1
    assert scale.adjust(torch.tensor(False)) == scale
    assert tree.leaves(scale) == []


def test_static_stays():
    assert after(StaticLossScale(8.0), [True, False, True]) == [8, 8, 8]


def test_grows_after_a_period_of_finite_steps_and_shrinks_at_once():
    scale = DynamicLossScale(8.0, period=3)
    finites = [True] * 4 + [False] + [True] * 3 + [False, False]
    assert after(scale, finites) == [8, 8, 16, 16, 8, 8, 8, 16, 8, 4]


def test_hysteresis_counts_the_step_that_shrinks():
    assert after(DynamicLossScale(8.0, hysteresis=1), [False, False]) == [4, 2]
    assert after(DynamicLossScale(8.0, hysteresis=3), [False, True, False, False, False]) == [8, 8, 8, 4, 2]
    restored = DynamicLossScale(8.0, hysteresis=2, period=1)
    assert after(restored, [False, False, True, False, False]) == [8, 4, 8, 8, 4]


def test_bounds():
    assert after(DynamicLossScale(4.0, min_loss_scale=3.0), [False] * 3) == [3, 3, 3]
    assert after(DynamicLossScale(2.0**127, period=1), [True, True]) == [2.0**127] * 2
    assert after(DynamicLossScale(1.0, factor=4.0, period=1), [True, True, False]) == [4, 16, 4]


class JmpScale:
    """jmp 0.0.4, `DynamicLossScale.adjust`, on floats."""

    def __init__(self, scale, period, factor, least):
        self.scale, self.counter, self.period, self.factor, self.least = scale, 0, period, factor, least

    def adjust(self, finite):
        if finite:
            grows = self.counter == self.period - 1
            if grows and self.scale * self.factor < float("inf"):
                self.scale *= self.factor
            self.counter = (self.counter + 1) % self.period
        else:
            self.counter, self.scale = 0, max(self.least, self.scale / self.factor)
        return self.scale


class DeepSpeedScale:
    """DeepSpeed's `DynamicLossScaler.update_scale`, without `consecutive_hysteresis`."""

    def __init__(self, scale, window, factor, least, hysteresis):
        self.scale, self.window, self.factor, self.least = scale, window, factor, least
        self.hysteresis = self.left = hysteresis
        self.last, self.now = -1, 0

    def adjust(self, finite):
        if not finite:
            if self.left == 1:
                self.scale = max(self.scale / self.factor, self.least)
            else:
                self.left -= 1
            self.last = self.now
        elif (self.now - self.last) % self.window == 0:
            self.left = self.hysteresis
            self.scale *= self.factor
        self.now += 1
        return self.scale


def finites(seed, n=200):
    return (torch.rand(n, generator=torch.Generator().manual_seed(seed)) > 0.15).tolist()


@pytest.mark.parametrize("seed, period, factor", [(0, 4, 2.0), (1, 2, 2.0), (2, 7, 4.0)])
def test_equals_jmp(seed, period, factor):
    jmp = JmpScale(2.0**10, period, factor, 0.5)
    ours = DynamicLossScale(2.0**10, period=period, factor=factor, min_loss_scale=0.5)
    assert after(ours, finites(seed)) == [jmp.adjust(v) for v in finites(seed)]


@pytest.mark.parametrize("seed, hysteresis", [(3, 1), (4, 2), (5, 3)])
def test_equals_deepspeed_with_hysteresis(seed, hysteresis):
    deepspeed = DeepSpeedScale(2.0**10, 5, 2.0, 0.25, hysteresis)
    ours = DynamicLossScale(2.0**10, period=5, min_loss_scale=0.25, hysteresis=hysteresis)
    assert after(ours, finites(seed)) == [deepspeed.adjust(v) for v in finites(seed)]


def test_equals_torchs_grad_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    theirs = []
    for finite in finites(6, 60):
        weight.grad = torch.ones(1) if finite else torch.full((1,), float("inf"))
        scaler.scale(torch.ones(()))  # makes the scale, as a training loop does
        scaler.step(optimizer)
        scaler.update()
        theirs.append(scaler.get_scale())
    assert after(DynamicLossScale(2.0**8, period=3, min_loss_scale=0.0), finites(6, 60)) == theirs


def test_is_a_tree_that_keeps_everything():
    scale = DynamicLossScale(64.0, period=5, factor=4.0, min_loss_scale=2.0, hysteresis=3)
    scale = scale.adjust(torch.tensor(False)).adjust(torch.tensor(True))
    leaves, treedef = tree.flatten(scale)
    back = tree.unflatten(treedef, leaves)
    assert (back.period, back.factor, back.min_loss_scale, back.hysteresis) == (5, 4.0, 2.0, 3)
    assert [x.item() for x in leaves] == [64.0, 1, 2]
    assert all(isinstance(x, torch.Tensor) and x.shape == () for x in leaves)
    assert tree.tree_map(lambda x: x, scale).left.item() == 2


def test_asks_nothing_of_the_device():
    """Captured with fake tensors, where asking for a value raises."""
    from zerofn._torch_compat import make_fx

    def step(finite):
        scale = DynamicLossScale(8.0, period=1).adjust(finite)
        return scale.loss_scale, scale.counter, scale.left

    captured = make_fx(step, tracing_mode="fake")(torch.tensor(True))
    assert [x.item() for x in captured(torch.tensor(True))] == [16, 0, 1]
    assert [x.item() for x in captured(torch.tensor(False))] == [4, 0, 1]


def test_unscaled_float16_becomes_float32():
    """Most gradients that a scale brought through float16 do not fit it without."""
    scale = StaticLossScale(2.0**15)
    small = torch.tensor([2.0**-10], dtype=torch.float16)
    out = scale.unscale({"g": small, "b": small.bfloat16()})
    assert out["g"].dtype == torch.float32 and out["g"].item() == 2.0**-25
    assert out["b"].dtype == torch.bfloat16
