"""Schedules against optax's values, DeepSpeed's formulas, and what a captured step asks of them."""

import math

import jax
import optax
import pytest
import torch

from zerofn import optim
from zerofn._torch_compat import make_fx

COUNTS = [0, 1, 2, 3, 4, 5, 9, 10, 11, 19, 20, 21, 50, 99, 100, 101, 1000, 10**6]
CYCLE = {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 5, "decay_steps": 20}
CASES = {
    "constant_schedule": [(0.3,)],
    "linear_schedule": [(0.1, 1.0, 20), (1.0, 0.0, 10, 5), (0.5, 1.0, 0), (0.5, 1.0, 10, -3)],
    "polynomial_schedule": [(1.0, 0.1, 2, 100), (0.1, 1.0, 0.5, 20, 3)],
    "exponential_decay": [
        (1.0, 10, 0.9),
        (1.0, 10, 0.9, 5, True),
        (1.0, 3, 0.5, 0, False, 0.1),
        (1.0, 500, 1.5, 0, False, 2.0),
        (1.0, 0, 0.9),
        (1.0, 10, 0.0),
    ],
    "cosine_decay_schedule": [(0.1, 100), (0.1, 20, 0.2, 2.0)],
    "piecewise_constant_schedule": [(1.0, {20: 0.1, 10: 0.5}), (1.0,)],
    "warmup_constant_schedule": [(0.0, 1.0, 10)],
    "warmup_cosine_decay_schedule": [(0.0, 1.0, 10, 100, 0.1), (0.1, 0.0, 10, 100), (0.0, 1.0, 10, 100, 0.0, 2.0)],
    "cosine_onecycle_schedule": [(100, 1.0), (50, 0.1, 0.5, 10.0, 100.0), (20, 0.5, 0.0), (1, 0.5)],
    "sgdr_schedule": [([CYCLE, CYCLE | {"peak_value": 0.5, "decay_steps": 30, "end_value": 0.1}],), ([CYCLE],)],
    "warmup_exponential_decay_schedule": [(0.0, 1.0, 10, 20, 0.5), (0.0, 1.0, 10, 20, 0.5, 5, True, 0.2)],
}
ALL = [(name, args) for name, cases in CASES.items() for args in cases]
OURS = [*ALL, ("warmup_lr", (0.0, 0.1, 10)), ("warmup_decay_lr", (100, 0.0, 0.1, 10, "linear"))]


@pytest.mark.parametrize(("name", "args"), ALL)
def test_values_are_those_of_optax(name, args):
    ours = getattr(optim, name)(*args)
    with jax.enable_x64(True):
        other = getattr(optax, name)(*args)
        expected = [float(other(count)) for count in COUNTS]
    assert [ours(count) for count in COUNTS] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    tensors = [ours(torch.tensor(count)) for count in COUNTS]
    assert all(x.dtype == torch.float64 and x.shape == () for x in tensors)
    assert [x.item() for x in tensors] == [ours(count) for count in COUNTS]


def test_joined_schedules_count_from_their_boundary():
    parts = [optim.linear_schedule(0.0, 1.0, 5), optim.constant_schedule(2.0), optim.exponential_decay(1.0, 3, 0.5)]
    others = [optax.linear_schedule(0.0, 1.0, 5), optax.constant_schedule(2.0), optax.exponential_decay(1.0, 3, 0.5)]
    ours, other = optim.join_schedules(parts, [5, 20]), optax.join_schedules(others, [5, 20])
    assert [ours(c) for c in COUNTS] == pytest.approx([float(other(c)) for c in COUNTS], rel=1e-6, abs=1e-9)


def deepspeed(count, kind, low, high, steps, total=None):
    """The rate of the update after `count` others, as DeepSpeed's scheduler sets it: it steps afterwards."""
    i, n = count - 1, max(2, steps)
    if i < 0:
        return low
    if i < n:
        gamma = math.log(i + 1) / math.log(n) if kind == "log" else i / n
    else:
        gamma = 1.0 if total is None else max(0.0, (total - i) / max(1, total - n))
    return low + (high - low) * gamma


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("steps", [1, 10])
def test_deepspeeds_schedules_by_formula(kind, steps):
    warmup = optim.warmup_lr(0.01, 0.1, steps, kind)
    decay = optim.warmup_decay_lr(50, 0.01, 0.1, steps, kind)
    for count in COUNTS:
        assert warmup(count) == pytest.approx(deepspeed(count, kind, 0.01, 0.1, steps), rel=1e-12)
        assert decay(count) == pytest.approx(deepspeed(count, kind, 0.01, 0.1, steps, 50), rel=1e-12)
    assert warmup(0) == warmup(1) == 0.01  # both of the first two updates run at the minimum


@pytest.mark.parametrize(("name", "args"), OURS)
def test_they_are_captured_with_fake_tensors(name, args):
    schedule = getattr(optim, name)(*args)
    gm = make_fx(lambda count: schedule(count), tracing_mode="fake")(torch.tensor(3))
    for count in COUNTS:
        assert gm(torch.tensor(count)).item() == schedule(count)


@pytest.mark.parametrize(("name", "args"), OURS)
def test_equal_when_name_and_arguments_are(name, args):
    a, b = getattr(optim, name)(*args), getattr(optim, name)(*args)
    assert a == b and hash(a) == hash(b) and optim.sgd(a) == optim.sgd(b)
    assert a != optim.constant_schedule(0.1234)
    assert optim.sgd(a) != optim.sgd(optim.constant_schedule(0.1234))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optim.cosine_decay_schedule(0.1, 0), "decay_steps must be positive, got 0"),
        (lambda: optim.warmup_cosine_decay_schedule(0.0, 1.0, 10, 10), "must be more than warmup_steps=10; got 10"),
        (lambda: optim.piecewise_constant_schedule(1.0, {3: -1.0}), "at 3: scale must be zero or more"),
        (lambda: optim.join_schedules([optim.constant_schedule(1.0)], [3]), "1 schedules need 0 boundaries"),
        (lambda: optim.warmup_lr(warmup_num_steps=0), "warmup_num_steps must be positive"),
        (lambda: optim.warmup_lr(warmup_type="cosine"), "must be 'log' or 'linear', got 'cosine'"),
        (lambda: optim.warmup_decay_lr(0), "total_num_steps must be positive"),
        (lambda: optim.cosine_onecycle_schedule(0, 1.0), "transition_steps must be positive, got 0"),
        (lambda: optim.cosine_onecycle_schedule(9, 1.0, 1.0), r"pct_start must lie in \[0, 1\), got 1.0"),
        (lambda: optim.sgdr_schedule([]), "at least one dict, the arguments of a cycle; got an empty list"),
        (lambda: optim.sgdr_schedule([CYCLE | {"decay_steps": 5}]), "must be more than warmup_steps=5; got 5"),
        (lambda: optim.exponential_decay(1.0, 10, -0.5), "decay_rate must be zero or more"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_what_is_no_number_or_schedule_is_refused():
    with pytest.raises(TypeError, match="init_value must be a number, got 'x'"):
        optim.linear_schedule("x", 1.0, 10)
    with pytest.raises(TypeError, match=r"sgdr_schedule: cosine_kwargs\[1\]: .*'steps'"):
        optim.sgdr_schedule([CYCLE, {"steps": 3}])
    with pytest.raises(TypeError, match=r"For a constant, write constant_schedule\(0.1\)"):
        optim.join_schedules([0.1, optim.constant_schedule(1.0)], [3])
